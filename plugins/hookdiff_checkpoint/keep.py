"""Which checkpoints of a run are kept, and what a process that was killed has left of the others."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from attrs import define, field
from attrs.validators import ge

from hookdiff import UserError
from hookdiff_checkpoint.folder import REMOVED, STEP, Found, read_checkpoint

_LEFT = re.compile(rf"\.({STEP.pattern})(\.partial|\.replaced|\{REMOVED})")


@define(frozen=True)
class Keep:
    """The newest, every so many-th for good, and the best."""

    last: int = field(default=3, validator=ge(1))
    every: int = field(default=0, validator=ge(0))  # 0: none
    best: str | None = None  # the name of a logged value
    highest: bool = False  # what is best

    def choose(self, found: Sequence[Found]) -> list[Found]:
        """Return those of `found`, newest first, that are kept."""
        chosen = [
            one for at, one in enumerate(found) if at < self.last or (self.every and one.number % self.every == 0)
        ]
        best = min(found, key=self._rank, default=None)  # of equal ones the newest
        if best and best not in chosen and self._rank(best) < math.inf:
            chosen.append(best)
        return chosen

    def _rank(self, one: Found) -> float:
        value = one.metrics.get(self.best or "")
        return math.inf if value is None else -value if self.highest else value


def settle(folder: Path) -> None:
    """Bring to its end what a process that was killed had begun in `folder`: a save, or a removal."""
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
    """Remove a checkpoint; raises OSError when that cannot even be begun.

    It loses its name first: one that is there under its name has not been removed in part.
    """
    removed = path.with_name(f".{path.name}{REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    path.replace(removed)
    shutil.rmtree(removed, ignore_errors=True)
