"""Compares what two runs leave: logged numbers, the values of their states, and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define

from hookdiff.log import MACHINE

FILE = "the file "
DIGEST = "tensor "  # a text that stands for a tensor begins so
# Parts of a state that are not compared: the proof changes the config, and the metrics file has times in it.
_DIFFERENT = ("config/", "plugins/metrics/")
_WIDTH = 100  # characters of a value that are shown
_BEFORE = 20  # of them, those that are the same in both

Owner = Callable[[str], str]  # the plugin that logged a number or wrote a file, by its name; "" for the core


class _Absent:
    def __repr__(self) -> str:
        return "not there"


ABSENT = _Absent()  # the value of what a run has not


@define(frozen=True)
class Item:
    """Something that a run leaves."""

    value: Any  # numbers, texts, and lists of them; a tensor or a file is a text with its digest
    owner: str  # the plugin that it belongs to, or "" for the core
    step: int = 0  # of a logged number
    is_text: bool = False  # it may be a name or a time


@define(frozen=True)
class Difference:
    """Something that is not the same in two runs."""

    what: str
    owner: str
    values: tuple[str, str]
    is_text: bool = False

    def describe(self, when: str) -> str:
        """Return a sentence about it; `when` says when the second value was found."""
        one, other = shortened(self.values)
        return f"{self.what}: {one}, and {other} {when}"


def numbers(path: Path, owner: Owner) -> dict[str, Item]:
    """Return what was logged to the metrics file at `path`, without the numbers that depend on the machine."""
    found: dict[str, Item] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("step", "time") and not name.startswith(MACHINE):
                what = f"the logged number {name} at step {record['step']}"
                values = f"{found[what].value}, {value!r}" if what in found else repr(value)
                found[what] = Item(values, owner(name), record["step"])
    return found


def state(values: Mapping[str, Any]) -> dict[str, Item]:
    """Return the values of a state, by flat names as `flatten` makes them."""
    return {
        f"{name} in the state": Item(
            value, owner_of_state(name), is_text=isinstance(value, str) and not value.startswith(DIGEST)
        )
        for name, value in values.items()
        if not name.startswith(_DIFFERENT)
    }


def files(paths: Mapping[str, Path], owner: Owner) -> dict[str, Item]:
    """Return the content of files, by name."""
    return {FILE + name: _file(paths[name].read_bytes(), owner(name)) for name in sorted(paths)}


def _file(data: bytes, owner: str) -> Item:
    try:
        is_text = bool(data.decode())
    except UnicodeDecodeError:
        is_text = False
    return Item(f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:8]}", owner, is_text=is_text)


def compare(one: Mapping[str, Item], other: Mapping[str, Item]) -> Iterator[Difference]:
    """Yield what is not the same to the last bit, logged numbers in the order of their steps."""
    nothing = Item(ABSENT, "")
    both = {what: (one.get(what, nothing), other.get(what, nothing)) for what in unequal(one, other)}
    for what, (here, there) in sorted(both.items(), key=lambda item: max(each.step for each in item[1])):
        place, values = first_difference(here.value, there.value)
        yield Difference(what + place, here.owner or there.owner, values, here.is_text and there.is_text)


def unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, or that only one of the two has."""
    return [name for name in dict.fromkeys((*one, *other)) if repr(one.get(name)) != repr(other.get(name))]


def first_difference(here: Any, there: Any) -> tuple[str, tuple[str, str]]:
    """Return where two values differ first, as ", at 3/1" in lists, and both as text."""
    place: list[str] = []
    while isinstance(here, list) and isinstance(there, list):
        index = next((k for k, (a, b) in enumerate(zip(here, there, strict=False)) if repr(a) != repr(b)), None)
        if index is None:  # one is the beginning of the other
            here, there = f"{len(here)} entries", f"{len(there)} entries"
        else:
            place, here, there = [*place, str(index)], here[index], there[index]
    return ", at " * bool(place) + "/".join(place), (str(here), str(there))


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
