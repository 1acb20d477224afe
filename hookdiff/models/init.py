"""Initial weights of a new model of any class."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hookdiff.models.base import has_base
from hookdiff.options.fields import about

LAYERS = (nn.Linear, _ConvNd)
logger = logging.getLogger("hookdiff")

_DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "xavier": nn.init.xavier_uniform_,
    "kaiming": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
}


@define(frozen=True, kw_only=True)
class Initialisation:
    """Options for the initial weights of a new model. The arguments are keys of the config table [model]."""

    init: Literal["default", "xavier", "kaiming", "orthogonal"] = field(
        default="default",
        metadata=about(
            '"default": as the class draws them; "xavier" (Glorot & Bengio 2010, eq. 16), "kaiming" (He et al. 2015, '
            'arXiv 1502.01852, eq. 10), "orthogonal" (Saxe et al. 2013, arXiv 1312.6120): weights of linear layers and '
            "convolutions, with biases of zero; layers that the class starts at zero stay at zero"
        ),
    )
    zero_output: bool = field(
        default=False,
        metadata=about(
            "initialise the layer that is called last with zeros, so that a new model predicts zero, as new models of "
            "some classes do; the log names the layer"
        ),
    )

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if an option would replace weights of `model` that come from a folder."""
        is_set = {"init": self.init != "default", "zero_output": self.zero_output}
        for key in [key for key in is_set if is_set[key] and has_base(model)]:
            raise ValueError(f"{key}: the weights come from a folder, and this would replace them; leave it out")

    @torch.no_grad()
    def apply(self, model: nn.Module, output: str | None) -> None:
        """Change `model` in place; `output` names its last layer. Raises ValueError if `output` is needed but None."""
        for layer in model.modules() if self.init != "default" else ():
            if isinstance(layer, LAYERS) and is_zero(layer.weight) is False:
                # On the CPU, in plain memory order: the same numbers whatever the device and the layout.
                drawn = torch.empty(layer.weight.shape)
                _DRAWS[self.init](drawn)
                layer.weight.copy_(drawn)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        if self.zero_output:
            if output is None:
                raise ValueError("zero_output needs a linear layer or a convolution, but the model called none")
            for parameter in model.get_submodule(output).parameters():
                nn.init.zeros_(parameter)
            logger.info("zero_output: %s starts at zero", output)


def is_zero(weight: Tensor) -> bool | None:
    """Return whether all of `weight` is zero; None if it has no values, on the meta device or as a fake tensor."""
    try:
        return not weight.any()
    except RuntimeError:
        return None


@contextmanager
def layers_called(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the linear layers and convolutions that are called in the `with`, in their order."""
    called: list[str] = []
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LAYERS)]
    handles = [module.register_forward_hook(lambda *_, name=name: called.append(name)) for name, module in layers]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
