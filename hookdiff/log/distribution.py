"""The distribution of the values of a tensor, as a histogram."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import min_len

if TYPE_CHECKING:
    from torch import Tensor

BINS = 64


@define(frozen=True)
class Distribution:
    """A histogram of finite values, with bins of equal width."""

    low: float  # lower edge of the first bin
    high: float  # upper edge of the last bin
    counts: tuple[int, ...] = field(validator=min_len(1))
    nonfinite: int = 0  # values that are NaN or infinite, and are in no bin

    @classmethod
    def of(cls, values: Tensor, bins: int = BINS) -> Distribution:
        """Return the distribution of `values`, a tensor of any shape on any device; wait for the device."""
        import torch  # here, so that a file of distributions can be read without torch

        # In float64, because a range may exceed the largest float32; on the CPU, because histc varies on a GPU.
        flat = values.detach().flatten().cpu().double()
        finite = flat[flat.isfinite()]
        if not len(finite):
            return cls(0.0, 0.0, (0,) * bins, len(flat))
        low, high = torch.stack(torch.aminmax(finite)).tolist()
        # histc widens an empty range by 1 on both sides. We do so before, to know the edges.
        low, high = (low - 1, high + 1) if low == high else (low, high)
        counts: list[float] = torch.histc(finite, bins, low, high).tolist()
        return cls(low, high, tuple(int(count) for count in counts), len(flat) - len(finite))

    @property
    def edges(self) -> list[float]:
        """The edges of the bins, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + width * number for number in range(len(self.counts))] + [self.high]
