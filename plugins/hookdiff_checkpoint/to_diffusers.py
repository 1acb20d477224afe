"""A run as a folder that diffusers loads: the model, and a scheduler that makes the steps of the run's sampler.

The options of the schedulers are those of diffusers 0.42. A run that none of them can follow is refused: what it made
there would only look like the run's images.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field
from torch import nn

from hookdiff import Loop, UserError
from hookdiff.disk import new_folder, write_file, write_tensors
from hookdiff_checkpoint.export import plain_tensors

_PREDICTIONS = ("epsilon", "sample", "v_prediction")  # as both libraries call them
_UNBOUNDED = 1e9  # dynamic thresholding has no largest range here
_OTHERWISE = "--to safetensors"


@define(frozen=True)
class Recipe:
    """What does in diffusers what a run's sampler does here."""

    scheduler: str  # class
    options: Mapping[str, Any]
    times: str  # the argument of set_timesteps
    step: Mapping[str, Any] = field(factory=dict)  # arguments of each step
    pipeline: str | None = None  # class that makes these calls for a UNet2DModel without classes


def recipe_of(loop: Loop) -> Recipe:
    """Return the recipe for the model and the sampler of `loop`.

    Raises UserError, naming the key, where diffusers has none.
    """
    kind = type(loop.model)
    if kind.__module__.partition(".")[0] != "diffusers":
        raise UserError(f"--to diffusers: model.use: {kind.__name__} is no class of diffusers; use {_OTHERWISE}")
    objective: Any = loop.objective
    for key, neutral in (("data_mean", 0), ("data_std", 1)):
        given = getattr(objective, key)
        if any(value != neutral for value in given):
            raise _refusal(
                f"diffusion.{key}", given, "its pipelines would show images as the network sees them", _OTHERWISE
            )
    make = {"flow": _flow, "edm": _edm}.get(objective.schedule, _with_timesteps)
    return make(objective, loop.sampler)


def write_folder(out: Path, net: nn.Module, recipe: Recipe, shape: Sequence[int], about: Mapping[str, str]) -> str:
    """Write what `net` holds, and the scheduler, to the folder `out`; return how to use them.

    `shape` is that of an image, c h w; `about` goes into the metadata of the weights.
    """
    diffusers, model = importlib.import_module("diffusers"), _untyped(net)
    scheduler = getattr(diffusers, recipe.scheduler)(**recipe.options)
    kind, has_classes = type(model).__name__, bool(getattr(model, "num_classes", 0))
    name = "unet" if kind.startswith("UNet") else "transformer"
    step = "".join(f", {key}={value}" for key, value in recipe.step.items())
    with new_folder(out) as folder:
        if kind == "UNet2DModel":  # which takes any size; a pipeline asks it what to make
            model.register_to_config(sample_size=shape[-1] if shape[-1] == shape[-2] else list(shape[1:]))
        _write_config(folder / name, model)
        write_tensors(folder / name / "diffusion_pytorch_model.safetensors", plain_tensors(net), about)
        _write_config(folder / "scheduler", scheduler)
        if recipe.pipeline and kind == "UNet2DModel" and not has_classes:
            _write_config(folder, getattr(diffusers, recipe.pipeline)(unet=model, scheduler=scheduler))
            return f"{recipe.pipeline}.from_pretrained({str(out)!r})({recipe.times}{step})"
    why = "models that are told of classes" if has_classes else f"{kind} with {recipe.scheduler}"
    return (
        f"diffusers has no pipeline for {why}; in a loop of your own:\n"
        f"  model = {kind}.from_pretrained({str(out)!r}, subfolder={name!r})\n"
        f"  scheduler = {recipe.scheduler}.from_pretrained({str(out)!r}, subfolder='scheduler')\n"
        f"  scheduler.set_timesteps({recipe.times})\n"
        f"  x = scheduler.step(output, t, x{step}).prev_sample, for each t in scheduler.timesteps"
    )


