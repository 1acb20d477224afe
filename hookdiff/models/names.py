"""Names of modules, and of parametrised weights (`torch.nn.utils.parametrize`) in the state of a model."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from torch import nn

from hookdiff.errors import UserError, nearest

_ORIGINAL = re.compile(r"(^|\.)parametrizations\.(\w+)\.original$")
_INSIDE = re.compile(r"(^|\.)parametrizations\.\w+\.\d+\.")


def plain_name(name: str) -> str:
    """Return the name that a parameter has without its parametrisation, such as "a.weight"."""
    return _ORIGINAL.sub(r"\1\2", name)


def is_inside(name: str) -> bool:
    """Return whether the tensor `name` belongs to a parametrisation itself; a plain model has no such tensor."""
    return _INSIDE.search(name) is not None


def modules_named(model: nn.Module, patterns: Collection[str], key: str) -> dict[str, nn.Module]:
    """Return the modules of `model` that match one of `patterns`, by name, in the model's order.

    A `*` stands for any letters between two dots: "blocks.*" matches the blocks, not their layers.

    Raises:
        UserError: for a pattern that matches no module; the message names `key`.
    """
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in named):
            raise UserError(f"{key}: {pattern!r} matches no module{nearest(pattern, named)}")
    return {name: module for name, module in named.items() if any(_matches(name, pattern) for pattern in patterns)}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
