from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import exp, inf, sqrt
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hookdiff.diffusion import (
    IMAGE,
    PREDICTION_TYPES,
    SAMPLERS,
    SCHEDULES,
    Diffusion,
    Sampling,
    karras_sigmas,
    make_schedule,
    thresholded,
)

LINEAR = Diffusion()
LEVELS = make_schedule("linear", 1000).alphas_cumprod.tolist()
WITHOUT_EPSILON = PREDICTION_TYPES[1:]


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def affine_map(sampling: Sampling, net: Any) -> tuple[float, float]:
    """Mean and standard deviation of the samples for noise from N(0, 1): the images of 0 and 1 say it all."""
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    out = sampling.sample(net, net.diffusion, (1, 1, 1), generators(0, 1), "cpu", torch.float64, noise=ends)
    return float(out[0]), float(out[1] - out[0])


# Gaussian data: the best network is known, and what each sampler makes of it


@pytest.mark.parametrize("sampler", ["ddim", "euler"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
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
def test_ddim_std(
    gaussian: type, sampler: str, prediction_type: str, steps: int, spacing: str, expected: float
) -> None:
    sampling = Sampling(sampler=sampler, steps=steps, spacing=spacing, clip_sample=False)
    _, std = affine_map(sampling, gaussian(Diffusion(prediction_type=prediction_type)))
    assert std == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("steps", "expected"), [(1000, 1.9936663003), (50, 1.99401052914)])
def test_ddim_mean(gaussian: type, steps: int, expected: float) -> None:
    mean, _ = affine_map(Sampling(steps=steps, clip_sample=False), gaussian(LINEAR, mu=2, s=0.5))
    assert mean == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize(
    ("steps", "euler_half", "heun_half", "euler_one", "heun_one"),
    [
        (10, 0.365213065063, 0.609798000799, 0.75079986263, 1.17543254599),
        (18, 0.423031436408, 0.527624637001, 0.859455424636, 1.04472883983),
        (256, 0.494445157634, 0.50009542468, 0.989878102251, 1.00009886615),
    ],
)
def test_std_of_edm_samples(
    gaussian: type,
    prediction_type: str,
    steps: int,
    euler_half: float,
    heun_half: float,
    euler_one: float,
    heun_one: float,
) -> None:
    diffusion = Diffusion(schedule="edm", prediction_type=prediction_type)
    wanted = (("euler", 0.5, euler_half), ("heun", 0.5, heun_half), ("euler", 1, euler_one), ("heun", 1, heun_one))
    for sampler, s, expected in wanted:
        sampling = Sampling(sampler=sampler, steps=steps, clip_sample=False)
        assert affine_map(sampling, gaussian(diffusion, s=s))[1] == pytest.approx(expected, rel=1e-9)


def test_order_of_the_edm_samplers(gaussian: type) -> None:
    diffusion = Diffusion(schedule="edm")
    for s, exact in ((0.5, 0.499990234661), (1.0, 0.999921884154)):
        assert s * 80 / sqrt(s**2 + 80**2) == pytest.approx(exact, rel=1e-9)  # the factor of the exact ODE, times 80
        for sampler, low, high in (("euler", 3.5, 4.5), ("heun", 15, 19)):
            errors = [
                affine_map(Sampling(sampler=sampler, steps=steps, clip_sample=False), gaussian(diffusion, s=s))[1]
                - exact
                for steps in (64, 256)
            ]
            assert low < errors[0] / errors[1] < high


@pytest.mark.parametrize("s", [0.5, 1.0, 2.0])
def test_second_order_on_timesteps(gaussian: type, s: float) -> None:
    """In twice the steps the result is four times as near to that of the exact probability flow."""
    first, last = (LEVELS[t] * s**2 + 1 - LEVELS[t] for t in (999, 0))  # variances of x
    exact = s / sqrt(first)
    assert exact == pytest.approx({0.5: 0.500007567353, 1.0: 1.0, 2.0: 1.9998789361}[s], rel=1e-9)
    flow = sqrt(LEVELS[0]) * s**2 / sqrt(last * first)  # the last step, from timestep 0, is of first order
    assert flow == pytest.approx(exact, abs=2e-4)
    for sampler in ("heun", "dpmpp_2m"):
        runs = (
            Sampling(sampler=sampler, steps=steps, spacing="karras", clip_sample=False) for steps in (100, 200, 400)
        )
        errors = [affine_map(sampling, gaussian(LINEAR, s=s))[1] - flow for sampling in runs]
        assert 3.5 < errors[0] / errors[1] < 4.5
        assert 3.7 < errors[1] / errors[2] < 4.3


@pytest.mark.parametrize("prediction_type", WITHOUT_EPSILON)
@pytest.mark.parametrize(
    ("steps", "euler_one", "heun_one", "euler_half", "heun_half"),
    [(1, 0, 0.5, 0, 0.5), (2, 0.5, 0.9375, 0.2, 0.48), (10, 0.8789843785, 0.9993349539, 0.4307826049, 0.5017199122)],
)
def test_std_of_flow_samples(
    gaussian: type,
    prediction_type: str,
    steps: int,
    euler_one: float,
    heun_one: float,
    euler_half: float,
    heun_half: float,
) -> None:
    diffusion = Diffusion(schedule="flow", prediction_type=prediction_type)
    wanted = (("euler", 1, euler_one), ("heun", 1, heun_one), ("euler", 0.5, euler_half), ("heun", 0.5, heun_half))
    for sampler, s, expected in wanted:
        if sampler == "heun" and prediction_type == "sample":
            continue  # an image tells no noise at t = 0, so that the last step is Euler's
        mean, std = affine_map(
            Sampling(sampler=sampler, steps=steps, clip_sample=False), gaussian(diffusion, mu=2, s=s)
        )
        assert std == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert mean == pytest.approx(2, rel=1e-9)


def test_the_flow_is_exact_in_the_limit(gaussian: type) -> None:
    net = gaussian(Diffusion(schedule="flow"), mu=-1, s=0.3)
    mean, std = affine_map(Sampling(sampler="heun", steps=1000, clip_sample=False), net)
    assert mean == pytest.approx(-1, rel=1e-9)
    assert std == pytest.approx(0.3, rel=1e-5)


ancestral = [
    {"sampler": "ddpm"},
    {"sampler": "ddpm", "variance": "fixed_large"},
    {"sampler": "ddim", "eta": 1.0},
    {"sampler": "heun", "s_churn": 100.0, "s_tmax": 50.0, "spacing": "karras"},
]


@pytest.mark.parametrize("chosen", ancestral)
def test_samples_with_fresh_noise_are_like_the_data(gaussian: type, chosen: dict[str, Any]) -> None:
    sampling = Sampling(steps=600, clip_sample=False, **chosen)
    images = sampling.sample(gaussian(LINEAR, 2, 0.5), LINEAR, (1, 64, 64), generators(0, 1), "cpu")
    assert float(images.mean()) == pytest.approx(2, abs=0.03)
    assert float(images.std()) == pytest.approx(0.5, abs=0.02)


# Properties of all samplers

spacings = st.sampled_from(["trailing", "leading"])
churns = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(["euler", "heun"]),
        "s_churn": st.sampled_from([0.0, 3.0]),
        "s_tmax": st.sampled_from([2.0, inf]),
        "s_noise": st.sampled_from([1.0, 1.003]),
    }
)
options = st.one_of(
    st.fixed_dictionaries({"sampler": st.just("ddim"), "eta": st.floats(0, 1)}),
    st.fixed_dictionaries({"sampler": st.just("ddpm"), "variance": st.sampled_from(["fixed_small", "fixed_large"])}),
    st.just({"sampler": "dpmpp_2m"}),
    churns,
)


