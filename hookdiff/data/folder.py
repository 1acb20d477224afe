"""A folder of image files."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hookdiff.data.decode import SUFFIXES
from hookdiff.data.labels import encode, read_labels, some
from hookdiff.data.source import open_picture
from hookdiff.errors import why_missing


class Folder:
    """Image files at any depth below a folder, in the order of their names.

    Raises ValueError if there is no image. Where images and labels do not match, `problems` has the reasons: they are
    reported together with those of the images.

    Args:
        path: the folder
        labels: "folder": the class of an image is the first folder below `path`, if there are two such folders or more;
            "none": no classes; or a .csv or .jsonl file, in `path` or the working directory, with a `file` (below
            `path`) and a `label` for each image: a name, or an integer from 0 (-1: unknown)
    """

    def __init__(self, path: str, labels: str = "folder") -> None:
        self.path = Path(os.path.expanduser(path))
        if not self.path.is_dir():
            raise ValueError(f"{path} is no folder" if self.path.exists() else f"{path}: {why_missing(self.path)}")
        self.files, others = _find(self.path)
        if not self.files:
            kinds = some([f"{count} {suffix}" for suffix, count in others.most_common()]) or "nothing, it is empty"
            raise ValueError(f"{path} has no image ({', '.join(SUFFIXES)}); found: {kinds}")
        self.problems: list[str] = []
        self.classes: Sequence[str] | None
        if labels == "folder":
            alone = [name for name in self.files if "/" not in name]
            if 0 < len(alone) < len(self.files):
                where = f"{len(alone)} of {len(self.files)} images are in {path} itself, not in a class folder"
                way_out = "move them, or set labels = 'none' or a file of labels"
                self.problems.append(f"{where} ({some(alone)}): {way_out}")
            self.labels, self.classes = encode([] if alone else _first_folders(self.files))
        elif labels == "none":
            self.labels, self.classes = None, None
        else:
            self.labels, self.classes, self.problems = read_labels(self.path, self.files, labels)

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> Any:
        return open_picture(self.describe(index))

    def describe(self, index: int) -> str:
        return os.path.join(self.path, self.files[index])

    def fingerprint(self) -> str:
        found = hashlib.sha256(os.fsencode(self.path.resolve()))
        for index, name in enumerate(self.files):
            try:
                about = os.stat(self.describe(index))
                state = f"{about.st_size} {about.st_mtime_ns}"
            except OSError as error:  # such as a broken link, which is refused when it is read
                state = str(error.errno)
            found.update(os.fsencode(f"\n{name}\0{state}"))
        return found.hexdigest()


def _find(root: Path) -> tuple[list[str], Counter[str]]:
    """Return the images as sorted paths below `root`, with slashes, and the counts of other files by suffix."""
    files, others, seen = [], Counter[str](), set()

    def stop(error: OSError) -> None:
        raise error

    for folder, inside, names in os.walk(root, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder that was already visited
            inside.clear()
            continue
        seen.add(real)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if suffix in SUFFIXES and not name.startswith("."):
                files.append(name if below == "." else f"{below}/{name}")
            else:
                others[suffix or name] += 1
    return sorted(files), others


def _first_folders(files: Sequence[str]) -> list[str]:
    """Return the first folder of each file, or an empty list if there are fewer than two folders."""
    names = [name.partition("/")[0] for name in files]
    return names if len(set(names)) > 1 else []
