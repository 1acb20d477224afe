"""The kind of part `export`: a format in which a run is written for other programs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from attrs import define
from torch import Tensor

from hookdiff.loop.loop import Loop
from hookdiff.options.choices import Choice


@define(frozen=True)
class ExportedRun:
    """A run that is exported."""

    loop: Loop  # its model holds the exported weights
    config: Mapping[str, Any]
    step: int  # the updates that the weights have had
    weights: str  # the name of the weights

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the whole network, by the hook `export_weights`."""
        tensors: dict[str, Tensor] = self.loop.hook.export_weights(loop=self.loop)
        return tensors

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of a file with the weights."""
        return {"hookdiff": version("hookdiff"), "step": str(self.step), "weights": self.weights}


class ExportFormat(Choice, ABC):
    """Writes a run for other programs: `hookdiff export RUN OUT --to NAME`."""

    kind = "export"

    makes_folder: ClassVar[bool] = False  # OUT is a folder, not a safetensors file
    has_sampler: ClassVar[bool] = False  # the run's sampler is written too, so --steps and --sampler may change it

    def is_earlier(self, out: Path) -> bool:
        """Return whether `out` is an earlier export in this format, which --overwrite may replace."""
        return out.is_file()

    @abstractmethod
    def write(self, run: ExportedRun, out: Path) -> str:
        """Write `run` to the new file or folder `out`, and return the code that loads it.

        Raises:
            UserError: for a run that the format cannot hold.
        """
