"""The base of plugins that measure the network, such as on held-out samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, field
from torch import Tensor

from hookdiff.authors.periodic import Periodic
from hookdiff.authors.seeding import seeded
from hookdiff.errors import HookError
from hookdiff.log.log import Mean, Value
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.saved import as_saved
from hookdiff.machine.randomness import derive_seed
from hookdiff.models.weights import evaluating
from hookdiff.options.fields import about
from hookdiff.options.structure import COUNT

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop


@define(eq=False)
class Evaluation(Periodic):
    """The base of plugins that measure the network: a subclass implements `evaluate`, and `val/NAME` is logged.

    A measurement does not change the training, to the bit. The step of the newest measurement is saved, so that a
    resumed run measures at the same steps as a run that was never stopped. A subclass saves more state in fields made
    by `saved`.
    """

    weights: str | None = field(
        default=None,
        kw_only=True,
        metadata=about('"model", or the name of an average to measure; default: an average if any'),
    )

    # Not by `saved`: type checkers would take it for an argument, after which none without a default may follow.
    _acted_at: int | None = field(default=None, init=False, metadata=as_saved("measured_at", COUNT))

    @abstractmethod
    def evaluate(self, loop: Loop) -> Mapping[str, Value | Mean]:
        """Return the values by name, as for `loop.log`: scalar tensors stay on their device.

        The network holds the weights of the option `weights`, named `loop.weights.name`, and is in eval mode; gradients
        are off. To sample with these weights, name them: `SampleRequest(16, weights=loop.weights.name)`. The global
        generators of torch, numpy and Python have the same seed in each measurement, and a different seed on each rank.
        It is called on all ranks, and must return the same names there. The mean of their values is logged; for pairs
        (sum, count) it is the ratio of the sums.
        """

    @hookimpl(specname="on_start")
    def _check_weights(self, loop: Loop) -> None:
        with loop.weights(self.weights):  # refuses an unknown name before the run starts
            pass

    def act(self, loop: Loop) -> None:
        """Measure, and log the values.

        Raises:
            HookError: for a result of another type.
        """
        seed = derive_seed(loop.config.seed, "evaluate", -1, loop.rank)  # no batch has this position
        with loop.weights(self.weights), evaluating(loop.model), seeded(seed, loop.device):
            values = self.evaluate(loop)
        kind = type(self).__name__
        if not isinstance(values, Mapping):
            raise HookError(f"{kind}.evaluate returned a {type(values).__name__}; return a dict of values by name")
        for name, value in values.items():
            parts = value if isinstance(value, tuple) else (value,)
            for shape in [tuple(part.shape) for part in parts if isinstance(part, Tensor) and part.dim()]:
                raise HookError(
                    f"{kind}.evaluate returned {name!r} as a tensor of shape {shape}, expected a scalar, or a pair "
                    "(sum, count) of scalars"
                )
        loop.log({f"val/{name}": value for name, value in loop.reduce(values).items()})
