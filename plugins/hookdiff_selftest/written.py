"""Reads the numbers and files of a run, and finds the first number that differs between two text files."""

import csv
import hashlib
import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookdiff.log import MACHINE
from hookdiff.run_dir import DISTRIBUTIONS, TEXTS, read_metrics, without_times
from hookdiff.testing import Difference, ValueKey, leaves

Row = dict[str, str]  # cells of a line by the name of their column

_TIMES = {"time", "times", "date", "datetime", "timestamp", "second", "seconds", "sec", "secs", "ms", "duration"}
_TIMES |= {"elapsed", "eta", "wall", "clock"}
_WORDS = re.compile(r"[^a-z]+")
_NUMBER = re.compile(r"(?<![\w.-])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]\w)")
# Dates, times of day, and numbers with a unit of time, speed or memory.
_MACHINE_TEXT = re.compile(
    r"\d{4}-\d\d-\d\d|\d+:\d\d(?::\d\d)?(?:\.\d+)?"
    r"|(?<![\w.])[\d,]+(?:\.\d+)?(?:[eE][-+]?\d+)?"
    r" ?(?:[num]?s|µs|sec|min|h|d|seconds?|minutes?|hours?|days?|[KMGT]i?B)\b"
    r"|(?<![\w.])[\d,]+(?:\.\d+)? ?\w*/(?:s|min|h)\b"
)


def logged(path: Path) -> dict[ValueKey, float | None]:
    """Return the numbers in the metrics file at `path`, without those that depend on the machine."""
    numbers: dict[ValueKey, float | None] = {}
    for line in read_metrics(path):
        for name, value in line.values.items():
            key = ValueKey("logged number", name, line.step)
            while key in numbers:
                key = key._replace(name=f"{key.name} again")
            if not name.startswith(MACHINE):
                numbers[key] = value
    return numbers


def files(folder: Path, skipped: Collection[str]) -> dict[ValueKey, str]:
    """Return the size and a hash of the files in `folder` by name, except hidden ones and those in `skipped`."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.is_file() and inner.parts[0] not in skipped and not any(part.startswith(".") for part in inner.parts):
            name, data = inner.as_posix(), path.read_bytes()
            data = without_times(data) if name in (TEXTS, DISTRIBUTIONS) else data
            hashes[ValueKey("file", name)] = f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:8]}"
    return hashes


def inside(difference: Difference, one: Path, other: Path) -> Difference | None:
    """Return the first number that differs in a text file of the folders `one` and `other`, or None.

    For another file, and for a file that only one folder has, return `difference`, which is about the whole file.
    """
    name = difference.key.name
    try:
        return number_difference(name, *((folder / name).read_bytes().decode() for folder in (one, other)))
    except (FileNotFoundError, UnicodeDecodeError):
        return difference


def number_difference(name: str, one: str, other: str) -> Difference | None:
    """Return the first number that differs in the texts of the file `name`, or None.

    A different number of lines counts as a difference. Words, columns of times, and numbers with a unit of time, speed
    or memory are not compared.
    """
    rows, others = (_rows(text, Path(name).suffix.lower()) for text in (one, other))
    for line, (row, its) in enumerate(zip(rows, others, strict=False), start=1):
        for column in {**row, **its}:
            here, there = row.get(column, "nothing"), its.get(column, "nothing")
            if here != there and not _depends_on_machine(column) and (_is_number(here) or _is_number(there)):
                return Difference(ValueKey("file", f"{name}, {column} in line {line}"), here, there)
    counts = f"{len(rows)} lines", f"{len(others)} lines"
    return None if len(rows) == len(others) else Difference(ValueKey("file", name), *counts)


def _rows(text: str, kind: str) -> list[Row]:
    lines = text.splitlines()
    with suppress(ValueError):  # its content does not fit its suffix
        if kind == ".json":
            return [_row(leaves(json.loads(text)))]
        if kind in (".jsonl", ".ndjson"):
            return [_row(leaves(json.loads(line))) for line in lines if line.strip()]
    delimiter = {".csv": ",", ".tsv": "\t"}.get(kind)
    if delimiter and not any(map(_is_number, lines[0].split(delimiter) if lines else ())):
        table = csv.DictReader(lines, delimiter=delimiter, restkey="more")
        return [{} for _ in lines[:1]] + [_row(row.items()) for row in table]  # the line of the header counts
    texts = (_NUMBER.findall(_MACHINE_TEXT.sub("", line)) for line in lines)
    return [_row((f"number {k}", text) for k, text in enumerate(numbers, start=1)) for numbers in texts]


def _row(cells: Iterable[tuple[Any, Any]]) -> Row:
    return {str(name): str(value) for name, value in cells}


def _depends_on_machine(column: str) -> bool:
    return column.startswith(MACHINE) or not _TIMES.isdisjoint(_WORDS.split(column.lower()))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
