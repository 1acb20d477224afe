"""The plugin `checkpoint`."""

from __future__ import annotations

import errno
import logging
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import define, field
from attrs.validators import ge

from hookdiff import Alarms, Due, Every, Loop, Reason, StorageError, UserError, hookimpl, parse_every
from hookdiff.disk import cannot_write, lock_run_dir, make_folder
from hookdiff_checkpoint.folder import FOLDER, STEP, NewerFormat, find_checkpoints, read_checkpoint
from hookdiff_checkpoint.keep import Keep, settle
from hookdiff_checkpoint.logged import Logged
from hookdiff_checkpoint.origin import origin
from hookdiff_checkpoint.snapshot import split
from hookdiff_checkpoint.writer import Writer

log = logging.getLogger("hookdiff")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = ".writable"


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
    _logged: Logged = field(init=False)
    _alarms: Alarms = field(init=False)
    _origin: dict[str, Any] = field(factory=dict, init=False)  # versions and revision
    _passed_over: set[Path] = field(factory=set, init=False)  # checkpoints that are damaged
    _saved: tuple[int, ...] | None = field(default=None, init=False)  # the place of the newest one
    _number: int = field(default=0, init=False)  # of saves, those before a resume included
    _wanted: bool = field(default=False, init=False)
    _is_open: bool = field(default=False, init=False)  # from the first step on
    _is_storable: bool = field(default=False, init=False)  # all of it has been seen
    _problem: str | None = field(default=None, init=False)  # why the newest save is not there
    _writer: Writer | None = field(default=None, init=False)  # of the rank that writes

    @hookimpl
    def prepare_model(self) -> None:
        """Begin anew: a script may run the same plugin twice."""
        self._logged, self._alarms, self._passed_over = Logged(self.keep_best), Alarms(), set()
        self._saved, self._number, self._wanted, self._problem = None, 0, False, None
        self._is_open, self._is_storable, self._writer = False, False, None

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any] | None:
        sources = [loop.run_dir if self._is_open else None, loop.resume]  # the first of a rollback
        return next((state for source in sources if source and (state := self._newest(source))), None)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._folder(loop)
        self._due = Due(self.every)

    @hookimpl(tryfirst=True)
    def before_step(self, loop: Loop) -> None:
        if not self._is_open:
            self._open(loop)

    @hookimpl(tryfirst=True)
    def on_nan(self, loop: Loop) -> None:
        """Wait for the save under way, so that whether there is one to go back to is not a matter of its speed."""
        if self._writer and self._writer.is_busy:
            self._finish(loop)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self._wanted |= self._due.after_step(loop.progress.step)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        self._wanted |= self._due.after_epoch(loop.progress.epoch)

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self._logged.add(step, values)

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        if not self._is_storable and loop.progress.step > loop.first_step:
            # Only a step shows what an optimizer keeps: told now, and not when there is something to lose.
            split(loop.state_dict())
            self._is_storable = True
        if self._writer and self._writer.is_done:
            self._finish(loop)
        if self._wanted:
            self._save(loop)

    @hookimpl(wrapper=True)
    def on_stop(self, loop: Loop, reason: Reason) -> Generator[None, Any, Any]:
        """After all others, of which none can cost the run its end."""
        try:
            return (yield)
        finally:
            self._end(loop, reason)

    def _end(self, loop: Loop, reason: Reason) -> None:
        if reason == "error":
            if self._writer and self._writer.is_busy:
                try:
                    self._writer.result()
                except OSError as error:
                    log.warning("%s\n  %s", self._told(loop, error), self._writer.last_good())
            return
        if reason == "done" and not self._is_open and self._goes_on(loop):
            self._open(loop)  # no step was left to make, and the process before may have been killed in its last save
            if self._writer:
                self._writer.prune()
            return
        if self._is_open and self._saved != _place(loop.progress.state_dict()):
            self._save(loop)
        if self._writer:
            if self._writer.is_busy and not self._finish(loop):
                raise StorageError(f"the end of the run is not saved: {self._problem}\n  {self._writer.last_good()}")
            self._alarms.check(loop.progress.step, "best", self._logged.problem(is_over=True), over=False)

    def _open(self, loop: Loop) -> None:
        """Make ready before the first step: who only samples makes none, and an earlier run is still as it was.

        Raises UserError for a place that cannot be written, or that holds another run.
        """
        folder = self._folder(loop)
        if loop.is_main:
            try:
                make_folder(folder)
                lock_run_dir(folder.parent, loop.resources)
                settle(folder)
                (folder / _PROBE).touch()
                (folder / _PROBE).unlink()
            except OSError as error:
                if error.errno == errno.EROFS and loop.reason:
                    return  # the run is over, and there is nothing to tidy where nobody writes
                raise cannot_write(folder, error) from None
            found, damaged = find_checkpoints(folder.parent)
            if (found or damaged) and not self._goes_on(loop):
                raise UserError(f"{folder} holds an earlier run: resume it, or choose another run_dir")
            # A run removes only what is its own; what is damaged must not count, and is left to be looked at.
            own = [one for one in found if STEP.fullmatch(one.path.name) and not one.path.is_symlink()]
            known = {one.path: one for one in own if one.path.resolve() not in self._passed_over}
            self._logged.is_found = any(self.keep_best in one.metrics for one in found)
            keep = Keep(self.keep_last, self.keep_every, self.keep_best, self.best == "highest")
            self._origin, self._writer = origin(loop), Writer(folder, known, keep.choose)
            loop.resources.callback(self._writer.close)
        self._is_open = True

    def _save(self, loop: Loop) -> None:
        """Copy the state, and let the thread write it; a save that is still under way is waited for."""
        if self._writer and self._writer.is_busy:
            self._finish(loop)
        step = loop.progress.step
        self._number += self._saved is None or self._saved[0] != step  # one that takes the place of another counts once
        self._wanted, self._saved = False, _place(loop.progress.state_dict())
        parts = split(loop.state_dict())
        if self._writer:
            metrics = self._logged.at(step)
            if len(self._writer.known) >= self.keep_last:  # one will go, and perhaps the best
                self._alarms.check(step, "best", self._logged.problem(is_over=False), over=False)
            facts = {**self._origin, "number": self._number, "metrics": metrics}
            self._writer.start(f"step-{step:08d}", parts, facts)

    def _finish(self, loop: Loop) -> bool:
        """Wait for the save under way, and tell what became of it; whether it is on the disk.

        Raises StorageError, which ends the run, when it is not; a full disk does so only if the config says so.
        """
        assert self._writer
        try:
            path = self._writer.result()
        except OSError as error:
            self._saved, before, self._problem = None, self._problem, self._told(loop, error)
            if error.errno not in _FULL or self.disk_full == "stop":
                raise StorageError(f"{self._problem}\n  {self._writer.last_good()}") from error
            if before is None:
                where = self._writer.last_good()
                log.warning("%s\n  %s; the run goes on, and tries at each save", self._problem, where)
            return False
        if self._problem:
            log.info("%s can be written again", path.parent)
        self._problem = None
        loop.hook.on_checkpoint(loop=loop, path=path)
        return True

    def _told(self, loop: Loop, error: OSError) -> str:
        return f"no checkpoint could be written in {self._folder(loop)}: {error.strerror or error}"

    def _goes_on(self, loop: Loop) -> bool:
        """Whether this is the run that is in the run directory already."""
        return loop.resume is not None and not loop.is_branch

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
                self._passed_over.add(one.path.resolve())
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
