"""Losses: the error of a prediction at each pixel."""

from abc import ABC, abstractmethod

from attrs import define, field
from attrs.validators import gt
from torch import Tensor
from torch.nn import functional

from hookdiff.options.choices import Choice
from hookdiff.options.fields import about


class Loss(Choice, ABC):
    """The distance of an output from its target."""

    kind = "loss"
    default = "mse"

    @abstractmethod
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the error of each pixel; arguments and result are n c h w, float32."""


@define(frozen=True)
class MSE(Loss):
    """The squared error."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction="none")


@define(frozen=True)
class L1(Loss):
    """The absolute error."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.l1_loss(output, target, reduction="none")


@define(frozen=True)
class Huber(Loss):
    """Half the squared error up to an absolute error of `delta`, linear beyond."""

    delta: float = field(default=1.0, validator=gt(0), metadata=about("absolute error from which the loss is linear"))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.huber_loss(output, target, reduction="none", delta=self.delta)


Loss.known = {"mse": MSE, "l1": L1, "huber": Huber}
