"""The format `safetensors`: the weights of a run in one file, for other programs."""

from pathlib import Path

from attrs import define
from torch import Tensor

from hookdiff import UserError, listed
from hookdiff.authors import ExportedRun, ExportFormat
from hookdiff.cli import check_free
from hookdiff.disk import new_file, write_tensors

SUFFIX = ".safetensors"


@define(frozen=True)
class SafetensorsFile(ExportFormat):
    """FILE with the weights, under the keys of the model."""

    def write(self, run: ExportedRun, out: Path) -> str:
        with new_file(out) as path:
            write_tensors(path, run.tensors(), run.metadata)
        others = [name for name, value in run.loop.model.state_dict().items() if not isinstance(value, Tensor)]
        strict = ", strict=False" if others else ""
        note = f"\n  left out, since they are not tensors: {listed(others, 3)}" if others else ""
        return f"model.load_state_dict(safetensors.torch.load_file({str(out)!r}){strict}){note}"


def check_place(out: Path, to: ExportFormat, overwrite: bool) -> None:
    """Raise UserError unless an export may be written to `out`; only an earlier export is ever replaced."""
    if not to.makes_folder and out.suffix != SUFFIX:
        raise UserError(f"{out}: expected a file name that ends in {SUFFIX}; nearest: {out.name}{SUFFIX}")
    if not out.exists():
        return
    if not to.is_earlier(out):
        raise UserError(
            f"{out} exists and is no export to {to.use}, which --overwrite cannot replace; choose another name"
        )
    check_free(out, overwrite)
