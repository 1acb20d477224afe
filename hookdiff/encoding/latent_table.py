"""The latents of all samples: encoded once, by all ranks together, and kept in a table of files or in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import cattrs
import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.rest import make_in_chunks
from hookdiff.data.table import DTYPES, Column, load_if_sound, locked, read_table
from hookdiff.disk.files import make_folder
from hookdiff.encoding.encoded_samples import MEAN, STD, SourceLatents, check_finite
from hookdiff.encoding.encoder import INPUTS, STORED, PictureEncoder
from hookdiff.encoding.picture_network import AT_A_TIME, PictureNetwork
from hookdiff.encoding.soundness import AT_ONCE, Soundness, few_of
from hookdiff.errors import UserError
from hookdiff.images.buckets import size_name
from hookdiff.images.cache import facts_of, survey_of
from hookdiff.images.sized import Sized
from hookdiff.images.source_reader import reader_of_source
from hookdiff.images.survey import Survey
from hookdiff.images.transforms import size_text
from hookdiff.machine.ranks import agree, first_rank_does, gathered_or_raised, num_ranks, rank
from hookdiff.options.structure import structured
from hookdiff.terminal.pace import paced

logger = logging.getLogger("hookdiff")

_LABELS, _OF_SOURCE = "labels", "of source: "  # columns that the samples have beside the pictures


@define(eq=False)
class PictureTable:
    """Latents of samples from one encoder, with the labels and conditions of the source."""

    columns: Mapping[str, Tensor]  # "mean" and maybe "std": n, sides (2: with mirror image), shape of a latent; float16
    survey: Survey  # of the pictures
    soundness: Soundness | None = None  # of the encoder; None: not known

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a latent."""
        return tuple(self.columns[MEAN].shape[2:])

    @property
    def labels(self) -> Tensor | None:
        """The labels in the items of the source: n, int64; None if the items have no labels."""
        return self.columns.get(_LABELS)

    @property
    def conditions(self) -> dict[str, Tensor]:
        """The conditions of the source, by name: n rows each."""
        return {k.removeprefix(_OF_SOURCE): v for k, v in self.columns.items() if k.startswith(_OF_SOURCE)}


@define(eq=False)
class LatentTables:
    """The latents of all samples from one encoder: one table, or a table for each size of the pictures."""

    tables: Sequence[PictureTable]
    sized: Sized | None = None
    places: Tensor | None = None  # the row of each sample in the table of its size: n, int64

    @classmethod
    def of_sizes(cls, tables: Sequence[PictureTable], sized: Sized, rows: Sequence[Tensor]) -> LatentTables:
        """Return `tables` with a row for each of the samples `rows`, one table and one entry of `rows` a size."""
        places = torch.zeros(len(sized.numbers), dtype=torch.int64)
        for own in rows:
            places[own] = torch.arange(len(own))
        return cls(tables, sized, places)

    def at(self, share: Tensor) -> tuple[PictureTable, Tensor]:
        """Return the table of the samples `share` (n, int64), which have one size, and their rows in it."""
        if self.sized is None or self.places is None:
            return self.tables[0], share
        return self.tables[int(self.sized.numbers[share[0]])], self.places[share]

    @property
    def labels(self) -> Tensor | None:
        """The labels in the items of the source: n, int64; None if the items have no labels."""
        if self.sized is None or self.places is None or self.tables[0].labels is None:
            return self.tables[0].labels
        labels = torch.zeros_like(self.places)
        for number, table in enumerate(self.tables):
            own = self.sized.numbers == number
            assert table.labels is not None
            labels[own] = table.labels[self.places[own]]
        return labels

    @property
    def undecodable(self) -> dict[int, str]:
        """The samples whose pictures cannot be decoded, with the reason."""
        return {index: text for table in self.tables for index, text in table.survey.undecodable.items()}

    def load_into_memory(self) -> None:
        """Copy the columns of all tables from their files into memory."""
        for table in self.tables:
            table.columns = {name: column.clone() for name, column in table.columns.items()}

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for table in self.tables for column in table.columns.values())


@define(frozen=True)
class _Facts:
    shape: tuple[int, ...]  # of a picture
    survey: Any
    soundness: Soundness | None


