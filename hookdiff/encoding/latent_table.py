"""The latents of all samples: encoded once, by all ranks together, and kept in a table of files or in memory."""

from __future__ import annotations

import logging
import math
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
from hookdiff.encoding.encoder import INPUTS, STORED, Encoded, PictureEncoder
from hookdiff.encoding.encoder_output import EncoderOutput
from hookdiff.encoding.soundness import AT_ONCE, Soundness, few_of
from hookdiff.errors import UserError
from hookdiff.images.cache import facts_of, survey_of
from hookdiff.images.source_reader import reader_of_source
from hookdiff.images.survey import Survey
from hookdiff.images.transforms import size_text
from hookdiff.machine.fitting import Fitting
from hookdiff.machine.ranks import agree, first_rank_does, gathered_or_raised, num_ranks, rank
from hookdiff.options.structure import structured
from hookdiff.terminal.pace import paced

logger = logging.getLogger("hookdiff")

_CHUNK = 32  # pictures that are encoded together on any number of ranks, as the rounding depends on it
_LABELS, _OF_SOURCE = "labels", "of source: "  # columns that the samples have beside the pictures


@define(eq=False)
class PictureTable:
    """The latents of all samples from one encoder, with the labels and conditions of the source."""

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


@define(frozen=True)
class _Facts:
    shape: tuple[int, ...]  # of a picture
    survey: Any
    soundness: Soundness | None


