"""Trains and samples where the optimum is known: images whose pixels are independent draws of N(MEAN, STD²).

The best prediction at every noise level, its loss under every weighting, and the mean and the deviation of what a
sampler makes with it are closed forms. They are written out here once more, in plain numbers and in another form than
in `hookdiff.diffusion`, which is what they check: nothing of it is called on this side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy
import torch
from attrs import define
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from hookdiff.data import Batch, InMemory
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.progress import LoopConfig

MEAN, STD = 1.0, 0.5  # of the data
TOLERANCE = 0.02  # of loss and deviations, relative; of means, in units of STD
STEPS = 10  # of the samplers: so few that each leaves its own error, which is part of what is compared
SHAPE = (1, 4, 4)

Level = tuple[float, float]  # alpha, sigma
Numbers = NDArray[numpy.float64]


@define(frozen=True)
class Case:
    """A schedule, and what the network predicts."""

    schedule: str
    prediction_type: str
    zero_snr: bool = False

    def diffusion(self, weighting: str) -> Diffusion:
        """Return the objective under test."""
        return Diffusion(
            schedule=self.schedule,
            prediction_type=self.prediction_type,
            weighting=weighting,
            rescale_betas_zero_snr=self.zero_snr,
            stratified=True,
        )

    def __str__(self) -> str:
        rescaled = ", zero terminal SNR" if self.zero_snr else ""
        return f"{self.prediction_type} (schedule {self.schedule}{rescaled})"


CASES = (
    Case("linear", "epsilon"),
    Case("linear", "sample"),
    Case("linear", "v_prediction"),
    Case("linear", "v_prediction", zero_snr=True),
    Case("flow", "flow_prediction"),
    Case("edm", "edm"),
)
WEIGHTINGS = ("uniform", "min_snr", "debiased", "p2", "edm")
SAMPLERS: dict[str, dict[str, Any]] = {
    "ddim": {"sampler": "ddim"},
    "ddpm": {"sampler": "ddpm"},
    "ddpm large": {"sampler": "ddpm", "variance": "fixed_large"},
    "euler": {"sampler": "euler"},
    "heun": {"sampler": "heun"},
    "dpmpp_2m": {"sampler": "dpmpp_2m"},
}


@define(frozen=True)
class Check:
    """One number, measured and exact."""

    case: Case
    weighting: str
    name: str  # "loss", "mean", "std", or "SAMPLER mean", "SAMPLER std"
    measured: float
    exact: float

    @property
    def passed(self) -> bool:
        """Whether the two agree."""
        scale = STD if self.name.endswith("mean") else abs(self.exact)
        return abs(self.measured - self.exact) <= TOLERANCE * scale  # False for a NaN

    def __str__(self) -> str:
        return f"{self.case}, weighting {self.weighting}: {self.name} is {self.measured:.5g}, exact {self.exact:.5g}"


def run(cases: Sequence[Case] = CASES, weightings: Sequence[str] = WEIGHTINGS) -> Iterator[list[Check]]:
    """Train and sample every case with every weighting; yields the checks of one training after the other."""
    for case in cases:
        expected = {name: exact_samples(case, name) for name in SAMPLERS}
        for weighting in weightings:
            diffusion = case.diffusion(weighting)
            net = train(case, diffusion)
            found = [
                ("loss", measured_loss(net, diffusion), exact_loss(case, weighting)),
                ("mean", float(net.mean.detach()), MEAN),
                ("std", float(net.log_std.detach().exp()), STD),
            ]
            for name, options in SAMPLERS.items():
                mean, std = measured_samples(net, diffusion, options)
                found.append((f"{name} mean", mean, expected[name][0]))
                found.append((f"{name} std", std, expected[name][1]))
            yield [Check(case, weighting, *numbers) for numbers in found]


# What is measured: with the real objective, the real loop and the real samplers.


class GaussianNet(nn.Module):
    """The best network for data of some mean and deviation, which are all that it has to learn."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.mean = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.log_std = nn.Parameter(torch.zeros((), dtype=torch.float64))
        alpha, sigma = map(torch.from_numpy, discrete_levels(case.zero_snr))
        self.alpha, self.sigma = alpha, sigma

    def forward(self, shown: Tensor, told: Tensor) -> Tensor:
        """Return the best prediction, n c h w in float32, for what the objective shows and tells."""
        alpha, sigma = (rate.view(-1, 1, 1, 1) for rate in self._levels(told))
        x = shown.double()
        if self.case.prediction_type == "edm":
            x = x * (sigma**2 + 0.25).sqrt()  # 1 / c_in
        out: Tensor = best_output(self.case, x, alpha, sigma, self.mean, self.log_std.exp())
        return out.to(shown.dtype)

    def _levels(self, told: Tensor) -> tuple[Tensor, Tensor]:
        if self.case.schedule == "flow":
            return 1 - told.double() / 1000, told.double() / 1000
        if self.case.schedule == "edm":
            sigma = (told.double() / 250).exp()
            return torch.ones_like(sigma), sigma
        return self.alpha[told], self.sigma[told]


