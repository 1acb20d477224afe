"""Processes that turn images into noise: x_t = alpha * x0 + sigma * noise, in timesteps or in continuous time."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from attrs import define, evolve, field
from attrs.validators import ge, gt, le
from torch import Tensor

from hookdiff.diffusion.schedules import Cosine, Linear, NoiseSchedule, Schedule, rescale_betas_zero_snr
from hookdiff.options.choices import Choice, chosen
from hookdiff.options.fields import about, between

_TINY = 2.0**-25  # half the distance between neighbouring float32 numbers that torch draws from [0, 1)
_MOST_LEFT = 0.05  # largest share of the image's variance at the last timestep, where sampling starts from pure noise


@define(frozen=True)
class Point:
    """A point of a process that a sampler visits: its time and its noise level."""

    alpha: float
    sigma: float
    time: float = 0.0  # as the network gets it; an int if the process has timesteps

    @property
    def ratio(self) -> float:
        """Noise-to-signal ratio sigma / alpha: the sigma of Karras et al. 2022; infinite for pure noise."""
        return self.sigma / self.alpha if self.alpha else math.inf

    @property
    def log_snr(self) -> float:
        """ln(alpha² / sigma²): infinite for the image, minus infinite for pure noise."""
        return -2 * math.log(self.ratio) if self.ratio else math.inf

    @property
    def label(self) -> str:
        """The name of the point in pictures: "image", "t 999" for a timestep, else "sigma 0.29"."""
        if not self.sigma:
            return "image"
        return f"t {self.time}" if isinstance(self.time, int) else f"sigma {self.sigma:.2g}"


IMAGE = Point(1.0, 0.0)


class Process(Choice, ABC):
    """A process that turns images into noise."""

    kind = "process"
    default = "flow"

    # The default parts with this process, as in a config. In benchmarks/quality.py, the parts of "flow" made the best
    # images, and the parts of "vp" the second best.
    default_prediction: ClassVar[str] = "v_prediction"
    default_times: ClassVar[str | Mapping[str, Any]] = MappingProxyType({"use": "uniform", "stratified": True})
    default_sampler: ClassVar[str] = "dpmpp_2m"
    default_clipping: ClassVar[str] = "none"

    has_timesteps: ClassVar[bool] = False  # times are int64, 0 to T - 1; else float32
    reaches_image: ClassVar[bool] = False  # the times of training go down to the clean image (sigma = 0)
    straight: ClassVar[bool] = True  # Heun's method integrates in alpha and sigma; else in sigma / alpha

    @property
    def default_weighting(self) -> str:
        """The name of the default weighting, which may depend on an option."""
        return "uniform"

    @property
    def default_spacing(self) -> str | Mapping[str, Any]:
        """The default spacing, which may depend on an option."""
        return "trailing"

    @property
    def initial_scale(self) -> float:
        """Standard deviation of the noise that a chain begins with."""
        return 1.0

    @property
    @abstractmethod
    def ratio_range(self) -> tuple[float, float]:
        """The lowest and the highest sigma / alpha; the highest is infinite if the process ends in pure noise."""

    @property
    def ends_in_noise(self) -> bool:
        """Whether the process ends in pure noise (alpha = 0)."""
        return math.isinf(self.ratio_range[1])

    @abstractmethod
    def from_fraction(self, fraction: Tensor) -> Tensor:
        """Return the times (n) at a `fraction` (n), in (0, 1), of the way from image to noise."""

    @abstractmethod
    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the times (n) at which ln(sigma / alpha) is nearest to `log_ratio` (n)."""

    @abstractmethod
    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return alpha, sigma and the log-SNR at `times` (n), each float32 of shape n 1 1 ... (`ndim` axes)."""

    @abstractmethod
    def network_time(self, times: Tensor) -> Tensor:
        """Return `times` (n) as the network gets them: n, int64 or float32."""

    @abstractmethod
    def at(self, ratio: float) -> Point:
        """Return the point at which sigma / alpha is `ratio`, above 0 and finite."""

    def for_shape(self, shape: Sequence[int]) -> "Process":
        """Return the process that draws the times, and chooses the points, for one input of `shape`, such as c h w.

        Rates and times of the network must be the same for every shape. Default: this process, for every shape.

        Raises:
            ValueError: naming an option, if it does not fit such inputs.
        """
        return self

    def trailing(self, steps: int) -> list[Point]:
        """Return `steps` points at equal distances in time, noisiest first, without the clean image.

        Raises:
            ValueError: naming `spacing`, if the process has no such points.
        """
        raise ValueError(f"'spacing' cannot be 'trailing' for process {self.use!r}: use 'karras'")


@define(frozen=True, slots=False)
class VP(Process):
    """Variance-preserving timesteps, alpha² + sigma² = 1: Ho et al. 2020 (arXiv 2006.11239), eq. 4.

    The tables of a noise schedule hold the rates at each timestep 0..T-1. The network gets timesteps as int64.
    """

    schedule: Schedule = field(
        default=Cosine(), converter=chosen[Schedule], metadata=about("noise added at each timestep")
    )
    timesteps: int = field(default=1000, validator=[ge(1), le(1_000_000)], metadata=about("number of timesteps, T"))
    rescale_betas_zero_snr: bool = field(
        default=False, metadata=about('rescale betas to zero terminal SNR (Lin et al. 2023); not with "epsilon"')
    )

    default_clipping = "clamp"
    has_timesteps = True
    straight = False

    @property
    def default_weighting(self) -> str:
        return "uniform" if self.ends_in_noise else "min_snr"  # min-SNR gives pure noise a weight of 0

    def __attrs_post_init__(self) -> None:
        left = float(self.tables.alphas_cumprod[-1])
        if left > _MOST_LEFT:
            raise ValueError(
                f"'timesteps' = {self.timesteps} is too short for the schedule {self.schedule.use!r}: {left:.0%} of "
                "the image's variance is left at the end, where sampling starts with none; use schedule = 'cosine', "
                "rescale_betas_zero_snr = true, or a larger beta_end"
            )

    @cached_property
    def tables(self) -> NoiseSchedule:
        betas = self.schedule.betas(self.timesteps)
        return NoiseSchedule(rescale_betas_zero_snr(betas) if self.rescale_betas_zero_snr else betas)

    @cached_property
    def _log_ratios(self) -> Tensor:
        return self.tables.log_snr / -2  # float64, rising

    @cached_property
    def ratio_range(self) -> tuple[float, float]:
        low, high = self._log_ratios[[0, -1]].exp().tolist()
        return low, high

    def from_fraction(self, fraction: Tensor) -> Tensor:
        return (fraction * self.timesteps).long()  # a float32 below 1 times T is never rounded up to T

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        levels = self._log_ratios
        halfway = ((levels[1:] + levels[:-1]) / 2).to(log_ratio)
        return torch.bucketize(log_ratio, halfway)

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.tables.rates(times, ndim)

    def network_time(self, times: Tensor) -> Tensor:
        return times  # integers, because bfloat16 would round 999 to 1000

    def at_timesteps(self, timesteps: list[int]) -> list[Point]:
        """Return the points of `timesteps`.

        Raises:
            ValueError: naming `steps`, if there are more than the process has.
        """
        if len(timesteps) > self.timesteps:
            raise ValueError(
                f"'steps' = {len(timesteps)} is more than diffusion.process.timesteps = {self.timesteps}: lower "
                "steps, or raise timesteps"
            )
        # Floats from the float64 table are exact enough for every dtype, and need no transfer from a device.
        levels = self.tables.alphas_cumprod[timesteps].tolist()
        return [Point(math.sqrt(a), math.sqrt(1 - a), t) for t, a in zip(timesteps, levels, strict=True)]

    def trailing(self, steps: int) -> list[Point]:
        # Starts at T - 1, the noisiest timestep.
        return self.at_timesteps([round(self.timesteps - i * self.timesteps / steps) - 1 for i in range(steps)])

    def at(self, ratio: float) -> Point:
        # Interpolate between two timesteps, linearly in the logarithm of the ratio.
        levels, wanted = self._log_ratios, torch.tensor(math.log(ratio), dtype=torch.float64)
        upper = int(torch.bucketize(wanted, levels).clamp(1, max(1, len(levels) - 1)))
        low, high = levels[[upper - 1, min(upper, len(levels) - 1)]].tolist()
        share = (float(wanted) - low) / (high - low) if high > low else 0.0
        time = upper - 1 + min(max(share, 0.0), 1.0)
        nearest, alpha = round(time), 1 / math.sqrt(1 + ratio * ratio)
        at_timestep = abs(time - nearest) < 1e-9  # tolerates the rounding of the logarithm
        return Point(alpha, ratio * alpha, nearest if at_timestep else time)


@define(frozen=True, slots=False)
class DDPMProcess(VP):
    """The process of Ho et al. 2020 (arXiv 2006.11239), with the parts of that paper.

    The parts are linear betas, the prediction "epsilon", independent timesteps, uniform weights and ancestral sampling.
    """

    schedule: Schedule = field(
        default=Linear(), converter=chosen[Schedule], kw_only=True, metadata=about("noise added at each timestep")
    )

    default_prediction = "epsilon"
    default_times = "uniform"
    default_sampler = "ddpm"
    default_weighting = "uniform"


@define(frozen=True)
class Flow(Process):
    """x_t = (1 - t) x0 + t noise for t from 0 (image) to 1 (noise): Liu et al. 2022 (arXiv 2209.03003).

    A `shift` above 1 moves times towards the noise. Large images need it, because their neighbouring pixels are similar
    (Esser et al. 2024, arXiv 2403.03206). With `shift_side` the shift follows the size of the input: for height h and
    width w it is `shift` sqrt(h w) / `shift_side`. That is `shift`, and then the shift sqrt(m / n) of eq. 23 there,
    from the n pixels of a square with this side to m = h w pixels.
    """

    shift: float = field(
        default=1.0, validator=gt(0), metadata=about("k: t becomes k t / (1 + (k - 1) t); above 1 for large images")
    )
    shift_side: float | None = field(
        default=None,
        kw_only=True,
        validator=between(0, math.inf, open_ends=True),
        metadata=about(
            "side of the square inputs of the network, pixels or latents, for which `shift` holds; for height h and "
            "width w it is multiplied by sqrt(h w) / shift_side; default: the same shift for all sizes"
        ),
    )
    time_scale: float = field(default=1000.0, validator=gt(0), metadata=about("the network gets t times this"))

    default_prediction = "flow_prediction"
    default_times = MappingProxyType({"use": "logit_normal", "stratified": True})
    reaches_image = True
    ratio_range = 0.0, math.inf

    @property
    def default_spacing(self) -> Mapping[str, Any]:
        # More steps at much noise: a tenth closer to real images with 20 and 50 steps, see benchmarks/quality.py.
        if self.shift_side:
            return {"use": "shifted_by", "factor": 3.0}
        return {"use": "shifted", "shift": 3 * self.shift}

    def for_shape(self, shape: Sequence[int]) -> "Flow":
        if self.shift_side is None:
            return self
        if len(shape) != 3:
            raise ValueError(
                "'process.shift_side' needs images or latents of shape c h w, and these inputs have the shape "
                f"{tuple(shape)}; remove the key"
            )
        _, height, width = shape
        return evolve(self, shift=self.shift * (math.sqrt(height * width) / self.shift_side), shift_side=None)

    def shifted(self, time: Tensor) -> Tensor:
        """Return k t / (1 + (k - 1) t)."""
        return self.shift * time / (1 + (self.shift - 1) * time)

    def from_fraction(self, fraction: Tensor) -> Tensor:
        return self.shifted(fraction.clamp(_TINY, 1 - 2 * _TINY))

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        return self.from_fraction(log_ratio.sigmoid())

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        sigma = times.reshape(-1, *[1] * (ndim - 1))
        alpha = 1 - sigma
        return alpha, sigma, 2 * (alpha / sigma).log()

    def network_time(self, times: Tensor) -> Tensor:
        return times * self.time_scale

    def at(self, ratio: float) -> Point:
        return self._point(ratio / (1 + ratio))

    def trailing(self, steps: int) -> list[Point]:
        times = torch.tensor([1 - i / steps for i in range(steps)], dtype=torch.float64)
        return [self._point(t) for t in self.shifted(times).tolist()]

    def _point(self, time: float) -> Point:
        return Point(1 - time, time, time * self.time_scale)


@define(frozen=True)
class EDM(Process):
    """x_t = x0 + sigma noise, where the times are the noise levels sigma: Karras et al. 2022 (arXiv 2206.00364).

    The network gets c_noise = ln(sigma) / 4 of table 1, times `time_scale`.
    """

    sigma_min: float = field(default=0.002, validator=gt(0), metadata=about("noise level at which sampling ends"))
    sigma_max: float = field(default=80.0, validator=gt(0), metadata=about("noise level at which sampling begins"))
    time_scale: float = field(
        default=1000.0, validator=gt(0), metadata=about("the network gets ln(sigma) / 4 times this")
    )

    default_prediction = "edm"
    default_times = MappingProxyType({"use": "log_normal", "stratified": True})
    default_sampler = "heun"
    default_spacing = "karras"

    def __attrs_post_init__(self) -> None:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"'sigma_min' must be below sigma_max = {self.sigma_max:g}; it is {self.sigma_min:g}")

    @property
    def initial_scale(self) -> float:
        return self.sigma_max

    @property
    def ratio_range(self) -> tuple[float, float]:
        return self.sigma_min, self.sigma_max

    def from_fraction(self, fraction: Tensor) -> Tensor:
        low, high = math.log(self.sigma_min), math.log(self.sigma_max)
        return (low + (high - low) * fraction).exp()

    def from_log_ratio(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.exp()

    def rates(self, times: Tensor, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
        sigma = times.reshape(-1, *[1] * (ndim - 1))
        return torch.ones_like(sigma), sigma, -2 * sigma.log()

    def network_time(self, times: Tensor) -> Tensor:
        return times.log() * (self.time_scale / 4)

    def at(self, ratio: float) -> Point:
        return Point(1.0, ratio, math.log(ratio) * self.time_scale / 4)


Process.known = {"vp": VP, "ddpm": DDPMProcess, "flow": Flow, "edm": EDM}
