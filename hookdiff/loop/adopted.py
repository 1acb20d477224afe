"""Modules that plugins add to a run: trained by an optimizer of their own, or only used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.errors import PluginError, UserError, nearest
from hookdiff.machine.ranks import first_rank_says, num_ranks, summed

ADOPTED = "adopted"  # in the saved state of a plugin, the key of its modules


@define(eq=False)
class Trained:
    """A module of a plugin, with the optimizer that trains it at every `every`-th update."""

    module: nn.Module
    optimizer: Optimizer
    every: int

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module and of its optimizer. The tensors are not copied."""
        from hookdiff.models.optimizer_state import optimizer_state

        return {"module": self.module.state_dict(), "optimizer": optimizer_state(self.optimizer, self.module)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        from hookdiff.models.load import load_state
        from hookdiff.models.optimizer_state import load_optimizer

        load_state(self.module, state["module"])
        load_optimizer(self.optimizer, self.module, state["optimizer"])


class Adopted:
    """The trained modules of `plugins`. Their gradients come from the same loss as the model's.

    `like` is a parameter of the model: modules are moved to its device.
    """

    def __init__(self, plugins: Mapping[str, object], like: Tensor) -> None:
        self._plugins, self._like = plugins, like
        self._trained: dict[str, list[Trained]] = {}  # by the name of the plugin
        self._is_open = False

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Forget all modules, and take new ones during the `with`."""
        self._trained.clear()
        self._is_open = True
        yield
        self._is_open = False

    def add(self, plugin: object, module: nn.Module, optimizer: Optimizer | None = None, every: int = 1) -> None:
        """Adopt `module`; a plugin calls this as `loop.adopt(self, ...)` in `prepare_model`.

        The module is moved to the model's device. `optimizer` trains it with the gradient of each `every`-th update.
        The state of a plugin includes the states of its modules and optimizers. A module without optimizer is frozen,
        in eval mode and in the dtype of the model, and is not saved.

        Raises PluginError outside of `prepare_model`, for a plugin of another run, and unless the optimizer holds
        exactly the trained parameters of the module.
        """
        name = next((name for name, value in self._plugins.items() if value is plugin), None)
        if name is None or not self._is_open:
            raise PluginError("only a plugin of the run adopts modules: call loop.adopt(self, ...) in prepare_model")
        if optimizer is None:
            module.to(self._like.device, self._like.dtype).eval().requires_grad_(False)
            return
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if held != {parameter for parameter in module.parameters() if parameter.requires_grad}:
            raise PluginError(
                f"the plugin {name!r}: the optimizer given to loop.adopt must hold the trained parameters of the "
                f"module, and no others: {type(optimizer).__name__}(module.parameters())"
            )
        if every < 1:
            raise PluginError(f"the plugin {name!r}: loop.adopt takes `every` from 1 up, got {every}")
        from hookdiff.models.load import load_state

        load_state(module, first_rank_says(module.state_dict()))  # each rank may have drawn its own weights
        self._trained.setdefault(name, []).append(Trained(module.to(self._like.device), optimizer, every))

    def __iter__(self) -> Iterator[Trained]:
        return itertools.chain.from_iterable(self._trained.values())

    def of(self, plugin: str) -> list[Trained]:
        """Return the trained modules of `plugin`."""
        return self._trained.get(plugin, [])

    def named(self, plugins: Iterable[str]) -> Iterator[tuple[str, int, Trained]]:
        """Yield plugin, number and module for each trained module. Raises UserError for a plugin without any."""
        for plugin in plugins:
            if plugin not in self._trained:
                raise UserError(f"the plugin {plugin!r} trains no module of its own{nearest(plugin, self._trained)}")
            yield from ((plugin, index, trained) for index, trained in enumerate(self._trained[plugin]))

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return tuple(trained.optimizer for trained in self)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the trained parameters with their names: "PLUGIN: name in the module"."""
        return [
            (f"{plugin}: {name}", parameter)
            for plugin, modules in self._trained.items()
            for trained in modules
            for name, parameter in trained.module.named_parameters()
            if parameter.requires_grad
        ]

    def average_gradients(self) -> None:
        """Average the gradients over the ranks, as for the model."""
        gradients = [p.grad for trained in self for p in trained.module.parameters() if p.grad is not None]
        if not gradients or num_ranks() == 1:
            return
        mean = summed(torch.cat([gradient.flatten() for gradient in gradients])) / num_ranks()
        for gradient, values in zip(gradients, torch.split(mean, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    def update(self, step: int) -> None:
        """Call the optimizers that are due in update number `step` (1 is the first)."""
        for trained in self:
            if step % trained.every == 0:
                trained.optimizer.step()
