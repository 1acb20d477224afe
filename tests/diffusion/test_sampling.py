from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hookdiff.diffusion.clipping import Clamp, NoClipping
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.guidance import ClassifierFree
from hookdiff.diffusion.process import EDM, IMAGE, VP, DDPMProcess, Flow
from hookdiff.diffusion.sampling import Sampling
from hookdiff.diffusion.solvers import DDIM, DDPM, DPMSolver2M, Euler, Heun, Solver
from hookdiff.diffusion.spacing import Karras, Shifted, ShiftedBy, Trailing
from tests.conftest import refused, wide
from tests.diffusion.conftest import euler_for_heun_on_flow, generators, objectives, pointwise, solvers

LINEAR = Diffusion("vp")


@given(
    objectives(conditional=True),
    solvers,
    st.sampled_from([1.0, 2.5]),
    st.sampled_from(["none", "clamp", "dynamic"]),
    st.permutations(range(5)),
    st.integers(1, 5),
    st.integers(1, 6),
)
@settings(max_examples=25)
def test_image_is_independent_of_its_batch(
    diffusion: Diffusion, sampler: Solver, scale: float, clipping: str, order: list[int], num: int, batch_size: int
) -> None:
    def sample(seeds: list[int], batch_size: int = 256) -> Tensor:
        sampling = Sampling(sampler, 4, clipping=clipping, guidance=ClassifierFree(scale), batch_size=batch_size)
        labels = torch.tensor(seeds)
        return sampling.sample(pointwise, diffusion, (3, 5, 5), generators(*seeds), "cpu", labels=labels)

    expected = torch.cat([sample([seed]) for seed in order[:num]])
    images = sample(order[:num], batch_size)
    assert images.isfinite().all()
    assert torch.equal(images, expected)


@given(objectives(), solvers)
def test_same_generators_same_images(diffusion: Diffusion, sampler: Solver) -> None:
    sampling = Sampling(sampler, 6, clipping="none")  # clipping might make both images all white
    runs = [sampling.sample(pointwise, diffusion, (3, 4, 4), generators(1, 2), "cpu") for _ in range(2)]
    assert torch.equal(*runs)
    assert not torch.equal(runs[0][0], runs[0][1])


@pytest.mark.parametrize("process", ["vp", "flow", "edm"])
def test_noise_can_be_given(process: str) -> None:
    sampling, diffusion, (generator,) = Sampling(steps=5), Diffusion(process), generators(7)
    before = generator.get_state()
    noise = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    given_noise = sampling.sample(pointwise, diffusion, (3, 4, 4), [generator], "cpu", noise=noise)
    assert torch.equal(generator.get_state(), before)  # these samplers add no noise
    assert torch.equal(given_noise, sampling.sample(pointwise, diffusion, (3, 4, 4), generators(3), "cpu"))
    with refused(ValueError, "noise", "(2, 3, 4, 4)", "(1, 3, 4, 4)"):
        sampling.sample(pointwise, diffusion, (3, 4, 4), [generator], "cpu", noise=noise.expand(2, 3, 4, 4))


@pytest.mark.parametrize("sampler", [*Solver.known, Euler(churn=3.0), Heun(churn=3.0)], ids=str)
@pytest.mark.parametrize("process", ["flow", *wide(*("vp", "edm"))])
def test_no_value_is_read_on_the_host(process: str, sampler: Solver | str) -> None:
    diffusion = Diffusion(process, "v_prediction", conditional=True, data_mean=0.1, data_std=(0.2, 0.3, 0.4))
    sampling = Sampling(sampler, 3, clipping="clamp", guidance=ClassifierFree(2.0))
    labels = torch.empty(2, dtype=torch.int64)
    images = sampling.sample(pointwise, diffusion, (3, 4, 4), generators(0, 1), "meta", labels=labels)
    assert images.device.type == "meta"


