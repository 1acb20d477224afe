"""The batches of a run: their samples, in their order, for each rank.

The batches are a pure function of (seed, epoch, samples consumed), so a run resumes at any sample, and the number of
workers does not matter. Batches that workers loaded ahead and that were not consumed are loaded again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, setters
from attrs.validators import ge, optional
from torch import Generator, Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import InMemory
from hookdiff.data.memory_reader import MemoryReader
from hookdiff.data.order import balanced, split
from hookdiff.errors import UserError
from hookdiff.machine import ranks
from hookdiff.machine.randomness import derive_seed
from hookdiff.options.fields import about

if TYPE_CHECKING:
    from hookdiff.data.feed_state import Facts
    from hookdiff.data.reader import Codec, Reader
    from hookdiff.data.shape_order import ShapeOrder
    from hookdiff.data.source import Images, Source

_CPU = torch.device("cpu")


def _check_held_out(_: Any, __: Any, held_out: int | float) -> None:
    if not held_out >= 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"'held_out' must be a count, or a share from 0 to below 1: {held_out}")


@define(eq=False, on_setattr=setters.NO_OP)  # validated when made; each step sets `waited`
class Feed:
    """Divides each epoch of the data into batches, and yields this rank's share of each batch.

    `data` is a tensor n c h w, an `InMemory` set, or a `Reader`. `hookdiff.images.feed_of` makes a Feed of pictures and
    of any other source. The other options are keys of the config table [data].

    Raises:
        UserError: for data that cannot be used with these options.
    """

    data: InMemory | Reader | Tensor | Facts  # Facts: of a `FeedWithoutData`
    held_out: int | float = field(
        default=0,
        validator=_check_held_out,
        metadata=about(
            "count or share of the samples to hold out from training, in proportion by class; the same in every run"
        ),
    )
    balanced: bool = field(
        default=False, metadata=about("draw each class equally often; the length of an epoch stays the same")
    )
    drop_last: bool = field(default=True, metadata=about("leave out the last, smaller batch of an epoch"))
    limit: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=about(
            "train on this many samples alone, the first ones, such as 8 for a first test of a network; if they are "
            "fewer than `batch_size`, their order is repeated until the batch is full; default: all"
        ),
    )
    reader: Reader = field(init=False, repr=False)
    batch_size: int = field(init=False, default=0)  # over all ranks
    seed: int = field(init=False, default=0)
    device: torch.device = field(init=False, default=_CPU)
    rank: int = field(init=False, default=0)
    num_ranks: int = field(init=False, default=1)
    usable: Tensor = field(init=False)  # n, int64, sorted: positions of the samples that can be read
    training: Tensor = field(init=False)  # the usable samples to train on
    held_out_indices: Tensor = field(init=False)  # the usable samples held out
    epoch: int | None = field(init=False, default=None)  # the epoch that `begin` began last
    weights: Tensor | None = field(init=False, default=None)  # given to `weigh` in this epoch
    waited: float = field(init=False, default=0.0)  # seconds that this process has waited for batches
    by_shape: ShapeOrder | None = field(init=False, default=None)  # None: all samples have one shape

    def __attrs_post_init__(self) -> None:
        self.reader = _reader_of(self.data)
        if self.balanced and self.labels is None:
            raise UserError("balanced = true needs labels: the source has none")
        readable = torch.ones(len(self.reader), dtype=torch.bool)
        readable[list(self.reader.unreadable)] = False
        self.usable = readable.nonzero().squeeze(1)
        training, self.held_out_indices = split(self.usable, self.labels, self.held_out)
        self.training = training[: self.limit]
        self._bind_reader()

    def _bind_reader(self) -> None:
        self.reader = self.reader.bound(self.seed, self.device, (self.training, self.held_out_indices))
        self._set_order()

    def _set_order(self) -> None:
        self.by_shape = None
        if self.reader.shape_numbers is not None:
            from hookdiff.data.shape_order import ShapeOrder  # only for samples of several shapes

            self.by_shape = ShapeOrder(self)

    @classmethod
    def of(cls, data: Feed | InMemory | Reader | Tensor) -> Feed:
        """Return a new Feed of `data`, so that two Loops may share the same data."""
        return copy(data) if isinstance(data, Feed) else cls(data)

    def bind(
        self, batch_size: int, seed: int = 0, device: torch.device = _CPU, rank: int | None = None, num_ranks: int = 0
    ) -> Feed:
        """Make batches of `batch_size` samples, over all ranks, in the order that `seed` gives. Returns self.

        Default of `rank` and `num_ranks`: those of this process.

        Raises:
            UserError: if there are fewer samples than a batch needs, if a batch is smaller than the number of ranks, if
                the ranks have different data, or if samples that are not images are to be augmented.
        """
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.rank = ranks.rank() if rank is None else rank
        self.num_ranks = num_ranks = num_ranks or ranks.num_ranks()
        self.epoch = self.weights = None
        self._bind_reader()
        if batch_size < num_ranks:
            raise UserError(f"batch_size is {batch_size:,}; give each of the {num_ranks} ranks a sample")
        if ranks.num_ranks() > 1:
            from hookdiff.data.feed_checks import check_same

            check_same(self)
        if self.exhausted(0, 0):
            way_out = "lower batch_size or set drop_last = false" if len(self.training) else "nothing to train on"
            num = f"the data has {len(self.training):,} samples"
            if self.by_shape and len(self.training):
                num += f", the most frequent of their shapes has {max(self.by_shape.counts.values()):,}"
            raise UserError(f"{num}, batch_size is {batch_size:,}: {way_out}")
        self.reader.check()
        return self

    @property
    def samples(self) -> InMemory | Images | Source:
        """All samples: an `InMemory` set (on the device if there is room), or the source that loads them."""
        return self.reader.samples

    @property
    def labels(self) -> Tensor | None:
        """The labels of the whole set: n, int64, on the CPU (-1: unknown); None without labels."""
        return self.reader.labels

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes."""
        return self.reader.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, c h w, which gives a network its arguments; the samples may have several `shapes`.

        If the source does not give it, the first sample is loaded.
        """
        return self.reader.shape

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the training samples, the most frequent shape first."""
        return self.by_shape.shapes if self.by_shape else [self.shape]

    @property
    def largest(self) -> tuple[int, ...]:
        """The shape with the most values, which decides how much memory a step takes."""
        return max(self.shapes, key=math.prod)

    @property
    def are_pictures(self) -> bool:
        """Whether the samples are pictures with values in [-1, 1], not vectors or latents.

        All values of a tensor in memory are checked, but only the first few of samples that are read one by one.
        """
        return self.reader.are_pictures

    @property
    def codec(self) -> Codec | None:
        """The codec, such as an autoencoder, that encodes pictures to samples; None if samples are not encoded."""
        return self.reader.codec

    @property
    def pictures(self) -> Feed:
        """The Feed of the pictures that the `codec` encodes; default: this Feed."""
        return self.codec.pictures if self.codec else self

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """The shape of a picture that the run makes, c h w."""
        return self.codec.shape if self.codec else self.shape

    def input_shape(self, size: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the shape of an input of the network, c h w, for pictures of this `size`: height and width in pixels.

        Default: the most frequent shape of the training samples.

        Raises:
            UserError: for a size that has no latents, and for samples without height and width.
        """
        if size is None:
            return tuple(self.shapes[0])
        from hookdiff.data.picture_sizes import input_shape  # only for another size

        return input_shape(self, size)

    def blank(self, num: int, shape: Sequence[int] | None = None) -> Batch:
        """Return `num` samples of zeros on the device, of the shapes and dtypes of the data.

        `shape` is that of a sample; default: that of the first sample. Conditions that are images get its sides, too.
        """
        first, index = self.reader.first, torch.zeros(num, dtype=torch.int64)
        before = first.inputs.shape[1:]
        scale = self.picture_shape[-1] // self.shape[-1]  # of the pictures, if samples are latents

        def zeros(column: Tensor) -> Tensor:
            row = tuple(column.shape[1:])
            if shape is not None and row[-2:] in (before[-2:], tuple(scale * side for side in before[-2:])):
                row = (*row[:-2], *(side * row[-1] // before[-1] for side in shape[-2:]))
            return torch.zeros(num, *row, dtype=column.dtype, device=self.device)

        labels = None if first.labels is None else index.to(self.device)
        conditions = {name: zeros(column) for name, column in first.conditions.items()}
        inputs = torch.zeros(num, *(before if shape is None else shape), dtype=first.inputs.dtype, device=self.device)
        return Batch(inputs, labels, index, conditions=conditions)

    @cached_property
    def facts(self) -> Facts:
        """The facts about the data that a checkpoint keeps."""
        from hookdiff.data.feed_state import Facts

        return Facts.about(self)

    @property
    def nothing(self) -> Mapping[str, Tensor | None]:
        """The values that replace missing conditions, by name; None: the condition stays. Default: zeros."""
        return self.reader.nothing

    def examples(self, choose: Callable[[int], Sequence[int]], shape: Sequence[int] | None = None) -> Batch:
        """Return the training samples that `choose` picks, such as `SampleRequest.rows`, given their number.

        They all have one `shape`; default: the most frequent one.
        """
        among = self.by_shape.of_shape(shape) if self.by_shape else self.training
        rows = list(choose(len(among)))
        return next(self.unaugmented(among[rows], len(rows)))

    @property
    def num_classes(self) -> int | None:
        """The number of class names, or the highest label plus one if there are none; None without labels."""
        if self.labels is None:
            return None
        return max(self.labels.tolist(), default=-1) + 1 if self.classes is None else len(self.classes)

    def describe(self, index: int) -> str:
        """Return the name of the sample at `index` for messages, such as its file, with control characters escaped."""
        return self.reader.describe(index)

    def fingerprint(self) -> str | None:
        """Return a hash of the samples that `unaugmented` yields; None if the source gives none."""
        return self.reader.fingerprint()

    def __len__(self) -> int:
        """Return the number of samples of an epoch; of samples of several shapes, at most."""
        if self.by_shape:
            return sum(self.by_shape.lengths)
        rest = self.num_drawn % self.batch_size if self.batch_size else 0  # a run sets it
        return self.num_drawn - (rest if rest < self._smallest else 0)

    @property
    def num_drawn(self) -> int:
        """The length of `order`: each training sample once; with a `limit`, repeated until they fill a batch."""
        num = len(self.training)
        return max(num, self.batch_size) if num and self.limit else num

    def num_batches(self, end: int = 1, epoch: int = 0, start: int = 0) -> int:
        """Return the number of batches from the sample `start` of `epoch` to the beginning of the epoch `end`.

        Default: that of the first epoch. Epochs of samples of several shapes differ in length.
        """
        if self.by_shape:
            return self.by_shape.num_until(end, epoch, start)
        return (end - epoch) * -(-len(self) // self.batch_size) - -(-start // self.batch_size)

    @property
    def _smallest(self) -> int:
        """The least number of samples in a batch, over all ranks."""
        return self.batch_size if self.drop_last else 1

    def next_size(self, epoch: int, start: int) -> int:
        """Return the samples in the batch after the first `start` samples of `epoch`, over all ranks; 0 at its end."""
        if self.by_shape:
            return self.by_shape.next_size(epoch, start)
        rest = self.num_drawn - start
        return min(self.batch_size, rest) if rest >= self._smallest else 0

    def exhausted(self, epoch: int, start: int) -> bool:
        """Return whether `epoch` has no further batch after its first `start` samples."""
        return not self.next_size(epoch, start)

    def begin(self, epoch: int) -> bool:
        """Begin `epoch`, without weights of samples. Return False if it had begun, such as before a resume."""
        if self.epoch == epoch:
            return False
        if self.by_shape:
            self.by_shape.begin(epoch)
        self.epoch, self.weights = epoch, None
        return True

    def weigh(self, weights: Tensor | None) -> None:
        """Draw sample k of the whole set in proportion to `weights[k]` >= 0 (n), until the end of the epoch.

        Call this in `before_epoch`: the next call of `batches` uses the weights. None: draw each training sample once.

        Raises:
            ValueError: for a wrong number of weights, negative or not finite ones, or 0 for all training samples.
        """
        if weights is not None:
            from hookdiff.data.feed_checks import checked_weights

            weights = checked_weights(self, weights)
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        """Return the facts about the data, the epoch, the weights of its samples, if any, and the plan of shapes."""
        more: dict[str, Any] = {} if self.weights is None else {"weights": self.weights}
        if self.by_shape and (plan := self.by_shape.state_dict()):
            more["plan"] = plan
        return {"facts": self.facts.state_dict(), "epoch": self.epoch, **more}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` takes `state`."""
        from hookdiff.data.feed_checks import check_state

        check_state(self, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch, its weights, and the plan of shapes."""
        self.epoch = state.get("epoch")
        self.weigh(state.get("weights"))
        if self.by_shape:
            self.by_shape.load_state_dict(state.get("plan"))

    def order(self, epoch: int) -> Tensor:
        """Return the samples of `epoch` in their order: int64, positions in the whole set."""
        if self.by_shape:
            return torch.cat([self.training[:0], *self.by_shape.batches(epoch, 0)])
        order = self._order(epoch)
        times = -(-self.num_drawn // max(1, len(order)))
        return order.repeat(times)[: self.num_drawn] if times > 1 else order

    def _order(self, epoch: int) -> Tensor:
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
        """Yield this rank's share of the batches of `epoch`, after the first `start` samples of its order.

        The samples of a batch have one shape.
        """
        if self.by_shape:
            parts = self.by_shape.batches(epoch, start)
        else:
            whole = torch.split(self.order(epoch)[start:], self.batch_size)
            parts = [part for part in whole if len(part) >= self._smallest]
        batches: Any = self._make(epoch, parts, self.rank, self.num_ranks)
        with closing(batches):
            while True:
                asked = time.monotonic()
                batch = next(batches, None)
                self.waited += time.monotonic() - asked
                if batch is None:
                    return
                yield batch

    def unaugmented(self, indices: Tensor, batch_size: int = 256) -> Iterator[Batch]:
        """Yield the samples `indices` (n, int64), such as those held out, in this order and without augmentation.

        Samples of several shapes come shape by shape; `Batch.indices` says which they are. Random crops are replaced by
        centre crops. A `Source` that augments its samples itself does so as in epoch 0.
        """
        yield from self._make(None, self._split(indices, batch_size), 0, 1)

    def shared(self, indices: Tensor) -> Iterator[Batch]:
        """Yield this rank's share of the samples `indices`, in batches as in `batches`, without augmentation."""
        yield from self._make(None, self._split(indices, self.batch_size), self.rank, self.num_ranks)

    def arranged(self, indices: Tensor) -> Tensor:
        """Return the samples `indices` (n, int64) in the order in which `unaugmented` yields them."""
        return torch.cat([indices[:0], *self._split(indices, max(1, len(indices)))])

    def _split(self, indices: Tensor, size: int) -> Sequence[Tensor]:
        return self.by_shape.split(indices, size) if self.by_shape else torch.split(indices, size)

    def _make(self, epoch: int | None, parts: Sequence[Tensor], rank: int, num_ranks: int) -> Iterator[Batch]:
        # A rank without a share of the last batch gets a filler, so that all ranks make equally many passes.
        parts = [part for part in parts if len(part)]  # torch.split returns an empty part for no samples
        shares = [part[rank::num_ranks] if rank < len(part) else part[:1] for part in parts]
        stacks = self.reader.stacks(shares, epoch)
        for part, (inputs, labels, indices, conditions) in zip(parts, stacks, strict=True):
            total = part.shape[0]  # len() of a tensor is ten times slower
            is_filler, most = rank >= total, -(-total // num_ranks)
            rows = range(1) if is_filler else range(rank, total, num_ranks)
            yield Batch(
                inputs, labels, indices, total=total, conditions=conditions, rows=rows, most=most, is_filler=is_filler
            )

    def close(self) -> None:
        """End the workers that wait for the next epoch, which will start new workers."""
        self.reader.close()


def _reader_of(data: InMemory | Reader | Tensor | Facts) -> Reader:
    if isinstance(data, InMemory | Tensor):
        return MemoryReader(InMemory(data) if isinstance(data, Tensor) else data)
    from hookdiff.data.feed_checks import checked_reader  # only for other readers

    return checked_reader(data)
