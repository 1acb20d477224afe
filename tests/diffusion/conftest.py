"""Processes and parts for these tests, and the best possible network for Gaussian images."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from attrs import define, field
from hypothesis import strategies as st
from torch import Tensor

from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.prediction import EDMPrediction, Prediction
from hookdiff.diffusion.process import EDM, VP, Flow, Process
from hookdiff.diffusion.schedules import Linear, ScaledLinear, Schedule, Sigmoid
from hookdiff.diffusion.solvers import DDIM, DDPM, DPMSolver2M, Euler, Heun, Solver

PREDICTIONS = list(Prediction.known)
PROCESSES: dict[str, Process] = {name: VP(name) for name in Schedule.known} | {"flow": Flow(), "edm": EDM()}
# All processes with all predictions that they can be read with.
PAIRS = [pair for pair in product(PROCESSES, PREDICTIONS) if pair != ("flow", "epsilon")]
SOME_PAIRS = [
    pair if pair[0] in ("cosine", "flow", "edm") else pytest.param(*pair, marks=pytest.mark.wide) for pair in PAIRS
]
# Schedules that end in noise after 20 timesteps.
SHORT = [Linear(beta_end=0.5), ScaledLinear(beta_end=0.5), Sigmoid(beta_end=0.5), "cosine"]

# The least mean loss of any network on Gaussian images: process, prediction, their standard deviation, and the loss.
FLOORS = [
    ("ddpm", "epsilon", 1.0, 0.275513233397),
    ("ddpm", "epsilon", 0.5, 0.173053406084),
    ("ddpm", "v_prediction", 0.5, 0.379790054563),
    ("ddpm", "v_prediction", 1.0, 1.0),
    ("ddpm", "sample", 1.0, 0.724486766603),
    ("flow", "flow_prediction", 0.5, 0.785398163397),
    ("flow", "flow_prediction", 1.0, 1.57079632679),
    ("flow", "flow_prediction", 2.0, 3.14159265359),
]

random_betas = st.lists(st.floats(1e-4, 0.3), max_size=60).map(lambda betas: [*betas, 0.97])  # they end in noise


@define(frozen=True)
class Given(Schedule):
    """A schedule with given betas."""

    values: tuple[float, ...] = field(converter=tuple)

    def betas(self, timesteps: int) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float64)


def vp(betas: Sequence[float]) -> VP:
    """Return the VP process with these betas."""
    return VP(Given(betas), len(betas))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generators(*seeds: int) -> list[torch.Generator]:
    return [seeded(seed) for seed in seeds]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def brightness(images: Tensor) -> list[float]:
    return images.mean((1, 2, 3)).tolist()


def pointwise(x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
    """Compute each output from its own image alone, so that no bit depends on the rest of the batch."""
    shift = timesteps.view(-1, 1, 1, 1) / 1000
    return 0.9 * x / (1 + 0.1 * x * x) + (shift if labels is None else shift * (labels.view(-1, 1, 1, 1) + 2))


churns: dict[str, Any] = {
    "churn": st.sampled_from([0.0, 3.0]),
    "churn_max": st.sampled_from([2.0, float("inf")]),
    "churn_noise": st.sampled_from([1.0, 1.003]),
}
solvers = st.one_of(
    st.builds(DDIM, st.floats(0, 1)),
    st.builds(DDPM, st.sampled_from(["fixed_small", "fixed_large"])),
    st.just(DPMSolver2M()),
    st.builds(Euler, **churns),
    st.builds(Heun, **churns),
)


@st.composite
def objectives(draw: st.DrawFn, /, **options: Any) -> Diffusion:
    """Draw any process, with 20 timesteps if it is VP, and any prediction that it supports."""
    prediction = draw(st.sampled_from(PREDICTIONS))
    zero_snr = prediction != "epsilon" and draw(st.booleans())
    vp = st.builds(VP, st.sampled_from(SHORT), st.just(20), st.just(zero_snr))
    process = draw(st.one_of(vp, st.just(EDM()), st.just(EDM() if prediction == "epsilon" else Flow())))
    if prediction == "edm" and "data_std" in options:
        prediction = EDMPrediction(1.0)  # normalized images have standard deviation 1
    return Diffusion(process, prediction, **options)


def euler_for_heun_on_flow(sampler: Solver, diffusion: Diffusion) -> Solver:
    """Return Euler if the sampler is Heun on a flow, and otherwise the sampler.

    Heun evaluates a flow's network at t = 0 too, where the network for constant data divides by 0.
    """
    return Euler() if isinstance(diffusion.process, Flow) and isinstance(sampler, Heun) else sampler


@define(eq=False)
class Gaussian:
    """The best possible network for N(mu, s²) data, with any prediction as its output.

    The network derives alpha and sigma from the time that it gets, so the tests check this time too.
    """

    diffusion: Diffusion
    mu: float = 0.0
    s: float = 1.0

    def rates(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma of shape n 1 1 1, in float64."""
        process, time = self.diffusion.process, time.view(-1, 1, 1, 1)
        if isinstance(process, Flow):
            sigma = time.double() / process.time_scale
            return 1 - sigma, sigma
        if isinstance(process, EDM):
            sigma = (time.double() * (4 / process.time_scale)).exp()
            return torch.ones_like(sigma), sigma
        assert isinstance(process, VP)
        table = process.tables
        if time.dtype == torch.int64:
            return table.sqrt_alphas_cumprod[time], table.sqrt_one_minus_alphas_cumprod[time]
        below = time.floor().long().clamp(max=len(table.betas) - 2)
        log_ratio = torch.lerp(table.log_snr[below], table.log_snr[below + 1], time.double() - below) / -2
        return (1 + (2 * log_ratio).exp()).rsqrt(), (1 + (-2 * log_ratio).exp()).rsqrt()

    def __call__(self, shown: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        (alpha, sigma), kind = self.rates(time), self.diffusion.prediction
        x = shown.double() / kind.network_input(torch.ones_like(alpha), alpha, sigma)
        y = (x - alpha * self.mu) / ((alpha * self.s) ** 2 + sigma**2)
        return kind.target(self.mu + alpha * self.s**2 * y, sigma * y, alpha, sigma).to(shown.dtype)


@pytest.fixture(scope="session")
def gaussian() -> type[Gaussian]:
    return Gaussian
