"""Trains and samples where the optimum is known: images whose pixels are independent draws of N(MEAN, STD²).

The best prediction at every noise level, its loss under every weighting, and the mean and the deviation of samples
made with it have closed forms. The formulas here are independent: they call nothing of `hookdiff.diffusion`.
"""

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from attrs import define
from torch import Generator, Tensor, nn

from hookdiff import Batch, InMemory, Loop, LoopConfig, hookimpl
from hookdiff.authors import gaussian_prediction, normal_quantiles
from hookdiff.diffusion import Diffusion, Process, Sampling, Solver, Times

MEAN, STD = 1.0, 0.5  # mean and standard deviation of the data
TOLERANCE = 0.02  # relative, for losses and deviations; in units of STD, for means
STEPS = 10  # steps of the samplers: so few that their errors, which are also compared, are large
SHAPE = (1, 4, 4)

Level = tuple[float, float]  # alpha, sigma


@define(frozen=True)
class Case:
    """A noise schedule and a prediction type."""

    schedule: str
    prediction_type: str
    zero_snr: bool = False

    def diffusion(self, weighting: str) -> Diffusion:
        """Return the objective under test."""
        linear = {"use": "ddpm", "rescale_betas_zero_snr": self.zero_snr}
        process = Process.of(linear if self.schedule == "linear" else self.schedule)
        times = Times.of({"use": "log_normal" if self.schedule == "edm" else "uniform", "stratified": True})
        return Diffusion(process, self.prediction_type, weighting, times)

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
SAMPLERS = ("ddim", "ddpm", "ddpm large", "euler", "heun", "dpmpp_2m")


@define(frozen=True)
class Check:
    """A measured number and its exact value."""

    case: Case
    weighting: str
    name: str  # "loss", "mean", "std", or "SAMPLER mean", "SAMPLER std"
    measured: float
    exact: float

    @property
    def passed(self) -> bool:
        scale = STD if self.name.endswith("mean") else abs(self.exact)
        return abs(self.measured - self.exact) <= TOLERANCE * scale  # False for a NaN

    def __str__(self) -> str:
        return f"{self.case}, weighting {self.weighting}: {self.name} is {self.measured:.5g}, exact {self.exact:.5g}"


def check(case: Case, weighting: str) -> dict[str, Check]:
    """Train and sample once; return the measured and exact numbers by name."""
    diffusion = case.diffusion(weighting)
    net = train_gaussian(case, diffusion)
    pairs = {
        "loss": (measured_loss(net, diffusion), exact_loss(case, weighting)),
        "mean": (float(net.mean.detach()), MEAN),
        "std": (float(net.log_std.detach().exp()), STD),
    }
    for sampler in SAMPLERS:
        both = zip(measured_samples(net, diffusion, sampler), exact_samples(case, sampler), strict=True)
        pairs[f"{sampler} mean"], pairs[f"{sampler} std"] = both
    return {name: Check(case, weighting, name, *numbers) for name, numbers in pairs.items()}


# The measured values come from the real objective, the real loop and the real samplers.