@st.composite
def objectives(draw: st.DrawFn, /, **options: Any) -> Diffusion:
    schedule, prediction_type = draw(st.sampled_from(SCHEDULES)), draw(st.sampled_from(PREDICTION_TYPES))
    if schedule not in ("flow", "edm"):
        options["timesteps"] = 20
        options["rescale_betas_zero_snr"] = prediction_type != "epsilon" and draw(st.booleans())
    elif schedule == "flow" and prediction_type == "epsilon":
        prediction_type = "v_prediction"
    return Diffusion(schedule=schedule, prediction_type=prediction_type, **options)


def pointwise(x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
    """A network whose result for an image does not depend on the others, to the bit."""
    shift = timesteps.view(-1, 1, 1, 1) / 1000
    return 0.9 * x / (1 + 0.1 * x * x) + (shift if labels is None else shift * (labels.view(-1, 1, 1, 1) + 2))


@given(objectives(), options, st.integers(1, 20), st.booleans(), st.floats(-1, 1))
@settings(max_examples=60)
def test_constant_data_is_recovered(
    gaussian: type, diffusion: Diffusion, chosen: dict[str, Any], steps: int, clip: bool, constant: float
) -> None:
    """Its trajectories are straight lines: whatever the sampler, every step stays on the line."""
    if diffusion.schedule == "flow" and chosen["sampler"] == "heun":
        chosen = {"sampler": "euler"}  # heun asks about the image itself, which knows no noise
    sampling = Sampling(steps=steps, clip_sample=clip, **chosen)
    net = gaussian(diffusion, constant, s=0)
    images = sampling.sample(net, diffusion, (1, 2, 2), generators(0, 1), "cpu", torch.float64)
    torch.testing.assert_close(images, torch.full_like(images, constant), rtol=0, atol=1e-8)


@given(objectives(), st.integers(1, 20), st.booleans(), st.sampled_from(["heun", "euler", "dpmpp_2m"]))
@settings(max_examples=60)
def test_all_agree_where_the_way_is_straight(
    gaussian: type, diffusion: Diffusion, steps: int, clip: bool, sampler: str
) -> None:
    if diffusion.schedule == "flow" and sampler == "heun":
        sampler = "euler"
    images = [
        Sampling(sampler=name, steps=steps, clip_sample=clip).sample(
            gaussian(diffusion, 0.3, s=0), diffusion, (1, 2, 2), generators(4), "cpu", torch.float64
        )
        for name in ("ddim", sampler)
    ]
    torch.testing.assert_close(images[0], images[1], rtol=0, atol=1e-8)


@given(objectives(), st.integers(1, 12), st.booleans())
def test_ddim_is_euler(diffusion: Diffusion, steps: int, clip: bool) -> None:
    one, other = (
        Sampling(sampler=name, steps=steps, clip_sample=clip).sample(
            pointwise, diffusion, (1, 3, 3), generators(0, 1), "cpu", torch.float64
        )
        for name in ("ddim", "euler")
    )
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(objectives(), st.integers(1, 12))
def test_ddim_with_eta_1_is_ddpm(diffusion: Diffusion, steps: int) -> None:
    one, other = (
        Sampling(steps=steps, **chosen).sample(pointwise, diffusion, (1, 3, 3), generators(0, 1), "cpu", torch.float64)
        for chosen in ({"eta": 1.0}, {"sampler": "ddpm"})
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@given(objectives())
def test_two_steps_of_dpmpp_are_two_of_ddim(diffusion: Diffusion) -> None:
    """The first has no step before it, and the last leads to the image."""
    one, other = (
        Sampling(sampler=name, steps=2, clip_sample=False).sample(
            pointwise, diffusion, (1, 3, 3), generators(0, 1), "cpu", torch.float64
        )
        for name in ("ddim", "dpmpp_2m")
    )
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(options, st.booleans())
def test_sample_is_a_few_lines_of_torch(chosen: dict[str, Any], clip: bool) -> None:
    if chosen["sampler"] not in ("ddim", "ddpm"):
        chosen = {"sampler": "ddim"}
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 4, 4, generator=generator)
    for a, a_next in pairwise([LEVELS[999], LEVELS[666], LEVELS[332], 1.0]):
        x0 = (x - sqrt(1 - a) * 0.9 * x) / sqrt(a)
        x0 = x0.clamp(-1, 1) if clip else x0
        noise = (x - sqrt(a) * x0) / sqrt(1 - a)
        beta = 1 - a / a_next
        small = beta * (1 - a_next) / (1 - a)
        if chosen["sampler"] == "ddim":
            variance = small * chosen.get("eta", 0.0) ** 2
            mean = sqrt(a_next) * x0 + sqrt(max(0.0, 1 - a_next - variance)) * noise
        else:
            mean = sqrt(a_next) * beta / (1 - a) * x0 + sqrt(1 - beta) * (1 - a_next) / (1 - a) * x
            variance = small if chosen["variance"] == "fixed_small" or a_next == 1 else beta
        x = mean + sqrt(variance) * torch.randn(1, 4, 4, generator=generator)
    sampling = Sampling(steps=3, clip_sample=clip, **chosen)
    images = sampling.sample(lambda x, t: 0.9 * x, LINEAR, (1, 4, 4), generators(5), "cpu")
    torch.testing.assert_close(images[0], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", ["euler", "heun"])
@given(st.floats(0.1, 30), st.floats(0, 1), st.floats(2, 100), st.floats(0.9, 1.1))
def test_churn_is_algorithm_2(sampler: str, churn: float, low: float, high: float, std: float) -> None:
    """Karras et al. 2022, with the network of `pointwise` as their D."""
    diffusion, steps = Diffusion(schedule="edm", prediction_type="sample"), 5

    def denoised(x: Tensor, sigma: float) -> Tensor:
        return pointwise(x, torch.tensor([sigma]).double().log() * 250)

    generator = torch.Generator().manual_seed(5)
    sigmas = [*karras_sigmas(steps, 0.002, 80.0), 0.0]
    x = torch.randn(1, 1, 4, 4, generator=generator).double() * 80
    for t, t_next in pairwise(sigmas):
        gamma = min(churn / steps, sqrt(2) - 1) if low <= t <= high else 0
        if gamma:
            fresh = torch.randn(1, 1, 4, 4, generator=generator).double()
            x = x + sqrt((t + gamma * t) ** 2 - t**2) * std * fresh
            t += gamma * t
        slope = (x - denoised(x, t)) / t
        end = x + (t_next - t) * slope
        if t_next and sampler == "heun":
            slope = (slope + (end - denoised(end, t_next)) / t_next) / 2
        x = x + (t_next - t) * slope
    sampling = Sampling(
        sampler=sampler, steps=steps, clip_sample=False, s_churn=churn, s_tmin=low, s_tmax=high, s_noise=std
    )
    images = sampling.sample(pointwise, diffusion, (1, 4, 4), generators(5), "cpu", torch.float64)
    torch.testing.assert_close(images, x, rtol=1e-6, atol=1e-6)


@given(
    objectives(conditional=True),
    options,
    st.sampled_from([1.0, 2.5]),
    st.booleans(),
    st.permutations(range(5)),
    st.integers(1, 5),
    st.integers(1, 6),
)
@settings(max_examples=60)
def test_image_is_independent_of_its_batch(
    diffusion: Diffusion,
    chosen: dict[str, Any],
    guidance_scale: float,
    thresholding: bool,
    order: list[int],
    num: int,
    batch_size: int,
) -> None:
    def sample(seeds: list[int], batch_size: int = 256) -> Tensor:
        sampling = Sampling(
            steps=4, batch_size=batch_size, guidance_scale=guidance_scale, thresholding=thresholding, **chosen
        )
        labels = torch.tensor(seeds)
        return sampling.sample(pointwise, diffusion, (3, 5, 5), generators(*seeds), "cpu", labels=labels)

    expected = torch.cat([sample([seed]) for seed in order[:num]])
    images = sample(order[:num], batch_size)
    assert images.isfinite().all()
    assert torch.equal(images, expected)


def test_image_is_independent_of_its_batch_up_to_the_rounding_of_the_network() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1)
    sampling = Sampling(sampler="ddpm", steps=10)

    def sample(*seeds: int) -> Tensor:
        return sampling.sample(lambda x, t: conv(x), LINEAR, (3, 8, 8), generators(*seeds), "cpu")

    torch.testing.assert_close(sample(0, 1, 2, 3, 4)[3:4], sample(3), rtol=1e-4, atol=1e-4)


@given(objectives(), options)
def test_same_generators_same_images(diffusion: Diffusion, chosen: dict[str, Any]) -> None:
    sampling = Sampling(steps=6, clip_sample=False, **chosen)  # or two images might both be all white
    runs = [sampling.sample(pointwise, diffusion, (3, 4, 4), generators(1, 2), "cpu") for _ in range(2)]
    assert torch.equal(*runs)
    assert not torch.equal(runs[0][0], runs[0][1])


@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_noise_can_be_given(schedule: str) -> None:
    sampling, diffusion, (generator,) = Sampling(steps=5), Diffusion(schedule=schedule), generators(7)
    before = generator.get_state()
    noise = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    given_noise = sampling.sample(pointwise, diffusion, (3, 4, 4), [generator], "cpu", noise=noise)
    assert torch.equal(generator.get_state(), before)  # eta = 0 needs no more
    assert torch.equal(given_noise, sampling.sample(pointwise, diffusion, (3, 4, 4), generators(3), "cpu"))
    with pytest.raises(ValueError, match=r"noise has shape \(2, 3, 4, 4\), expected \(1, 3, 4, 4\)"):
        sampling.sample(pointwise, diffusion, (3, 4, 4), [generator], "cpu", noise=noise.expand(2, 3, 4, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_without_a_trace_of_the_image_at_first_are_finite(schedule: str, sampler: str) -> None:
    zero_snr = schedule not in ("flow", "edm")
    for prediction_type in WITHOUT_EPSILON:
        diffusion = Diffusion(schedule=schedule, rescale_betas_zero_snr=zero_snr, prediction_type=prediction_type)
        for clip in (True, False):
            sampling = Sampling(sampler=sampler, steps=5, clip_sample=clip)
            images = sampling.sample(pointwise, diffusion, (1, 3, 3), generators(0, 1), "cpu")
            assert images.isfinite().all()
            assert not clip or images.abs().max() <= 1


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_no_value_is_read_on_the_host(schedule: str, sampler: str) -> None:
    diffusion = Diffusion(schedule=schedule, conditional=True, data_mean=0.1, data_std=(0.2, 0.3, 0.4))
    churn: dict[str, Any] = {"s_churn": 3.0} if sampler in ("euler", "heun") else {}
    sampling = Sampling(sampler=sampler, steps=3, guidance_scale=2.0, **churn)
    images = sampling.sample(
        pointwise, diffusion, (3, 4, 4), generators(0, 1), "meta", labels=torch.empty(2, dtype=torch.int64)
    )
    assert images.device.type == "meta"


# Clipping


def test_clipping_keeps_image_and_noise_consistent() -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)  # says that x_t is all image: far too bright at the first step

    sampling = Sampling(steps=2)
    images = sampling.sample(net, LINEAR, (1, 4, 4), generators(0), "cpu")
    now, after = LEVELS[999], LEVELS[499]
    x0 = (seen[0] / sqrt(now)).clamp(-1, 1)
    noise = (seen[0] - sqrt(now) * x0) / sqrt(1 - now)
    torch.testing.assert_close(seen[1], sqrt(after) * x0 + sqrt(1 - after) * noise)
    assert images.abs().max() == 1  # and not a rounding more
    unclipped = Sampling(steps=2, clip_sample=False).sample(net, LINEAR, (1, 4, 4), generators(0), "cpu")
    assert unclipped.abs().max() > 10


@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0.2, 5))
def test_thresholding_is_by_a_quantile_of_each_image(seed: int, ratio: float, scale: float) -> None:
    images = scale * torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for image, result in zip(images, thresholded(images, ratio), strict=True):
        sizes = sorted(image.abs().flatten().tolist())
        place = ratio * (len(sizes) - 1)  # linear between two sizes
        low = int(place)
        bound = sizes[low] + (place - low) * (sizes[min(low + 1, len(sizes) - 1)] - sizes[low])
        bound = max(bound, 1)
        torch.testing.assert_close(result, (image / bound).clamp(-1, 1), rtol=1e-9, atol=1e-12)


