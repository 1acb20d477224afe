"""The plugin that makes the run directory: it locks it early, and writes to it once nothing else can fail."""

import errno
import json
import logging
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import tomli_w
from attrs import asdict, define, field

from hookdiff.disk.files import cannot_write, discard, make_folder, new_file, write_file, writing
from hookdiff.disk.lock import LOCK, check_place, lock_run_dir
from hookdiff.disk.paths import CONFIG, LAUNCH, OUTCOME, check_run_dir
from hookdiff.errors import StorageError, UserError, shown
from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.progress import Every
from hookdiff.ranks import launch

log = logging.getLogger("hookdiff")


@define(eq=False)
class RunDir:
    """Makes and locks the run directory, and writes the config into it: `hparams`, and [run] with the `LoopConfig`.

    An existing directory is checked and locked first of all, so that no other run changes it. `on_ready` begins with
    the deletion of a run that is overwritten; all else is written there after the plugins that only check and measure.
    So a run that cannot start leaves an empty folder at most, and changes no earlier run.
    """

    overwrite: bool = False  # delete an earlier run in the directory
    _existed: bool = field(init=False, default=False)
    _config: bytes = field(init=False, default=b"")
    _is_ready: bool = field(init=False, default=False)  # the directory is written

    @hookimpl(tryfirst=True)
    def prepare_model(self, loop: Loop) -> None:
        """Lock an existing directory.

        Raises UserError if it holds an earlier run that is neither resumed nor overwritten, or another process has it.
        """
        path = loop.run_dir if loop.is_main else None
        self._is_ready = False
        self._existed = path is not None and path.is_dir()
        if path is None or not self._existed:
            return
        goes_on = loop.progress.position > 0 or (loop.resume is not None and not loop.is_branch)
        if self.overwrite:
            check_run_dir(path, overwrite=True)
        elif (path / CONFIG).exists() and not goes_on:
            raise _is_used(path)
        with writing(path):
            try:
                lock_run_dir(path, loop.resources)
            except OSError as error:
                if error.errno != errno.EROFS:  # a read-only disk: `on_ready` reports it
                    raise

    @hookimpl(tryfirst=True)
    def on_ready(self, loop: Loop) -> None:
        """Make and lock the directory, or delete the run that is overwritten.

        Raises UserError for hparams that are no TOML, or if another run has just made the directory.
        """
        path = loop.run_dir
        if path is None or not loop.is_main:
            return
        self._config = _as_toml(loop)
        with writing(path):
            make_folder(path)
            lock_run_dir(path, loop.resources)
            if not self._existed and (path / CONFIG).exists():
                raise _is_used(path)
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
            discard(path / OUTCOME)  # it is that of an earlier process
            discard(path / LAUNCH)
            if launch():
                with new_file(path / LAUNCH) as partial:
                    write_file(partial, launch().encode())
            with new_file(path / CONFIG) as partial:
                write_file(partial, self._config)
        self._is_ready = True

    @hookimpl(wrapper=True, tryfirst=True)
    def on_stop(self, loop: Loop) -> Generator[None, Any, Any]:
        """Record why and where the run has ended, after all other plugins; a disk that fails gives a warning."""
        reason = "error"
        try:
            result = yield
            reason = loop.end.reason or "done"  # a plugin may have changed it
            return result
        except Exception as error:
            loop.end.close(error)
            raise
        finally:
            if loop.run_dir is not None and (self._is_ready or _lacks_outcome(loop, loop.run_dir, reason)):
                self._record(loop, loop.run_dir / OUTCOME, reason)

    def _record(self, loop: Loop, path: Path, reason: str) -> None:
        progress = loop.progress
        record = {"reason": reason, "message": loop.end.message, "step": progress.step, "epoch": progress.epoch}
        try:
            with new_file(path) as partial:
                write_file(partial, f"{json.dumps(record)}\n".encode())
        except OSError as error:
            log.warning("%s", cannot_write(path, error))
        except StorageError:  # the directory is gone
            if reason != "error":
                raise


def _is_used(path: Path) -> UserError:
    return UserError(
        f"{path} holds an earlier run; continue it with --resume, replace it with --overwrite, or choose another "
        "directory (in a script: Loop(..., resume=True), builtin_plugins(overwrite=True) or another run_dir)"
    )


def _lacks_outcome(loop: Loop, path: Path, reason: str) -> bool:
    """Return whether the run in `path` was done when it was resumed, and has no file of its outcome.

    It was killed between its last checkpoint and that file.
    """
    is_resumed = loop.is_main and loop.resume is not None and not loop.is_branch
    return is_resumed and reason == "done" and not (path / OUTCOME).exists()


def _as_toml(loop: Loop) -> bytes:
    """Return the hparams of the loop, with a table [run] in any case."""
    options = asdict(loop.config, recurse=False)
    run = {k: str(v) if isinstance(v, Every) else v for k, v in options.items() if v is not None}
    try:
        return tomli_w.dumps({"run": run, **loop.hparams}).encode()
    except TypeError as error:
        raise UserError(f"Loop(hparams=...): {error}; give numbers, text, and lists and dicts of them") from error
    except UnicodeEncodeError as error:
        before, after = error.object[: error.start], error.object[error.start :]
        line = shown(before.rpartition("\n")[2] + after.partition("\n")[0])
        raise UserError(f"{CONFIG} is UTF-8 and cannot hold this line: {line}; choose another name") from None
