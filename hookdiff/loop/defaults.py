"""The core's own hook implementations: the default of each seam, and the flush of the log between steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor, nn

from hookdiff.data.batch import Batch
from hookdiff.data.memory import to_device
from hookdiff.errors import HookError, UnknownWeights, UserError, listed
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.models.objective import LossOutput
from hookdiff.models.sample_request import SampleRequest, Samples
from hookdiff.models.weights import evaluating

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop


logger = logging.getLogger("hookdiff")


class Defaults:
    """The plugin "defaults" of every Loop; a seam (a hook with one result) calls it last."""

    @hookimpl(trylast=True)
    def restore(self) -> Mapping[str, Any]:
        return {}

    @hookimpl(trylast=True)
    def wrap_net(self, net: nn.Module) -> nn.Module:
        return net

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop) -> None:
        try:
            loop.weights.check()
        except UnknownWeights as error:
            raise UserError(f"sampling.weights: {error}") from None
        loop.log.open()
        if loop.run_dir and loop.is_main and loop.plugins.keys().isdisjoint(("run_dir", "metrics")):
            logger.warning(
                "%s: no plugin of this run writes config.toml, metrics.jsonl and outcome.json; to have them: "
                "Loop(..., plugins={**builtin_plugins(), ...})",
                loop.run_dir,
            )

    @hookimpl(trylast=True)
    def make_batch(self, batch: Batch) -> Batch:
        return batch

    @hookimpl(trylast=True)
    def draw(self, loop: Loop, batch: Batch) -> Batch:
        return loop.objective.draw(batch, loop.random.generator("noise", loop.progress.position, loop.device))

    @hookimpl(trylast=True)
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        return loop.run_pass(batch)

    @hookimpl(trylast=True)
    def micro_step(self, loop: Loop, batch: Batch) -> LossOutput:
        output = loop.hook.compute_loss(loop=loop, batch=batch)
        if output.per_sample is not None:
            loss = loop.hook.reduce_loss(loop=loop, batch=batch, output=output)
            output = output if loss is output.loss else evolve(output, loss=_scalar(loss))
        if not output.loss.requires_grad:
            raise UserError("no gradient reaches the loss: remove a torch.no_grad() or detach(), or unfreeze a weight")
        # Weighted by its number of samples, because the last micro-batch may be smaller.
        share = batch.weight * loop.num_ranks
        loop.hook.backward(loop=loop, loss=output.loss if share == 1 else output.loss * share)
        return output.detach()

    @hookimpl(trylast=True)
    def compute_loss(self, loop: Loop, batch: Batch) -> LossOutput:
        output = loop.objective(loop.net, batch)
        return output if isinstance(output, LossOutput) else LossOutput(output.mean())

    @hookimpl(trylast=True)
    def reduce_loss(self, output: LossOutput) -> Tensor:
        return output.loss

    @hookimpl(trylast=True)
    def backward(self, loss: Tensor) -> bool:
        torch.autograd.backward(loss)
        return True

    @hookimpl(trylast=True)
    def unscale(self) -> bool:
        return True

    @hookimpl(trylast=True)
    def optimizer_step(self, loop: Loop) -> bool:
        if not loop.gradients.is_applied:
            for optimizer in loop.optimizers:
                optimizer.step()
        return True

    @hookimpl
    def on_save_request(self, loop: Loop) -> None:
        if loop.is_main and not loop.plugins.implement("on_save_request"):
            logger.warning(
                "a save was asked for, but no plugin of this run saves: add a plugin with the hook on_save_request "
                "(`hookdiff plugins` lists what is installed)"
            )

    @hookimpl(tryfirst=True)
    def between_steps(self, loop: Loop) -> None:
        # Also in logged steps, because a plugin may thaw weights.
        if (loop.log.due or loop.progress.step == loop.first_step + 1) and (names := loop.gradients.unheld()):
            logger.warning(
                "no optimizer holds these parameters, so they never change: %s; freeze them (requires_grad_(False)), "
                "or give them to an optimizer",
                listed(names, 5),
            )
        loop.log.flush()

    @hookimpl(trylast=True)
    def amend(self, request: SampleRequest) -> SampleRequest:
        return request

    @hookimpl(trylast=True)
    def decode(self, loop: Loop, inputs: Tensor) -> Tensor:
        return loop.feed.codec.decode(inputs) if loop.feed.codec else inputs

    @hookimpl(trylast=True)
    def export_weights(self, loop: Loop) -> dict[str, Tensor]:
        from hookdiff.models.plain import plain_tensors  # only to export

        return plain_tensors(loop.model)

    @hookimpl(trylast=True)
    def sample(self, loop: Loop, request: SampleRequest) -> Samples:
        if loop.sampler is None:
            raise UserError("this Loop has no sampler to make images with: write Loop(..., sampler=Sampling())")
        shape = loop.feed.input_shape(request.size)
        with loop.weights(request.weights) as name, evaluating(loop.model):
            if request.num == 0:
                from hookdiff.data.picture_sizes import picture_shapes  # only for no images

                channels, *sides = picture_shapes(loop.feed)[0]
                return Samples(torch.empty(0, channels, *(request.size or sides)), name, loop.sampler)
            from hookdiff.models.sampling_arguments import arguments_for, bound  # only to make images

            images = loop.sampler.sample(
                loop.model,
                *(bound(loop.objective, request, loop.feed), shape, request.generators(), loop.device),
                **arguments_for(request, loop.objective, loop.feed, loop.model),
            )
        if not request.raw:
            images = loop.decode(images)
            if loop.feed.codec and request.mask is not None and request.images is not None:
                # Outside of the mask the pixels of `images` stay exactly.
                images = images.where(to_device(request.mask, loop.device), to_device(request.images, loop.device))
        return Samples(images, name, loop.sampler)


def _scalar(loss: Tensor) -> Tensor:
    if loss.dim() or not loss.requires_grad:
        graph = "with" if loss.requires_grad else "without"
        raise HookError(
            f"reduce_loss returned a tensor of shape {tuple(loss.shape)} {graph} a graph; expected a scalar that "
            "depends on output.per_sample, which an objective must not detach"
        )
    return loss