def test_thresholding_in_place_of_clipping() -> None:
    image = torch.linspace(-4, 4, 16).view(1, 1, 4, 4)
    for clip in (True, False):
        sampling = Sampling(steps=1, clip_sample=clip, thresholding=True, dynamic_thresholding_ratio=0.5)
        diffusion = Diffusion(prediction_type="sample")
        made = sampling.sample(lambda x, t: image.expand_as(x), diffusion, (1, 4, 4), generators(0), "cpu")
        torch.testing.assert_close(made, (image / image.abs().quantile(0.5)).clamp(-1, 1))


@given(st.floats(-1, 1), st.floats(0.05, 1), options, st.booleans(), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=60)
def test_samples_are_back_in_the_range_of_images(
    mean: float, std: float, chosen: dict[str, Any], thresholding: bool, dtype: torch.dtype
) -> None:
    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        return 100 * torch.sign(x)  # far too bright or dark, so that all pixels are clamped

    diffusion = Diffusion(schedule="flow", prediction_type="sample", data_mean=mean, data_std=std)
    sampling = Sampling(steps=4, thresholding=thresholding, **chosen)
    images = sampling.sample(net, diffusion, (3, 4, 4), generators(0, 1), "cpu", dtype)
    assert 0.999 < images.abs().max() <= 1  # and not a rounding more


