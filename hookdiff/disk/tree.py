"""Nested states, split into flat named tensors and a tree of JSON values for files.

A flat name is the path of keys joined by "/". Inside a key, "~" and "/" are escaped as in JSON Pointer (RFC 6901).
The names of a flat state, such as a model's parameters, stay the same.
"""

import copy
import datetime
from collections.abc import Mapping
from typing import Any

from torch import Tensor

State = Mapping[str, Any]


def flatten(state: State, where: str = "state") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of `state` by flat name, and the tree of its other values.

    The tree has lists in place of tuples, and None in place of a tensor in a list.

    Raises:
        TypeError: with the place of a value that is no tensor, None, bool, int, float, str, list, tuple, or dict with
            string keys.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, prefix: str) -> Any:
        if isinstance(node, Mapping):
            tree = {}
            for key, value in node.items():
                if not isinstance(key, str):
                    raise TypeError(f"{place(prefix)}: the key {key!r} is not a string")
                name = prefix + key.replace("~", "~0").replace("/", "~1")
                if isinstance(value, Tensor):
                    tensors[name] = value
                else:
                    tree[key] = walk(value, f"{name}/")
            return tree
        if isinstance(node, (list, tuple)):
            return [walk(item, f"{prefix}{index}/") for index, item in enumerate(node)]
        if isinstance(node, Tensor):  # in a list
            tensors[prefix[:-1]] = node
            return None
        if node is None or type(node) in (bool, int, float, str):
            return node
        kind = f"{type(node).__module__}.{type(node).__name__}".removeprefix("builtins.")
        expected = "tensors, Python's numbers and strings, None, lists of them, and dicts with string keys"
        raise TypeError(f"{place(prefix)} is a {kind}; a state holds {expected}")

    def place(prefix: str) -> str:
        return f"{where}/{prefix}".removesuffix("/")

    return tensors, walk(state, "")


def unflatten(tensors: Mapping[str, Tensor], tree: State) -> dict[str, Any]:
    """Return the state that `flatten` has split; `tree` is copied, the tensors are not."""
    state: dict[str, Any] = copy.deepcopy(dict(tree))
    for name, tensor in tensors.items():
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        node: Any = state
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[int(last) if isinstance(node, list) else last] = tensor
    return state


def plain(config: Any) -> Any:
    """Return a nested `config` with text in place of the dates and times of TOML, so that a state may hold it."""
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    return config.isoformat() if isinstance(config, (datetime.date, datetime.time)) else config
