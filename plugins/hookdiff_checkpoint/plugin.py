"""The plugin `checkpoint`."""

import errno
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff import PASS, Alarms, Due, Every, Loop, Reason, StorageError, UserError, Verdict, hookimpl, parse_every
from hookdiff.disk import cannot_write, lock_run_dir, make_folder, write_file
from hookdiff.loop import implements
from hookdiff.machine import first_rank_does, first_rank_says, gathered, gathered_or_raised, is_sharded, num_ranks, rank
from hookdiff.options import about
from hookdiff.run_dir import CHECKPOINTS, OUTCOME, checkpoint_name, step_of
from hookdiff.terminal import notice
from hookdiff_checkpoint.folder import MANIFEST, CheckpointInfo, NewerFormat, find_checkpoints, read_checkpoint
from hookdiff_checkpoint.keep import Logged, choose, finish_interrupted
from hookdiff_checkpoint.revision import revision
from hookdiff_checkpoint.saving import split
from hookdiff_checkpoint.writer import Buffer, BufferNotFinite, NotFinite, Writer, finite_buffers

logger = logging.getLogger("hookdiff")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = ".writable"
_LATE = 10.0  # seconds after which the ranks see on a shared disk what one of them has written


@define(eq=False)
class Checkpoint:
    """Saves the whole run, and restores it on --resume, also on another number of ranks.

    Training waits for a copy of the state in memory, which a thread then writes. A save is complete or absent, and
    earlier ones are removed only after it. The end of a run is always saved, except after an error, when the state may
    be that of an unfinished step. Each rank saves its pieces of sharded tensors, and the first rank all else. All ranks
    go the same way through this class, because a save is done, failed or not finite on all of them at the same step.
    """

    every: Every = field(default=Every(1000), converter=parse_every, metadata=about("how often; the end is saved, too"))
    keep_last: int = field(
        default=3,
        validator=ge(1),
        metadata=about("number of newest checkpoints to keep, and the newest that `every` made"),
    )
    keep_every: int = field(default=0, validator=ge(0), metadata=about("keep one of this many saves forever; 0: none"))
    keep_best: str | None = field(
        default=None,
        metadata=about(
            'keep the checkpoint with the best logged value of this name, such as "fd/digits"; of values with a number '
            "of samples (NAME/num), only equal numbers are compared"
        ),
    )
    best: Literal["lowest", "highest"] = field(default="lowest", metadata=about('best value: "lowest" or "highest"'))
    disk_full: Literal["continue", "stop"] = field(
        default="continue",
        metadata=about('on a full disk: "continue" with a warning and retry at each save; "stop" with exit code 1'),
    )
    _due: Due = field(init=False)
    _logged: Logged = field(init=False)
    _alarms: Alarms = field(init=False)
    _revision: dict[str, Any] | None = field(default=None, init=False)  # of the code, as the run began
    _passed_over: set[Path] = field(factory=set, init=False)  # damaged checkpoints
    _saved: tuple[int, ...] | None = field(default=None, init=False)  # place of the newest checkpoint
    _start: tuple[int, ...] | None = field(default=None, init=False)  # place of the checkpoint that the run began from
    _source: Path | None = field(default=None, init=False)  # the checkpoint that was read last
    _number: int = field(default=0, init=False)  # saves so far, those before a resume included
    _wanted: bool = field(default=False, init=False)
    _is_scheduled: bool = field(default=False, init=False)  # the newest checkpoint is
    _is_changed: bool = field(default=False, init=False)  # since then, by plugins in `on_done`
    _is_used_up: bool = field(default=False, init=False)  # the epoch has no further batch
    _is_open: bool = field(default=False, init=False)  # the folder is prepared
    _is_storable: bool = field(default=False, init=False)  # a file can hold the whole state
    _rates: str = field(default="", init=False)  # at the newest save
    _problem: str | None = field(default=None, init=False)  # error of the newest save
    _is_spoiled: bool = field(default=False, init=False)  # the newest save was not finite
    _finite: set[Buffer] = field(init=False)  # in the checkpoint that the run began from
    _writer: Writer | None = field(default=None, init=False)

    @hookimpl
    def prepare_model(self) -> None:
        """Reset the state: a script may use one plugin for several runs."""
        self._logged, self._alarms, self._passed_over = Logged(self.keep_best), Alarms(), set()
        self._saved, self._number, self._wanted, self._problem = None, 0, False, None
        self._is_open, self._is_storable, self._is_spoiled, self._writer = False, False, False, None
        self._finite, self._source, self._is_used_up, self._is_changed = set(), None, False, False

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any]:
        if self._is_open:
            return self._before(loop)
        state = self._newest(loop.resume, lambda _: True) if loop.resume else None
        self._start = self._saved
        self._finite = finite_buffers(split(state), _weights(loop)) if state else set()
        if loop.is_branch:
            self._saved = None  # the checkpoint is another run's
        return state or PASS

    def _before(self, loop: Loop) -> dict[str, Any]:
        """Return the state to which a rollback goes: the newest scheduled one of the run, or of the run it began from.

        A branch uses none of another run that is later than its start.
        """
        assert loop.run_dir
        state = self._newest(loop.run_dir, lambda one: one.scheduled)
        if state is None and loop.is_branch and loop.resume and (start := self._start):
            source = _run_of(loop.resume)
            state = self._newest(source, lambda one: one.scheduled and one.place <= start[1:])
        if state and loop.is_main:
            logger.info("going back to %s", self._source)
        return state or PASS

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        if self._source and loop.is_main:
            notice(f"resuming from {self._source}")
        self._folder(loop)  # refuses a run without a directory
        self._due = Due(self.every)

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        """Raise UserError if the folder holds another run."""
        first_rank_does(lambda: self._find(loop))

    @hookimpl(trylast=True, specname="on_ready")
    def open(self, loop: Loop) -> None:
        """Prepare the folder.

        Raises:
            UserError: if it cannot be written, holds another run, or is not the same for ranks that write pieces.
        """
        known = first_rank_does(lambda: self._prepare(loop))
        if known is None:
            return
        if any(map(is_sharded, loop.model.parameters())):
            _check_shared(self._folder(loop))
        self._writer = Writer(self._folder(loop), _weights(loop), self._finite, known, self._kept)
        loop.resources.callback(self._writer.close)
        self._is_open = True

    def _prepare(self, loop: Loop) -> dict[Path, CheckpointInfo] | None:
        """Make the folder fit for saves, and return the run's checkpoints in it; None if nothing is to be saved."""
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
                return None  # the run is over, and on a read-only disk no process can have left anything
            raise cannot_write(folder, error) from None
        found = self._find(loop)
        self._logged.is_found = any(self.keep_best in one.metrics for one in found)
        self._revision = revision([folder.parent, *([_run_of(loop.resume)] if loop.resume else [])])
        # A run removes only checkpoints with names that it gives. Damaged ones do not count, and stay for the user.
        own = [one for one in found if step_of(one.path.name) is not None and not one.path.is_symlink()]
        return {one.path: one for one in own if one.path.resolve() not in self._passed_over}

    def _find(self, loop: Loop) -> list[CheckpointInfo]:
        folder = self._folder(loop)
        found, damaged = find_checkpoints(folder.parent)
        if (found or damaged) and not self._goes_on(loop):
            raise UserError(f"{folder} holds an earlier run: resume it, or choose another run_dir")
        return found

    @hookimpl(tryfirst=True)
    def on_nan(self, loop: Loop) -> Verdict | None:
        """Wait for the current save, so that the target of a rollback does not depend on its speed."""
        if self._writer and self._writer.job:
            self._finish(loop, self._writer)
        return "stop" if self._is_spoiled else None

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
            # Optimizers make their state in the first step. If it cannot be saved, refuse it then: little is lost.
            parts = split(loop.state_dict())
            self._is_storable = True
            if self._writer:
                self._writer.finite |= finite_buffers(parts, self._writer.weights)
            if self._writer and self.every.amount:  # else the run is over when it is first saved
                self._writer.reserve(parts)
        if self._writer and self._writer.is_done():
            self._finish(loop, self._writer)
        # After the last batch of an epoch this hook fires once more, when the epoch is counted. A script that trains on
        # batches of its own, by `run_step`, begins no epoch, or goes on in one without ending it.
        was_used_up, self._is_used_up = self._is_used_up, loop.feed.exhausted(loop.progress.samples)
        is_last = loop.feed.epoch == loop.progress.epoch and self._is_used_up and not was_used_up
        if self._wanted and not is_last:
            self._save(loop, scheduled=True)

    @hookimpl(trylast=True)
    def on_done(self, loop: Loop) -> None:
        """Note that the newest checkpoint lacks what a plugin keeps at the end, unless an earlier process saved it."""
        if any(plugin is not self and implements(plugin, "on_done") for plugin in loop.plugins.values()):
            self._is_changed = self._is_open or not first_rank_does((self._folder(loop).parent / OUTCOME).exists)

    @hookimpl(wrapper=True)
    def on_stop(self, loop: Loop, reason: Reason) -> Generator[None, Any, Any]:
        """Save the end of the run after all other plugins, even if one of them raises."""
        try:
            return (yield)
        finally:
            self._end(loop, reason)

    def _end(self, loop: Loop, reason: Reason) -> None:
        writer = self._writer
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
        elif reason == "done" and not self._is_open and self._goes_on(loop):
            self.open(loop)  # no step was left, but a killed process may not have completed its last save
            if self._writer:
                first_rank_does(self._writer.prune)
                if self._is_changed:
                    self._save(loop, scheduled=self._is_scheduled)
                    self._wait(loop, self._writer)
        else:
            is_saved = self._saved == _place(loop.progress.state_dict())
            if self._is_open and (self._is_changed or not is_saved):
                self._save(loop, scheduled=self._is_scheduled if is_saved else self._wanted)
            if writer:
                self._wait(loop, writer)
                self._report_best(loop, is_over=True)

    def _wait(self, loop: Loop, writer: Writer) -> None:
        """Wait for the last save; raises StorageError if it fails."""
        if writer.job and not self._finish(loop, writer) and loop.end.reason != "on_nan":
            raise StorageError(f"the end of the run is not saved: {self._problem}\n  {writer.last_good()}")

    def _kept(self, found: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        return choose(found, self.keep_last, self.keep_every, self.keep_best, self.best == "highest")

    def _save(self, loop: Loop, scheduled: bool) -> None:
        """Wait for the current save, copy the state, and let the thread write it.

        `scheduled`: at a time that the config sets. A rollback goes back to no other checkpoint, so that a run that was
        stopped equals one that was not.
        """
        if self._writer and self._writer.job:
            self._finish(loop, self._writer)
        step = loop.progress.step
        self._number += self._saved is None or self._saved[0] != step  # a second save of a step replaces the first
        self._wanted, self._is_scheduled = False, scheduled
        self._saved, self._is_changed = _place(loop.progress.state_dict()), False
        self._rates, state = _rates(loop), loop.state_dict()
        versions = state.pop("versions")  # the manifest has them at its top, where any hookdiff can read them
        parts = split(state)
        if self._writer:
            metrics = self._logged.at(step)
            if len(self._writer.known) >= self.keep_last:  # this save removes a checkpoint, perhaps the best
                self._report_best(loop, is_over=False)
            facts = {"versions": versions, "git": self._revision, "number": self._number, "scheduled": scheduled}
            facts["metrics"] = metrics
            self._writer.start(checkpoint_name(step), parts, facts)

    def _report_best(self, loop: Loop, is_over: bool) -> None:
        if loop.is_main:  # which alone gets the logged values
            problem = self._logged.problem(is_over)
            loop.log.report(self._alarms.news(loop.progress.step, "best", problem, over=False))

    def _finish(self, loop: Loop, writer: Writer) -> bool:
        """Wait for the current save; return whether it is on the disk.

        Raises StorageError, which ends the run, if it is not; for a full disk only if the config says so.
        """
        try:
            path = writer.result()
        except OSError as error:
            self._saved, before, self._problem = None, self._problem, self._failed(loop, error)
            if error.errno not in _FULL or self.disk_full == "stop":
                raise StorageError(f"{self._problem}\n  {writer.last_good()}") from error
            if before is None and loop.is_main:
                where = writer.last_good()
                logger.warning("%s\n  %s; the run goes on, and tries again at each save", self._problem, where)
            return False
        except NotFinite as error:
            self._saved, self._is_spoiled = None, True
            loop.stop("on_nan", self._discarded(error, writer))
            return False
        if self._problem and loop.is_main:
            logger.info("%s can be written again", path.parent)
        self._problem = None
        self._announce(loop, path)
        return True

    def _announce(self, loop: Loop, path: Path) -> None:
        if loop.is_main:
            step = step_of(path.name)
            assert step is not None
            loop.hook.on_checkpoint(loop=loop, path=path, step=step)

    def _discarded(self, error: NotFinite, writer: Writer) -> str:
        made_by = f"loss and gradients were finite, so an update made it: {self._rates}"
        if isinstance(error, BufferNotFinite):
            made_by = "the update was finite, so a forward pass made it"
        return f"{error} is not finite, so no checkpoint was made of it; {made_by}; {writer.last_good()}"

    def _failed(self, loop: Loop, error: OSError) -> str:
        return f"no checkpoint could be written in {self._folder(loop)}: {error.strerror or error}"

    def _goes_on(self, loop: Loop) -> bool:
        """Whether the run directory holds an earlier part of this run."""
        return loop.resume is not None and not loop.is_branch

    def _folder(self, loop: Loop) -> Path:
        if loop.run_dir is None:
            raise UserError("the plugin checkpoint needs a place for its files: Loop(..., run_dir=Path('runs/mine'))")
        return loop.run_dir / CHECKPOINTS

    def _newest(self, source: Path, fits: Callable[[CheckpointInfo], bool]) -> dict[str, Any] | None:
        """Return the state of the newest intact checkpoint that `fits`, with a warning for each damaged one.

        All ranks return the same one, which is intact for all of them.
        """
        found, problems = first_rank_does(lambda: find_checkpoints(source))
        for one in filter(fits, found):
            state, problem = _read(one.path)
            if isinstance(problem, NewerFormat):
                raise problem
            if problem:
                problems.append(problem)
                self._passed_over.add(one.path.resolve())
                continue
            if rank() == 0:
                for problem in problems:
                    logger.warning("skipped a checkpoint: %s", problem)
            self._source = one.path
            self._saved, self._number, self._is_scheduled = _place(state["progress"]), one.number, one.scheduled
            return state
        if problems:
            raise UserError("\n  ".join([f"{source}: none of its checkpoints can be used:", *map(str, problems)]))
        return None


def _run_of(place: Path) -> Path:
    """Return the run directory of a checkpoint; any other path is one itself."""
    return place.resolve().parent.parent if (place / MANIFEST).exists() else place


def _read(path: Path) -> tuple[dict[str, Any], UserError | None]:
    """Return the state in the checkpoint at `path`, and an error if one of the ranks cannot use it."""
    states: list[dict[str, Any]] = []

    def read() -> UserError | None:
        try:
            states.append(read_checkpoint(path, rank(), num_ranks()))
        except UserError as error:
            return error
        return None

    for at, problem in enumerate(gathered_or_raised(read)):
        if problem:
            return {}, UserError(f"on rank {at}: {problem}") if at else problem
    return states[0], None


def _check_shared(folder: Path) -> None:
    """Raise UserError if a rank does not see what the first rank writes in `folder`, so that its pieces are lost."""
    probe, mark = folder / _PROBE, first_rank_says(str(time.time_ns()))

    def seen() -> bool:
        until = time.monotonic() + _LATE
        while True:
            with suppress(OSError):
                os.listdir(folder)  # which makes a network's file system look again
                if probe.read_text("utf-8") == mark:
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.1)

    try:
        first_rank_does(lambda: write_file(probe, mark.encode()))
        if blind := [str(at) for at, found in enumerate(gathered(seen())) if not found]:
            raise UserError(
                f"{folder}: rank {', '.join(blind)} does not see what the first rank writes there; weights in pieces "
                "need a disk that all ranks share"
            )
    finally:
        first_rank_does(lambda: probe.unlink(missing_ok=True))


def _weights(loop: Loop) -> set[str]:
    """Return the names of the parameters of the model, and of the modules that plugins train."""
    modules = [loop.model, *(trained.module for trained in loop.adopted)]
    return {name for module in modules for name, _ in module.named_parameters(remove_duplicate=False)}


def _rates(loop: Loop) -> str:
    """Return the options of the optimizers with which an update can make weights that are not finite."""
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    values = [(key, group[key]) for group in groups for key in ("lr", "weight_decay", "eps") if key in group]
    shown = [f"{key} {float(value):g}" for key, value in values if isinstance(value, float | int | Tensor)]
    return ", ".join(dict.fromkeys(shown))


def _place(progress: Mapping[str, int]) -> tuple[int, ...]:
    return progress["step"], progress["position"], progress["epoch"]