@given(objectives(data_mean=(0.1, -0.2, 0.3), data_std=(0.2, 0.3, 0.4)), options)
def test_the_network_works_on_standardised_images(gaussian: type, diffusion: Diffusion, chosen: dict[str, Any]) -> None:
    """One that always sees 0.5 there makes 0.5 of the usual deviation from the usual mean."""
    if diffusion.schedule == "flow" and chosen["sampler"] == "heun":
        chosen = {"sampler": "euler"}
    sampling = Sampling(steps=4, **chosen)
    images = sampling.sample(gaussian(diffusion, 0.5, s=0), diffusion, (3, 2, 2), generators(0), "cpu", torch.float64)
    expected = torch.tensor([0.2, -0.05, 0.5], dtype=torch.float64).view(1, 3, 1, 1).expand_as(images)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("chosen", [{"data_mean": (0.0, 0.1)}, {"data_std": (1.0, 2.0)}])
def test_wrong_number_of_channels_is_an_error(chosen: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(chosen))} has 2 numbers for images of 3 channels"):
        Sampling(steps=1).sample(pointwise, Diffusion(**chosen), (3, 4, 4), generators(0), "cpu")


# What the network is told


def test_dtype_changes_only_the_precision() -> None:
    sampling = Sampling(sampler="ddpm", steps=10)
    single, double = (
        sampling.sample(pointwise, LINEAR, (1, 4, 4), generators(0, 1), "cpu", dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-4)
    torch.set_default_dtype(torch.float64)
    try:
        again = sampling.sample(pointwise, LINEAR, (1, 4, 4), generators(0, 1), "cpu", torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(again, single)
    with pytest.raises(ValueError, match=r"torch.bfloat16 would round small steps away"):
        sampling.sample(pointwise, LINEAR, (1, 4, 4), generators(0), "cpu", torch.bfloat16)


def test_the_network_sees_int64_timesteps_and_may_answer_in_bfloat16() -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(timesteps)
        return x.bfloat16()

    sampling = Sampling(steps=4, clip_sample=False)
    images = sampling.sample(net, LINEAR, (1, 4, 4), generators(0, 1), "cpu")
    assert images.dtype == torch.float32
    assert [t.tolist() for t in seen] == [[t, t] for t in (999, 749, 499, 249)]
    assert {t.dtype for t in seen} == {torch.int64}
    rounded = sampling.sample(lambda x, t: net(x, t).float(), LINEAR, (1, 4, 4), generators(0, 1), "cpu")
    assert torch.equal(images, rounded)  # only the answer is, not the arithmetic


@pytest.mark.parametrize(
    ("diffusion", "chosen", "expected"),
    [
        (Diffusion(schedule="flow"), {}, [1000, 750, 500, 250]),
        (Diffusion(schedule="flow", time_scale=1.0), {}, [1, 0.75, 0.5, 0.25]),
        (Diffusion(schedule="flow", time_shift=3.0), {}, [1000, 900, 750, 500]),
        (Diffusion(schedule="flow", time_shift=9.0), {"time_shift": 3.0}, [1000, 900, 750, 500]),
        (Diffusion(schedule="edm", sigma_min=1.0, sigma_max=exp(4)), {"rho": 1e6}, [1000, 2000 / 3, 1000 / 3, 0]),
        (Diffusion(timesteps=9), {"spacing": "leading"}, [6, 4, 2, 0]),
    ],
)
def test_times_told(diffusion: Diffusion, chosen: dict[str, Any], expected: list[float]) -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(timesteps)
        return x

    Sampling(steps=4, **chosen).sample(net, diffusion, (1, 2, 2), generators(0, 1), "cpu")
    assert [t[0].item() for t in seen] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert {t.dtype for t in seen} == {torch.int64 if diffusion.schedule == "linear" else torch.float32}
    assert all(t.shape == (2,) for t in seen)


def test_network_can_be_trained_afterwards() -> None:
    conv = nn.Conv2d(1, 1, 1)
    kept: dict[str, Tensor] = {}

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        if "positions" not in kept:
            kept["positions"] = torch.linspace(0, 1, 4)
        output: Tensor = conv(x) * kept["positions"]
        return output

    images = Sampling(steps=2).sample(net, LINEAR, (1, 4, 4), generators(0), "cpu")
    assert not images.requires_grad
    net(images, torch.zeros(1)).sum().backward()  # type: ignore[no-untyped-call]  # would fail after inference mode
    assert conv.weight.grad is not None


def test_no_generators_no_images() -> None:
    assert Sampling().sample(pointwise, LINEAR, (3, 4, 4), [], "cpu").shape == (0, 3, 4, 4)


# Labels and guidance

FLOW = Diffusion(schedule="flow", conditional=True)


def recorder(calls: list[Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A network that says 0.5 where it has a label and 0.2 where it has none."""

    def net(x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        calls.append(labels)
        return torch.where(labels == -1, 0.2, 0.5).view(-1, 1, 1, 1).expand_as(x)

    return net


@pytest.mark.parametrize(("scale", "expected"), [(7.5, 2.45), (1, 0.5), (0, 0.2), (2, 0.8)])
def test_guidance(scale: float, expected: float) -> None:
    calls: list[Tensor] = []
    sampling = Sampling(steps=1, guidance_scale=scale, clip_sample=False)
    noise, labels = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 4])
    images = sampling.sample(recorder(calls), FLOW, (1, 2, 2), generators(0, 1), "cpu", noise=noise, labels=labels)
    torch.testing.assert_close(noise - images, torch.full_like(noise, expected))  # of t = 1, what is left is u
    assert [call.tolist() for call in calls] == [[3, 4] if scale == 1 else [3, 4, -1, -1]]


@given(objectives(conditional=True), options)
def test_guidance_of_1_and_0_is_one_pass_alone(diffusion: Diffusion, chosen: dict[str, Any]) -> None:
    def sample(scale: float, *labels: int) -> Tensor:
        return Sampling(steps=4, guidance_scale=scale, clip_sample=False, **chosen).sample(
            pointwise, diffusion, (1, 3, 3), generators(0, 1), "cpu", labels=torch.tensor(labels)
        )

    conditional = sample(1.0, 3, 4)
    plain = evolve(diffusion, conditional=False)
    for k, label in enumerate((3, 4)):
        always = partial(pointwise, labels=torch.tensor([label]))
        alone = Sampling(steps=4, clip_sample=False, **chosen).sample(always, plain, (1, 3, 3), generators(k), "cpu")
        assert torch.equal(conditional[k : k + 1], alone)
    assert torch.equal(sample(0.0, 3, 4), sample(1.0, -1, -1))
    assert not torch.equal(conditional, sample(0.0, 3, 4))


def test_guidance_is_for_its_interval_alone() -> None:
    calls: list[Tensor] = []
    diffusion = Diffusion(schedule="edm", conditional=True)
    sampling = Sampling(steps=18, guidance_scale=3.0, guidance_interval=(0.28, 5.4))
    sampling.sample(recorder(calls), diffusion, (1, 2, 2), generators(0), "cpu", labels=torch.tensor([7]))
    sigmas = karras_sigmas(18, 0.002, 80.0)
    guided = [[7, -1] if 0.28 <= sigma <= 5.4 else [7] for sigma in sigmas]
    assert [call.tolist() for call in calls] == guided
    assert 3 < sum(call == [7, -1] for call in guided) < 10


def test_labels_are_told_to_conditional_networks_alone() -> None:
    calls: list[Tensor] = []
    Sampling(steps=2, batch_size=2).sample(
        recorder(calls), FLOW, (1, 2, 2), generators(0, 1, 2), "cpu", labels=torch.tensor([5, -1, 7])
    )
    assert [call.tolist() for call in calls] == [[5, -1], [5, -1], [7], [7]]

    def without(x: Tensor, timesteps: Tensor) -> Tensor:
        return x

    for conditional in (None, False):
        diffusion = Diffusion(conditional=conditional)
        Sampling(steps=1).sample(without, diffusion, (1, 2, 2), generators(0), "cpu", labels=torch.tensor([5]))
    with pytest.raises(ValueError, match="the network was trained with labels: give one for each image, or -1"):
        Sampling().sample(pointwise, FLOW, (1, 2, 2), generators(0), "cpu")
    with pytest.raises(ValueError, match=r"labels has shape \(3,\), expected \(1,\)"):
        Sampling().sample(pointwise, FLOW, (1, 2, 2), generators(0), "cpu", labels=torch.zeros(3))


# From an image


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 10), (0.5, 5), (0.25, 2), (0.01, 1)])
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_from_an_image(schedule: str, strength: float, steps: int) -> None:
    """The chain begins at the first of the last `steps` moments, with the image noised as in training."""
    calls: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        calls.append(x)
        return torch.zeros_like(x)

    diffusion = Diffusion(schedule=schedule, prediction_type="sample", data_mean=0.1, data_std=0.5)
    sampling = Sampling(steps=10, clip_sample=False)
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    made = sampling.sample(net, diffusion, (1, 4, 4), generators(3, 4), "cpu", images=images, strength=strength)
    assert len(calls) == steps
    first = sampling.points(diffusion)[-steps]
    noise = torch.stack([torch.randn(1, 4, 4, generator=g) for g in generators(3, 4)])
    torch.testing.assert_close(calls[0], first.alpha * (images - 0.1) / 0.5 + first.sigma * noise)
    torch.testing.assert_close(made, torch.full_like(made, 0.1))  # 0 of the network, restored
    if strength == 1 and schedule == "flow":
        assert torch.equal(calls[0], noise)  # nothing of the image is left


def test_a_small_strength_changes_little(gaussian: type) -> None:
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.5
    net = gaussian(LINEAR, 0.0, 0.3)

    def distance(strength: float) -> float:
        made = Sampling(steps=100).sample(
            net, LINEAR, (1, 8, 8), generators(3, 4), "cpu", images=images, strength=strength
        )
        return float((made - images).square().mean().sqrt())

    distances = [distance(strength) for strength in (0.01, 0.1, 0.3, 1.0)]
    assert distances == sorted(distances)
    assert distances[0] < 0.05  # of the noise of timestep 9
    assert distances[-1] > 0.3


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.1, float("nan")])
def test_strength_outside_of_its_range_is_an_error(strength: float) -> None:
    images = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"strength must be in \(0, 1\]"):
        Sampling().sample(pointwise, LINEAR, (1, 2, 2), generators(0), "cpu", images=images, strength=strength)
    with pytest.raises(ValueError, match=r"images has shape \(1, 1, 2, 2\), expected \(2, 1, 2, 2\)"):
        Sampling().sample(pointwise, LINEAR, (1, 2, 2), generators(0, 1), "cpu", images=images)


# Options


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"sampler": "eulr"}, "'sampler' must be one of ddim, ddpm, euler, heun, dpmpp_2m, not 'eulr'; .* 'euler'"),
        ({"steps": 0}, "'steps' must be >= 1: 0"),
        ({"spacing": "linspace"}, "'spacing' must be one of trailing, leading, karras, not 'linspace'"),
        ({"rho": 0.0}, "'rho' must be > 0: 0"),
        ({"time_shift": 0.0}, "'time_shift' must be > 0: 0"),
        ({"eta": 1.5}, "'eta' must be <= 1: 1.5"),
        ({"eta": -0.5}, "'eta' must be >= 0: -0.5"),
        ({"sampler": "ddpm", "eta": 0.5}, "'eta' is an option of sampler 'ddim', not .*'ddpm'"),
        ({"sampler": "ddpm", "variance": "learned"}, "'variance' must be one of fixed_small, fixed_large"),
        ({"variance": "fixed_large"}, "'variance' is an option of sampler 'ddpm', not .*'ddim'"),
        ({"s_churn": 1.0}, "'s_churn' is an option of sampler 'euler' or 'heun', not .*'ddim'"),
        ({"sampler": "euler", "s_churn": -1.0}, "'s_churn' must be >= 0: -1"),
        ({"s_tmin": 1.0}, "'s_tmin' is an option of sampler 'euler' or 'heun'"),
        ({"sampler": "heun", "s_tmin": -1.0}, "'s_tmin' must be >= 0: -1"),
        ({"sampler": "dpmpp_2m", "s_tmax": 1.0}, "'s_tmax' is an option of sampler 'euler' or 'heun'"),
        ({"sampler": "heun", "s_tmax": -1.0}, "'s_tmax' must be >= 0: -1"),
        ({"s_noise": 1.1}, "'s_noise' is an option of sampler 'euler' or 'heun'"),
        ({"sampler": "heun", "s_noise": 0.0}, "'s_noise' must be > 0: 0"),
        ({"dynamic_thresholding_ratio": 1.5}, r"'dynamic_thresholding_ratio' must be in \[0, 1\]: 1.5"),
        ({"guidance_scale": -1.0}, "'guidance_scale' must be >= 0: -1"),
        ({"guidance_interval": (-1.0, 1.0)}, r"'guidance_interval' must be in \[0, inf\]: -1"),
        ({"batch_size": 0}, "'batch_size' must be >= 1: 0"),
    ],
)
def test_bad_options_name_the_key(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**chosen)


@pytest.mark.parametrize(
    ("chosen", "diffusion", "message"),
    [
        ({"steps": 50}, Diffusion(timesteps=10), r"sampling.steps = 50 is more than diffusion.timesteps = 10"),
        ({"time_shift": 3.0}, LINEAR, "'time_shift' is for schedule 'flow', not 'linear'"),
        ({"spacing": "leading"}, FLOW, "'spacing' 'leading' does not fit schedule 'flow'; known there: trailing"),
        ({"spacing": "trailing"}, Diffusion(schedule="edm"), "'spacing' 'trailing' does not fit schedule 'edm'"),
        (
            {"spacing": "karras"},
            Diffusion(rescale_betas_zero_snr=True, prediction_type="v_prediction"),
            "'spacing' 'karras' needs a largest sigma",
        ),
        ({"guidance_scale": 2.0}, Diffusion(conditional=False), "'guidance_scale' needs a network that was trained"),
        (
            {"guidance_scale": 2.0},
            Diffusion(conditional=True, label_dropout=0.0),
            "'guidance_scale' needs diffusion.label_dropout above 0",
        ),
        ({"guidance_interval": (2.0, 1.0)}, LINEAR, r"'guidance_interval' must be \[low, high\]: \[2, 1\]"),
    ],
)
def test_options_that_do_not_fit_the_objective(chosen: dict[str, Any], diffusion: Diffusion, message: str) -> None:
    sampling = Sampling(**chosen)
    with pytest.raises(ValueError, match=message):
        sampling.points(diffusion)
    with pytest.raises(ValueError, match=message):
        sampling.sample(pointwise, diffusion, (1, 2, 2), [], "cpu")


@given(objectives(), st.integers(1, 20))
def test_a_chain_ends_at_the_image(diffusion: Diffusion, steps: int) -> None:
    levels = [point.ratio for point in (*Sampling(steps=steps).points(diffusion), IMAGE)]
    assert len(levels) == steps + 1
    assert levels == sorted(set(levels), reverse=True)
    assert levels[-1] == 0
