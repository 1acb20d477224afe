"""The plugin that starts a new run from weights in safetensors."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from attrs.validators import min_len, optional

from hookdiff.disk.hub import local_path
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.models.load import KEY, load_into
from hookdiff.options.fields import about


def _check_partial(start: Start, _: Any, partial: bool) -> None:
    if partial and not start.start_from:
        raise ValueError("needs start_from; set model.start_from, too")


@define(eq=False)
class Start:
    """Loads weights from a file into a new run, before any other plugin starts; a resumed run keeps its own weights.

    The arguments are keys of the config table [model].
    """

    start_from: str | None = field(
        default=None,
        validator=optional(min_len(1)),
        metadata=about(
            "first weights of a new run: a safetensors file, the index of several files, the folder of the index, or "
            "`hub:ORG/NAME/FILE`; a resumed run keeps its own weights"
        ),
    )
    start_partial: bool = field(
        default=False,
        validator=_check_partial,
        metadata=about(
            "load only the tensors of `start_from` that fit by name and shape, and log the others; false: all must fit"
        ),
    )

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        """Load the file; raise ConfigError with every tensor that does not fit."""
        if self.start_from and loop.progress.position == 0:
            load_into(loop.model, local_path(self.start_from, KEY), self.start_partial)
