"""Compares weights, logged values and states, to the last bit."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hookdiff.loop import Loop


def weights(loop: Loop) -> dict[str, Tensor]:
    """Return a copy of the model's state."""
    return {name: value.detach().clone() for name, value in loop.model.state_dict().items()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Raise AssertionError, naming the first tensor that is not exactly equal."""
    for difference in differences(one, other):
        raise AssertionError(difference)


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str] = ("the first", "the second")
) -> Iterator[str]:
    """Yield a sentence about each value that is not the same in both; values are tensors, numbers, strings or None.

    A NaN equals a NaN. `names` are those of `one` and `other` in the sentences.
    """
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield f"{name} is only in {names[name in other]}"
            continue
        here, there = one[name], other[name]
        if isinstance(here, Tensor) and isinstance(there, Tensor) and _kind(here) == _kind(there):
            if not ((here == there) | ((here != here) & (there != there))).all():
                yield f"{name} differs by {(here.double() - there.double()).abs().max():g}"
        elif (pair := (_kind(here), _kind(there)))[0] != pair[1]:
            yield f"{name} is {pair[0]} in {names[0]}, and {pair[1]} in {names[1]}"


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings and lists, each with its path."""
    if isinstance(tree, Mapping | list):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, f"{name}/{key}" if name else str(key))
    else:
        yield name, tree


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return repr(value)
