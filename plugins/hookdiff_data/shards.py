"""Writes samples into shards: tar files that the source "shards" and the library webdataset read."""

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from attrs import define, field

from hookdiff import Feed, UserError, shown
from hookdiff.cli import check_free
from hookdiff.disk import new_folder, write_file, writing
from hookdiff.encoding import ENCODED
from hookdiff.terminal import paced
from hookdiff_data.encoded import MembersOfEncoders, is_encoded
from hookdiff_data.members import CAPTIONS, Members, conditions_of, members, with_captions

_BLOCK = tarfile.BLOCKSIZE
_CLASSES = "classes.json"
_SHARD = re.compile(rf"shard-\d+\.tar|{re.escape(_CLASSES)}|{re.escape(ENCODED)}")  # the files in a folder of shards


def check_place(folder: Path, overwrite: bool) -> None:
    """Raise UserError unless `folder` is missing or empty, or holds only shards and `overwrite` is true."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else [""]
    if os.path.lexists(folder) and not all(map(_SHARD.fullmatch, names)):
        about = "is no folder of shards, so not even --overwrite replaces it"
        raise UserError(f"{folder} exists and {about}; choose another name")
    if names:
        check_free(folder, overwrite)


def write_shards(feed: Feed, folder: Path, most: int) -> dict[str, Any]:
    """Write all usable samples of `feed` into shards of at most `most` bytes, and the names of the classes beside them.

    Encoded samples have the results of the encoders in place of their pictures, and a file describes the encoders.
    Captions are written unchanged. The folder appears when it is complete, or not at all, and replaces an earlier
    folder of shards. Returns the numbers of "samples", "shards" and "bytes", and as "data" the keys of [data] that
    train on the shards. Raises UserError if the folder or a sample cannot be written, or if samples have files of
    different kinds.
    """
    encoded = MembersOfEncoders(feed) if is_encoded(feed) else None
    with writing(folder), new_folder(folder) as partial:
        with closing(_Writer(partial, most)) as writer:
            captioned = with_captions(feed, encoded.members() if encoded else members(feed))
            samples = paced(_alike(feed, captioned), len(feed.usable), "data: shards", "samples", size=lambda _: 1)
            with closing(samples):
                for sample in samples:
                    writer.add(sample)
        if not writer.samples:
            raise UserError("there is nothing to write: no sample can be read; run `hookdiff data CONFIG` to see why")
        if feed.classes:
            write_file(partial / _CLASSES, json.dumps(list(feed.classes)).encode())
        if encoded:
            write_file(partial / ENCODED, json.dumps(encoded.facts).encode())
    data: dict[str, Any] = {"source": "shards", "path": str(folder)}
    if image := encoded.image if encoded else "npy" if "npy" in sample else None:
        data["image"] = image
    if conditions := encoded.conditions if encoded else conditions_of(feed, sample):
        data["conditions"] = conditions
    if CAPTIONS in sample:
        data["captions"] = CAPTIONS
    return {"samples": writer.samples, "shards": writer.shards, "bytes": writer.bytes, "data": data}


def _alike(feed: Feed, samples: Iterator[tuple[int, Members]]) -> Iterator[Members]:
    """Yield the members of all samples. Raises UserError if their extensions differ, except those of pictures."""
    first, named = None, ""
    for index, sample in samples:
        picture, *others = sample
        kinds = [picture if picture == "npy" else "a picture", *(f".{other}" for other in others)]
        first, named = first or kinds, named or feed.describe(index)
        if kinds != first:
            before, now = (", ".join(map(shown, each)) for each in (first, kinds))
            raise UserError(f"{named} would be written as {before}, {feed.describe(index)} as {now}: expected the same")
        yield sample


@define
class _Writer:
    """Writes one shard after the other; each shard is complete before the next begins."""

    folder: Path
    most: int  # bytes of a shard; a shard of a single sample may have more
    samples: int = 0
    shards: int = 0
    bytes: int = 0
    _file: BinaryIO | None = field(default=None, init=False)
    _tar: tarfile.TarFile | None = field(default=None, init=False)

    def add(self, sample: Members) -> None:
        size = sum(_BLOCK + _rounded(len(content), _BLOCK) for content in sample.values())
        if self._tar and _rounded(self._tar.offset + size + 2 * _BLOCK, tarfile.RECORDSIZE) > self.most:
            self.close()
        if self._tar is None:
            self._file = (self.folder / f"shard-{self.shards:06}.tar").open("xb")
            self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
            self.shards += 1
        for extension, content in sample.items():
            # Neither the time nor the user is written: the same samples give the same bytes.
            member = tarfile.TarInfo(f"{self.samples:09}.{extension}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))
        self.samples += 1

    def close(self) -> None:
        if self._tar is None or self._file is None:
            return
        with self._file as file:
            self._tar.close()
            file.flush()
            os.fsync(file.fileno())
            self.bytes += os.fstat(file.fileno()).st_size
        self._file = self._tar = None


def _rounded(size: int, block: int) -> int:
    return -(-size // block) * block