@define(eq=False, slots=False)
class PictureTableBuilder:
    """Encodes pictures of a Feed and, if `flips`, their mirror images, into a PictureTable."""

    encoding: PictureNetwork
    open_pictures: Callable[[], Feed]
    flips: bool
    total: int  # samples of the source
    rows: Tensor | None = None  # the samples of the table: n, int64; None: all
    shape: tuple[int, ...] | None = None  # of their pictures, c h w; None: that of the Feed
    looks: bool = True  # checks the encoder on a few samples, which may be all alike in a rare size
    _soundness: Soundness | None = field(default=None, init=False)

    @property
    def num(self) -> int:
        """The rows of the table."""
        return self.total if self.rows is None else len(self.rows)

    @property
    def where(self) -> str:
        """The key of the encoder, for messages."""
        return self.encoding.where

    def known(self, path: Path) -> PictureTable | None:
        """Return the table `path`; None if a rank does not find it. All ranks must call this.

        Raises:
            UserError: for latents with a constant channel.
        """
        table = None
        if path.exists():
            with locked(path, shared=True):
                table = self._found(path)
        if agree(table is None):
            return None
        self._report(table)
        return table

    def table(self, path: Path | None) -> PictureTable:
        """Return the table `path`, which is made if it is missing or damaged. All ranks must call this.

        With None as `path`, the table is made in memory.

        Raises:
            UserError: for pictures that cannot be encoded, and for a table that cannot be written, or that a rank
                does not see.
        """
        if path is None:
            return self._in_memory()
        first_rank_does(lambda: make_folder(path.parent))
        with locked(path, shared=True):
            table = self._found(path)
        if agree(table is None):
            with locked(path, shared=False) if rank() == 0 else nullcontext():
                table = self._found(path, report=rank() == 0)  # another run may have made it meanwhile
                if agree(table is None):
                    self._make(path)
                    agree(False)  # wait for the first rank, which writes
                    table = self._found(path)
        if agree(table is None):
            raise UserError(f"data.cache_dir: not all ranks find {path}; set a folder that all machines share")
        assert table is not None
        if self.looks and self._soundness is None:  # another run has made it
            self._report(table)
        return table

    def look(self) -> None:
        """Encode a few samples, and report faults of the encoder that they show: once, on the first rank.

        Raises:
            UserError: for latents with a constant channel, or that are not finite.
        """
        pictures = self.open_pictures()
        usable = pictures.usable if self.rows is None else self.rows
        if rank() or self._soundness or not (self.looks and len(usable)):
            return
        parts, seen = list[dict[str, Tensor]](), list[Tensor]()
        for batch in pictures.unaugmented(few_of(usable), AT_ONCE):
            latents = self.encoding.columns(batch, torch.float32, False)
            check_finite(
                self.where, {name: values.to(STORED) for name, values in latents.items()}, batch, pictures.describe
            )
            parts.append(latents)
            seen.append(batch.inputs.flatten(1))
        values = {name: torch.cat([part[name] for part in parts])[:, 0] for name in parts[0]}
        differ = any(bool((pixels != seen[0][:1]).any()) for pixels in seen)
        self._soundness = Soundness.of(values[MEAN], values.get(STD), differ)
        self._soundness.report(self.encoding.name, self.encoding.encoder)

    def _report(self, rows: PictureTable | None) -> None:
        if rows and rows.soundness:
            rows.soundness.report(self.encoding.name, self.encoding.encoder)

    def _found(self, path: Path, report: bool = False) -> PictureTable | None:
        return load_if_sound(path, "table of encoded samples", self._read, report=report)

    def _read(self, path: Path) -> PictureTable:
        facts, columns = read_table(path, self.num)
        if not isinstance(facts, dict) or MEAN not in columns or columns[MEAN].shape[1] != 1 + self.flips:
            raise ValueError("it is of other data")
        return self._rows_of(columns, facts)

    def _rows_of(self, columns: Mapping[str, Tensor], facts: Mapping[str, Any]) -> PictureTable:
        about = structured(_Facts, facts)
        return PictureTable(columns, survey_of(about.survey, about.shape, self.total), about.soundness)

    def _make(self, path: Path) -> None:
        size = f" of {size_name(self.shape)}" if self.shape else ""
        logger.info("data: encoding %s samples%s by %s into %s", f"{self.num:,}", size, self.where, path)
        columns = first_rank_does(self._sizes)  # before anything is encoded
        pictures = self.open_pictures()
        origin = f"{type(pictures.samples).__name__} {pictures.describe(0)}{size}"
        make_in_chunks(path, columns, self._chunks, f"encoding by {self.where}", origin, self._encoded, self._facts)

    def _sizes(self) -> dict[str, Column]:
        """Return the columns of the table."""
        pictures = self.open_pictures()
        first = pictures.reader.first if self.rows is None else next(pictures.unaugmented(self.rows[:1], 1))
        rows = self.encoding.sides_of(first, self.flips) | _beside(pictures, first)
        sizes = {name: Column.of(column, self.num) for name, column in rows.items()}
        for name, column in sizes.items():
            if column.dtype not in DTYPES:
                what = f"conditions: {name.removeprefix(_OF_SOURCE)!r} is {column.dtype}"
                raise UserError(f"{what}, which no table of latents holds; expected one of {', '.join(DTYPES)}")
        return sizes

    def _in_memory(self) -> PictureTable:
        columns: dict[str, Tensor] = {}
        broken: list[list[int]] = []
        encoded = self._encoded([*range(len(self._chunks))][rank() :: num_ranks()])
        rounds = -(-len(self._chunks) // num_ranks())
        what = f"data: encoding by {self.where}"
        with closing(paced(range(rounds), rounds, what, "chunks", size=lambda _: 1)) as shown:
            for _ in shown:
                for number, values, missing in filter(None, gathered_or_raised(lambda: next(encoded, None))):
                    fill_rows(columns, self._chunks[number], values, self.num)
                    broken.append(missing)
        return self._rows_of(columns, self._facts(broken))

    @cached_property
    def _chunks(self) -> Sequence[Tensor]:
        """The rows that are encoded together."""
        rows = self.open_pictures().usable if self.rows is None else torch.arange(len(self.rows))
        return torch.split(rows, AT_A_TIME) if len(rows) else ()

    def _encoded(self, numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor], list[int]]]:
        """Yield the columns of the chunks with these numbers, and their samples that cannot be decoded: zeros."""
        self.look()
        if not numbers:
            return
        pictures = self.open_pictures()
        samples = [chunk if self.rows is None else self.rows[chunk] for chunk in map(self._chunks.__getitem__, numbers)]
        batches = pictures.unaugmented(torch.cat(samples), AT_A_TIME)
        for number, own, batch in zip(numbers, samples, batches, strict=True):
            assert batch.indices is not None
            columns, there = self.encoding.sides_of(batch, self.flips) | _beside(pictures, batch), batch.indices == own
            for rows in columns.values():
                rows[~there] = 0  # a replacement was read for each
            yield number, columns, own[~there].tolist()

    def _facts(self, broken: list[list[int]]) -> dict[str, Any]:
        """Return the facts about the pictures; those in `broken` cannot be decoded."""
        self.look()  # the chunks may all have been there
        pictures = self.open_pictures()
        survey, shape = reader_of_source(pictures).prepared.survey, self.shape or tuple(pictures.shape)
        if self.rows is not None:  # the headers are in the table of sizes
            survey = Survey(shape)
        others = {index: f"{pictures.describe(index)}: cannot be decoded" for part in broken for index in part}
        seen = facts_of(evolve(survey, undecodable=survey.undecodable | others))
        facts: dict[str, Any] = cattrs.unstructure(_Facts(shape, seen, self._soundness))
        return {**facts, "shape": list(shape)}


