"""Rules of gradient clipping."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from attrs import Attribute, define, field
from attrs.validators import and_, ge, gt, lt, optional
from torch import Tensor, nn

from hookdiff.loop import DevicePart, Gradients
from hookdiff.machine import local_parts, total
from hookdiff.options import COUNT, Choice, about, between, numbers
from hookdiff_clip.units import Units


@define(frozen=True)
class RuleState:
    """The saved state of a rule; a rule without state saves nothing."""

    count: int = field(default=0, validator=COUNT)
    past: list[float] = field(factory=list, validator=numbers(least=0))


@define
class Rule(Choice, ABC):
    """A way to clip gradients.

    A rule is an attrs class: its init fields are the options, all other fields are the state. Each run copies the rule.
    """

    kind = "clip_rule"
    default = "norm"

    def prepare(self, model: nn.Module, gradients: Gradients) -> None:
        """Prepare for the `gradients` of `model`; called when the loop starts."""

    @abstractmethod
    def clip_(self, gradients: Gradients, is_logged: bool) -> Mapping[str, float | Tensor]:
        """Change the gradients in place; return the share that was clipped as "share", and other values to log.

        Unless `is_logged`, the share may be left out.
        """

    def on_device(self, gradients: Gradients) -> DevicePart | None:
        """Return the clipping as work for a CUDA graph, after which `clip_` must change nothing; None: impossible."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, a `RuleState`."""
        return {}

    def load_state_dict(self, state: RuleState) -> None:
        """Restore a saved state."""


@define
class Norm(Rule):
    """Scale all gradients by one factor, so that their L2 norm is at most `max_norm` (Pascanu et al. 2013).

    See arXiv 1211.5063. The bound is exact, while torch's clip_grad_norm_ divides by the norm + 1e-6.
    """

    max_norm: float = field(default=1.0, validator=gt(0), metadata=about("largest L2 norm of gradients; may be inf"))

    @property
    def threshold(self) -> float:
        """The norm above which the next step is clipped."""
        return self.max_norm

    def clip_(self, gradients: Gradients, is_logged: bool) -> Mapping[str, float | Tensor]:
        threshold, norm = self.threshold, gradients.total_norm
        if norm > threshold:
            gradients.scale_(threshold / norm)
        self.follow(min(norm, threshold))
        return {"share": float(norm > threshold), **({"threshold": threshold} if math.isfinite(threshold) else {})}

    def on_device(self, gradients: Gradients) -> DevicePart:
        limit = torch.zeros((), dtype=torch.float64, device=gradients.parameters[0].device)

        def clip(finite: Tensor) -> None:
            # In float64 as in `clip_`, so that a recorded step gives the same weights.
            factor = (limit / torch.linalg.vector_norm(gradients.norms).double()).clamp(max=1.0)
            torch._foreach_mul_(gradients.tensors(), torch.where(finite > 0, factor, 1.0).to(gradients.dtype))

        return DevicePart("update", clip, lambda: limit.fill_(self.threshold))

    def follow(self, norm: float) -> None:
        """Adapt the threshold to the norm of one step after clipping."""


def _below_max(rule: Any, option: Attribute[Any], value: float) -> None:
    if value > rule.max_norm:
        raise ValueError(f"{option.name} ({value:g}) must not be above max_norm ({rule.max_norm:g})")


def _above_min(rule: Any, option: Attribute[Any], value: float) -> None:
    if value < rule.min_norm:
        raise ValueError(f"{option.name} ({value:g}) must not be below min_norm ({rule.min_norm:g})")


