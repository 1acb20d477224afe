"""Reads every k-th line of a long metrics.jsonl, so that its curves look as if all were read.

A long file takes long to read because its JSON is parsed. So of the lines with the usual names, such as the loss,
only every k-th is parsed. Lines with a rare name, such as an FID value, are all parsed.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO

from attrs import frozen

MOST_LINES = 50_000  # most lines that a command parses to show curves
_RARE = 4  # a name is rare if fewer than `most` / _RARE lines have it
_NEWEST = 100  # the newest lines are all read, because they show the speed
_CHUNK = 4 << 20  # bytes


@frozen
class ReadPart:
    """Whole lines of a file, without their ends."""

    lines: Sequence[bytes] = ()
    places: Sequence[int] = ()  # the numbers of these lines among all whole lines, from 1
    every: int = 1  # the k of "every k-th line" of the usual lines; 1: all lines were read
    counts: Mapping[str, int] = {}  # number of lines with each name; empty if all lines were read
    num: int = 0  # number of all whole lines
    size: int = 0  # bytes of all whole lines


def read_part(file: FileIO, most: int | None) -> ReadPart:
    """Read the whole lines from the current position of the file, or only some if there are more than `most`.

    Lines with the same names are of one kind. The first, the last and every k-th line of each kind are read; k is the
    number of all lines / `most`, rounded up. All lines with a rare name are read, and so are the newest lines.
    """
    begin = file.tell()
    num = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b"")) if most else 0
    file.seek(begin)
    if not most or num <= most:
        *lines, rest = file.readall().split(b"\n")
        return ReadPart(lines, range(1, len(lines) + 1), num=len(lines), size=file.tell() - begin - len(rest))
    places = array("Q", [begin])  # where lines begin
    # The numbers of lines, from 0, by the names in them.
    kinds: dict[tuple[bytes, ...], array[int]] = defaultdict(lambda: array("Q"))
    for lines in _in_chunks(file):
        for line in lines:
            kinds[tuple(line.split(b'"')[1::2])].append(len(places) - 1)
            places.append(places[-1] + len(line) + 1)
    counts = Counter[bytes]()
    for names, numbers in kinds.items():
        counts.update(dict.fromkeys(names, len(numbers)))
    every, picked = -(-num // most), {*range(len(places) - 1)[-_NEWEST:]}
    for names, numbers in kinds.items():
        is_rare = not names or min(map(counts.__getitem__, names)) * _RARE < most
        picked |= {*(numbers if is_rare else numbers[::every]), numbers[-1]}
    chosen = sorted(picked)
    return ReadPart(
        [_line(file, places[number], places[number + 1]) for number in chosen],
        [number + 1 for number in chosen],
        every,
        {name: count for text, count in counts.items() if (name := _name(text)) is not None},
        len(places) - 1,
        places[-1] - begin,
    )


def _in_chunks(file: FileIO) -> Iterator[list[bytes]]:
    rest = b""
    while chunk := file.read(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines


def _line(file: FileIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)[:-1]


def _name(text: bytes) -> str | None:
    try:
        return str(json.loads(b'"%b"' % text))
    except ValueError:  # damaged
        return None
