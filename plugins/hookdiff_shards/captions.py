"""The captions of samples; they are read once and stored in a file for each shard, beside its index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
from attrs import define

from hookdiff import UserError, shown
from hookdiff.images import LARGEST_CAPTIONS, captions_of, lines_of
from hookdiff_shards.conditions import Condition, member_of
from hookdiff_shards.files import Shard
from hookdiff_shards.index import buffered, is_picture
from hookdiff_shards.indices import Kind, block_of, kept_of
from hookdiff_shards.samples import Column, Samples
from hookdiff_shards.stored import are_ends, load_arrays, save_arrays, state_of

_FORMAT = 2  # a file with another format number is not used


@define(eq=False)
class Captions:
    """The captions of the samples of a shard, one after the other."""

    texts: Any  # uint8, in UTF-8
    ends: Any  # int64: for each caption, its end in `texts`
    numbers: Any  # int64: for each sample, the number of captions up to its last

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, sample: int) -> tuple[str, ...]:
        """Return the captions of a sample."""
        first, last = self.numbers[sample - 1] if sample else 0, self.numbers[sample]
        begins = [self.ends[first - 1] if first else 0, *self.ends[first:last]]
        return tuple(bytes(self.texts[begin:end]).decode(errors="replace") for begin, end in pairwise(begins))


class _All(Sequence[Sequence[str]]):
    """The captions of the samples of all shards; each text is decoded when it is asked for."""

    def __init__(self, parts: Sequence[Captions], shard: Any, first: Any) -> None:
        self.parts, self.shard, self.first = parts, shard, first

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        number = self.shard[index]  # raises IndexError
        return self.parts[number].of(index % len(self) - int(self.first[number]))


def parse(text: str) -> Condition:
    """Return the member with captions that a config names. Raises ValueError for a member without text."""
    member = member_of(text, "captions")
    if is_picture(member.extension) or member.format == "npy":
        raise ValueError(f"captions: .{shown(member.format)} holds no text; name one such as 'txt' or 'json:caption'")
    return member


def read_captions(samples: Samples, column: Column, member: Condition, folder: Path) -> Sequence[Sequence[str]]:
    """Return the captions of all samples, from the `member` in `column`. The stored files are in `folder`.

    Raises UserError that names the shards with captions that cannot be read.
    """
    shards, asked = samples.files.shards, f"{member.extension}:{member.key}"
    bounds = numpy.searchsorted(samples.shard, numpy.arange(len(shards) + 1)).tolist()

    def make_one(number: int) -> Captions:
        return _make(samples, column, member, number, range(bounds[number], bounds[number + 1]))

    def load_one(path: Path, number: int) -> Captions | None:
        return _load(path, shards[number], asked, bounds[number + 1] - bounds[number])

    suffix = f"-{hashlib.sha256(asked.encode(errors='surrogateescape')).hexdigest()[:8]}.captions"
    kind = Kind("captions", suffix, make_one, partial(_save, asked=asked), load_one)
    try:
        return _All(kept_of(samples.files, folder, kind), samples.shard, samples.first)
    except ValueError as error:
        raise UserError(f"captions: {error}") from None


def _make(samples: Samples, column: Column, member: Condition, number: int, indices: range) -> Captions:
    read = buffered(partial(samples.files.read, number), block_of(samples.files.shards[number]))
    texts, ends, numbers, wrong = bytearray(), list[int](), list[int](), list[str]()
    for index in indices:
        if not column.is_lacking[index]:
            try:
                if (size := column.size[index]) > LARGEST_CAPTIONS:
                    raise ValueError(f"has {size:,} bytes, expected captions of at most {LARGEST_CAPTIONS:,}")
                content = samples.member(index, column, read)
                for caption in captions_of(member.read(content)) if member.format == "json" else lines_of(content):
                    texts += caption.encode()
                    ends.append(len(texts))
            except (ValueError, RecursionError) as error:
                wrong.append(f"{shown(samples.key(index, member.extension))}: {error}")
        numbers.append(len(ends))
    if wrong:
        first = "" if len(wrong) == 1 else f"{len(wrong):,} captions cannot be read; the first is "
        raise ValueError(first + wrong[0])
    return Captions(
        numpy.frombuffer(bytes(texts), numpy.uint8), numpy.array(ends, numpy.int64), numpy.array(numbers, numpy.int64)
    )


def _save(captions: Captions, shard: Shard, path: Path, asked: str) -> None:
    arrays = {"texts": captions.texts, "ends": captions.ends, "numbers": captions.numbers}
    save_arrays(path, state_of(shard, format=_FORMAT, asked=asked), arrays)


def _load(path: Path, shard: Shard, asked: str, num: int) -> Captions | None:
    """Return the captions of `num` samples in a file; None if the shard has changed since the file was made.

    Raises errors of many types for a damaged file, and for a forged file that would make reading fail.
    """
    if (stored := load_arrays(path, state_of(shard, format=_FORMAT, asked=asked))) is None:
        return None
    captions = Captions(**stored[1])
    shapes = [(array.dtype.name, array.ndim) for array in (captions.texts, captions.ends, captions.numbers)]
    if (
        shapes != [("uint8", 1), ("int64", 1), ("int64", 1)]
        or len(captions) != num
        or not are_ends(captions.ends, len(captions.texts))
        or not are_ends(captions.numbers, len(captions.ends))
    ):
        raise ValueError("it is of another shard")
    return captions
