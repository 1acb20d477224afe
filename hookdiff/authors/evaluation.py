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
    """The base of plugins that measure the network: the values that `evaluate` returns are logged as `val/NAME`.

    A subclass implements `evaluate`. A measurement does not change the training by a single bit. The step of the newest
    measurement is saved, so that a resumed run measures at the same steps as an uninterrupted run. A subclass can save
    more state in fields made by `saved`.
    """

    weights: str | None = field(
        default=None,
        kw_only=True,
        metadata=about('weights to measure: "model", or the name of an average; default: an average if there is one'),
    )

    # Not `saved`: for type checkers the field would be an argument with a default, and none without may follow that.
    _acted_at: int | None = field(default=None, init=False, metadata=as_saved("measured_at", COUNT))

    @abstractmethod
    def evaluate(self, loop: Loop) -> Mapping[str, Value | Mean]:
        """Return the measured values by name: what `loop.log` accepts, such as scalar tensors on their device.

        The network is in eval mode, without gradients, and holds the weights of the option `weights`. To sample with
        these weights, name them: `SampleRequest(16, weights=loop.weights.name)`. The global generators of torch, numpy
        and Python have the same seed in each measurement, and a different seed on each rank. All ranks call this
        method, and it must return the same names on each. The mean over the ranks is logged; for pairs (sum, count),
        the total sum divided by the total count.
        """

    @hookimpl(specname="on_start")
    def _check_weights(self, loop: Loop) -> None:
        with loop.weights(self.weights):  # refuses an unknown name before the run starts
            pass

    def act(self, loop: Loop) -> None:
        """Measure, and log the values.

        Raises:
            HookError: if `evaluate` returns another type.
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