def latents_in_memory(
    samples: Feed, makers: Mapping[str, SourceLatents], survey: Survey, rows: Tensor, num: int
) -> dict[str, PictureTable]:
    """Return the latents of the samples `rows` (n, int64), by the names of their encoders.

    A table has `num` rows: those of all samples, or of `rows` alone.
    """
    tables = {name: dict[str, Tensor]() for name in makers}
    batches = samples.unaugmented(rows)
    with closing(paced(batches, len(rows), "data: latents", "rows", size=len)) as shown:
        for batch in shown:
            others = conditions_beside(batch, makers.values())
            beside = _beside(samples, evolve(batch, conditions=others))
            assert batch.indices is not None
            places = batch.indices if num == len(samples.reader) else torch.searchsorted(rows, batch.indices)
            for name, maker in makers.items():
                fill_rows(tables[name], places, maker.sides_of(batch) | beside, num)
    return {name: PictureTable(columns, survey) for name, columns in tables.items()}


def conditions_beside(batch: Batch, makers: Collection[SourceLatents]) -> dict[str, Tensor]:
    """Return the conditions of `batch`, except the latents that `makers` have computed."""
    return {name: column for name, column in batch.conditions.items() if not any(m.is_own(name) for m in makers)}


def fill_rows(columns: dict[str, Tensor], indices: Tensor, values: Mapping[str, Tensor], num: int) -> None:
    """Write `values` into the rows `indices` of `columns`, which are zeros at first."""
    for name, rows in values.items():
        if name not in columns:
            columns[name] = torch.zeros(num, *rows.shape[1:], dtype=rows.dtype)
        columns[name][indices] = rows


def _beside(samples: Feed, batch: Batch) -> dict[str, Tensor]:
    """Return labels and conditions of a batch as columns; labels only if they are in the items of the source."""
    columns = {_OF_SOURCE + name: column.cpu() for name, column in batch.conditions.items()}
    if batch.labels is not None and samples.reader.labels is None:
        columns[_LABELS] = batch.labels.cpu()
    return columns


def decoded_shape(encoder: PictureEncoder, shape: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """Return the shape of the picture that `encoder` decodes from latents of `shape`.

    Raises:
        UserError: if the encoder does not take such latents.
    """
    try:
        with torch.no_grad():
            return tuple(encoder.open(device).decode(torch.zeros(1, *shape, device=device)).shape[1:])
    except RuntimeError as error:  # raised by a layer
        reason = str(error).partition("\n")[0]
        raise UserError(f"encode.{INPUTS}: the encoder cannot decode latents of {size_text(shape)}: {reason}") from None