@define
class Following(Norm):
    """A rule with a threshold that follows the norms after clipping, so that a spike cannot raise it much.

    The threshold is `start` for `warmup` updates, and always between `min_norm` and `max_norm`.
    """

    min_norm: float = field(default=0.0, validator=[ge(0), _below_max], metadata=about("lowest threshold"))
    start: float | None = field(
        default=None,
        validator=optional(and_(gt(0), _below_max, _above_min)),
        metadata=about("threshold until enough norms are known; default: `max_norm`"),
    )
    warmup: int = field(default=100, validator=ge(1), metadata=about("updates with `start` as the threshold"))
    _count: int = field(default=0, init=False, eq=False)  # updates so far
    _past: list[float] = field(factory=list, init=False, eq=False)  # summary of their norms

    @property
    def threshold(self) -> float:
        if self._count < self.warmup:
            return self.max_norm if self.start is None else self.start
        return min(max(self.usual(self._past), self.min_norm), self.max_norm)

    def follow(self, norm: float) -> None:
        self._count += 1
        self._past = self.keep(self._past, norm)

    @abstractmethod
    def keep(self, past: list[float], norm: float) -> list[float]:
        """Return the summary `past`, which is empty at first, with the norm of one more update."""

    @abstractmethod
    def usual(self, past: list[float]) -> float:
        """Return the threshold that follows from the summary `past`."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "past": self._past}

    def load_state_dict(self, state: RuleState) -> None:
        self._count, self._past = state.count, list(state.past)


@define
class Adaptive(Following):
    """Like "norm", with a threshold that follows the running mean of the norms."""

    factor: float = field(default=2.0, validator=gt(0), metadata=about("threshold over mean; up to 1 it only falls"))
    decay: float = field(default=0.99, validator=[ge(0), lt(1)], metadata=about("decay of the mean per update"))

    def keep(self, past: list[float], norm: float) -> list[float]:
        return [self.decay * (past[0] if past else 0.0) + (1 - self.decay) * norm]

    def usual(self, past: list[float]) -> float:
        return self.factor * past[0] / (1 - math.pow(self.decay, self._count))  # past[0] is biased towards its start, 0


@define
class Windowed(Following):
    """A rule with a threshold that follows the newest norms."""

    window: int = field(default=100, validator=ge(2), metadata=about("number of newest norms", "updates"))

    def keep(self, past: list[float], norm: float) -> list[float]:
        return [*past, norm][-self.window :]


@define
class Percentile(Windowed):
    """Like "norm", with a threshold that follows a percentile of the newest norms."""

    percentile: float = field(default=90.0, validator=between(0, 100), metadata=about("the percentile"))
    factor: float = field(default=2.0, validator=gt(0), metadata=about("threshold over percentile"))

    def usual(self, past: list[float]) -> float:
        ordered = sorted(past)
        place = self.percentile / 100 * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return self.factor * (ordered[below] + (place - below) * (ordered[above] - ordered[below]))


@define
class ZScore(Windowed):
    """Like "norm", with a threshold that follows the mean and the standard deviation of the newest norms."""

    deviations: float = field(default=3.0, validator=ge(0), metadata=about("standard deviations above the mean"))

    def usual(self, past: list[float]) -> float:
        mean = math.fsum(past) / len(past)
        variance = math.fsum((norm - mean) ** 2 for norm in past) / len(past)
        return mean + self.deviations * math.sqrt(variance)


@define
class Value(Rule):
    """Clamp each entry to [-max_value, max_value]."""

    max_value: float = field(default=1.0, validator=gt(0), metadata=about("largest absolute value of an entry"))

    def clip_(self, gradients: Gradients, is_logged: bool) -> Mapping[str, float | Tensor]:
        whole = gradients.tensors()
        tensors = local_parts(whole)
        torch._foreach_clamp_min_(tensors, -self.max_value)
        torch._foreach_clamp_max_(tensors, self.max_value)
        gradients.clear()
        if not is_logged:
            return {}
        clipped = torch.stack([torch.count_nonzero(tensor.abs() >= self.max_value) for tensor in tensors])
        return {"share": total(whole, clipped) / sum(tensor.numel() for tensor in whole)}


@define
class AGC(Rule):
    """Clip the gradient of each output unit by the norm of its weights (Brock et al. 2021, arXiv 2102.06171, eq. 3)."""

    factor: float = field(default=0.01, validator=gt(0), metadata=about("largest ratio of gradient to weight norm"))
    min_weight: float = field(default=1e-3, validator=gt(0), metadata=about("lower bound of the norm of weights"))
    exclude: tuple[str, ...] = field(default=(), metadata=about("patterns of parameters that are not clipped"))
    _units: Units = field(init=False, eq=False, repr=False)

    def prepare(self, model: nn.Module, gradients: Gradients) -> None:
        self._units = Units(model, gradients.names, self.exclude, gradients.dtype)

    def clip_(self, gradients: Gradients, is_logged: bool) -> Mapping[str, float | Tensor]:
        share = self._units.clip_(self.factor, self.min_weight)
        gradients.clear()
        return {"share": share}


Rule.known = {
    "norm": Norm,
    "adaptive": Adaptive,
    "percentile": Percentile,
    "zscore": ZScore,
    "value": Value,
    "agc": AGC,
}
