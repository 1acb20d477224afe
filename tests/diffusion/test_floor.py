import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff.diffusion import VP, Diffusion
from hookdiff_selftest.gaussian import CASES, STD, Case, exact_loss, training_levels
from tests.diffusion.conftest import PAIRS, PREDICTIONS, PROCESSES


def times_of(diffusion: Diffusion, num: int) -> Tensor:
    """Return `num` times over the whole range of the process."""
    return diffusion.process.from_fraction((torch.arange(num) + 0.5) / num)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mean_floor_is_the_least_loss_in_closed_form(case: Case) -> None:
    # `selftest gaussian` derives these numbers without hookdiff.diffusion, and trains networks down to them.
    diffusion, (_, sigma) = case.diffusion("uniform"), training_levels(case)
    levels = {"linear": torch.arange(1000), "flow": sigma, "edm": sigma}
    floor = diffusion.floor(levels[case.schedule], STD**2)
    assert float(floor.double().mean()) == pytest.approx(exact_loss(case, "uniform"), rel=1e-4)


@pytest.mark.parametrize(("process", "prediction"), PAIRS)
def test_the_floor_is_the_error_of_the_best_linear_fit(process: str, prediction: str) -> None:
    diffusion = Diffusion(PROCESSES[process], prediction)
    generator, variance = torch.Generator().manual_seed(0), 0.3
    for time in times_of(diffusion, 3):
        alpha, sigma, _ = diffusion.process.rates(time[None], 1)
        x0, noise = torch.randn(2, 100_000, generator=generator).double()
        x0 = 0.2 + variance**0.5 * x0
        x_t, target = alpha * x0 + sigma * noise, diffusion.prediction.target(x0, noise, alpha, sigma)
        left = target.var() - torch.cov(torch.stack((x_t, target)))[0, 1] ** 2 / x_t.var()
        # the Monte Carlo error of a difference between two numbers that may be much larger
        tolerance = 0.01 * float(left) + 1e-3 * float(target.var())
        assert float(diffusion.floor(time[None], variance)) == pytest.approx(float(left), abs=tolerance)
        of_target = float(diffusion.target_variance(time[None], variance))
        assert of_target == pytest.approx(float(target.var()), rel=0.02)


@given(st.sampled_from(PAIRS), st.floats(0.001, 100), st.floats(1.1, 10))
def test_the_floor_grows_with_the_variance_and_never_exceeds_the_target_variance(
    pair: tuple[str, str], variance: float, factor: float
) -> None:
    diffusion = Diffusion(PROCESSES[pair[0]], pair[1])
    times = times_of(diffusion, 50)
    floor = diffusion.floor(times, variance)
    assert floor.shape == (50,)
    assert floor.isfinite().all()
    assert (floor >= 0).all()
    assert (floor <= diffusion.floor(times, factor * variance) * (1 + 1e-5)).all()
    assert (floor <= diffusion.target_variance(times, variance) * (1 + 1e-4)).all()


@pytest.mark.parametrize("prediction", PREDICTIONS[1:])
def test_the_floor_at_pure_noise(prediction: str) -> None:
    diffusion = Diffusion(VP(rescale_betas_zero_snr=True), prediction)
    last = torch.tensor([999])
    floor, whole = diffusion.floor(last, 0.3), diffusion.target_variance(last, 0.3)
    left = whole - 1 if prediction == "flow_prediction" else whole  # the network sees the noise
    torch.testing.assert_close(floor, left)
