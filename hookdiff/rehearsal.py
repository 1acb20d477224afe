"""Runs the passes of a step on trial: afterwards the run is as if they had never been made."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hookdiff.data import Batch
from hookdiff.loop import Loop
from hookdiff.objective import LossOutput
from hookdiff.shards import local
from hookdiff.weights import Buffers

# Hooks in which a plugin may change its state during a trial.
_HOOKS = ("make_batch", "accumulate", "micro_step", "compute_loss", "reduce_loss", "backward")


@contextmanager
def rehearsing(loop: Loop) -> Iterator[Callable[[Batch], LossOutput]]:
    """Yield a function that makes all passes of a step, by the hook `accumulate`, with a batch and its draws.

    It returns the loss, detached. Until its next call, `loop.gradients` are those of these passes, and carry the loss
    scale. `loop.set_micro_batch` holds until the end of the `with`.

    The end of the `with` restores weights, buffers and gradients, those of adopted modules too, the states of plugins,
    the generators of torch and the micro-batch, also after an error. What was logged is dropped. The weights are kept
    on the CPU, so that a GPU needs no more memory for a trial than for a step. With several ranks all of them must make
    the same passes, because a sharded model exchanges its weights; what is a copy on each exchanges no gradient.
    """
    optimizers = (*loop.optimizers, *loop.adopted.optimizers)
    held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    parameters: list[Tensor] = list(dict.fromkeys((*loop.model.parameters(), *held)))
    kept = [(parameter, parameter.grad, local(parameter).detach().to("cpu", copy=True)) for parameter in parameters]
    buffers = [Buffers(module) for module in (loop.model, *(trained.module for trained in loop.adopted))]
    for each in buffers:
        each.keep()
    names = {impl.plugin_name for hook in _HOOKS for impl in loop.plugins.order(hook)}
    called: list[Any] = [plugin for name, plugin in loop.plugins.items() if name in names]
    states = [(plugin, copy.deepcopy(plugin.state_dict())) for plugin in called if hasattr(plugin, "state_dict")]
    micro_batch, hparams = loop.config.micro_batch, dict(loop.hparams)
    net = loop.net if loop.num_ranks == 1 else loop.model
    on_gpu = [loop.device] if loop.device.type == "cuda" else []

    def passes(batch: Batch) -> LossOutput:
        loop.gradients.reset(batch.weight)
        output = loop.hook.accumulate(loop=loop, batch=batch)
        loop.gradients.conclude(output.loss)
        return output

    try:
        with loop.log.muted(), loop.gradients.aside(), torch.random.fork_rng(on_gpu), loop.using(net=net):
            for parameter in parameters:
                parameter.grad = None
            yield passes
    finally:
        with torch.no_grad():
            for parameter, gradient, values in kept:
                parameter.grad = gradient
                local(parameter).copy_(values)
        for each in buffers:
            each.put_back()
        for plugin, state in states:
            plugin.load_state_dict(state)
        loop.set_micro_batch(micro_batch)
        loop.hparams.update(hparams)
