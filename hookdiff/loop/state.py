"""The state of a run, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookdiff.errors import PluginError, UserError
from hookdiff.loop.adopted import ADOPTED
from hookdiff.loop.saved import checked, keeps_state, saved_fields, state_of

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop

Optimizers = Optimizer | Sequence[Optimizer]


def as_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple."""
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


class NotMade(tuple[Optimizer, ...]):
    """The optimizers of a run before they are made."""

    def __getitem__(self, index: Any) -> Any:
        raise PluginError("loop.optimizers is empty before on_start; read it in on_start or later")


def run_state(loop: Loop) -> dict[str, Any]:
    """Return the whole state of a run, nested. The tensors are not copied."""
    from hookdiff.disk.tree import plain
    from hookdiff.models.optimizer_state import optimizer_state

    return {
        "versions": dict(loop.plugins.versions),
        "config": plain(loop.hparams),
        "data": loop.feed.state_dict(),
        "random": {"seed": loop.feed.seed},
        "progress": loop.progress.state_dict(),
        "log": loop.log.state_dict(),
        "model": loop.model.state_dict(),
        "optimizers": {
            str(index): optimizer_state(optimizer, loop.model) for index, optimizer in enumerate(loop.optimizers)
        },
        "plugins": {name: _state_of(loop, name) for name in loop.plugins if has_state(loop, name)},
    }


def has_state(loop: Loop, name: str) -> bool:
    """Return whether the plugin `name` has a state."""
    return keeps_state(loop.plugins[name]) or bool(loop.adopted.of(name))


def _state_of(loop: Loop, name: str) -> dict[str, Any]:
    plugin = loop.plugins[name]
    state: dict[str, Any] = state_of(plugin)
    if saved_fields(plugin):
        try:  # refused now, not when the run is resumed
            checked(type(plugin), state)
        except ValueError as error:
            raise PluginError(f"the plugin {name!r} would save a state that no run can load: {error}") from None
    trained = {str(index): module.state_dict() for index, module in enumerate(loop.adopted.of(name))}
    return {**state, ADOPTED: trained} if trained else state


def checked_optimizers(optimizers: Optimizers, model: nn.Module) -> tuple[Optimizer, ...]:
    """Return the optimizers of `model` as a tuple. Raises UserError for weights or an `eps` that cannot train."""
    check_parameters(model)
    optimizers = as_tuple(optimizers)
    _check_eps(optimizers)
    return optimizers


def _check_eps(optimizers: Iterable[Optimizer]) -> None:
    """Raise UserError for an `eps` that is 0 in the dtype of the weights: a gradient of 0 would make them NaN."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps, dtypes = group.get("eps"), {parameter.dtype for parameter in group["params"]}
            for dtype in dtypes if isinstance(eps, float | int) else ():
                if not torch.tensor(eps, dtype=dtype):
                    name, least = str(dtype).removeprefix("torch."), torch.finfo(dtype).tiny
                    raise UserError(
                        f"optimizer.eps: {eps:g} is 0 in {name}, the dtype of the weights, and a gradient of 0 would "
                        f"make them NaN; try {max(1e-8, least):.0e}"
                    )


def check_parameters(model: nn.Module) -> None:
    """Raise UserError for a trained parameter that is complex, or with values that overlap in memory."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.is_complex() or not parameter.is_contiguous()):
            from hookdiff.models.trainable import check_parameter

            check_parameter(name, parameter)
