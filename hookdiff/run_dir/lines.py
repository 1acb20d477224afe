"""Files with one JSON object a line, each with a step and a time.

`Lines` appends to such a file; `Tail`, `Skim` and `read_lines` read it, and check the content.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import define, field, frozen

from hookdiff.disk.files import cannot_write, copy_file, has_other_name, make_folder, open_own, writing
from hookdiff.disk.lock import check_place
from hookdiff.disk.reading import open_file, read_file
from hookdiff.errors import listed
from hookdiff.log.event import STEP, TIME, as_json

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop
    from hookdiff.run_dir.thinned import ReadPart

logger = logging.getLogger("hookdiff")

MOST_STEPS = 10**15  # no run reaches this step
_TIME = re.compile(rb'"time": [\d.]+, ')

Value = TypeVar("Value")
Line = TypeVar("Line")
Parse = Callable[[dict[str, Any]], Line]  # raises ValueError, TypeError or KeyError for a damaged line


@frozen
class Logged(Generic[Value]):
    """A line of metrics.jsonl, texts.jsonl or distributions.jsonl."""

    step: int
    time: float  # seconds since 1970; NaN if a line of metrics.jsonl has no time
    values: dict[str, Value]

    def as_row(self) -> dict[str, Any]:
        """Return step, time and values in one dict, as a row of a table."""
        return {STEP: self.step, TIME: self.time, **self.values}


def at_step(step: int) -> dict[str, Any]:
    """Return the first values of a line: the step, and the current time."""
    return {STEP: step, TIME: round(time.time(), 3)}


def step_and_time(line: Mapping[str, Any]) -> tuple[int, float]:
    """Return the step and the time of a line."""
    return step_number(line[STEP]), number(line[TIME])


def step_number(value: object) -> int:
    """Return `value` as a number of steps; raise TypeError if it is no number, and ValueError if it is out of range."""
    step = int(number(value))
    if not 0 <= step < MOST_STEPS:
        raise ValueError(f"no number of steps: {value!r}")
    return step


def number(value: object) -> float:
    """Return `value` if it is a finite number; raise TypeError for any other value."""
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise TypeError(f"no number: {value!r}")
    return value


def without_times(data: bytes) -> bytes:
    """Return the lines of a file without their times, to compare two runs."""
    return _TIME.sub(b"", data)


@define(eq=False)
class Lines:
    """A file of JSON lines in the run directory of a Loop; the main rank appends whole lines.

    Lines are not synced to disk: a crash of the machine may lose lines from before a checkpoint. A warning reports the
    loss, and the file continues after its last whole line. If the disk is full, new lines are kept in memory until
    there is space.
    """

    name: str
    is_cut: bool  # whether a resume truncates the file to the length in the checkpoint; else all lines stay
    length: int = field(default=0, init=False)  # bytes of the file that belong to this run
    _file: FileIO | None = field(default=None, init=False)
    _waiting: bytes = field(default=b"", init=False)  # lines that wait for space on a full disk

    def resume(self, loop: Loop) -> None:
        """Begin with the lines of the run that is continued."""
        path = loop.run_dir / self.name if loop.run_dir and loop.is_main else None
        if path and (self.length or path.exists() or _earlier_file(loop.resume, self.name)):
            self._open(path, loop)

    def _open(self, path: Path, loop: Loop) -> FileIO:
        """Open and truncate the file. If the run continues another in a new directory, begin with the other's lines."""
        loop.resources.callback(self.close)
        step, source = loop.progress.step, loop.resume
        with writing(path):
            make_folder(path.parent)
            check_place(path)
            if not path.exists() and (earlier := _earlier_file(source, path.name)):
                self._begin_branch(path, read_file(earlier), step)
            existed = path.exists()
            open_own(path, "ab").close()
            self._file, expected = open_file(path, "r+b"), self.length
            if not self.is_cut:
                expected = self.length = self._file.seek(0, 2)
            content, left = self._cut(self._file)
        lost = expected - len(left)
        if content and not expected and not loop.first_step:
            count = len(content.splitlines())
            logger.warning("%s: replaces the %s line%s of an earlier run", path, f"{count:,}", "s" * (count != 1))
        elif source and lost and existed and self.is_cut:
            last = max((_step(line) for line in left.splitlines()), default=0)
            text = f"{lost:,} bytes shorter than at the checkpoint: it ends at step {last:,}, the run at step {step:,}"
            logger.warning("%s is %s", path, text)
        elif source and lost and self.is_cut and not loop.is_branch:
            logger.warning("%s is missing; a new file begins after step %s", path, f"{step:,}")
        return self._file

    def add(self, loop: Loop, line: Mapping[str, Any]) -> None:
        """Append a line; raise StorageError if the disk fails, but not if it is full."""
        if loop.run_dir is None or not loop.is_main:
            return
        path = loop.run_dir / self.name
        file = self._open(path, loop) if self._file is None or self._file.closed else self._file
        with writing(path):
            check_place(path)
        was_full = bool(self._waiting)
        self._waiting += json.dumps(as_json(line), allow_nan=False).encode() + b"\n"
        try:
            file = self._own(file)
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]
            self.length = file.tell()
        except OSError as error:
            failure = cannot_write(path, error)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise failure from None
            if not was_full:
                logger.warning("%s; new lines stay in memory until there is space", failure)

    def state_dict(self) -> int:
        """Return the length of the file."""
        return self.length

    def load_state_dict(self, length: int) -> None:
        """Set the `length` of a saved state; in a rollback, truncate the file to it."""
        self.length, self._waiting = length, b""
        if self._file and not self._file.closed:
            with writing(Path(str(self._file.name))):
                self._cut(self._own(self._file))

    def close(self) -> None:
        """Close the file; lines that still wait for space are lost, with a warning."""
        if self._file:
            if self._waiting:
                logger.warning("%s: the disk is full, and the last lines are lost", self._file.name)
            self._file.close()
        self._waiting = b""

    def _begin_branch(self, path: Path, lines: bytes, step: int) -> None:
        """Write the `lines` of the continued run, without the lines of steps after `step`."""
        if not self.is_cut:  # otherwise `_cut` removes them
            lines = b"".join(line for line in lines.splitlines(keepends=True) if _step(line) <= step)
        with open_own(path, "wb") as file:
            while lines:
                lines = lines[file.write(lines) :]

    def _own(self, file: FileIO) -> FileIO:
        """Return the open file; replace it by a copy if it has another hard link, such as in a snapshot of the run."""
        if not has_other_name(file):
            return file
        path, place = Path(str(file.name)), file.tell()
        copy_file(path, Path(os.path.realpath(path)))
        file.close()
        self._file = open_file(path, "r+b")
        self._file.seek(place)
        return self._file

    def _cut(self, file: FileIO) -> tuple[bytes, bytes]:
        """Truncate `file` after the last whole line within `length`; return its content before and after that."""
        check_place(Path(str(file.name)))
        file.seek(0)
        content = file.readall()
        left = content[: content.rfind(b"\n", 0, self.length) + 1]
        self.length = file.seek(len(left))
        file.truncate()
        return content, left


