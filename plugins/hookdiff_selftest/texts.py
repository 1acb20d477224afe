"""Finds the first number that two text files do not share."""

import csv
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from hookdiff.log import MACHINE

Row = dict[str, str]  # cells of a line by the name of their column

_TIMES = {"time", "times", "date", "datetime", "timestamp", "second", "seconds", "sec", "secs", "ms", "duration"}
_TIMES |= {"elapsed", "eta", "wall", "clock"}
_WORDS = re.compile(r"[^a-z]+")
_NUMBER = re.compile(r"(?<![\w.-])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]\w)")
# Dates, times of day, and numbers with a unit of time, speed or memory.
_MACHINE_TEXT = re.compile(
    r"\d{4}-\d\d-\d\d|\d+:\d\d(?::\d\d)?(?:\.\d+)?"
    r"|(?<![\w.])\d+(?:\.\d+)?(?:[eE][-+]?\d+)? ?(?:[num]?s|µs|sec|min|h|d|seconds?|minutes?|hours?|days?|[KMGT]i?B)\b"
    r"|(?<![\w.])\d+(?:\.\d+)? ?\w*/(?:s|min|h)\b"
)


def number_difference(one: str, other: str, kind: str) -> tuple[str, str, str] | None:
    """Return the place of the first number that differs and both values, or None.

    `kind` is the suffix of the files, such as ".csv". Another count of lines is a difference. Columns that hold times,
    numbers with a unit of time, speed or memory, and words are not compared.
    """
    rows, others = _rows(one, kind), _rows(other, kind)
    for line, (row, its) in enumerate(zip_longest(rows, others), start=1):
        if row is None or its is None:
            break
        for column in {**row, **its}:
            here, there = row.get(column, "nothing"), its.get(column, "nothing")
            if here != there and not _depends_on_machine(column) and (_is_number(here) or _is_number(there)):
                return f", {column} in line {line}", here, there
    return None if len(rows) == len(others) else ("", f"{len(rows)} lines", f"{len(others)} lines")


def _rows(text: str, kind: str) -> list[Row]:
    lines = text.splitlines()
    if kind in (".jsonl", ".ndjson", ".json"):
        try:
            parsed = [json.loads(text)] if kind == ".json" else [json.loads(line) for line in lines if line.strip()]
        except ValueError:
            pass
        else:
            return [dict(_leaves(each, "")) for each in parsed]
    if kind in (".csv", ".tsv") and lines:
        header, *rest = csv.reader(lines, delimiter="\t" if kind == ".tsv" else ",")
        if any(map(_is_number, header)):
            header, rest = [f"column {k}" for k in range(1, len(header) + 1)], [header, *rest]
        else:
            rest = [header, *rest]  # the line of the header counts
        names = [*header, *(f"column {k}" for k in range(len(header) + 1, max(map(len, rest)) + 1))]
        return [dict(zip(names, row, strict=False)) for row in rest]
    found = (_NUMBER.findall(_MACHINE_TEXT.sub("", line)) for line in lines)
    return [{f"number {k}": number for k, number in enumerate(numbers, start=1)} for numbers in found]


def _leaves(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{where}/{key}" if where else str(key))
    else:
        yield where or "value", str(value)


def _depends_on_machine(column: str) -> bool:
    return column.startswith(MACHINE) or not _TIMES.isdisjoint(_WORDS.split(column.lower()))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
