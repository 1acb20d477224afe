"""Asks the part `pretrained` which pictures and texts the network in a folder of diffusers takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define

from hookdiff import UserError
from hookdiff.disk import local_path
from hookdiff.encoding import table_in
from hookdiff.options import fit_to, published

_OPTION, _KEY = "--from", "model.path"
_BLOCKS = ("block_out_channels", "encoder_block_out_channels")  # of an autoencoder: a width for each size
_FOLDERS = ("unet", "transformer")  # of the network in a pipeline
_OF_SQUARES = ("DiTTransformer2DModel",)  # classes of networks that take squares alone
_CLASSES = ("num_class_embeds", "num_embeds_ada_norm")  # of a network that takes labels


@define(frozen=True)
class Pipeline:
    """A network in a folder of diffusers, and what the folder knows about a config."""

    path: str
    side: int | None  # of the pictures that the network was trained on; None: not known
    divisor: int  # must divide the side of a picture
    channels: int  # of a picture
    takes_texts: bool
    takes_classes: bool
    has_process: bool  # whether the folder says with which process the network was trained
    only_squares: bool = False  # the network takes no other pictures
    longest: int | None = None  # the longest side of a picture that it takes; None: any


def pipeline_at(path: str) -> Pipeline:
    """Look at the folder `path`, of a pipeline or of a network alone.

    Raises:
        UserError: if the folder has no network that can be trained on pictures.
    """
    table = {"use": "pretrained", "path": path}
    try:
        fitted = fit_to(published("model")["pretrained"][0].load(), table)
        known = fitted.elsewhere({"model": table})
    except UserError as error:
        raise UserError(str(error).replace(f"{_KEY}: ", f"{_OPTION}: ", 1)) from None
    network = fitted.values
    encode = known.defaults.get("data", {}).get("encode", {})
    factor, channels = 1, network.get("in_channels", 3)
    if "image" in encode:
        place = local_path(encode["image"]["path"], _OPTION)
        autoencoder = table_in(place, "config.json", "autoencoder of diffusers", asked_by=_OPTION)
        factor, channels = _halvings(autoencoder, _BLOCKS), autoencoder.get("in_channels", 3)
    if "latent_channels" in network:
        raise UserError(f"{_OPTION}: {path} is an autoencoder; name the folder of its pipeline")
    if channels not in (1, 3):
        why = f"the network takes {channels} channels, and images have 1 or 3"
        raise UserError(f"{_OPTION}: {path}: {why}; name the folder of its pipeline, which has the autoencoder")
    size = network.get("sample_size")
    patch = network.get("patch_size")
    divisor = factor * (patch if isinstance(patch, int) else _halvings(network, _BLOCKS[:1]))
    positions = network.get("pos_embed_max_size")  # of SD3, on each side
    return Pipeline(
        path=path,
        side=size * factor if isinstance(size, int) else None,
        divisor=divisor,
        channels=channels,
        takes_texts="text" in encode,
        takes_classes="text" not in encode and any(network.get(key) is not None for key in _CLASSES),
        has_process="process" in known.facts.get("diffusion", {}),
        only_squares=_class_in(local_path(path, _OPTION)) in _OF_SQUARES,
        longest=divisor * positions if isinstance(positions, int) else None,
    )


def _class_in(folder: Path) -> Any:
    """Return the name of the class of the network in the folder of a network or of a pipeline."""
    inner = next((folder / name for name in _FOLDERS if (folder / name).is_dir()), folder)
    return table_in(inner, "config.json", "network of diffusers", asked_by=_OPTION).get("_class_name")


def _halvings(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Return the factor by which a network with these widths makes a picture smaller; 1 if it has none."""
    widths = next((config[key] for key in keys if isinstance(config.get(key), list | tuple)), (1,))
    return int(2 ** (len(widths) - 1))
