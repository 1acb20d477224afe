"""The format `diffusers`: a folder that diffusers loads, with the model, its encoders, and a scheduler.

The code that is returned makes the images of the run: a call of a pipeline, or a loop.
"""

import importlib
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define
from torch import nn

import hookdiff.diffusion as parts
from hookdiff import Loop, UserError
from hookdiff.authors import ExportedRun, ExportFormat
from hookdiff.disk import new_folder, write_file, write_tensors
from hookdiff.encoding import ExportedTexts
from hookdiff.models import num_classes_of, plain_tensors, takes_time_later
from hookdiff_checkpoint.scheduler import OTHERWISE, Equivalent, diffusion_of, equivalent_of

_DECODERS = {"LDMPipeline": "vqvae"}  # name of the autoencoder in a pipeline; in others it is "vae"
_SD = "StableDiffusionPipeline"
_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


@define(frozen=True)
class DiffusersFolder(ExportFormat):
    """DIR with model, encoders, scheduler and pipeline, which diffusers loads."""

    makes_folder = True
    has_sampler = True

    def is_earlier(self, out: Path) -> bool:
        return (out / "scheduler" / "scheduler_config.json").is_file()

    def write(self, run: ExportedRun, out: Path) -> str:
        return _write_folder(out, run, equivalent_of(run.loop))


def _write_folder(out: Path, run: ExportedRun, sampling: Equivalent) -> str:
    """Write the model, its encoders of latents and texts and a scheduler to the folder `out`.

    Returns the code that uses them.
    """
    loop = run.loop
    diffusers = importlib.import_module("diffusers")
    scheduler = getattr(diffusers, sampling.scheduler)(**sampling.options)
    model: Any = loop.model
    objective = diffusion_of(loop)
    shape, codec, kind = loop.feed.shape, loop.feed.codec, type(model).__name__
    if kind == "UNet2DModel":  # the network takes any size; pipelines read here the size to generate
        model.register_to_config(sample_size=shape[-1] if shape[-1] == shape[-2] else list(shape[1:]))
    scale: list[Any] = [objective.data_mean, objective.data_std]  # tuples, by channel
    vae = codec.encoder.to_diffusers(*scale) if codec else None
    texts = _texts(loop, str(out))
    pipeline, arguments = _pipeline(loop, sampling, vae, texts)
    name = "unet" if kind.startswith("UNet") else "transformer"
    models = {name: model} if vae is None else {name: model, _DECODERS.get(pipeline, "vae"): vae}
    if pipeline == _SD:
        scheduler.register_to_config(steps_offset=1)  # otherwise set with a warning; the steps do not use it
    copied = dict(texts.files)
    if codec and (files := codec.encoder.unchanged_files(*scale)):
        copied[_DECODERS.get(pipeline, "vae")] = files
    with new_folder(out) as folder:
        for each, files in copied.items():
            _copy(folder / each, files)
        for each, part in models.items():
            if each in copied:
                continue
            _write_config(folder / each, part)
            tensors = run.tensors() if part is model else plain_tensors(part)
            origin = run.metadata if part is model else None
            write_tensors(folder / each / "diffusion_pytorch_model.safetensors", tensors, origin)
        for each, part in texts.parts.items():
            if each not in copied:
                _write_of_transformers(folder / each, part)
        _write_config(folder / "scheduler", scheduler)
        if not pipeline:
            return _own_loop(loop, out, name, sampling, vae, texts)
        others = {**texts.parts, **_NO_CHECKER} if pipeline == _SD else {}
        assembled = getattr(diffusers, pipeline)(**models, **others, scheduler=scheduler)
        if pipeline == "DiTPipeline" and loop.feed.classes:
            assembled.register_to_config(id2label=dict(enumerate(loop.feed.classes)))
        _write_config(folder, assembled)
        return f"{pipeline}.from_pretrained({str(out)!r})({arguments})"


