"""Encodes pictures by an autoencoder of diffusers: `[data.encode.image] use = "autoencoder"`."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import define, field
from attrs.validators import in_
from torch import Tensor

from hookdiff import UserError, listed
from hookdiff.disk import INDEX, Weights, local_path
from hookdiff.encoding import (
    Encoded,
    PictureEncoder,
    digest_seen,
    is_same_scale,
    load_network,
    scale_text,
    table_in,
    usual_files,
    weights_in,
)
from hookdiff.options import about

logger = logging.getLogger("hookdiff")

# The supported classes, each with the attribute that holds the latents in the result of its `encode`.
_CLASSES = {"AutoencoderKL": "latent_dist", "AutoencoderDC": "latent", "AutoencoderTiny": "latents"}
_CONFIG, _USUAL = "config.json", "diffusion_pytorch_model.safetensors"
_UNSCALED = {"scaling_factor": 1.0, "shift_factor": None, "latents_mean": None, "latents_std": None}


@define(frozen=True)
class Autoencoder(PictureEncoder):
    """A frozen autoencoder in a folder, as diffusers saves it: AutoencoderKL, AutoencoderDC or AutoencoderTiny."""

    path: str = field(metadata=about("folder with config.json and the weights in safetensors, or `hub:ORG/NAME`"))
    posterior: Literal["sample", "mean"] = field(
        default="sample",
        validator=in_(("sample", "mean")),
        metadata=about('latents to train on: a "sample" of the posterior in each epoch, or its "mean"'),
    )
    scale: Literal["measured", "model", "none"] = field(
        default="measured",
        validator=in_(("measured", "model", "none")),
        metadata=about(
            'where `diffusion.data_mean` and `data_std` come from: "measured" on the training samples, "model" (the '
            'numbers in config.json), or "none"'
        ),
    )
    precision: Literal["float32", "bf16"] = field(
        default="float32", validator=in_(("float32", "bf16")), metadata=about("dtype in which pictures become latents")
    )
    decode_precision: Literal["float32", "bf16"] = field(
        default="float32", validator=in_(("float32", "bf16")), metadata=about("dtype in which latents become pictures")
    )

    @property
    def draws(self) -> bool:
        return self.posterior == "sample"

    @property
    def folder(self) -> Path:
        return local_path(self.path, "data.encode")

    def config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            UserError: if there is no config.json, or its class is not supported.
        """
        config = table_in(self.folder, _CONFIG, "autoencoder of diffusers", _is_known)
        if not isinstance(name := config.get("_class_name"), str):
            raise UserError(f"data.encode: {self.folder / _CONFIG}: set `_class_name` to a class of diffusers")
        if name not in _CLASSES:
            raise UserError(f"data.encode: {self.path} holds a {name}; expected {listed(list(_CLASSES), 3)}")
        return config

    def weights(self) -> Weights:
        """Find the weights.

        Raises:
            UserError: if the folder has no weights in safetensors, or several files to choose from.
        """
        return weights_in(self.folder, (_USUAL.removesuffix(".safetensors") + INDEX, _USUAL))

    def digest(self) -> str:
        config, weights = self.config(), self.weights()
        return digest_seen([weights], [], json.dumps(config, sort_keys=True), self.precision)

    def open(self, device: torch.device) -> Encoded:
        network = self._loaded().to(device).eval().requires_grad_(False)
        return _Network(self, network, _CLASSES[type(network).__name__])

    def _loaded(self) -> Any:
        import diffusers

        config = self.config()
        logger.info("data.encode: the %s in %s", name := config["_class_name"], self.folder)
        kind = getattr(diffusers, name)
        return load_network(kind, self.folder, config, self.weights(), _USUAL, low_cpu_mem_usage=False)

    def moments(self) -> tuple[Sequence[float], Sequence[float]] | None:
        if self.scale == "measured":
            return None
        if self.scale == "none":
            return (0.0,), (1.0,)
        return self._own_scale()

    def _own_scale(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the mean and std with which pipelines of diffusers scale latents x to (x - mean) / std.

        A key that is missing in config.json has the default of the autoencoder's class. Other keys are ignored.
        """
        import diffusers

        config = self.config()
        known = inspect.signature(getattr(diffusers, config["_class_name"]).__init__).parameters
        scales = {key: config.get(key, known[key].default) for key in _UNSCALED if key in known}
        num = config.get("latent_channels", known["latent_channels"].default)
        [factor] = self._numbers("scaling_factor", scales["scaling_factor"], 1, above=0)
        shift = scales.get("shift_factor")
        mean = self._numbers("shift_factor", 0.0 if shift is None else shift, 1)
        if (center := scales.get("latents_mean")) is not None:
            mean = self._numbers("latents_mean", center, num)
        width = scales.get("latents_std")
        std = (1.0,) if width is None else self._numbers("latents_std", width, num, above=0)
        return mean, tuple(deviation / factor for deviation in std)

    def _numbers(self, key: str, value: Any, num: int, above: float = -math.inf) -> tuple[float, ...]:
        """Return the `num` numbers of a key of config.json, which has a list, or a single number if `num` is 1."""
        items = value if isinstance(value, list) else [value]
        are_numbers = all(type(item) in (int, float) and math.isfinite(item) and item > above for item in items)
        if len(items) != num or not are_numbers:
            expected = f"{num} finite number{'s' * (num != 1)}{f' above {above:g}' * math.isfinite(above)}"
            raise UserError(f"data.encode: {self.folder / _CONFIG}: {key} = {value!r}, expected {expected}")
        return tuple(map(float, items))

    def to_diffusers(self, mean: Sequence[float], std: Sequence[float]) -> Any:
        network = self._loaded()
        network.register_to_config(_name_or_path=None)  # the name is a local folder
        if self.unchanged_files(mean, std):
            return network
        if getattr(network, "quant_conv", None) is not None and network.post_quant_conv is not None:
            _fold(network, mean, std)
            network.register_to_config(**_UNSCALED)
        else:
            scale = self._own_scale()
            raise UserError(
                f"data.encode: this run has {scale_text((mean, std))}, but the {_CONFIG} in {self.path} has "
                f"{scale_text(scale)}, and the {type(network).__name__} has no quant_conv and post_quant_conv for the "
                'difference; to export to diffusers, train with scale = "model"'
            )
        return network

    def unchanged_files(self, mean: Sequence[float], std: Sequence[float]) -> dict[str, Path]:
        if not is_same_scale((mean, std), self._own_scale()):
            return {}
        return {_CONFIG: self.folder / _CONFIG, **usual_files(self.weights(), _USUAL)}


def _is_known(config: Mapping[str, Any]) -> bool:
    return config.get("_class_name") in list(_CLASSES)


@torch.no_grad()
def _fold(network: Any, mean: Sequence[float], std: Sequence[float]) -> None:
    """Change the 1 x 1 convolutions of `network`: it then encodes to, and decodes, z = (latents - mean) / std."""
    num = network.config.latent_channels
    center, width = (torch.tensor(values, dtype=torch.float64).expand(num) for values in (mean, std))
    first, last = network.post_quant_conv, network.quant_conv
    weight = first.weight.double()
    first.bias.add_(weight.flatten(1) @ center)
    first.weight.copy_(weight * width.view(-1, 1, 1))
    factor = torch.cat([1 / width, torch.ones(num)])  # factors of the means, and of the log-variances
    last.weight.copy_(last.weight.double() * factor.view(-1, 1, 1, 1))
    last.bias.copy_(last.bias.double() * factor - torch.cat([center / width, 2 * width.log()]))


@define(eq=False, slots=False)
class _Network:
    options: Autoencoder
    network: Any
    result: str  # attribute of the result of its `encode`

    @cached_property
    def channels(self) -> int:
        return int(self.network.config.in_channels)

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        if pictures.shape[1] != self.channels:
            way_out = "; set data.channels = 3 to convert grey pictures to RGB" if self.channels == 3 else ""
            raise UserError(
                f"data.encode: {self.options.path} takes pictures of {self.channels} channels, these have "
                f"{pictures.shape[1]}{way_out}"
            )
        with self._cast(self.options.precision, pictures):
            latents = getattr(self.network.encode(pictures), self.result)
        if self.result == "latent_dist":
            return latents.mean.float(), latents.std.float()
        return latents.float(), None

    def decode(self, latents: Tensor) -> Tensor:
        with self._cast(self.options.decode_precision, latents):
            pictures: Tensor = self.network.decode(latents).sample
        return pictures.float()

    @staticmethod
    def _cast(precision: str, values: Tensor) -> Any:
        return torch.autocast(values.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
