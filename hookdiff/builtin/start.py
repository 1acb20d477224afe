"""The plugin that starts a new run from the weights in a safetensors file."""

from __future__ import annotations

from pathlib import Path

from attrs import define, field
from attrs.validators import min_len, optional

from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.models.load import load_into

KEYS = "start_from", "start_partial"  # of the table [model]


@define(eq=False)
class Start:
    """Loads given weights into a new run, before any other plugin starts; a resumed run has its own weights.

    The arguments are keys of the table [model].
    """

    start_from: str | None = field(default=None, validator=optional(min_len(1)))  # a safetensors file
    start_partial: bool = (
        False  # load only the tensors that fit by name and shape, and list the others; else all must fit
    )

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        """Load the file; raises ConfigError with every tensor that does not fit."""
        if self.start_from and loop.progress.position == 0:
            load_into(loop.model, Path(self.start_from), self.start_partial)
