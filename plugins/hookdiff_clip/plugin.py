"""The plugin `clip`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from attrs import define, field
from attrs.validators import ge, gt, lt

from hookdiff import Loop, hookimpl


@define(eq=False)
class Clip:
    """Scales the gradients down to a threshold on their global L2 norm, once a step, at true scale.

    "norm": the threshold is max_norm (Pascanu et al. 2013, arXiv 1211.5063, algorithm 1). "adaptive": it is factor
    times the running mean of the norm, within min_norm and max_norm; the mean takes in each norm as clipped, so that
    a spike cannot raise it much.
    """

    mode: Literal["norm", "adaptive"] = "norm"
    max_norm: float = field(default=1.0, validator=gt(0))  # of all gradients together
    min_norm: float = field(default=0.0, validator=ge(0))  # adaptive: the threshold never falls below
    factor: float = field(default=2.0, validator=gt(0))  # adaptive: threshold over mean norm
    decay: float = field(default=0.99, validator=[ge(0), lt(1)])  # adaptive: of the mean, per update
    warmup: int = field(default=100, validator=ge(1))  # adaptive: updates with max_norm, until the mean is known
    _mean: float = field(default=0.0, init=False)  # biased towards its start, 0
    _count: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.min_norm > self.max_norm:
            raise ValueError(f"min_norm ({self.min_norm}) must not be above max_norm ({self.max_norm})")

    @property
    def threshold(self) -> float:
        """The norm above which the next step is clipped."""
        if self.mode == "norm" or self._count < self.warmup:
            return self.max_norm
        mean = self._mean / (1 - math.pow(self.decay, self._count))
        return min(max(self.factor * mean, self.min_norm), self.max_norm)

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        threshold = self.threshold
        norm = loop.gradients.total_norm
        if norm > threshold:
            loop.gradients.scale_(threshold / norm)
        loop.log.average({"clip/share": float(norm > threshold), "clip/threshold": threshold})
        if self.mode == "adaptive":
            self._mean = self.decay * self._mean + (1 - self.decay) * min(norm, threshold)
            self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the running mean and how many norms are in it."""
        return {"mean": self._mean, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved mean."""
        self._mean, self._count = state["mean"], state["count"]