@define(eq=False, slots=False)
class PictureTableBuilder:
    """Encodes the pictures of a Feed and, if `flips`, their mirror images, into a PictureTable."""

    name: str  # of the encoder
    encoder: PictureEncoder
    open_pictures: Callable[[], Feed]
    flips: bool
    device: torch.device
    num: int  # samples
    network: Encoded | None = field(default=None, init=False)
    returned: EncoderOutput = field(init=False)
    _fitting: Fitting | None = field(default=None, init=False)
    _soundness: Soundness | None = field(default=None, init=False)
    _tried: tuple[Batch, dict[str, Tensor]] | None = field(
        default=None, init=False
    )  # the first sample, and its latents

    def __attrs_post_init__(self) -> None:
        self.returned = EncoderOutput(self.where, self.encoder)

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
        if self._soundness is None:  # another run has made it
            self._report(table)
        return table

    def look(self) -> None:
        """Encode a few samples, and report faults of the encoder that they show: once, on the first rank.

        Raises:
            UserError: for latents with a constant channel, or that are not finite.
        """
        pictures = self.open_pictures()
        if rank() or self._soundness or not len(pictures.usable):
            return
        parts, seen = list[dict[str, Tensor]](), list[Tensor]()
        for batch in pictures.unaugmented(few_of(pictures.usable), AT_ONCE):
            latents = self._columns(batch, torch.float32, False)
            check_finite(
                self.where, {name: values.to(STORED) for name, values in latents.items()}, batch, pictures.describe
            )
            parts.append(latents)
            seen.append(batch.inputs.flatten(1))
        values = {name: torch.cat([part[name] for part in parts])[:, 0] for name in parts[0]}
        differ = any(bool((pixels != seen[0][:1]).any()) for pixels in seen)
        self._soundness = Soundness.of(values[MEAN], values.get(STD), differ)
        self._soundness.report(self.name, self.encoder)

    def _report(self, rows: PictureTable | None) -> None:
        if rows and rows.soundness:
            rows.soundness.report(self.name, self.encoder)

    def _found(self, path: Path, report: bool = False) -> PictureTable | None:
        return load_if_sound(path, "table of encoded samples", self._read, report=report)

    def _read(self, path: Path) -> PictureTable:
        facts, columns = read_table(path, self.num)
        if not isinstance(facts, dict) or MEAN not in columns or columns[MEAN].shape[1] != 1 + self.flips:
            raise ValueError("it is of other data")
        return self._rows_of(columns, facts)

    def _rows_of(self, columns: Mapping[str, Tensor], facts: Mapping[str, Any]) -> PictureTable:
        about = structured(_Facts, facts)
        return PictureTable(columns, survey_of(about.survey, about.shape, self.num), about.soundness)

    def _make(self, path: Path) -> None:
        logger.info("data: encoding %s samples by %s into %s", f"{self.num:,}", self.where, path)
        columns = first_rank_does(self._sizes)  # before anything is encoded
        pictures = self.open_pictures()
        of, origin = f"encoding by {self.where}", f"{type(pictures.samples).__name__} {pictures.describe(0)}"
        make_in_chunks(path, columns, self._chunks, of, origin, self._encoded, self._facts)
        self.network = None  # frees its memory for the training

    def _sizes(self) -> dict[str, Column]:
        """Return the columns of the table."""
        pictures = self.open_pictures()
        first = pictures.reader.first
        rows = self.sides_of(first) | _beside(pictures, first)
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
        self.network = None  # frees its memory for the training
        return self._rows_of(columns, self._facts(broken))

    @cached_property
    def _chunks(self) -> Sequence[Tensor]:
        """The samples that are encoded together."""
        usable = self.open_pictures().usable
        return torch.split(usable, _CHUNK) if len(usable) else ()

    def _encoded(self, numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor], list[int]]]:
        """Yield the columns of the chunks with these numbers, and their samples that cannot be decoded: zeros."""
        self.look()
        if not numbers:
            return
        pictures = self.open_pictures()
        batches = pictures.unaugmented(torch.cat([self._chunks[number] for number in numbers]), _CHUNK)
        for number, batch in zip(numbers, batches, strict=True):
            assert batch.indices is not None
            columns, there = self.sides_of(batch) | _beside(pictures, batch), batch.indices == self._chunks[number]
            for rows in columns.values():
                rows[~there] = 0  # a replacement was read for each
            yield number, columns, self._chunks[number][~there].tolist()

    def _facts(self, broken: list[list[int]]) -> dict[str, Any]:
        """Return the facts about the pictures; those in `broken` cannot be decoded."""
        self.look()  # the chunks may all have been there
        pictures = self.open_pictures()
        survey = reader_of_source(pictures).prepared.survey
        others = {index: f"{pictures.describe(index)}: cannot be decoded" for part in broken for index in part}
        seen = facts_of(evolve(survey, undecodable=survey.undecodable | others))
        facts: dict[str, Any] = cattrs.unstructure(_Facts(tuple(pictures.shape), seen, self._soundness))
        return {**facts, "shape": list(pictures.shape)}

    def open(self, shape: tuple[int, ...]) -> None:
        """Load the network, and check that it takes pictures of `shape` (c h w), and returns such pictures.

        Raises:
            UserError: if the pictures do not fit the network.
        """
        if self.network is not None:
            return
        self.network = self.encoder.open(self.device)
        blank = torch.zeros(1, *shape, device=self.device)
        with torch.no_grad():
            try:
                latents = self.returned.of_pictures(self.network.encode(blank), 1)[MEAN]
                back = self.network.decode(latents).shape[1:] if self.name == INPUTS else shape
            except RuntimeError as error:  # raised by a layer
                reason = str(error).partition("\n")[0]
                raise UserError(f"{self.where}: it cannot encode pictures of {size_text(shape)}: {reason}") from None
        if tuple(back) != tuple(shape):
            factor = 2 ** round(math.log2(shape[-1] / latents.shape[-1]))
            sides = sorted({max(1, shape[-1] // factor) * factor, -(-shape[-1] // factor) * factor})
            raise UserError(
                f"{self.where}: pictures of {size_text(shape)} come back as {size_text(back)}: data.image_size must be "
                f"a multiple of {factor}; nearest: {' or '.join(map(str, sides))}"
            )

    @property
    def where(self) -> str:
        """The key of the encoder, for messages."""
        return f"data.encode.{self.name}"

    def sides_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return mean and deviation of the pictures of `batch`, and of their mirror images: n, sides, ..., float16.

        Raises:
            UserError: for a latent that is not finite.
        """
        if batch.indices is None:  # the first sample, which is asked for again and again
            if self._tried is None or self._tried[0] is not batch:
                self._tried = batch, self._sides(batch)
            return dict(self._tried[1])
        return self._sides(batch)

    def _sides(self, batch: Batch) -> dict[str, Tensor]:
        columns = self._columns(batch, STORED, self.flips)
        check_finite(self.where, columns, batch, lambda index: self.open_pictures().describe(index))
        return columns

    def _columns(self, batch: Batch, dtype: torch.dtype, flips: bool) -> dict[str, Tensor]:
        """Return mean and deviation of the pictures of `batch`, and if it `flips`, of their mirror images, on the CPU.

        Both are n, sides, and the shape of a latent.
        """
        self.open(tuple(batch.inputs.shape[1:]))
        network = self.network
        assert network is not None

        def encoded(part: range) -> dict[str, Tensor]:
            pictures = batch.inputs[part.start : part.stop]
            sides = [pictures, pictures.flip(-1)] if flips else [pictures]
            with torch.no_grad():
                latents = [self.returned.of_pictures(network.encode(side.to(self.device)), len(part)) for side in sides]
                return {name: torch.stack([side[name] for side in latents], 1).to(dtype).cpu() for name in latents[0]}

        self._fitting = self._fitting or Fitting(_CHUNK, self.device)
        parts = [*self._fitting.parts(range(len(batch)), encoded)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def latents_in_memory(samples: Feed, makers: Mapping[str, SourceLatents], survey: Survey) -> dict[str, PictureTable]:
    """Return the latents that all `samples` hold, by the names of their encoders."""
    tables = {name: dict[str, Tensor]() for name in makers}
    batches = samples.unaugmented(samples.usable)
    what = "data: latents"
    with closing(paced(batches, len(samples.usable), what, "rows", size=len)) as shown:
        for batch in shown:
            others = conditions_beside(batch, makers.values())
            beside = _beside(samples, evolve(batch, conditions=others))
            assert batch.indices is not None
            for name, maker in makers.items():
                fill_rows(tables[name], batch.indices, maker.sides_of(batch) | beside, len(samples.reader))
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
