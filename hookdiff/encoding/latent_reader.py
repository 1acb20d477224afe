"""The reader of encoded samples: it draws latents by (seed, epoch, sample) from their means and deviations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Generator, Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory, to_device
from hookdiff.data.memory_reader import hash_of, is_paired
from hookdiff.data.reader import Parts, Stack
from hookdiff.data.source import Images, Source
from hookdiff.data.table import FORMAT
from hookdiff.encoding.codec import PictureCodec
from hookdiff.encoding.encoded_samples import MEAN, STD, EncodedSamples, SourceLatents
from hookdiff.encoding.encoder import INPUTS, PictureEncoder
from hookdiff.encoding.encoder_output import EncoderOutput
from hookdiff.encoding.latent_builders import Builders
from hookdiff.encoding.latent_table import LatentTables, conditions_beside, decoded_shape, latents_in_memory
from hookdiff.encoding.picture_network import PictureNetwork
from hookdiff.encoding.soundness import AT_ONCE, Soundness, constant_channels, few_of
from hookdiff.errors import UserError
from hookdiff.images.augment import FLIP
from hookdiff.images.cache import key_of, place_of
from hookdiff.images.items import ItemKeys
from hookdiff.images.sized import Sized, look
from hookdiff.images.sizes import common_size
from hookdiff.images.source_reader import OfSource, reader_of_source
from hookdiff.images.store import one_size
from hookdiff.images.survey import Survey, left_out_text
from hookdiff.images.transforms import size_text
from hookdiff.machine.randomness import derive_seed, uniforms
from hookdiff.machine.ranks import first_rank_does

logger = logging.getLogger("hookdiff")

_AT_ONCE = 1024  # samples of a part


@define(eq=False)
class LatentPart:
    """Some samples with the latents of both sides: the pictures, and their mirror images if they are encoded."""

    indices: Tensor  # n, int64
    sides: Mapping[str, Mapping[str, Tensor]]  # by encoder, "mean" and perhaps "std": n, 1 or 2 sides, ..., float16
    labels: Tensor | None
    conditions: Mapping[str, Tensor]  # of the source


@define(eq=False, slots=False)
class LatentReader(OfSource):
    """Reads latents. If `is_encoded`, the samples of `source` hold the latents; if not, `encoders` make them.

    Encoders without a table are `pending`: until `encode` has made the table, a sample is encoded when it is read.

    `make_samples` opens the Feed of the source, which has pictures or latents.
    """

    encoders: Mapping[str, PictureEncoder]
    make_samples: Callable[[], Feed]
    device: torch.device
    is_encoded: bool = False
    item_keys: ItemKeys = field(factory=ItemKeys)
    codec: PictureCodec | None = field(init=False, default=None)
    _samples: Feed | None = field(init=False, default=None)
    _survey: Survey = field(init=False)
    _picture_shape: tuple[int, ...] = field(init=False)
    sized: Sized | None = field(init=False, default=None)  # the sizes of the pictures; None: all have one size
    _tables: dict[str, LatentTables] = field(init=False, factory=dict)  # the latents of all samples, by encoder
    _makers: dict[str, Builders | SourceLatents] = field(init=False, factory=dict)  # without tables
    pending: dict[str, Builders] = field(init=False, factory=dict)  # the makers of missing tables

    def __attrs_post_init__(self) -> None:
        if self.transforms.side != self.transforms.square:
            raise UserError("resize: a random crop cannot be encoded once; set image_size without resize")
        if any(self.transforms.color_jitter):
            raise UserError("color_jitter: random colours cannot be encoded once; leave color_jitter out")
        super().__attrs_post_init__()
        self._set(self._take() if self.is_encoded else self._find())

    def encode(self) -> None:
        """Make the missing tables. All ranks must call this."""
        if self.pending:
            for name, builders in self.pending.items():
                del self._makers[name]
                self._tables[name] = self._made(builders)
            self.pending = {}
            self._set(self._survey_of_tables())
        for maker in self._makers.values():
            if isinstance(maker, Builders):
                first_rank_does(maker.look)

    def trial(self) -> LatentReader:
        """Return a copy to try a run before `encode`, with the same shapes as after it. It encodes only one sample."""
        reader = copy(self)
        if reader.labels is None and reader.first.labels is not None:
            reader.labels = torch.zeros(len(self), dtype=torch.int64)  # they are read with the pictures
        return reader

    def _set(self, survey: Survey) -> None:
        digests = self.digests
        self._survey = survey
        if self._tables and self.labels is None:
            self.labels = next(iter(self._tables.values())).labels
        self.unreadable = {*survey.unreadable, *survey.undecodable}
        self.left_out = left_out_text([*survey.unreadable.values(), *survey.undecodable.values()], len(self))
        if INPUTS in self.encoders:
            encoder = self.encoders[INPUTS]
            self.codec = PictureCodec(encoder, digests[INPUTS], self._picture_shape, self.open_pictures, self.device)

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the encoders, by name."""
        return {name: EncoderOutput(f"data.encode.{name}", part).digest() for name, part in self.encoders.items()}

    def _find(self) -> Survey:
        seen = None
        if self.transforms.has_sizes:
            if self.source.memory is not None:
                raise one_size()
            skip = self.store.unreadable == "skip"
            keep = any(encoder.stored(self.store).store != "none" for encoder in self.encoders.values())
            seen, self.sized = look(self.source, self.transforms, self.item_keys, skip, self.store.folder, keep)
            self._survey, self._picture_shape, self.shape_numbers = seen, seen.shape, self.sized.numbers
        for name, encoder in self.encoders.items():
            network = PictureNetwork(name, encoder, self.device, lambda index: self._open().describe(index))
            flips, num = bool(self.transforms.flip), len(self.source)
            builders = Builders.of(network, self.open_pictures, flips, num, seen, self.sized)
            if encoder.stored(self.store).store == "none":
                self._makers[name] = builders
                continue
            key = self._key(name)
            tables = None if key is None else builders.known(key, self._place)
            if tables is None:
                self._makers[name] = self.pending[name] = builders
            else:
                self._tables[name] = self._in_memory(name, tables)
        if self._tables:
            return self._survey_of_tables()
        if seen:
            return seen
        pictures = self.open_pictures()
        self._picture_shape = pictures.shape
        return reader_of_source(pictures).prepared.survey

    def _survey_of_tables(self) -> Survey:
        tables = next(iter(self._tables.values()))
        if self.sized:
            return evolve(self._survey, undecodable=self._survey.undecodable | tables.undecodable)
        survey = tables.tables[0].survey
        self._picture_shape = survey.shape
        return survey

    def _take(self) -> Survey:
        """Take the latents from the samples, and keep them in memory if the options of their encoders say so."""
        facts, samples = EncodedSamples.of(self.source), self._open()
        if self.transforms.has_sizes:
            raise UserError("buckets: the samples were encoded in their sizes; leave out buckets and image_size")
        if facts:
            facts.check(self.encoders)
            if sized := facts.sized(len(self)):
                self.sized, self.shape_numbers = sized, sized.numbers
        elif [*self.encoders] != [INPUTS] or len(samples.shape) != 3:
            raise UserError(
                f"encoded: samples without a table encoded.json must be the means (c h w) for encode.{INPUTS} alone; "
                f"they are {size_text(samples.shape)}"
            )
        if self.transforms.flip and (facts is None or facts.sides == 1):
            raise UserError("flip: the samples hold no mirror images; leave flip out")
        latents_of = {name: SourceLatents(name, facts, samples.describe) for name in self.encoders}
        first_rank_does(lambda: self._look(samples, latents_of))
        sides = {name: maker.sides_of(samples.reader.first) for name, maker in latents_of.items()}
        self._picture_shape = facts.shape if facts else decoded_shape(self.encoders[INPUTS], samples.shape, self.device)
        if self.transforms.square not in (None, self._picture_shape[-1]):
            raise UserError(f"image_size: the samples were encoded from {size_text(self._picture_shape)}; leave it out")
        survey = Survey(self._picture_shape)
        sizes = {name: len(self) * sum(column.nbytes for column in columns.values()) for name, columns in sides.items()}
        if all(self.encoders[name].stored(self.store).in_memory(size) for name, size in sizes.items()):
            self._tables = self._latents_in_memory(samples, latents_of, survey)
        else:
            self._makers = dict(latents_of)
        return survey

    def _latents_in_memory(
        self, samples: Feed, latents_of: Mapping[str, SourceLatents], survey: Survey
    ) -> dict[str, LatentTables]:
        if (sized := self.sized) is None:
            tables = latents_in_memory(samples, latents_of, survey, samples.usable, len(self))
            return {name: LatentTables([table]) for name, table in tables.items()}
        rows = [sized.rows(number) for number in range(len(sized.shapes))]
        made = [latents_in_memory(samples, latents_of, survey, own, len(own)) for own in rows]
        return {name: LatentTables.of_sizes([part[name] for part in made], sized, rows) for name in latents_of}

    def _look(self, samples: Feed, latents_of: Mapping[str, SourceLatents]) -> None:
        """Report the faults of the encoders that a few of the samples show."""
        usable = samples.usable if self.sized is None else self.sized.rows(int(self.sized.numbers.mode().values))
        batches = [*Feed(reader_of_source(samples).without_workers()).unaugmented(few_of(usable), AT_ONCE)]
        for name, latents in latents_of.items():
            for batch in batches:
                latents.sides_of(batch)  # refuses latents that are not finite
            parts = [latents.values_of(batch) for batch in batches]
            values = {column: torch.cat([part[column][:, 0] for part in parts]).cpu() for column in parts[0]}
            differ = len(values[MEAN]) > 1  # the pictures are not here
            Soundness.of(values[MEAN], values.get(STD), differ).report(name, self.encoders[name])

    def open_pictures(self) -> Feed:
        """Return the Feed of the pictures. Making the Feed reads the headers of all pictures.

        Raises:
            UserError: for samples that hold no pictures.
        """
        if self.is_encoded and INPUTS in self.encoders:
            raise UserError("data.encoded: the samples hold latents, and their pictures are not here")
        pictures = self._open()
        if not pictures.are_pictures:
            way_out = "; if they hold latents, set encoded = true"
            raise UserError(f"encode: the samples are no pictures, but of {size_text(pictures.shape)}{way_out}")
        return pictures

    def _open(self) -> Feed:
        if self._samples is None:
            self._samples = self.make_samples()
        return self._samples

    def _made(self, builders: Builders) -> LatentTables:
        key = self._key(builders.name)
        if key is None:
            where = f"data.encode.{builders.name}"
            logger.warning("%s: the source has no fingerprint, so it is encoded in each run", where)
        tables = builders.tables(key, self._place)
        return tables if key is None else self._in_memory(builders.name, tables)

    def _place(self, key: tuple[Any, ...]) -> Path:
        return place_of(key, self.store.folder / "encoded")

    def _in_memory(self, name: str, tables: LatentTables) -> LatentTables:
        """Return the tables, in memory if the encoder's `store` says so."""
        if self.encoders[name].stored(self.store).in_memory(tables.num_bytes):
            tables.load_into_memory()
        return tables

    def _key(self, name: str) -> tuple[Any, ...] | None:
        """Return the facts on which latents of the encoder `name` depend; None if the source has no fingerprint."""
        if (data := self._data_key) is None:
            return None
        digest = EncoderOutput(f"data.encode.{name}", self.encoders[name]).digest()
        return ("encoded", *data, digest, bool(self.transforms.flip), self.store.unreadable)

    @cached_property
    def _data_key(self) -> tuple[Any, ...] | None:
        if (memory := self.source.memory) is not None:
            beside = sorted((name, hash_of(column)) for name, column in memory.conditions.items())
            return (FORMAT, hash_of(memory.images), beside, *self.transforms.first_stage)
        key = key_of(self.source, self.transforms)
        return None if key is None else (*key, self.item_keys)

    @property
    def samples(self) -> InMemory | Images | Source:
        samples: InMemory | Images | Source = self.source.items
        return samples

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if self.sized:
            return self._latent_of(self._picture_shape)
        if INPUTS in self._tables:
            return self._tables[INPUTS].tables[0].shape
        return tuple(self.first.inputs.shape[1:])

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...]]:  # type: ignore[override]
        return [self._latent_of(shape) for shape in self.sized.shapes] if self.sized else ()

    def _latent_of(self, picture: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the inputs for a picture of this shape (c h w), of pictures in several sizes."""
        assert self.sized is not None
        if INPUTS not in self.encoders:
            return picture
        if INPUTS in self._tables:
            shape, latent = self.sized.shapes[0], self._tables[INPUTS].tables[0].shape
        else:
            shape = self.sized.shapes[int(self.sized.numbers[0])]
            latent = tuple(self.first.inputs.shape[1:])
        if len(latent) != 3:
            raise UserError(
                f"encode.{INPUTS}: latents of {size_text(latent)} have no sides, as buckets need; leave buckets out"
            )
        channels, *sides = latent
        scaled = zip(picture[1:], sides, shape[1:], strict=True)
        return (channels, *(side * own // whole for side, own, whole in scaled))

    @cached_property
    def first(self) -> Batch:
        """The first sample, without augmentation."""
        batch = self._open().reader.first if self._reads_samples else None
        inputs, labels, _, conditions = self._stack(torch.zeros(1, dtype=torch.int64), batch, None)
        return Batch(inputs, labels, conditions=conditions)

    @property
    def _reads_samples(self) -> bool:
        """Whether the samples of the source are read in each epoch."""
        return bool(self._makers) or INPUTS not in self.encoders

    @property
    def are_pictures(self) -> bool:
        return self.codec is None

    def bound(self, seed: int, device: torch.device, parts: Parts) -> LatentReader:
        reader = copy(self)
        reader.seed, reader.device = seed, device
        return reader

    def fingerprint(self) -> str | None:
        keys = [self._key(name) for name in self.encoders]
        return None if None in keys else repr(keys)

    def sizes(self) -> Tensor | None:
        """Return height and width of the pictures, before they are resized; None if there are only latents.

        See `hookdiff.images.sizes.sizes_of`.
        """
        if self.is_encoded and INPUTS in self.encoders:
            return None
        if self.sized:
            return self.sized.originals
        common = None if self.is_encoded else common_size(self._survey, len(self))
        return reader_of_source(self.open_pictures()).sizes() if common is None else common

    def close(self) -> None:
        if self._samples is not None:
            self._samples.close()

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        for share, batch in self._read(shares):
            yield self._stack(share, batch, epoch)

    def _stack(self, share: Tensor, batch: Batch | None, epoch: int | None) -> Stack:
        flipped = self._flipped(share, epoch)
        drawn = {name: self._drawn(name, share, flipped, epoch, batch) for name in self.encoders}
        conditions = self._conditions_of(share, batch)
        picture = self._picture_shape if self.sized is None else self.sized.shapes[int(self.sized.numbers[share[0]])]
        for name, column in conditions.items():
            if is_paired(column.shape[1:], picture):  # an image, mirrored with its picture
                conditions[name] = _mirrored(column, flipped)
        if batch is not None and INPUTS not in drawn:
            drawn[INPUTS] = to_device(_mirrored(batch.inputs, flipped), self.device)
        inputs, labels = drawn.pop(INPUTS), self._labels_of(share, batch)
        labels = None if labels is None else to_device(labels, self.device)
        others = {name: to_device(column, self.device) for name, column in conditions.items()}
        return inputs, labels, share, {**others, **drawn}

    def _read(self, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Batch | None]]:
        """Yield the samples of each share with their batch from the source, or with None if no batch is needed."""
        if not self._reads_samples:
            yield from ((share, None) for share in shares)
            return
        samples = self._open() if self.is_encoded else self.open_pictures()
        for inputs, labels, indices, conditions in samples.reader.stacks(shares, None):
            # Another sample replaces one that cannot be decoded.
            yield indices, Batch(inputs, labels, indices, conditions=conditions)

    def _flipped(self, share: Tensor, epoch: int | None) -> Tensor:
        """Return which samples are mirrored (n, 0 or 1), the same as in a run on the pictures."""
        if epoch is None or not self.transforms.flip:
            return torch.zeros(len(share), dtype=torch.int64)
        return (uniforms(self.seed, "augment", epoch, share, FLIP + 1)[:, FLIP] < self._chance).long()

    def _drawn(self, name: str, share: Tensor, flipped: Tensor, epoch: int | None, batch: Batch | None) -> Tensor:
        if name in self._tables:
            table, rows = self._tables[name].at(share)
            columns = table.columns
        else:
            columns, rows = self._sides_of(name, share, batch), torch.arange(len(share))
        values = columns[MEAN][rows, flipped].float()
        if STD in columns and epoch is not None and self.encoders[name].draws:
            values = values + columns[STD][rows, flipped].float() * self._noise(name, share, epoch, values.shape[1:])
        return to_device(values, self.device)

    def _sides_of(self, name: str, share: Tensor, batch: Batch | None) -> dict[str, Tensor]:
        """Return the latents of an encoder for both sides of the samples at `share`."""
        if name in self._tables:
            table, rows = self._tables[name].at(share)
            return {key: table.columns[key][rows] for key in (MEAN, STD) if key in table.columns}
        assert batch is not None
        return self._makers[name].sides_of(batch)

    @property
    def _chance(self) -> float:
        """The probability of a mirrored sample."""
        return 0.5 if self.transforms.flip is True else float(self.transforms.flip)

    def _noise(self, name: str, share: Tensor, epoch: int, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers (n and `shape`), those of a sample by (seed, epoch, sample)."""
        noise = torch.empty(len(share), *shape)
        generator = Generator()
        for row, index in enumerate(share.tolist()):
            generator.manual_seed(derive_seed(self.seed, f"posterior {name}", epoch, part=index))
            torch.randn(tuple(shape), generator=generator, out=noise[row])
        return noise

    def _labels_of(self, share: Tensor, batch: Batch | None) -> Tensor | None:
        if self.labels is not None:
            return self.labels[share]
        return None if batch is None else batch.labels

    def _conditions_of(self, share: Tensor, batch: Batch | None) -> dict[str, Tensor]:
        """Return the conditions that the source has."""
        if batch is None:
            table, rows = next(iter(self._tables.values())).at(share)
            return {name: column[rows] for name, column in table.conditions.items()}
        return conditions_beside(batch, [m for m in self._makers.values() if isinstance(m, SourceLatents)])

    def parts(self, indices: Tensor) -> Iterator[LatentPart]:
        """Yield parts of the samples `indices`, in order, with their latents."""
        for share, batch in self._read(self._split(indices)):
            sides = {name: self._sides_of(name, share, batch) for name in self.encoders}
            yield LatentPart(share, sides, self._labels_of(share, batch), self._conditions_of(share, batch))

    def _split(self, indices: Tensor) -> Sequence[Tensor]:
        if self.sized is None:
            return torch.split(indices, _AT_ONCE)
        # One size a part, in the order of the samples.
        ends = (self.sized.numbers[indices].diff() != 0).nonzero().flatten() + 1
        runs = torch.tensor_split(indices, ends)
        return [part for run in runs if len(run) for part in torch.split(run, _AT_ONCE)]

    def made(self, part: LatentPart, indices: Tensor) -> EncodedSamples:
        """Return the metadata of the encoded samples `indices` (n, int64), in parts such as `part`."""
        columns = [f"{name}.{column}" for name, sides in part.sides.items() for column in sides]
        sides = next(iter(part.sides.values()))[MEAN].shape[1]
        made = EncodedSamples(self._picture_shape, sides, self.digests, tuple(columns))
        if self.sized is None:
            return made
        sizes = tuple((height, width) for _, height, width in self.sized.shapes)
        return evolve(made, sizes=sizes, numbers=tuple(self.sized.numbers[indices].tolist()))

    def scale(self, indices: Tensor) -> tuple[Sequence[float], Sequence[float]]:
        """Return mean and deviation of each channel of the latents that are drawn from the samples `indices`.

        Both are measured, unless the encoder gives them.

        Raises:
            UserError: for a channel that is constant over these samples.
        """
        encoder = self.encoders[INPUTS]
        if moments := encoder.moments():
            return moments
        sums = squares = torch.zeros(self.shape[0], dtype=torch.float64)
        low, high = torch.full([self.shape[0]], torch.inf), torch.full([self.shape[0]], -torch.inf)
        count, chance = 0, self._chance
        if self.sized:  # size by size, in full batches
            indices = indices[self.sized.numbers[indices].argsort(stable=True)]
        for part in self.parts(indices):
            columns = part.sides[INPUTS]
            mean = columns[MEAN].double()
            second, lowest = mean.square(), columns[MEAN].float()
            highest = lowest
            if STD in columns and encoder.draws:
                width = columns[STD].float()
                second += width.double().square()
                lowest, highest = lowest - width, highest + width
            weights = torch.tensor([1 - chance, chance] if mean.shape[1] == 2 else [1.0], dtype=torch.float64)
            weights = weights.view(1, -1, *[1] * (mean.dim() - 2))
            axes = [0, 1, *range(3, mean.dim())]
            low, high = low.minimum(lowest.amin(axes)), high.maximum(highest.amax(axes))
            sums, squares = sums + (mean * weights).sum(axes), squares + (second * weights).sum(axes)
            count += len(mean) * mean[0, 0, 0].numel()
        if constant := (low == high).nonzero().flatten().tolist():
            raise constant_channels(f"data.encode.{INPUTS}", encoder, constant, f"all {len(indices):,} samples")
        center = sums / count
        return center.tolist(), (squares / count - center.square()).sqrt().tolist()


def _mirrored(values: Tensor, flipped: Tensor) -> Tensor:
    """Return `values` (n ... w) with those rows mirrored where `flipped` (n) is not 0."""
    rows = to_device(flipped.bool(), values.device).view(-1, *[1] * (values.dim() - 1))
    return torch.where(rows, values.flip(-1), values)
