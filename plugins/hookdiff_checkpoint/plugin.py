"""The plugin `checkpoint`."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from attrs import define, field
from attrs.validators import ge

from hookdiff import Due, Every, Loop, Reason, StorageError, UserError, hookimpl, lock_run_dir, parse_every, run_state
from hookdiff_checkpoint.folder import (
    FOLDER,
    Found,
    NewerFormat,
    Parts,
    find_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from hookdiff_checkpoint.keep import Keep, remove, settle
from hookdiff_checkpoint.origin import origin
from hookdiff_checkpoint.snapshot import Staging, num_bytes, split

log = logging.getLogger("hookdiff")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = ".writable"
_SPARE = 1 << 20  # bytes, beside the tensors: manifest, headers, folders


@define(eq=False)
class Checkpoint:
    """Saves the whole run, and restores it on --resume.

    Training waits while the state is copied in memory, and a thread writes the copy. A save is complete or absent, and
    earlier ones are removed only after it. The end of a run always saves, unless it ended in an error: the state may
    then be half a step old.
    """

    every: Every = field(default=Every(1000), converter=parse_every)  # steps, "2 epochs", "15 min"; 0: only the end
    keep_last: int = field(default=3, validator=ge(1))  # checkpoints
    keep_every: int = field(default=0, validator=ge(0))  # this many-th is kept for good; 0: none
    keep_best: str | None = None  # a logged value, such as "fd/digits": of those it was logged at, the best is kept
    best: Literal["lowest", "highest"] = "lowest"
    disk_full: Literal["continue", "stop"] = "continue"  # the last good checkpoint is kept either way
    _due: Due = field(init=False)
    _wanted: bool = field(default=False, init=False)
    _saved: tuple[int, ...] | None = field(default=None, init=False)  # the place of the newest one
    _number: int = field(default=0, init=False)  # of saves, those before a resume included
    _logged: tuple[int, dict[str, float]] = field(default=(0, {}), init=False)  # the newest step, and its values
    _origin: dict[str, Any] = field(factory=dict, init=False)  # versions and revision
    _known: dict[Path, Found] = field(factory=dict, init=False)  # of this run
    _staging: Staging = field(factory=Staging, init=False)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False)  # there once a step has been made
    _job: Future[Found] | None = field(default=None, init=False)  # the save that is being written

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any] | None:
        if self._job:
            self._finish(loop)
        sources = [loop.run_dir if self._pool else None, loop.resume]  # the first of a rollback
        return next((state for source in sources if source and (state := self._newest(source))), None)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._folder(loop)
        self._due, self._pool = Due(self.every), None

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self._wanted |= self._due.after_step(loop.progress.step)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        self._wanted |= self._due.after_epoch(loop.progress.epoch)

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        before = self._logged[1] if self._logged[0] == step else {}
        self._logged = step, {**before, **values}

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        if self._pool is None:
            self._open(loop)
        if self._job and self._job.done():
            self._finish(loop)
        if self._wanted:
            self._save(loop)

    @hookimpl(trylast=True)
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason == "error" or self._pool is None:
            return
        if self._saved != _place(loop.progress.state_dict()):
            self._save(loop)
        if self._job and not self._finish(loop):
            raise StorageError(f"the end of the run is not saved; {self._last_good(loop)}")

    def _open(self, loop: Loop) -> None:
        """Make ready after the first step: who only samples makes none, and a step shows the optimizers' state.

        Raises UserError for what cannot be saved, and for a place that cannot be written: now, and not when there is
        something to lose.
        """
        split(run_state(loop))
        folder = self._folder(loop)
        if loop.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock_run_dir(loop)
                settle(folder)
                (folder / _PROBE).touch()
                (folder / _PROBE).unlink()
            except OSError as error:
                raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None
            self._known = {one.path: one for one in find_checkpoints(folder.parent)[0]}
            if self._known and not (loop.resume or self._saved):
                raise UserError(f"{folder} holds an earlier run: resume it, or choose another run_dir")
            self._origin = origin(loop)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        loop.resources.callback(self._pool.shutdown)

    def _save(self, loop: Loop) -> None:
        """Copy the state, and let the thread write it; a save that is still under way is waited for."""
        assert self._pool
        if self._job:
            self._finish(loop)
        self._wanted, self._saved = False, _place(loop.progress.state_dict())
        self._number += 1
        state = run_state(loop)
        if loop.is_main:
            parts = self._staging.copy(split(state))
            step, logged = self._logged
            metrics = {name: v for name, v in logged.items() if step == loop.progress.step and math.isfinite(v)}
            facts = {**self._origin, "number": self._number, "metrics": metrics}
            path = self._folder(loop) / f"step-{loop.progress.step:08d}"
            self._job = self._pool.submit(self._write, path, parts, facts)

    def _write(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> Found:
        """On the thread: write, then remove what is not kept."""
        self._staging.wait()
        if not path.parent.exists():
            log.warning("%s was gone, and is made again", path.parent)
            path.parent.mkdir(parents=True)
        if shutil.disk_usage(path.parent).free < num_bytes(parts) + _SPARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write_checkpoint(path, parts, facts)
        self._known[path] = written
        # One that is further on was passed over as damaged: it must not count, and it is left to be looked at.
        ours = sorted(
            (one for one in self._known.values() if one.place <= written.place), key=lambda one: (one.place, one.number)
        )
        keep = Keep(self.keep_last, self.keep_every, self.keep_best, self.best == "highest")
        kept = keep.choose(ours[::-1])
        for one in ours:
            if one not in kept:
                remove(self._known.pop(one.path).path)
        return written

    def _finish(self, loop: Loop) -> bool:
        """Wait for the save under way, and tell what became of it; whether it is on the disk.

        Raises StorageError, which ends the run, when it is not; a full disk does so only if the config says so.
        """
        assert self._job
        job, self._job = self._job, None
        try:
            path = job.result().path
        except OSError as error:
            self._saved = None
            problem = f"no checkpoint could be written in {self._folder(loop)}: {error.strerror or error}"
            if error.errno not in _FULL or self.disk_full == "stop":
                raise StorageError(f"{problem}\n  {self._last_good(loop)}") from error
            log.warning("%s\n  %s; the run goes on", problem, self._last_good(loop))
            return False
        loop.hook.on_checkpoint(loop=loop, path=path)
        return True

    def _last_good(self, loop: Loop) -> str:
        found, _ = find_checkpoints(self._folder(loop).parent)
        return f"the last good one is {found[0].path}" if found else "there is none yet"

    def _folder(self, loop: Loop) -> Path:
        if loop.run_dir is None:
            raise UserError("the plugin checkpoint needs a place for its files: Loop(..., run_dir=Path('runs/mine'))")
        return loop.run_dir / FOLDER

    def _newest(self, source: Path) -> dict[str, Any] | None:
        """Read the newest checkpoint that is whole, and say which were passed over."""
        found, problems = find_checkpoints(source)
        for one in found:
            try:
                state = read_checkpoint(one.path)
            except NewerFormat:
                raise
            except UserError as error:
                problems.append(error)
                continue
            for problem in problems:
                log.warning("passed over a checkpoint: %s", problem)
            log.info("resuming from %s", one.path)
            self._saved, self._number = _place(state["progress"]), one.number
            return state
        if problems:
            raise UserError("\n  ".join([f"{source}: none of its checkpoints can be used:", *map(str, problems)]))
        return None


def _place(progress: Mapping[str, int]) -> tuple[int, ...]:
    return progress["step"], progress["position"], progress["epoch"]