def _with_timesteps(objective: Any, sampler: Any) -> Recipe:
    prediction, spacing = objective.prediction_type or "epsilon", sampler.spacing or "trailing"
    steps, timesteps = sampler.steps, objective.timesteps
    if prediction not in _PREDICTIONS:
        why = f"its schedulers know {', '.join(_PREDICTIONS)} here"
        raise _refusal("diffusion.prediction_type", prediction, why, _OTHERWISE)
    if spacing == "karras":
        raise _refusal("sampling.spacing", spacing, "its schedulers round the times", "--set sampling.spacing=trailing")
    if timesteps % steps:
        near = min((n for n in range(1, timesteps + 1) if timesteps % n == 0), key=lambda n: abs(n - steps))
        why = f"its schedulers visit other timesteps unless this divides diffusion.timesteps = {timesteps}"
        raise _refusal("sampling.steps", steps, why, f"--set sampling.steps={near}")
    options = {
        "num_train_timesteps": timesteps,
        # Whatever the schedule: it may not know it, and has another way to leave nothing of the image at the end.
        "trained_betas": objective.process.schedule.betas.tolist(),
        "prediction_type": prediction,
        "timestep_spacing": spacing,
        "thresholding": sampler.thresholding,
        "dynamic_thresholding_ratio": sampler.dynamic_thresholding_ratio,
        "sample_max_value": _UNBOUNDED,
    }
    times = f"num_inference_steps={steps}"
    if _is_euler(sampler):
        options |= {"clip_sample": sampler.clip_sample, "set_alpha_to_one": True}
        # Unless told, it goes on with a noise that does not belong to the clipped image.
        step = {"eta": sampler.eta, "use_clipped_model_output": sampler.clips}
        return Recipe("DDIMScheduler", options, times, step, "DDIMPipeline")
    if sampler.sampler == "ddpm":
        if sampler.variance == "fixed_large" and spacing == "trailing" and steps < timesteps:
            why = "with spacing 'trailing' its DDPMScheduler adds this noise to the image itself"
            raise _refusal("sampling.variance", sampler.variance, why, "--set sampling.variance=fixed_small")
        options |= {"clip_sample": sampler.clip_sample, "variance_type": sampler.variance}
        return Recipe("DDPMScheduler", options, times, pipeline="DDPMPipeline")
    if sampler.sampler == "dpmpp_2m":
        if spacing != "trailing":
            why = "its DPMSolverMultistepScheduler visits other timesteps"
            raise _refusal("sampling.spacing", spacing, why, "--set sampling.spacing=trailing")
        if objective.process.ends_in_noise:
            why = "its DPMSolverMultistepScheduler cannot begin where nothing of the image is left"
            raise _refusal("diffusion.rescale_betas_zero_snr", True, why, "--set sampling.sampler=ddim")
        if sampler.clip_sample and not sampler.thresholding:
            options |= {"thresholding": True, "sample_max_value": 1.0}  # a range of 1 at most: images are clamped
        return Recipe("DPMSolverMultistepScheduler", options, times, pipeline="DDPMPipeline")
    raise _unknown_sampler(sampler, "ddim")


def _flow(objective: Any, sampler: Any) -> Recipe:
    scheduler, scale = "FlowMatchEulerDiscreteScheduler", objective.time_scale
    _check_free(objective, sampler, scheduler, "flow_prediction")
    if scale != int(scale):
        raise _refusal("diffusion.time_scale", scale, f"its {scheduler} takes whole numbers", _OTHERWISE)
    options = {"num_train_timesteps": int(scale), "shift": sampler.time_shift or objective.time_shift}
    # Its own times would end at 1 / time_scale, and not at 1 / steps.
    return Recipe(scheduler, options, f"sigmas=[1 - i / {sampler.steps} for i in range({sampler.steps})]")


def _edm(objective: Any, sampler: Any) -> Recipe:
    scheduler = "EDMEulerScheduler"
    _check_free(objective, sampler, scheduler, "edm")
    if objective.time_scale != 1:
        why = f"its {scheduler} tells the network ln(sigma) / 4"
        raise _refusal("diffusion.time_scale", objective.time_scale, why, _OTHERWISE)
    options = {
        **{key: getattr(objective, key) for key in ("sigma_min", "sigma_max", "sigma_data")},
        "rho": sampler.rho,
        "prediction_type": "epsilon",  # as it calls the output of a preconditioned network
    }
    return Recipe(scheduler, options, f"num_inference_steps={sampler.steps}")


def _check_free(objective: Any, sampler: Any, scheduler: str, prediction: str) -> None:
    """Refuse all but Euler's method for what `prediction` means, with images that nothing holds."""
    if (given := objective.prediction_type or prediction) != prediction:
        raise _refusal("diffusion.prediction_type", given, f"its {scheduler} knows {prediction}", _OTHERWISE)
    if not _is_euler(sampler):
        raise _unknown_sampler(sampler, "euler")
    if sampler.eta:
        raise _refusal("sampling.eta", sampler.eta, f"its {scheduler} adds no such noise", "--set sampling.eta=0")
    for key in ("clip_sample", "thresholding"):
        if getattr(sampler, key):
            raise _refusal(
                f"sampling.{key}", True, f"its {scheduler} has no such option", f"--set sampling.{key}=false"
            )


def _is_euler(sampler: Any) -> bool:
    """Whether a step is one of Euler's method: DDIM's, which may add noise, is the same one otherwise."""
    if sampler.sampler == "euler" and sampler.s_churn:
        why = "its schedulers add this noise only after the network has seen the image"
        raise _refusal("sampling.s_churn", sampler.s_churn, why, "--set sampling.s_churn=0")
    return sampler.sampler in ("ddim", "euler")


def _unknown_sampler(sampler: Any, nearest: str) -> UserError:
    why = "no scheduler of its makes the same steps"
    return _refusal("sampling.sampler", sampler.sampler, why, f"--set sampling.sampler={nearest}")


def _refusal(key: str, value: object, why: str, way_out: str) -> UserError:
    said = str(value).lower() if isinstance(value, bool) else repr(value)
    return UserError(f"--to diffusers: {key} = {said}: {why}; use {way_out}")


def _write_config(folder: Path, part: Any) -> None:
    folder.mkdir(exist_ok=True)
    write_file(folder / part.config_name, part.to_json_string().encode())


def _untyped(model: Any) -> Any:
    return model
