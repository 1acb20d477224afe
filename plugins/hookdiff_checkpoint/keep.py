"""Selects the checkpoints of a run that are kept, and cleans up after a process that was killed."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from attrs import define

from hookdiff import UserError
from hookdiff_checkpoint.folder import REMOVED, STEP, Found, read_checkpoint

_LEFT = re.compile(rf"\.({STEP.pattern})(\.partial|\.replaced|\{REMOVED})")


@define(frozen=True)
class Keep:
    """Keeps the newest checkpoints, every so many-th, and the best one."""

    last: int
    every: int  # 0: none
    best: str | None  # name of a logged value
    highest: bool  # whether the best value is the highest

    def choose(self, found: Sequence[Found]) -> list[Found]:
        """Return the checkpoints to keep of `found`, which are sorted, newest first."""
        chosen = [
            one for at, one in enumerate(found) if at < self.last or (self.every and one.number % self.every == 0)
        ]
        best = min(found, key=self._rank, default=None)  # the newest of equal ones
        if best and best not in chosen and self._rank(best) < math.inf:
            chosen.append(best)
        return chosen

    def _rank(self, one: Found) -> float:
        value = one.metrics.get(self.best or "")
        return math.inf if value is None else -value if self.highest else value


def settle(folder: Path) -> None:
    """Complete the saves and removals in `folder` that a killed process has begun."""
    for path in sorted(folder.iterdir()):  # .partial before .replaced
        left = _LEFT.fullmatch(path.name)
        if not left or path.is_symlink() or not path.is_dir():
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
    """Remove a checkpoint, beginning with its name, so that no partly removed checkpoint has a valid name.

    Raises OSError if it cannot be renamed.
    """
    removed = path.with_name(f".{path.name}{REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    path.replace(removed)
    shutil.rmtree(removed, ignore_errors=True)
