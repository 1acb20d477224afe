"""Nested dicts, and the flat named tensors and JSON values that files hold.

Flat names are paths joined by "/", with "~" and "/" inside a key escaped as in JSON Pointer (RFC 6901). Names of a
flat state (a model's parameters) therefore stay as they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from torch import Tensor

State = Mapping[str, Any]


def flatten(state: State, where: str = "state") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split `state` into its tensors, by flat name, and the rest of the tree.

    A tensor leaves None behind in a list. Raises TypeError, naming the place, for anything but tensors, None, bool,
    int, float, str, lists of those, which tuples become, and dicts with string keys.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        place = "/".join((where, *path))
        if isinstance(node, Mapping):
            rest = {}
            for key, value in node.items():
                if not isinstance(key, str):
                    raise TypeError(f"{place}: the key {key!r} is not a string")
                inner = (*path, _escape(key))
                if isinstance(value, Tensor):
                    tensors["/".join(inner)] = value
                else:
                    rest[key] = walk(value, inner)
            return rest
        if isinstance(node, (list, tuple)):
            return [walk(item, (*path, str(index))) for index, item in enumerate(node)]
        if isinstance(node, Tensor):  # in a list
            tensors["/".join(path)] = node
            return None
        if node is None or type(node) in (bool, int, float, str):
            return node
        kind = f"{type(node).__module__}.{type(node).__name__}".removeprefix("builtins.")
        raise TypeError(
            f"{place} is a {kind}; a state holds tensors, Python's numbers and strings, None, lists of those, and "
            "dicts with string keys"
        )

    tree: dict[str, Any] = walk(state, ())
    return tensors, tree


def unflatten(tensors: Mapping[str, Tensor], tree: State) -> dict[str, Any]:
    """Put back together what `flatten` took apart."""

    def copied(node: Any) -> Any:
        if isinstance(node, list):
            return [copied(item) for item in node]
        return {key: copied(value) for key, value in node.items()} if isinstance(node, Mapping) else node

    state: dict[str, Any] = copied(tree)
    for name, tensor in tensors.items():
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        node: Any = state
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[int(last) if isinstance(node, list) else last] = tensor
    return state


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def plain(config: Any) -> Any:
    """Return `config`, of nested tables and lists, as a state holds it: the dates and times that TOML has as text."""
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    return config.isoformat() if isinstance(config, (datetime.date, datetime.time)) else config