@given(objectives(data_mean=(0.1, -0.2, 0.3), data_std=(0.2, 0.3, 0.4)), solvers)
def test_the_network_works_on_normalized_images(gaussian: type, diffusion: Diffusion, sampler: Solver) -> None:
    """A network for images of 0.5 makes images of data_mean + 0.5 * data_std."""
    sampling = Sampling(euler_for_heun_on_flow(sampler, diffusion), 4, clipping="clamp")
    images = sampling.sample(gaussian(diffusion, 0.5, s=0), diffusion, (3, 2, 2), generators(0), "cpu", torch.float64)
    expected = torch.tensor([0.2, -0.05, 0.5], dtype=torch.float64).view(1, 3, 1, 1).expand_as(images)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("chosen", [{"data_mean": (0.0, 0.1)}, {"data_std": (1.0, 2.0)}])
def test_wrong_number_of_channels_is_an_error(chosen: dict[str, Any]) -> None:
    with refused(ValueError, next(iter(chosen)), 2, 3):
        Sampling(steps=1).sample(pointwise, Diffusion(**chosen), (3, 4, 4), generators(0), "cpu")


# The network's input


def test_dtype_changes_only_the_precision() -> None:
    sampling = Sampling("ddpm", 10)
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
    with refused(ValueError, "torch.bfloat16", "float32"):
        sampling.sample(pointwise, LINEAR, (1, 4, 4), generators(0), "cpu", torch.bfloat16)


def test_bf16_is_for_the_network_alone() -> None:
    torch.manual_seed(0)
    net, seen = nn.Conv2d(1, 1, 3, padding=1), []

    def call(x: Tensor, times: Tensor) -> Tensor:
        out: Tensor = net(x)
        seen.append((x.dtype, out.dtype))
        return out

    exact, rounded = (
        Sampling(steps=4, precision=precision).sample(call, Diffusion(), (1, 8, 8), generators(0, 1), "cpu")
        for precision in ("float32", "bf16")
    )
    assert seen == [(torch.float32, torch.float32)] * 4 + [(torch.float32, torch.bfloat16)] * 4
    assert (rounded.dtype, torch.equal(exact, rounded)) == (torch.float32, False)
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0)


def test_the_network_sees_int64_timesteps_and_may_output_bfloat16() -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(timesteps)
        return x.bfloat16()

    sampling = Sampling(steps=4, clipping="none")
    images = sampling.sample(net, LINEAR, (1, 4, 4), generators(0, 1), "cpu")
    assert [t.tolist() for t in seen] == [[t, t] for t in (999, 749, 499, 249)]
    assert (images.dtype, {t.dtype for t in seen}) == (torch.float32, {torch.int64})
    rounded = sampling.sample(lambda x, t: net(x, t).float(), LINEAR, (1, 4, 4), generators(0, 1), "cpu")
    assert torch.equal(images, rounded)  # only the output is rounded, not the arithmetic


@pytest.mark.parametrize(
    ("diffusion", "chosen", "expected"),
    [
        (Diffusion("flow"), {}, [1000, 900, 750, 500]),
        (Diffusion("flow"), {"spacing": "trailing"}, [1000, 750, 500, 250]),
        (Diffusion(Flow(time_scale=1.0)), {"spacing": "trailing"}, [1, 0.75, 0.5, 0.25]),
        (Diffusion(Flow(shift=3.0)), {"spacing": "trailing"}, [1000, 900, 750, 500]),
        (Diffusion(Flow(shift=9.0)), {"spacing": Shifted(3.0)}, [1000, 900, 750, 500]),
        (Diffusion(Flow(shift=1.5, shift_side=1)), {}, [1000, 27000 / 28, 900, 750]),
        (Diffusion(Flow(shift=1.5, shift_side=1)), {"spacing": "trailing"}, [1000, 900, 750, 500]),
        (Diffusion(Flow(shift=1.5, shift_side=1)), {"spacing": ShiftedBy(2.0)}, [1000, 18000 / 19, 6000 / 7, 2000 / 3]),
        (Diffusion(Flow(shift=1.5, shift_side=1)), {"spacing": Shifted(3.0)}, [1000, 900, 750, 500]),
        (Diffusion(EDM(1.0, exp(4))), {"spacing": Karras(rho=1e6)}, [1000, 2000 / 3, 1000 / 3, 0]),
        (Diffusion(VP("cosine", 9)), {"spacing": "leading"}, [6, 4, 2, 0]),
    ],
)
def test_the_network_sees_the_times_of_the_points(
    diffusion: Diffusion, chosen: dict[str, Any], expected: list[float]
) -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(timesteps)
        return x

    Sampling("euler", 4, **chosen).sample(net, diffusion, (1, 2, 2), generators(0, 1), "cpu")
    assert [t[0].item() for t in seen] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    dtype = torch.int64 if diffusion.process.has_timesteps else torch.float32
    assert {(t.dtype, t.shape) for t in seen} == {(dtype, (2,))}


