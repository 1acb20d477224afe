"""Records work of the device once, to repeat it with one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records work of one device; its recordings share their memory, so each is replayed after those before it."""

    def aside(self) -> AbstractContextManager[None]:
        """Do the work in a `with` where a recording is made: what is prepared at the first call is prepared there."""

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Call `work`, whose operations are only noted, and return a function that does them."""

    def renew(self) -> None:
        """Give later recordings memory of their own: those before are dropped, but a tensor of theirs may live."""


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.renew()

    def renew(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            yield
        usual.wait_stream(self._stream)

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        graph, usual = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        try:
            # "thread_local": the threads that write checkpoints and pin batches may go on meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError:
            torch.cuda.set_stream(usual)  # torch stays on the other one when it cannot end a recording
            raise
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder for `device`, or None if it has no graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None
