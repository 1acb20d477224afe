from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hookdiff.diffusion import (
    PREDICTION_TYPES,
    SCHEDULES,
    Diffusion,
    Epsilon,
    Sampling,
    ddim_step,
    ddpm_step,
    sampling_timesteps,
)

Net = Callable[[Tensor, Tensor], Tensor]
DIFFUSION = Diffusion()
LEVELS = DIFFUSION.noise_schedule.alphas_cumprod.tolist()
levels = st.floats(1e-6, 0.9999)


def gaussian_x0_and_noise(x: Tensor, level: float, mu: float, s: float) -> tuple[Tensor, Tensor]:
    """What the best possible network sees in x_t, for data from N(mu, s²)."""
    y = (x - sqrt(level) * mu) / (level * s**2 + 1 - level)
    return mu + sqrt(level) * s**2 * y, sqrt(1 - level) * y


def gaussian_net(diffusion: Diffusion, mu: float, s: float) -> Net:
    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        level = float(diffusion.noise_schedule.alphas_cumprod[timesteps[0]])
        x0, noise = gaussian_x0_and_noise(x, level, mu, s)
        return diffusion.parametrization.target(x0, noise, sqrt(level), sqrt(1 - level))

    return net


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def affine_map(sampling: Sampling, diffusion: Diffusion, mu: float, s: float) -> tuple[float, float]:
    """Mean and standard deviation of the samples for x_T from N(0, 1): the images of 0 and 1 say it all."""
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    net = gaussian_net(diffusion, mu, s)
    out = sampling.sample(net, diffusion, (1, 1, 1), generators(0, 1), "cpu", torch.float64, noise=ends)
    return float(out[0]), float(out[1] - out[0])


@pytest.mark.parametrize("prediction_type", sorted(PREDICTION_TYPES))
@pytest.mark.parametrize(
    ("steps", "spacing", "expected"),
    [
        (1000, "trailing", 0.998124293998),
        (1000, "leading", 0.998124293998),
        (100, "trailing", 0.981581786758),
        (50, "trailing", 0.963550983718),
        (50, "leading", 0.964079271455),
        (10, "trailing", 0.829369234813),
    ],
)
def test_ddim_std(prediction_type: str, steps: int, spacing: str, expected: float) -> None:
    sampling = Sampling(steps=steps, spacing=spacing, clip_sample=False)
    _, std = affine_map(sampling, Diffusion(prediction_type=prediction_type), mu=0, s=1)
    assert std == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("steps", "expected"), [(1000, 1.9936663003), (50, 1.99401052914)])
def test_ddim_mean(steps: int, expected: float) -> None:
    mean, _ = affine_map(Sampling(steps=steps, clip_sample=False), DIFFUSION, mu=2, s=0.5)
    assert mean == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("num", "expected"),
    [(10, 0.883485183679), (50, 0.975623943329), (100, 0.98773828221)],
)
def test_ddim_in_equal_angles(num: int, expected: float) -> None:
    x = torch.ones((), dtype=torch.float64)
    angles = torch.linspace(torch.pi / 2, 0, num + 1, dtype=torch.float64)
    steps = [*angles.cos().square().tolist()[:-1], 1.0]
    for level, level_prev in pairwise(steps):
        x, _ = ddim_step(*gaussian_x0_and_noise(x, level, mu=0, s=1), level, level_prev)
    assert float(x) == pytest.approx(expected, rel=1e-9)


def test_ddim_trace() -> None:
    x = torch.ones((), dtype=torch.float64)
    trace, steps = [], [LEVELS[999], LEVELS[499], LEVELS[0], 1.0]
    for level, level_prev in pairwise(steps):
        x, std = ddim_step(*gaussian_x0_and_noise(x, level, mu=2, s=0.5), level, level_prev)
        trace.append(float(x))
        assert std == 0
    assert trace == pytest.approx([1.50882377334, 2.08017986341, 2.08025177628], rel=1e-9)


def test_ddim_single_step() -> None:
    x_t, eps = torch.tensor([0.25, -0.7], dtype=torch.float64)
    x0, noise = Epsilon().x0_and_noise(eps, x_t, sqrt(LEVELS[999]), sqrt(1 - LEVELS[999]))
    x_prev, _ = ddim_step(x0, noise, LEVELS[999], LEVELS[499])
    assert float(x0) == pytest.approx(149.53771088, rel=1e-9)
    assert float(x_prev) == pytest.approx(41.2485972688, rel=1e-9)