def best_output(case: Case, x: Any, alpha: Any, sigma: Any, mean: Any, std: Any) -> Any:
    """Return what predicts best for data N(mean, std²), seen as `x`."""
    y = (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
    noise, x0 = sigma * y, mean + alpha * std**2 * y
    if case.prediction_type == "edm":  # for alpha = 1, with sigma_data = 0.5
        c_skip, c_out = 0.25 / (sigma**2 + 0.25), 0.5 * sigma / (sigma**2 + 0.25) ** 0.5
        return (x0 - c_skip * x) / c_out
    known = {"epsilon": noise, "sample": x0, "v_prediction": alpha * noise - sigma * x0, "flow_prediction": noise - x0}
    return known[case.prediction_type]


@define(eq=False)
class _Anneal:
    """Lets the learning rate fall to nothing, so that the last step's noise does not stay."""

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        done = loop.progress.step / (loop.config.steps or 1)
        for group in loop.optimizers[0].param_groups:
            group.update(lr=0.1 * (1 - done) ** 2)


def train(case: Case, diffusion: Diffusion, steps: int = 200) -> GaussianNet:
    """Return a net that `diffusion` has trained."""
    net = GaussianNet(case)
    config = LoopConfig(steps=steps, batch_size=1000, log_every=steps)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.9, 0.99))
    Loop(net, optimizer, diffusion, InMemory(gaussian(4000, MEAN, STD)), config, {"anneal": _Anneal()}).run()
    return net


def gaussian(num: int, mean: float, std: float) -> Tensor:
    """Return `num` images of `SHAPE`, float32: quantiles of N(mean, std²) in random order, which have its moments."""
    pixels = num * math.prod(SHAPE)
    ranks = torch.randperm(pixels, generator=Generator().manual_seed(0))
    quantiles: Tensor = torch.special.ndtri((ranks.double() + 0.5) / pixels)
    return (mean + std * quantiles).float().view(num, *SHAPE)


@torch.no_grad()
def measured_loss(net: GaussianNet, diffusion: Diffusion, batches: int = 40) -> float:
    """Return the mean loss of `net` over fresh noise."""
    data, generator = gaussian(2000, MEAN, STD), Generator().manual_seed(1)
    losses = [diffusion(net, diffusion.draw(Batch(data), generator)).loss for _ in range(batches)]
    return float(torch.stack(losses).double().mean())


def measured_samples(net: GaussianNet, diffusion: Diffusion, options: dict[str, Any]) -> tuple[float, float]:
    """Return mean and deviation of the pixels of 2000 samples."""
    sampling = Sampling(**options, steps=STEPS, clip_sample=False, batch_size=2000)
    generators = [Generator().manual_seed(k) for k in range(2000)]
    images = sampling.sample(net, diffusion, SHAPE, generators, "cpu", noise=gaussian(2000, 0, 1)).double()
    return float(images.mean()), float(images.std(correction=0))


