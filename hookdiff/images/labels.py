"""Labels as numbers and names, and the files that hold them."""

import csv
import json
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from hookdiff.data.memory import MAX_LABEL, check_range
from hookdiff.disk.reading import open_file
from hookdiff.errors import nearest, shown
from hookdiff.images.texts import captions_of, check_text

EXAMPLES = 5  # the most examples in a message
_SUFFIXES = (".csv", ".jsonl")


def encode(labels: Sequence[Any]) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return labels as numbers (n, int64), and the names of the classes in alphabetical order.

    Names that differ only by Unicode normalisation are one class. Integer labels have no names (None). An empty list
    gives (None, None).

    Raises:
        ValueError: for labels of other types, and for integers outside of -1 to `MAX_LABEL`.
    """
    examples = {type(label): label for label in labels}
    if not labels:
        return None, None
    if examples.keys() == {int}:
        check_range(min(labels), max(labels))
        return torch.tensor(labels), None
    if examples.keys() != {str}:
        raise ValueError(f"labels must be all integers or all names, not {some(list(map(repr, examples.values())))}")
    names = [normal(label) for label in labels]
    classes = tuple(sorted(set(names)))
    position = {name: k for k, name in enumerate(classes)}
    return torch.tensor([position[name] for name in names]), classes


def normal(name: str) -> str:
    """Return `name` in the normal form NFC: a Macintosh writes one letter of a name as several characters."""
    return unicodedata.normalize("NFC", name)


def read_labels(
    root: Path, files: Sequence[str], labels: str, captions: str | None = None
) -> tuple[Tensor | None, tuple[str, ...] | None, Sequence[Sequence[str]] | None, list[str]]:
    """Return labels and classes of `files` (below `root`) from the file `labels`, in `root` or the working directory.

    The third value has the texts in the column `captions` for each of `files`, in the order of the lines; with this
    column the file needs no labels. The fourth lists the faults: wrong lines, images without a label, labels without an
    image. Raises ValueError for a file that is missing or cannot be read.
    """
    path = root / labels if (root / labels).exists() else Path(os.path.expanduser(labels))
    if not path.exists():
        near = nearest(path.name, ["folder", "none", *(p.name for p in root.iterdir() if p.suffix in _SUFFIXES)])
        raise ValueError(f"labels: expected 'folder', 'none' or a file; there is no {labels!r} in {root} or here{near}")
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{path}: expected labels in a .csv or a .jsonl")
    label_of: dict[str, str | int] = {}
    texts: dict[str, list[str]] = {}
    named, labelled, wrong = set(), set(), []
    columns: set[str] = set()
    here: dict[str, str] = {}  # files by their normal form
    alike = [(other, name) for name in files if (other := here.setdefault(normal(name), name)) != name]
    try:
        with open_file(path) as raw, TextIOWrapper(BufferedReader(raw), "utf-8-sig", newline="") as file:
            for line, row in _csv(file) if path.suffix.lower() == ".csv" else _jsonl(file):
                try:
                    file_name = _name(row, needs_label=captions is None)
                    named.add(name := here.get(normal(file_name), file_name))
                    if "label" in row:
                        labelled.add(name)
                        label = _label(name, row["label"])
                        if label_of.setdefault(name, label) != label:
                            raise ValueError(f"{shown(name)} has another label on an earlier line")
                    if captions is not None:
                        columns.update(map(str, row))
                        texts.setdefault(name, []).extend(captions_of(row.get(captions)))
                except ValueError as error:
                    wrong.append(f"line {line}: {error}")
    except (OSError, csv.Error, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    problems = [
        f"{shown(name)} and {shown(other)} differ only by Unicode normalisation, as {name!a} and {other!a}: rename one"
        for name, other in alike
    ]
    if wrong:
        problems.append(wrong[0] if len(wrong) == 1 else f"{len(wrong):,} lines are wrong:{as_lines(wrong)}")
    if strange := sorted(named.difference(files)):
        near = nearest(strange[0], files)
        problems.append(f"{len(strange):,} of its files are not in {root}: {some(strange)}{near}")
    if captions is not None and captions not in columns:
        there = some(sorted(columns)) or "none"
        problems.append(f"there is no column {captions!r}{nearest(captions, columns)}; it has {there}")
    if (captions is None or labelled) and (lacking := [name for name in files if name not in labelled]):
        problems.append(f"{len(lacking):,} of {len(files):,} images have no label: {some(lacking)}")
    try:
        numbers, classes = encode([label_of[name] for name in files] if labelled and not problems else [])
    except ValueError as error:
        problems.append(str(error))
    if problems:
        return None, None, None, [f"{path}: {problem}" for problem in problems]
    return numbers, classes, None if captions is None else [texts.get(name, ()) for name in files], []


def _csv(file: TextIO) -> Iterator[tuple[int, Any]]:
    """Yield the line and the dict of each row below the header, or a ValueError in place of the dict."""
    rows = csv.reader(file, strict=True)  # else an open quote would swallow the rest of the file
    header: list[str] = []
    try:
        for row in filter(None, rows):
            if not header:
                header = row
                _check_header(header, rows.line_num)
            elif len(row) != len(header):
                counts = f"{len(row)} cells below a header of {len(header)}"
                start = shown(",".join(row))[:60]
                yield rows.line_num, ValueError(f"{start}: {counts}; a text with a comma needs quotes around it")
            else:
                yield rows.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}; a quote in a quoted text is written twice") from None


def _check_header(header: Sequence[str], line: int) -> None:
    """Raise ValueError for names that are there twice, and for columns that are not separated by commas."""
    check_text(",".join(header))
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise ValueError(f"line {line}: the column {twice[0]!r} is there twice")
    if marks := [mark for mark in ";\t|" if len(header) == 1 and mark in header[0]]:
        raise ValueError(f"line {line}: {shown(header[0])[:60]} has {marks[0]!r} between the columns, expected commas")


def _jsonl(file: TextIO) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(file, 1):
        if text.strip():
            try:
                yield line, parse_json(text)
            except (json.JSONDecodeError, RecursionError) as error:
                yield line, ValueError(f"not JSON: {error}")
            except ValueError as error:
                yield line, error


def parse_json(text: str | bytes) -> Any:
    """Return the value in a JSON text.

    Raises:
        ValueError: for a text that is no JSON, and for a key that occurs twice. `json` would take its last value.
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keyed = dict(pairs)
        if len(keyed) < len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"the key {twice!r} is there twice")
        return keyed

    return json.loads(text, object_pairs_hook=table)


