"""The plugin `memory`."""

import torch
from attrs import define, field
from attrs.validators import gt, le

from hookdiff import Alarms, Due, Every, Loop, hookimpl, parse_every
from hookdiff.log import memory_short
from hookdiff.machine import free_memory, memory_in_use
from hookdiff.options import about

MIB = 1 << 20


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
            values, total = memory_in_use(loop.device)
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