# What is exact.


def discrete_levels(zero_snr: bool) -> tuple[Numbers, Numbers]:
    """Return alpha and sigma of the linear schedule at its 1000 timesteps (Ho et al. 2020, arXiv 2006.11239)."""
    remaining = numpy.cumprod(1 - numpy.linspace(1e-4, 0.02, 1000))
    if zero_snr:  # Lin et al. 2023 (arXiv 2305.08891), algorithm 1
        first, last = math.sqrt(remaining[0]), math.sqrt(remaining[-1])
        remaining = ((numpy.sqrt(remaining) - last) * first / (first - last)) ** 2
    return numpy.sqrt(remaining), numpy.sqrt(1 - remaining)


def training_levels(case: Case) -> tuple[Numbers, Numbers]:
    """Return alpha and sigma at many equally likely noise levels of training."""
    if case.schedule == "linear":
        return discrete_levels(case.zero_snr)
    u = (numpy.arange(200_000) + 0.5) / 200_000
    if case.schedule == "flow":
        return 1 - u, u
    normal: Numbers = torch.special.ndtri(torch.from_numpy(u)).numpy()
    return numpy.ones_like(u), numpy.exp(-1.2 + 1.2 * normal)


def exact_loss(case: Case, weighting: str) -> float:
    """Return the least loss that any network can have."""
    alpha, sigma = training_levels(case)
    error = STD**2 * sigma**2 / (alpha**2 * STD**2 + sigma**2)  # of x0, squared: the variance of x0 given x_t
    if weighting == "uniform":
        output = {
            "epsilon": alpha**2 / sigma**2,
            "sample": numpy.ones_like(sigma),
            "v_prediction": 1 / sigma**2,
            "flow_prediction": 1 / sigma**2,
            "edm": (sigma**2 + 0.25) / (0.5 * sigma) ** 2,
        }
        return float(numpy.mean(output[case.prediction_type] * error))
    snr = (alpha / sigma) ** 2
    with numpy.errstate(divide="ignore", invalid="ignore"):  # at a SNR of 0 the weights on x0 are 0, or 4 for edm
        on_x0 = {
            "min_snr": numpy.minimum(snr, 5),
            "debiased": snr / numpy.sqrt(numpy.minimum(snr, 1000)),
            "p2": snr / (1 + snr),
            "edm": 4 + snr,  # (s² + sd²) / (s sd)² of s = sigma / alpha
        }[weighting]
    return float(numpy.mean(numpy.nan_to_num(on_x0, nan=0.0) * error))


def sampling_levels(case: Case) -> list[Level]:
    """Return alpha and sigma at the moments that a sampler visits, the image last."""
    if case.schedule == "linear":
        alpha, sigma = discrete_levels(case.zero_snr)
        visited = [round(1000 - i * 1000 / STEPS) - 1 for i in range(STEPS)]
        levels = [(float(alpha[t]), float(sigma[t])) for t in visited]
    elif case.schedule == "flow":
        levels = [(i / STEPS, 1 - i / STEPS) for i in range(STEPS)]
    else:
        high, low = 80 ** (1 / 7), 0.002 ** (1 / 7)
        levels = [(1.0, (high + i / (STEPS - 1) * (low - high)) ** 7) for i in range(STEPS)]
    return [*levels, (1.0, 0.0)]


def seen(x: float, level: Level) -> tuple[float, float]:
    """Return the image and the noise that the best network sees in `x`."""
    alpha, sigma = level
    y = (x - alpha * MEAN) / (alpha**2 * STD**2 + sigma**2)
    return MEAN + alpha * STD**2 * y, sigma * y