class GaussianNet(nn.Module):
    """The best network for Gaussian data; it only has to learn the mean and the standard deviation."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.mean = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.log_std = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, shown: Tensor, times: Tensor) -> Tensor:
        """Return the best prediction, n c h w in float32; `shown` and `times` are as the objective gives them."""
        times = times.view(-1, 1, 1, 1)
        where = {"linear": times, "flow": times.double() / 1000, "edm": (times.double() / 250).exp()}
        alpha, sigma = levels(self.case, where[self.case.schedule])
        x = shown.double()
        if self.case.prediction_type == "edm":
            x = x * (sigma**2 + 0.25).sqrt()  # 1 / c_in
        x0, noise = gaussian_prediction(x, alpha, sigma, self.mean, self.log_std.exp())
        of_x0, of_noise = parts_of_output(self.case.prediction_type, alpha, sigma)
        out: Tensor = of_x0 * x0 + of_noise * noise
        return out.to(shown.dtype)


@define(eq=False)
class _Anneal:
    """Lowers the learning rate to zero, so that the noise of the last steps averages out."""

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        done = loop.progress.step / (loop.config.steps or 1)
        for group in loop.optimizers[0].param_groups:
            group.update(lr=0.1 * (1 - done) ** 2)


def train_gaussian(case: Case, diffusion: Diffusion) -> GaussianNet:
    """Return a net that `diffusion` has trained."""
    net = GaussianNet(case)
    config = LoopConfig(steps=200, batch_size=1000, log_every=200)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.9, 0.99))
    # The log is off, because one case has on purpose a weighting that does not train on pure noise.
    log = logging.getLogger("hookdiff")
    before, log.disabled = log.disabled, True
    try:
        Loop(net, optimizer, diffusion, InMemory(gaussian(4000, MEAN, STD)), config, {"anneal": _Anneal()}).run()
    finally:
        log.disabled = before
    return net


def gaussian(num: int, mean: float, std: float) -> Tensor:
    """Return `num` images of `SHAPE`, float32: quantiles of N(mean, std²) in random order, with exact moments."""
    pixels = num * math.prod(SHAPE)
    ranks = torch.randperm(pixels, generator=Generator().manual_seed(0))
    return (mean + std * normal_quantiles(pixels)[ranks]).float().view(num, *SHAPE)


@torch.no_grad()
def measured_loss(net: GaussianNet, diffusion: Diffusion) -> float:
    """Return the mean loss of `net` over fresh noise."""
    data, generator = gaussian(2000, MEAN, STD), Generator().manual_seed(1)
    losses = [diffusion(net, diffusion.draw(Batch(data), generator)).loss for _ in range(40)]
    return float(torch.stack(losses).double().mean())


def measured_samples(net: GaussianNet, diffusion: Diffusion, sampler: str) -> tuple[float, float]:
    """Return mean and deviation of the pixels of 2000 samples."""
    solver = Solver.of({"use": "ddpm", "variance": "fixed_large"} if sampler == "ddpm large" else sampler)
    spacing = "karras" if net.case.schedule == "edm" else "trailing"
    sampling = Sampling(solver, STEPS, spacing, "none", batch_size=2000)
    generators = [Generator().manual_seed(k) for k in range(2000)]
    images = sampling.sample(net, diffusion, SHAPE, generators, "cpu", noise=gaussian(2000, 0, 1)).double()
    return float(images.mean()), float(images.std(correction=0))


# The exact values are all computed in float64.


def levels(case: Case, where: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma at timesteps of the linear schedule, times of the flow, or sigmas of EDM."""
    if case.schedule != "linear":
        return (1 - where if case.schedule == "flow" else torch.ones_like(where)), where
    alpha, sigma = discrete_levels(case.zero_snr)
    return alpha[where], sigma[where]


@cache
def discrete_levels(zero_snr: bool) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma of the linear schedule at its 1000 timesteps (Ho et al. 2020, arXiv 2006.11239)."""
    remaining = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    if zero_snr:  # Lin et al. 2023 (arXiv 2305.08891), algorithm 1
        first, last = remaining[0].sqrt(), remaining[-1].sqrt()
        remaining = ((remaining.sqrt() - last) * first / (first - last)) ** 2
    return remaining.sqrt(), (1 - remaining).sqrt()


def training_levels(case: Case) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma at many equally likely noise levels of training."""
    if case.schedule == "linear":
        return levels(case, torch.arange(1000))
    num = 200_000
    times = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    return levels(case, times if case.schedule == "flow" else (-1.2 + 1.2 * normal_quantiles(num)).exp())


