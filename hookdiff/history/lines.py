"""Reads the files of a run directory that have one JSON object a line. Their content is checked, not trusted."""

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from attrs import define, field, frozen

from hookdiff.disk.reading import open_file, read_file
from hookdiff.distribution import Distribution
from hookdiff.events import Event
from hookdiff.findings import Severity

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
TEXTS, DISTRIBUTIONS = "texts.jsonl", "distributions.jsonl"

log = logging.getLogger("hookdiff")

Line = TypeVar("Line")
Parse = Callable[[dict[str, Any]], Line]  # raises ValueError, TypeError or KeyError for what is no such line


@frozen
class LoggedEvent:
    """A line of events.jsonl."""

    step: int
    time: float  # seconds since 1970
    event: Event


@frozen
class Logged(Generic[Line]):
    """A line of texts.jsonl or distributions.jsonl."""

    step: int
    time: float  # seconds since 1970
    values: dict[str, Line]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of the metrics file at `path`; null, which stands for NaN and infinities, becomes NaN.

    Lines that a failing disk or an editor has damaged are skipped with a warning, and the last line without one while
    it is not written to its end. Raises OSError if the file cannot be read.
    """
    return _read(path, parse_metrics)


def read_events(path: Path) -> list[LoggedEvent]:
    """Return the lines of the events file at `path`, as `read_metrics` does."""
    return _read(path, parse_event)


def read_texts(path: Path) -> list[Logged[str]]:
    """Return the lines of the file of texts at `path`, as `read_metrics` does."""
    return _read(path, _parse_texts)


def read_distributions(path: Path) -> list[Logged[Distribution]]:
    """Return the lines of the file of distributions at `path`, as `read_metrics` does."""
    return _read(path, _parse_distributions)


def parse_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the values of a line of metrics.jsonl."""
    _number(line["step"])
    return {name: math.nan if value is None else _number(value) for name, value in line.items()}


def parse_event(line: dict[str, Any]) -> LoggedEvent:
    """Return the event in a line of events.jsonl."""
    kind, text, severity, details = line["kind"], line["text"], line["severity"], line.get("details", {})
    if not (isinstance(kind, str) and isinstance(text, str) and isinstance(details, dict)):
        raise TypeError("an event has a kind, a text and details")
    if severity not in get_args(Severity):
        raise ValueError(severity)
    return LoggedEvent(int(_number(line["step"])), _number(line["time"]), Event(kind, text, severity, details))


def parsed(line: bytes, parse: Parse[Line]) -> Line | None:
    """Return what is in a line, or None if it is damaged."""
    try:
        values = json.loads(line)
        return parse(values) if isinstance(values, dict) else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _parse_texts(line: dict[str, Any]) -> Logged[str]:
    texts = {name: text for name, text in line["texts"].items() if isinstance(text, str)}
    return Logged(int(_number(line["step"])), _number(line["time"]), texts)


def _parse_distributions(line: dict[str, Any]) -> Logged[Distribution]:
    found = {}
    for name, one in line["distributions"].items():
        counts = [int(_number(count)) for count in one["counts"]]
        found[name] = Distribution(_number(one["low"]), _number(one["high"]), tuple(counts), int(one["nonfinite"]))
    return Logged(int(_number(line["step"])), _number(line["time"]), found)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise TypeError(f"no number: {value!r}")
    return value


def _read(path: Path, parse: Parse[Line]) -> list[Line]:
    data = read_file(path)
    records = [parsed(line, parse) for line in data.splitlines()]
    if records and records[-1] is None and not data.endswith(b"\n"):
        records.pop()
    if damaged := [number for number, record in enumerate(records, 1) if record is None]:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        log.warning("%s: skipped line %d%s, which cannot be read", path, damaged[0], more)
    return [record for record in records if record is not None]


@define(eq=False)
class Tail(Generic[Line]):
    """Reads the lines that are appended to a file, such as metrics.jsonl with `parse_metrics`."""

    path: Path
    parse: Parse[Line]
    _place: int = field(default=0, init=False)
    _inode: int = field(default=0, init=False)
    _last: bytes = field(default=b"", init=False)  # the line before the place

    def read(self) -> tuple[bool, list[Line]]:
        """Return whether the file begins anew, and its new whole lines; damaged ones are left out.

        It begins anew at the first call, and when the file was replaced, cut or removed, as by a run that was resumed.
        """
        try:
            with open_file(self.path) as file:
                inode, start = os.fstat(file.fileno()).st_ino, self._place - len(self._last)
                file.seek(start)
                data = file.readall()
                # A file that was cut may have grown beyond the place, and a new one may get the number of the old one.
                anew = inode != self._inode or not data.startswith(self._last)
                if anew and start:
                    file.seek(0)
                    data = file.readall()
        except OSError:
            anew, self._place, self._inode, self._last = self._inode != 0, 0, 0, b""
            return anew, []
        self._place, self._inode = 0 if anew else self._place, inode
        whole = data[0 if anew else len(self._last) : data.rfind(b"\n") + 1]
        self._place += len(whole)
        self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :] or (b"" if anew else self._last)
        lines = [parsed(line, self.parse) for line in whole.splitlines()]
        return anew, [line for line in lines if line is not None]
