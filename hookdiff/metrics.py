"""metrics.jsonl: one JSON object for each step that logged something. The other sinks are mirrors of it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attrs import define, field

from hookdiff.errors import StorageError
from hookdiff.hookspecs import hookimpl

if TYPE_CHECKING:
    from hookdiff.loop import Loop

METRICS = "metrics.jsonl"
log = logging.getLogger("hookdiff")


@define(eq=False)
class Metrics:
    """Writes what is logged to `metrics.jsonl` in the run directory; JSON has no NaN and no infinity: they are null.

    A checkpoint holds the length of the file; a resumed run cuts it there, so that no step appears twice. A branch
    begins with the lines of the run that it branches off. On a full disk they wait until there is room.
    """

    _file: IO[bytes] | None = field(default=None, init=False)
    _waiting: bytes = field(default=b"", init=False)  # lines, or what is left of them, that the disk has not taken
    _length: int = field(default=0, init=False)  # bytes of the file that belong to this run
    _is_to_cut: bool = field(default=False, init=False)  # a state was loaded, and the file is still longer than it says

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        """Cut what an earlier process wrote after the state that was loaded."""
        if self._is_to_cut and loop.run_dir and loop.is_main:
            self._open(loop, loop.run_dir / METRICS)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Append one line; raises StorageError when the disk fails, but not when it is full."""
        if loop.run_dir is None or not loop.is_main:
            return
        if self._file is None or self._file.closed:
            self._open(loop, loop.run_dir / METRICS)
        assert self._file
        told = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "time": round(time.time(), 3), **told}
        was_full = bool(self._waiting)
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            with _writing(loop.run_dir / METRICS):
                while self._waiting:
                    self._waiting = self._waiting[self._file.write(self._waiting) :]
        except _Full as error:
            if not was_full:
                log.warning("%s; what is logged waits until there is room", error)
        else:
            self._length = self._file.tell()

    def _open(self, loop: Loop, path: Path) -> None:
        with _writing(path):
            self._begin(loop, path)

    def _begin(self, loop: Loop, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if loop.resume and not path.exists():
            # Of another run, or of one of its checkpoints.
            for earlier in (loop.resume / METRICS, loop.resume.resolve().parent.parent / METRICS):
                if earlier.is_file():
                    shutil.copyfile(earlier, path)
                    break
        path.touch()
        self._file, self._is_to_cut = path.open("r+b", buffering=0), False
        loop.resources.callback(self._close, path)
        # Not past the end: where the earlier file was not kept, there is nothing to go on from.
        self._file.truncate(min(self._length, self._file.seek(0, os.SEEK_END)))
        self._file.seek(0, os.SEEK_END)

    def _close(self, path: Path) -> None:
        if self._waiting:
            log.warning("%s: the disk is full, and the last lines are lost", path)
        self._waiting = b""
        if self._file:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file, in bytes."""
        return {"bytes": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the file to the length that it had, before the next step or the next line."""
        if self._file:
            self._file.close()
        self._length, self._is_to_cut, self._waiting = state["bytes"], True, b""


class _Full(StorageError):
    pass


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = _Full if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"{path}: cannot be written: {error.strerror or error}") from error


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of the metrics file at `path`; a null is a NaN, whatever it was when it was logged."""
    lines = path.read_text("utf-8").splitlines()
    return [{k: math.nan if v is None else v for k, v in json.loads(line).items()} for line in lines]
