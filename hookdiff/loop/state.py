"""The state of a run, as a checkpoint holds it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import nn
from torch.optim import Optimizer

from hookdiff.data.feed import Feed
from hookdiff.errors import PluginError, UserError
from hookdiff.log.log import Log
from hookdiff.loop.adopted import ADOPTED, Adopted
from hookdiff.loop.counts import Progress
from hookdiff.loop.saved import checked, keeps_state, saved_fields, state_of
from hookdiff.models.objective import Objective

Optimizers = Optimizer | Sequence[Optimizer]


def as_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple."""
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


class NotMade(tuple[Optimizer, ...]):
    """The optimizers of a run before they are made."""

    def __getitem__(self, index: Any) -> Any:
        raise PluginError("loop.optimizers is empty before on_start: they are made of the prepared model")


@define(eq=False)
class RunState:
    """The state of a run: weights, optimizers, plugins, counts, config, seed and versions.

    place: the run or checkpoint to resume from; None starts anew. `is_required`: it must have a checkpoint.
    fresh: the plugins that ignore their saved state.
    """

    model: nn.Module
    plugins: Mapping[str, Any]
    adopted: Adopted
    progress: Progress
    log: Log
    objective: Objective
    feed: Feed
    hparams: Mapping[str, Any]  # the config
    place: Path | None
    is_required: bool
    fresh: tuple[str, ...]
    optimizers: tuple[Optimizer, ...] = ()
    is_resumed: bool = False  # a state was loaded
    first_step: int = 0  # updates made before this process began

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of python, torch, hookdiff and the plugins' distributions."""
        from hookdiff.options.software import versions

        return versions(self.plugins.values())

    def hold(self, optimizers: Optimizers) -> tuple[Optimizer, ...]:
        """Make `optimizers`, one or several, part of the state, and return them as a tuple."""
        self.optimizers = as_tuple(optimizers)
        check_parameters(self.model)
        check_eps(self.optimizers)
        return self.optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, nested. The tensors are not copied."""
        from hookdiff.disk.tree import plain
        from hookdiff.models.optimizer_state import optimizer_state

        return {
            "versions": dict(self.versions),
            "config": plain(self.hparams),
            "data": self.feed.state_dict(),
            "random": {"seed": self.feed.seed},
            "progress": self.progress.state_dict(),
            "log": self.log.state_dict(),
            "model": self.model.state_dict(),
            "optimizers": {
                str(index): optimizer_state(optimizer, self.model) for index, optimizer in enumerate(self.optimizers)
            },
            "plugins": {name: self._state_of(name) for name in self.plugins if self.keeps_state(name)},
        }

    def keeps_state(self, name: str) -> bool:
        """Return whether the plugin `name` has a state."""
        return keeps_state(self.plugins[name]) or bool(self.adopted.of(name))

    def _state_of(self, name: str) -> dict[str, Any]:
        plugin = self.plugins[name]
        state: dict[str, Any] = state_of(plugin)
        if saved_fields(plugin):
            try:  # now, and not when it is the only state left
                checked(type(plugin), state)
            except ValueError as error:
                raise PluginError(f"the plugin {name!r} has a state that no run could load: {error}") from None
        trained = {str(index): one.state_dict() for index, one in enumerate(self.adopted.of(name))}
        return {**state, ADOPTED: trained} if trained else state


def check_eps(optimizers: Iterable[Optimizer]) -> None:
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
    """Raise UserError for a trained parameter that no optimizer here takes: a complex one, or one that overlaps."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.is_complex() or not parameter.is_contiguous()):
            from hookdiff.models.trainable import check_parameter

            check_parameter(name, parameter)
