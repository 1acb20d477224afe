"""The network in a folder of diffusers, with its weights: `[model] use = "pretrained"`."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn

from hookdiff import UserError, plugin
from hookdiff.disk import is_hub_name, local_path
from hookdiff.options import Elsewhere, Fitted, Fixed, fitted_by
from hookdiff_pretrained.folder import KEY, NetworkFolder
from hookdiff_pretrained.known import known_in, with_half
from hookdiff_pretrained.load import load

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def _fit(table: Mapping[str, Any]) -> Fitted:
    """Return the part with the keys of the network in the folder that `table` names, and the values in its config."""
    if (path := table.get("path")) is None:
        raise UserError("pretrained needs path")
    if not isinstance(path, str):  # which is refused as any wrong value is
        return Fitted(pretrained)
    folder = NetworkFolder.at(local_path(path, KEY))
    own = inspect.signature(pretrained).parameters
    theirs = {each: value for each, value in folder.arguments().items() if each.name not in own}
    values = {each.name: value for each, value in theirs.items()}

    def make(
        path: str,
        digest: str | None = None,
        gradient_checkpointing: bool = False,
        precision: str = "float32",
        **options: Any,
    ) -> nn.Module:
        network: Any = load(folder, {**values, **options}, digest, _DTYPES[precision])
        if gradient_checkpointing:
            network.enable_gradient_checkpointing()
        made: nn.Module = network
        return made

    parameters = [*own.values(), *(each.replace(kind=each.KEYWORD_ONLY) for each in theirs)]
    make.__signature__ = inspect.signature(pretrained).replace(parameters=parameters)  # type: ignore[attr-defined]
    make.__module__ = folder.kind.__module__  # whose names the annotations use
    is_half = str(table.get("precision")) == "bf16"
    part = plugin(requires=("amp",))(make) if is_half else make
    return Fitted(part, values, partial(_elsewhere, folder, path, is_half))


def _elsewhere(folder: NetworkFolder, path: str, is_half: bool, config: Mapping[str, Any]) -> Elsewhere:
    name = path if is_hub_name(path) else str(folder.pipeline)
    known = known_in(folder.pipeline, name, config) if folder.pipeline else Elsewhere()
    return with_half(known, config) if is_half else known


@fitted_by(_fit)
def pretrained(
    path: str,
    digest: Annotated[str | None, Fixed("the run trains on top of these weights")] = None,
    gradient_checkpointing: bool = False,
    precision: Literal["float32", "bf16"] = "float32",
) -> nn.Module:
    """Make the network in a folder of diffusers, or of a pipeline of diffusers, with its weights.

    Other keys are those of the network's class; they override the values in its config.json. All weights train, unless
    a plugin freezes some. Frozen weights are not in the files of the run, which therefore needs the folder.

    Args:
        path: folder with config.json and the weights in safetensors, or of a pipeline with such a folder in it, or
            `hub:ORG/NAME`.
        digest: hash of the weights, which the run writes itself; other weights are then refused.
        gradient_checkpointing: recompute in the backward pass, to save memory.
        precision: dtype of the weights; "bf16" is for weights that a plugin freezes, and needs the plugin `amp`.

    Raises:
        UserError: for a folder that cannot be used, or whose weights have another digest.
    """
    made: nn.Module = _fit({"path": path, "precision": precision}).target(
        path, digest, gradient_checkpointing, precision
    )
    return made
