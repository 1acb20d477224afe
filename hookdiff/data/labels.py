"""Labels as numbers and names, and the files that hold them."""

import csv
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from hookdiff.errors import nearest

EXAMPLES = 5  # the most examples in a message
_SUFFIXES = (".csv", ".jsonl")


def encode(labels: Sequence[Any]) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return labels as numbers (n, int64), and the names of the classes in alphabetical order.

    Integer labels have no names (None). An empty list gives (None, None). Raises ValueError for labels of other types.
    """
    examples = {type(label): label for label in labels}
    if not labels:
        return None, None
    if examples.keys() == {int}:
        return torch.tensor(labels), None
    if examples.keys() != {str}:
        raise ValueError(f"labels must be all integers or all names, not {some(list(map(repr, examples.values())))}")
    classes = tuple(sorted(set(labels)))
    position = {name: k for k, name in enumerate(classes)}
    return torch.tensor([position[label] for label in labels]), classes


def read_labels(root: Path, files: Sequence[str], labels: str) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return labels and classes of `files` (below `root`) from the file `labels`, in `root` or the working directory.

    Raises ValueError for a file that is missing or broken, for an image without label and a label without image.
    """
    path = root / labels if (root / labels).is_file() else Path(labels).expanduser()
    if not path.is_file():
        near = nearest(path.name, ["folder", "none", *(p.name for p in root.iterdir() if p.suffix in _SUFFIXES)])
        raise ValueError(f"labels: expected 'folder', 'none' or a file; there is no {labels!r} in {root} or here{near}")
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{path}: expected labels in a .csv or a .jsonl")
    found: dict[str, str | int] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, row in _csv(file) if path.suffix.lower() == ".csv" else _jsonl(file):
                name, label = _entry(line, row)
                if found.setdefault(name, label) != label:
                    raise ValueError(f"line {line}: {name} has another label on an earlier line")
        known = set(files)
        if strange := [name for name in found if name not in known]:
            near = nearest(strange[0], files)
            raise ValueError(f"{len(strange)} of its files are not in {root}: {some(strange)}{near}")
        if lacking := [name for name in files if name not in found]:
            raise ValueError(f"{len(lacking)} of {len(files)} images have no label: {some(lacking)}")
        return encode([found[name] for name in files])
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _csv(file: TextIO) -> Iterator[tuple[int, Any]]:
    rows = csv.DictReader(file)
    for row in rows:
        yield rows.line_num, row


def _jsonl(file: TextIO) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(file, 1):
        if text.strip():
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ValueError(f"line {line}: not JSON: {error}") from None
            yield line, row


def _entry(line: int, row: Any) -> tuple[str, str | int]:
    """Return the file and the label in one row."""
    name = row.get("file", row.get("file_name")) if isinstance(row, dict) else None  # the latter is Hugging Face's
    if not isinstance(name, str) or "label" not in row:
        raise ValueError(f"line {line}: expected file and label, got {str(row)[:60]}")
    label = row["label"].strip() if isinstance(row["label"], str) else row["label"]
    if label is None or label == "":
        raise ValueError(f"line {line}: {name} has no label")
    if isinstance(label, str) and re.fullmatch(r"-1|[0-9]{1,9}", label):
        label = int(label)
    if type(label) not in (str, int) or (isinstance(label, int) and label < -1):
        raise ValueError(f"line {line}: expected a name or an integer from 0 as label, got {label!r}")
    return posixpath.normpath(name.replace("\\", "/")), label


def some(names: Sequence[str]) -> str:
    """Return the first few of `names`, for a message."""
    return ", ".join(names[:EXAMPLES]) + (", ..." if len(names) > EXAMPLES else "")