def _earlier_file(source: Path | None, name: str) -> Path | None:
    """Return the file called `name` of the run that is continued; `source` is its directory, or a checkpoint in it."""
    if source is None:
        return None
    places = (source / name, source.resolve().parent.parent / name)
    return next((path for path in places if path.is_file()), None)


def _step(line: bytes) -> int:
    try:
        return int(json.loads(line)[STEP])
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0


def read_lines(path: Path, parse: Parse[Line]) -> list[Line]:
    """Return the lines of the file at `path`; a missing file has none.

    Lines that a failing disk or an editor has damaged are skipped with a warning. An incomplete last line, which is
    still being written, is skipped silently. Raises OSError if the file cannot be read.
    """
    if not path.exists():
        return []
    data = read_file(path)
    records = [_parsed(line, parse) for line in data.splitlines()]
    if records and records[-1] is None and not data.endswith(b"\n"):
        records.pop()
    return _undamaged(path, dict(enumerate(records, 1)))


def read_thinned(path: Path, parse: Parse[Line], most: int | None) -> tuple[list[Line], ReadPart]:
    """Return lines as `read_lines` does, only some if there are more than `most`, and a description of these lines."""
    from hookdiff.run_dir.thinned import ReadPart, read_part

    if most is None or not path.exists():
        return read_lines(path, parse), ReadPart()
    with open_file(path) as file:
        part = read_part(file, most)
    if part.every == 1:  # includes a last line without a line break
        return read_lines(path, parse), part
    records = {place: _parsed(line, parse) for place, line in zip(part.places, part.lines, strict=True)}
    return _undamaged(path, records), part