@pytest.mark.parametrize(("t_prev", "expected"), [(998, 0.141421297995), (979, 0.574284350785)])
def test_ddim_sigma(t_prev: int, expected: float) -> None:
    zero = torch.zeros(())
    _, std = ddim_step(zero, zero, LEVELS[999], LEVELS[t_prev], eta=1)
    assert std == pytest.approx(expected, rel=1e-9)
    assert ddim_step(zero, zero, LEVELS[999], LEVELS[t_prev], eta=0.5)[1] == pytest.approx(std / 2)


@pytest.mark.parametrize(("variance", "expected"), [("fixed_small", 0.991067376352), ("fixed_large", 0.9999)])
def test_ddpm_variance(variance: str, expected: float) -> None:
    ends, total = torch.tensor([0.0, 1.0], dtype=torch.float64), 1.0
    for level, level_prev in zip(LEVELS[::-1], [*LEVELS[-2::-1], 1.0], strict=True):
        x0, _ = gaussian_x0_and_noise(ends, level, mu=0, s=1)
        mean, std = ddpm_step(ends, x0, level, level_prev, variance)
        total = float(mean[1] - mean[0]) ** 2 * total + std**2
    assert total == pytest.approx(expected, rel=1e-9)


def test_ddpm_steps_are_the_posterior() -> None:
    schedule = DIFFUSION.noise_schedule
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for t in (1, 500, 999):
        coef1, std = ddpm_step(zero, one, LEVELS[t], LEVELS[t - 1])
        coef2, large = ddpm_step(one, zero, LEVELS[t], LEVELS[t - 1], "fixed_large")
        assert float(coef1) == pytest.approx(float(schedule.posterior_mean_coef1[t]), rel=1e-9)
        assert float(coef2) == pytest.approx(float(schedule.posterior_mean_coef2[t]), rel=1e-9)
        assert std**2 == pytest.approx(float(schedule.posterior_variance[t]), rel=1e-9)
        assert large**2 == pytest.approx(float(schedule.betas[t]), rel=1e-9)


@given(st.floats(-3, 3), st.floats(-3, 3), st.lists(levels, min_size=2, max_size=2, unique=True))
@settings(deadline=None)
def test_ddim_with_eta_1_is_ddpm(image: float, eps: float, both: list[float]) -> None:
    """Song et al. 2020, section 4.1; between any two timesteps."""
    level, level_prev = sorted(both)
    x0, noise = torch.tensor([image, eps], dtype=torch.float64)
    x_t = sqrt(level) * x0 + sqrt(1 - level) * noise
    mean, std = ddim_step(x0, noise, level, level_prev, eta=1)
    expected_mean, expected_std = ddpm_step(x_t, x0, level, level_prev)
    assert float(mean) == pytest.approx(float(expected_mean), abs=1e-7)
    assert std == pytest.approx(expected_std, rel=1e-9)


@given(levels, st.floats(0, 1), st.sampled_from(["fixed_small", "fixed_large"]))
@settings(deadline=None)
def test_last_step_is_the_predicted_image(level: float, eta: float, variance: str) -> None:
    x0, other = torch.tensor([0.3, -2.0])
    for x_prev, std in (ddim_step(x0, other, level, 1.0, eta), ddpm_step(other, x0, level, 1.0, variance)):
        assert x_prev == x0
        assert std == 0


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_ddpm_samples_are_gaussian_like_the_data(variance: str) -> None:
    sampling = Sampling(sampler="ddpm", steps=1000, variance=variance, clip_sample=False)
    images = sampling.sample(gaussian_net(DIFFUSION, 2, 0.5), DIFFUSION, (1, 64, 64), generators(0, 1), "cpu")
    assert float(images.mean()) == pytest.approx(2, abs=0.03)
    assert float(images.std()) == pytest.approx(0.5, abs=0.02)


variances = st.sampled_from(["fixed_small", "fixed_large"])
options = st.one_of(
    st.fixed_dictionaries({"sampler": st.just("ddim"), "eta": st.floats(0, 1)}),
    st.fixed_dictionaries({"sampler": st.just("ddpm"), "variance": variances}),
)
spacings = st.sampled_from(["trailing", "leading"])


