from itertools import product
from math import sqrt

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff import Batch
from hookdiff.diffusion import EDM, P2, VP, Debiased, Diffusion, EDMWeighting, MinSNR, UniformWeighting, Weighting
from hookdiff.diffusion.prediction import EDMPrediction, Prediction, noise_from_x0
from hookdiff.diffusion.schedules import NoiseSchedule
from tests.conftest import check_facts
from tests.diffusion.conftest import PREDICTIONS, seeded

SCHEDULE = VP("linear").tables
ALPHA, SIGMA = SCHEDULE.sqrt_alphas_cumprod, SCHEDULE.sqrt_one_minus_alphas_cumprod
rates = st.floats(0.01, 3)
weightings = st.sampled_from([name for name in Weighting.known if name != "uniform"])


def linear(weighting: Weighting, prediction: str) -> Tensor:
    """Return the weights at all timesteps of the linear schedule, in float64."""
    return weighting.weights(Prediction.of(prediction), ALPHA, SIGMA)


@pytest.mark.parametrize(
    ("timestep", "epsilon", "v_prediction", "sample"),
    [
        (0, 0.000500050005, 0.0005, 5),
        (99, 0.5740232504, 0.5149092716, 5),
        (249, 1, 0.5240853738, 1.101217204),
        (499, 1, 0.07858724288, 0.08528994446),
        (999, 1, 4.035829765e-05, 4.035992651e-05),
    ],
)
def test_min_snr(timestep: int, epsilon: float, v_prediction: float, sample: float) -> None:
    for name, expected in (("epsilon", epsilon), ("v_prediction", v_prediction), ("sample", sample)):
        assert float(linear(MinSNR(), name)[timestep]) == pytest.approx(expected, rel=1e-9)


@given(st.floats(0.1, 50))
def test_min_snr_is_the_formula_of_the_paper(gamma: float) -> None:
    snr = SCHEDULE.snr
    least = snr.clamp(max=gamma)
    for name, expected in (("sample", least), ("epsilon", least / snr), ("v_prediction", least / (snr + 1))):
        torch.testing.assert_close(linear(MinSNR(gamma), name), expected, rtol=1e-9, atol=0)


def test_debiased() -> None:
    weights = linear(Debiased(), "epsilon")[[0, 499, 999]].tolist()
    assert weights == pytest.approx([0.0316227766, 3.424136619, 157.4072808], rel=1e-9)
    expected = SCHEDULE.snr.clamp(max=1000).rsqrt()
    torch.testing.assert_close(linear(Debiased(), "epsilon"), expected, rtol=1e-9, atol=0)


def test_p2() -> None:
    weights = linear(P2(), "epsilon")[[0, 499, 999]].tolist()
    assert weights == pytest.approx([0.0001, 0.9214127571, 0.9999596417], rel=1e-9)
    expected = (0.5 + SCHEDULE.snr) ** -0.7
    torch.testing.assert_close(linear(P2(k=0.5, gamma=0.7), "epsilon"), expected, rtol=1e-9, atol=0)
    assert torch.equal(linear(P2(gamma=0.0), "epsilon"), torch.ones(1000, dtype=torch.float64))


@given(weightings, rates, rates, st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3))
def test_a_weighting_gives_the_same_loss_for_every_prediction(
    name: str, alpha: float, sigma: float, x0: float, guess: float, x_t: float
) -> None:
    one = torch.ones((), dtype=torch.float64)
    losses = []
    for kind in map(Prediction.of, PREDICTIONS):

        def output(image: float, kind: Prediction = kind) -> Tensor:
            return kind.target(image * one, noise_from_x0(x_t * one, image * one, alpha, sigma), alpha, sigma)

        weight = Weighting.of(name).weights(kind, alpha * one, sigma * one)
        losses.append(float(weight * (output(x0) - output(guess)) ** 2))
    snr = (alpha / sigma) ** 2
    on_x0 = {
        "min_snr": min(snr, 5),
        "debiased": snr / sqrt(min(snr, 1000)),
        "p2": snr / (1 + snr),
        "edm": snr + 4,  # the signal-to-noise ratio plus 1 / sigma_data²
    }
    assert losses == pytest.approx([losses[1]] * 5, rel=1e-6, abs=1e-9)
    assert losses[1] == pytest.approx(on_x0[name] * (x0 - guess) ** 2, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(1e-5, 0.3), min_size=1, max_size=30), weightings, st.sampled_from(PREDICTIONS[1:]))
