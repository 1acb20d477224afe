"""A folder of image files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hookdiff.data.decode import SUFFIXES
from hookdiff.data.labels import from_file, number, some
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
            names = from_file(self.path, self.files, labels)
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
            try:
                about = os.stat(self.describe(index))
                state = f"{about.st_size} {about.st_mtime_ns}"
            except OSError as error:  # a link to nothing, say; reading it will tell
                state = str(error.errno)
            found.update(f"\n{name}\0{state}".encode("utf-8", "surrogateescape"))
        return found.hexdigest()


def _find(root: Path) -> tuple[list[str], Counter[str]]:
    """Return the images as sorted paths below `root`, with slashes, and how many other files of which suffix."""
    files, others, seen = [], Counter[str](), set()

    def stop(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, inside, names in os.walk(root, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        inside[:] = [] if real in seen else sorted(name for name in inside if not name.startswith("."))
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
            f"{len(alone)} of {len(files)} images are in no class folder but in {root} itself ({some(alone)}): move "
            "them, or say labels = 'none' or a file of labels"
        )
    names = [name.partition("/")[0] for name in files]
    return names if len(set(names)) > 1 else None


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
