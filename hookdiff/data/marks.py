"""Hashes of the parts of the data, by which a resumed run finds the parts that have changed."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from attrs import define
from torch import Tensor

from hookdiff.data.memory import InMemory

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed
    from hookdiff.data.source import AnySource

_AT_ONCE = 1024  # rows


@define(frozen=True)
class Mark:
    """Hashes of one part of the data, such as its labels. The order of the rows changes only `ordered`."""

    num: int  # rows
    ordered: str
    members: str
    files: str = ""  # fingerprint of the source, if the rows are only names

    def change(self, before: Mark) -> str:
        """Return in words how the part has changed since `before`; "" if it is the same."""
        if self.num != before.num:
            return f"{before.num:,} -> {self.num:,}"
        if self.members != before.members:
            return "others"
        if self.ordered != before.ordered:
            return "in another order"
        return "edited, moved or written anew" if self.files != before.files else ""


def marks_of_data(feed: Feed) -> dict[str, Mark]:
    """Return the marks of the parts of the data of a `Feed`, by the names of the parts in messages.

    Pictures have a mark if they are in memory, or if their source has a `fingerprint`.
    """
    reader, name = feed.reader, "pictures" if len(feed.picture_shape) == 3 else "inputs"
    source, marks = reader.source, {}
    held = reader.samples if source is None or source.memory is None else source.memory
    if source is not None and source.memory is None and (files := source.fingerprint()) is not None:
        marks[name] = _of_names(source, files)
    elif isinstance(held, InMemory):
        marks[name] = _of_tensor(held.images)
        marks |= {f"conditions {key!r}": _of_tensor(column) for key, column in held.conditions.items()}
    if feed.labels is not None:
        marks["labels"] = _of_tensor(feed.labels)
    for key, captions in reader.captions.items():
        marks[f"captions {key!r}"] = _of_texts("\n".join(texts) for texts in captions.originals)
    return {**marks, "held-out samples": _of_tensor(feed.held_out_indices)}


def changed_parts(before: Mapping[str, Mark], now: Mapping[str, Mark]) -> list[str]:
    """Return in words the parts that have changed, such as "labels (in another order)"."""
    both = {name: mark.change(before[name]) for name, mark in now.items() if name in before}
    return [f"{name} ({change})" for name, change in both.items() if change]


def _of_names(source: AnySource, files: str) -> Mark:
    names = [source.describe(index) for index in range(len(source))]
    ends = enumerate(zip(min(names), max(names), strict=False)) if len(names) > 1 else ()
    common = next((at for at, (letter, last) in ends if letter != last), 0)  # letters of the folder, which may move
    mark = _of_texts(name[common:] for name in names)
    return Mark(mark.num, mark.ordered, mark.members, _hash(str(files).encode()))


def _of_texts(texts: Iterable[str]) -> Mark:
    return _of_checksums([zlib.crc32(text.encode("utf-8", "surrogateescape")) for text in texts])


def _of_tensor(rows: Tensor) -> Mark:
    """Return the mark of `rows` (n ...)."""
    checksums: list[int] = []
    for part in torch.split(rows.detach(), _AT_ONCE):
        values = part.cpu().contiguous().reshape(len(part), -1) if part.numel() else part.new_empty(len(part), 0).cpu()
        checksums += map(zlib.crc32, values.view(torch.uint8).numpy())
    return _of_checksums(checksums)


def _of_checksums(rows: Sequence[int]) -> Mark:
    column = numpy.array(rows, numpy.uint32)
    return Mark(len(column), _hash(column.tobytes()), _hash(numpy.sort(column).tobytes()))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
