"""metrics.jsonl, the file of the logged values: one JSON object for each step that logged something."""

import errno
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field

from hookdiff.disk.files import cannot_write, make_folder, writing
from hookdiff.disk.lock import check_place
from hookdiff.disk.reading import open_file, read_file
from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.structure import COUNT

METRICS = "metrics.jsonl"
log = logging.getLogger("hookdiff")


@define(frozen=True)
class MetricsState:
    """The saved state of `Metrics`."""

    bytes: int = field(validator=COUNT)


@define(eq=False)
class Metrics:
    """Writes logged values to `metrics.jsonl` in the run directory; NaN and infinities, which JSON lacks, become null.

    A checkpoint holds the length of the file. A resumed run cuts the file to this length, so that no step appears
    twice. A branch begins with the lines of the run that it continues. Lines are not synced: a crash of the machine may
    lose lines that a checkpoint counts. A warning reports the lost lines, and the file continues after its last whole
    line. If the disk is full, new lines are kept in memory until there is space.
    """

    state_class: ClassVar[type] = MetricsState
    _file: FileIO | None = field(default=None, init=False)
    _waiting: bytes = field(default=b"", init=False)  # lines that are not written yet because the disk is full
    _length: int = field(default=0, init=False)  # bytes of the file that belong to this run

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Cut the lines that an earlier process wrote after the state that was loaded."""
        if resumed and loop.run_dir and loop.is_main:
            self._open(loop, loop.run_dir / METRICS)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Append one line; raises StorageError when the disk fails, but not when it is full."""
        if loop.run_dir is None or not loop.is_main:
            return
        path = loop.run_dir / METRICS
        if self._file is None or self._file.closed:
            self._open(loop, path)
        assert self._file
        with writing(path):
            check_place(path)
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "time": round(time.time(), 3), **finite}
        was_full = bool(self._waiting)
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._length = self._file.tell()
        except OSError as error:
            failure = cannot_write(path, error)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise failure from None
            if not was_full:
                log.warning("%s; new lines wait until there is space", failure)

    def _open(self, loop: Loop, path: Path) -> None:
        loop.resources.callback(self._close, path)
        with writing(path):
            make_folder(path.parent)
            check_place(path)
            if loop.resume and not path.exists():
                # `resume` is the directory of another run, or one of its checkpoints.
                for earlier in (loop.resume / METRICS, loop.resume.resolve().parent.parent / METRICS):
                    if earlier.is_file():
                        shutil.copyfile(earlier, path)
                        break
            existed = path.exists()
            open_file(path, "ab").close()
            self._file, expected = open_file(path, "r+b"), self._length
            found, kept = self._cut(self._file)
        step, lost = loop.progress.step, expected - len(kept)
        if found and not expected and not loop.first_step:
            count = len(found.splitlines())
            log.warning("%s: replaces the %d line%s of an earlier run", path, count, "s" * (count != 1))
        elif loop.resume and lost and existed:
            last = max((record.get("step", 0) for line in kept.splitlines() if (record := _record(line))), default=0)
            text = f"{lost:,} bytes shorter than at the checkpoint: it ends at step {last}, the run is at step {step}"
            log.warning("%s is %s", path, text)
        elif loop.resume and lost and not loop.is_branch:
            log.warning("%s is missing; a new one begins after step %d", path, step)

    def _cut(self, file: FileIO) -> tuple[bytes, bytes]:
        """Cut `file` after the last whole line within `_length`; return its content before and after that."""
        check_place(Path(str(file.name)))
        file.seek(0)
        found = file.readall()
        kept = found[: found.rfind(b"\n", 0, self._length) + 1]
        self._length = file.seek(len(kept))
        file.truncate()
        return found, kept

    def _close(self, path: Path) -> None:
        if self._waiting:
            log.warning("%s: the disk is full, and the last lines are lost", path)
        self._waiting = b""
        if self._file:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._length, self._waiting = state["bytes"], b""
        if self._file and not self._file.closed:  # in a rollback
            with writing(Path(str(self._file.name))):
                self._cut(self._file)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of the metrics file at `path`; null, which stands for NaN and infinities, becomes NaN.

    Lines that a failing disk or an editor has damaged are skipped with a warning. Raises OSError if it cannot be read.
    """
    records = [_record(line) for line in read_file(path).splitlines()]
    if damaged := [number for number, record in enumerate(records, 1) if record is None]:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        log.warning("%s: skipped line %d%s, which cannot be read", path, damaged[0], more)
    return [record for record in records if record is not None]


def _record(line: bytes) -> dict[str, float] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not all(map(_is_number, values.values())):
        return None
    return {name: math.nan if value is None else value for name, value in values.items()}


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
