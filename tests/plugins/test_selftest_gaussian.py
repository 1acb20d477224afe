import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hookdiff.diffusion import diffusion as objective, prediction, weighting
from hookdiff.diffusion.chain import Chain
from hookdiff.diffusion.process import Point
from hookdiff.diffusion.schedules import Linear
from hookdiff.diffusion.solvers import DDIM, DDPM, DPMSolver2M, Euler, Heun, Solver
from hookdiff_selftest.cli import gaussian as command
from hookdiff_selftest.gaussian import CASES, Case, Check, check, exact_loss, exact_samples
from tests.conftest import wide

Patch = Callable[[pytest.MonkeyPatch], None]
ddpm_step = DDPM.step
EPSILON, SAMPLE, V, V_ZERO_SNR, FLOW, EDM = CASES


def failures(case: Case, weighting_name: str) -> set[str]:
    checks = check(case, weighting_name).values()
    return {each.name for each in checks if not each.passed}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((EPSILON, "min_snr"), (V, "uniform"), (FLOW, "uniform"), (EDM, "uniform")),
        *wide((SAMPLE, "min_snr"), (V_ZERO_SNR, "uniform"), (EDM, "min_snr")),
        *wide(*((V, name) for name in ("min_snr", "debiased", "p2", "edm"))),
    ],
    ids=str,
)
def test_a_correct_objective_passes(case: Case, name: str) -> None:
    assert failures(case, name) == set()


@pytest.mark.parametrize(
    ("case", "std"),
    # the known deviations of EDM's and the flow's samples, for ten steps and s = 0.5
    [(EDM, {"euler": 0.365213065063, "heun": 0.609798000799}), (FLOW, {"euler": 0.4307826049, "heun": 0.5017199122})],
    ids=str,
)
def test_exact_samples_have_the_known_deviations(case: Case, std: dict[str, float]) -> None:
    for sampler, expected in std.items():
        assert exact_samples(case, sampler)[1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("case", "expected", "tolerance"),
    [(EPSILON, 0.173053406084, 1e-9), (V, 0.379790054563, 1e-9), (FLOW, 0.785398163397, 1e-5), (EDM, 1.0, 1e-9)],
    ids=str,
)
def test_the_exact_loss_has_the_known_values(case: Case, expected: float, tolerance: float) -> None:
    assert exact_loss(case, "uniform") == pytest.approx(expected, rel=tolerance)