@given(
    options,
    spacings,
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(sorted(PREDICTION_TYPES)),
    st.floats(-1, 1),
)
@settings(max_examples=40, deadline=None)
def test_constant_data_is_recovered(
    chosen: dict[str, Any], spacing: str, steps: int, clip: bool, schedule: str, kind: str, constant: float
) -> None:
    diffusion = Diffusion(schedule=schedule, timesteps=20, prediction_type=kind)
    sampling = Sampling(steps=steps, spacing=spacing, clip_sample=clip, **chosen)
    net = gaussian_net(diffusion, constant, s=0)
    images = sampling.sample(net, diffusion, (1, 2, 2), generators(0, 1), "cpu", torch.float64)
    torch.testing.assert_close(images, torch.full_like(images, constant), rtol=0, atol=1e-9)


def pointwise(x: Tensor, timesteps: Tensor) -> Tensor:
    return 0.9 * x - 0.1 * x * x * x + (timesteps.view(-1, 1, 1, 1) / 1000)


@given(options, st.booleans())
@settings(max_examples=20, deadline=None)
def test_sample_is_a_few_lines_of_torch(chosen: dict[str, Any], clip: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 4, 4, generator=generator)
    for level, level_prev in pairwise([LEVELS[999], LEVELS[666], LEVELS[332], 1.0]):
        x0 = (x - sqrt(1 - level) * 0.9 * x) / sqrt(level)
        x0 = x0.clamp(-1, 1) if clip else x0
        noise = (x - sqrt(level) * x0) / sqrt(1 - level)
        if chosen["sampler"] == "ddim":
            mean, std = ddim_step(x0, noise, level, level_prev, chosen["eta"])
        else:
            mean, std = ddpm_step(x, x0, level, level_prev, chosen["variance"])
        x = mean + std * torch.randn(1, 4, 4, generator=generator)
    sampling = Sampling(steps=3, clip_sample=clip, **chosen)
    images = sampling.sample(lambda x, t: 0.9 * x, DIFFUSION, (1, 4, 4), generators(5), "cpu")
    torch.testing.assert_close(images[0], x, rtol=1e-4, atol=1e-4)


@given(options, st.permutations(range(5)), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_image_is_independent_of_its_batch(
    chosen: dict[str, Any],
    order: list[int],
    num: int,
    batch_size: int,
) -> None:
    def sample(seeds: list[int], batch_size: int = 256) -> Tensor:
        return Sampling(steps=4, batch_size=batch_size, **chosen).sample(
            pointwise, DIFFUSION, (3, 5, 5), generators(*seeds), "cpu"
        )

    expected = torch.cat([sample([seed]) for seed in order[:num]])
    assert torch.equal(sample(order[:num], batch_size), expected)


def test_image_is_independent_of_its_batch_up_to_the_rounding_of_the_network() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1)
    sampling = Sampling(sampler="ddpm", steps=10)

    def sample(*seeds: int) -> Tensor:
        return sampling.sample(lambda x, t: conv(x), DIFFUSION, (3, 8, 8), generators(*seeds), "cpu")

    torch.testing.assert_close(sample(0, 1, 2, 3, 4)[3:4], sample(3), rtol=1e-4, atol=1e-4)


def test_same_generators_same_images() -> None:
    sampling = Sampling(sampler="ddpm", steps=10)
    runs = [sampling.sample(pointwise, DIFFUSION, (3, 4, 4), generators(1, 2), "cpu") for _ in range(2)]
    assert torch.equal(*runs)
    assert not torch.equal(runs[0][0], runs[0][1])


def test_noise_can_be_given() -> None:
    sampling, (generator,) = Sampling(steps=5), generators(7)
    before = generator.get_state()
    x_t = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    given_noise = sampling.sample(pointwise, DIFFUSION, (3, 4, 4), [generator], "cpu", noise=x_t)
    assert torch.equal(generator.get_state(), before)  # eta = 0 needs no more
    assert torch.equal(given_noise, sampling.sample(pointwise, DIFFUSION, (3, 4, 4), generators(3), "cpu"))
    with pytest.raises(ValueError, match=r"noise has shape \(2, 3, 4, 4\), expected \(1, 3, 4, 4\)"):
        sampling.sample(pointwise, DIFFUSION, (3, 4, 4), [generator], "cpu", noise=x_t.expand(2, 3, 4, 4))


def test_clipping_keeps_image_and_noise_consistent() -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)  # says that x_t is all image: far too bright at the first step

    sampling = Sampling(steps=2)
    images = sampling.sample(net, DIFFUSION, (1, 4, 4), generators(0), "cpu")
    level, level_prev = LEVELS[999], LEVELS[499]
    x0 = (seen[0] / sqrt(level)).clamp(-1, 1)
    noise = (seen[0] - sqrt(level) * x0) / sqrt(1 - level)
    torch.testing.assert_close(seen[1], sqrt(level_prev) * x0 + sqrt(1 - level_prev) * noise)
    assert images.abs().max() == 1  # and not a rounding more
    unclipped = Sampling(steps=2, clip_sample=False).sample(net, DIFFUSION, (1, 4, 4), generators(0), "cpu")
    assert unclipped.abs().max() > 10


