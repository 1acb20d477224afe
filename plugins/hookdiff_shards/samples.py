"""The samples of all shards: for each sample the position of its picture, its label and its name."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor

from hookdiff import StorageError, nearest, shown
from hookdiff.images import Kind, open_picture, some
from hookdiff_shards.files import Files
from hookdiff_shards.index import PICTURES, SMALL, Index, is_picture
from hookdiff_shards.labels import encode_labels
from hookdiff_shards.tar import BLOCK, Read

_PICKLED = ("pkl", "pickle", "pyd", "pth", "pt")
_LABEL = "cls"  # the extension of labels in webdataset
_LARGEST = 1 << 30  # bytes that are read for one sample
_WORTH = 1 << 16  # bytes between two members: to read up to this many takes less time than a second request


class Column:
    """The members of one kind: for each sample a row in the table of `indices`, or -1 for a sample without one."""

    def __init__(self, indices: Sequence[Index], rows: Sequence[Any]) -> None:
        self.kind, self.start, self.size, self.mode, self.width, self.height, self.head = (
            numpy.concatenate([index.column(name)[part] for index, part in zip(indices, rows, strict=True)])
            for name in ("kind", "start", "size", "mode", "width", "height", "head")
        )
        self.is_lacking = numpy.concatenate(rows) < 0
        self.mode[self.is_lacking] = self.size[self.is_lacking] = 0


class Samples:
    """The samples of `files`, in the order of the shards and, in a shard, of their first members.

    `problems` lists the problems of single samples. Raises ValueError if there is no sample, or if no sample has a
    member that is asked for.
    """

    encoded: Any = None  # metadata of stored latents and conditions, as a table
    read_captions: Callable[[], Sequence[Sequence[str]]] | None = None

    def __init__(
        self,
        files: Files,
        indices: Sequence[Index],
        image: str | None = None,
        label: str = "auto",
        classes: tuple[str, ...] | None = None,
    ) -> None:
        self.files, self.problems, self.image = files, list[str](), image
        self.names = [(index.keys, index.key_ends) for index in indices]
        self.extensions, self.modes = [index.extensions for index in indices], [index.modes for index in indices]
        lengths = [len(index) for index in indices]
        self.first = numpy.cumsum([0, *lengths])[:-1]  # index of the first sample of each shard
        self.shard = numpy.repeat(numpy.arange(len(indices), dtype=numpy.int32), lengths)
        if not len(self):
            names = some([shard.name for shard in files.shards])
            raise ValueError(f"there is no sample in {names}; its members have names such as 0001.png and 0001.cls")
        self.pictures = self.column(indices, [extension_of(image, "image")] if image else PICTURES)
        self.labels: Tensor | None = None
        self.classes: Sequence[str] | None = None
        has_labels = any(_LABEL in known for known in self.extensions)
        if label != "none" and (label != "auto" or has_labels):
            self._read_labels(indices, extension_of(_LABEL if label == "auto" else label, "label"), classes)

    def __len__(self) -> int:
        return len(self.shard)

    @cached_property
    def texts(self) -> Mapping[str, Sequence[Sequence[str]]] | None:
        """The captions of each sample as `text`, read at the first use; None if the config asks for none."""
        return None if self.read_captions is None else {"text": self.read_captions()}

    def column(self, indices: Sequence[Index], extensions: Collection[str]) -> Column:
        """Return the column of the members with one of `extensions`.

        Raises ValueError if no sample has such a member, or a sample has several.
        """
        rows, counts = map(numpy.concatenate, zip(*[index.rows(extensions) for index in indices], strict=True))
        wanted = " or ".join(f".{shown(extension)}" for extension in extensions)
        if not counts.any():
            known = Counter(self.extensions[number][kind] for number, kind in _kinds(indices))
            readable = [extension for extension in known if extension.rpartition(".")[2] not in _PICKLED]
            near = nearest(next(iter(extensions)), readable) if len(extensions) == 1 else ""
            raise ValueError(f"no sample has a {wanted}{near}; they have {some([f'.{name}' for name in known])}")
        if (counts > 1).any():
            index = int(counts.argmax())
            raise ValueError(
                f"{shown(self.name(index))} has {counts[index]} pictures ({wanted}): set image to one of these"
            )
        return Column(indices, numpy.split(rows, self.first[1:]))

    def refuse_lacking(self, column: Column, what: str) -> None:
        """Add a problem for the samples that have no member in `column`; `what` is its name."""
        if lacking := column.is_lacking.nonzero()[0].tolist():
            names = some([self.name(index) for index in lacking])
            self.problems.append(f"{len(lacking):,} of {len(self):,} samples have no {shown(what)}: {names}")

    def _read_labels(self, indices: Sequence[Index], extension: str, classes: tuple[str, ...] | None) -> None:
        before = len(self.problems)
        column = self.column(indices, [extension])
        self.refuse_lacking(column, f".{extension}")
        sizes = column.size

        def name_of(index: int) -> str:
            return shown(self.name(index, extension))

        if is_picture(extension) or (sizes > SMALL).any():
            largest = int(sizes.argmax())
            text = f"{name_of(largest)} has {sizes[largest]} bytes, expected a label of at most {SMALL}"
            self.problems.append(text)
        if len(self.problems) == before:
            texts = [index.text(row) for index in indices for row in index.rows([extension])[0].tolist()]
            self.labels, self.classes, problems = encode_labels(texts, name_of, classes)
            self.problems += problems

    def name(self, index: int, extension: str = "") -> str:
        """Return the name of a sample, or of one of its members, for messages."""
        return f"{self.files.shards[self.shard[index]].name}[{self.key(index, extension)}]"

    def key(self, index: int, extension: str = "") -> str:
        """Return the name of a sample, or of one of its members, in its shard."""
        shard = int(self.shard[index])
        keys, ends = self.names[shard]
        sample = index - int(self.first[shard])
        key = bytes(keys[ends[sample - 1] if sample else 0 : ends[sample]]).decode("utf-8", "surrogateescape")
        return f"{key}{'.' * bool(extension)}{extension}"

    def describe(self, index: int) -> str:
        if self.pictures.is_lacking[index]:
            return self.name(index)
        return self.name(index, self.extensions[self.shard[index]][self.pictures.kind[index]])

    def members(self, index: int, columns: Sequence[Column]) -> list[bytes]:
        """Return the bytes of the members of a sample in these columns; members that are close share one request.

        Raises OSError, ValueError for a member that is missing or too large, and StorageError for a shard that has
        changed since its index was made, or cannot be read any more.
        """
        if any(column.is_lacking[index] for column in columns):
            raise ValueError("it has no picture" if self.image is None else f"it has no .{shown(self.image)}")
        # The headers before the members are read too, to check that the shard has not changed.
        spans = sorted(
            (int(column.start[index]) - BLOCK, int(column.size[index]) + BLOCK, k) for k, column in enumerate(columns)
        )
        contents, begin, content = dict[int, bytes](), 0, b""
        for place, (start, size, number) in enumerate(spans):
            if start + size > begin + len(content):
                end = start + size
                for later, more, _ in spans[place + 1 :]:
                    end = later + more if later - end <= _WORTH else end
                read = partial(self.files.read, int(self.shard[index]))
                begin, content = start, self._read(index, start, end - start, read)
            contents[number] = self._checked(index, columns[number], content[start - begin : start - begin + size])
        return [contents[number] for number in range(len(columns))]

    def member(self, index: int, column: Column, read: Read) -> bytes:
        """Return the bytes of one member of a sample; `read` reads its shard. Raises as `members` does."""
        content = self._read(index, int(column.start[index]) - BLOCK, int(column.size[index]) + BLOCK, read)
        return self._checked(index, column, content)

    def _read(self, index: int, start: int, size: int, read: Read) -> bytes:
        if size > _LARGEST + BLOCK:
            raise ValueError(f"its {size - BLOCK} bytes are too many, expected at most {_LARGEST}")
        content = read(start, size)
        if len(content) != size:
            raise StorageError(
                f"{shown(self.name(index))}: its shard has become shorter by at least {size - len(content)} bytes; "
                "restore the shard, or start again"
            )
        return content

    def _checked(self, index: int, column: Column, content: bytes) -> bytes:
        """Return the bytes of a member, given the `content` with its header."""
        if crc32(content[:BLOCK]) != column.head[index]:
            raise StorageError(
                f"{shown(self.name(index))} has moved: its shard has changed; start again to read it anew"
            )
        return content[BLOCK:]

    def known_sizes(self) -> Tensor:
        """Return height and width of each picture: n 2, int64; 0, 0 for a picture without a header in the index."""
        sides, known = numpy.stack([self.pictures.height, self.pictures.width], 1), self.pictures.mode > 0
        return torch.from_numpy(numpy.where(known[:, None], sides, 0))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.image).encode())
        for shard in self.files.shards:
            digest.update(f"\n{shard.place}\0{shard.size}\0{shard.mark}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


class Shards(Samples):
    """Pictures in shards, and their labels."""

    def load(self, index: int) -> Any:
        (content,) = self.members(index, [self.pictures])
        return open_picture(io.BytesIO(content))

    def known_kinds(self) -> tuple[list[Kind], list[int]]:
        """Return the kinds of the pictures with headers in the indices, and the positions of the other pictures."""
        kinds, known = dict[tuple[str, int, int], Kind](), self.pictures.mode > 0
        about = numpy.stack([self.shard, self.pictures.mode, self.pictures.width, self.pictures.height], 1)[known]
        (positions,) = known.nonzero()
        rows, firsts, counts = numpy.unique(about, axis=0, return_index=True, return_counts=True)
        for (shard, mode, width, height), first, count in zip(rows.tolist(), firsts, counts.tolist(), strict=True):
            key = (self.modes[shard][mode], width, height)
            kind = kinds.setdefault(key, Kind(*key, example=shown(self.describe(int(positions[first])))))
            kind.count += count
        return list(kinds.values()), (~known).nonzero()[0].tolist()


def _kinds(indices: Sequence[Index]) -> list[tuple[int, int]]:
    """Return each extension as the number of its shard and its number in that shard, the most frequent first."""
    ordered = []
    for number, index in enumerate(indices):
        kinds, counts = numpy.unique(index.column("kind"), return_counts=True)
        ordered += [(number, int(kind)) for kind in kinds[numpy.argsort(-counts, kind="stable")]]
    return ordered


def extension_of(text: str, option: str) -> str:
    """Return an extension in the form of the indices, such as "mask.png". Raises ValueError for a pickle."""
    extension = text.lower().removeprefix(".")
    if (last := extension.rpartition(".")[2]) in _PICKLED:
        raise ValueError(f"{option}: .{last} is pickled, and is never read; save arrays as .npy")
    return extension


def is_array(image: str | None) -> bool:
    """Return whether `image`, the extension of the pictures, means arrays."""
    return image is not None and extension_of(image, "image").rpartition(".")[2] == "npy"