def _undamaged(path: Path, records: Mapping[int, Line | None]) -> list[Line]:
    if damaged := [place for place, record in records.items() if record is None]:
        logger.warning("%s: skipped line %s, which cannot be read", path, listed(damaged, 1))
    return [record for record in records.values() if record is not None]


def _parsed(line: bytes, parse: Parse[Line]) -> Line | None:
    """Return the parsed line, or None if it is damaged."""
    try:
        values = json.loads(line)
        return parse(values) if isinstance(values, dict) else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


@define(eq=False)
class Tail(Generic[Line]):
    """Reads the lines that are appended to a file, such as metrics.jsonl with `parse_metrics`."""

    path: Path
    parse: Parse[Line]
    most: int | None = None  # of more new lines, only some are parsed, see `read_part`
    _place: int = field(default=0, init=False)
    _inode: int = field(default=0, init=False)
    _last: bytes = field(default=b"", init=False)  # the line that ends at `_place`

    def read(self) -> tuple[bool, list[Line]]:
        """Return whether to start over with the lines, and the new lines that are whole and not damaged.

        The reader starts over at the first call, and after the file was replaced, cut or removed, such as by a resume.
        """
        from hookdiff.run_dir.thinned import read_part

        try:
            with open_file(self.path) as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._place - len(self._last))
                # A cut file may have grown beyond `_place` again, and a new file may get the inode of the old one.
                anew = inode != self._inode or file.read(len(self._last)) != self._last
                self._place = file.seek(0 if anew else self._place)
                part = read_part(file, self.most)
        except OSError:
            anew, self._place, self._inode, self._last = self._inode != 0, 0, 0, b""
            return anew, []
        self._inode = inode
        self._place += part.size
        if part.lines or anew:
            self._last = part.lines[-1] + b"\n" if part.lines else b""
        lines = [_parsed(line, self.parse) for line in part.lines]
        return anew, [line for line in lines if line is not None]


@define(eq=False)
class Skim(Generic[Line]):
    """Reads a few lines of a long file, for commands that look at many runs. Only these lines are parsed.

    Damaged lines and a last line without an end are left out. Raises OSError if the file cannot be read.
    """

    path: Path
    parse: Parse[Line]
    _data: bytes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._data = read_file(self.path)

    def having(self, beginning: str) -> Iterator[Line]:
        """Yield the lines with a key, or another text, that has this beginning, such as `fd/`; oldest first."""
        mark, place = _mark(beginning), 0
        while (place := self._data.find(mark, place)) >= 0 and (end := self._data.find(b"\n", place)) >= 0:
            line = _parsed(self._data[self._data.rfind(b"\n", 0, place) + 1 : end], self.parse)
            if line is not None:
                yield line
            place = end

    def backwards(self, beginning: str = "") -> Iterator[Line]:
        """Yield the lines that `having` yields, newest first; by default all lines."""
        mark, end = _mark(beginning), self._data.rfind(b"\n")
        while end > 0 and (place := self._data.rfind(mark, 0, end)) >= 0:
            start = self._data.rfind(b"\n", 0, place) + 1
            line = _parsed(self._data[start : self._data.find(b"\n", place)], self.parse)
            if line is not None:
                yield line
            end = start - 1


def _mark(beginning: str) -> bytes:
    """Return the beginning of a text in JSON, with its opening quote."""
    return json.dumps(beginning)[:-1].encode()
