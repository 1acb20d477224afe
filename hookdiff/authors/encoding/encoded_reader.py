"""The reader of encoded samples: it draws from what the encoders have made, as a function of (seed, epoch, sample)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Generator, Tensor

from hookdiff.authors.encoding.codec import PictureCodec
from hookdiff.authors.encoding.encoder import INPUTS, Encoder
from hookdiff.authors.encoding.tables import MEAN, STD, Encode, EncodedRows
from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory, to_device
from hookdiff.data.reader import Parts, Stack, hash_of, is_paired, labels_of
from hookdiff.data.source import sample_name
from hookdiff.errors import UserError
from hookdiff.images.augment import FLIP
from hookdiff.images.cache import key_of, place_of
from hookdiff.images.store import Store
from hookdiff.images.survey import left_out_text
from hookdiff.images.transforms import Transforms
from hookdiff.machine.randomness import derive_seed, uniforms

logger = logging.getLogger("hookdiff")

_CPU = torch.device("cpu")


@define(eq=False, slots=False)
class EncodedReader:
    """Reads the samples of `source` as `encoders` make them. `make_pictures` opens the Feed of its pictures."""

    source: Any
    transforms: Transforms
    store: Store
    encoders: Mapping[str, Encoder]
    make_pictures: Callable[[], Feed]
    device: torch.device
    labels: Tensor | None = field(init=False)
    classes: Sequence[str] | None = field(init=False)
    left_out: Sequence[str] = field(init=False)
    unreadable: set[int] = field(init=False)
    codec: PictureCodec | None = field(init=False, default=None)
    seed: int = field(init=False, default=0)
    _pictures: Feed | None = field(init=False, default=None)
    _picture_shape: tuple[int, ...] = field(init=False)
    _rows: dict[str, EncodedRows] = field(init=False, factory=dict)  # what each encoder has made of all samples
    _encodes: dict[str, Encode] = field(init=False, factory=dict)  # those that encode anew in each epoch

    def __attrs_post_init__(self) -> None:
        if self.transforms.side != self.transforms.image_size:
            raise UserError("resize: a random crop cannot be encoded once; set image_size alone")
        if any(self.transforms.color_jitter):
            raise UserError("color_jitter: random colours cannot be encoded once; leave it out")
        self.labels, self.classes = labels_of(self.source, len(self.source))
        for name, encoder in self.encoders.items():
            flips = bool(self.transforms.flip)
            encode = Encode(name, encoder, self.open_pictures, flips, self.device, len(self.source))
            if (encoder.store or self.store.store) == "none":
                self._encodes[name] = encode
                continue
            self._rows[name] = self._kept(encode)
        if self._rows:
            first = next(iter(self._rows.values()))
            self.labels = first.labels if self.labels is None else self.labels
            survey, self._picture_shape = first.survey, first.survey.shape
        else:
            pictures = self.open_pictures()
            survey, self._picture_shape = pictures.reader.prepared.survey, pictures.shape
        self.unreadable = {*survey.unreadable, *survey.undecodable}
        self.left_out = left_out_text([*survey.unreadable.values(), *survey.undecodable.values()], len(self))
        if INPUTS in self.encoders:
            own = self.encoders[INPUTS]
            self.codec = PictureCodec(own, own.digest(), self._picture_shape, self.open_pictures, self.device)

    def open_pictures(self) -> Feed:
        """Return the Feed of the pictures, which reads their headers when it is made."""
        if self._pictures is None:
            self._pictures = self.make_pictures()
        return self._pictures

    def _kept(self, encode: Encode) -> EncodedRows:
        key = self._key(encode.encoder)
        if key is None:
            logger.warning("%s: the source has no fingerprint, so it is encoded in each run", encode.where)
        rows = encode.rows(None if key is None else place_of(key, self.store.folder / "encoded"))
        place = evolve(self.store, store=encode.encoder.store or self.store.store)
        if key is not None and place.place(sum(column.nbytes for column in rows.columns.values())) == "memory":
            rows.columns = {name: column.clone() for name, column in rows.columns.items()}
        return rows

    def _key(self, encoder: Encoder) -> tuple[Any, ...] | None:
        transforms = self.transforms
        if isinstance(self.source, InMemory):
            data: tuple[Any, ...] = (hash_of(self.source.images), transforms.side, transforms.upscale)
            data += (transforms.channels, transforms.background)
        elif hasattr(self.source, "fingerprint"):
            data = key_of(self.source, transforms)
        else:
            return None
        return ("encoded", *data, encoder.digest(), bool(transforms.flip), self.store.unreadable)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def samples(self) -> Any:
        return self.source

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if INPUTS in self._rows:
            return self._rows[INPUTS].shape
        return tuple(self.first.inputs.shape[1:])

    @cached_property
    def first(self) -> Batch:
        """The first usable sample, without its augmentation."""
        row = torch.tensor([next(k for k in range(len(self)) if k not in self.unreadable)])
        inputs, labels, _, conditions = next(self.stacks([row], None))
        return Batch(inputs, labels, conditions=conditions)

    @property
    def are_pictures(self) -> bool:
        return self.codec is None

    def bound(self, seed: int, device: torch.device, parts: Parts) -> EncodedReader:
        one = copy(self)
        one.seed, one.device = seed, device
        return one

    def check(self) -> None:
        """Take any samples: what cannot be encoded was refused before."""

    def describe(self, index: int) -> str:
        return sample_name(self.source, index)

    def fingerprint(self) -> str | None:
        keys = [self._key(encoder) for encoder in self.encoders.values()]
        return None if None in keys else repr(keys)

    def close(self) -> None:
        if self._pictures is not None:
            self._pictures.close()

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        needs_pictures = bool(self._encodes) or INPUTS not in self.encoders
        pictures = self._picture_batches(shares) if needs_pictures else [None] * len(shares)
        for share, batch in zip(shares, pictures, strict=True):
            flipped = self._flipped(share, epoch)
            made = {name: self._drawn(name, share, flipped, epoch, batch) for name in self.encoders}
            given = self._conditions(share, flipped, batch)
            if batch is not None and INPUTS not in made:
                made[INPUTS] = to_device(_mirrored(batch.inputs, flipped), self.device)
            inputs = made.pop(INPUTS)
            labels = None if self.labels is None else to_device(self.labels[share], self.device)
            yield inputs, labels, share, {**given, **made}

    def _picture_batches(self, shares: Sequence[Tensor]) -> Iterator[Batch]:
        for inputs, labels, indices, conditions in self.open_pictures().reader.stacks(shares, None):
            yield Batch(inputs, labels, indices, conditions=conditions)

    def _flipped(self, share: Tensor, epoch: int | None) -> Tensor:
        """Return which of the samples are mirrored: the same as of pictures that are not encoded."""
        if epoch is None or not self.transforms.flip:
            return torch.zeros(len(share), dtype=torch.int64)
        return (uniforms(self.seed, "augment", epoch, share, FLIP + 1)[:, FLIP] < self._chance).long()

    def _drawn(self, name: str, share: Tensor, flipped: Tensor, epoch: int | None, batch: Batch | None) -> Tensor:
        if name in self._rows:
            columns = self._rows[name].columns
            picked = {key: columns[key][share, flipped] for key in (MEAN, STD) if key in columns}
        else:
            assert batch is not None
            both = self._both_sides(name, batch)
            picked = {key: one[torch.arange(len(share)), flipped] for key, one in both.items()}
        values = picked[MEAN].float()
        if STD in picked and epoch is not None and self.encoders[name].draws:
            values = values + picked[STD].float() * self._noise(name, share, epoch, values.shape[1:])
        return to_device(values, self.device)

    @property
    def _chance(self) -> float:
        """The probability of a mirrored sample."""
        return 0.5 if self.transforms.flip is True else float(self.transforms.flip)

    def _in_order(self, indices: Tensor) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Yield parts of `indices`, and what the encoder of the inputs makes of both sides of them."""
        shares = torch.split(indices, 1024)
        if INPUTS in self._rows:
            columns = self._rows[INPUTS].columns
            yield from (
                (share, {key: columns[key][share] for key in (MEAN, STD) if key in columns}) for share in shares
            )
        else:
            for share, batch in zip(shares, self._picture_batches(shares), strict=True):
                yield share, self._both_sides(INPUTS, batch)

    def _both_sides(self, name: str, batch: Batch) -> Mapping[str, Tensor]:
        encode = self._encodes[name]
        encode.open(tuple(batch.inputs.shape[1:]))
        return encode.both_sides(batch.inputs)

    def _noise(self, name: str, share: Tensor, epoch: int, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers (n and `shape`), those of a sample by (seed, epoch, sample)."""
        made = torch.empty(len(share), *shape)
        generator = Generator()
        for row, index in enumerate(share.tolist()):
            generator.manual_seed(derive_seed(self.seed, f"posterior {name}", epoch, part=index))
            torch.randn(tuple(shape), generator=generator, out=made[row])
        return made

    def _conditions(self, share: Tensor, flipped: Tensor, batch: Batch | None) -> dict[str, Tensor]:
        """Return the conditions that the source has; those that are images are mirrored with the pictures."""
        if batch is not None:
            found = dict(batch.conditions)
        else:
            found = {name: column[share] for name, column in next(iter(self._rows.values())).conditions.items()}
        for name, column in found.items():
            if is_paired(column.shape[1:], self._picture_shape):
                found[name] = _mirrored(column, flipped)
        return {name: to_device(column, self.device) for name, column in found.items()}

    def scale(self, indices: Tensor) -> tuple[Sequence[float], Sequence[float]]:
        """Return mean and deviation of each channel of the inputs, as they are drawn from the samples `indices`.

        They are what the encoder gives, or else measured.
        """
        encoder = self.encoders[INPUTS]
        if given := encoder.moments():
            return given
        sums = squares = torch.zeros(self.shape[0], dtype=torch.float64)
        count, chance = 0, self._chance
        for share, columns in self._in_order(indices):
            mean = columns[MEAN].double()
            second = mean.square()
            if STD in columns and encoder.draws:
                second += columns[STD].double().square()
            weights = torch.tensor([1 - chance, chance] if mean.shape[1] == 2 else [1.0], dtype=torch.float64)
            weights = weights.view(1, -1, *[1] * (mean.dim() - 2))
            axes = [0, 1, *range(3, mean.dim())]
            sums, squares = sums + (mean * weights).sum(axes), squares + (second * weights).sum(axes)
            count += len(share) * mean[0, 0, 0].numel()
        center = sums / count
        return center.tolist(), (squares / count - center.square()).sqrt().tolist()


def _mirrored(values: Tensor, flipped: Tensor) -> Tensor:
    """Return `values` (n ... w) with those rows mirrored where `flipped` (n) is not 0."""
    rows = to_device(flipped.bool(), values.device).view(-1, *[1] * (values.dim() - 1))
    return torch.where(rows, values.flip(-1), values)
