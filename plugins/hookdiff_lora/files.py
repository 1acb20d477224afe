"""Reads adapters from files of diffusers and of kohya."""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from hookdiff import UserError, listed, nearest
from hookdiff.disk import Weights, read_weights
from hookdiff_lora.adapter import Adapter, adapters_of

logger = logging.getLogger("hookdiff")

KEY = "plugins.lora.start_from"
_KOHYA = "lora_unet_"
_NETWORKS = ("unet.", "transformer.", "")  # what stands before the name of a layer
_TEXT = ("text_encoder", "lora_te")  # beginnings of the names of adapters of text encoders
_ALPHA = ".alpha"
_PART = re.compile(r"(.+?)(?:[._]lora)?\.(lora_A|lora_B|lora_down|lora_up|down|up)\.weight")
_IS_DOWN = {"lora_A": True, "lora_down": True, "down": True, "lora_B": False, "lora_up": False, "up": False}
_SHOWN = 5  # names in a message


@define(frozen=True)
class _Read:
    """The adapter of a layer in a file: A, B and alpha; without alpha, it is the rank."""

    down: Tensor
    up: Tensor
    alpha: float | None

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


def load_adapter(model: nn.Module, path: Path) -> None:
    """Copy the adapters in a safetensors file of diffusers or kohya into the adapters of `model`.

    The strength of the file is kept: if its alpha / rank differs from that of `model`, B is multiplied.

    Raises:
        UserError: for a file that is no adapter, is of another network or rank, or has layers that `model` does not
            adapt.
    """
    ours = adapters_of(model)
    read = _read(read_weights(path, KEY), model, ours)
    problems = [line for name, found in read.items() for line in _problems(name, found, ours.get(name))]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise UserError("\n  ".join([f"{KEY}: {path} does not fit:", *problems[:_SHOWN], *more]))
    with torch.no_grad():
        for name, found in read.items():
            ours[name].down.copy_(found.down)
            ours[name].up.copy_(found.up.float() * (found.scale / ours[name].scale))
    logger.info("lora: started from %s: the adapters of %d of %d layers", path, len(read), len(ours))
    if lacking := ours.keys() - read.keys():
        logger.warning("lora: %s has no adapter of %s, which begin anew", path, listed(sorted(lacking), _SHOWN))


def _problems(name: str, found: _Read, ours: Adapter | None) -> Iterator[str]:
    if ours is None:
        yield f"{name} has no adapter in this run; add it to plugins.lora.targets"
    elif found.rank != ours.rank:
        yield f"{name} has rank {found.rank}, the run has {ours.rank}: set plugins.lora.rank = {found.rank}"
    else:
        for what, theirs, mine in (("A", found.down, ours.down), ("B", found.up, ours.up)):
            if theirs.shape != mine.shape:
                yield f"{name}: {what} has shape {tuple(theirs.shape)}, in this network {tuple(mine.shape)}"
            elif not theirs.isfinite().all():
                yield f"{name}: {what} has values that are not finite"


def _read(weights: Weights, model: nn.Module, ours: Mapping[str, Adapter]) -> dict[str, _Read]:
    """Return the adapters in a file by the names of their layers, in the names of `model`."""
    tensors = dict(weights.tensors(name for name in weights.shapes if not name.startswith(_TEXT)))
    if len(tensors) < len(weights.shapes):
        logger.warning("lora: the adapters of text encoders in %s are left out", weights.path)
    if all(name.startswith(_KOHYA) for name in tensors):
        tensors = _in_names_of_diffusers(tensors, model)
    pairs, alphas, others = dict[str, dict[bool, Tensor]](), dict[str, float](), list[str]()
    for name, value in tensors.items():
        if match := _PART.fullmatch(name):
            pairs.setdefault(_layer(match[1]), {})[_IS_DOWN[match[2]]] = value
        elif name.endswith(_ALPHA):
            of = name.removesuffix(_ALPHA)  # of a layer, or of its A
            alphas[_layer(match[1] if (match := _PART.fullmatch(of)) else of)] = float(value)
        else:
            others.append(name)
    others += [name for name, pair in pairs.items() if len(pair) < 2]
    if others or not pairs:
        what = f"{listed(others, _SHOWN)} is no A or B of an adapter" if others else "it has no tensors of adapters"
        raise UserError(f"{KEY}: {weights.path} is no file of LoRA: {what}")
    begin = next(start for start in _NETWORKS if all(name.startswith(start) for name in pairs))
    known = dict(model.named_modules())
    read = {}
    for name, pair in pairs.items():
        layer = name.removeprefix(begin)
        if layer not in known:
            raise UserError(f"{KEY}: {weights.path}: the network has no layer {layer}{nearest(layer, ours)}")
        read[layer] = _Read(pair[True], pair[False], alphas.get(name))
    return read


def _layer(name: str) -> str:
    """Return the name of a layer of attention for its name in the first files of diffusers."""
    before, processor, after = name.rpartition(".processor.")
    return f"{before}.{'to_out.0' if after == 'to_out' else after}" if processor else name


def _in_names_of_diffusers(tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return tensors of kohya by their names in diffusers, with the tensors of alpha.

    Files for SDXL number the blocks as the code of the paper does.
    """
    import diffusers

    flat = {name.replace(".", "_"): name for name, _ in model.named_modules()}
    given = {name.partition(".")[0].removeprefix(_KOHYA) for name in tensors}
    if not given <= flat.keys():
        loader: Any = diffusers.StableDiffusionXLPipeline
        found, alphas = loader.lora_state_dict(dict(tensors), unet_config=model.config)
        return {**found, **{name: torch.tensor(alpha) for name, alpha in (alphas or {}).items()}}
    return {
        flat[layer.removeprefix(_KOHYA)] + dot + rest: value
        for name, value in tensors.items()
        for layer, dot, rest in [name.partition(".")]
    }
