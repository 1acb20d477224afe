"""Does work on as many images at a time as fit in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from attrs import define

from hookdiff.errors import UserError

# In lower case: messages of allocators and libraries that do not raise torch.OutOfMemoryError.
_MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")

Value = TypeVar("Value")


@define(eq=False)
class Fitting:
    """Calls functions on `size` images at a time, and on half as many whenever those do not fit in memory."""

    size: int
    device: torch.device

    def parts(self, numbers: range, call: Callable[[range], Value]) -> Iterator[Value]:
        """Yield `call(part)` for all parts of `numbers`. Raises UserError if not even one image fits."""
        start = numbers.start
        while start < numbers.stop:
            part = range(start, min(numbers.stop, start + self.size))
            done = _done(call, part)
            if done:
                yield done[0]
                start = part.stop
                continue
            self.size = len(part) // 2
            if not self.size:
                raise UserError(f"not even one image fits in the memory of {self.device}")
            free_memory(self.device)  # not in `_done`: there, the error and its frames still hold the tensors


def _done(call: Callable[[range], Value], part: range) -> list[Value]:
    """Return what `call` returns, in a list that is empty if there is too little memory."""
    try:
        return [call(part)]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return []


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a GPU or a CPU is out of memory."""
    known = isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)
    return known or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def free_memory(device: torch.device) -> None:
    """Return memory that nothing uses to the device: lost cycles of objects, and what torch keeps for later."""
    gc.collect()
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).empty_cache()