def test_network_can_be_trained_afterwards() -> None:
    conv = nn.Conv2d(1, 1, 1)
    cache: dict[str, Tensor] = {}

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        if "positions" not in cache:
            cache["positions"] = torch.linspace(0, 1, 4)
        output: Tensor = conv(x) * cache["positions"]
        return output

    images = Sampling(steps=2).sample(net, LINEAR, (1, 4, 4), generators(0), "cpu")
    assert not images.requires_grad
    net(images, torch.zeros(1)).sum().backward()  # type: ignore[no-untyped-call]  # would fail after inference mode
    assert conv.weight.grad is not None


def test_no_generators_no_images() -> None:
    assert Sampling().sample(pointwise, LINEAR, (3, 4, 4), [], "cpu").shape == (0, 3, 4, 4)


# From an image


@pytest.mark.parametrize(
    ("sampling", "process", "steps"),
    [
        (Sampling(), "flow", 25),
        (Sampling(), "edm", 25),
        (Sampling(), "ddpm", 50),
        (Sampling("euler"), "flow", 50),
        (Sampling("ddim"), "vp", 50),
        (Sampling("ddim", 7), "vp", 7),
    ],
)
def test_a_sampler_has_its_usual_steps_unless_told_otherwise(sampling: Sampling, process: str, steps: int) -> None:
    diffusion = Diffusion(process)
    assert len(sampling.points(diffusion)) == sampling.fit(diffusion).steps == steps


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 10), (0.5, 5), (0.25, 2), (0.01, 1)])
@pytest.mark.parametrize("process", ["vp", "flow", "edm"])
def test_a_chain_starts_from_a_noised_image(process: str, strength: float, steps: int) -> None:
    """The chain begins at the first of the last `steps` points, with the image noised as in training."""
    calls: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        calls.append(x)
        return torch.zeros_like(x)

    diffusion = Diffusion(process, "sample", data_mean=0.1, data_std=0.5)
    sampling = Sampling("euler", 10, clipping="none")
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    samples = sampling.sample(net, diffusion, (1, 4, 4), generators(3, 4), "cpu", images=images, strength=strength)
    assert len(calls) == steps
    first = sampling.points(diffusion)[-steps]
    noise = torch.stack([torch.randn(1, 4, 4, generator=g) for g in generators(3, 4)])
    torch.testing.assert_close(calls[0], first.alpha * (images - 0.1) / 0.5 + first.sigma * noise)
    torch.testing.assert_close(samples, torch.full_like(samples, 0.1))  # the network's 0, denormalized
    if strength == 1 and process == "flow":
        assert torch.equal(calls[0], noise)  # nothing of the image is left


@pytest.mark.parametrize("process", ["vp", "flow", "edm"])
def test_the_kept_part_has_the_noise_of_the_next_step(process: str) -> None:
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)

    diffusion, sampling, side = Diffusion(process, "sample"), Sampling("euler", 5, clipping="none"), (1, 64, 64)
    images, mask = torch.full((1, *side), 0.5), torch.zeros(1, *side, dtype=torch.bool)
    result = sampling.sample(net, diffusion, side, generators(3), "cpu", images=images, strength=1.0, mask=mask)
    assert torch.equal(result, images)
    for x, point in zip(seen, sampling.points(diffusion), strict=True):
        assert float(x.std()) == pytest.approx(point.sigma, rel=0.05)
        assert float(x.mean()) == pytest.approx(0.5 * point.alpha, abs=0.05 * point.sigma)