def exact_samples(case: Case, sampler: str) -> tuple[float, float]:
    """Return mean and deviation of the samples of the best network."""
    levels = sampling_levels(case)
    scale = 80.0 if case.schedule == "edm" else 1.0
    if sampler.startswith("ddpm"):
        return _ancestral(levels, scale, large=sampler == "ddpm large")
    chains: dict[str, Callable[[Case, list[Level], float], float]] = {
        "ddim": _ddim,
        "euler": _euler,
        "heun": _heun,
        "dpmpp_2m": _dpmpp_2m,
    }
    # Each of these is an affine map of the noise: where it takes 0 and 1 says all.
    start, end = (chains[sampler](case, levels, x) for x in (0.0, 1.0))
    return start, abs(end - start) * scale


def _ancestral(levels: list[Level], scale: float, *, large: bool) -> tuple[float, float]:
    mean, variance = 0.0, scale**2
    for (a, s), (a_next, s_next) in pairwise(levels):
        beta = s**2 - (a / a_next) ** 2 * s_next**2
        on_x0, on_x = a_next * beta / s**2, a / a_next * s_next**2 / s**2
        slope = on_x0 * a * STD**2 / (a**2 * STD**2 + s**2) + on_x
        mean = on_x0 * seen(mean, (a, s))[0] + on_x * mean
        added = (beta if large else beta * s_next**2 / s**2) if s_next else 0.0
        variance = slope**2 * variance + added
    return mean, math.sqrt(variance)


def _ddim(case: Case, levels: list[Level], x: float) -> float:
    y = x - levels[0][0] * MEAN
    for (a, s), (a_next, s_next) in pairwise(levels):
        y *= (a * a_next * STD**2 + s * s_next) / (a**2 * STD**2 + s**2)
    return MEAN + y


def _slope(case: Case, x: float, level: Level) -> float:
    """Return the derivative of the probability flow: by t for flow, else of x / alpha by sigma / alpha."""
    x0, noise = seen(x, level)
    return noise - x0 if case.schedule == "flow" else noise


def _time(case: Case, level: Level) -> float:
    alpha, sigma = level
    return sigma if case.schedule == "flow" else sigma / alpha


def _euler(case: Case, levels: list[Level], x: float) -> float:
    for now, after in pairwise(levels):
        x = _advance(case, x, now, after, _slope(case, x, now))
    return x


def _heun(case: Case, levels: list[Level], x: float) -> float:
    for now, after in pairwise(levels):
        slope = _slope(case, x, now)
        end = _advance(case, x, now, after, slope)
        # Not where sigma / alpha is infinite, nor, but for flow, to the image itself.
        if case.schedule == "flow" or (now[0] and after[1]):
            end = _advance(case, x, now, after, (slope + _slope(case, end, after)) / 2)
        x = end
    return x


def _advance(case: Case, x: float, now: Level, after: Level, slope: float) -> float:
    if case.schedule == "flow":
        return x + (after[1] - now[1]) * slope
    if not now[0]:  # x is noise alone: the limit of the step below
        return after[0] * seen(x, now)[0] + after[1] * slope
    return after[0] * (x / now[0] + (_time(case, after) - _time(case, now)) * slope)


def _dpmpp_2m(case: Case, levels: list[Level], x: float) -> float:
    def log_snr(level: Level) -> float:  # half of it
        return math.inf if not level[1] else -math.inf if not level[0] else math.log(level[0] / level[1])

    before: tuple[float, float] | None = None  # lambda and x0
    for now, after in pairwise(levels):
        x0 = seen(x, now)[0]
        h = log_snr(after) - log_snr(now)
        used = x0
        if before is not None and math.isfinite(before[0]) and math.isfinite(h):
            r = (log_snr(now) - before[0]) / h
            used = (1 + 1 / (2 * r)) * x0 - before[1] / (2 * r)
        before = log_snr(now), x0
        x = after[1] / now[1] * x - after[0] * math.expm1(-h) * used
    return x
