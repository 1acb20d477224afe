"""The plugin `clip`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from attrs import Attribute, define, field
from attrs.validators import ge, gt, le, lt
from torch import Tensor

from hookdiff import Loop, hookimpl
from hookdiff_clip.units import Units


def read_by(option: str, *values: str) -> Callable[[Any, Attribute[Any], Any], None]:
    """Validate that a field is left alone unless `option` has one of `values`: nothing else reads it."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        chosen = getattr(instance, option)
        if value != attribute.default and chosen not in values:
            read = " or ".join(map(repr, values))
            raise ValueError(f"'{attribute.name}' is an option of {option} {read}, not {chosen!r}")

    return check


ADAPTIVE = read_by("mode", "adaptive")
AGC = read_by("mode", "agc")


@define(eq=False)
class Clip:
    """Makes gradients that are too large smaller, once a step, at true scale.

    "norm": all by one factor, so that their global L2 norm is at most max_norm (Pascanu et al. 2013, arXiv 1211.5063,
    algorithm 1); exactly, where torch's clip_grad_norm_ divides by the norm + 1e-6. "adaptive": the same with a
    threshold that follows the norms of the run. Each norm enters as clipped, so that a spike cannot raise it much.
    "value": each entry to [-max_value, max_value]. "agc": each output unit's gradient to agc_factor times the norm of
    the unit's weights (Brock et al. 2021, arXiv 2102.06171, eq. 3).
    """

    mode: Literal["norm", "adaptive", "value", "agc"] = "norm"
    # norm, adaptive: of all gradients together
    max_norm: float = field(default=1.0, validator=[gt(0), read_by("mode", "norm", "adaptive")])
    min_norm: float = field(default=0.0, validator=[ge(0), ADAPTIVE])  # the threshold never falls below
    statistic: Literal["mean", "percentile", "zscore"] = field(default="mean", validator=ADAPTIVE)  # of past norms
    # mean, percentile: threshold over statistic; the threshold cannot rise again with 1 or less
    factor: float = field(default=2.0, validator=[gt(0), ADAPTIVE, read_by("statistic", "mean", "percentile")])
    decay: float = field(default=0.99, validator=[ge(0), lt(1), ADAPTIVE, read_by("statistic", "mean")])  # per update
    window: int = field(default=100, validator=[ge(2), ADAPTIVE, read_by("statistic", "percentile", "zscore")])  # steps
    percentile: float = field(default=90.0, validator=[ge(0), le(100), ADAPTIVE, read_by("statistic", "percentile")])
    # zscore: standard deviations above the mean
    deviations: float = field(default=3.0, validator=[ge(0), ADAPTIVE, read_by("statistic", "zscore")])
    warmup: int = field(default=100, validator=[ge(1), ADAPTIVE])  # updates with max_norm, until the norms are known
    max_value: float = field(default=1.0, validator=[gt(0), read_by("mode", "value")])  # of an entry
    agc_factor: float = field(default=0.01, validator=[gt(0), AGC])  # gradient over weights, of a unit
    min_weight: float = field(default=1e-3, validator=[gt(0), AGC])  # norm that a unit's weights count for at least
    exclude: tuple[str, ...] = field(default=(), validator=AGC)  # patterns of parameters that are left alone
    _count: int = field(default=0, init=False)  # adaptive: updates seen
    _mean: float = field(default=0.0, init=False)  # mean: biased towards its start, 0
    _norms: deque[float] = field(init=False)  # percentile, zscore: the last, as clipped
    _units: Units = field(init=False)  # agc

    def __attrs_post_init__(self) -> None:
        if self.mode == "adaptive" and self.min_norm > self.max_norm:
            raise ValueError(f"min_norm ({self.min_norm}) must not be above max_norm ({self.max_norm})")
        self._norms = deque(maxlen=self.window)

    @property
    def threshold(self) -> float:
        """The global norm above which the next step is clipped; of modes "norm" and "adaptive"."""
        if self.mode == "norm" or self._count < self.warmup:
            return self.max_norm
        return min(max(self._usual(), self.min_norm), self.max_norm)

    def _usual(self) -> float:
        if self.statistic == "mean":
            return self.factor * self._mean / (1 - math.pow(self.decay, self._count))
        if self.statistic == "percentile":
            return self.factor * percentile(self._norms, self.percentile)
        mean = math.fsum(self._norms) / len(self._norms)
        variance = math.fsum((norm - mean) ** 2 for norm in self._norms) / len(self._norms)
        return mean + self.deviations * math.sqrt(variance)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        if self.mode == "agc":
            self._units = Units(loop.model, loop.gradients.names, self.exclude, loop.gradients.dtype)

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        if self.mode == "agc":
            loop.log.average({"clip/share": self._units.clip_(self.agc_factor, self.min_weight)})
            loop.gradients.clear()
        elif self.mode == "value":
            clamp_(loop.gradients.tensors(), self.max_value)
            loop.gradients.clear()
            if loop.log.next_due:
                loop.log.average({"clip/share": share_at(loop.gradients.tensors(), self.max_value)})
        else:
            self._clip_norm(loop)

    def _clip_norm(self, loop: Loop) -> None:
        threshold, norm = self.threshold, loop.gradients.total_norm
        if norm > threshold:
            loop.gradients.scale_(threshold / norm)
        loop.log.average({"clip/share": float(norm > threshold)})
        if math.isfinite(threshold):  # max_norm = inf: there is none while the norms are not known
            loop.log.average({"clip/threshold": threshold})
        if self.mode == "adaptive":
            norm = min(norm, threshold)
            self._count += 1
            if self.statistic == "mean":
                self._mean = self.decay * self._mean + (1 - self.decay) * norm
            else:
                self._norms.append(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return what the threshold follows from."""
        return {"statistic": self.statistic, "count": self._count, "mean": self._mean, "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved norms; with those of another statistic, the warm-up begins again."""
        if state["statistic"] == self.statistic:
            self._count, self._mean = state["count"], state["mean"]
            self._norms = deque(state["norms"], self.window)


def percentile(values: deque[float], percent: float) -> float:
    """Return the value that `percent` of `values` are at or below, in a straight line between two of them."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def clamp_(tensors: list[Tensor], limit: float) -> None:
    """Clamp every entry to [-limit, limit] in place."""
    if tensors:
        torch._foreach_clamp_min_(tensors, -limit)
        torch._foreach_clamp_max_(tensors, limit)


def share_at(tensors: list[Tensor], limit: float) -> Tensor:
    """Return the share of entries, over all tensors, that lie at the limit: scalar, on the device."""
    counts = [torch.count_nonzero(tensor.abs() >= limit) for tensor in tensors]
    return torch.stack(counts).sum() / sum(tensor.numel() for tensor in tensors)
