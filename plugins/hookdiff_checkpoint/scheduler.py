"""The scheduler of diffusers that makes the steps of a run's sampler.

The schedulers have the options of diffusers 0.42. A sampler that no scheduler reproduces is refused, because the images
would differ from the images of the run.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import asdict, define, evolve, field

import hookdiff.diffusion as parts
from hookdiff import Loop, UserError
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.options import Choice, name_of

_UNBOUNDED = 1e9  # largest range of dynamic thresholding, which hookdiff does not limit
OTHERWISE = "--to safetensors"


@define(frozen=True)
class Equivalent:
    """The calls in diffusers that sample as the sampler of a run does."""

    scheduler: str  # class
    options: Mapping[str, Any]
    times: str  # argument of set_timesteps
    step: Mapping[str, Any] = field(factory=dict)  # arguments of each step
    pipeline: str | None = None  # class that makes these calls, for a UNet2DModel of pictures without classes
    scales: bool = False  # the scheduler scales the noise and the inputs of the network
    remark: str = ""  # for the code that makes these calls, in one line
    guidance: Any = None  # of the run


def equivalent_of(loop: Loop) -> Equivalent:
    """Return the calls that sample as the sampler of `loop` does; raises UserError with the key if there are none."""
    kind = type(loop.model)
    if kind.__module__.partition(".")[0] != "diffusers":
        raise UserError(f"--to diffusers: model.use: {kind.__name__} is not a class of diffusers; use {OTHERWISE}")
    objective, sampling = diffusion_of(loop), loop.sampler
    assert isinstance(sampling, Sampling)
    scales: list[tuple[str, Any, int]] = [("data_mean", objective.data_mean, 0), ("data_std", objective.data_std, 1)]
    for key, given, neutral in [] if loop.feed.codec else scales:
        if any(value != neutral for value in given):
            raise _refusal(f"diffusion.{key}", given, "diffusers would not undo the standardisation", OTHERWISE)
    _check("diffusion.process", objective.process, (parts.VP, parts.DDPMProcess, parts.Flow, parts.EDM))
    kinds: dict[type, Callable[[Any, Any], Equivalent]] = {
        parts.VP: _with_timesteps,
        parts.DDPMProcess: _with_timesteps,
        parts.Flow: partial(_flow, loop.feed.shape),
        parts.EDM: _edm,
    }
    return evolve(kinds[type(objective.process)](objective, sampling.fit(objective)), guidance=sampling.guidance)


def diffusion_of(loop: Loop) -> Diffusion:
    """Return the objective of `loop`, which a config has made."""
    assert isinstance(loop.objective, Diffusion)
    return loop.objective


def _with_timesteps(objective: Diffusion, sampling: Any) -> Equivalent:
    process: Any = objective.process
    sampler, spacing, clipping = sampling.sampler, sampling.spacing, sampling.clipping
    steps, timesteps = sampling.steps, process.timesteps
    _check("diffusion.prediction", objective.prediction, (parts.Epsilon, parts.SamplePrediction, parts.VPrediction))
    _check("sampling.spacing", spacing, (parts.Trailing, parts.Leading))
    _check("sampling.clipping", clipping, (parts.NoClipping, parts.Clamp, parts.DynamicThreshold))
    if timesteps % steps:
        near = min((n for n in range(1, timesteps + 1) if timesteps % n == 0), key=lambda n: abs(n - steps))
        why = f"the steps of diffusers match only if this number divides diffusion.process.timesteps = {timesteps}"
        raise _refusal("sampling.steps", steps, why, f"--steps {near}")
    options = {
        "num_train_timesteps": timesteps,
        # Given for all schedules: diffusers lacks some of them, and rescales to zero terminal SNR in another way.
        "trained_betas": process.tables.betas.tolist(),
        "prediction_type": objective.prediction.use,  # both libraries have the same names
        "timestep_spacing": spacing.use,
    }
    if type(spacing) is parts.Leading:
        options["steps_offset"] = spacing.offset
    if type(clipping) is parts.DynamicThreshold:
        options |= {"thresholding": True, "dynamic_thresholding_ratio": clipping.ratio, "sample_max_value": _UNBOUNDED}
    times, clamps = f"num_inference_steps={steps}", {"clip_sample": type(clipping) is parts.Clamp}
    _check("sampling.sampler", sampler, (parts.DDIM, parts.DDPM, parts.Euler, parts.DPMSolver2M))
    _check_noise(sampler, "churn")
    if type(sampler) in (parts.DDIM, parts.Euler):
        # By default the scheduler goes on with noise that does not match the clipped image.
        eta, ends_at_image = (sampler.eta, sampler.final == "image") if type(sampler) is parts.DDIM else (0.0, True)
        step = {"eta": eta, "use_clipped_model_output": type(clipping) is not parts.NoClipping}
        return Equivalent(
            "DDIMScheduler", {**options, **clamps, "set_alpha_to_one": ends_at_image}, times, step, "DDIMPipeline"
        )
    if type(sampler) is parts.DDPM:
        if sampler.variance == "fixed_large" and type(spacing) is parts.Trailing and steps < timesteps:
            why = "with spacing 'trailing' DDPMScheduler adds this noise to the final image"
            way_out = "--set sampling.sampler.variance=fixed_small"
            raise _refusal("sampling.sampler.variance", sampler.variance, why, way_out)
        options |= {**clamps, "variance_type": sampler.variance}
        return Equivalent("DDPMScheduler", options, times, pipeline="DDPMPipeline")
    _check("sampling.spacing", spacing, (parts.Trailing,))
    if process.ends_in_noise:
        why = "DPMSolverMultistepScheduler cannot begin at a signal-to-noise ratio of 0"
        raise _refusal("diffusion.process.rescale_betas_zero_snr", True, why, "--sampler ddim")
    if type(clipping) is parts.Clamp:
        options |= {"thresholding": True, "sample_max_value": 1.0}  # a range of at most 1 clamps
    return Equivalent("DPMSolverMultistepScheduler", options, times, pipeline="DDPMPipeline")


def _flow(shape: Sequence[int], objective: Diffusion, sampling: Any) -> Equivalent:
    process: Any = objective.process
    scale, spacing = process.time_scale, sampling.spacing
    _check_free(objective, sampling, parts.FlowPrediction, (parts.Trailing, parts.Shifted, parts.ShiftedBy))
    if scale != int(scale):
        raise _refusal("diffusion.process.time_scale", scale, "diffusers takes only whole numbers", OTHERWISE)
    factor = spacing.factor if type(spacing) is parts.ShiftedBy else 1.0
    is_constant = type(spacing) is parts.Shifted
    shift = spacing.shift if is_constant else factor * process.for_shape(shape).shift
    remark = ""
    if process.shift_side and not is_constant:
        followed = f"{factor * process.shift:g} * (height * width) ** 0.5 / {process.shift_side:g}"
        size = " x ".join(map(str, shape[1:]))
        remark = f"the scheduler has the shift for x of {size}; for other sizes: scheduler.set_shift({followed})"
    # The times of the scheduler would end at 1 / time_scale, and not at 1 / steps.
    times = f"sigmas=[1 - i / {sampling.steps} for i in range({sampling.steps})]"
    options = {"num_train_timesteps": int(scale), "shift": shift}
    return Equivalent("FlowMatchEulerDiscreteScheduler", options, times, remark=remark)


def _edm(objective: Diffusion, sampling: Any) -> Equivalent:
    process: Any = objective.process
    _check_free(objective, sampling, parts.EDMPrediction, (parts.Karras,))
    if process.time_scale != 1:
        why = "EDMEulerScheduler of diffusers gives the network ln(sigma) / 4"
        raise _refusal("diffusion.process.time_scale", process.time_scale, why, OTHERWISE)
    options = {
        "sigma_min": process.sigma_min,
        "sigma_max": process.sigma_max,
        "sigma_data": objective.prediction.sigma_data,
        "rho": sampling.spacing.rho,
        "prediction_type": "epsilon",  # the scheduler's name for the output of a preconditioned network
    }
    return Equivalent("EDMEulerScheduler", options, f"num_inference_steps={sampling.steps}", scales=True)


def _check_free(
    objective: Diffusion, sampling: Any, prediction: type[Choice], spacings: tuple[type[Choice], ...]
) -> None:
    """Refuse every sampler except Euler's method for `prediction`, without noise and without clipping."""
    _check("diffusion.prediction", objective.prediction, (prediction,))
    _check("sampling.sampler", sampling.sampler, (parts.Euler, parts.DDIM))
    _check_noise(sampling.sampler, "churn", "eta")
    _check("sampling.spacing", sampling.spacing, spacings)
    _check("sampling.clipping", sampling.clipping, (parts.NoClipping,))


def _check_noise(solver: Any, *options: str) -> None:
    for option in options:
        if value := asdict(solver, recurse=False).get(option, 0):
            key = f"sampling.sampler.{option}"
            why = "schedulers of diffusers add no noise, or add it only after the network's call"
            raise _refusal(key, value, why, f"--set {key}=0")


def _check(key: str, part: Choice, known: tuple[type[Choice], ...]) -> None:
    """Refuse a part unless its class is one of `known`; a derived class may compute something else."""
    if type(part) not in known:
        names = [name_of(kind) for kind in known]
        way_out = f"--set {key}={names[0]}" if key.startswith("sampling.") else OTHERWISE
        way_out = f"--sampler {names[0]}" if key == "sampling.sampler" else way_out
        raise _refusal(key, part.use, f"diffusers has only {', '.join(names)} with the other options", way_out)


def _refusal(key: str, value: object, why: str, way_out: str) -> UserError:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return UserError(f"--to diffusers: {key} = {shown}: {why}; use {way_out}")
