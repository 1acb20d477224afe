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

_SPARE = 1 << 20  # bytes for manifest, headers and folders


@define(eq=False)
class Writer:
    """Writes the checkpoints of one run, one at a time, and removes those that `choose` does not return."""

    folder: Path
    known: dict[Path, Found]  # checkpoints of the run; used by the thread alone during a save
    choose: Callable[[Sequence[Found]], list[Found]]  # returns the checkpoints to keep, given all, newest first
    _staging: Staging = field(factory=Staging, init=False)
    _pool: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    job: Future[Path] | None = field(default=None, init=False)  # current save, until its `result` is taken

    def start(self, name: str, parts: Parts, facts: Mapping[str, Any]) -> None:
        """Copy `parts` in memory, and let the thread write the copy to the folder `name`."""
        assert self.job is None, "two saves at once"
        self.job = self._pool.submit(self._write, self.folder / name, self._staging.copy(parts), facts)

    def result(self) -> Path:
        """Wait for the current save, and return its path or raise its error."""
        assert self.job
        job, self.job = self.job, None
        return job.result()

    def last_good(self) -> str:
        """Return a sentence about the newest checkpoint from which a run can resume."""
        found = self._newest_first()
        return f"the last good one is {found[0].path}" if found else "there is none yet"

    def close(self) -> None:
        """Wait for the thread to end."""
        self._pool.shutdown()

    def _write(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> Path:
        """Run on the thread."""
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
        """Remove the checkpoints that are not kept. Not to be called during a save."""
        found = self._newest_first()  # a checkpoint that the user has removed does not count
        kept = self.choose(found)
        self.known = {one.path: one for one in kept}
        for one in found:
            if one not in kept:
                try:
                    remove(one.path)
                except OSError as error:  # the new checkpoint is good all the same
                    log.warning("%s cannot be removed: %s", one.path, error.strerror or error)

    def _newest_first(self) -> list[Found]:
        found = [one for one in self.known.values() if one.path.exists()]
        return sorted(found, key=lambda one: (one.place, one.number), reverse=True)
