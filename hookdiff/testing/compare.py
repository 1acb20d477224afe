"""Compares the weights, logged values, states and files of two runs, to the last bit or within a tolerance."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from attrs import define
from torch import Tensor

from hookdiff.disk.tree import State, flatten
from hookdiff.loop.loop import Loop

_ABSENT: Any = object()  # in place of a value that only the other run has
_DIGEST = "tensor "  # the start of a text that stands for a tensor
_SHOWN = 5  # most facts in a message
_WIDTH = 100  # characters of a value that are shown
_BEFORE = 20  # characters that are shown before the first difference


class ValueKey(NamedTuple):
    """The name of a value of a run."""

    kind: Literal["weight", "logged number", "logged picture", "saved value", "field", "file"]
    name: str  # a path, as in `flatten`; the path of a field begins with its plugin
    step: float = inf  # the update of the value; infinite for a value of the whole run

    @property
    def plugin(self) -> str:
        """The plugin of the field or saved value; "" if it has none."""
        owner = {"field": f"plugins/{self.name}", "saved value": self.name}.get(self.kind, "").split("/")
        return unescaped(owner[1]) if owner[0] == "plugins" else ""

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}" + (f" after step {self.step}" if self.step < inf else "")


@define(frozen=True)
class Difference:
    """A value that is not the same in two runs, or that only one of them has."""

    key: Any  # a ValueKey, or a text
    here: Any
    there: Any

    @property
    def is_text(self) -> bool:
        """Whether both values are texts, such as names or times."""
        return all(isinstance(value, str) and not is_digest(value) for value in (self.here, self.there))

    def describe(self, first: str, second: str) -> str:
        """Return a sentence with the names of both runs; long values are shortened to the part that differs."""
        if self.here is _ABSENT or self.there is _ABSENT:
            return f"{self.key} is only in {second if self.here is _ABSENT else first}"
        here, there = self._texts()
        if isinstance(self.here, Tensor) and here == there:
            size = (self.here.double() - self.there.double()).abs().max()
            return f"{self.key} differs by {size:g} between {first} and {second}"
        begin = 0
        if max(len(here), len(there)) > _WIDTH:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False))
            begin = max(0, len(list(same)) - _BEFORE)
        end = begin + _WIDTH
        here, there = ("..." * bool(begin) + text[begin:end] + "..." * (len(text) > end) for text in (here, there))
        return f"{self.key} is {here} in {first}, and {there} in {second}"

    def _texts(self) -> tuple[str, str]:
        return _as_text(self.here), _as_text(self.there)

    def __str__(self) -> str:
        """Return the name of the value, with both values if they are short."""
        values = f" ({' and '.join(self._texts())})"
        return f"{self.key}{values * (len(values) < _WIDTH // 2)}"


def all_differences(here: Mapping[Any, Any], there: Mapping[Any, Any], tolerance: float = 0.0) -> list[Difference]:
    """Return the values that differ between `here` and `there`, by more than a share `tolerance` of their size.

    A NaN equals a NaN. Values with a `ValueKey` are in the order of their steps.
    """
    keys = sorted(dict.fromkeys((*here, *there)), key=lambda key: key.step if isinstance(key, ValueKey) else inf)
    differences = (Difference(key, here.get(key, _ABSENT), there.get(key, _ABSENT)) for key in keys)
    return [each for each in differences if not _is_same(each.here, each.there, tolerance)]


def _is_same(here: Any, there: Any, tolerance: float) -> bool:
    if here is there or here is _ABSENT or there is _ABSENT:
        return here is there
    if tolerance:
        first, second = (torch.as_tensor(value, dtype=torch.float64) for value in (here, there))
        size = max([1.0, *(float(value.abs().max()) for value in (first, second) if value.numel())])
        return torch.allclose(first, second, rtol=0.0, atol=tolerance * size, equal_nan=True)
    if isinstance(here, Tensor) and isinstance(there, Tensor) and _as_text(here) == _as_text(there):
        return bool(((here == there) | ((here != here) & (there != there))).all())
    return repr(here) == repr(there)


def _as_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return value if isinstance(value, str) else "nothing" if value is _ABSENT else repr(value)


def fail(problem: str, facts: Iterable[str]) -> None:
    """Raise AssertionError with the problem and the first of the `facts`, if there are any."""
    if shown := list(facts):
        more = [f"and {len(shown) - _SHOWN} more"] * (len(shown) > _SHOWN)
        raise AssertionError("\n  ".join([f"{problem}; first:", *shown[:_SHOWN], *more]))


def weights(loop: Loop) -> dict[str, Tensor]:
    """Return a copy of the model's state dict."""
    return {name: value.detach().clone() for name, value in loop.model.state_dict().items()}


def assert_same(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> None:
    """Raise AssertionError, naming the first tensor that is not exactly equal."""
    for difference in all_differences(here, there):
        raise AssertionError(difference.describe("the first", "the second"))


def of_state(state: State) -> dict[ValueKey, Any]:
    """Return the values of a nested state; its tensors are not copied."""
    tensors, tree = flatten(state)
    return {ValueKey("saved value", path): value for path, value in (dict(leaves(tree)) | tensors).items()}


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings and lists, each with its path, as `flatten` names it."""
    if isinstance(tree, Mapping) or (isinstance(tree, list) and tree):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, f"{name}/{escaped(str(key))}" if name else escaped(str(key)))
    else:
        yield name, tree


def escaped(key: str) -> str:
    """Return `key` as a part of a path."""
    return key.replace("~", "~0").replace("/", "~1")


def unescaped(part: str) -> str:
    """Return the key of a part of a path: the reverse of `escaped`."""
    return part.replace("~1", "/").replace("~0", "~")


def is_digest(value: Any) -> bool:
    """Return whether `value` is a result of `digest`."""
    return isinstance(value, str) and value.startswith(_DIGEST)


def digest(tensor: Tensor) -> str:
    """Return the type, shape and first entries of a tensor, and a hash of all its bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    shape = f"{_DIGEST}{str(data.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if len(data) == 1:
        return f"{shape} {data.item()!r}"
    code = hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()[:16]
    return f"{shape} {', '.join(map(repr, data[:2].tolist()))}, ... {code}"
