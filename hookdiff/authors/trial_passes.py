"""Tries the forward and backward passes of a step, restores the state of the run, and keeps trials out of the log."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.loop.contract_checks import implements
from hookdiff.loop.hookspecs import hooks_of
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import keeps_state, restore_state, state_of
from hookdiff.machine.dtensor import local
from hookdiff.models.objective import LossOutput
from hookdiff.models.weights import Buffers


@contextmanager
def rehearsing(loop: Loop) -> Iterator[Callable[[Batch], LossOutput]]:
    """Yield a function that makes all forward and backward passes of a step, with the hook `accumulate`.

    The function takes a batch from the hook `draw`, and returns the detached loss. `loop.gradients` then holds
    the gradients, times the loss scale, until the next call. `loop.set_micro_batch` is undone at the end of the `with`.

    At the end of the `with`, even after an error, these are restored: the weights, buffers and gradients of the model
    and of adopted modules, the states of plugins, the generators of torch, and the micro-batch. Logged values are
    dropped. The weights are copied to the CPU, so that a trial needs no more GPU memory than a step. All ranks must
    make the same passes, because a sharded model exchanges its weights. If each rank has a copy of the model, no
    gradients are exchanged: each rank has the gradients of its own samples.
    """
    optimizers = loop.all_optimizers
    held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    parameters: list[Tensor] = list(dict.fromkeys((*loop.model.parameters(), *held)))
    before = [(parameter, parameter.grad, local(parameter).detach().to("cpu", copy=True)) for parameter in parameters]
    buffers = [Buffers(module) for module in (loop.model, *(trained.module for trained in loop.adopted))]
    for each in buffers:
        each.keep()
    # The plugins that may change during a trial, or while its batch is made.
    called = [plugin for plugin in loop.plugins.values() if implements(plugin, *hooks_of("batch", "passes"))]
    states = [(plugin, copy.deepcopy(state_of(plugin))) for plugin in called if keeps_state(plugin)]
    micro_batch, hparams = loop.config.micro_batch, dict(loop.hparams)
    net = loop.net if loop.num_ranks == 1 else loop.model
    on_gpu = [loop.device] if loop.device.type == "cuda" else []

    def passes(batch: Batch) -> LossOutput:
        loop.gradients.reset(batch.weight)
        output = loop.hook.accumulate(loop=loop, batch=batch)
        loop.gradients.conclude(output.loss)
        return output

    try:
        with loop.log.muted(), loop.gradients.set_aside(), torch.random.fork_rng(on_gpu), loop.using(net=net):
            for parameter in parameters:
                parameter.grad = None
            yield passes
    finally:
        with torch.no_grad():
            for parameter, gradient, values in before:
                parameter.grad = gradient
                local(parameter).copy_(values)
        for each in buffers:
            each.put_back()
        for plugin, state in states:
            restore_state(plugin, state)
        loop.set_micro_batch(micro_batch)
        loop.hparams.update(hparams)


@contextmanager
def without_log(level: int = logging.NOTSET) -> Iterator[None]:
    """Drop the log records of hookdiff that have at least this `level`. Default: all records."""
    log = logging.getLogger("hookdiff")

    def is_below(record: logging.LogRecord) -> bool:
        return record.levelno < level

    log.addFilter(is_below)
    try:
        yield
    finally:
        log.removeFilter(is_below)
