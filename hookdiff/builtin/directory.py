"""The plugin that makes the run directory, locks it first, and writes to it last, after everything that can fail."""

import errno
import logging
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from attrs import asdict, define, field

from hookdiff.disk.files import cannot_write, discard, make_folder, new_file, write_file, writing
from hookdiff.disk.lock import LOCK, check_place, check_unlocked, lock_run_dir
from hookdiff.errors import StorageError, UserError
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.machine.failures import Failures
from hookdiff.machine.joining import job_name
from hookdiff.options.every import Every
from hookdiff.run_dir.config_toml import CONFIG, config_bytes
from hookdiff.run_dir.layout import check_run_dir
from hookdiff.run_dir.outcome_json import OUTCOME, RunOutcome, write_outcome
from hookdiff.run_dir.torchrun import write_job

logger = logging.getLogger("hookdiff")


@define(eq=False)
class RunDir:
    """Makes and locks the run directory, and writes the config into it: `hparams`, and [run] with the `LoopConfig`.

    An existing directory is checked and locked first, so that no other run changes it. `on_ready` first deletes a run
    that is overwritten. The files of this run are written at its end, after plugins that check and measure. So a run
    that cannot start leaves an empty folder at most, and changes no earlier run.
    """

    overwrite: bool = False  # delete an earlier run in the directory
    written: Callable[[Path, bytes], object] | None = None  # called with the path and bytes of the config
    _existed: bool = field(init=False, default=False)
    _config: bytes = field(init=False, default=b"")
    _failures: Failures = field(init=False, factory=Failures)
    _is_ready: bool = field(init=False, default=False)  # whether the config is written

    @hookimpl(tryfirst=True)
    def prepare_model(self, loop: Loop) -> None:
        """Lock an existing directory.

        Raises UserError if another process has locked it, or if its run is neither resumed nor overwritten.
        """
        path = loop.run_dir if loop.is_main else None
        self._is_ready = False
        self._failures.begin()
        self._existed = path is not None and path.is_dir()
        if path is None or not self._existed:
            return
        goes_on = loop.progress.position > 0 or (loop.resume is not None and not loop.is_branch)
        if self.overwrite:
            check_run_dir(path, overwrite=True)
        elif (path / CONFIG).exists() and not goes_on:
            check_unlocked(path)
            raise _earlier_run_error(path)
        with writing(path):
            try:
                lock_run_dir(path, loop.resources)
            except OSError as error:
                if error.errno != errno.EROFS:  # a read-only disk: `on_ready` reports it
                    raise

    @hookimpl(tryfirst=True)
    def on_ready(self, loop: Loop) -> None:
        """Make and lock the directory, or delete the run that is overwritten.

        Raises UserError for hparams that TOML cannot hold, or if another run has just made the directory.
        """
        path = loop.run_dir
        if path is None or not loop.is_main:
            return
        options = asdict(loop.config, recurse=False)
        run = {k: str(v) if isinstance(v, Every) else v for k, v in options.items() if v is not None}
        self._config = config_bytes({"run": run, **loop.hparams})  # a script's hparams may have no [run]
        with writing(path):
            make_folder(path)
            lock_run_dir(path, loop.resources)
            if not self._existed and (path / CONFIG).exists():
                raise _earlier_run_error(path)
            if self.overwrite:
                check_place(path)
                for entry in path.iterdir():
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    # Another process may wait for the lock. The old config marks the folder as a run until replaced.
                    elif entry.name not in (LOCK, CONFIG):
                        entry.unlink()

    @hookimpl(trylast=True, specname="on_ready")
    def write(self, loop: Loop) -> None:
        """Write the config."""
        path = loop.run_dir
        if path is None or not loop.is_main:
            return
        with writing(path):
            discard(path / OUTCOME)  # the outcome of an earlier process
            write_job(path, job_name())
            with new_file(path / CONFIG) as partial:
                write_file(partial, self._config)
        if self.written:
            self.written(path / CONFIG, self._config)
        self._is_ready = True

    @hookimpl(tryfirst=True)
    def on_exception(self, error: BaseException) -> None:
        """Record the error for the first rank, before this rank leaves."""
        self._failures.add(error)

    @hookimpl(wrapper=True, tryfirst=True)
    def on_stop(self, loop: Loop) -> Generator[None, Any, Any]:
        """Record why and at which step the run has ended, after all other plugins; warn if the disk fails."""
        reason = "error"
        try:
            result = yield
            reason = loop.end.reason or "done"  # a plugin may have changed it
            return result
        except Exception as error:
            loop.end.close(error)
            self._failures.add(error)
            raise
        finally:
            if loop.run_dir is not None and (self._is_ready or _lacks_outcome(loop, loop.run_dir, reason)):
                self._record(loop, loop.run_dir, reason)

    def _record(self, loop: Loop, run_dir: Path, reason: str) -> None:
        progress = loop.progress
        message = self._failures.first(loop.end.message) if reason == "error" else loop.end.message
        try:
            write_outcome(run_dir, RunOutcome(reason, message, progress.step, progress.epoch))
        except OSError as error:
            logger.warning("%s", cannot_write(run_dir / OUTCOME, error))
        except StorageError:  # the directory is gone
            if reason != "error":
                raise


def _earlier_run_error(path: Path) -> UserError:
    return UserError(
        f"{path} holds an earlier run; add --overwrite to replace it, --resume to continue it, or choose another "
        "directory (in a script: Loop(..., resume=True), builtin_plugins(overwrite=True) or another run_dir)"
    )


def _lacks_outcome(loop: Loop, path: Path, reason: str) -> bool:
    """Return whether the run in `path` was done when it was resumed, and has no outcome.json.

    Such a run was killed after its last checkpoint, before it wrote this file.
    """
    is_resumed = loop.is_main and loop.resume is not None and not loop.is_branch
    return is_resumed and reason == "done" and not (path / OUTCOME).exists()