def _name(row: Any, needs_label: bool) -> str:
    """Return the file in one row, which may need a label as well."""
    if isinstance(row, ValueError):
        raise row
    name = row.get("file", row.get("file_name")) if isinstance(row, dict) else None  # the latter is Hugging Face's
    if not isinstance(name, str) or (needs_label and "label" not in row):
        raise ValueError(f"expected file{' and label' * needs_label}, got {shown(row)[:60]}")
    return posixpath.normpath(name.replace("\\", "/"))


def _label(name: str, value: Any) -> str | int:
    """Return the label that a row gives to the file `name`."""
    label = value.strip() if isinstance(value, str) else value
    if label is None or label == "":
        raise ValueError(f"{shown(name)} has no label")
    if isinstance(label, str) and re.fullmatch(r"-1|[0-9]{1,9}", label):
        label = int(label)
    if isinstance(label, str) or (type(label) is int and -1 <= label <= MAX_LABEL):
        return label
    raise ValueError(f"expected a name or an integer from 0 to {MAX_LABEL} as label, got {repr(label)[:60]}")


def as_lines(items: Collection[str]) -> str:
    """Return the first few of `items`, a line each, for a message."""
    rest = len(items) - EXAMPLES
    return "".join(f"\n  {item}" for item in islice(items, EXAMPLES)) + (f"\n  and {rest} more" if rest > 0 else "")


def some(names: Sequence[str]) -> str:
    """Return the first few of `names`, for a message."""
    return ", ".join(map(shown, names[:EXAMPLES])) + (", ..." if len(names) > EXAMPLES else "")
