"""The directory of a run: made when everything else has started, and never in place of an earlier one unasked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
from attrs import define

from hookdiff.errors import UserError
from hookdiff.hookspecs import hookimpl

if TYPE_CHECKING:
    from hookdiff.loop import Loop

CONFIG = "config.toml"


@define(eq=False)
class RunDir:
    """Writes the resolved config into the run directory, which it makes or, if `overwrite` says so, empties first.

    Last of all in `on_start`: a run that cannot start leaves nothing behind and costs no earlier run.
    """

    path: Path
    overwrite: bool = False

    @hookimpl(trylast=True)
    def on_start(self, loop: Loop) -> None:
        """Make it; raises UserError when it cannot be written."""
        if not loop.is_main:
            return
        try:
            if self.overwrite and self.path.exists():
                check_run_dir(self.path, overwrite=True)
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / CONFIG).write_text(tomli_w.dumps(loop.hparams), "utf-8")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror or error}") from None


def check_run_dir(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raise UserError unless a run may begin at `path`: an earlier one is only touched on request."""
    if resume or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{path} exists; go on with --resume, start over with --overwrite, or choose --out DIR")
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, so what it leads to is not removed")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is no run directory (it has no {CONFIG}), so it is not overwritten")
