"""The batches of a run: their samples, in their order, for each rank.

They are a pure function of (seed, epoch, samples consumed): a run resumes at any sample, and the number of workers
changes nothing. Batches that workers loaded ahead and that were not consumed are loaded again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from attrs import Factory, define, field, setters
from attrs.validators import ge, optional
from torch import Generator, Tensor

from hookdiff import ranks
from hookdiff.data.augment import augment, center_crop
from hookdiff.data.batch import Batch
from hookdiff.data.facts import LIMIT, MOST, Facts
from hookdiff.data.items import Stack, read_item
from hookdiff.data.labels import check_range
from hookdiff.data.loader import Loader, read_batch, read_image
from hookdiff.data.memory import InMemory, to_device
from hookdiff.data.order import balanced, replacements, split
from hookdiff.data.source import Images, Source, name_of
from hookdiff.data.store import Prepared, Store, prepare
from hookdiff.data.transforms import Transforms, size_text
from hookdiff.errors import UserError, shown
from hookdiff.options import about, between
from hookdiff.randomness import default_generators_kept, derive_seed
from hookdiff.structure import structured

logger = logging.getLogger("hookdiff")

_CPU = torch.device("cpu")
_NAMED = 64  # samples whose names all ranks compare
_AT_ONCE = 1 << 20  # pixel values that are fetched from memory in one go: 4 MiB in float32

Finish = Callable[[Batch], Batch]  # takes first-stage samples


def _check_held_out(_: Any, __: Any, held_out: int | float) -> None:
    if not held_out >= 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"'held_out' must be a count, or a share from 0 to below 1: {held_out}")


@define(frozen=True)
class FeedState:
    """What `Feed.state_dict` returns."""

    facts: Facts | None = None
    epoch: int | None = field(default=None, validator=optional(ge(0)))
    weights: Tensor | None = None


def _checked(labels: Tensor, classes: Sequence[str] | None) -> tuple[Tensor, Sequence[str] | None]:
    """Return labels and names of classes, escaped for messages; raises UserError for numbers that are no labels."""
    if len(labels):
        low, high = int(labels.min()), int(labels.max())
        try:
            check_range(low, high)
        except ValueError as error:
            raise UserError(f"labels: {error}") from None
        if classes is not None and high >= len(classes):
            raise UserError(f"labels: {high} is the number of no class, there are {len(classes)}")
    return labels, None if classes is None else tuple(map(shown, classes))


@define(eq=False, on_setattr=setters.NO_OP)  # validated when made; each step sets `waited`
class Feed:
    """The epochs of `source` in batches, and this rank's share of each batch.

    `source` is a tensor n c h w, an `InMemory` set, `Images` (see `hookdiff.data.Folder`), or any other object with a
    length and `[i]`, such as a list (see `Source`). The other options are keys of the config table [data].

    Raises UserError for an object that is no source, or that cannot be used with these options.
    """

    source: Any
    transforms: Transforms = Factory(Transforms)
    store: Store = Factory(Store)
    held_out: int | float = field(
        default=0,
        validator=_check_held_out,
        metadata=about(
            "count or share of the samples to hold out from training: the same in every run, in proportion by class"
        ),
    )
    balanced: bool = field(
        default=False, metadata=about("draw each class equally often; the length of an epoch stays the same")
    )
    drop_last: bool = field(default=True, metadata=about("leave out the last, smaller batch of an epoch"))
    workers: int = field(
        default=0,
        validator=between(0, 1024),
        metadata=about("processes that load samples, if these are not in memory or on disk"),
    )
    prefetch: int = field(default=2, validator=between(1, 1024), metadata=about("batches that each worker loads ahead"))
    prepared: Prepared = field(init=False, repr=False)  # the source after the first stage
    labels: Tensor | None = field(init=False, default=None)  # of the whole set: n, int64, on the CPU (-1: unknown)
    classes: Sequence[str] | None = field(init=False, default=None)  # the names of the classes
    batch_size: int = field(init=False, default=0)  # over all ranks
    seed: int = field(init=False, default=0)
    device: torch.device = field(init=False, default=_CPU)
    rank: int = field(init=False, default=0)
    num_ranks: int = field(init=False, default=1)
    samples: InMemory | Images | Source = field(init=False)  # on the device if there is room
    usable: Tensor = field(init=False)  # n, int64, sorted: positions of the samples with a readable header
    training: Tensor = field(init=False)  # the usable samples to train on
    held_out_indices: Tensor = field(init=False)  # the usable samples held out
    epoch: int | None = field(init=False, default=None)  # the last one that `begin` began
    weights: Tensor | None = field(init=False, default=None)  # of `weigh`, in that epoch
    waited: float = field(init=False, default=0.0)  # seconds in this process for all batches to train on
    _rows: Tensor | None = field(init=False, default=None)  # for each sample, the row of its pixels in `samples`
    _reported: set[int] = field(init=False, factory=set)  # unreadable samples with a warning in the log
    _idle: list[Loader] = field(init=False, factory=list)  # loaders that wait for the next epoch

    def __attrs_post_init__(self) -> None:
        self.prepared = prepare(self.source, self.transforms, self.store)
        self.samples, survey = self.prepared.samples, self.prepared.survey
        labels = getattr(self.source, "labels", None)
        if isinstance(labels, Tensor) and labels.shape == (len(self.samples),):
            self.labels, self.classes = _checked(labels.cpu(), getattr(self.source, "classes", None))
        if self.balanced and self.labels is None:
            raise UserError("balanced: the source has no labels")
        readable = torch.ones(len(self.samples), dtype=torch.bool)
        readable[list(survey.unreadable)] = False
        self.usable = readable.nonzero().squeeze(1)
        self.training, self.held_out_indices = split(self.usable, self.labels, self.held_out)
        if survey.undecodable:
            readable[list(survey.undecodable)] = False
            self._rows = replacements((self.training, self.held_out_indices), ~readable)

    @classmethod
    def of(cls, data: Feed | InMemory | Images | Source | Tensor) -> Feed:
        """Return a new Feed of `data`, so that two Loops may share the same data."""
        return copy(data) if isinstance(data, Feed) else cls(data)

    def bind(
        self, batch_size: int, seed: int = 0, device: torch.device = _CPU, rank: int | None = None, num_ranks: int = 0
    ) -> Feed:
        """Make batches of `batch_size` samples, over all ranks, in the order that `seed` gives. Returns self.

        Unless given, rank and number of ranks are those of this process.

        Raises UserError if there are fewer samples than a batch needs, if a batch is smaller than the number of ranks,
        if the ranks have other data than each other, or if samples that are not images are to be augmented.
        """
        self.batch_size, self.seed, self.device, self._idle = batch_size, seed, device, []
        self.rank = ranks.rank() if rank is None else rank
        self.num_ranks = num_ranks = num_ranks or ranks.num_ranks()
        self.epoch = self.weights = None
        if isinstance(self.samples, InMemory):
            self.samples = self.samples.to(device)
        if batch_size < num_ranks:
            raise UserError(f"batch_size is {batch_size}: too small for {num_ranks} ranks")
        self._check_same()
        if self.exhausted(0):
            way_out = "lower batch_size or set drop_last = false" if len(self.training) else "nothing to train on"
            raise UserError(f"the data has {len(self.training)} samples, batch_size is {batch_size}: {way_out}")
        if self.transforms.random and len(self.shape) != 3:
            raise UserError(f"samples of {size_text(self.shape)} are no images c h w and cannot be augmented")
        return self

    def _check_same(self) -> None:
        """Raise UserError unless all ranks have the same data, as far as number, shape, labels and some names show."""
        if ranks.num_ranks() == 1:
            return
        labels = None if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()[:12]
        places = torch.linspace(0, len(self.training) - 1, min(_NAMED, len(self.training)), dtype=torch.float64).long()
        named = {f"sample {index}": self.describe(index) for index in self.training[places].tolist()}
        facts = {"number of samples": len(self.samples), "shape": self.shape, "labels": labels}
        first, *others = ranks.gathered({**facts, **named})
        for number, other in enumerate(others, 1):
            for what in dict.fromkeys((*first, *other)):
                one, two = first.get(what, "none"), other.get(what, "none")
                if one != two:
                    raise UserError(f"all ranks need the same data: {what}: {one} on rank 0, {two} on rank {number}")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, c h w; the first sample is loaded if nothing else gives it."""
        if not (shape := self.prepared.survey.shape):
            return tuple(self._first.inputs.shape[1:])
        size = self.transforms.image_size
        return shape if size is None else (shape[0], size, size)

    def blank(self, num: int) -> Batch:
        """Return `num` samples of zeros on the device, of the shapes and dtypes of the data."""

        def zeros(column: Tensor) -> Tensor:
            return torch.zeros(num, *column.shape[1:], dtype=column.dtype, device=self.device)

        first, index = self._first, torch.zeros(num, dtype=torch.int64)
        labels = None if first.labels is None else index.to(self.device)
        conditions = {name: zeros(column) for name, column in first.conditions.items()}
        return Batch(zeros(first.inputs), labels, index, conditions=conditions)

    @cached_property
    def _first(self) -> Batch:
        """The first sample, as the objective gets it; that of `Images`, which have no conditions, is not read."""
        row = torch.zeros(1, dtype=torch.int64)
        if isinstance(self.source, Images):
            return Batch(torch.zeros(1, *self.shape), None if self.labels is None else row)
        if isinstance(self.samples, InMemory):
            images, labels, conditions = self.samples.rows(row)
        else:
            images, labels, _, conditions = next(self._loader(0).load([(0, row.numpy())]))
        labels = row if labels is None and self.labels is not None else labels
        return center_crop(Batch(images, labels, conditions=conditions), self.transforms)

    @cached_property
    def are_pictures(self) -> bool:
        """Whether the samples are pictures, with values in [-1, 1]: no vectors or latents.

        A tensor in memory counts as a whole; samples that are read one by one by the first few.
        """
        if isinstance(self.source, Images) or len(self.shape) < 3:
            return isinstance(self.source, Images)
        held = self.samples
        if isinstance(held, InMemory):
            images = held.images
        else:
            with default_generators_kept():  # which reading seeds: a run may be under way
                images, *_ = next(self._loader(0).load([(0, self.training[:MOST].numpy())]))
        if not images.is_floating_point():
            return images.dtype == torch.uint8
        low, high = images.aminmax()
        return bool((low >= -1) & (high <= 1))

    @cached_property
    def facts(self) -> Facts:
        """What a checkpoint keeps of the data; if the samples have conditions, the first samples are loaded."""
        kept: dict[str, Any] = {}
        if columns := self._first.conditions:
            size = sum(column[:1].nbytes for column in columns.values())
            count = max(1, min(MOST, LIMIT // max(1, size)))
            batch = self.examples(lambda total: range(min(count, total)))
            kept["labels"] = None if batch.labels is None else batch.labels.cpu()
            kept["conditions"] = {name: column.cpu() for name, column in batch.conditions.items()}
        return Facts(
            shape=self.shape,
            num_samples=len(self.training),
            drop_last=self.drop_last,
            are_pictures=self.are_pictures,
            num_classes=self.num_classes,
            classes=None if self.classes is None else tuple(map(str, self.classes)),
            **kept,
        )

    def examples(self, choose: Callable[[int], Sequence[int]]) -> Batch:
        """Return the training samples that `choose` picks by their number, such as `SampleRequest.rows`."""
        rows = list(choose(len(self.training)))
        return next(self.unaugmented(self.training[rows], len(rows)))

    @property
    def num_classes(self) -> int | None:
        """The number of class names, or without names the highest label plus one; None without labels."""
        if self.labels is None:
            return None
        return max(self.labels.tolist(), default=-1) + 1 if self.classes is None else len(self.classes)

    def describe(self, index: int) -> str:
        """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""
        return name_of(self.source, index)

    def fingerprint(self) -> str | None:
        """Return a hash that changes with the pixels that `unaugmented` yields; None for a source without one."""
        if hasattr(self.source, "fingerprint"):
            own = self.source.fingerprint()
        elif isinstance(self.samples, InMemory):
            images, digest = self.samples.images, hashlib.sha256()
            for part in torch.split(images, 1024):
                digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
            own = f"{images.dtype} {tuple(images.shape)} {digest.hexdigest()}"
        else:
            return None
        options = self.transforms
        first_stage = (options.image_size, options.side, options.upscale, options.channels, options.background)
        return repr((type(self.source).__qualname__, own, *first_stage))

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        rest = len(self.training) % self.batch_size if self.batch_size else 0  # a run sets it
        return len(self.training) - (rest if rest < self._smallest else 0)

    @property
    def num_batches(self) -> int:
        """The number of batches of an epoch."""
        return -(-len(self) // self.batch_size)

    @property
    def _smallest(self) -> int:
        """The least number of samples in a batch: each rank needs one."""
        return self.batch_size if self.drop_last else self.num_ranks

    def exhausted(self, start: int) -> bool:
        """Return whether an epoch has no further batch after its first `start` samples."""
        return len(self.training) - start < self._smallest

    def begin(self, epoch: int) -> bool:
        """Forget the weights of another epoch; return whether `epoch` begins, in this run or the one resumed from."""
        if self.epoch == epoch:
            return False
        self.epoch, self.weights = epoch, None
        return True

    def weigh(self, weights: Tensor | None) -> None:
        """Draw sample k of the whole set in proportion to `weights[k]` >= 0 (n), until the end of the epoch.

        It counts from the next call of `batches`; None draws each training sample once. Call it in `before_epoch`.
        Raises ValueError for weights of another number, that are negative or not finite, or 0 for all training samples.
        """
        self.weights = None if weights is None else self._usable_weights(weights)

    def _usable_weights(self, weights: Tensor) -> Tensor:
        weights = weights.detach().double().cpu()
        if weights.shape != (len(self.samples),):
            raise ValueError(f"weights of the shape {tuple(weights.shape)} for {len(self.samples)} samples")
        if not (weights.isfinite() & (weights >= 0)).all() or not weights[self.training].any():
            raise ValueError("weights of samples must be finite, at least 0, and not all 0")
        if self.balanced:
            raise UserError("data.balanced = true decides how often a sample is drawn, so it cannot be weighted")
        return weights / weights.max()  # so that the sum is finite

    def state_dict(self) -> dict[str, Any]:
        """Return the facts about the data, the epoch, and its weights if there are any."""
        weights = {} if self.weights is None else {"weights": self.weights}
        return {"facts": self.facts.state_dict(), "epoch": self.epoch, **weights}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is one that `load_state_dict` takes."""
        weights = structured(FeedState, state).weights
        if weights is not None:
            self._usable_weights(weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch and its weights."""
        self.epoch = state.get("epoch")
        self.weigh(state.get("weights"))

    def order(self, epoch: int) -> Tensor:
        """Return the samples of `epoch` in their order: int64, positions in the whole set."""
        generator = Generator().manual_seed(derive_seed(self.seed, "data", epoch))
        if self.weights is not None:
            chances = self.weights[self.training].cumsum(0)  # torch.multinomial takes at most 2**24 samples
            drawn = torch.rand(len(self.training), generator=generator, dtype=torch.float64) * chances[-1]
            return self.training[torch.searchsorted(chances, drawn, right=True)]
        if self.balanced:
            assert self.labels is not None
            return self.training[balanced(self.labels[self.training], generator)]
        return self.training[torch.randperm(len(self.training), generator=generator)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's share of the batches of `epoch`, after the first `start` samples of its order."""
        whole = torch.split(self.order(epoch)[start:], self.batch_size)
        parts = [part for part in whole if len(part) >= self._smallest]
        made: Any = self._make(
            epoch, parts, self.rank, self.num_ranks, lambda samples: augment(samples, self.transforms, self.seed, epoch)
        )
        with closing(made):
            while True:
                asked = time.monotonic()
                batch = next(made, None)
                self.waited += time.monotonic() - asked
                if batch is None:
                    return
                yield batch

    def unaugmented(self, indices: Tensor, batch_size: int = 256) -> Iterator[Batch]:
        """Yield the samples `indices` (n, int64), such as those held out, in this order and without augmentation.

        Samples that are cropped at random are cropped at the centre. A `Source` draws its own augmentation of epoch 0.
        """
        yield from self._unaugmented(indices, batch_size, 0, 1)

    def shared(self, indices: Tensor) -> Iterator[Batch]:
        """Yield this rank's share of the samples `indices`, in batches of a step, without augmentation.

        A rank without a share of the last batch gets a filler, so that all ranks make as many passes.
        """
        yield from self._unaugmented(indices, self.batch_size, self.rank, self.num_ranks)

    def _unaugmented(self, indices: Tensor, batch_size: int, rank: int, num_ranks: int) -> Iterator[Batch]:
        parts = torch.split(indices, batch_size) if len(indices) else ()
        yield from self._make(0, parts, rank, num_ranks, lambda samples: center_crop(samples, self.transforms))

    def _make(self, epoch: int, parts: Sequence[Tensor], rank: int, num_ranks: int, finish: Finish) -> Iterator[Batch]:
        shares = [part[rank::num_ranks] if rank < len(part) else part[:1] for part in parts]
        if isinstance(self.samples, InMemory):
            made = self._fetch(self.samples, shares, finish)
        else:
            made = self._load(epoch, shares, finish)
        for part, (inputs, labels, indices, conditions) in zip(parts, made, strict=True):
            total = part.shape[0]  # len() of a tensor is ten times slower
            is_filler, most = rank >= total, -(-total // num_ranks)
            rows = range(1) if is_filler else range(rank, total, num_ranks)
            yield Batch(
                inputs,
                labels,
                indices,
                total=total,
                conditions=conditions,
                rows=rows,
                most=most,
                is_filler=is_filler,
            )

    def _fetch(self, samples: InMemory, shares: list[Tensor], finish: Finish) -> Iterator[Stack]:
        if not shares:
            return
        # Fetch several small batches at once and slice them: the calls take longer than copying the pixels.
        at_once = max(1, _AT_ONCE // (len(shares[0]) * samples.images[0].numel()))
        for first in range(0, len(shares), at_once):
            group = shares[first : first + at_once]
            if self._rows is not None:
                group = [self._rows[share] for share in group]
            sizes = [len(share) for share in group]
            indices = torch.cat(group)
            images, labels, conditions = samples.rows(indices, self.device)
            made = finish(Batch(images, labels, indices, conditions=conditions))
            inputs, by_batch = torch.split(made.inputs, sizes), repeat(None)
            columns = {name: torch.split(column, sizes) for name, column in made.conditions.items()}
            cut = ({name: parts[k] for name, parts in columns.items()} for k in range(len(group)))
            yield from zip(inputs, by_batch if labels is None else torch.split(labels, sizes), group, cut, strict=False)

    def _load(self, epoch: int, shares: Sequence[Tensor], finish: Finish) -> Iterator[Stack]:
        loader = self._idle.pop() if self._idle else self._loader(self.workers)
        # Numpy arrays, because sending a tensor to a worker takes a file descriptor.
        stacks = loader.load((epoch, share.numpy()) for share in shares)
        for share, (images, labels, indices, conditions) in zip(shares, stacks, strict=True):
            for index in sorted(set(share[share != indices].tolist()) - self._reported):
                self._reported.add(index)
                name, count = self.describe(index), len(self._reported)
                logger.warning("data: %s cannot be read; another sample replaces it (%d so far)", name, count)
            if labels is None and self.labels is not None:
                labels = self.labels[indices]
            images, labels = to_device(images, self.device), None if labels is None else to_device(labels, self.device)
            conditions = {name: to_device(column, self.device) for name, column in conditions.items()}
            made = finish(Batch(images, labels, indices, conditions=conditions))
            yield made.inputs, labels, indices, dict(made.conditions)
        # If the epoch is left before its end, the loader is not kept: its workers still load batches of that epoch.
        self._idle.append(loader)

    def close(self) -> None:
        """End the workers that wait for another epoch; a later epoch starts new ones."""
        while self._idle:
            self._idle.pop().close()

    def _loader(self, workers: int) -> Loader:
        if isinstance(self.source, Images):
            successors = torch.arange(len(self.samples))
            for part in (self.training, self.held_out_indices):
                successors[part] = part.roll(-1)
            # A numpy array, because sending a tensor to a worker takes a file descriptor.
            following = successors.numpy() if self.store.unreadable == "skip" else None
            fit = partial(self.transforms.fit, shape=self.prepared.survey.shape)
            read = partial(read_image, self.source, fit, following)
        else:
            read = partial(read_item, self.source, self.transforms, self.seed)
        return Loader(partial(read_batch, read), workers, self.prefetch, self.device.type == "cuda")