def test_dtype_changes_only_the_precision() -> None:
    sampling = Sampling(sampler="ddpm", steps=10)
    single, double = (
        sampling.sample(pointwise, DIFFUSION, (1, 4, 4), generators(0, 1), "cpu", dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-4)
    torch.set_default_dtype(torch.float64)
    try:
        again = sampling.sample(pointwise, DIFFUSION, (1, 4, 4), generators(0, 1), "cpu", torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(again, single)
    with pytest.raises(ValueError, match=r"torch.bfloat16 would round small steps away"):
        sampling.sample(pointwise, DIFFUSION, (1, 4, 4), generators(0), "cpu", torch.bfloat16)


def test_the_network_sees_int64_timesteps_and_may_answer_in_bfloat16() -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(timesteps)
        return x.bfloat16()

    sampling = Sampling(steps=4, clip_sample=False)
    images = sampling.sample(net, DIFFUSION, (1, 4, 4), generators(0, 1), "cpu")
    assert images.dtype == torch.float32
    assert [t.tolist() for t in seen] == [[t, t] for t in (999, 749, 499, 249)]
    assert {t.dtype for t in seen} == {torch.int64}
    rounded = sampling.sample(lambda x, t: net(x, t).float(), DIFFUSION, (1, 4, 4), generators(0, 1), "cpu")
    assert torch.equal(images, rounded)  # only the answer is, not the arithmetic


def test_network_can_be_trained_afterwards() -> None:
    conv = nn.Conv2d(1, 1, 1)
    kept: dict[str, Tensor] = {}

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        if "positions" not in kept:
            kept["positions"] = torch.linspace(0, 1, 4)
        output: Tensor = conv(x) * kept["positions"]
        return output

    images = Sampling(steps=2).sample(net, DIFFUSION, (1, 4, 4), generators(0), "cpu")
    assert not images.requires_grad
    net(images, torch.zeros(1)).sum().backward()  # would fail had the table been made in inference mode
    assert conv.weight.grad is not None


def test_no_generators_no_images() -> None:
    assert Sampling().sample(pointwise, DIFFUSION, (3, 4, 4), [], "cpu").shape == (0, 3, 4, 4)


def test_spacings() -> None:
    assert sampling_timesteps(1000, 50) == list(range(999, 0, -20))
    assert sampling_timesteps(1000, 50, "leading") == list(range(980, -1, -20))
    assert sampling_timesteps(1000, 3) == [999, 666, 332]
    with pytest.raises(ValueError, match="'quadratic'; known: trailing, leading"):
        sampling_timesteps(1000, 50, "quadratic")


@given(st.integers(1, 1500), spacings, st.data())
@settings(deadline=None)
def test_timesteps_are_distinct_and_in_range(timesteps: int, spacing: str, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, timesteps))
    visited = sampling_timesteps(timesteps, steps, spacing)
    assert len(visited) == steps
    assert visited == sorted(set(visited), reverse=True)
    assert visited[0] == timesteps - 1 if spacing == "trailing" else visited[-1] == 0
    assert 0 <= visited[-1] <= visited[0] < timesteps


def test_more_steps_than_timesteps_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sampling.steps = 50 is more than diffusion.timesteps = 10"):
        Sampling().sample(pointwise, Diffusion(timesteps=10), (3, 4, 4), generators(0), "cpu")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"sampler": "euler"}, "'sampler' must be one of ddim, ddpm, not 'euler'"),
        ({"steps": 0}, "'steps' must be >= 1: 0"),
        ({"spacing": "linspace"}, "'spacing' must be one of trailing, leading"),
        ({"eta": 1.5}, "'eta' must be <= 1: 1.5"),
        ({"sampler": "ddpm", "variance": "learned"}, "'variance' must be one of fixed_small, fixed_large"),
        ({"batch_size": 0}, "'batch_size' must be >= 1: 0"),
        ({"sampler": "ddpm", "eta": 0.5}, "'eta' is an option of sampler 'ddim', not 'ddpm'"),
        ({"variance": "fixed_large"}, "'variance' is an option of sampler 'ddpm', not 'ddim'"),
    ],
)
def test_bad_options_name_the_key(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**chosen)