def test_a_small_strength_changes_little(gaussian: type) -> None:
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.5
    net = gaussian(LINEAR, 0.0, 0.3)

    def distance(strength: float) -> float:
        given: Any = {"images": images, "strength": strength}
        samples = Sampling(steps=100).sample(net, LINEAR, (1, 8, 8), generators(3, 4), "cpu", **given)
        return float((samples - images).square().mean().sqrt())

    distances = [distance(strength) for strength in (0.01, 0.1, 0.3, 1.0)]
    assert distances == sorted(distances)
    assert distances[0] < 0.05  # the chain starts at timestep 9, with little noise
    assert distances[-1] > 0.3


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.1, float("nan")])
def test_strength_outside_of_its_range_is_an_error(strength: float) -> None:
    images = torch.zeros(1, 1, 2, 2)
    with refused(ValueError, "strength", "(0, 1]", f"{strength:g}"):
        Sampling().sample(pointwise, LINEAR, (1, 2, 2), generators(0), "cpu", images=images, strength=strength)
    with refused(ValueError, "images", "(1, 1, 2, 2)", "(2, 1, 2, 2)"):
        Sampling().sample(pointwise, LINEAR, (1, 2, 2), generators(0, 1), "cpu", images=images)


# Options


def test_each_process_has_its_defaults() -> None:
    for process, *parts in (
        (VP(), DPMSolver2M(), Trailing(), Clamp()),
        (DDPMProcess(), DDPM(), Trailing(), Clamp()),
        (Flow(), DPMSolver2M(), Shifted(3.0), NoClipping()),
        (Flow(2.0), DPMSolver2M(), Shifted(6.0), NoClipping()),
        (Flow(2.0, shift_side=7), DPMSolver2M(), ShiftedBy(3.0), NoClipping()),
        (EDM(), Heun(), Karras(), NoClipping()),
    ):
        fitted = Sampling(steps=7).fit(Diffusion(process))
        assert [fitted.sampler, fitted.spacing, fitted.clipping] == parts
        assert (fitted.steps, fitted.guidance) == (7, ClassifierFree(1.0))
        images = [
            sampling.sample(pointwise, Diffusion(process), (1, 3, 3), generators(0, 1), "cpu")
            for sampling in (Sampling(steps=7), fitted, Sampling(*parts[:1], 7, *parts[1:]))
        ]
        assert [torch.equal(images[0], others) for others in images[1:]] == [True, True]
    chosen = Sampling(DDPM(), 7, "karras", "none")
    fitted = chosen.fit(LINEAR)
    assert (fitted.sampler, fitted.spacing, fitted.clipping) == (DDPM(), Karras(), NoClipping())


def test_the_last_step_may_end_at_the_first_timestep() -> None:
    process, noise = VP("scaled_linear"), torch.randn(2, 1, 3, 3)
    sampling = Sampling(sampler=DDIM(final="first"), steps=1, clipping="none")
    made = sampling.sample(
        lambda x, _: 0.5 * noise, Diffusion(process, "epsilon"), (1, 3, 3), generators(0, 1), "cpu", noise=noise
    )
    start, first = process.at_timesteps([999, 0])
    x0 = (noise - start.sigma * 0.5 * noise) / start.alpha
    torch.testing.assert_close(made, first.alpha * x0 + first.sigma * 0.5 * noise, rtol=1e-4, atol=1e-4)


def test_options_that_do_not_fit_the_objective_are_refused_for_zero_images_too() -> None:
    with refused(ValueError, "'spacing'", "'leading'", "'flow'"):
        Sampling(spacing="leading").sample(pointwise, Diffusion("flow"), (1, 2, 2), [], "cpu")
    with refused(ValueError, "'sampler.final'", "'first'", "'flow'"):
        Sampling(sampler=DDIM(final="first")).sample(pointwise, Diffusion("flow"), (1, 2, 2), [], "cpu")
    with refused(ValueError, "'steps'", 50, 10):
        Sampling(steps=50).sample(pointwise, Diffusion(VP("cosine", 10)), (1, 2, 2), [], "cpu")


@given(objectives(), st.integers(1, 20))
def test_a_chain_ends_at_the_image(diffusion: Diffusion, steps: int) -> None:
    levels = [point.ratio for point in (*Sampling(steps=steps).points(diffusion), IMAGE)]
    assert levels == sorted(set(levels), reverse=True)
    assert (len(levels), levels[-1]) == (steps + 1, 0)
