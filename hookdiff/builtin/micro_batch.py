"""The plugin that finds a micro-batch that fits in memory, for `micro_batch = "auto"`."""

import logging
from collections.abc import Callable

import torch
from attrs import define

from hookdiff.authors.trial_passes import rehearsing
from hookdiff.data.batch import Batch
from hookdiff.errors import UserError
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.machine.dtensor import is_sharded
from hookdiff.machine.fitting import fits_in_memory, free_memory
from hookdiff.machine.ranks import gathered
from hookdiff.models.footprint import optimizer_bytes
from hookdiff.models.objective import LossOutput

logger = logging.getLogger("hookdiff")


@define(eq=False)
class FitMicroBatch:
    """Sets `micro_batch` to the largest size that fits in memory: the whole batch, half of it, a quarter, ...

    Each size is tried with all passes of a step, while memory for the state of the optimizers is reserved. The
    trials change nothing (see `rehearsing`). With several ranks, the smallest size found is used. On a CPU, the system
    may kill the process before torch runs out of memory.
    """

    @hookimpl(trylast=True)
    def on_start(self, loop: Loop) -> None:
        """Set the micro-batch; raise UserError if not even one sample fits."""
        if any(map(is_sharded, loop.model.parameters())):
            raise UserError(
                "run.micro_batch = 'auto': the ranks of a sharded model cannot try sizes; give a number, such as "
                "run.batch_size divided by the number of ranks, or half of that"
            )
        size = -(-loop.config.batch_size // loop.num_ranks)
        batch = loop.feed.examples(lambda total: [row % total for row in range(size)], loop.feed.largest)
        batch = loop.hook.draw(loop=loop, batch=batch)
        with rehearsing(loop) as passes:
            size = _largest(loop, batch, passes)
        size = min(gathered(size))
        if not size:
            raise UserError(
                f"run.micro_batch: not even one sample fits in the memory of {loop.device}; use a smaller model, "
                "model.gradient_checkpointing = true, or half precision"
            )
        logger.info("micro_batch: %d of the %d samples of a batch fit at a time", size, len(batch))
        loop.set_micro_batch(size)


def _largest(loop: Loop, batch: Batch, passes: Callable[[Batch], LossOutput]) -> int:
    """Return the largest size that fits among the whole batch, its half, ... 1; 0 if none fits."""
    reserve = optimizer_bytes(each for each in loop.all_optimizers if not each.state)
    if loop.device.type == "cuda":  # 5% more: the allocator's blocks never fill the memory completely
        reserve += torch.cuda.get_device_properties(loop.device).total_memory // 20
    size = len(batch)
    while size:
        loop.set_micro_batch(size)
        if _fits(batch[: 2 * size], passes, reserve, loop.device):  # two passes: the gradients of the first stay
            break
        # Not inside `_fits`: there, the error and its frames still hold the tensors.
        loop.gradients.reset()
        free_memory(loop.device)
        size = -(-size // 2) if size > 1 else 0
    return size


def _fits(batch: Batch, passes: Callable[[Batch], LossOutput], reserve: int, device: torch.device) -> bool:
    def tried() -> None:
        reserved = torch.empty(reserve, dtype=torch.uint8, device=device)
        passes(batch)
        del reserved

    return fits_in_memory(tried)
