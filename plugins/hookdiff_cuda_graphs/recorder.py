"""Records work of the device once, to repeat it with one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Recorder:
    """Records CUDA graphs that share their memory: a replay overwrites the temporary tensors of all other recordings.

    Two recordings that belong together, the passes and the update of a step, are replayed one right after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.renew()

    def renew(self) -> None:
        """Give later recordings new memory: tensors of earlier recordings, which are dropped, may still be in use."""
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the `with` block on the stream of the recordings, so that first calls set up their kernels there."""
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            yield
        usual.wait_stream(self._stream)

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record the operations of `work` without running them; return a function that runs them."""
        graph, usual = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        try:
            # "thread_local": the threads that write checkpoints and pin batches may go on meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError:
            torch.cuda.set_stream(usual)  # after a recording that failed, torch would stay on the other stream
            raise
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder for `device`, or None if the device has no CUDA graphs."""
    return Recorder(device) if device.type == "cuda" else None
