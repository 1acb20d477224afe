"""The builders of an encoder's tables: one for all samples, or one for each size of pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.memory_reader import hash_of
from hookdiff.encoding.latent_table import LatentTables, PictureTableBuilder
from hookdiff.encoding.picture_network import PictureNetwork
from hookdiff.images.sized import Sized
from hookdiff.images.survey import Survey

Place = Callable[[tuple[Any, ...]], Path]  # returns the path of the table with a key


@define(eq=False)
class Builders:
    """Makes the tables of one encoder. All methods raise UserError as those of `PictureTableBuilder` do."""

    encoding: PictureNetwork
    parts: list[PictureTableBuilder]
    sized: Sized | None = None

    @classmethod
    def of(
        cls,
        encoding: PictureNetwork,
        open_pictures: Callable[[], Feed],
        flips: bool,
        num: int,
        seen: Survey | None,
        sized: Sized | None,
    ) -> Builders:
        """Return the builders for `num` samples; `seen` and `sized` are the survey and the sizes of the pictures."""
        if seen is None or sized is None:
            return cls(encoding, [PictureTableBuilder(encoding, open_pictures, flips, num)])
        rows = [sized.rows(number, seen.unreadable) for number in range(len(sized.shapes))]
        most = max(map(len, rows))
        parts = [
            PictureTableBuilder(encoding, open_pictures, flips, num, own, shape, looks=len(own) == most)
            for own, shape in zip(rows, sized.shapes, strict=True)
        ]
        return cls(encoding, parts, sized)

    @property
    def name(self) -> str:
        """The name of the encoder."""
        return self.encoding.name

    def known(self, key: tuple[Any, ...], place: Place) -> LatentTables | None:
        """Return the tables that exist; None if one is missing. All ranks must call this."""
        tables = [part.known(place(_with_rows(key, part))) for part in self.parts]
        there = [table for table in tables if table is not None]
        return self._together(there) if len(there) == len(tables) else None

    def tables(self, key: tuple[Any, ...] | None, place: Place) -> LatentTables:
        """Return all tables; those that are missing are made, in memory if `key` is None. All ranks must call this."""
        self._open()
        made = [part.table(None if key is None else place(_with_rows(key, part))) for part in self.parts]
        self.encoding.close()
        return self._together(made)

    def look(self) -> None:
        """Report faults of the encoder that a few samples show, if no table has been made."""
        self._open()
        for part in self.parts:
            part.look()

    def _open(self) -> None:
        """Load the network, and refuse a size that does not fit it before anything is encoded."""
        for part in self.parts:
            if part.shape:
                self.encoding.open(part.shape)

    def sides_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return mean and deviation of the pictures of `batch`, and of their mirror images; see `PictureNetwork`."""
        return self.encoding.sides_of(batch, self.parts[0].flips)

    def _together(self, tables: list[Any]) -> LatentTables:
        if self.sized is None:
            return LatentTables(tables)
        return LatentTables.of_sizes(tables, self.sized, [part.rows for part in self.parts if part.rows is not None])


def _with_rows(key: tuple[Any, ...], part: PictureTableBuilder) -> tuple[Any, ...]:
    return key if part.rows is None else (*key, part.shape, hash_of(part.rows))
