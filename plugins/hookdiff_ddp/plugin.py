"""The plugin `ddp`."""

from collections.abc import Generator
from typing import ClassVar

from attrs import define, field
from attrs.validators import gt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookdiff import PASS, Loop, LossOutput, hookimpl
from hookdiff.options import about


@define(eq=False)
class DDP:
    """Trains on several ranks, with a copy of the model on each (PyTorch's DistributedDataParallel).

    torchrun starts the ranks, as in `torchrun --nproc-per-node 8 -m hookdiff run CONFIG --plugins ddp`; without it the
    plugin does nothing. `run.batch_size` is that of all ranks together, so the samples of a step, their order and their
    noise are the same on any number of ranks. The gradients are averaged while the backward pass of the last
    micro-batch is under way.
    """

    trains_on_ranks: ClassVar[bool] = True
    conflicts: ClassVar[tuple[str, ...]] = ("fsdp",)
    find_unused_parameters: bool = field(
        default=False,
        metadata=about("let parameters have no part in the loss of some steps; costs a search in each step"),
    )
    bucket_mb: float = field(
        default=25.0, validator=gt(0), metadata=about("size of the parts in which gradients are exchanged", "MiB")
    )
    _net: DistributedDataParallel | None = field(default=None, init=False)

    @hookimpl
    def wrap_net(self, loop: Loop, net: nn.Module) -> nn.Module:
        self._net = None
        if loop.num_ranks == 1:
            return PASS
        self._net = DistributedDataParallel(
            net,
            device_ids=[loop.device] if loop.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,  # the gradients of a single pass need no second copy
        )
        return self._net

    @hookimpl(wrapper=True)
    def micro_step(self, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        if self._net is None or index == count - 1:
            return (yield)
        with self._net.no_sync():
            return (yield)
