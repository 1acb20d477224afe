"""The plugin `memory`."""

import os
import sys
from pathlib import Path

import torch
from attrs import define, field
from attrs.validators import gt, le

from hookdiff import Alarms, Due, Every, Loop, hookimpl, parse_every
from hookdiff.findings import memory_short
from hookdiff.fitting import free_memory
from hookdiff.options import about

MIB = 1 << 20
STATM = Path("/proc/self/statm")


@define(eq=False)
class Memory:
    """Logs the memory in use and its peak so far, in MiB, and warns once when the peak comes near the limit.

    On a GPU these are the counts of torch's allocator, which are read without waiting for the device:
    `memory/allocated`, `memory/reserved` (with the free memory that the allocator keeps) and `memory/peak` (of
    `memory/allocated`). On a CPU it is the resident set of the process: `memory/allocated` (Linux) and `memory/peak`.
    """

    empty_cache_every: Every = field(
        default=Every(0),
        converter=parse_every,
        metadata=about("how often to free reference cycles and unused GPU memory"),
    )
    warn_above: float = field(
        default=0.95, validator=[gt(0), le(1)], metadata=about("share of the memory at which to warn")
    )
    _due: Due = field(init=False)
    _alarms: Alarms = field(factory=Alarms, init=False)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._due, self._alarms = Due(self.empty_cache_every), Alarms()
        if loop.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loop.device)

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.log.due:
            values, total = measure(loop.device)
            for name, size in values.items():
                loop.log({f"memory/{name}": size / MIB}, detail=name != "peak")
            peak = values.get("peak", 0)
            if total is not None and peak >= self.warn_above * total:
                short = memory_short(peak, total, f"the peak on {loop.device}")
                loop.log.report(self._alarms.news(loop.progress.step, "memory", short))
        if self._due.after_step(loop.progress.step):
            free_memory(loop.device)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        if self._due.after_epoch(loop.progress.epoch):
            free_memory(loop.device)


def measure(device: torch.device) -> tuple[dict[str, int], int | None]:
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
    if STATM.exists():
        values["allocated"] = int(STATM.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    # The kernel updates the peak more rarely than the current size.
    values["peak"] = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, values.get("allocated", 0))
    return values, resource.getpagesize() * os.sysconf("SC_PHYS_PAGES")