def _texts(loop: Loop, folder: str) -> ExportedTexts:
    """Return the encoder of texts of a run, which will be written to `folder`; without parts if the run has none.

    Raises:
        UserError: for several encoders, and for an encoder that cannot be exported.
    """
    texts = loop.feed.reader.texts
    encoders = texts.encoders if texts else {}
    if not encoders:
        return ExportedTexts({}, "", {})
    if len(encoders) > 1:
        several = f"data.encode: {', '.join(encoders)}: only one encoder of texts can be exported"
        raise UserError(f"--to diffusers: {several}; use {OTHERWISE}")
    [(name, encoder)] = encoders.items()
    exported: ExportedTexts = encoder.to_diffusers(name, folder)
    return exported


def _pipeline(loop: Loop, sampling: Equivalent, vae: Any, texts: ExportedTexts) -> tuple[str, str]:
    """Return the class of the pipeline that makes the images of the run, and its arguments; "" if there is none."""
    model: Any = loop.model
    objective = diffusion_of(loop)
    kind, num_classes, scale = type(model).__name__, num_classes_of(model), _scale(sampling.guidance)
    if not sampling.pipeline:
        return "", ""
    if vae is not None:  # pipelines of latents take only square images and one scaling factor
        is_square, config = isinstance(model.config.get("sample_size"), int), vae.config
        per_channel = any(config.get(f"latents_{which}") is not None for which in ("mean", "std"))
        if not is_square or config.get("shift_factor") or per_channel:
            return "", ""
    if kind == "UNet2DConditionModel" and _is_stable_diffusion(loop, sampling, vae, texts):
        eta = f", eta={sampling.step['eta']}" if "eta" in sampling.step else ""
        return _SD, f"prompts, guidance_scale={scale}, {sampling.times}{eta}"
    if objective.keywords:
        return "", ""
    if kind == "UNet2DModel" and not num_classes:
        return sampling.pipeline if vae is None else "LDMPipeline", sampling.times + _keywords(sampling.step)
    # DiTPipeline guides only at a scale above 1, takes class 1000 as "no class", and gives steps no options.
    is_guided_so = scale is not None and (scale == 1 or (scale > 1 and num_classes == 1000))
    if kind == "DiTTransformer2DModel" and vae is not None and is_guided_so and not any(sampling.step.values()):
        return "DiTPipeline", f"class_labels=labels, guidance_scale={scale}, {sampling.times}"
    return "", ""


def _is_stable_diffusion(loop: Loop, sampling: Equivalent, vae: Any, texts: ExportedTexts) -> bool:
    """Return whether StableDiffusionPipeline makes the images of a run with a UNet2DConditionModel."""
    objective = diffusion_of(loop)
    if vae is None or texts.pipeline != _SD or objective.conditional:
        return False
    side, scale = loop.feed.picture_shape[-1], _scale(sampling.guidance) or 0
    factor = 2 ** (len(vae.config.get("block_out_channels", ())) - 1)  # computed as in the pipeline
    return (
        [*objective.keywords] == ["encoder_hidden_states"]
        and objective.condition_names[0] in texts.conditions
        and scale >= 1
        and side == loop.feed.shape[-1] * factor
        and side % 8 == 0
        # The pipeline sets an offset of 1, which only "leading" uses.
        and (sampling.options["timestep_spacing"] == "trailing" or sampling.options["steps_offset"] == 1)
    )


