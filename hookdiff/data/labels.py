"""Names and numbers of classes, and the files that tell them."""

from __future__ import annotations

import csv
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookdiff.errors import nearest

_EXAMPLES = 5


def number(names: Sequence[str | int] | None) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return labels (n, int64) and the names of the classes; whole numbers are labels themselves, without names."""
    if names is None:
        return None, None
    if all(isinstance(name, int) for name in names):
        return torch.tensor(names, dtype=torch.int64), None
    classes = sorted({str(name) for name in names})
    position = {name: k for k, name in enumerate(classes)}
    return torch.tensor([position[str(name)] for name in names]), tuple(classes)


def from_file(root: Path, files: Sequence[str], labels: str) -> list[str | int]:
    """Return the label of each of `files` (below `root`) as the file `labels`, in `root` or here, tells it.

    Raises ValueError for a file that is missing or broken, and for labels that are missing or too many.
    """
    path = root / labels if (root / labels).is_file() else Path(labels).expanduser()
    if not path.is_file():
        near = nearest(
            path.name, ["folder", "none", *(p.name for p in root.iterdir() if p.suffix in (".csv", ".jsonl"))]
        )
        raise ValueError(
            f"labels: expected 'folder', 'none' or a file: there is no {labels!r}, in {root} or here{near}"
        )
    readers = {".csv": _csv, ".jsonl": _jsonl}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: expected labels in a .csv or a .jsonl")
    found: dict[str, str | int] = {}
    try:
        for line, row in readers[path.suffix.lower()](path):
            name, label = _row(path, line, row)
            if found.setdefault(name, label) != label:
                raise ValueError(f"{path}: line {line}: {name} has been given another label before")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    known = set(files)
    if strange := [name for name in found if name not in known]:
        raise ValueError(
            f"{path} names {len(strange)} files that are not in {root}: {some(strange)}{nearest(strange[0], files)}"
        )
    if lacking := [name for name in files if name not in found]:
        raise ValueError(f"{path} has no label for {len(lacking)} of {len(files)} images: {some(lacking)}")
    given = [found[name] for name in files]
    if any(isinstance(label, int) for label in given) and not all(isinstance(label, int) for label in given):
        word = next(label for label in given if isinstance(label, str))
        raise ValueError(f"{path}: some labels are whole numbers and some are not, as {word!r}")
    return given


def _csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                yield rows.line_num, row
        except csv.Error as error:
            raise ValueError(f"{path}: line {rows.line_num}: {error}") from None


def _jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}: line {line}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {line}: expected an object, got {text.strip()[:40]}")
            yield line, row


def _row(path: Path, line: int, row: Mapping[str, Any]) -> tuple[str, str | int]:
    """Return file and label of one line."""
    name = row.get("file", row.get("file_name"))  # the latter is Hugging Face's
    if "label" not in row or not isinstance(name, str):
        raise ValueError(f"{path}: line {line}: expected file and label, got {', '.join(map(str, row)) or 'nothing'}")
    label = row["label"].strip() if isinstance(row["label"], str) else row["label"]
    if label is None or label == "":
        raise ValueError(f"{path}: line {line}: {name} has no label")
    if isinstance(label, str) and re.fullmatch(r"-1|[0-9]{1,9}", label):
        label = int(label)
    if not isinstance(label, (str, int)) or isinstance(label, bool) or (isinstance(label, int) and label < -1):
        raise ValueError(f"{path}: line {line}: expected a name or a number from 0 on as label, got {label!r}")
    return posixpath.normpath(name.replace("\\", "/")), label


def some(names: Sequence[str]) -> str:
    """Return the first few of `names`, for a message."""
    return ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
