"""Lets a model hold other weights for a while, such as averages to sample with; and restores its buffers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookdiff.errors import PluginError, UnknownWeights, nearest
from hookdiff.machine.dtensor import fill_

Tensors = Callable[[], Mapping[str, Tensor]]


def choose_weights(name: str | None, held: str, offers: Any) -> tuple[str, Tensors]:
    """Return the name of the requested weights, and a function that returns their values.

    `held` is the name of the weights that the model holds now; they need no values. `offers` are the results of the
    hook `offer_weights`. If `name` is None, the first offer is chosen, or else the held weights.

    Raises:
        UnknownWeights: if nobody offers weights called `name`.
    """
    averages: dict[str, Tensors] = {}
    for offer in offers:
        averages |= {label: values for label, values in offer.items() if label not in averages}
    chosen = name or next(iter(averages), held)
    known: dict[str, Tensors] = {**averages, held: dict}
    if chosen not in known:
        raise UnknownWeights(chosen, tuple(known))
    return chosen, known[chosen]


class HeldWeights:
    """The weights that a model holds: its own, or for a while those that a plugin offers (`offer_weights`)."""

    def __init__(self, model: nn.Module, offers: Callable[[], Any], usual: Callable[[], str | None]) -> None:
        self.name = "model"  # of the weights that the model holds now: "model", or the name of an average
        self._model = model
        self._offers = offers
        self._usual = usual  # the name that None stands for, unless it is the first average

    def check(self) -> None:
        """Raise UnknownWeights if nobody offers the weights that the sampler names."""
        choose_weights(self._usual(), self.name, self._offers())

    @contextmanager
    def __call__(self, name: str | None) -> Iterator[str]:
        """Let the model hold the weights called `name` during the `with`, which yields their name.

        None stands for the weights that the sampler names (`[sampling] weights`), by default the first average that a
        plugin offers, or else the model's own. Inside of another such `with`, None keeps the weights.

        Raises:
            UnknownWeights: if nobody offers weights called `name`.
        """
        before = self.name
        usual, offers = (self._usual(), self._offers()) if before == "model" else (None, ())
        chosen, values = choose_weights(name or usual, before, offers)
        with holding(self._model, values()):
            self.name = chosen
            try:
                yield chosen
            finally:
                self.name = before


@contextmanager
def holding(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let `model` hold `tensors`, by parameter name, during the `with`.

    Values are copied in and out: the parameters keep their addresses, so captured graphs and optimizers stay valid.

    Raises:
        PluginError: for a name that no parameter has.
    """
    parameters = dict(model.named_parameters())
    if unknown := tensors.keys() - parameters.keys():
        raise PluginError(f"the model has no parameter {min(unknown)!r} to hold{nearest(min(unknown), parameters)}")
    before = {name: parameters[name].detach().clone() for name in tensors}
    try:
        for name, value in tensors.items():
            fill_(parameters[name], value)
        yield
    finally:
        for name, value in before.items():
            fill_(parameters[name], value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode and switch gradients off during the `with`; then restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference_mode: a tensor made under it, such as a cached table, can never be used in training.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class Buffers:
    """The buffers of a model, such as batch norm's statistics, and their values when `keep` was last called."""

    def __init__(self, model: nn.Module) -> None:
        # Not named_buffers at each step: walking over all modules costs a millisecond.
        self._places = {
            f"{prefix}.{name}".lstrip("."): (module, name)
            for prefix, module in model.named_modules()
            for name in module._buffers
        }
        self.kept: dict[str, Tensor] = {}  # by their name in the model

    @torch.no_grad()
    def keep(self) -> None:
        """Keep a copy of the present values, and forget the earlier copy."""
        buffers = ((name, module._buffers.get(key)) for name, (module, key) in self._places.items())
        values = {name: buffer for name, buffer in buffers if buffer is not None}
        if {name: value.shape for name, value in values.items()} != {n: kept.shape for n, kept in self.kept.items()}:
            self.kept = {name: value.clone() for name, value in values.items()}
        elif values:
            torch._foreach_copy_(list(self.kept.values()), list(values.values()))

    @torch.no_grad()
    def put_back(self) -> None:
        for name, before in self.kept.items():
            module, key = self._places[name]
            value = module._buffers.get(key)
            if value is not None and value.shape == before.shape:
                fill_(value, before)
            else:  # a forward pass has replaced the tensor
                module._buffers[key] = before.clone()
