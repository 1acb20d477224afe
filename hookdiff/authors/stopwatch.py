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
    """Wait until `device` has finished its work, before a clock is read; do nothing while it records a CUDA graph."""
    if device.type == "cuda" and not is_recording(device):
        torch.cuda.synchronize(device)


@define(frozen=True)
class Span:
    """The time between two successive events; an event is the beginning or the end of a hook."""

    seconds: float
    running: tuple[str, str] | None  # the innermost plugin and hook at this time, if any
    after: str  # the hook that begins or ends at the start of the span
    before: str  # the hook that begins or ends at the end of the span


@define(eq=False)
class Stopwatch:
    """Measures the time of each hook of each plugin; an argument of `Plugins.instrument`."""

    device: torch.device
    _marks: list[tuple[float, tuple[str, str] | None, str]] = field(factory=list, init=False)
    _open: list[tuple[str, str]] = field(factory=list, init=False)

    @contextmanager
    def __call__(self, plugin: str, hook: str) -> Iterator[None]:
        """Count the time of the `with` for `hook` of `plugin`, without the time of the hooks that are called inside."""
        self._open.append((plugin, hook))
        self._mark(hook)
        try:
            yield
        finally:
            self._open.pop()
            self._mark(hook)

    def _mark(self, hook: str) -> None:
        wait_for(self.device)  # work of the GPU counts for the hook that starts it
        self._marks.append((time.perf_counter(), self._open[-1] if self._open else None, hook))

    def clear(self) -> None:
        self._marks.clear()

    def spans(self) -> Iterator[Span]:
        """Yield all spans since the first hook, in their order."""
        for (begin, running, after), (end, _, before) in pairwise(self._marks):
            yield Span(end - begin, running, after, before)
