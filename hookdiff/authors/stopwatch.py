"""Measures how long each hook of each plugin takes, and detects the recording of a CUDA graph."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from attrs import define, field


def is_recording(device: torch.device) -> bool:
    """Return whether `device` is recording a CUDA graph, during which no value can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done its work, for a clock; do nothing while it is recording."""
    if device.type == "cuda" and not is_recording(device):
        torch.cuda.synchronize(device)


@define(frozen=True)
class Span:
    """A time between the beginnings and ends of hooks that follow each other."""

    seconds: float
    running: tuple[str, str] | None  # the innermost plugin and hook
    after: str  # the hook that began or ended before it
    before: str  # the hook that begins or ends after it


@define(eq=False)
class Stopwatch:
    """Times the hooks of plugins, as an argument of `Plugins.instrument`."""

    device: torch.device
    _marks: list[tuple[float, tuple[str, str] | None, str]] = field(factory=list, init=False)
    _open: list[tuple[str, str]] = field(factory=list, init=False)

    @contextmanager
    def __call__(self, plugin: str, hook: str) -> Iterator[None]:
        """Count the time of the `with` for `hook` of `plugin`, without the hooks that are called inside."""
        self._open.append((plugin, hook))
        self._mark(hook)
        try:
            yield
        finally:
            self._open.pop()
            self._mark(hook)

    def _mark(self, hook: str) -> None:
        wait_for(self.device)  # work counts for the hook that starts it, not for a hook that waits
        self._marks.append((time.perf_counter(), self._open[-1] if self._open else None, hook))

    def clear(self) -> None:
        self._marks.clear()

    def spans(self) -> Iterator[Span]:
        """Yield all spans since the first hook, in their order."""
        for (begin, running, after), (end, _, before) in pairwise(self._marks):
            yield Span(end - begin, running, after, before)
