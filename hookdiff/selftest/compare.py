"""What is not the same in two runs: in what they logged, in their states, in their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from attrs import define
from safetensors import safe_open
from torch import Tensor

from hookdiff.log import MACHINE

# The config is what we changed ourselves, and the length of a file in which times are written is the machine's.
NOT_COMPARED = ("config/", "plugins/metrics/")

FILE = "the file "
DIGEST = "tensor "  # so begins a text that stands for a tensor
_WIDTH = 100  # characters of a value that are told
_BEFORE = 20  # of them, those that are the same in both


@define(frozen=True)
class Difference:
    """Something that is not the same in two runs."""

    what: str
    owner: str  # the plugin it belongs to, or "" for the core
    values: tuple[str, ...]  # both; or one text that tells how far they are from each other
    is_text: bool = False  # a name or a time, perhaps

    def told(self, when: str) -> str:
        """Return it in words; `when` says of the other run what it is."""
        values = shortened(self.values)
        return f"{self.what}: " + (", and ".join(values) + f" {when}" if len(values) > 1 else values[0])


def read_numbers(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the metrics file at `path` without what the machine has a part in; none of that alone."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    records = [
        {key: value for key, value in json.loads(line).items() if key != "time" and not key.startswith(MACHINE)}
        for line in lines
    ]
    return [record for record in records if len(record) > 1]


def compare_numbers(
    one: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]], owner: Callable[[str], str]
) -> Iterator[Difference]:
    """Compare what was logged, step by step; `owner` knows whose a number is."""

    def by_step(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[Any]]]:
        steps: dict[int, dict[str, list[Any]]] = {}
        for record in records:
            for name, value in record.items():
                if name != "step":
                    steps.setdefault(record["step"], {}).setdefault(name, []).append(value)
        return steps

    whole, resumed = by_step(one), by_step(other)
    for step in sorted(whole.keys() | resumed.keys()):
        here, there = whole.get(step, {}), resumed.get(step, {})
        for name in dict.fromkeys((*here, *there)):
            if repr(here.get(name)) != repr(there.get(name)):
                told = _both(
                    *(", ".join(map(repr, values)) if values else None for values in (here.get(name), there.get(name)))
                )
                yield Difference(f"the logged number {name} at step {step}", owner(name), told)


def compare_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare what states hold besides tensors, or with digests in place of tensors."""
    for name in unequal(one, other):
        if not name.startswith(NOT_COMPARED):
            values = one.get(name), other.get(name)
            is_text = all(isinstance(value, str) and not value.startswith(DIGEST) for value in values)
            where, told = first_difference(name, one, other)
            yield Difference(f"{where} in the state", owner_of_state(name), told, is_text)


def compare_tensors(one: Path, other: Path) -> Iterator[Difference]:
    """Compare two safetensors files, one tensor at a time, bit for bit."""
    with ExitStack() as stack:
        here, there = (stack.enter_context(safe_open(path, "pt")) for path in (one, other))
        names, others = set(here.keys()), set(there.keys())
        for name in sorted(names | others):
            what, owner = f"{name} in the state", owner_of_state(name)
            if name not in names or name not in others:
                yield Difference(what, owner, _both(*("there" if name in known else None for known in (names, others))))
            elif told := _tensors_told(here.get_tensor(name), there.get_tensor(name)):
                yield Difference(what, owner, told)


def _tensors_told(one: Tensor, other: Tensor) -> tuple[str, ...] | None:
    """Return how two tensors differ, or None if they are equal to the last bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return _both(*(f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}" for x in (one, other)))
    if torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return None
    if one.numel() == 1:
        return _both(repr(one.item()), repr(other.item()))
    kind = torch.complex128 if one.is_complex() else torch.float64
    away = (one.to(kind) - other.to(kind)).abs().nan_to_num(float("inf"))
    return (f"differs by up to {away.max().item():.3g}, in {int((one != other).sum())} of {one.numel()} entries",)


def compare_files(
    one: Mapping[str, Path], other: Mapping[str, Path], owner: Callable[[str], str]
) -> Iterator[Difference]:
    """Compare the bytes of files, by name."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            told = _both(*("there" if name in known else None for known in (one, other)))
            yield Difference(FILE + name, owner(name), told)
        elif (here := one[name].read_bytes()) != (there := other[name].read_bytes()):
            yield Difference(
                FILE + name,
                owner(name),
                _both(f"{len(here)} bytes", f"{len(there)} other bytes"),
                _is_text(here),
            )


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def _both(one: str | None, other: str | None) -> tuple[str, str]:
    return one or "not there", other or "not there"


def first_difference(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, tuple[str, str]]:
    """Return where the values of `name` differ first, in lists by index, and both as text."""
    if name not in one or name not in other:
        return name, _both(*(str(values[name]) if name in values else None for values in (one, other)))
    here, there = one[name], other[name]
    while isinstance(here, list) and isinstance(there, list):
        index = next((k for k, (a, b) in enumerate(zip(here, there, strict=False)) if repr(a) != repr(b)), None)
        if index is None:  # one has all that the other has
            return name, _both(*(f"{len(values)} entries" for values in (here, there)))
        name, here, there = f"{name}/{index}", here[index], there[index]
    return name, _both(str(here), str(there))


def shortened(values: Sequence[str]) -> tuple[str, ...]:
    """Return `values`, the long ones cut, from a little before where they begin to differ."""
    if all(len(value) <= _WIDTH for value in values):
        return tuple(values)
    differ = (k for k, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1)
    begin = max(0, next(differ, 0) - _BEFORE)
    return tuple(
        "..." * bool(begin) + value[begin : begin + _WIDTH] + "..." * (len(value) > begin + _WIDTH) for value in values
    )


def owner_of_state(path: str) -> str:
    """Return the plugin whose state has the value at `path`, or ""."""
    top, _, rest = path.partition("/")
    return rest.partition("/")[0].replace("~1", "/").replace("~0", "~") if top == "plugins" else ""


def unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values are not the same, or which one of the two has not."""
    return [name for name in dict.fromkeys((*one, *other)) if repr(one.get(name)) != repr(other.get(name))]
