"""A folder of image files."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hookdiff.disk.paths import why_missing
from hookdiff.disk.reading import open_file
from hookdiff.errors import nearest
from hookdiff.images.caption_files import read_captions
from hookdiff.images.formats import HEAD, is_picture, suffixes
from hookdiff.images.labels import encode, normal, read_labels, some
from hookdiff.images.picture_reading import open_picture
from hookdiff.images.survey import PassedOver, texts_of_kinds

_CAPTIONS = ".txt"
_NOT_COUNTED = (_CAPTIONS, ".caption", ".json")  # captions beside a picture of the same name
_OF_SYSTEMS = ("thumbs.db", "desktop.ini")  # of Windows; the Macintosh hides such files


class Folder:
    """Image files at any depth below a folder, in the order of their names.

    The suffix of a file decides whether it is an image; without a suffix, its first bytes do. `passed_over`
    counts other files by kind, but not hidden files, captions beside their images, and the file of labels.

    If images and labels do not match, `problems` lists the reasons. They are reported together with faulty
    images.

    Args:
        path: the folder
        labels: "folder": the class of an image is the first folder below `path`, if there are two such folders or more;
            "none": no classes; or a .csv or .jsonl file, in `path` or the working directory, with a `file` (below
            `path`) and a `label` for each image: a name, or an integer from 0 (-1: unknown)
        captions: "txt": the lines of the .txt of the same name beside an image are its captions; or the name of a
            column of the file that `labels` names, with a text (in a .jsonl also a list of texts) for each image. The
            file then needs no labels. Images without a text have no captions

    Raises:
        ValueError: if there is no image, or the captions that `captions` names are missing.
    """

    def __init__(self, path: str, labels: str = "folder", captions: str | None = None) -> None:
        self.path = Path(os.path.expanduser(path))
        if not self.path.is_dir():
            raise ValueError(f"{path} is no folder" if self.path.exists() else f"{path}: {why_missing(self.path)}")
        self.files, self.passed_over, beside = _find(self.path, labels)
        if not self.files:
            kinds = some(texts_of_kinds(self.passed_over)) or "nothing, it is empty"
            raise ValueError(f"{path} has no image ({', '.join(sorted(suffixes()))}); found: {kinds}")
        in_files, in_column = captions == "txt", captions if captions != "txt" else None
        if in_files and not beside:
            raise ValueError(f"captions = 'txt': no image in {path} has a .txt of its name beside it")
        if in_column is not None and labels in ("folder", "none"):
            expected = "expected 'txt', or a column of a file that `labels` names"
            raise ValueError(f"captions = {captions!r}: {expected}{nearest(in_column, ['txt'])}")
        self._beside: Mapping[str, str] | None = beside if in_files else None
        self._column: Sequence[Sequence[str]] | None = None
        self.problems: list[str] = []
        self.classes: Sequence[str] | None
        if labels == "folder":
            alone = [name for name in self.files if "/" not in name]
            if 0 < len(alone) < len(self.files):
                where = f"{len(alone):,} of {len(self.files):,} images are in {path} itself, not in a class folder"
                way_out = "move them, or set labels = 'none' or a file of labels"
                self.problems.append(f"{where} ({some(alone)}): {way_out}")
            folders = [] if alone else [name.partition("/")[0] for name in self.files]
            self.labels, self.classes = encode(folders if len(set(folders)) > 1 else [])
        elif labels == "none":
            self.labels, self.classes = None, None
        else:
            columns = read_labels(self.path, self.files, labels, in_column)
            self.labels, self.classes, self._column, self.problems = columns

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> Any:
        return open_picture(self.describe(index))

    def describe(self, index: int) -> str:
        return str(self.path_of(index))

    def path_of(self, index: int) -> Path:
        """Return the file of the image at `index`."""
        return self.path / self.files[index]

    @cached_property
    def texts(self) -> Mapping[str, Sequence[Sequence[str]]] | None:
        """The captions of each image as `text`; None without the key `captions`. Files are read at the first use.

        Raises:
            UserError: for files that cannot be read; the message lists them.
        """
        if self._beside is None:
            return None if self._column is None else {"text": self._column}
        stems = (os.path.splitext(normal(file))[0] for file in self.files)
        return {"text": read_captions(self.path, list(map(self._beside.get, stems)))}

    def fingerprint(self) -> str:
        digest = hashlib.sha256(os.fsencode(self.path.resolve()))
        for index, name in enumerate(self.files):
            try:
                about = os.stat(self.describe(index))
                state = f"{about.st_size} {about.st_mtime_ns}"
            except OSError as error:  # such as a broken link, which is refused when it is read
                state = str(error.errno)
            digest.update(os.fsencode(f"\n{name}\0{state}"))
        return digest.hexdigest()


def _find(root: Path, labels: str) -> tuple[list[str], PassedOver, dict[str, str]]:
    """Return the images as sorted paths below `root`, with slashes, and the other files except that of the `labels`.

    The third value has the files of captions by the paths of their images without a suffix.
    """
    files: list[str] = []
    others: PassedOver = {}
    captions: dict[str, str] = {}
    known = suffixes()
    labels = os.path.relpath(root / os.path.expanduser(labels), root).replace(os.sep, "/")
    for below, names in _walk(root):
        pictures, rest, stems = [], [], set()
        for name in names:
            stem, suffix = os.path.splitext(normal(name))
            suffix = suffix.lower()
            if name.startswith(".") or name.lower() in _OF_SYSTEMS:
                continue
            if suffix in known or (suffix in ("", ".") and _begins_as_picture(root / below / name)):
                pictures.append(name)
                stems.add(stem)
            else:
                rest.append((stem, suffix, name))
        files += [f"{below}{name}" for name in pictures]
        for stem, suffix, name in sorted(rest):
            if suffix == _CAPTIONS and stem in stems:
                captions[normal(f"{below}{stem}")] = f"{below}{name}"
            if (suffix in _NOT_COUNTED and stem in stems) or f"{below}{name}" == labels:
                continue
            kind = suffix if suffix.strip(".") else "without a suffix"
            count, first = others.get(kind, (0, f"{below}{name}"))
            others[kind] = count + 1, min(first, f"{below}{name}")
    return sorted(files), others, captions


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder at `root` and below, "" or a path that ends in a slash, and the names of its files."""
    seen = set()

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
        yield "" if below == "." else f"{below}/", names


def _begins_as_picture(path: Path) -> bool:
    try:
        with open_file(path) as file:
            return is_picture(file.read(HEAD) or b"")
    except OSError:  # such as a pipe
        return False
