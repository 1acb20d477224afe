"""The formats `lora` and `kohya`: the adapters of a run in one file, for other programs.

Both fold alpha / rank into B, so that alpha is the rank, as readers without metadata assume.
"""

from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hookdiff import UserError
from hookdiff.authors import ExportedRun, ExportFormat
from hookdiff.disk import local_path, new_file, new_folder, write_tensors
from hookdiff_lora.adapter import adapters_of

_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for


@define(frozen=True)
class LoraFolder(ExportFormat):
    """DIR with the adapters of the plugin lora, for `load_lora_weights` of diffusers."""

    makes_folder = True

    def is_earlier(self, out: Path) -> bool:
        return (out / _FILE).is_file()

    def write(self, run: ExportedRun, out: Path) -> str:
        prefix, tensors = _prefix(run.loop.model), dict[str, Tensor]()
        for name, (down, up) in _folded(run, "lora").items():
            tensors |= {f"{prefix}.{name}.lora_A.weight": down, f"{prefix}.{name}.lora_B.weight": up}
        with new_folder(out) as folder:
            write_tensors(folder / _FILE, tensors, run.metadata)
        return _usage(run, prefix, repr(str(out)))


@define(frozen=True)
class KohyaFile(ExportFormat):
    """FILE with the adapters of the plugin lora under the names of kohya, for SD 1 and SDXL."""

    def write(self, run: ExportedRun, out: Path) -> str:
        if (kind := type(run.loop.model).__name__) != "UNet2DConditionModel":
            raise UserError(f"--to kohya: expected a UNet2DConditionModel, the network is a {kind}; use --to lora")
        tensors, rank = dict[str, Tensor](), 0
        for name, (down, up) in _folded(run, "kohya").items():
            layer, rank = f"lora_unet_{name.replace('.', '_')}", len(down)
            tensors |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
            tensors[f"{layer}.alpha"] = torch.tensor(float(rank))
        known = {"ss_network_module": "networks.lora", "ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
        with new_file(out) as path:
            write_tensors(path, tensors, {**run.metadata, **known})
        return _usage(run, "unet", repr(str(out)))


def _folded(run: ExportedRun, to: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by layer, with alpha / rank in B."""
    model = run.loop.model
    adapters = adapters_of(model) if "lora" in run.loop.plugins else {}
    if not adapters:
        raise UserError(f"--to {to}: the run has no adapters, which the plugin lora trains; use --to diffusers")
    return {name: (each.down.detach(), each.up.detach() * each.scale) for name, each in adapters.items()}


def _prefix(model: object) -> str:
    """Return the name that pipelines have for a network of this class."""
    return "unet" if type(model).__name__.startswith("UNet") else "transformer"


def _usage(run: ExportedRun, prefix: str, place: str) -> str:
    """Return the code that loads the adapters at `place` into the network, or into the pipeline, of the run."""
    model: Any = run.loop.model
    base = local_path(run.config["model"].get("path", "BASE"), "model.path")
    if (base / "model_index.json").is_file():
        return (
            f"pipeline = diffusers.DiffusionPipeline.from_pretrained({str(base)!r})\n"
            f"  pipeline.load_lora_weights({place})"
        )
    return (
        f"model = diffusers.{type(model).__name__}.from_pretrained({str(base)!r})\n"
        f"  model.load_lora_adapter({place}, prefix={prefix!r})"
    )
