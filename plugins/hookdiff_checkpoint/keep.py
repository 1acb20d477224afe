"""Selects the checkpoints of a run that are kept, and cleans up after a process that was killed."""

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import define, field

from hookdiff import Finding, UserError, listed, nearest
from hookdiff.disk import discard
from hookdiff.run_dir import step_of
from hookdiff_checkpoint.folder import REMOVED, CheckpointInfo, read_checkpoint

_LEFT = re.compile(rf"\.(.+)(\.partial|\.replaced|\{REMOVED})")


def choose(
    checkpoints: Sequence[CheckpointInfo], last: int, every: int, best: str | None, highest: bool
) -> list[CheckpointInfo]:
    """Return the `checkpoints` to keep; they are sorted, newest first.

    The `last` newest are kept, and the newest scheduled checkpoint, to which a rollback goes back. Every `every`-th
    save is kept (0: none), and the checkpoint with the best value of the name `best`: the lowest, unless `highest`. A
    value counts only if it is of as many samples as the newest value; `best`/num is the logged number of samples.
    """
    scheduled = next((info for info in checkpoints if info.scheduled), None)

    def rank(info: CheckpointInfo) -> float:
        value = info.metrics.get(best or "")
        return math.inf if value is None else -value if highest else value

    chosen = [
        info
        for at, info in enumerate(checkpoints)
        if at < last or info is scheduled or (every and info.number % every == 0)
    ]
    number = next((info.metrics.get(f"{best}/num") for info in checkpoints if best in info.metrics), None)
    comparable = [info for info in checkpoints if info.metrics.get(f"{best}/num") == number]
    first = min(comparable, key=rank, default=None)  # the newest of equally good checkpoints
    return [*chosen, first] if first and first not in chosen and rank(first) < math.inf else chosen


@define(eq=False)
class Logged:
    """The values of the newest step, and whether the value `best` is logged at steps that are saved."""

    best: str | None
    is_found: bool = False  # at a saved step
    _step: int = field(default=0, init=False)
    _values: dict[str, float] = field(factory=dict, init=False)
    _names: set[str] = field(factory=set, init=False)  # of all logged values
    _elsewhere: int | None = field(default=None, init=False)  # newest step at which `best` was logged

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values that are logged at `step`; a step may have several logs."""
        self._values = {**(self._values if step == self._step else {}), **values}
        self._step = step
        self._names.update(values)
        if self.best in values:
            self._elsewhere = step

    def at(self, step: int) -> dict[str, float]:
        """Return the finite values of `step`, to store them in its checkpoint."""
        if step != self._step:
            return {}
        self.is_found |= self.best in self._values
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    def problem(self, is_over: bool) -> Finding | None:
        """Return why no saved step has the value `best`; None if a later step may have it, unless the run `is_over`."""
        if self.best is None or self.is_found:
            return None
        near, so_far = nearest(self.best, self._names), "" if is_over else "so far "
        if self._elsewhere:
            step = f"{self._elsewhere:,}"
            what = f"keep_best: {self.best!r} was logged at step {step}, but {so_far}at no step with a save"
            remedy = "to save at the steps at which it is logged (plugins.checkpoint.every)"
            return Finding("warning", what, "no checkpoint is kept for it", remedy)
        if not (is_over or near):
            return None
        what = f"keep_best: {self.best!r} has {so_far}not been logged, so no checkpoint is kept for it"
        names = listed(sorted(self._names), 8) or "no values"
        return Finding("warning", what + near, "" if near else f"logged are: {names}")


def finish_interrupted(folder: Path) -> None:
    """Complete the saves and removals that a killed process has begun in `folder`."""
    for path in sorted(folder.iterdir()):  # .partial before .replaced
        left = _LEFT.fullmatch(path.name)
        if not left or step_of(left[1]) is None or path.is_symlink() or not path.is_dir():
            continue
        final, kind = folder / left[1], left[2]
        if kind == REMOVED or (kind == ".replaced" and final.exists()) or (kind == ".partial" and not _is_whole(path)):
            shutil.rmtree(path, ignore_errors=True)
        else:
            if final.exists():
                remove(final)
            path.replace(final)


def _is_whole(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except UserError:
        return False
    return True


def remove(path: Path) -> None:
    """Rename a checkpoint and remove it, so that no half-removed folder has a valid name. Raises OSError."""
    removed = path.with_name(f".{path.name}{REMOVED}")
    discard(removed)
    path.replace(removed)
    discard(removed)
