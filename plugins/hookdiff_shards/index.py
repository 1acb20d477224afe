"""The index of one shard: the positions of its members, the sizes of its pictures, and the bytes of small members."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy
from attrs import define

from hookdiff import shown
from hookdiff.images import num_channels, open_picture, suffixes, upright_size
from hookdiff.options import structured
from hookdiff_shards.files import Shard
from hookdiff_shards.stored import are_ends, load_arrays, save_arrays, state_of
from hookdiff_shards.tar import BLOCK, Read, members

PICTURES = frozenset(suffix.removeprefix(".") for suffix in suffixes())
SMALL = 64  # bytes of the largest member that is kept in the index, such as a label

_FORMAT = 2  # an index with another format number is not used
_HEAD = 60 << 10  # bytes at the beginning of a picture that are read for its header
_LARGEST = 1 << 15  # largest width and height that are taken from a header; a larger picture is read as a whole
_NAME = re.compile(r"(?s)((?:.*/)?[^./]+)\.([^/]+)")  # splits names as the library webdataset does
_COLUMNS = ("sample", "kind", "start", "size", "mode", "width", "height", "end", "head")


def is_picture(extension: str) -> bool:
    """Return whether members of this extension, such as "png" or "mask.png", are pictures."""
    return extension.rpartition(".")[2] in PICTURES


@define(eq=False)
class Index:
    """The samples of a shard, in the order of their first members. The members of a sample need not be neighbours.

    A sample is all members that have the same name up to the first dot; the rest of the name is the extension, in
    lower case.
    """

    keys: Any  # uint8, the names of the samples one after the other
    key_ends: Any  # for each sample, the end of its name in `keys`
    table: Any  # a row for each member, with the columns `_COLUMNS`
    texts: Any  # uint8, the bytes of the small members, one after the other
    extensions: tuple[str, ...]  # the extension of each `kind`
    modes: tuple[str, ...]  # Pillow's name of each `mode`; the first stands for a picture without a known header

    def __len__(self) -> int:
        return len(self.key_ends)

    def column(self, name: str) -> Any:
        """Return a column of the table: int64, a value for each member."""
        return self.table[:, _COLUMNS.index(name)]

    def rows(self, extensions: Collection[str]) -> tuple[Any, Any]:
        """Return for each sample the row of a member with one of `extensions`, or -1, and its number of such rows."""
        kinds = [number for number, extension in enumerate(self.extensions) if extension in extensions]
        (rows,) = numpy.isin(self.column("kind"), kinds).nonzero()
        samples = self.column("sample")[rows]
        row_of_sample = numpy.full(len(self), -1)
        row_of_sample[samples] = rows
        return row_of_sample, numpy.bincount(samples, minlength=len(self))

    def text(self, row: int) -> bytes:
        """Return the bytes of a small member."""
        ends = self.column("end")
        return bytes(self.texts[ends[row - 1] if row else 0 : ends[row]])


def make(read: Read, total: int, block: int) -> Index:
    """Read the headers of a shard of `total` bytes, and of its pictures; `block` is the least to read at a time.

    Raises ValueError for a shard that cannot be read, and for a sample with two members of one name.
    """
    read = buffered(read, block)
    samples, kinds, modes, rows, texts = dict[str, int](), dict[str, int](), {"": 0}, list[list[int]](), bytearray()
    for member in members(read, total):
        name = _NAME.fullmatch(member.name)
        if not name or re.fullmatch(r"__[^/]*__", member.name):  # webdataset's own notes have such names
            continue
        key, extension = name[1], name[2].lower()
        mode, width, height = "", 0, 0
        if is_picture(extension):
            mode, width, height = _header(read(member.start, min(member.size, _HEAD)), member.size)
        elif member.size <= SMALL:
            texts += read(member.start, member.size)
        sample, kind = samples.setdefault(key, len(samples)), kinds.setdefault(extension, len(kinds))
        mode_number = modes.setdefault(mode, len(modes))
        rows.append([sample, kind, member.start, member.size, mode_number, width, height, len(texts), member.head])
    twice = Counter((row[0], row[1]) for row in rows).most_common(1)
    if twice and twice[0][1] > 1:
        sample, kind = twice[0][0]
        name_of_both = f"{list(samples)[sample]}.{list(kinds)[kind]}"
        raise ValueError(f"has {twice[0][1]} members called {shown(name_of_both)}; give each a name of its own")
    names = [key.encode("utf-8", "surrogateescape") for key in samples]
    return Index(
        numpy.frombuffer(b"".join(names), numpy.uint8),
        numpy.cumsum([len(name) for name in names], dtype=numpy.int64),
        numpy.array(rows, numpy.int64).reshape(-1, len(_COLUMNS)),
        numpy.frombuffer(bytes(texts), numpy.uint8),
        tuple(kinds),
        tuple(modes),
    )


def buffered(read: Read, block: int) -> Read:
    """Return a function like `read` that reads at least `block` bytes, and caches them: members lie side by side."""
    begin, content = 0, b""

    def taken(start: int, size: int) -> bytes:
        nonlocal begin, content
        if not begin <= start <= start + size <= begin + len(content):
            begin, content = start, read(start, max(size, block))
        return content[start - begin : start - begin + size]

    return taken


def _header(head: bytes, size: int) -> tuple[str, int, int]:
    """Return mode, width and height of a picture of `size` bytes that begins with `head`; ("", 0, 0) if that fails."""
    try:
        with open_picture(io.BytesIO(head)) as image:
            # In formats other than these, the orientation of a picture may come after its pixels.
            if len(head) < size and image.format not in ("JPEG", "PNG"):
                return "", 0, 0
            width, height = upright_size(image)
            is_usual = 0 < width <= _LARGEST and 0 < height <= _LARGEST
            return (str(image.mode), width, height) if is_usual else ("", 0, 0)
    except Exception:  # a decoder may raise any error; the survey reads the whole picture and reports a damaged one
        return "", 0, 0


@define(frozen=True)
class _About:
    """The metadata in the file of an index, beside its arrays."""

    format: int
    shard: str
    size: int
    mark: str
    extensions: tuple[str, ...]
    modes: tuple[str, ...]


def save(index: Index, shard: Shard, path: Path) -> None:
    """Write the index of `shard`. Raises OSError."""
    about = state_of(shard, format=_FORMAT, extensions=index.extensions, modes=index.modes)
    arrays = {"keys": index.keys, "key_ends": index.key_ends, "table": index.table, "texts": index.texts}
    save_arrays(path, about, arrays)


def load(path: Path, shard: Shard) -> Index | None:
    """Return the index of `shard` in a file; None if the shard has changed since the file was made.

    Raises OSError, ValueError and errors of many other types for a file that is missing or damaged.
    """
    if (stored := load_arrays(path, state_of(shard, format=_FORMAT))) is None:
        return None
    about = structured(_About, stored[0])
    index = Index(**stored[1], extensions=about.extensions, modes=about.modes)
    _check(index, shard.size)
    return index


def _check(index: Index, total: int) -> None:
    """Raise ValueError if a forged index would make the reading of samples fail."""
    shapes = [(each.dtype.name, each.ndim) for each in (index.keys, index.key_ends, index.table, index.texts)]
    good: list[Callable[[], Any]] = [
        lambda: shapes == [("uint8", 1), ("int64", 1), ("int64", 2), ("uint8", 1)],
        lambda: index.table.shape[1] == len(_COLUMNS),
        lambda: are_ends(index.key_ends, len(index.keys)),
        lambda: are_ends(index.column("end"), len(index.texts)),
        lambda: _within(index.column("sample"), len(index) - 1),
        lambda: _within(index.column("kind"), len(index.extensions) - 1),
        lambda: _within(index.column("mode"), len(index.modes) - 1),
        lambda: _within(index.column("width"), _LARGEST) and _within(index.column("height"), _LARGEST),
        lambda: _within(index.column("start") - BLOCK, total) and _within(index.column("size"), total),
        lambda: _within(index.column("start") + index.column("size"), total),
        lambda: index.modes[0] == "" and all(num_channels(mode) for mode in index.modes[1:]),
    ]
    if not all(check() for check in good):
        raise ValueError("it is of another shard")


def _within(values: Any, most: int) -> bool:
    return bool(((values >= 0) & (values <= most)).all())
