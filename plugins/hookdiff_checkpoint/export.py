"""The weights of a run in one safetensors file, for other programs."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookdiff import UserError, listed
from hookdiff.cli import check_free
from hookdiff.disk import new_file, write_tensors
from hookdiff.models import left_out

SUFFIX = ".safetensors"


def check_place(out: Path, to: str, overwrite: bool) -> None:
    """Raise UserError unless an export may be written to `out`; only an earlier export is ever replaced."""
    if to == "safetensors" and out.suffix != SUFFIX:
        raise UserError(f"{out}: expected a file name that ends in {SUFFIX}; nearest: {out.name}{SUFFIX}")
    if not out.exists():
        return
    earlier = out.is_file() if to == "safetensors" else (out / "scheduler" / "scheduler_config.json").is_file()
    if not earlier:
        raise UserError(f"{out} exists and is no export to {to}, which --overwrite cannot replace; choose another name")
    check_free(out, overwrite)


def write_weights(out: Path, net: nn.Module, metadata: Mapping[str, str]) -> str:
    """Write the weights of `net` and the `metadata` to the file `out`; return the code that loads the file."""
    with new_file(out) as path:
        write_tensors(path, plain_tensors(net), metadata)
    others = [name for name, value in net.state_dict().items() if not isinstance(value, Tensor)]
    strict = ", strict=False" if others else ""
    note = f"\n  left out, since they are not tensors: {listed(others, 3)}" if others else ""
    return f"model.load_state_dict(safetensors.torch.load_file({str(out)!r}){strict}){note}"


def about(name: str, step: int) -> dict[str, str]:
    """Return the metadata of the weights called `name`, of a run of `step` updates."""
    return {"hookdiff": version("hookdiff"), "step": str(step), "weights": name}


def plain_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `net`, with the values of parametrised weights in place of their parametrisations.

    A frozen base, which the state of `net` leaves out, is there too. What `get_extra_state` returns is left out.
    """
    held = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    state = {name: held[name].detach() for name in left_out(net) if name in held}
    state |= {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in state.items() if ".parametrizations." not in f".{name}"}
    for path, module in net.named_modules():
        if parametrize.is_parametrized(module):
            parametrized: Any = module.parametrizations
            tensors |= {f"{path}.{name}".lstrip("."): getattr(module, name) for name in parametrized}
    return tensors
