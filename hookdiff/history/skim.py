"""Reads a few lines of a long file, for commands that look at many runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Generic

from attrs import define, field

from hookdiff.disk.reading import read_file
from hookdiff.history.lines import Line, Parse, parsed


@define(eq=False)
class Skim(Generic[Line]):
    """A file of JSON lines, such as metrics.jsonl with `parse_metrics`. Only the lines that are asked for are parsed.

    Damaged lines and a last line without an end are left out. Raises OSError if the file cannot be read.
    """

    path: Path
    parse: Parse[Line]
    _data: bytes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._data = read_file(self.path)

    def having(self, text: str) -> Iterator[Line]:
        """Yield the lines with this text, such as `"lr":` or `"fd/`, oldest first."""
        mark, place = text.encode(), 0
        while (place := self._data.find(mark, place)) >= 0 and (end := self._data.find(b"\n", place)) >= 0:
            line = parsed(self._data[self._data.rfind(b"\n", 0, place) + 1 : end], self.parse)
            if line is not None:
                yield line
            place = end

    def backwards(self, text: str = "") -> Iterator[Line]:
        """Yield the lines with this text, newest first."""
        mark, end = text.encode(), self._data.rfind(b"\n")
        while end > 0 and (place := self._data.rfind(mark, 0, end)) >= 0:
            start = self._data.rfind(b"\n", 0, place) + 1
            line = parsed(self._data[start : self._data.find(b"\n", place)], self.parse)
            if line is not None:
                yield line
            end = start - 1