def seen(x: Any, level: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the image and the noise that the best network for the data predicts from `x`."""
    return gaussian_prediction(x, *level, MEAN, STD)


def parts_of_output(prediction_type: str, alpha: Any, sigma: Any) -> tuple[Any, Any]:
    """Return p and q, where the network predicts p * image + q * noise. For "edm" alpha is 1, sigma_data 0.5."""
    root = (sigma**2 + 0.25) ** 0.5
    return {
        "epsilon": (0, 1),
        "sample": (1, 0),
        "v_prediction": (-sigma, alpha),
        "flow_prediction": (-1, 1),
        "edm": (2 * sigma / root, -0.5 / root),
    }[prediction_type]


def exact_loss(case: Case, weighting: str) -> float:
    """Return the smallest loss that a network can reach."""
    alpha, sigma = training_levels(case)
    error = STD**2 * sigma**2 / (alpha**2 * STD**2 + sigma**2)  # squared error of x0: the variance of x0 given x_t
    snr = (alpha / sigma) ** 2
    if weighting == "uniform":
        of_x0, of_noise = parts_of_output(case.prediction_type, alpha, sigma)
        on_x0 = (of_x0 - of_noise * alpha / sigma) ** 2  # x_t is given, so an error of x0 is also an error of the noise
    else:
        on_x0 = {
            "min_snr": snr.clamp(max=5),
            "debiased": snr / snr.clamp(max=1000).sqrt(),
            "p2": snr / (1 + snr),
            "edm": 4 + snr,  # (s² + sd²) / (s sd)² of s = sigma / alpha
        }[weighting]
    return float((on_x0.nan_to_num(0.0) * error).mean())  # where the SNR is 0, "debiased" is 0 / 0: its limit is 0


def sampling_levels(case: Case) -> list[Level]:
    """Return alpha and sigma at the times that a sampler visits, the image last."""
    i = torch.arange(STEPS, dtype=torch.float64)
    high, low = 80 ** (1 / 7), 0.002 ** (1 / 7)
    where = {
        "linear": (1000 - i * 1000 / STEPS).round().long() - 1,
        "flow": 1 - i / STEPS,
        "edm": (high + i / (STEPS - 1) * (low - high)) ** 7,
    }
    alpha, sigma = levels(case, where[case.schedule])
    return [*zip(alpha.tolist(), sigma.tolist(), strict=True), (1.0, 0.0)]


def exact_samples(case: Case, sampler: str) -> tuple[float, float]:
    """Return mean and deviation of the samples of the best network.

    A step is an affine map, so its values at two points determine the map; some steps also add noise.
    """
    unit = torch.tensor([0.0, 1.0], dtype=torch.float64)
    x = unit  # the first point is the mean of the noise, and stays the mean
    variance = 80.0**2 if case.schedule == "edm" else 1.0
    before = None
    for now, after in pairwise(sampling_levels(case)):
        moved, added = _STEPS[sampler](case, x, now, after, before)
        variance = variance * float((moved[1] - moved[0]) / (x[1] - x[0])) ** 2 + added
        before, x = (now, x), moved[0] + unit if added else moved  # a step from pure noise may map both to one point
    return float(x[0]), math.sqrt(variance)


# Each returns the points after a step, and the variance of the noise that the step adds. `before` holds the level and
# the points at which the step before began.


def _ancestral(case: Case, x: Tensor, now: Level, after: Level, before: Any, large: bool = False) -> Any:
    (a, s), (a_next, s_next) = now, after
    beta = s**2 - (a / a_next) ** 2 * s_next**2
    moved = a_next * beta / s**2 * seen(x, now)[0] + a / a_next * s_next**2 / s**2 * x
    return moved, (beta if large and s_next else beta * s_next**2 / s**2)


def _straight(case: Case, x: Tensor, now: Level, after: Level, before: Any) -> Any:
    """Make a step of DDIM: an Euler step of x / alpha in sigma / alpha, or for the flow of x in t."""
    (a, s), (a_next, s_next) = now, after
    slope = (a * a_next * STD**2 + s * s_next) / (a**2 * STD**2 + s**2)
    return a_next * MEAN + slope * (x - a * MEAN), 0.0


def _heun(case: Case, x: Tensor, now: Level, after: Level, before: Any) -> Any:
    (a, s), (a_next, s_next) = now, after
    end, _ = _straight(case, x, now, after, before)
    (x0, noise), (x0_end, noise_end) = seen(x, now), seen(end, after)
    if case.schedule == "flow":
        return x + (s_next - s) * (noise - x0 + noise_end - x0_end) / 2, 0.0
    if a and s_next:  # not where sigma / alpha is infinite, nor to the image itself
        return a_next * (x / a + (s_next / a_next - s / a) * (noise + noise_end) / 2), 0.0
    return end, 0.0


def _dpmpp_2m(case: Case, x: Tensor, now: Level, after: Level, before: tuple[Level, Tensor] | None) -> Any:
    used = seen(x, now)[0]
    h = _half_log_snr(after) - _half_log_snr(now)
    if before is not None and math.isfinite(_half_log_snr(before[0])) and math.isfinite(h):
        r = (_half_log_snr(now) - _half_log_snr(before[0])) / h
        used = (1 + 1 / (2 * r)) * used - seen(before[1], before[0])[0] / (2 * r)
    return after[1] / now[1] * x - after[0] * math.expm1(-h) * used, 0.0


def _half_log_snr(level: Level) -> float:
    alpha, sigma = level
    return math.inf if not sigma else -math.inf if not alpha else math.log(alpha / sigma)


_STEPS: dict[str, Callable[[Case, Tensor, Level, Level, Any], Any]] = {
    "ddim": _straight,
    "ddpm": _ancestral,
    "ddpm large": partial(_ancestral, large=True),
    "euler": _straight,
    "heun": _heun,
    "dpmpp_2m": _dpmpp_2m,
}
