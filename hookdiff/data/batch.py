"""The samples of one step, as they travel from the data to the objective."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, define, evolve
from torch import Tensor

from hookdiff.machine.ranks import gathered, rank


@define(eq=False, frozen=True)
class Batch:
    """The samples of one step; a slice of a batch is a micro-batch, with the labels and conditions of its samples.

    With several ranks, a batch is this rank's share of the step: `rows` of `total` samples.
    """

    inputs: Tensor  # n c h w, float32 in [-1, 1]; or samples of another shape
    labels: Tensor | None = None  # n, int64
    indices: Tensor | None = None  # n, int64, on the CPU: positions in the data set
    draws: Mapping[str, Tensor] = Factory(dict)  # random numbers that the objective drew, one row per sample
    # The samples of the step, over all micro-batches and ranks.
    total: int = Factory(lambda batch: len(batch.inputs), takes_self=True)
    # Values beside the inputs, such as masks, by name: one row per sample.
    conditions: Mapping[str, Tensor] = Factory(dict)
    # The places of these samples in the step.
    rows: range = Factory(lambda batch: range(len(batch.inputs)), takes_self=True)
    # The largest number of samples on a rank.
    most: int = Factory(lambda batch: len(batch.inputs), takes_self=True)
    # A filler repeats a sample, so that all ranks make equally many passes. Neither the loss nor `loop.output` has it.
    is_filler: bool = False
    # The batch as the data gave it, if the hook `make_batch` may have replaced it.
    replaced: Batch | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]  # len() of a tensor is ten times slower

    @property
    def weight(self) -> float:
        """The share of these samples in the step."""
        return 0.0 if self.is_filler else self.inputs.shape[0] / self.total

    def __getitem__(self, rows: slice) -> Batch:
        """Return the micro-batch of `rows`. Its `total` stays the number of samples of the step."""
        return Batch(
            self.inputs[rows],
            None if self.labels is None else self.labels[rows],
            None if self.indices is None else self.indices[rows],
            {name: draw[rows] for name, draw in self.draws.items()},
            self.total,
            {name: column[rows] for name, column in self.conditions.items()},
            self.rows[rows],
            len(range(self.most)[rows]),
            self.is_filler,
        )

    def with_draws(self, draws: Mapping[str, Tensor]) -> Batch:
        """Return this batch with further `draws`: random numbers by name, one row per sample."""
        # Not by evolve, which takes twice as long and is felt in a step of a small network.
        return Batch(
            self.inputs,
            self.labels,
            self.indices,
            {**self.draws, **draws},
            self.total,
            self.conditions,
            self.rows,
            self.most,
            self.is_filler,
            self.replaced,
        )

    def own(self, drawn: Tensor) -> Tensor:
        """Return the rows of `drawn` for these samples. `drawn` has a row for each of the `total` samples of the step.

        Draw random numbers for the whole step, with the same generator on all ranks, and take these rows: each sample
        then has the same numbers on any number of ranks.
        """
        if len(self.rows) == self.total:
            return drawn
        return drawn[self.rows.start : self.rows.stop : self.rows.step]

    def in_place_of(self, other: Batch, can_differ: bool) -> Batch:
        """Return this batch, which replaces `other` in a step, with the `total` and the `rows` that fit.

        If its number of samples `can_differ`, all ranks must call this. If one rank has no samples, the step has none.
        """
        if not can_differ:
            return self
        new = evolve(self[:1] if other.is_filler else self, is_filler=other.is_filler, replaced=other)
        sizes = gathered((len(new), len(other), other.is_filler))
        if all(size == before for size, before, _ in sizes):
            return evolve(new, total=other.total, rows=other.rows, most=other.most)
        counts = [0 if is_filler else size for size, _, is_filler in sizes]
        start = 0 if other.is_filler else sum(counts[: rank()])
        total = sum(counts) if all(size for size, *_ in sizes) else 0
        return evolve(new, total=total, rows=range(start, start + len(new)), most=max(counts))

    def split(self, size: int | None) -> list[Batch]:
        """Return micro-batches of at most `size` samples, equally many on all ranks; None: one micro-batch."""
        if size is None or size >= self.most:
            return [self]
        parts = [self[start : start + size] for start in range(0, len(self), size)]
        return parts + [evolve(self[:1], is_filler=True)] * (-(-self.most // size) - len(parts))
