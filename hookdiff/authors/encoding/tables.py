"""What encoders make of all samples: encoded once, by all ranks together, and kept in a table of files or in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.authors.encoding.encoder import INPUTS, Encoded, Encoder
from hookdiff.data.feed import Feed
from hookdiff.disk.files import make_folder
from hookdiff.errors import UserError
from hookdiff.images.cache import facts_of, survey_of
from hookdiff.images.survey import Survey
from hookdiff.images.table import Column, found, locked, read_table, save_table
from hookdiff.images.transforms import size_text
from hookdiff.machine.fitting import Fitting
from hookdiff.machine.ranks import agree, first_rank_does, gathered_or_raised, num_ranks, rank
from hookdiff.terminal.pace import paced

logger = logging.getLogger("hookdiff")

_CHUNK = 32  # pictures that are encoded together, whatever the number of ranks: another number rounds differently
_LABELS, _OF_SOURCE = "labels", "of source: "  # columns that the samples have beside the pictures
MEAN, STD = "mean", "std"


@define(eq=False)
class EncodedRows:
    """What an encoder has made of all samples, and what these have beside their pictures."""

    columns: Mapping[str, Tensor]  # "mean" and maybe "std": n, sides, and the shape of what comes out, float16
    survey: Survey  # of the pictures

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what comes out for one sample."""
        return tuple(self.columns[MEAN].shape[2:])

    @property
    def labels(self) -> Tensor | None:
        """The labels in the items of the source: n, int64; None if it has none there."""
        return self.columns.get(_LABELS)

    @property
    def conditions(self) -> dict[str, Tensor]:
        """The conditions of the source, by name: n rows each."""
        return {k.removeprefix(_OF_SOURCE): v for k, v in self.columns.items() if k.startswith(_OF_SOURCE)}


