"""Names in the state of a model whose weights are parametrised (`torch.nn.utils.parametrize`)."""

from __future__ import annotations

import re

_ORIGINAL = re.compile(r"(^|\.)parametrizations\.(\w+)\.original$")
_INSIDE = re.compile(r"(^|\.)parametrizations\.\w+\.\d+\.")


def plain_name(name: str) -> str:
    """Return the name that a parameter has without a parametrisation: "a.weight", where torch keeps its original."""
    return _ORIGINAL.sub(r"\1\2", name)


def is_inside(name: str) -> bool:
    """Whether the tensor `name` belongs to a parametrisation itself, so that a plain model has no such tensor."""
    return _INSIDE.search(name) is not None
