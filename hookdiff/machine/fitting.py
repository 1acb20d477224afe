"""Calls a function on as many images at a time as fit in memory, and measures the memory in use."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from attrs import define

from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")

# Messages of allocators and libraries that do not raise torch.OutOfMemoryError, in lower case.
_MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")

_STATM = Path("/proc/self/statm")  # sizes of this process in pages, on Linux

Value = TypeVar("Value")


@define(eq=False)
class Fitting:
    """Calls functions on `size` images at a time, and on half as many whenever the images do not fit in memory.

    `is_joint`: all ranks make each call together, so no rank can repeat a call alone.
    """

    size: int
    device: torch.device
    is_joint: bool = False

    def parts(self, numbers: range, call: Callable[[range], Value]) -> Iterator[Value]:
        """Yield `call(part)` for all parts of `numbers`.

        Raises UserError if not even one image fits, or if a joint call does not.
        """
        start = numbers.start
        while start < numbers.stop:
            part = range(start, min(numbers.stop, start + self.size))
            done = _done(call, part)
            if done:
                yield done[0]
                start = part.stop
                continue
            if self.is_joint and len(part) > 1:
                raise UserError(
                    f"{len(part)} images at a time do not fit in the memory of {self.device}; set sampling.batch_size "
                    "lower, since ranks that share a model cannot lower it on their own"
                )
            self.size = len(part) // 2
            if not self.size:
                raise UserError(f"not even one image fits in the memory of {self.device}; free some memory")
            logger.info("%d images at a time do not fit in the memory of %s; now %d", len(part), self.device, self.size)
            free_memory(self.device)  # not in `_done`: there, the error and its frames still hold the tensors


def _done(call: Callable[[range], Value], part: range) -> list[Value]:
    """Return what `call` returns, in a list that is empty if there is too little memory."""
    done: list[Value] = []
    fits_in_memory(lambda: done.append(call(part)))
    return done


def fits_in_memory(call: Callable[[], object]) -> bool:
    """Call `call`, and return whether a GPU or a CPU has enough memory for it."""
    try:
        call()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a GPU or a CPU is out of memory."""
    known = isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)
    return known or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device: unreachable cycles of objects, and torch's cache."""
    gc.collect()
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).empty_cache()


def memory_in_use(device: torch.device) -> tuple[dict[str, int], int | None]:
    """Return the bytes in use, by name, and the bytes that the device has; counts that do not exist are left out."""
    if device.type == "cuda":
        values = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
        return values, torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        reserved = torch.mps.driver_allocated_memory()
        return {"allocated": torch.mps.current_allocated_memory(), "reserved": reserved}, None
    try:
        import resource
    except ImportError:  # Windows
        return {}, None
    values = {}
    if _STATM.exists():
        values["allocated"] = int(_STATM.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    # The kernel updates the peak more rarely than the current size.
    values["peak"] = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, values.get("allocated", 0))
    return values, resource.getpagesize() * os.sysconf("SC_PHYS_PAGES")
