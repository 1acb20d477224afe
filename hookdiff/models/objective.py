"""The objective that a Loop minimises: its protocol, and the loss that it returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from attrs import define, field
from torch import Generator, Tensor, nn

from hookdiff.data.batch import Batch
from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")


def _single(values: Tensor | None) -> Tensor | None:
    return values.float() if values is not None and values.itemsize < 4 else values


@define(eq=False, frozen=True)
class LossOutput:
    """The loss of a batch, and values of each sample: for the hook `reduce_loss`, and for monitoring."""

    loss: Tensor  # scalar: the mean over the samples
    # n, float32, with its graph, before any weights
    per_sample: Tensor | None = field(default=None, converter=_single)
    timesteps: Tensor | None = None  # n; t or sigma if the process has no timesteps
    log_snr: Tensor | None = None  # n, natural logarithm; minus infinity for pure noise
    weights: Tensor | None = None  # n, the weights of the samples in `loss`; None: no weights

    def detach(self) -> LossOutput:
        """Return the same values without their graph."""
        columns = [rows.detach() if rows is not None and rows.requires_grad else rows for rows in self.columns]
        return LossOutput(self.loss.detach(), *columns)

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The values of each sample, in the order of the fields."""
        return self.per_sample, self.timesteps, self.log_snr, self.weights


LossFunction = Callable[[nn.Module, Batch], LossOutput | Tensor]


class Objective(Protocol):
    """Draws the randomness of a step once, and returns the loss of slices of its batch.

    Only `__call__` is required. `as_objective` gives an object the defaults of the members that it lacks. A class that
    inherits from Objective has all members, and `loop.objective` is then the object itself.
    """

    conditional: bool | None = False  # whether the network gets the labels; optional

    @cached_property
    def condition_names(self) -> tuple[str, ...]:
        """The names of the conditions that the network gets. Optional; default: none."""
        return ()

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        """Return `batch.with_draws({...})` with this step's randomness, one row per sample.

        Optional; default: `batch` itself. Called once in a step, before the batch is sliced, so that the noise does not
        depend on `micro_batch`. The generator is the same on all ranks: draw for the `batch.total` samples of the step,
        and keep those of `batch.own`, so that the noise does not depend on the number of ranks either.
        """
        return batch

    def given(self, batch: Batch) -> dict[str, Tensor]:
        """Return the conditions of `batch` that the network gets. Optional; default: the named conditions."""
        return {name: batch.conditions[name] for name in self.condition_names}

    def bind(self, nothing: Mapping[str, Tensor | None]) -> Objective:
        """Return a copy with other null conditions, by name, for one sample. Optional; default: an error.

        Raises:
            UserError: by default.
        """
        raise UserError("negative texts need an objective with a method `bind`; add one to yours")

    def remarks(self) -> Sequence[str]:
        """Return warnings, which are logged when the Loop is made. Optional; default: none."""
        return ()

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput | Tensor:
        """Return the loss of `batch`: a LossOutput, or a tensor; its mean is the loss."""


class OfOrigin:
    """A member of an adapter, which reads and sets that member of `origin`. Default: the member of the protocol."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, adapter: Any, owner: type) -> Any:
        return getattr(adapter.origin, self.name, getattr(super(owner, adapter), self.name))

    def __set__(self, adapter: Any, value: object) -> None:
        setattr(adapter.origin, self.name, value)


class AnyObjective(Objective):
    """An objective made of a user's function or object, with defaults for members that it lacks."""

    conditional: Any = OfOrigin()
    condition_names: Any = OfOrigin()
    draw: Any = OfOrigin()
    given: Any = OfOrigin()
    bind: Any = OfOrigin()
    remarks: Any = OfOrigin()

    def __init__(self, origin: LossFunction) -> None:
        self.origin = origin

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput | Tensor:
        return self.origin(net, batch)


def as_objective(origin: LossFunction) -> Objective:
    """Return an objective, or a function (net, batch) -> loss, with all members; log its remarks."""
    objective = cast(Objective, origin) if Objective in type(origin).__mro__ else AnyObjective(origin)
    for remark in objective.remarks():
        logger.warning("%s", remark)
    return objective


def join(outputs: Sequence[LossOutput], parts: Sequence[Batch]) -> LossOutput:
    """Return the loss of a batch from its `parts`, weighted by their numbers of samples. Fillers do not count."""
    if parts[0].is_filler:  # the parts of a rank without a sample
        return LossOutput(outputs[0].loss, *(None if rows is None else rows[:0] for rows in outputs[0].columns))
    if len(outputs) == 1:
        return outputs[0]
    counted = [pair for pair in zip(outputs, parts, strict=True) if not pair[1].is_filler]
    outputs, parts = [output for output, _ in counted], [part for _, part in counted]
    samples = sum(len(part) for part in parts)
    loss = torch.stack([o.loss * (len(part) / samples) for o, part in zip(outputs, parts, strict=True)]).sum()
    columns = zip(*(output.columns for output in outputs), strict=True)
    return LossOutput(loss, *(None if None in column else torch.cat(column) for column in columns))
