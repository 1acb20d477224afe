"""The members of an encoded sample in a shard: the results of the encoders, in place of its picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cattrs
from attrs import define, field

from hookdiff import Config, Feed, UserError, listed
from hookdiff.data import find_reader, size_name
from hookdiff.encoding import LatentReader, PictureEncoder
from hookdiff.images import Transforms, reader_of_source
from hookdiff_data.members import Members, member_name, members, written

_INPUTS = "image"  # the encoder of the inputs


def check_reportable(feed: Feed) -> None:
    """Raise UserError for samples that are latents of pictures in several sizes, of which there is no report."""
    sizes = (reader_of_source(feed).source.encoded or {}).get("sizes") or ()
    if len(sizes) > 1:
        names = listed([size_name(size) for size in sizes], 5)
        way_out = "hookdiff data reports on the config with the pictures"
        raise UserError(f"data.encoded: the samples are latents of pictures in several sizes ({names}); {way_out}")


def check_sizes(config: Config) -> None:
    """Raise UserError for pictures in several sizes that are written with latents beside them."""
    encoders = [part for keys in config.data.shared.values() for part in (keys.get("encode") or {}).items()]
    names = [name for name, part in encoders if isinstance(part, PictureEncoder)]
    if names and _INPUTS not in names and config.data.of(Transforms).has_sizes:
        way_out = f"encode the pictures too, by [data.encode.{_INPUTS}], or give image_size one side, without buckets"
        raise UserError(f"--to-shards writes pictures with outputs of [data.encode.{names[0]}] in one size: {way_out}")


def is_encoded(feed: Feed) -> bool:
    """Return whether the samples of `feed` are outputs of encoders."""
    return find_reader(feed, LatentReader) is not None


@define(eq=False)
class MembersOfEncoders:
    """The members of the encoded samples of `feed`; their names are known after the first sample."""

    feed: Feed
    facts: dict[str, Any] = field(init=False, factory=dict)
    image: str | None = field(init=False, default=None)  # extension of the inputs, if they are encoded
    conditions: dict[str, str] = field(init=False, factory=dict)  # extensions by name

    def members(self) -> Iterator[tuple[int, Members]]:
        """Yield the position and the members of each usable sample, in order; the inputs are the first member.

        Without an encoder of the inputs, the pictures are written as they are. Raises UserError for a sample that
        cannot be written.
        """
        reader = find_reader(self.feed, LatentReader)
        assert reader is not None
        pictures = None if self.feed.codec else members(reader.open_pictures())
        for part in reader.parts(self.feed.usable):
            results = {
                f"{name}.{column}": rows for name, columns in part.sides.items() for column, rows in columns.items()
            }
            if not self.facts:
                self.facts = cattrs.unstructure(reader.made(part, self.feed.usable))
            for row, index in enumerate(part.indices.tolist()):
                sample = {} if pictures is None else dict(next(pictures)[1])
                for name, rows in results.items():
                    sample[self._extension(name, "npy")] = written(self.feed, index, rows[row], name)[1]
                if pictures is None:
                    if part.labels is not None:
                        sample["cls"] = str(int(part.labels[row])).encode()
                    for name, rows in part.conditions.items():
                        suffix, content = written(self.feed, index, rows[row], name)
                        sample[self._extension(name, suffix)] = content
                yield index, sample

    def _extension(self, name: str, suffix: str) -> str:
        extension = f"{member_name(name)}.{suffix}"
        if name == "image.mean":
            self.image = extension
        else:
            self.conditions[name] = extension
        return extension
