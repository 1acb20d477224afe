"""The plugin `fsdp`."""

from collections.abc import Generator
from functools import partial
from typing import Literal

import torch
from attrs import define, field
from attrs.validators import ge
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from hookdiff import Loop, LossOutput, UserError, hookimpl, plugin
from hookdiff.machine import is_unsupported
from hookdiff.options import about
from hookdiff_fsdp.blocks import blocks_of, check_shared

DTYPES = {"float32": None, "bf16": torch.bfloat16}  # None: the dtype of the weights


@plugin(trains_on_ranks=True, conflicts=("ddp",))
@define(eq=False)
class FSDP:
    """Trains on several ranks, with a part of weights, gradients and averages on each (PyTorch's `fully_shard`).

    torchrun starts the ranks, as in `torchrun --nproc-per-node 8 -m hookdiff run CONFIG --plugins fsdp`. On a single
    rank the plugin does nothing. A block is gathered from all ranks while it computes, and freed afterwards.
    `run.batch_size` counts the samples of all ranks, so the samples of a step, their order and their noise are the same
    on any number of ranks.
    """

    blocks: tuple[str, ...] = field(
        default=(),
        metadata=about(
            'patterns of the modules to shard on their own, such as `["blocks.*"]`; default: the repeated blocks'
        ),
    )
    reshard: bool = field(
        default=True,
        metadata=about("free a block after its forward pass; false needs more memory and less communication"),
    )
    precision: Literal["float32", "bf16"] = field(
        default="float32",
        metadata=about(
            '"bf16": gather and compute the blocks in bf16; weights, gradient sums and other modules are not changed'
        ),
    )
    checkpointing: bool = field(
        default=False, metadata=about("recompute the blocks in the backward pass, to save memory")
    )
    sync_once: bool = field(
        default=False,
        metadata=about(
            "exchange gradients only after the last micro-batch: less communication, but whole gradients on each rank"
        ),
    )
    replicas: int = field(default=1, validator=ge(1), metadata=about("model copies, each on ranks / replicas ranks"))
    _model: FSDPModule | None = field(default=None, init=False)
    _kept: tuple[FSDPModule, ...] = field(default=(), init=False)  # blocks that stay gathered until the backward pass

    @hookimpl(trylast=True)  # other plugins may add weights
    def prepare_model(self, loop: Loop) -> None:
        self._model = None
        if loop.num_ranks == 1:
            return
        if isinstance(loop.model, FSDPModule):
            raise UserError("fsdp: the model is sharded already; build a new model for another training")
        blocks = blocks_of(loop.model, self.blocks)
        check_shared(loop.model, blocks.values())
        mesh = self._mesh(loop)
        dtype = DTYPES[self.precision]
        single = dtype and torch.float32  # for sums over the ranks, and for the outputs of the blocks
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=single, output_dtype=single)
        for parameter in loop.model.parameters():  # fully_shard takes only contiguous parameters
            parameter.data = parameter.data.contiguous()
        for block in blocks.values():
            if self.checkpointing:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            _shard(block, mesh, policy)
        # Modules outside of the blocks keep their precision, since bf16 would round the times that they get.
        self._model = _shard(loop.model, mesh, MixedPrecisionPolicy())
        self._kept = (self._model, *(() if self.reshard else blocks.values()))

    def _mesh(self, loop: Loop) -> DeviceMesh:
        if loop.num_ranks % self.replicas or self.replicas == loop.num_ranks:
            raise UserError(
                f"plugins.fsdp.replicas: {self.replicas} copies cannot be sharded over {loop.num_ranks} ranks; "
                f"expected a divisor of {loop.num_ranks} that is below {loop.num_ranks}"
            )
        if self.replicas == 1:
            return init_device_mesh(loop.device.type, (loop.num_ranks,))
        return init_device_mesh(
            loop.device.type, (self.replicas, loop.num_ranks // self.replicas), mesh_dim_names=("copies", "parts")
        )

    @hookimpl(wrapper=True)
    def micro_step(self, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        if self._model is None:
            return (yield)
        self._model.set_requires_gradient_sync(not self.sync_once or index == count - 1)
        # Here a backward pass follows, which frees the gathered weights. After a pass without a backward pass, the
        # gathered weights would stay, and the next update, which changes the parts, would not reach them.
        self._keep(True)
        try:
            return (yield)
        finally:
            self._keep(False)

    @hookimpl(wrapper=True)
    def optimizer_step(self, loop: Loop) -> Generator[None, bool, bool]:
        try:
            return (yield)
        except RuntimeError as error:
            if self._model is None or not is_unsupported(error):
                raise
            names = ", ".join(type(optimizer).__name__ for optimizer in loop.optimizers)
            raise UserError(f"optimizer: {names} cannot train weights that fsdp has sharded; try adamw") from error

    def _keep(self, is_kept: bool) -> None:
        for module in self._kept:
            module.set_reshard_after_forward(not is_kept, recurse=False)


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> FSDPModule:
    try:
        return fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    except ValueError as error:  # such as for a weight without dimensions
        raise UserError(f"fsdp: {error}") from error
