"""`micro_batch = "auto"`: how many samples fit through the network at a time is tried out before a run begins."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import define
from torch import distributed

from hookdiff.data import Batch
from hookdiff.disk.tree import flatten, unflatten
from hookdiff.errors import UserError
from hookdiff.hookspecs import hookimpl
from hookdiff.models.memory import optimizer_bytes

if TYPE_CHECKING:
    from hookdiff.loop import Loop

# Messages of allocators and libraries that do not raise torch.OutOfMemoryError, in lower case.
_MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")

log = logging.getLogger("hookdiff")


@define(eq=False)
class FitMicroBatch:
    """Sets `micro_batch` to the whole batch, or to the first of its half, quarter, ... that the memory holds.

    Each is tried with the forward and backward of a real step, beside the state that the optimizers will have. Nothing
    of it stays: no gradient, no statistics in buffers, no random number, no loss scale. With several ranks it is what
    fits on all. On a CPU the system may kill the process before torch reports that memory is short.
    """

    @hookimpl(trylast=True)
    def on_start(self, loop: Loop) -> None:
        """Find it; raises UserError when not even one sample fits."""
        rows = loop.feed.training[: -(-loop.config.batch_size // loop.num_ranks)]
        (batch,) = loop.feed.unaugmented(rows, len(rows))
        batch = loop.objective.draw(batch, loop.random.generator("noise", 0, loop.device))
        with _traceless(loop):
            size = _on_all_ranks(loop, _largest(loop, batch))
        if not size:
            raise UserError(
                f"run.micro_batch: not even one sample fits into the memory of {loop.device}, which takes a smaller "
                "model, one with gradient_checkpointing = true, or half precision"
            )
        log.info("micro_batch: %d of the %d samples of a batch fit at a time", size, len(batch))
        loop.set_micro_batch(size)


def _largest(loop: Loop, batch: Batch) -> int:
    """Return what fits of `batch`; 0 is not even one sample."""
    to_come = 0 if any(optimizer.state for optimizer in loop.optimizers) else optimizer_bytes(loop.optimizers)
    if loop.device.type == "cuda":  # a twentieth to spare, because an allocator's blocks never fit together to the last
        to_come += torch.cuda.get_device_properties(loop.device).total_memory // 20
    size = len(batch)
    while size and not _fits(loop, batch, size, to_come):
        # By now the error is gone, and with it the frames that held what did not fit.
        gc.collect()
        if loop.device.type in ("cuda", "mps"):
            getattr(torch, loop.device.type).empty_cache()
        size = -(-size // 2) if size > 1 else 0
    return size


def _fits(loop: Loop, batch: Batch, size: int, to_come: int) -> bool:
    try:
        reserved = torch.empty(to_come, dtype=torch.uint8, device=loop.device)
        for part in batch.split(size)[:2]:  # a second one finds the gradients of the first
            # As one of more to follow, so that no rank waits for another.
            loop.hook.micro_step(loop=loop, batch=part, index=0, count=2)
        del reserved
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for parameter in loop.model.parameters():
            parameter.grad = None
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is how torch says that memory is short, on a GPU or a CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)


@contextmanager
def _traceless(loop: Loop) -> Iterator[None]:
    """Put back what a forward and a backward change: buffers, random states and plugins' states; log nothing."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in loop.model.buffers()]
    states = [(plugin, _copied(plugin.state_dict())) for plugin in _changed(loop)]
    try:
        with loop.log.muted(), torch.random.fork_rng([loop.device] if loop.device.type == "cuda" else []):
            yield
    finally:
        for buffer, values in buffers:
            buffer.copy_(values)
        for plugin, state in states:
            plugin.load_state_dict(state)


def _changed(loop: Loop) -> list[Any]:
    """Return the plugins that hear of a micro-batch and keep a state."""
    names = {
        heard.plugin_name for hook in ("micro_step", "compute_loss", "backward") for heard in loop.plugins.order(hook)
    }
    return [plugin for name, plugin in loop.plugins.items() if name in names and hasattr(plugin, "load_state_dict")]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    tensors, tree = flatten(state)
    return unflatten({name: tensor.detach().clone() for name, tensor in tensors.items()}, tree)


def _on_all_ranks(loop: Loop, size: int) -> int:
    if loop.num_ranks == 1:
        return size
    smallest = torch.tensor(size, device=loop.device)
    distributed.all_reduce(smallest, distributed.ReduceOp.MIN)
    return cast(int, smallest.item())
