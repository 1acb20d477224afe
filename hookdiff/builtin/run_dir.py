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

from hookdiff.disk.files import cannot_write, new_file, write_file
from hookdiff.disk.lock import LOCK, lock_run_dir
from hookdiff.disk.paths import CONFIG, check_run_dir
from hookdiff.hookspecs import hookimpl

if TYPE_CHECKING:
    from hookdiff.loop import Loop


@define(eq=False)
class RunDir:
    """Writes the resolved config into the run directory, which it makes or, if `overwrite` says so, empties first.

    A directory that exists is locked before anything else, so that no other run reads or writes it meanwhile. The rest
    happens last in `on_start`, or before the first step of a resumed run, when all plugins have loaded their states: a
    run that cannot start leaves nothing behind and costs no earlier run.
    """

    overwrite: bool = False
    _was_there: bool = field(init=False, default=False)
    _is_ready: bool = field(init=False, default=False)

    @hookimpl(tryfirst=True)
    def prepare_model(self, loop: Loop) -> None:
        """Lock it if it is there; raises UserError when another process holds the lock."""
        self._is_ready = loop.run_dir is None or not loop.is_main
        if loop.run_dir is None or self._is_ready:
            return
        self._was_there = loop.run_dir.is_dir()
        if self._was_there:
            with _writing(loop.run_dir):
                try:
                    lock_run_dir(loop.run_dir, loop.resources)
                except OSError as error:
                    if error.errno != errno.EROFS:  # nobody writes there; the first step will find it out
                        raise

    @hookimpl(trylast=True)
    def on_start(self, loop: Loop) -> None:
        """Make it for a new run.

        Raises UserError when it cannot be written or another run was faster, StorageError when its disk fails.
        """
        if loop.progress.position == 0:
            self._make(loop)

    @hookimpl(tryfirst=True)
    def before_step(self, loop: Loop) -> None:
        """Make it for a run that goes on."""
        self._make(loop)

    def _make(self, loop: Loop) -> None:
        path = loop.run_dir
        if path is None or self._is_ready:
            return
        self._is_ready = True
        with _writing(path):
            if self.overwrite and path.exists():
                check_run_dir(path, overwrite=True)
                _empty(path)
            path.mkdir(parents=True, exist_ok=True)
            lock_run_dir(path, loop.resources)
            if not self._was_there and (path / CONFIG).exists():
                check_run_dir(path)
            config = tomli_w.dumps(loop.hparams) or "# A script made this run.\n"
            with new_file(path / CONFIG) as partial:
                write_file(partial, config.encode())


def _empty(path: Path) -> None:
    # Not the lock, which another process may wait for, nor the config, which marks the folder as a run to the end.
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
