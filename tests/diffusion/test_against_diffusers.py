"""Compare schedules and samples with those of diffusers, for the same noise and network.

diffusers keeps its tables in float32 and hookdiff in float64; the tolerances allow for this difference. Where the
formulas differ, a comment says so, and the test sets options that make them equal.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff.diffusion import DDIM, DDPM, EDM, VP, Diffusion, DynamicThreshold, Flow, Leading, Sampling
from hookdiff.diffusion.prediction import EDMPrediction, VPrediction, q_sample
from tests.diffusion.conftest import generators, seeded

pytestmark = [
    pytest.mark.slow,
    # NumPy 2 warns when a scheduler turns a tensor into an array
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

NAMES = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2", "sigmoid": "sigmoid"}
# Stable Diffusion's betas; diffusers has the same default for all schedules
ENDS = {"scaled_linear": {"beta_start": 0.00085, "beta_end": 0.012}}
SHAPE, NUM = (3, 8, 8), 3
PREDICTIONS = ["epsilon", "sample", "v_prediction"]


@pytest.fixture(scope="module")
def diffusers() -> Any:
    return pytest.importorskip("diffusers")


class Net(nn.Module):
    """A small network with fixed weights and an output that depends on the time."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.of_time = nn.Linear(4, 16)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter[0].numel())

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = time.to(x.dtype).view(-1, 1)
        waves = torch.cat([(time / 300).sin(), (time / 300).cos(), (time / 70).sin(), (time / 70).cos()], 1)
        hidden = self.first(x) + self.of_time(waves).view(len(x), 16, 1, 1)
        output: Tensor = self.last(nn.functional.silu(hidden))
        return output


