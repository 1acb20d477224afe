"""The samples of one step, as they travel from the data to the objective."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, define
from torch import Tensor


def _length(batch: Batch) -> int:
    return len(batch.inputs)


@define(eq=False, frozen=True)
class Batch:
    """Samples of one step; slicing it gives a micro-batch with everything that belongs to it."""

    inputs: Tensor  # n c h w, float32 in [-1, 1]
    labels: Tensor | None = None  # n, int64
    indices: Tensor | None = None  # n, int64, on the CPU: positions in the data set
    draws: Mapping[str, Tensor] = Factory(dict)  # what the objective drew for this step, a row a sample
    total: int = Factory(_length, takes_self=True)  # samples of the step over all micro-batches and ranks

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice) -> Batch:
        """Return the micro-batch of `rows`; `total` stays, so that its share of the step is known."""
        return Batch(
            self.inputs[rows],
            None if self.labels is None else self.labels[rows],
            None if self.indices is None else self.indices[rows],
            {name: drawn[rows] for name, drawn in self.draws.items()},
            self.total,
        )

    def split(self, size: int | None) -> list[Batch]:
        """Return the micro-batches of at most `size` samples; None is one of all."""
        if size is None or size >= len(self):
            return [self]
        return [self[start : start + size] for start in range(0, len(self), size)]