def _own_loop(loop: Loop, out: Path, name: str, sampling: Equivalent, vae: Any, texts: ExportedTexts) -> str:
    """Return the code of a loop that makes the images of the run with the model in the folder `name` of `out`."""
    model: Any = loop.model
    objective = diffusion_of(loop)
    num_classes = num_classes_of(model)
    start, seen = "noise * scheduler.init_noise_sigma", "scheduler.scale_model_input(x, t)"
    first = f"{seen if sampling.scales else 'x'}, {'timestep=' * takes_time_later(model)}t.expand(len(x))"
    labels = "labels", f"torch.full_like(labels, {num_classes})"
    codes = {each: f"conditions[{each!r}]" for each in objective.condition_names}
    conditions = {each: (code, f"torch.zeros_like({code})") for each, code in codes.items()} | {**texts.conditions}

    def call(which: int) -> str:
        """Return a call of the model with labels and conditions (0), or without them (1)."""
        arguments = {keyword: conditions[name][which] for keyword, name in objective.keywords.items()}
        return f"model({first}{f', class_labels={labels[which]}' * bool(num_classes)}{_nested(arguments)}).sample"

    opened = [("model", type(model).__name__, name), ("scheduler", sampling.scheduler, "scheduler")]
    opened += [] if vae is None else [("vae", type(vae).__name__, "vae")]
    remark = f"  # {sampling.remark}\n" if sampling.remark else ""
    lines = [f"  {key} = {kind}.from_pretrained({str(out)!r}, subfolder={at!r})\n" for key, kind, at in opened]
    return (
        "diffusers has no pipeline that makes these images; in a loop of your own:\n"
        f"{''.join(lines)}"
        f"{textwrap.indent(texts.code, '  ')}"
        f"{remark}"
        f"  scheduler.set_timesteps({sampling.times})\n"
        f"  x = {start if sampling.scales else 'noise'}\n"
        f"  for t in scheduler.timesteps:\n"
        f"      output = {call(0)}\n"
        f"{_guided(call(1), sampling.guidance) if num_classes or objective.keywords else ''}"
        f"      x = scheduler.step(output, t, x{_keywords(sampling.step)}).prev_sample"
        f"{'' if vae is None else _decoded(vae.config)}"
    )


def _nested(arguments: Mapping[str, str]) -> str:
    """Return the code of the `arguments` of a call, which are expressions; a keyword with a dot is a key in a dict."""
    by_keyword: dict[str, list[str]] = {}
    for keyword, value in arguments.items():
        outer, dot, key = keyword.partition(".")
        by_keyword.setdefault(outer, []).append(f"{key!r}: {value}" if dot else value)
    return _keywords({outer: arguments.get(outer, f"{{{', '.join(items)}}}") for outer, items in by_keyword.items()})


def _keywords(arguments: Mapping[str, Any]) -> str:
    return "".join(f", {key}={value}" for key, value in arguments.items())


def _decoded(config: Mapping[str, Any]) -> str:
    """Return the line of code that decodes the latents of the model into pictures, with the scale in `config`."""
    scaled = "x" if config.get("scaling_factor", 1) == 1 else "x / vae.config.scaling_factor"
    mean, std = (f"torch.tensor(vae.config.latents_{which}).view(-1, 1, 1)" for which in ("mean", "std"))
    if config.get("latents_std") is not None:
        scaled += f" * {std}"
    if config.get("latents_mean") is not None:
        scaled += f" + {mean}"
    elif config.get("shift_factor"):
        scaled += " + vae.config.shift_factor"
    return f"\n  pictures = vae.decode({scaled}).sample.clamp(-1, 1)"


def _scale(guidance: Any) -> float | None:
    """Return the scale of classifier-free guidance in all steps; None for another guidance."""
    is_free = type(guidance) is parts.ClassifierFree
    if is_free and (guidance.scale == 1 or guidance.interval == parts.ClassifierFree().interval):
        return float(guidance.scale)
    return None


def _guided(without: str, guidance: Any) -> str:
    """Return the lines of code that guide `output` away from the call `without`; a comment for another guidance."""
    scale = _scale(guidance)
    if scale is None:
        return f"      # left out: sampling.guidance, {guidance}\n"
    guided = f"      without = {without}\n      output = without + {scale} * (output - without)\n"
    return "" if scale == 1 else guided


def _write_of_transformers(folder: Path, part: Any) -> None:
    """Write a network of transformers, or a tokenizer."""
    if isinstance(part, nn.Module):
        config: Any = part.config
        config.architectures, config.dtype = [type(part).__name__], part.dtype
        folder.mkdir()
        write_file(folder / "config.json", config.to_json_string().encode())
        write_tensors(folder / "model.safetensors", plain_tensors(part))
    else:
        part.save_pretrained(folder)


def _copy(folder: Path, files: Mapping[str, Path]) -> None:
    folder.mkdir()
    for name, path in files.items():
        shutil.copyfile(path, folder / name)


def _write_config(folder: Path, part: Any) -> None:
    folder.mkdir(exist_ok=True)
    write_file(folder / part.config_name, part.to_json_string().encode())