class RoundedTime(Net):
    """The same network for schedulers that know only whole timesteps."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return super().forward(x, time.double().round())


def noise() -> Tensor:
    return torch.randn(NUM, *SHAPE, generator=seeded(99))


@torch.no_grad()
def theirs(scheduler: Any, net: Any, scale: float = 1.0, **options: Any) -> Tensor:
    x = noise() * scale
    scaled = getattr(scheduler, "scale_model_input", lambda x, _: x)  # those of flow matching have none
    for t in scheduler.timesteps:
        output = net(scaled(x, t), t.expand(NUM))
        x = scheduler.step(output, t, x, **options).prev_sample
    return x


def ours(diffusion: Diffusion, net: Any, **options: Any) -> Tensor:
    options = {"clipping": "none", **options}
    return Sampling(**options).sample(net, diffusion, SHAPE, generators(*range(NUM)), "cpu", noise=noise())


def check(one: Tensor, other: Tensor) -> None:
    size = max(1.0, float(other.abs().max()))  # unclipped samples of an untrained network are large
    assert other.isfinite().all()
    assert other.std() > 0.1
    torch.testing.assert_close(one / size, other / size, rtol=0, atol=1e-4)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("zero_snr", [False, True])
def test_schedules(diffusers: Any, schedule: str, zero_snr: bool) -> None:
    scheduler = diffusers.DDPMScheduler(
        beta_schedule=NAMES[schedule], rescale_betas_zero_snr=zero_snr, **ENDS.get(schedule, {})
    )
    table = VP(schedule, rescale_betas_zero_snr=zero_snr).tables
    torch.testing.assert_close(table.betas.float(), scheduler.betas, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(table.alphas_cumprod.float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-6)
    assert (scheduler.alphas_cumprod[-1] == 0) == zero_snr


@pytest.mark.parametrize("schedule", NAMES)
def test_noised_images_and_velocities(diffusers: Any, schedule: str) -> None:
    scheduler = diffusers.DDPMScheduler(beta_schedule=NAMES[schedule], **ENDS.get(schedule, {}))
    timesteps = torch.tensor([0, 1, 300, 500, 998, 999])
    x0, eps = torch.randn(2, 6, *SHAPE, generator=seeded(1))
    alpha, sigma, _ = VP(schedule).rates(timesteps, 4)
    noised = q_sample(x0, eps, alpha, sigma)
    # diffusers computes 1 - alphas_cumprod in float32; where it is small, its relative error reaches 3e-4
    torch.testing.assert_close(noised, scheduler.add_noise(x0, eps, timesteps), rtol=0, atol=2e-5)
    velocity = VPrediction().target(x0, eps, alpha, sigma)
    torch.testing.assert_close(velocity, scheduler.get_velocity(x0, eps, timesteps), rtol=0, atol=2e-5)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("spacing", ["trailing", "leading", "as released"])
@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("clip", [False, True])
def test_ddim(diffusers: Any, prediction: str, spacing: str, eta: float, clip: bool) -> None:
    released = {"timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": False}  # of Stable Diffusion
    steps = released if spacing == "as released" else {"timestep_spacing": spacing}
    scheduler = diffusers.DDIMScheduler(prediction_type=prediction, clip_sample=clip, beta_schedule="linear", **steps)
    scheduler.set_timesteps(20)
    # by default diffusers keeps the noise that belongs to the unclipped image
    made = theirs(scheduler, Net(), eta=eta, use_clipped_model_output=True, generator=generators(*range(NUM)))
    end, points = ("first", Leading(1)) if spacing == "as released" else ("image", spacing)
    options = {"sampler": DDIM(eta, end), "steps": 20, "spacing": points, "clipping": "clamp" if clip else "none"}
    check(ours(Diffusion(VP("linear"), prediction), Net(), **options), made.clamp(-1, 1) if clip else made)


@pytest.mark.parametrize("schedule", ["scaled_linear", "cosine"])
@pytest.mark.parametrize("prediction", ["sample", "v_prediction"])
def test_ddim_with_zero_terminal_snr(diffusers: Any, schedule: str, prediction: str) -> None:
    scheduler = diffusers.DDIMScheduler(
        prediction_type=prediction,
        timestep_spacing="trailing",
        clip_sample=False,
        beta_schedule=NAMES[schedule],
        rescale_betas_zero_snr=True,
        **ENDS.get(schedule, {}),
    )
    scheduler.set_timesteps(20)
    diffusion = Diffusion(VP(schedule, rescale_betas_zero_snr=True), prediction)
    check(ours(diffusion, Net(), sampler="ddim", steps=20), theirs(scheduler, Net()))


def test_ddim_with_thresholding(diffusers: Any) -> None:
    scheduler = diffusers.DDIMScheduler(
        timestep_spacing="trailing", thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=1e9
    )
    scheduler.set_timesteps(20)
    made = theirs(scheduler, Net(), use_clipped_model_output=True)
    check(
        ours(Diffusion(VP("linear"), "epsilon"), Net(), sampler="ddim", steps=20, clipping=DynamicThreshold(0.9)), made
    )


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(
    ("variance", "spacing"),
    # with "trailing" and "fixed_large", diffusers adds noise to the final image too
    [("fixed_small", "trailing"), ("fixed_small", "leading"), ("fixed_large", "leading")],
)
@pytest.mark.parametrize("clip", [False, True])
def test_ddpm(diffusers: Any, prediction: str, variance: str, spacing: str, clip: bool) -> None:
    scheduler = diffusers.DDPMScheduler(
        prediction_type=prediction, variance_type=variance, timestep_spacing=spacing, clip_sample=clip
    )
    scheduler.set_timesteps(20)
    made = theirs(scheduler, Net(), generator=generators(*range(NUM)))
    options = {"sampler": DDPM(variance), "steps": 20, "spacing": spacing, "clipping": "clamp" if clip else "none"}
    check(ours(Diffusion(VP("linear"), prediction), Net(), **options), made)


def scale_of(scheduler: Any) -> float:
    """Return the standard deviation of the first x / alpha, the quantity that diffusers samples.

    With "trailing", diffusers' own initial noise has the deviation sigma / alpha, which leaves out x0's share.
    """
    return float((scheduler.sigmas[0].double() ** 2 + 1) ** 0.5)


# Churn is not compared. Algorithm 2 evaluates the network after the noise is added, and diffusers before.


HEUN = [("heun", "scaled_linear", name) for name in ("epsilon", "v_prediction")]  # diffusers' has no other prediction
EULER = [("euler", schedule, name) for schedule in ("linear", "scaled_linear") for name in PREDICTIONS]


@pytest.mark.parametrize(("sampler", "schedule", "prediction"), [*EULER, *HEUN])
@pytest.mark.parametrize("spacing", ["trailing", "leading", "karras"])
def test_euler_and_heun(diffusers: Any, sampler: str, schedule: str, prediction: str, spacing: str) -> None:
    karras = spacing == "karras"
    scheduler = getattr(diffusers, f"{sampler.title()}DiscreteScheduler")(
        beta_schedule=schedule,
        prediction_type=prediction,
        timestep_spacing="linspace" if karras else spacing,  # makes the noise levels span the whole range
        use_karras_sigmas=karras,
        **ENDS.get(schedule, {}),
    )
    scheduler.set_timesteps(20)
    diffusion = Diffusion(VP(schedule), prediction)
    images = ours(diffusion, Net(), sampler=sampler, steps=20, spacing=spacing)
    check(images, theirs(scheduler, Net(), scale_of(scheduler)))


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("spacing", ["trailing", "leading", "karras"])
@pytest.mark.parametrize("steps", [2, 8, 20])
def test_dpmpp_2m(diffusers: Any, prediction: str, spacing: str, steps: int) -> None:
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type=prediction,
        solver_order=2,
        timestep_spacing="trailing",
        use_karras_sigmas=spacing == "karras",
        final_sigmas_type="zero",
    )
    if spacing == "leading":  # diffusers' own "leading" leaves out timestep 0
        scheduler.set_timesteps(timesteps=[1000 // steps * i for i in reversed(range(steps))])
    else:
        scheduler.set_timesteps(steps)
    net = RoundedTime()  # diffusers rounds the times of "karras"
    images = ours(Diffusion(VP("linear"), prediction), net, sampler="dpmpp_2m", steps=steps, spacing=spacing)
    check(images, theirs(scheduler, net))


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_edm(diffusers: Any, sampler: str, sigma_data: float) -> None:
    kinds = {"euler": diffusers.EDMEulerScheduler, "dpmpp_2m": diffusers.EDMDPMSolverMultistepScheduler}
    scheduler = kinds[sampler](sigma_min=0.002, sigma_max=80.0, sigma_data=sigma_data, prediction_type="epsilon")
    scheduler.set_timesteps(18)
    diffusion = Diffusion(EDM(time_scale=1.0), EDMPrediction(sigma_data))
    # diffusers would start with the standard deviation sqrt(sigma_max² + 1)
    check(ours(diffusion, Net(), sampler=sampler, steps=18), theirs(scheduler, Net(), 80.0))


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 4, 20])
def test_flow_euler(diffusers: Any, shift: float, steps: int) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    # diffusers' default sigmas do not end at 1 / steps
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    diffusion = Diffusion(Flow(shift))
    check(ours(diffusion, Net(), sampler="euler", steps=steps, spacing="trailing"), theirs(scheduler, Net()))


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [2, 4, 20])
def test_flow_heun(diffusers: Any, shift: float, steps: int) -> None:
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler(num_train_timesteps=steps, shift=shift)
    scheduler.sigma_min, scheduler.sigma_max = 1 / steps, 1.0  # diffusers would shift its own ends twice
    scheduler.set_timesteps(steps)
    net, diffusion = Net(), Diffusion(Flow(shift, time_scale=steps), "sample")

    def image(x: Tensor, time: Tensor) -> Tensor:
        """Predict the image, so that hookdiff's last step is one of Euler, as in diffusers."""
        x0: Tensor = x - time.view(-1, 1, 1, 1) / steps * net(x, time)
        return x0

    check(ours(diffusion, image, sampler="heun", steps=steps, spacing="trailing"), theirs(scheduler, net))
