"""The order of samples of several shapes, such as pictures in aspect-ratio buckets: each batch has one shape.

The samples of a shape are an endless stream: each of them once in epoch 0, in random order, then each of them once in
epoch 1, and so on. The stream is cut into full batches, also across epochs, so no sample is lost and none weighs more.
An epoch has the batches that fill up in it; the samples left over wait, and come first in the next epoch. After e
epochs, a shape of n samples has made floor(e n / batch_size) batches.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, define, evolve, field
from torch import Generator, Tensor

from hookdiff.data.feed_state import Plan
from hookdiff.errors import UserError
from hookdiff.machine.randomness import derive_seed
from hookdiff.options.structure import structured

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed

logger = logging.getLogger("hookdiff")

_MOST = 1 << 34  # samples of an epoch; a plan with more was not made by a run


@define(eq=False)
class _Batches:
    """The batches of a plan in their order."""

    numbers: list[int]  # of their shapes
    parts: list[Tensor]  # of their samples: n, int64, positions in the whole set
    ends: list[int]  # the samples in each batch and all before it


@define(eq=False, slots=False)
class ShapeOrder:
    """The order of a `feed` with samples of several shapes; a pure function of (seed, plan)."""

    feed: Feed
    plan: Plan | None = field(init=False, default=None)
    _begins_anew: bool = field(init=False, default=False)  # the loaded plan was for other data
    _cut: tuple[Plan, Tensor | None, _Batches] | None = field(init=False, default=None)
    _is_reported: bool = field(init=False, default=False)

    @cached_property
    def members(self) -> list[Tensor]:
        """The training samples of each shape: n, int64, sorted."""
        training = self.feed.training
        numbers = self.numbers[training].short()  # sorted several times as fast
        sizes = torch.bincount(numbers, minlength=len(self.feed.reader.shapes))
        return [*torch.split(training[numbers.argsort(stable=True)], sizes.tolist())]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of samples that an epoch adds to the stream of each shape."""
        sizes = [*map(len, self.members)]
        # With a limit, the samples are repeated until those of one shape fill a batch.
        times = -(-self.feed.batch_size // max(1, *sizes)) if self.feed.limit and self.feed.batch_size else 1
        return [size * times for size in sizes]

    @cached_property
    def digest(self) -> str:
        """A hash of the shapes and their samples."""
        digest = hashlib.sha256(repr([*map(tuple, self.feed.reader.shapes)]).encode())
        for rows, length in zip(self.members, self.lengths, strict=True):
            digest.update(f";{length};".encode())
            digest.update(rows.numpy().data)
        return digest.hexdigest()[:32]

    @property
    def numbers(self) -> Tensor:
        """The number of the shape of each sample of the whole set: n, int64."""
        numbers = self.feed.reader.shape_numbers
        assert numbers is not None
        return numbers

    def batches(self, epoch: int, start: int) -> list[Tensor]:
        """Return the samples of each batch of `epoch` after its first `start` samples."""
        plan = self._plan_at(epoch, start)
        if not self._is_reported:
            self._is_reported = True
            self._report(plan)
        return self._batches_of(plan).parts[self._place(plan, start) :]

    def next_size(self, epoch: int, start: int) -> int:
        """Return the size of the batch after the first `start` samples of `epoch`; 0 at its end."""
        plan = self._plan_at(epoch, start)
        return next(map(len, self._batches_of(plan).parts[self._place(plan, start) :]), 0)

    def num_until(self, end: int, epoch: int, start: int) -> int:
        """Return the number of batches from the sample `start` of `epoch` to the beginning of the epoch `end`."""
        # The length of a run does not depend on where it is.
        plan = self._plan_at(epoch, start) if epoch or start else self._fresh(0, 0)
        if end <= epoch:
            return 0
        later = self._after(plan)
        if plan.drop_last:
            pairs = zip(self.lengths, later.taken, strict=True)
            rest = sum((end * length - first) // plan.batch_size for length, first in pairs)
        else:
            rest = (end - later.epoch) * sum(-(-length // plan.batch_size) for length in self.lengths)
        return sum(self._counts(plan)) - self._place(plan, start) + rest

    def split(self, indices: Tensor, size: int) -> list[Tensor]:
        """Split `indices` (n, int64) into parts of one shape and at most `size` samples, in the order of the shapes."""
        numbers = self.numbers[indices]
        groups = (indices[numbers == number] for number in range(len(self.members)))
        return [part for group in groups if len(group) for part in torch.split(group, size)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes that have training samples, the most frequent shape first."""
        sizes, shapes = [*map(len, self.members)], self.feed.reader.shapes
        return [tuple(shapes[number]) for number in sorted(range(len(sizes)), key=lambda k: -sizes[k]) if sizes[number]]

    @property
    def counts(self) -> dict[tuple[int, ...], int]:
        """The number of training samples of each shape, the most frequent shape first."""
        sizes = dict(zip(map(tuple, self.feed.reader.shapes), map(len, self.members), strict=True))
        return {shape: sizes[shape] for shape in self.shapes}

    @property
    def small(self) -> list[tuple[int, ...]]:
        """The shapes with fewer training samples than a batch, which fill a batch only in some epochs."""
        return [shape for shape, count in self.counts.items() if count < self.feed.batch_size]

    @property
    def mean_batches(self) -> dict[tuple[int, ...], float]:
        """The mean number of batches of each shape in an epoch, the most frequent shape first."""
        size = self.feed.batch_size
        means = [length / size if self.feed.drop_last else float(-(-length // size)) for length in self.lengths]
        if self.is_weighted:
            weights = torch.stack([self._chances[rows].sum() for rows in self.members])
            means = (sum(means) * weights / weights.sum()).tolist()
        by_shape = dict(zip(map(tuple, self.feed.reader.shapes), means, strict=True))
        return {shape: by_shape[shape] for shape in self.shapes}

    def of_shape(self, shape: Sequence[int] | None) -> Tensor:
        """Return the training samples of `shape`; None: of the most frequent one.

        Raises:
            UserError: if no sample has this shape.
        """
        wanted = self.shapes[0] if shape is None else tuple(shape)
        if wanted not in self.shapes:
            known = ", ".join(map(_text, self.shapes))
            raise UserError(f"no training sample has the shape {_text(wanted)}; known: {known}")
        return self.members[[*map(tuple, self.feed.reader.shapes)].index(wanted)]

    @property
    def is_weighted(self) -> bool:
        """Whether samples are drawn by weight."""
        return self.feed.balanced or self.feed.weights is not None

    @property
    def _chances(self) -> Tensor:
        """The weights of the samples of the whole set: n, float64."""
        if self.feed.weights is not None:
            return self.feed.weights
        labels = self.feed.labels
        assert labels is not None
        _, classes, sizes = torch.unique(labels[self.feed.training], return_inverse=True, return_counts=True)
        chances = torch.zeros(len(labels), dtype=torch.float64)
        chances[self.feed.training] = 1 / sizes[classes].double()
        return chances

    def begin(self, epoch: int) -> None:
        """Begin an epoch, before the weights of the one before it are forgotten."""
        if self.plan is not None:
            self._plan_at(epoch, 0)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the plan of the current epoch; None before the first epoch."""
        return None if self.plan is None else asdict(self.plan)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a plan; the epoch begins anew if its shapes or their samples were others."""
        known = None if state is None else structured(Plan, state)
        fits = known is not None and known.digest == self.digest and max(self._rests(known)) <= _MOST
        self.plan, self._begins_anew = known if fits else None, not fits
        if known and self._begins_anew:
            size = ", or batch_size beside limit," if self.feed.limit else ""
            logger.warning(
                "the shapes of the data, or their samples,%s have changed since the checkpoint: epoch %s begins anew",
                size,
                f"{known.epoch:,}",
            )

    def _plan_at(self, epoch: int, start: int) -> Plan:
        """Return the plan for the batch after the first `start` samples of `epoch`, and keep it."""
        plan = self.plan
        if plan is None or plan.epoch > epoch:
            plan = self._fresh(epoch, start if self._begins_anew else 0)
            self._begins_anew = False
        while plan.epoch < epoch:
            plan = self._after(plan)
        same = evolve(plan, batch_size=self.feed.batch_size, drop_last=self.feed.drop_last)
        if same != plan:
            plan = evolve(same, start=start, taken=self._taken(plan, start))
        self.plan = plan
        return plan

    def _fresh(self, epoch: int, start: int) -> Plan:
        """Return the plan of `epoch` in a run that has had this batch size from its beginning."""
        unit = self.feed.batch_size if self.feed.drop_last else 1
        taken = (epoch * length // unit * unit for length in self.lengths)
        return Plan(epoch, start, self.feed.batch_size, self.feed.drop_last, tuple(taken), self.digest)

    def _after(self, plan: Plan) -> Plan:
        """Return the plan of the next epoch. Samples that are drawn by weight count as taken from the streams."""
        taken = (first + size for first, size in zip(plan.taken, self._sizes(plan), strict=True))
        return evolve(plan, epoch=plan.epoch + 1, start=0, taken=tuple(taken))

    def _rests(self, plan: Plan) -> list[int]:
        """Return how many samples of each shape the epoch of a plan still has, with those that have waited."""
        ends = ((plan.epoch + 1) * length for length in self.lengths)
        return [max(0, end - first) for end, first in zip(ends, plan.taken, strict=True)]

    def _counts(self, plan: Plan) -> list[int]:
        """Return the number of batches of each shape, without weights."""
        up = 0 if plan.drop_last else plan.batch_size - 1
        return [(rest + up) // plan.batch_size for rest in self._rests(plan)]

    def _sizes(self, plan: Plan) -> list[int]:
        """Return the number of samples of each shape, without weights."""
        return [count * plan.batch_size for count in self._counts(plan)] if plan.drop_last else self._rests(plan)

    def _place(self, plan: Plan, start: int) -> int:
        """Return the number of batches of a plan before the sample `start` of its epoch."""
        return bisect_right(self._batches_of(plan).ends, start - plan.start) if start > plan.start else 0

    def _taken(self, plan: Plan, start: int) -> tuple[int, ...]:
        """Return the samples taken from each stream at the sample `start` of the epoch of a plan."""
        taken, unweighted = [*plan.taken], self._in_random_order(plan, self._from_streams(plan))
        for place in range(self._place(plan, start)):
            taken[unweighted.numbers[place]] += len(unweighted.parts[place])
        return tuple(taken)

    def _batches_of(self, plan: Plan) -> _Batches:
        weights = self.feed.weights
        if self._cut is None or self._cut[0] != plan or self._cut[1] is not weights:
            by_shape = self._weighted(plan) if self.is_weighted else self._from_streams(plan)
            self._cut = plan, weights, self._in_random_order(plan, by_shape)
        return self._cut[2]

    def _in_random_order(self, plan: Plan, by_shape: Sequence[Sequence[Tensor]]) -> _Batches:
        numbers = torch.repeat_interleave(torch.tensor([*map(len, by_shape)]))
        numbers = numbers[torch.randperm(len(numbers), generator=self._generator(plan.epoch))]
        streams = [iter(parts) for parts in by_shape]
        parts = [next(streams[number]) for number in numbers.tolist()]
        return _Batches(numbers.tolist(), parts, [*accumulate(map(len, parts))])

    def _from_streams(self, plan: Plan) -> list[list[Tensor]]:
        """Return the batches of each shape."""
        batches = []
        for number, (count, size) in enumerate(zip(self._counts(plan), self._sizes(plan), strict=True)):
            rows = self._stream(number, plan.taken[number], size)
            batches.append([*torch.tensor_split(rows, count)] if count else [])
        return batches

    def _stream(self, number: int, first: int, size: int) -> Tensor:
        """Return the samples `first` to `first + size` of the stream of a shape."""
        members, length = self.members[number], self.lengths[number]
        if not size:
            return members[:0]
        passes = []
        for epoch in range(first // length, (first + size - 1) // length + 1):
            order = members[torch.randperm(len(members), generator=self._generator(epoch, 1 + number))]
            passes.append(order.repeat(length // len(members)))
        begin = first % length
        return torch.cat(passes)[begin : begin + size]

    def _weighted(self, plan: Plan) -> list[list[Tensor]]:
        """Return the batches of each shape if samples are drawn by weight: as many batches as without weights."""
        weights, num, total = self._chances, sum(self._counts(plan)), sum(self._sizes(plan))
        generator = self._generator(plan.epoch, 1 + len(self.members) + plan.start)
        sizes = torch.tensor([len(part) for part in torch.arange(total).tensor_split(max(1, num))])
        sizes = sizes[torch.randperm(len(sizes), generator=generator)]
        allotted = _systematic(torch.stack([weights[rows].sum() for rows in self.members]), num, generator)
        batches = []
        for rows, own in zip(self.members, torch.split(sizes[:num], allotted.tolist()), strict=True):
            drawn = self._drawn(rows, weights[rows], int(own.sum()), generator)
            batches.append([*torch.split(drawn, own.tolist())] if len(own) else [])
        return batches

    def _drawn(self, rows: Tensor, weights: Tensor, num: int, generator: Generator) -> Tensor:
        """Return `num` of `rows`, drawn by `weights`; if the data is balanced, each as often as its weight says."""
        if not num:
            return rows[:0]
        if self.feed.balanced:
            times = _systematic(weights, num, generator)
            return torch.repeat_interleave(rows, times)[torch.randperm(num, generator=generator)]
        chances = weights.cumsum(0)
        places = torch.rand(num, generator=generator, dtype=torch.float64) * chances[-1]
        return rows[torch.searchsorted(chances, places, right=True).clamp(max=len(rows) - 1)]

    def _generator(self, position: int, part: int = 0) -> Generator:
        return Generator().manual_seed(derive_seed(self.feed.seed, "data", position, part=part))

    def _report(self, plan: Plan) -> None:
        """Log the shapes, how many samples wait at the end of an epoch, and which shapes do not fill a batch."""
        counts = self.counts
        named = [f"{_text(shape)}: {count:,}" for shape, count in counts.items()]
        logger.info("data: samples of %d shapes (%s)", len(counts), ", ".join(named))
        if not plan.drop_last or self.is_weighted:
            return
        waiting = sum(self._rests(self._after(plan))) - sum(self.lengths)
        logger.info("data: %s samples wait for the next epoch, until they fill a batch of their shape", f"{waiting:,}")
        if self.small and not self.feed.limit:
            text = "data: shapes with fewer samples than batch_size = %s fill a batch only in some epochs: %s"
            logger.warning(text, f"{self.feed.batch_size:,}", ", ".join(map(_text, self.small)))


def _systematic(weights: Tensor, num: int, generator: Generator) -> Tensor:
    """Return how often each row is drawn in `num` draws by `weights`: its expected number, rounded down or up.

    The numbers are right on average: systematic resampling, Carpenter et al. 1999 (IEE Proc. Radar 146).
    """
    ends = weights.double().cumsum(0)
    places = (torch.rand(1, generator=generator, dtype=torch.float64) + torch.arange(num)) / max(1, num) * ends[-1]
    drawn = torch.searchsorted(ends, places, right=True).clamp(max=len(weights) - 1)
    return torch.bincount(drawn, minlength=len(weights))


def _text(shape: Sequence[int]) -> str:
    """Return width and height of a shape c h w, such as "80x48"; of other shapes all sides."""
    return f"{shape[2]}x{shape[1]}" if len(shape) == 3 else "x".join(map(str, shape))