@define(eq=False)
class Encode:
    """Encodes the pictures of a Feed, both sides of each if they are to be flipped."""

    name: str  # of what it makes
    encoder: Encoder
    open_pictures: Callable[[], Feed]
    flips: bool
    device: torch.device
    num: int  # samples
    network: Encoded | None = field(default=None, init=False)

    def rows(self, path: Path | None) -> EncodedRows:
        """Return the rows in the table `path`; they are made if it is missing or damaged. All ranks must call this.

        Without a `path` they are made now, and kept in memory.

        Raises:
            UserError: for pictures that cannot be encoded, and for a table that cannot be written, or that a rank
                does not see.
        """
        if path is None:
            return self._in_memory()
        first_rank_does(lambda: make_folder(path.parent))
        with locked(path, shared=True):
            kept = self._found(path)
        if agree(kept is None):
            with locked(path, shared=False) if rank() == 0 else nullcontext():
                kept = self._found(path, report=rank() == 0)  # another run may have made it meanwhile
                if agree(kept is None):
                    self._make(path)
                    agree(False)  # wait for the first rank, which writes
                    kept = self._found(path)
        if agree(kept is None):
            raise UserError(f"data.cache_dir: not all ranks find {path}; all machines must share the folder")
        assert kept is not None
        return kept

    def _found(self, path: Path, report: bool = False) -> EncodedRows | None:
        return found(path, "table of encoded samples", self._read, report=report)

    def _read(self, path: Path) -> EncodedRows:
        facts, columns = read_table(path, self.num)
        if not isinstance(facts, dict) or MEAN not in columns or columns[MEAN].shape[1] != 1 + self.flips:
            raise ValueError("it is of other data")
        return self._rows_of(columns, facts)

    def _rows_of(self, columns: Mapping[str, Tensor], facts: Mapping[str, Any]) -> EncodedRows:
        shape = tuple(int(side) for side in facts["shape"])
        return EncodedRows(columns, survey_of(facts["survey"], shape, self.num))

    def _make(self, path: Path) -> None:
        logger.info("data: encoding %s samples by %s into %s", f"{self.num:,}", self.where, path)
        pictures, rounds = self.open_pictures(), self._rounds()
        first = next(rounds)
        sizes = {name: Column(_dtype(one), (self.num, *one.shape[1:])) for name, one in first[1].items()}
        if rank():
            for _ in rounds:
                pass
            return

        def fill(rows: Mapping[str, Any]) -> Any:
            for indices, made in (first, *rounds):
                for name, values in made.items():
                    rows[name][indices.numpy()] = values.numpy()
            return _facts(pictures)

        save_table(path, sizes, fill)

    def _in_memory(self) -> EncodedRows:
        rounds = self._rounds()
        columns: dict[str, Tensor] = {}
        for indices, made in rounds:
            for name, values in made.items():
                column = columns.setdefault(name, torch.zeros(self.num, *values.shape[1:], dtype=values.dtype))
                column[indices] = values
        return self._rows_of(columns, _facts(self.open_pictures()))

    def _rounds(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the positions and the columns of each chunk, on all ranks, which share the work."""
        pictures = self.open_pictures()
        chunks = torch.split(pictures.usable, _CHUNK)
        own = chunks[rank() :: num_ranks()]
        made = self._encoded(pictures, own)
        rounds = -(-len(chunks) // num_ranks())
        what = f"data: encoding by {self.where}"
        with closing(paced(range(rounds), rounds, what, "chunks", size=lambda _: 1)) as shown:
            for _ in shown:
                yield from filter(None, gathered_or_raised(lambda: next(made, None)))
        self.network = None  # its memory is for the training

    def _encoded(self, pictures: Feed, chunks: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        if not chunks:
            return
        self.open(pictures.shape)
        fitting = Fitting(_CHUNK, self.device)
        for batch in pictures.unaugmented(torch.cat(chunks), _CHUNK):
            halves = partial(self._part, batch.inputs)
            parts = [*fitting.parts(range(len(batch)), halves)]
            columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            assert batch.indices is not None
            for name, values in columns.items():
                if bad := (~values.flatten(1).isfinite().all(1)).nonzero().flatten().tolist():
                    sample = pictures.describe(int(batch.indices[bad[0]]))
                    raise UserError(f"{self.where}: {sample} becomes a {name} that is not finite in float16")
            if batch.labels is not None and getattr(pictures.reader, "labels", None) is None:
                columns[_LABELS] = batch.labels.cpu()
            columns |= {_OF_SOURCE + name: column.cpu() for name, column in batch.conditions.items()}
            yield batch.indices, columns

    def open(self, shape: tuple[int, ...]) -> None:
        """Load the network, and check that it takes pictures of `shape` (c h w), and returns such pictures.

        Raises:
            UserError: if not.
        """
        if self.network is not None:
            return
        self.network = self.encoder.open(self.device)
        blank = torch.zeros(1, *shape, device=self.device)
        with torch.no_grad():
            try:
                latents, _ = self.network.encode(blank)
                back = self.network.decode(latents).shape[1:] if self.name == INPUTS else shape
            except RuntimeError as error:  # of a layer
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

    def _part(self, pictures: Tensor, part: range) -> dict[str, Tensor]:
        return self.both_sides(pictures[part.start : part.stop])

    def both_sides(self, pictures: Tensor) -> dict[str, Tensor]:
        """Return mean and deviation of `pictures` (n c h w), and of their mirror images: n, sides, ..., float16."""
        assert self.network is not None
        sides = [pictures, pictures.flip(-1)] if self.flips else [pictures]
        with torch.no_grad():
            made = [self.network.encode(side.to(self.device)) for side in sides]
        columns = {MEAN: torch.stack([mean for mean, _ in made], 1)}
        if (std := made[0][1]) is not None:
            columns[STD] = torch.stack([std, *(one for _, one in made[1:] if one is not None)], 1)
        return {name: column.half().cpu() for name, column in columns.items()}


def _facts(pictures: Feed) -> dict[str, Any]:
    seen = getattr(getattr(pictures.reader, "prepared", None), "survey", None) or Survey()
    return {"shape": list(pictures.shape), "survey": facts_of(seen)}


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
