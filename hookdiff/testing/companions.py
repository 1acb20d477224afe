"""Small plugins that train beside a tested plugin, and must work with it."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import define
from torch import Tensor

from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import saved
from hookdiff.models.sample_request import SampleRequest
from hookdiff.testing.toy import ToyObjective

_NAME = "companion/average"


@define(eq=False)
class Average:
    """Keeps a moving average of the weights, offers it, and samples with it."""

    shadow: dict[str, Tensor] = saved()  # by parameter name

    @hookimpl(tryfirst=True)  # other plugins check the name of the average in on_start
    def on_start(self, loop: Loop) -> None:
        self.shadow = {name: p.detach().clone() for name, p in loop.model.named_parameters()}

    @hookimpl(tryfirst=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        for name, parameter in loop.model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        if isinstance(loop.objective, ToyObjective):  # the toy sampler fits no other objective
            loop.log({"companion/sample": loop.sample(SampleRequest(2, weights=_NAME)).images.mean()})

    @hookimpl
    def offer_weights(self) -> dict[str, Callable[[], dict[str, Tensor]]]:
        return {_NAME: lambda: self.shadow}


@define(eq=False)
class Halve:
    """Halves the gradients while their norm is above 0.5."""

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        while loop.gradients.total_norm > 0.5:
            loop.gradients.scale_(0.5)


@define(eq=False)
class Listener:
    """Reads gradients and weights and logs them, and counts the updates."""

    updates: int = saved(0)

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        loop.log.average({"companion/gradients": _total(loop.gradients.tensors())})

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.updates += 1
        loop.log({"companion/updates": self.updates, "companion/weights": _total(loop.model.parameters())})


def _total(tensors: Any) -> Tensor:
    return torch.stack([tensor.detach().float().abs().sum() for tensor in tensors]).sum()


COMPANIONS: Final[Mapping[str, Callable[[], object]]] = {"average": Average, "limit": Halve, "listener": Listener}
