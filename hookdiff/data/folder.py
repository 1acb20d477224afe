"""A folder of image files."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookdiff.data.decode import SUFFIXES
from hookdiff.errors import nearest

_EXAMPLES = 5


class Folder:
    """The images below `path`, at any depth, in the order of their names.

    labels: "folder": the class of an image is the first folder below `path` that it is in; without such folders, or
    with one alone, there are no classes. "none": there are none anyway. Else a file, looked for in `path` first,
    with a `file` (below `path`) and a `label` for each image: a table (.csv, the first line names the columns) or a
    JSON object a line (.jsonl). Labels that are whole numbers are kept (-1: unknown), names are numbered in
    alphabetical order.

    Raises ValueError when there is no image, or a label is missing or too many.
    """

    def __init__(self, path: str, labels: str = "folder") -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise ValueError(_no_folder(self.path))
        self.files, others = _find(self.path)
        if not self.files:
            raise ValueError(_no_image(self.path, others))
        if labels == "none":
            names: Sequence[str | int] | None = None
        elif labels == "folder":
            names = _by_folder(self.path, self.files)
        else:
            names = _by_file(self.path, self.files, labels)
        self.labels, self.classes = number(names)

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> Any:
        """Open the image; Pillow reads its pixels when they are asked for."""
        from PIL import Image

        return Image.open(self.describe(index))

    def describe(self, index: int) -> str:
        """Return the path of the file."""
        return os.path.join(self.path, self.files[index])

    def fingerprint(self) -> str:
        """Return a hash of every file's name, size and time of change."""
        found = hashlib.sha256(str(self.path.resolve()).encode())
        for index, name in enumerate(self.files):
            about = os.stat(self.describe(index))
            found.update(f"\n{name}\0{about.st_size}\0{about.st_mtime_ns}".encode("utf-8", "surrogateescape"))
        return found.hexdigest()


def number(names: Sequence[str | int] | None) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return labels (n, int64) and the names of the classes; whole numbers are labels themselves, without names."""
    if names is None:
        return None, None
    if all(isinstance(name, int) for name in names):
        return torch.tensor(names, dtype=torch.int64), None
    classes = sorted({str(name) for name in names})
    position = {name: k for k, name in enumerate(classes)}
    return torch.tensor([position[str(name)] for name in names]), tuple(classes)


def _find(root: Path) -> tuple[list[str], Counter[str]]:
    """Return the images as sorted paths below `root`, with slashes, and how many other files of which suffix."""
    files, others, seen = [], Counter[str](), set()

    def stop(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, inside, names in os.walk(root, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        inside[:] = [] if real in seen else [name for name in inside if not name.startswith(".")]
        if real in seen:  # a link that leads back
            continue
        seen.add(real)
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if suffix in SUFFIXES and not name.startswith("."):
                files.append(name if below == "." else f"{below}/{name}")
            else:
                others[suffix or name] += 1
    return sorted(files), others


def _by_folder(root: Path, files: Sequence[str]) -> list[str] | None:
    alone = [name for name in files if "/" not in name]
    if len(alone) == len(files):
        return None
    if alone:
        raise ValueError(
            f"{len(alone)} of {len(files)} images are in no class folder but in {root} itself ({_some(alone)}): move "
            "them, or say labels = 'none' or a file of labels"
        )
    names = [name.partition("/")[0] for name in files]
    return names if len(set(names)) > 1 else None


def _by_file(root: Path, files: Sequence[str], labels: str) -> list[str | int]:
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
            f"{path} names {len(strange)} files that are not in {root}: {_some(strange)}{nearest(strange[0], files)}"
        )
    if lacking := [name for name in files if name not in found]:
        raise ValueError(f"{path} has no label for {len(lacking)} of {len(files)} images: {_some(lacking)}")
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


def _no_folder(path: Path) -> str:
    if path.exists():
        return f"{path} is no folder"
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    near = nearest(missing, [p.name for p in parent.iterdir() if p.is_dir()])
    return f"{path}: no such folder: {parent} has no {missing!r}{near}"


def _no_image(path: Path, others: Counter[str]) -> str:
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(_EXAMPLES))
    return f"{path} has no image ({', '.join(SUFFIXES)}); " + (f"found: {kinds}" if kinds else "it is empty")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
