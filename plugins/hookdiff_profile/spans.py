"""Records when each hook of each plugin runs, and gives each moment of a step to one part of it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from attrs import define, field

from hookdiff.authors import wait_for
from hookdiff.loop import HOOKS

# What the loop itself does between two hooks, by the hook before or the hook after.
_AFTER = {"make_batch": "draw of noise and times", "unscale": "finite check"}
_BEFORE = {"make_batch": "data"}
LOOP = "loop"  # all that is left


@define
class _Mark:
    """From `at` on, `hook` of `plugin` is the innermost that runs; None: no hook runs."""

    at: float  # seconds
    running: tuple[str, str] | None
    of: str  # the hook that began or ended here


@define(eq=False)
class Recorder:
    """A watch for `loop.plugins.instrument`."""

    device: torch.device
    _marks: list[_Mark] = field(factory=list, init=False)
    _open: list[tuple[str, str]] = field(factory=list, init=False)

    @contextmanager
    def __call__(self, plugin: str, hook: str) -> Iterator[None]:
        """Record that `hook` of `plugin` runs during the `with`."""
        self._open.append((plugin, hook))
        self._mark(hook)
        try:
            yield
        finally:
            self._open.pop()
            self._mark(hook)

    def _mark(self, hook: str) -> None:
        wait_for(self.device)  # work counts for the hook that starts it, not for one that waits
        self._marks.append(_Mark(time.perf_counter(), self._open[-1] if self._open else None, hook))

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, the longest first. A hook inside another counts for the inner one alone."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for mark, following in pairwise(self._marks):
            seconds[_part(mark, following)] += following.at - mark.at
        return dict(sorted(seconds.items(), key=lambda part: -part[1]))


def _part(mark: _Mark, following: _Mark) -> str:
    if mark.running is None:
        return _AFTER.get(mark.of) or _BEFORE.get(following.of, LOOP)
    plugin, hook = mark.running
    return HOOKS[hook].work or LOOP if plugin == "defaults" else f"{plugin}: {hook}"
