"""The samples of one step, as they travel from the data to the objective."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, define, evolve
from torch import Tensor


@define(eq=False, frozen=True)
class Batch:
    """The samples of one step; a slice of it is a micro-batch with everything that belongs to its samples."""

    inputs: Tensor  # n c h w, float32 in [-1, 1]; or samples of another shape
    labels: Tensor | None = None  # n, int64
    indices: Tensor | None = None  # n, int64, on the CPU: positions in the data set
    draws: Mapping[str, Tensor] = Factory(dict)  # random numbers that the objective drew, one row per sample
    # The samples of the step, over all micro-batches and ranks.
    total: int = Factory(lambda batch: len(batch.inputs), takes_self=True)
    # All else in the samples, such as masks, by name: one row per sample.
    conditions: Mapping[str, Tensor] = Factory(dict)

    def __len__(self) -> int:
        return self.inputs.shape[0]  # len() of a tensor is ten times slower

    def __getitem__(self, rows: slice) -> Batch:
        """Return the micro-batch of `rows`, with the same `total`, which gives its share of the step."""
        return Batch(
            self.inputs[rows],
            None if self.labels is None else self.labels[rows],
            None if self.indices is None else self.indices[rows],
            {name: draw[rows] for name, draw in self.draws.items()},
            self.total,
            {name: column[rows] for name, column in self.conditions.items()},
        )

    def in_place_of(self, other: Batch) -> Batch:
        """Return this batch, which replaces `other` in a step, with the `total` that fits its number of samples."""
        if len(self) == len(other):
            return self
        return evolve(self, total=other.total * len(self) // len(other))

    def split(self, size: int | None) -> list[Batch]:
        """Return micro-batches of at most `size` samples; None gives one micro-batch with all samples."""
        if size is None or size >= len(self):
            return [self]
        return [self[start : start + size] for start in range(0, len(self), size)]
