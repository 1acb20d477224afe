"""Writes checkpoints on a thread."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import define, field

from hookdiff.disk import make_folder
from hookdiff_checkpoint.folder import Found, Parts, write_checkpoint
from hookdiff_checkpoint.keep import remove
from hookdiff_checkpoint.snapshot import Staging, num_bytes

log = logging.getLogger("hookdiff")

_SPARE = 1 << 20  # bytes, beside the tensors: manifest, headers, folders


@define(eq=False)
class Writer:
    """Writes the checkpoints of one run, one at a time, and removes those that `choose` does not keep."""

    folder: Path
    known: dict[Path, Found]  # the run's own; the thread's while a save is under way
    choose: Callable[[Sequence[Found]], list[Found]]  # of those that are there, newest first, who stays
    _staging: Staging = field(factory=Staging, init=False)
    _pool: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    _job: Future[Path] | None = field(default=None, init=False)  # the save under way

    @property
    def is_busy(self) -> bool:
        """Whether there is a save whose `result` has not been asked for."""
        return self._job is not None

    @property
    def is_done(self) -> bool:
        """Whether there is such a save, and nothing to wait for."""
        return self._job is not None and self._job.done()

    def start(self, name: str, parts: Parts, facts: Mapping[str, Any]) -> None:
        """Copy `parts` in memory, and let the thread write the copy to the folder `name`."""
        assert self._job is None, "two saves at once"
        self._job = self._pool.submit(self._write, self.folder / name, self._staging.copy(parts), facts)

    def result(self) -> Path:
        """Wait for the save under way, and return where it is; raises what stopped it."""
        assert self._job
        job, self._job = self._job, None
        return job.result()

    def last_good(self) -> str:
        """Return in words which checkpoint a run can go on from."""
        there = self._newest_first()
        return f"the last good one is {there[0].path}" if there else "there is none yet"

    def close(self) -> None:
        """Wait for the thread."""
        self._pool.shutdown()

    def _write(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> Path:
        """On the thread."""
        self._staging.wait()
        try:
            self._write_once(path, parts, facts)
        except FileNotFoundError:
            log.warning("%s was gone, and is made again", self.folder)
            make_folder(self.folder)
            self._write_once(path, parts, facts)
        self.prune()
        return path

    def _write_once(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
        if shutil.disk_usage(self.folder).free < num_bytes(parts) + _SPARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.known[path] = write_checkpoint(path, parts, facts)

    def prune(self) -> None:
        """Remove what is not kept, while no save is under way."""
        there = self._newest_first()  # who has gone by another hand must not count
        kept = self.choose(there)
        self.known = {one.path: one for one in kept}
        for one in there:
            if one not in kept:
                try:
                    remove(one.path)
                except OSError as error:  # what was just written is no less good
                    log.warning("%s cannot be removed: %s", one.path, error.strerror or error)

    def _newest_first(self) -> list[Found]:
        there = [one for one in self.known.values() if one.path.exists()]
        return sorted(there, key=lambda one: (one.place, one.number), reverse=True)
