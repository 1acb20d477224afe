"""A step that is recorded: its inputs at fixed addresses, its passes, and its update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from attrs import define, evolve, field
from torch import Tensor
from torch.optim import Optimizer

from hookdiff import Batch, Loop, LossOutput
from hookdiff.loop import DevicePart
from hookdiff.models import AdamW
from hookdiff_cuda_graphs.recorder import Recorder


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of `batch` that the passes read, in a fixed order."""
    labels = [] if batch.labels is None else [batch.labels]
    return [batch.inputs, *labels, *batch.draws.values(), *batch.conditions.values()]


def copied(batch: Batch) -> Batch:
    """Return `batch` with copies of the tensors that the passes read."""
    return evolve(
        batch,
        inputs=batch.inputs.clone(),
        labels=None if batch.labels is None else batch.labels.clone(),
        draws={name: draw.clone() for name, draw in batch.draws.items()},
        conditions={name: column.clone() for name, column in batch.conditions.items()},
    )


def key_of(loop: Loop, batch: Batch) -> Any:
    """Return the properties of a step that must not change while a recording of its passes is replayed."""
    trained = [parameter.requires_grad for parameter in loop.gradients.parameters]
    names = [*batch.draws, *batch.conditions]
    return trained, names, batch.weight, [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_of(batch)]


def options_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return the hyper-parameters that a recording of the update holds as numbers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups]


def can_be_held_back(optimizer: Optimizer) -> bool:
    """Return whether a flag on the device can hold back a step of `optimizer`.

    The fused optimizers of torch can be held back, and classes with an attribute `found_inf`, such as hookdiff's Muon.
    """
    kinds = (AdamW, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    is_fused = type(optimizer) in kinds and all(group.get("fused") for group in optimizer.param_groups)
    return is_fused or hasattr(type(optimizer), "found_inf")


def has_state(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` has its state for all present gradients; each replay would make missing state anew."""
    needed = (p for group in optimizer.param_groups if group.get("momentum", 1) for p in group["params"])
    return all(parameter.grad is None or bool(optimizer.state.get(parameter)) for parameter in needed)


@define(eq=False)
class RecordedStep:
    """The passes and the update of a step, recorded for batches like the given batch; recording computes nothing.

    batch: is copied; each replay copies its own batch into this copy.
    parts: the work of the plugins in an update, in their order. None: the host makes the updates.
    """

    loop: Loop
    batch: Batch = field(converter=copied)
    parts: Sequence[DevicePart] | None
    recorder: Recorder
    key: Any = field(init=False)
    options: list[dict[str, Any]] = field(init=False)  # of the optimizers
    _output: LossOutput = field(init=False)
    _norms: Tensor = field(init=False)
    _gradients: list[Tensor | None] = field(init=False)
    _finite: Tensor = field(init=False)  # 1.0, or 0.0 if the loss or a gradient is not finite
    _infinite: Tensor = field(init=False)  # 1.0 - _finite
    _passes: Callable[[], object] = field(init=False)
    _update: Callable[[], object] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        loop, batch = self.loop, self.batch
        self.key, self.options = key_of(loop, batch), options_of(loop.optimizers)
        self._seed()  # a seed cannot change while a graph is recorded
        self._passes = self.recorder.record(self._run_passes)
        if self.parts is not None and all(map(has_state, loop.optimizers)):
            with _held_back(loop.optimizers, self._infinite):
                self._update = self.recorder.record(self._run_update)
        loop.gradients.reset(batch.weight)

    def _seed(self) -> None:
        self.loop.random.seed_dropout(self.loop.progress.position, 0, self.loop.device)

    def _run_passes(self) -> None:
        gradients = self.loop.gradients
        gradients.reset(self.batch.weight)
        self._output = self.loop.run_pass(self.batch)
        self._norms = gradients.norms
        self._gradients = [parameter.grad for parameter in gradients.parameters]
        self._finite = (self._output.loss + torch.linalg.vector_norm(self._norms)).isfinite().float()
        self._infinite = 1.0 - self._finite

    def _run_update(self) -> None:
        self._work("update")
        for optimizer in self.loop.optimizers:
            optimizer.step()
        self._work("after")

    def _work(self, phase: Literal["update", "after"]) -> None:
        for part in self.parts or ():
            if part.phase == phase:
                part.work(self._finite)

    def replay(self, batch: Batch, updates: bool) -> LossOutput:
        """Make the passes of `batch`, and the update if it is recorded and `updates`; return the loss."""
        gradients = self.loop.gradients
        torch._foreach_copy_(tensors_of(self.batch), tensors_of(batch))
        self._seed()
        self._passes()
        # Copies, because values are logged later, and the next replay overwrites the output and the norms.
        loss, *columns = [None if rows is None else rows.clone() for rows in (self._output.loss, *self._output.columns)]
        assert loss is not None
        gradients.take(loss, self._gradients, self._norms.clone())
        if updates and self._update is not None:
            for part in self.parts or ():
                part.prepare()
            self._update()
            gradients.is_applied = gradients.finite  # the only wait for the device in the step
        return LossOutput(loss, *columns)


@contextmanager
def _held_back(optimizers: Sequence[Optimizer], infinite: Tensor) -> Iterator[None]:
    """During the `with`, let steps of `optimizers` do nothing where `infinite` is 1.0, as torch's GradScaler does."""
    with ExitStack() as ends:
        for optimizer in optimizers:
            held: Any = optimizer
            held.found_inf = infinite
            ends.callback(delattr, held, "found_inf")
            for group in optimizer.param_groups:
                if "capturable" in group:
                    ends.callback(group.update, capturable=group["capturable"])
                    group["capturable"] = True
        yield
