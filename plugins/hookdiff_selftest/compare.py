"""Compares logged numbers, states and files of two runs."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define

from hookdiff.history import DISTRIBUTIONS, TEXTS
from hookdiff.log import MACHINE
from hookdiff_selftest.texts import number_difference

FILE, STATE = "the file ", " in the state"  # start and end of the names of items
DIGEST = "tensor "  # start of a text that stands for a tensor
# Parts of a state that are not compared: the proof changes the config, and lines of JSON have times in them.
_DIFFERENT = ("config/", "plugins/metrics/", "plugins/texts/", "plugins/distributions/")
_WIDTH = 100  # characters of a value that are shown
_BEFORE = 20  # of them, before the first difference
_SHORT = 64  # values are shown beside a name if they have fewer characters than this

Owner = Callable[[str], str]  # from the name of a number or file to the plugin that logged or wrote it; "" for the core


@define(frozen=True)
class Item:
    """A logged number, a value of the state, a field of a plugin, or a file."""

    value: Any  # numbers, texts, and lists of them; a text with its digest stands for a tensor or a file
    owner: str  # the plugin that it belongs to, or "" for the core
    step: int = 0  # of a logged number
    is_text: bool = False  # it may be a name or a time


@define(frozen=True)
class Difference:
    """An item that is not the same in two runs, or that only one of them has."""

    name: str
    here: Item
    there: Item

    @property
    def owner(self) -> str:
        """The plugin that the item belongs to, or "" for the core."""
        return self.here.owner or self.there.owner

    @property
    def is_text(self) -> bool:
        """Whether both are texts, which may be names or times."""
        return self.here.is_text and self.there.is_text

    def describe(self, when: str) -> str:
        """Return a sentence about it; `when` says when the second value was found. Long values are cut."""
        place, values = _first_difference(self.here.value, self.there.value)
        begin = 0
        if max(map(len, values)) > _WIDTH:
            differ = (k for k, (a, b) in enumerate(zip(*values, strict=False)) if a != b)
            begin = max(0, next(differ, 0) - _BEFORE)
        end = begin + _WIDTH
        one, other = ("..." * bool(begin) + text[begin:end] + "..." * (len(text) > end) for text in values)
        return f"{self.name}{place}: {one}, and {other} {when}"

    def __str__(self) -> str:
        values = f" ({self.here.value} and {self.there.value})"
        return self.name + values * (len(values) < _SHORT)


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
    found = {}
    for path, value in values.items():
        if not path.startswith(_DIFFERENT):
            top, _, rest = path.partition("/")
            owner = rest.partition("/")[0].replace("~1", "/").replace("~0", "~") if top == "plugins" else ""
            is_text = isinstance(value, str) and not value.startswith(DIGEST)
            found[path + STATE] = Item(value, owner, is_text=is_text)
    return found


def fields(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Item]:
    """Return the fields of plugins, from their flat names by plugin."""
    return {f"the field {key} of {name}": Item(held[key], name) for name, held in values.items() for key in held}


def files(folder: Path, skipped: Collection[str], owner: Owner) -> dict[str, Item]:
    """Return the content of the files in `folder` by name, except hidden ones and those in `skipped`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if not path.is_file() or inner.parts[0] in skipped or any(part.startswith(".") for part in inner.parts):
            continue
        data, name = path.read_bytes(), inner.as_posix()
        if name in (TEXTS, DISTRIBUTIONS):
            data = re.sub(rb'"time": [\d.]+, ', b"", data)  # when it was logged
        try:
            is_text = bool(data.decode())
        except UnicodeDecodeError:
            is_text = False
        digest = hashlib.sha256(data).hexdigest()[:8]
        found[FILE + name] = Item(f"{len(data)} bytes {digest}", owner(name), is_text=is_text)
    return found


def inside(difference: Difference, one: Path, other: Path) -> Difference:
    """Return the first number that differs in a text file of the folders `one` and `other`.

    Without one it is `difference`, which is of the whole files.
    """
    inner = Path(difference.name.removeprefix(FILE))
    here_text, there_text = ((folder / inner).read_text("utf-8") for folder in (one, other))
    if not (found := number_difference(here_text, there_text, inner.suffix.lower())):
        return difference
    place, *values = found
    here, there = (Item(value, difference.owner) for value in values)
    return Difference(difference.name + place, here, there)


def compare(one: Mapping[str, Item], other: Mapping[str, Item]) -> Iterator[Difference]:
    """Yield the items that are not the same to the last bit, logged numbers in the order of their steps."""
    nothing = Item("not there", "")
    both = [Difference(name, one.get(name, nothing), other.get(name, nothing)) for name in {**one, **other}]
    for each in sorted(both, key=lambda each: max(each.here.step, each.there.step)):
        if repr(each.here.value) != repr(each.there.value):
            yield each


def _first_difference(here: Any, there: Any) -> tuple[str, tuple[str, str]]:
    """Return the place of the first difference, such as ", at 3/1" in nested lists, and both values there as text."""
    place: list[str] = []
    while isinstance(here, list) and isinstance(there, list):
        index = next((k for k, (a, b) in enumerate(zip(here, there, strict=False)) if repr(a) != repr(b)), None)
        if index is None:  # one is the beginning of the other
            here, there = f"{len(here)} entries", f"{len(there)} entries"
        else:
            place, here, there = [*place, str(index)], here[index], there[index]
    return ", at " * bool(place) + "/".join(place), (str(here), str(there))
