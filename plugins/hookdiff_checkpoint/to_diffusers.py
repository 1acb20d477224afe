"""Writes a run as a folder that diffusers loads: the model, and a scheduler that makes the steps of the run's sampler.

The options of the schedulers are those of diffusers 0.42. A sampler that no scheduler reproduces is refused, because
the images would differ from those of the run.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

import hookdiff.diffusion as parts
from hookdiff import Loop, UserError
from hookdiff.disk import new_folder, write_file, write_tensors
from hookdiff.options import Choice, name_of
from hookdiff_checkpoint.export import plain_tensors

_UNBOUNDED = 1e9  # largest range of dynamic thresholding, which has no limit here
_OTHERWISE = "--to safetensors"
_DECODERS = {"LDMPipeline": "vqvae"}  # name of the autoencoder in a pipeline; in others it is "vae"


@define(frozen=True)
class Equivalent:
    """The calls in diffusers that sample as the sampler of a run does."""

    scheduler: str  # class
    options: Mapping[str, Any]
    times: str  # argument of set_timesteps
    step: Mapping[str, Any] = field(factory=dict)  # arguments of each step
    pipeline: str | None = None  # class that makes these calls, for a UNet2DModel of pictures without classes
    scales: bool = False  # the scheduler scales the noise, and what the network gets
    guidance: Any = None  # of the run


def equivalent_of(loop: Loop) -> Equivalent:
    """Return the calls that sample as the sampler of `loop` does; raises UserError with the key if there are none."""
    kind = type(loop.model)
    if kind.__module__.partition(".")[0] != "diffusers":
        raise UserError(f"--to diffusers: model.use: {kind.__name__} is no class of diffusers; use {_OTHERWISE}")
    objective: Any = loop.objective
    sampling: Any = loop.sampler
    for key, neutral in () if loop.feed.codec else (("data_mean", 0), ("data_std", 1)):
        given = getattr(objective, key)
        if any(value != neutral for value in given):
            raise _refusal(f"diffusion.{key}", given, "its pipelines would not undo the standardisation", _OTHERWISE)
    _check("diffusion.process", objective.process, (parts.VP, parts.DDPMProcess, parts.Flow, parts.EDM))
    kinds: dict[type, Callable[[Any, Any], Equivalent]] = {
        parts.VP: _with_timesteps,
        parts.DDPMProcess: _with_timesteps,
        parts.Flow: _flow,
        parts.EDM: _edm,
    }
    return evolve(kinds[type(objective.process)](objective, sampling.fit(objective)), guidance=sampling.guidance)


def write_folder(out: Path, loop: Loop, sampling: Equivalent, about: Mapping[str, str]) -> str:
    """Write the model of `loop`, the autoencoder of its latents and a scheduler to the folder `out`.

    Returns the code that uses them. `about` goes into the metadata of the model's weights.
    """
    diffusers = importlib.import_module("diffusers")
    scheduler = getattr(diffusers, sampling.scheduler)(**sampling.options)
    model: Any = loop.model
    objective: Any = loop.objective
    shape, codec, kind = loop.feed.shape, loop.feed.codec, type(model).__name__
    if kind == "UNet2DModel":  # it takes any size; a pipeline reads here which size to generate
        model.register_to_config(sample_size=shape[-1] if shape[-1] == shape[-2] else list(shape[1:]))
    vae = codec.encoder.to_diffusers(objective.data_mean, objective.data_std) if codec else None
    pipeline, arguments = _pipeline(sampling, model, vae)
    name = "unet" if kind.startswith("UNet") else "transformer"
    models = {name: model} if vae is None else {name: model, _DECODERS.get(pipeline, "vae"): vae}
    with new_folder(out) as folder:
        for each, part in models.items():
            _write_config(folder / each, part)
            tensors, origin = plain_tensors(part), about if part is model else None
            write_tensors(folder / each / "diffusion_pytorch_model.safetensors", tensors, origin)
        _write_config(folder / "scheduler", scheduler)
        if not pipeline:
            return _own_loop(out, name, model, sampling, vae)
        made = getattr(diffusers, pipeline)(**models, scheduler=scheduler)
        if pipeline == "DiTPipeline" and loop.feed.classes:
            made.register_to_config(id2label=dict(enumerate(loop.feed.classes)))
        _write_config(folder, made)
        return f"{pipeline}.from_pretrained({str(out)!r})({arguments})"


def _pipeline(sampling: Equivalent, model: Any, vae: Any) -> tuple[str, str]:
    """Return the class of the pipeline that makes the images of the run, and the arguments of its call; "" for none."""
    kind, num_classes, scale = type(model).__name__, getattr(model, "num_classes", 0), _scale(sampling.guidance)
    if not sampling.pipeline:
        return "", ""
    if vae is not None:  # pipelines of latents know one side and one factor
        is_square, config = isinstance(model.config.get("sample_size"), int), vae.config
        if not is_square or config.get("shift_factor") or config.get("latents_std"):
            return "", ""
    if kind == "UNet2DModel" and not num_classes:
        return sampling.pipeline if vae is None else "LDMPipeline", sampling.times + _keywords(sampling.step)
    # DiTPipeline guides away from class 1000, by more than 1, and gives the scheduler no options.
    is_guided_so = scale is not None and (scale == 1 or (scale > 1 and num_classes == 1000))
    if kind == "DiTTransformer2DModel" and vae is not None and is_guided_so and not any(sampling.step.values()):
        return "DiTPipeline", f"class_labels=labels, guidance_scale={scale}, {sampling.times}"
    return "", ""


def _own_loop(out: Path, name: str, model: Any, sampling: Equivalent, vae: Any) -> str:
    """Return the code of a loop that makes the images of the run with `model` in the folder `name` of `out`."""
    num_classes = getattr(model, "num_classes", 0)
    start, seen = "noise * scheduler.init_noise_sigma", "scheduler.scale_model_input(x, t)"
    given = "t.expand(len(x))" + ", class_labels=labels" * bool(num_classes)
    output = f"model({seen if sampling.scales else 'x'}, {given}).sample"
    opened = [("model", type(model).__name__, name), ("scheduler", sampling.scheduler, "scheduler")]
    opened += [] if vae is None else [("vae", type(vae).__name__, "vae")]
    lines = [f"  {key} = {kind}.from_pretrained({str(out)!r}, subfolder={at!r})\n" for key, kind, at in opened]
    return (
        "diffusers has no pipeline that makes these images; in a loop of your own:\n"
        f"{''.join(lines)}"
        f"  scheduler.set_timesteps({sampling.times})\n"
        f"  x = {start if sampling.scales else 'noise'}\n"
        f"  for t in scheduler.timesteps:\n"
        f"      output = {output}\n"
        f"{_guided(output, sampling.guidance, num_classes) if num_classes else ''}"
        f"      x = scheduler.step(output, t, x{_keywords(sampling.step)}).prev_sample"
        f"{'' if vae is None else _decoded(vae.config)}"
    )


def _keywords(arguments: Mapping[str, Any]) -> str:
    return "".join(f", {key}={value}" for key, value in arguments.items())


def _decoded(config: Mapping[str, Any]) -> str:
    """Return the line of code that makes pictures of what the model makes, with the scale that is in `config`."""
    scaled = "x" if config.get("scaling_factor", 1) == 1 else "x / vae.config.scaling_factor"
    if config.get("latents_std"):
        mean, std = (f"torch.tensor(vae.config.latents_{which}).view(-1, 1, 1)" for which in ("mean", "std"))
        scaled += f" * {std} + {mean}"
    elif config.get("shift_factor"):
        scaled += " + vae.config.shift_factor"
    return f"\n  pictures = vae.decode({scaled}).sample.clamp(-1, 1)"


def _scale(guidance: Any) -> float | None:
    """Return the scale of classifier-free guidance in all steps; None for another guidance."""
    is_free = type(guidance) is parts.ClassifierFree
    if is_free and (guidance.scale == 1 or guidance.interval == parts.ClassifierFree().interval):
        return float(guidance.scale)
    return None


def _guided(output: str, guidance: Any, num_classes: int) -> str:
    """Return the lines of code that guide what the call `output` has returned; a comment for another guidance."""
    scale = _scale(guidance)
    if scale is None:
        return f"      # left out: sampling.guidance, {guidance}\n"
    none = output.replace("=labels", f"=torch.full_like(labels, {num_classes})")
    guided = f"      without = {none}\n      output = without + {scale} * (output - without)\n"
    return "" if scale == 1 else guided


def _with_timesteps(objective: Any, sampling: Any) -> Equivalent:
    process, sampler, spacing, clipping = objective.process, sampling.sampler, sampling.spacing, sampling.clipping
    steps, timesteps = sampling.steps, process.timesteps
    _check("diffusion.prediction", objective.prediction, (parts.Epsilon, parts.SamplePrediction, parts.VPrediction))
    _check("sampling.spacing", spacing, (parts.Trailing, parts.Leading))
    _check("sampling.clipping", clipping, (parts.NoClipping, parts.Clamp, parts.DynamicThreshold))
    if timesteps % steps:
        near = min((n for n in range(1, timesteps + 1) if timesteps % n == 0), key=lambda n: abs(n - steps))
        why = f"its schedulers visit other timesteps unless this divides diffusion.process.timesteps = {timesteps}"
        raise _refusal("sampling.steps", steps, why, f"--steps {near}")
    options = {
        "num_train_timesteps": timesteps,
        # For all schedules: diffusers does not know some, and rescales to zero terminal SNR in another way.
        "trained_betas": process.tables.betas.tolist(),
        "prediction_type": objective.prediction.use,  # both libraries have the same names
        "timestep_spacing": spacing.use,
    }
    if type(clipping) is parts.DynamicThreshold:
        options |= {"thresholding": True, "dynamic_thresholding_ratio": clipping.ratio, "sample_max_value": _UNBOUNDED}
    times, clamps = f"num_inference_steps={steps}", {"clip_sample": type(clipping) is parts.Clamp}
    _check("sampling.sampler", sampler, (parts.DDIM, parts.DDPM, parts.Euler, parts.DPMSolver2M))
    _check_noise(sampler, "churn")
    if type(sampler) in (parts.DDIM, parts.Euler):
        # By default the scheduler goes on with noise that does not match the clipped image.
        step = {"eta": getattr(sampler, "eta", 0.0), "use_clipped_model_output": type(clipping) is not parts.NoClipping}
        return Equivalent("DDIMScheduler", {**options, **clamps, "set_alpha_to_one": True}, times, step, "DDIMPipeline")
    if type(sampler) is parts.DDPM:
        if sampler.variance == "fixed_large" and type(spacing) is parts.Trailing and steps < timesteps:
            why = "with spacing 'trailing' its DDPMScheduler adds this noise to the image itself"
            way_out = "--set sampling.sampler.variance=fixed_small"
            raise _refusal("sampling.sampler.variance", sampler.variance, why, way_out)
        options |= {**clamps, "variance_type": sampler.variance}
        return Equivalent("DDPMScheduler", options, times, pipeline="DDPMPipeline")
    _check("sampling.spacing", spacing, (parts.Trailing,))
    if process.ends_in_noise:
        why = "its DPMSolverMultistepScheduler cannot begin where nothing of the image is left"
        raise _refusal("diffusion.process.rescale_betas_zero_snr", True, why, "--sampler ddim")
    if type(clipping) is parts.Clamp:
        options |= {"thresholding": True, "sample_max_value": 1.0}  # a range of at most 1 clamps
    return Equivalent("DPMSolverMultistepScheduler", options, times, pipeline="DDPMPipeline")


def _flow(objective: Any, sampling: Any) -> Equivalent:
    scale, spacing = objective.process.time_scale, sampling.spacing
    _check_free(objective, sampling, parts.FlowPrediction, (parts.Trailing, parts.Shifted))
    if scale != int(scale):
        raise _refusal("diffusion.process.time_scale", scale, "its flow scheduler takes whole numbers", _OTHERWISE)
    shift = spacing.shift if type(spacing) is parts.Shifted else objective.process.shift
    # The times of the scheduler would end at 1 / time_scale, and not at 1 / steps.
    times = f"sigmas=[1 - i / {sampling.steps} for i in range({sampling.steps})]"
    return Equivalent("FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": int(scale), "shift": shift}, times)


def _edm(objective: Any, sampling: Any) -> Equivalent:
    process = objective.process
    _check_free(objective, sampling, parts.EDMPrediction, (parts.Karras,))
    if process.time_scale != 1:
        why = "its EDMEulerScheduler gives the network ln(sigma) / 4"
        raise _refusal("diffusion.process.time_scale", process.time_scale, why, _OTHERWISE)
    options = {
        "sigma_min": process.sigma_min,
        "sigma_max": process.sigma_max,
        "sigma_data": objective.prediction.sigma_data,
        "rho": sampling.spacing.rho,
        "prediction_type": "epsilon",  # the scheduler's name for the output of a preconditioned network
    }
    return Equivalent("EDMEulerScheduler", options, f"num_inference_steps={sampling.steps}", scales=True)


def _check_free(objective: Any, sampling: Any, prediction: type[Choice], spacings: tuple[type[Choice], ...]) -> None:
    """Refuse every sampler but Euler's method for `prediction`, without noise and without clipping."""
    _check("diffusion.prediction", objective.prediction, (prediction,))
    _check("sampling.sampler", sampling.sampler, (parts.Euler, parts.DDIM))
    _check_noise(sampling.sampler, "churn", "eta")
    _check("sampling.spacing", sampling.spacing, spacings)
    _check("sampling.clipping", sampling.clipping, (parts.NoClipping,))


def _check_noise(sampler: Any, *options: str) -> None:
    for option in options:
        if value := getattr(sampler, option, 0):
            key = f"sampling.sampler.{option}"
            why = "its schedulers add no noise, or only after the network has seen the image"
            raise _refusal(key, value, why, f"--set {key}=0")


def _check(key: str, part: Choice, known: tuple[type[Choice], ...]) -> None:
    """Refuse a part of another class than those `known`; a derived class may compute something else."""
    if type(part) not in known:
        names = [name_of(kind) for kind in known]
        way_out = f"--set {key}={names[0]}" if key.startswith("sampling.") else _OTHERWISE
        way_out = f"--sampler {names[0]}" if key == "sampling.sampler" else way_out
        raise _refusal(key, part.use, f"with the other options its schedulers have only {', '.join(names)}", way_out)


def _refusal(key: str, value: object, why: str, way_out: str) -> UserError:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return UserError(f"--to diffusers: {key} = {shown}: {why}; use {way_out}")


def _write_config(folder: Path, part: Any) -> None:
    folder.mkdir(exist_ok=True)
    write_file(folder / part.config_name, part.to_json_string().encode())
