"""Files of the run directory with one JSON object a line, and the plugins that keep what is logged in them."""

import errno
import json
import logging
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from attrs import asdict, define, field

from hookdiff.disk.files import cannot_write, make_folder, writing
from hookdiff.disk.lock import check_place
from hookdiff.disk.reading import open_file, read_file
from hookdiff.distribution import Distribution
from hookdiff.events import as_json
from hookdiff.history import DISTRIBUTIONS, METRICS, TEXTS
from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.structure import COUNT

log = logging.getLogger("hookdiff")


@define(eq=False)
class Lines:
    """A file of JSON lines in the run directory, to which lines are appended.

    Lines are not synced: a crash of the machine may lose lines that a checkpoint counts. A warning reports the lost
    lines, and the file continues after its last whole line. If the disk is full, new lines are kept in memory until
    there is space.
    """

    name: str
    is_cut: bool  # to the length that a checkpoint counts, when a run is resumed; else earlier lines stay
    length: int = field(default=0, init=False)  # bytes of the file that belong to this run
    _file: FileIO | None = field(default=None, init=False)
    _waiting: bytes = field(default=b"", init=False)  # lines that are not written yet because the disk is full

    def append(self, loop: Loop, step: int, values: Mapping[str, Any]) -> None:
        """Append a line on the main rank; raises StorageError when the disk fails, but not when it is full."""
        if loop.run_dir is None or not loop.is_main:
            return
        path = loop.run_dir / self.name
        if self._file is None or self._file.closed:
            self._open(loop, path)
        assert self._file
        with writing(path):
            check_place(path)
        record = {"step": step, "time": round(time.time(), 3), **values}
        was_full = bool(self._waiting)
        self._waiting += json.dumps(as_json(record), allow_nan=False).encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.length = self._file.tell()
        except OSError as error:
            failure = cannot_write(path, error)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise failure from None
            if not was_full:
                log.warning("%s; new lines wait until there is space", failure)

    def resume(self, loop: Loop) -> None:
        """Begin with the lines of the run that is continued."""
        if loop.run_dir and loop.is_main:
            path = loop.run_dir / self.name
            if self.length or path.exists() or _earlier(loop, self.name):
                self._open(loop, path)

    def go_back(self, length: int) -> None:
        """Take the `length` of a saved state; in a run that is rolled back the file is cut to it."""
        self.length, self._waiting = length, b""
        if self._file and not self._file.closed:
            with writing(Path(str(self._file.name))):
                self._cut(self._file)

    def _open(self, loop: Loop, path: Path) -> None:
        loop.resources.callback(self._close, path)
        with writing(path):
            make_folder(path.parent)
            check_place(path)
            if not path.exists() and (earlier := _earlier(loop, self.name)):
                self._begin_branch(path, read_file(earlier), loop.progress.step)
            existed = path.exists()
            open_file(path, "ab").close()
            self._file, expected = open_file(path, "r+b"), self.length
            if not self.is_cut:
                expected = self.length = self._file.seek(0, 2)
            found, kept = self._cut(self._file)
        step, lost = loop.progress.step, expected - len(kept)
        if found and not expected and not loop.first_step:
            count = len(found.splitlines())
            log.warning("%s: replaces the %d line%s of an earlier run", path, count, "s" * (count != 1))
        elif loop.resume and lost and existed and self.is_cut:
            last = max((_step(line) for line in kept.splitlines()), default=0)
            text = f"{lost:,} bytes shorter than at the checkpoint: it ends at step {last}, the run is at step {step}"
            log.warning("%s is %s", path, text)
        elif loop.resume and lost and self.is_cut and not loop.is_branch:
            log.warning("%s is missing; a new one begins after step %d", path, step)

    def _begin_branch(self, path: Path, lines: bytes, step: int) -> None:
        """Write the `lines` of the run that is continued, without those of steps that the branch does not have."""
        if not self.is_cut:  # the others are cut to the checkpoint
            lines = b"".join(line for line in lines.splitlines(keepends=True) if _step(line) <= step)
        path.write_bytes(lines)

    def _cut(self, file: FileIO) -> tuple[bytes, bytes]:
        """Cut `file` after the last whole line within `length`; return its content before and after that."""
        check_place(Path(str(file.name)))
        file.seek(0)
        found = file.readall()
        kept = found[: found.rfind(b"\n", 0, self.length) + 1]
        self.length = file.seek(len(kept))
        file.truncate()
        return found, kept

    def _close(self, path: Path) -> None:
        if self._waiting:
            log.warning("%s: the disk is full, and the last lines are lost", path)
        self._waiting = b""
        if self._file:
            self._file.close()


def _earlier(loop: Loop, name: str) -> Path | None:
    """Return the file called `name` of the run that is continued; `loop.resume` is its directory or a checkpoint."""
    if loop.resume is None:
        return None
    places = (loop.resume / name, loop.resume.resolve().parent.parent / name)
    return next((path for path in places if path.is_file()), None)


def _step(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0


@define(frozen=True)
class LinesState:
    """The saved state of a plugin that keeps lines."""

    bytes: int = field(validator=COUNT)


@define(eq=False)
class _KeepsLines:
    """The base of plugins that keep what is logged in a file.

    A checkpoint holds the length of the file. A resumed run cuts the file to this length, so that no step appears
    twice. A branch begins with the lines of the run that it continues.
    """

    state_class: ClassVar[type] = LinesState
    file_name: ClassVar[str]
    _lines: Lines = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._lines = Lines(self.file_name, is_cut=True)

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Cut the lines that an earlier process wrote after the state that was loaded."""
        if resumed:
            self._lines.resume(loop)

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._lines.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lines.go_back(state["bytes"])


@define(eq=False)
class Metrics(_KeepsLines):
    """Writes logged values to `metrics.jsonl`; NaN and infinities, which JSON lacks, become null."""

    file_name = METRICS

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Append one line; raises StorageError when the disk fails, but not when it is full."""
        self._lines.append(loop, step, values)


@define(eq=False)
class Texts(_KeepsLines):
    """Writes logged texts to `texts.jsonl`, and the structure of the network as the first of them."""

    file_name = TEXTS

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Cut the file of a resumed run, or begin with the network."""
        if resumed:
            self._lines.resume(loop)
        else:
            loop.log.texts({"model": str(loop.model)})

    @hookimpl
    def on_texts(self, loop: Loop, step: int, texts: Mapping[str, str]) -> None:
        """Append one line."""
        self._lines.append(loop, step, {"texts": dict(texts)})


@define(eq=False)
class Distributions(_KeepsLines):
    """Writes logged distributions to `distributions.jsonl`."""

    file_name = DISTRIBUTIONS

    @hookimpl
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Append one line, with low, high, counts and nonfinite by name."""
        self._lines.append(loop, step, {"distributions": {name: asdict(one) for name, one in distributions.items()}})
