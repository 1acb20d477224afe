"""The directory of a run: made when everything else has started, and never in place of an earlier one unasked."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
from attrs import define, field

from hookdiff.errors import UserError, nearest
from hookdiff.files import cannot_write, new_file, write_file
from hookdiff.hookspecs import hookimpl
from hookdiff.lock import LOCK, lock_run_dir

if TYPE_CHECKING:
    from hookdiff.loop import Loop

CONFIG = "config.toml"
_NOTHING = {LOCK, f".{CONFIG}.partial"}  # what a run leaves that was killed before it began


@define(eq=False)
class RunDir:
    """Writes the resolved config into the run directory, which it makes or, if `overwrite` says so, empties first.

    One that is there is locked first of all, so that no other run reads or writes it meanwhile. The rest comes last of
    all in `on_start`, or with the first step where a state was restored, which plugins hear of after `on_start`: a run
    that cannot start leaves nothing behind and costs no earlier run.
    """

    path: Path
    overwrite: bool = False
    _was_there: bool = field(init=False, default=False)
    _is_ready: bool = field(init=False, default=False)

    @hookimpl(tryfirst=True)
    def prepare_model(self, loop: Loop) -> None:
        """Lock it if it is there; raises UserError when another process has."""
        self._was_there, self._is_ready = self.path.is_dir(), not loop.is_main
        if self._was_there:
            with _writing(self.path):
                try:
                    lock_run_dir(loop)
                except OSError as error:
                    if error.errno != errno.EROFS:  # where nobody writes; a run that has a step to make will tell
                        raise

    @hookimpl(trylast=True)
    def on_start(self, loop: Loop) -> None:
        """Make it for a new run.

        Raises UserError when it cannot be written, StorageError if that is the fault of its disk, and UserError when
        another run was faster.
        """
        if loop.progress.position == 0:
            self._make(loop)

    @hookimpl(tryfirst=True)
    def before_step(self, loop: Loop) -> None:
        """Make it for a run that goes on."""
        self._make(loop)

    def _make(self, loop: Loop) -> None:
        if self._is_ready:
            return
        self._is_ready = True
        with _writing(self.path):
            if self.overwrite and self.path.exists():
                check_run_dir(self.path, overwrite=True)
                _empty(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            lock_run_dir(loop)
            if not self._was_there and (self.path / CONFIG).exists():
                check_run_dir(self.path)
            with new_file(self.path / CONFIG) as partial:
                write_file(partial, tomli_w.dumps(loop.hparams).encode())


def check_run_dir(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raise UserError unless a run may begin at `path`: an earlier one is only touched on request."""
    if resume or not path.exists() or (path.is_dir() and is_empty(path)):
        return
    if not overwrite:
        raise UserError(f"{path} exists; go on with --resume, start over with --overwrite, or choose --out DIR")
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, so what it leads to is not removed")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is no run directory (it has no {CONFIG}), so it is not overwritten")


def is_empty(path: Path) -> bool:
    """Whether the folder `path` holds nothing of a run."""
    return all(entry.name in _NOTHING for entry in path.iterdir())


def run_of(path: Path) -> Path:
    """Return the directory of the run that `path` belongs to: itself, or of a checkpoint the folder two above.

    Raises UserError when neither is the directory of a run.
    """
    if (path / CONFIG).is_file():
        return path
    if path.is_dir() and (path.resolve().parent.parent / CONFIG).is_file():
        return path.resolve().parent.parent
    if path.exists():
        raise UserError(f"{path} is no run directory: it has no {CONFIG}")
    raise no_such_folder(path)


def no_such_folder(path: Path) -> UserError:
    """Return the error of a folder that is not there, with the nearest name beside it."""
    near = nearest(path.name, [other.name for other in path.parent.iterdir()]) if path.parent.is_dir() else ""
    return UserError(f"{path}: no such folder{near}")


def _empty(path: Path) -> None:
    # Not the lock, which another process would find gone, nor the config, which says whose folder this is to the end.
    for entry in path.iterdir():
        if entry.name in (LOCK, CONFIG):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None