def test_weights_are_finite_on_random_tables(betas: list[float], name: str, prediction: str) -> None:
    table = NoiseSchedule([*betas, 1.0])  # the last beta leaves nothing of the image
    for dtype in (torch.float32, torch.float64):
        alpha = table.sqrt_alphas_cumprod.to(dtype)
        sigma = table.sqrt_one_minus_alphas_cumprod.to(dtype)
        weights = Weighting.of(name).weights(Prediction.of(prediction), alpha, sigma)
        assert weights.dtype == dtype
        assert weights.shape == alpha.shape
        assert weights.isfinite().all()
        assert (weights >= 0).all()


@pytest.mark.parametrize(("name", "prediction"), list(product(Weighting.known, PREDICTIONS)))
def test_weights_at_pure_noise(name: str, prediction: str) -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    weight = float(Weighting.of(name).weights(Prediction.of(prediction), zero, one))
    # for sigma_data = 0.5 the edm weight at pure noise is 4 on x0, and a quarter of that on the edm output
    of_x0 = {"min_snr": 0.0, "debiased": 0.0, "p2": 0.0, "edm": 4.0}
    if name == "uniform" or (prediction == "epsilon" and name != "edm"):
        assert weight == 1  # the formula is 0 / 0 for the noise
    elif prediction == "epsilon":
        assert weight == torch.inf  # any error in the noise is an infinite error in x0
    else:
        assert weight == (of_x0[name] / 4 if prediction == "edm" else of_x0[name])


@pytest.mark.parametrize(
    ("prediction", "weighting", "expected"),
    [
        ("sample", EDMWeighting(), 0.5),
        (EDMPrediction(0.2), EDMWeighting(), 0.2),
        (EDMPrediction(0.2), EDMWeighting(0.3), 0.3),
        ("sample", EDMWeighting(0.3), 0.3),
    ],
)
def test_the_edm_weighting_defaults_to_the_sigma_data_of_the_prediction(
    prediction: Prediction | str, weighting: EDMWeighting, expected: float
) -> None:
    assert Diffusion("edm", prediction, weighting).weighting == EDMWeighting(expected)


def test_a_weighting_of_0_where_sampling_starts_is_remarked_on() -> None:
    """Expect a remark exactly if sampling starts from pure noise and the weight there is 0."""
    vanishing = {"min_snr", "p2", "debiased"}
    zero_snr = [VP(rescale_betas_zero_snr=True), VP("cosine", 20, True), "flow"]
    for process, name, prediction in product([*zero_snr, VP(), EDM()], Weighting.known, PREDICTIONS[1:]):
        remarks = Diffusion(process, prediction, name).remarks()
        assert len(remarks) == (name in vanishing and process in zero_snr), (process, name, prediction)
        for remark in remarks:
            check_facts(remark, "diffusion.weighting", f"'{name}'", "'uniform'", "'edm'")
    assert Diffusion("flow", "sample", MinSNR(1e6)).remarks()  # for any gamma


class OwnWeighting(UniformWeighting):
    """A subclass of the uniform weighting."""

    def weights(self, prediction: Prediction, alpha: Tensor, sigma: Tensor) -> Tensor:
        return 3 * super().weights(prediction, alpha, sigma)


def test_a_subclass_of_the_uniform_weighting_is_applied() -> None:
    batch = Diffusion().draw(Batch(torch.zeros(4, 1, 2, 2)), seeded())
    one, three = (
        Diffusion(weighting=weighting)(lambda x, t: torch.zeros_like(x), batch).loss
        for weighting in ("uniform", OwnWeighting())
    )
    assert float(three) == pytest.approx(3 * float(one), rel=1e-6)
