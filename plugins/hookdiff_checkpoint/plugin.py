"""The plugin `checkpoint`."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from attrs import define, field
from attrs.validators import ge

from hookdiff import Due, Every, Loop, Reason, UserError, hookimpl, parse_every, run_state
from hookdiff_checkpoint.files import read_checkpoint, write_checkpoint

log = logging.getLogger("hookdiff")


@define(eq=False)
class Checkpoint:
    """Saves the whole run, and restores it on --resume.

    A save is complete or absent, and older ones are removed only after it. The end of a run always saves, unless it
    ended in an error: the state may then be half a step old.
    """

    every: Every = field(default=Every(1000), converter=parse_every)  # steps, "2 epochs", "15 min"; 0: only the end
    keep_last: int = field(default=3, validator=ge(1))  # checkpoints
    _due: Due = field(init=False)
    _saved: tuple[int, int, int] | None = field(default=None, init=False)  # the place of the newest one

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any] | None:
        if not (loop.resume or self._saved):
            return None
        state = self._newest(self._folder(loop))
        if state is not None:
            progress = state["progress"]
            self._saved = progress["step"], progress["position"], progress["epoch"]
        return state

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._folder(loop)
        self._due = Due(self.every)

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        if self._due.after_step(loop.progress.step):
            self._save(loop)

    @hookimpl(trylast=True)
    def on_epoch_end(self, loop: Loop) -> None:
        if self._due.after_epoch(loop.progress.epoch):
            self._save(loop)

    @hookimpl(trylast=True)
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason != "error" and self._saved != self._place(loop):
            self._save(loop)

    def _save(self, loop: Loop) -> None:
        self._saved = self._place(loop)
        if not loop.is_main:
            return
        path = self._folder(loop) / f"step-{loop.progress.step:08d}"
        write_checkpoint(run_state(loop), path)
        for old in _steps(path.parent)[self.keep_last :]:
            shutil.rmtree(old, ignore_errors=True)
        loop.hook.on_checkpoint(loop=loop, path=path)

    def _folder(self, loop: Loop) -> Path:
        if loop.run_dir is None:
            raise UserError("the plugin checkpoint needs a place for its files: Loop(..., run_dir=Path('runs/mine'))")
        return loop.run_dir / "checkpoints"

    def _newest(self, folder: Path) -> dict[str, Any] | None:
        """Read the newest checkpoint that is whole, and say which were passed over."""
        for path in _steps(folder):
            try:
                state = read_checkpoint(path)
            except UserError as error:
                log.warning("passed over a checkpoint: %s", error)
                continue
            log.info("resuming from %s", path)
            return state
        return None

    @staticmethod
    def _place(loop: Loop) -> tuple[int, int, int]:
        return loop.progress.step, loop.progress.position, loop.progress.epoch


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)
