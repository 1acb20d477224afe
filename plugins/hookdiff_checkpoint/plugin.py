"""The plugin `checkpoint`."""

import errno
import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import Factory, define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff import PASS, Due, Every, Loop, Reason, StorageError, UserError, Verdict, hookimpl, parse_every
from hookdiff.disk import cannot_write, lock_run_dir, make_folder, write_file
from hookdiff.loop import implements
from hookdiff.machine import first_rank_does, first_rank_says, gathered, is_sharded
from hookdiff.options import about
from hookdiff.run_dir import CHECKPOINTS, OUTCOME, checkpoint_name, step_of
from hookdiff.terminal import notice
from hookdiff_checkpoint.folder import MANIFEST, CheckpointInfo, find_checkpoints
from hookdiff_checkpoint.keep import Logged, choose, finish_interrupted
from hookdiff_checkpoint.revision import revision
from hookdiff_checkpoint.run_saves import RunSaves, place_of
from hookdiff_checkpoint.saving import split
from hookdiff_checkpoint.writer import BufferNotFinite, NotFinite, Writer, finite_buffers

logger = logging.getLogger("hookdiff")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = ".writable"
_LATE = 10.0  # seconds until a file of one rank must be visible to all ranks that share the disk


@define(eq=False)
class Checkpoint:
    """Saves the whole run, and restores it on --resume, also on another number of ranks.

    The training waits while the state is copied in memory; a thread then writes the copy. A save is complete or absent,
    and earlier checkpoints are removed only after a complete save. The end of a run is always saved, except after an
    error, when the state may be that of an unfinished step. Each rank saves its pieces of sharded tensors, and the
    first rank saves the rest of the state. All ranks take the same branches in this class, because a save is done,
    failed or not finite on all ranks at the same step.
    """

    every: Every = field(default=Every(1000), converter=parse_every, metadata=about("how often; the end is saved, too"))
    keep_last: int = field(
        default=3,
        validator=ge(1),
        metadata=about("number of newest checkpoints to keep; the newest save of `every` is kept, too"),
    )
    keep_every: int = field(default=0, validator=ge(0), metadata=about("of this many saves, keep one forever; 0: none"))
    keep_best: str | None = field(
        default=None,
        metadata=about(
            'keep the checkpoint with the best logged value of this name, such as "fd/digits"; values of different '
            "numbers of samples (NAME/num) are not compared"
        ),
    )
    best: Literal["lowest", "highest"] = field(default="lowest", metadata=about('best value: "lowest" or "highest"'))
    disk_full: Literal["continue", "stop"] = field(
        default="continue",
        metadata=about('on a full disk: "continue" with a warning and retry at each save; "stop" with exit code 1'),
    )
    # Made here too, because `restore` may be called without a run.
    _run: RunSaves = field(init=False, default=Factory(lambda self: RunSaves(Logged(self.keep_best)), takes_self=True))

    @hookimpl
    def prepare_model(self) -> None:
        """Begin with nothing saved: a script may use one plugin for several runs."""
        self._run = RunSaves(Logged(self.keep_best))

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any]:
        run = self._run
        if run.writer:
            return self._roll_back(loop)
        state = run.read_newest(loop.resume, lambda _: True) if loop.resume else None
        run.start = run.newest
        run.finite = finite_buffers(split(state), _weights(loop)) if state else set()
        if loop.is_branch:
            run.newest = None  # the checkpoint is another run's
        return state or PASS

    def _roll_back(self, loop: Loop) -> dict[str, Any]:
        """Return the state of the newest scheduled checkpoint of the run, or of the run that it began from.

        A run that began from a checkpoint of another run goes back to no later checkpoint of that run.
        """
        assert loop.run_dir
        run = self._run
        state = run.read_newest(loop.run_dir, lambda checkpoint: checkpoint.scheduled)
        if state is None and loop.is_branch and loop.resume and (start := run.start):
            source = _run_of(loop.resume)
            state = run.read_newest(source, lambda before: before.scheduled and before.place <= start[1:])
        if state and loop.is_main:
            logger.info("going back to %s", run.source)
        return state or PASS

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        if self._run.source and loop.is_main:
            notice(f"resuming from {self._run.source}")
        self._folder(loop)  # refuses a run without a directory
        self._run.due = Due(self.every)

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        """Raise UserError if the folder holds another run."""
        first_rank_does(lambda: self._find(loop))

    @hookimpl(trylast=True, specname="on_ready")
    def open(self, loop: Loop) -> None:
        """Prepare the folder.

        Raises:
            UserError: if it cannot be written or holds another run, or if ranks that write pieces do not share it.
        """
        known = first_rank_does(lambda: self._prepare(loop))
        if known is None:
            return
        if any(map(is_sharded, loop.model.parameters())):
            _check_shared(self._folder(loop))
        self._run.writer = Writer(self._folder(loop), _weights(loop), self._run.finite, known, self._kept)
        loop.resources.callback(self._run.writer.close)

    def _prepare(self, loop: Loop) -> dict[Path, CheckpointInfo] | None:
        """Prepare the folder for saves, and return the run's checkpoints in it; None if there is nothing to save."""
        folder = self._folder(loop)
        try:
            make_folder(folder.parent)
            lock_run_dir(folder.parent, loop.resources)
            make_folder(folder)
            finish_interrupted(folder)
            (folder / _PROBE).unlink(missing_ok=True)  # perhaps a link
            write_file(folder / _PROBE, b"")
            (folder / _PROBE).unlink()
        except OSError as error:
            if error.errno == errno.EROFS and loop.end.reason:
                return None  # the run is over, and on a read-only disk no process can have left a save
            raise cannot_write(folder, error) from None
        checkpoints = self._find(loop)
        self._run.logged.is_found = any(self.keep_best in checkpoint.metrics for checkpoint in checkpoints)
        self._run.revision = revision([folder.parent, *([_run_of(loop.resume)] if loop.resume else [])])
        # A run removes only checkpoints that have a name as it gives. Damaged checkpoints do not count, and stay.
        named = [info for info in checkpoints if step_of(info.path.name) is not None and not info.path.is_symlink()]
        return {info.path: info for info in named if info.path.resolve() not in self._run.damaged}

    def _find(self, loop: Loop) -> list[CheckpointInfo]:
        folder = self._folder(loop)
        checkpoints, damaged = find_checkpoints(folder.parent)
        if (checkpoints or damaged) and not self._goes_on(loop):
            raise UserError(f"{folder} holds an earlier run: resume it, or choose another run_dir")
        return checkpoints

    @hookimpl(tryfirst=True)
    def on_nan(self, loop: Loop) -> Verdict | None:
        """Wait for the current save, so that the target of a rollback does not depend on the speed of the disk."""
        if self._run.writer and self._run.writer.job:
            self._finish(loop, self._run.writer)
        return "stop" if self._run.is_spoiled else None

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self._run.is_wanted |= self._run.due.after_step(loop.progress.step)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        self._run.is_wanted |= self._run.due.after_epoch(loop.progress.epoch)

    @hookimpl
    def on_save_request(self) -> None:
        self._run.is_requested = True

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.logged.add(step, values)

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        run = self._run
        if not (writer := run.writer):
            return
        if not run.is_storable and loop.progress.step > loop.first_step:
            # Optimizers make their state in the first step. A state that cannot be saved is refused before more steps.
            parts = split(loop.state_dict())
            run.is_storable = True
            writer.finite |= finite_buffers(parts, writer.weights)
            if self.every.amount:  # otherwise the first save is at the end of the run
                writer.reserve(parts)
        if writer.is_done():
            self._finish(loop, writer)
        # After the last batch of an epoch this hook fires once more, when the epoch is counted. A script that trains on
        # batches of its own, by `run_step`, begins no epoch, or goes on in one without ending it.
        was_used_up, run.is_used_up = run.is_used_up, loop.feed.exhausted(loop.progress.epoch, loop.progress.samples)
        is_last = loop.feed.epoch == loop.progress.epoch and run.is_used_up and not was_used_up
        if (run.is_wanted or run.is_requested) and not is_last:
            self._save(loop, writer, scheduled=run.is_wanted)

    @hookimpl(trylast=True)
    def on_done(self, loop: Loop) -> None:
        """Note that the newest checkpoint lacks plugins' changes in `on_done`, unless an earlier process saved them."""
        if any(plugin is not self and implements(plugin, "on_done") for plugin in loop.plugins.values()):
            is_open = self._run.writer is not None
            self._run.is_changed = is_open or not first_rank_does((self._folder(loop).parent / OUTCOME).exists)

    @hookimpl(wrapper=True)
    def on_stop(self, loop: Loop, reason: Reason) -> Generator[None, Any, Any]:
        """Save the end of the run after all other plugins, even if one of them raises."""
        try:
            return (yield)
        finally:
            self._end(loop, reason)

    def _end(self, loop: Loop, reason: Reason) -> None:
        run, writer = self._run, self._run.writer
        if reason == "error":
            if writer and writer.job:
                try:
                    path = writer.result()
                except StorageError as gone:
                    logger.warning("%s", gone)
                except OSError as error:
                    logger.warning("%s\n  %s", self._failed(loop, error), writer.last_good())
                except NotFinite as error:
                    logger.warning("%s", self._discarded(error, writer))
                else:
                    self._announce(loop, path)
        elif reason == "done" and not writer and self._goes_on(loop):
            self.open(loop)  # no step was left, but a killed process may not have completed its last save
            if run.writer:
                first_rank_does(run.writer.prune)
                if run.is_changed:
                    self._save(loop, run.writer, scheduled=run.is_scheduled)
                    self._wait(loop, run.writer)
        elif writer:
            is_saved = run.newest == place_of(loop.progress.state_dict())
            if run.is_changed or not is_saved:
                self._save(loop, writer, scheduled=run.is_scheduled if is_saved else run.is_wanted)
            self._wait(loop, writer)
            self._report_best(loop, is_over=True)

    def _wait(self, loop: Loop, writer: Writer) -> None:
        """Wait for the last save; raises StorageError if it fails."""
        if writer.job and not self._finish(loop, writer) and loop.end.reason != "on_nan":
            raise StorageError(f"the end of the run is not saved: {self._run.problem}\n  {writer.last_good()}")

    def _kept(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        return choose(checkpoints, self.keep_last, self.keep_every, self.keep_best, self.best == "highest")

    def _save(self, loop: Loop, writer: Writer, scheduled: bool) -> None:
        """Wait for the current save, copy the state, and let the thread write it.

        `scheduled`: whether the config sets the time of this save. A rollback goes back only to such a checkpoint, so
        that a stopped and resumed run equals an unbroken run.
        """
        if writer.job:
            self._finish(loop, writer)
        run, step = self._run, loop.progress.step
        run.number += run.newest is None or run.newest[0] != step  # a second save of a step replaces the first
        run.is_wanted, run.is_requested, run.is_scheduled = False, False, scheduled
        run.newest, run.is_changed = place_of(loop.progress.state_dict()), False
        run.rates, state = _rates(loop), loop.state_dict()
        versions = state.pop("versions")  # the manifest has them at its top, where any hookdiff can read them
        parts = split(state)
        metrics = run.logged.at(step)
        if len(writer.known) >= self.keep_last:  # this save removes a checkpoint, perhaps the best
            self._report_best(loop, is_over=False)
        facts = {"versions": versions, "git": run.revision, "number": run.number, "scheduled": scheduled}
        writer.start(checkpoint_name(step), parts, {**facts, "metrics": metrics})

    def _report_best(self, loop: Loop, is_over: bool) -> None:
        if loop.is_main:  # only the main rank gets the logged values
            problem = self._run.logged.problem(is_over)
            loop.log.report(self._run.alarms.news(loop.progress.step, "best", problem, over=False))

    def _finish(self, loop: Loop, writer: Writer) -> bool:
        """Wait for the current save; return whether it is on the disk.

        Raises StorageError, which ends the run, if the save failed; on a full disk, only if `disk_full` is "stop".
        """
        run = self._run
        try:
            path = writer.result()
        except OSError as error:
            run.newest, before, run.problem = None, run.problem, self._failed(loop, error)
            if error.errno not in _FULL or self.disk_full == "stop":
                raise StorageError(f"{run.problem}\n  {writer.last_good()}") from error
            if before is None and loop.is_main:
                where = writer.last_good()
                logger.warning("%s\n  %s; the run goes on, and tries again at each save", run.problem, where)
            return False
        except NotFinite as error:
            run.newest, run.is_spoiled = None, True
            loop.stop("on_nan", self._discarded(error, writer))
            return False
        if run.problem and loop.is_main:
            logger.info("%s can be written again", path.parent)
        run.problem = None
        self._announce(loop, path)
        return True

    def _announce(self, loop: Loop, path: Path) -> None:
        if loop.is_main:
            step = step_of(path.name)
            assert step is not None
            loop.hook.on_checkpoint(loop=loop, path=path, step=step)

    def _discarded(self, error: NotFinite, writer: Writer) -> str:
        made_by = f"loss and gradients were finite, so an update is the cause: {self._run.rates}"
        if isinstance(error, BufferNotFinite):
            made_by = "the update was finite, so a forward pass is the cause"
        return f"{error} is not finite, so no checkpoint was written; {made_by}; {writer.last_good()}"

    def _failed(self, loop: Loop, error: OSError) -> str:
        return f"no checkpoint could be written in {self._folder(loop)}: {error.strerror or error}"

    def _goes_on(self, loop: Loop) -> bool:
        """Return whether the run directory holds an earlier part of this run."""
        return loop.resume is not None and not loop.is_branch

    def _folder(self, loop: Loop) -> Path:
        if loop.run_dir is None:
            raise UserError("the plugin checkpoint needs a place for its files: Loop(..., run_dir=Path('runs/mine'))")
        return loop.run_dir / CHECKPOINTS


def _run_of(place: Path) -> Path:
    """Return the run directory of a checkpoint; any other `place` is a run directory itself."""
    return place.resolve().parent.parent if (place / MANIFEST).exists() else place


def _check_shared(folder: Path) -> None:
    """Raise UserError if a rank does not see files of the first rank in `folder`: that rank's pieces would be lost."""
    probe, mark = folder / _PROBE, first_rank_says(str(time.time_ns()))

    def seen() -> bool:
        until = time.monotonic() + _LATE
        while True:
            with suppress(OSError):
                os.listdir(folder)  # a listing makes a network file system look again
                if probe.read_text("utf-8") == mark:
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.1)

    try:
        first_rank_does(lambda: write_file(probe, mark.encode()))
        if blind := [str(at) for at, sees in enumerate(gathered(seen())) if not sees]:
            raise UserError(
                f"{folder}: rank {', '.join(blind)} does not see the files of the first rank there; sharded "
                "weights need a run directory on a disk that all ranks share"
            )
    finally:
        first_rank_does(lambda: probe.unlink(missing_ok=True))


def _weights(loop: Loop) -> set[str]:
    """Return the names of the parameters of the model, and of the modules that plugins train."""
    modules = [loop.model, *(trained.module for trained in loop.adopted)]
    return {name for module in modules for name, _ in module.named_parameters(remove_duplicate=False)}


def _rates(loop: Loop) -> str:
    """Return the options of the optimizers that can make an update not finite, such as the learning rates."""
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    values = [(key, group[key]) for group in groups for key in ("lr", "weight_decay", "eps") if key in group]
    shown = [f"{key} {float(value):g}" for key, value in values if isinstance(value, float | int | Tensor)]
    return ", ".join(dict.fromkeys(shown))
