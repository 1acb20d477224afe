"""Names of parametrised weights (`torch.nn.utils.parametrize`) in the state of a model."""

import re

_ORIGINAL = re.compile(r"(^|\.)parametrizations\.(\w+)\.original$")
_INSIDE = re.compile(r"(^|\.)parametrizations\.\w+\.\d+\.")


def plain_name(name: str) -> str:
    """Return the name that a parameter has without its parametrisation, such as "a.weight"."""
    return _ORIGINAL.sub(r"\1\2", name)


def is_inside(name: str) -> bool:
    """Return whether the tensor `name` belongs to a parametrisation itself; a plain model has no such tensor."""
    return _INSIDE.search(name) is not None
