"""Writes a run as a folder that diffusers loads: the model, the autoencoder of its latents, and a scheduler.

With it goes the code that makes the images of the run: a call of a pipeline, or a loop.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hookdiff.diffusion as parts
from hookdiff import Loop
from hookdiff.disk import new_folder, write_file, write_tensors
from hookdiff_checkpoint.export import plain_tensors
from hookdiff_checkpoint.scheduler import Equivalent

_DECODERS = {"LDMPipeline": "vqvae"}  # name of the autoencoder in a pipeline; in others it is "vae"


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


def _write_config(folder: Path, part: Any) -> None:
    folder.mkdir(exist_ok=True)
    write_file(folder / part.config_name, part.to_json_string().encode())
