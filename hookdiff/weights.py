"""Sampling with weights that are not the model's own, without leaving a trace in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hookdiff.loop import Loop


@contextmanager
def borrowed_weights(loop: Loop, name: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model hold `tensors`, by parameter name, for the time of the `with`; `loop.weights` is `name` then.

    Values are copied in and out: the parameters keep their addresses, so captured graphs and optimizers stay right.
    """
    parameters = dict(loop.model.named_parameters())
    kept = {key: parameters[key].detach().clone() for key in tensors}
    before, loop.weights = loop.weights, name
    try:
        _copy(parameters, tensors)
        yield
    finally:
        _copy(parameters, kept)
        loop.weights = before


@torch.no_grad()
def _copy(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode without gradients for the time of the `with`; each module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference_mode: a tensor made under it (a cached table, say) could never be used in training again.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
