"""Trains on several devices, with a copy of the model on each."""

from collections import Counter
from collections.abc import Generator
from typing import Any

import torch
from attrs import define, field
from attrs.validators import gt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookdiff import PASS, Loop, LossOutput, UserError, hookimpl, listed, plugin
from hookdiff.machine import is_overlapping
from hookdiff.options import about


def part_buffers(net: nn.Module) -> None:
    """Give buffers with overlapping memory, into which DistributedDataParallel cannot write, memory of their own.

    A buffer that is a view of another tensor of `net` stays a view; only the other tensor is sent to the ranks.
    """
    buffers = {name: buffer for name, buffer in net.named_buffers() if is_overlapping(buffer)}
    if not buffers:
        return
    tensors = [tensor for tensor in (*net.parameters(), *net.buffers()) if tensor.layout == torch.strided]
    held = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    shown = [name for name, buffer in buffers.items() if held[buffer.untyped_storage().data_ptr()] > 1]
    for name in buffers.keys() - shown:
        buffers[name].data = buffers[name].contiguous()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, shown)  # type: ignore[no-untyped-call]


class Replica(nn.Module):
    """Calls `net` through a DistributedDataParallel, which is made anew when other parameters are trained.

    DistributedDataParallel exchanges only the gradients of the parameters that were trained when it was made. A
    parameter that is thawed later would differ between the ranks.
    """

    def __init__(self, net: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self._options = options
        self._named = list(net.named_parameters())  # kept: to walk through the modules takes long
        self.ddp = DistributedDataParallel(net, **options)
        self._trained = self._wanted()

    def _wanted(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._named]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def follow(self) -> None:
        """Exchange the gradients of the parameters that are trained now."""
        if self._wanted() != self._trained:
            self.ddp = DistributedDataParallel(self.ddp.module, **self._options)
            self._trained = self._wanted()

    def check_used(self) -> None:
        """Raise UserError if a parameter has no gradient; the exchange waits for the gradients of all parameters."""
        if unused := [name for name, value in self._named if value.requires_grad and value.grad is None]:
            raise UserError(
                f"plugins.ddp: the loss of this step does not depend on these parameters: {listed(unused, 3)}; set "
                "plugins.ddp.find_unused_parameters = true, or freeze parameters on which no loss depends"
            )


@plugin(trains_on_ranks=True, conflicts=("fsdp",))
@define(eq=False)
class DDP:
    """Trains on several ranks, with a copy of the model on each (PyTorch's DistributedDataParallel).

    torchrun starts the ranks, as in `torchrun --nproc-per-node 8 -m hookdiff run CONFIG --plugins ddp`. On a single
    rank the plugin does nothing. `run.batch_size` counts the samples of all ranks, so the samples of a step, their
    order and their noise are the same on any number of ranks. The gradients are averaged while the backward pass of the
    last micro-batch is under way.
    """

    find_unused_parameters: bool = field(
        default=False,
        metadata=about("allow parameters on which a step's loss does not depend; costs a search in each step"),
    )
    bucket_mb: float = field(default=25.0, validator=gt(0), metadata=about("gradients exchanged at a time", "MiB"))
    _net: Replica | None = field(default=None, init=False)

    @hookimpl
    def wrap_net(self, loop: Loop, net: nn.Module) -> nn.Module:
        self._net = None
        if loop.num_ranks == 1:
            return PASS
        part_buffers(net)
        self._net = Replica(
            net,
            {
                "device_ids": [loop.device] if loop.device.type == "cuda" else None,
                "bucket_cap_mb": self.bucket_mb,
                "find_unused_parameters": self.find_unused_parameters,
                "gradient_as_bucket_view": True,  # the gradients of a single pass need no second copy
            },
        )
        return self._net

    @hookimpl(wrapper=True)
    def micro_step(self, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        if self._net is None:
            return (yield)
        if index == 0:
            self._net.follow()
        if index < count - 1:
            with self._net.ddp.no_sync():
                return (yield)
        output = yield
        if not self.find_unused_parameters:
            self._net.check_used()
        return output