def on_v(wrong: Callable[[Any], Any]) -> Patch:
    """Return a patch that replaces min-SNR's weight on v by a function of the SNR."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        # alpha² + sigma² = 1 here, so the weight on v is the weighting itself
        monkeypatch.setattr(weighting.MinSNR, "on_x0", lambda self, alpha, sigma: wrong((alpha / sigma) ** 2))

    return patch


def ddim_with_the_old_sigma(self: Solver, chain: Chain, x: Any, now: Point, after: Point) -> Any:
    x0, noise = chain.predict(x, now)
    return after.alpha * x0 + now.sigma * noise if after.sigma else x0


def ddpm_with_large_variance(self: Solver, chain: Chain, x: Any, now: Point, after: Point) -> Any:
    return ddpm_step(DDPM("fixed_large"), chain, x, now, after)


def dpmpp_too_far(self: Solver, chain: Chain, x: Any, now: Point, after: Point) -> Any:
    x0, _ = chain.predict(x, now)
    earlier, chain.earlier = chain.earlier, [(x0, now)]
    if earlier and after.sigma:
        x0 = x0 + (x0 - earlier[0][0])
    return after.sigma / now.sigma * x + (after.alpha - now.alpha * after.sigma / now.sigma) * x0


def setter(where: Any, name: str, wrong: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(where, name, wrong)


def betas_linear_in_the_square_root(schedule: Linear, timesteps: int) -> torch.Tensor:
    return torch.linspace(schedule.beta_start**0.5, schedule.beta_end**0.5, timesteps, dtype=torch.float64).square()


UNSQUARED = setter(weighting.EDMWeighting, "on_x0", lambda self, alpha, sigma: (sigma**2 + 0.25) * sigma)
NEGATED = setter(prediction.VPrediction, "target", lambda self, x0, noise, alpha, sigma: sigma * x0 - alpha * noise)
BACKWARDS = setter(prediction.FlowPrediction, "target", lambda self, x0, noise, alpha, sigma: x0 - noise)
NO_ROOT = setter(objective, "q_sample", lambda x0, noise, alpha, sigma: alpha**2 * x0 + sigma**2 * noise)

WRONG = {
    # the first two mistakes are common in practice
    "min-SNR for v, SNR + 1 under the cap": (V, "min_snr", "loss", on_v(lambda r: (r + 1).clamp(max=5) / (r + 1))),
    "min-SNR for v, 1 added": (V, "min_snr", "loss", on_v(lambda r: r.clamp(max=5) / r + 1)),
    "epsilon's min-SNR used for v": (V, "min_snr", "loss", on_v(lambda r: r.clamp(max=5) / r)),
    "EDM's weight without its square": (EDM, "edm", "loss", UNSQUARED),
    "v with the other sign": (V, "uniform", "loss", NEGATED),
    "flow from noise to image": (FLOW, "uniform", "loss", BACKWARDS),
    "images noised without the square root": (EPSILON, "uniform", "loss", NO_ROOT),
    "another schedule": (EPSILON, "uniform", "loss", setter(Linear, "betas", betas_linear_in_the_square_root)),
    "DDIM with the old sigma": (EPSILON, "uniform", "ddim std", setter(DDIM, "step", ddim_with_the_old_sigma)),
    "DDPM with the large variance": (EPSILON, "uniform", "ddpm std", setter(DDPM, "step", ddpm_with_large_variance)),
    "Heun replaced by Euler": (EDM, "uniform", "heun std", setter(Heun, "step", Euler.step)),
    "DPM-Solver++ that steps too far": (EPSILON, "uniform", "dpmpp_2m std", setter(DPMSolver2M, "step", dpmpp_too_far)),
}
first = ("epsilon's min-SNR used for v", "v with the other sign", "DDIM with the old sigma", "Heun replaced by Euler")


@pytest.mark.parametrize("name", [*first, *wide(*(name for name in WRONG if name not in first))])
def test_a_wrong_formula_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, weighting_name, number, patch = WRONG[name]
    patch(monkeypatch)
    assert number in failures(case, weighting_name)


@pytest.mark.wide
def test_the_command_prints_measured_beside_exact_without_warnings(caplog: pytest.LogCaptureFixture) -> None:
    result = CliRunner().invoke(command, ["--prediction-type", "flow_prediction"])
    assert result.exit_code == 0, result.output
    assert (result.stderr, caplog.messages) == ("", [])
    lines = result.output.splitlines()
    assert lines[0] == "flow_prediction (schedule flow); samples in 10 steps"
    assert lines[2].split()[:5] == ["exact", "1.0000", "0.5000", "0.4308", "0.3865"]
    assert [line.split()[0] for line in lines[3:8]] == ["uniform", "min_snr", "debiased", "p2", "edm"]
    assert lines[-1].startswith("all within 2%")


def test_the_command_fails_and_names_the_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, patch = WRONG["flow from noise to image"]
    patch(monkeypatch)
    monkeypatch.setattr("hookdiff_selftest.gaussian.WEIGHTINGS", ("uniform",))
    result = CliRunner().invoke(command, ["--prediction-type", "flow_prediction"])
    assert result.exit_code == 1
    assert "FAILED  flow_prediction (schedule flow), weighting uniform: loss is" in result.output


def test_a_nan_is_within_no_tolerance() -> None:
    for name in ("loss", "mean"):
        assert not Check(EPSILON, "uniform", name, math.nan, 1.0).passed


def test_an_unknown_prediction_is_refused_with_the_nearest() -> None:
    result = CliRunner().invoke(command, ["--prediction-type", "v_predicton"])
    assert "did you mean 'v_prediction'?" in str(result.exception)
