"""Which checkpoints of a run are kept."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from attrs import define, field
from attrs.validators import ge

from hookdiff_checkpoint.folder import MANIFEST, Found

_NAME = re.compile(r"\.?step-(\d{8,})(\.partial|\.replaced)?")


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
            one for index, one in enumerate(found) if index < self.last or (self.every and one.number % self.every == 0)
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
        if not (name := _NAME.fullmatch(path.name)):
            continue
        final = folder / f"step-{name[1]}"
        if not (path / MANIFEST).exists():
            remove(path)
        elif name[2] == ".partial":
            remove(final)
            path.replace(final)
        elif name[2] == ".replaced":
            if final.exists():
                remove(path)
            else:
                path.replace(final)


def remove(path: Path) -> None:
    """Remove a checkpoint. The manifest goes first: what is left of one that is removed in part is no checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
