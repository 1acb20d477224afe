"""An exponential moving average of numbers and of their deviation."""

import math

from attrs import define


@define(eq=False)
class Smoothed:
    """Mean and standard deviation of numbers, each weighted by decay to the power of its age.

    Weights are normalised, so an average that starts at 0 has no bias (Kingma & Ba 2014, arXiv 1412.6980, section 3);
    the update of West 1979 (doi 10.1145/359146.359153) avoids cancellation.
    """

    decay: float  # per number, from 0 to below 1
    mean: float = 0.0
    _weight: float = 0.0
    _squares: float = 0.0  # weighted sum of squared deviations

    def add(self, value: float) -> None:
        """Add a number."""
        self._weight = self.decay * self._weight + 1
        off = value - self.mean
        self.mean += off / self._weight
        self._squares = self.decay * self._squares + off * (value - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 before the second number."""
        return math.sqrt(max(0.0, self._squares) / self._weight) if self._weight else 0.0

    def state_dict(self) -> list[float]:
        """Return the mean, the sum of the weights, and the weighted sum of squared deviations."""
        return [self.mean, self._weight, self._squares]

    def load_state_dict(self, state: tuple[float, float, float]) -> None:
        """Restore saved numbers."""
        self.mean, self._weight, self._squares = state
