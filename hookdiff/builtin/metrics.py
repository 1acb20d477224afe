"""metrics.jsonl: one JSON object for each step that logged something. The other sinks are mirrors of it."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from hookdiff.errors import StorageError
from hookdiff.hookspecs import hookimpl

if TYPE_CHECKING:
    from hookdiff.loop import Loop

METRICS = "metrics.jsonl"
log = logging.getLogger("hookdiff")


@define(eq=False)
class Metrics:
    """Writes logged values to `metrics.jsonl` in the run directory; a NaN or an infinity is null: JSON has neither.

    A checkpoint holds the length of the file, and a resumed run cuts the file there, so that no step appears twice.
    Lines are not synced: a machine that crashes may lose lines that a checkpoint counts. The file then ends with its
    last whole line, and a warning names the loss. A branch begins
    with the lines of the run that it branches off. On a full disk new lines wait until there is room.
    """

    _file: FileIO | None = field(default=None, init=False)
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
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "time": round(time.time(), 3), **finite}
        was_full = bool(self._waiting)
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            with _writing(loop.run_dir / METRICS):
                while self._waiting:
                    self._waiting = self._waiting[self._file.write(self._waiting) :]
        except _Full as error:
            if not was_full:
                log.warning("%s; new lines wait until there is room", error)
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
        was_there, is_new = path.exists(), not self._is_to_cut and not self._length
        path.touch()
        self._file, self._is_to_cut = path.open("r+b", buffering=0), False
        loop.resources.callback(self._close, path)
        found = self._file.readall()
        kept = found[: found.rfind(b"\n", 0, self._length) + 1]
        if is_new and found:
            count = len(found.splitlines())
            log.warning("%s: replaces the %d line%s of an earlier run", path, count, "s" * (count != 1))
        elif loop.resume and len(kept) < self._length and (was_there or not loop.is_branch):
            loss = f"is not there, and begins anew after step {loop.progress.step}"
            if was_there:
                ends = f"its lines end at step {_last_step(kept)}, and the run goes on from step {loop.progress.step}"
                loss = f"is {self._length - len(kept):,} bytes shorter than the checkpoint says: {ends}"
            log.warning("%s %s", path, loss)
        self._length = self._file.seek(len(kept))
        self._file.truncate()

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


def _last_step(lines: bytes) -> float:
    records = map(_record, reversed(lines.splitlines()))
    return next((record["step"] for record in records if record and "step" in record), 0)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of the metrics file at `path`; a null is a NaN, whatever it was when it was logged.

    A line that a failing disk or an editor has damaged is passed over with a warning: it must not end a run.
    """
    records = [_record(line) for line in path.read_bytes().splitlines()]
    if damaged := [number for number, record in enumerate(records, 1) if record is None]:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        log.warning("%s: passed over line %d%s, which cannot be read", path, damaged[0], more)
    return [record for record in records if record is not None]


def _record(line: bytes) -> dict[str, float] | None:
    """Return the values of a line of the file, or None where it is damaged."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not all(isinstance(value, int | float | None) for value in values.values()):
        return None
    return {name: math.nan if value is None else value for name, value in values.items()}
