"""Finds the cause of a step that is not finite: runs it again, with hooks on every module."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff import Batch, Loop, NonFinite
from hookdiff.authors import rehearsing
from hookdiff.disk import flatten, unflatten
from hookdiff.loop import hooks_of
from hookdiff.machine import fits_in_memory, gathered, local, summed, whole
from hookdiff_nan.divergence import Update, divergence, size_of
from hookdiff_nan.watch import Backward, Forward, Watch, describe, is_bad, name_of

Cause = Literal["weight", "data", "draw", "divergence", "overflow", "forward", "loss", "backward", "unclear"]

ADVICE: dict[Cause, str] = {
    "weight": "an update broke it: resume from an earlier checkpoint at a lower rate (hookdiff replay --lr tries one)",
    "data": "repair or remove these samples; policy = 'skip' leaves the batch out",
    "draw": "check the noise and the times that the objective draws",
    "divergence": "hookdiff replay --lr, which trains up to it at a lower rate; "
    "hookdiff resume CHECKPOINT --lr X --out DIR; a longer warm-up; the plugin clip",
    "overflow": "use bf16, which has the range of float32, run that module without autocast, or keep its values small",
    "forward": "look there for a square root, a logarithm, a division, or the exponential of a large number",
    "loss": "look in the objective for a square root, a logarithm, a division, or an infinite weight",
    "backward": "square roots and norms have no finite derivative at 0: hookdiff replay --anomaly names the operation",
    "unclear": "hookdiff replay reports whether the step gives the same values again, compiled if the run was compiled",
}

# Hooks in which a plugin can take part in a step before on_nan.
STEP_HOOKS = hooks_of("model", "net", "batch", "passes", "scale")
_SHOWN = 8  # samples that a report names


@define(frozen=True)
class Diagnosis:
    """The cause of a step that is not finite."""

    cause: Cause
    text: str  # one line
    details: dict[str, str] = field(factory=dict)  # text by title
    samples: list[dict[str, Any]] = field(factory=list)  # row, index, name, time and log-SNR of each bad sample
    module: str | None = None  # the first module with a bad value
    parameter: str | None = None

    def __str__(self) -> str:
        return f"{self.cause}: {self.text}"


def of_first_rank(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of the first rank that finds a cause; each rank must call this with its own diagnosis."""
    diagnoses = gathered(diagnosis)
    number = next((number for number, other in enumerate(diagnoses) if other.cause != "unclear"), 0)
    if len(diagnoses) == 1:
        return diagnosis
    return evolve(diagnoses[number], details={**diagnoses[number].details, "rank": f"{number} of {len(diagnoses)}"})


def diagnose(
    loop: Loop, report: NonFinite, watch: Watch, updates: Sequence[Update], sizes: Sequence[float]
) -> Diagnosis:
    """Return why the step of `report` is not finite; `loop` is not changed.

    `updates` are the last updates. `sizes` has the norm of all weights before one or two of these updates.
    The buffers must have the values from before the step. The loop calls `begin` and `finish` of `watch` around each
    micro-batch. This function runs all passes of the step once or twice.
    """
    weights, size = _bad_weights(loop), float(size_of(loop))  # on all ranks, whatever each rank finds
    data = (report.batch.inputs, *report.batch.conditions.values())
    inputs = sorted({row for values in data for row in _bad_rows(values)})
    draws = {name: rows for name, drawn in report.batch.draws.items() if (rows := _bad_rows(drawn))}
    missed = "the step is finite when it runs again: its computation is not deterministic"
    is_short, loss = not fits_in_memory(lambda: _repeat(loop, report.batch, watch)), math.nan
    # All ranks make the same passes, whatever each rank finds.
    if not loop.agree(is_short) and loop.agree(bool(watch.bad_loss or watch.backward)) and watch.autocast is not None:
        losses: list[float] = []
        is_short = loop.agree(not fits_in_memory(lambda: losses.append(_loss_without_autocast(loop, report.batch))))
        loss = losses[0] if losses else math.nan
    if is_short:
        watch, loss = Watch(loop.model), math.nan
        missed = "there was not enough memory to run the step again"
    rows = inputs or next(iter(draws.values()), report.samples)
    samples = _samples(loop, report.batch, rows)
    details = _details(report, watch, samples if len(rows) < len(report.batch) else [])
    diagnosis = partial(Diagnosis, details=details, samples=samples)

    # A module may return infinities on purpose, as a mask does, so only the output of the model counts.
    forward = None if watch.returned_finite else watch.forward
    module = forward.place.name if forward else None
    if weights:
        first, values = next(iter(weights.items()))
        more = f", and {len(weights) - 1} more" if len(weights) > 1 else ""
        text = f"{first} is not finite before the step ({values}){more}: no batch can help"
        return diagnosis("weight", text, parameter=first)
    if inputs:
        names = ", ".join(str(sample["name"]) for sample in samples)
        more = f" and {len(inputs) - len(samples)} more" if len(inputs) > len(samples) else ""
        return diagnosis("data", f"inputs hold values that are not finite: {names}{more}")
    if draws:
        return diagnosis("draw", f"the objective drew values that are not finite: {', '.join(draws)}")
    if watch.given_finite and (diverged := divergence(loop, updates, sizes, size, loss)):
        return diagnosis("divergence", diverged)
    if math.isfinite(loss):
        place = f"first in {forward.place}" if forward else "in the backward"
        text = f"values too large for {watch.autocast and name_of(watch.autocast)}, {place}"
        return diagnosis("overflow", f"{text}; the same step without autocast is finite", module=module)
    if not watch.given_finite:
        return diagnosis("loss", "data and draws are finite, but the inputs that the objective made from them are not")
    if forward:
        return diagnosis("forward", _of_forward(forward), module=module)
    if watch.bad_loss:
        return diagnosis("loss", "the output of the network is finite, but its loss is not")
    if backward := watch.backward:
        module = backward.takers[-1].name if backward.takers else None
        return diagnosis("backward", _of_backward(backward), module=module, parameter=backward.parameter)
    return diagnosis("unclear", missed)


def _of_forward(forward: Forward) -> str:
    last = forward.last_finite
    if not forward.inputs_finite:
        after = f"after {last}, " if last else ""
        return f"{after}before {forward.place}, as its inputs are not finite"
    after = f", after {last}" if last and last.is_inside(forward.place) else ""
    return f"{forward.place} made {'NaN' if forward.has_nan else 'inf'} from finite inputs{after}"


def _of_backward(backward: Backward) -> str:
    if backward.parameter:
        return f"the gradient of {backward.parameter}, though the loss and all gradients before it are finite"
    if backward.takers:
        return f"the loss is finite, but the derivative of {' or '.join(map(str, backward.takers))} is not"
    return f"the loss is finite, but the derivative of the modules after {backward.maker} is not"


def _repeat(loop: Loop, batch: Batch, watch: Watch) -> None:
    with rehearsing(loop) as passes, eagerly(), watch:
        watch.finish(passes(batch).loss)


def _loss_without_autocast(loop: Loop, batch: Batch) -> float:
    """Return the loss of the step without autocast, if the step is then finite, else NaN."""
    with rehearsing(loop) as passes, eagerly(), _without_autocast(loop):
        passes(batch)
        return math.nan if loop.gradients.nonfinite() else loop.gradients.loss


def eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run uncompiled, so that hooks on their parts fire."""
    if not may_be_compiled():
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def may_be_compiled() -> bool:
    """Whether a module may be compiled: not if the compiler, which takes seconds to import, is not imported yet."""
    return "torch._dynamo" in sys.modules


@contextmanager
def _without_autocast(loop: Loop) -> Iterator[None]:
    """Let the model compute in its own precision, also inside of autocast."""
    forward = loop.model.forward

    def single(value: Any) -> Any:
        half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if half else value

    def forward_in_single(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(loop.device.type, enabled=False):
            return forward(*map(single, args), **{name: single(value) for name, value in kwargs.items()})

    loop.model.__dict__["forward"] = forward_in_single
    try:
        yield
    finally:
        del loop.model.__dict__["forward"]


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state` with sharded tensors gathered; all ranks must call this."""
    values, tree = flatten(state)
    return unflatten({name: whole(value).detach().clone() for name, value in values.items()}, tree)


def _bad_weights(loop: Loop) -> dict[str, str]:
    """Return the values of bad parameters and buffers, as text; a buffer, such as a mask, may hold infinities."""
    weights = (*loop.model.named_parameters(), *loop.adopted.named_parameters())
    is_wrong = summed(torch.tensor([float(is_bad(local(value))) for _, value in weights], device=loop.device)).tolist()
    bad = {name: describe(whole(value)) for (name, value), wrong in zip(weights, is_wrong, strict=True) if wrong}
    return bad | {name: describe(value) for name, value in loop.model.named_buffers() if value.isnan().any()}


def _bad_rows(values: Tensor) -> list[int]:
    good = values.isfinite().reshape(len(values), -1).all(1)
    rows: list[int] = (~good).nonzero().flatten().tolist()
    return rows


def _samples(loop: Loop, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
    samples = []
    for row in rows[:_SHOWN]:
        sample: dict[str, Any] = {"row": batch.rows[row]}
        if batch.indices is not None:
            index = int(batch.indices[row])
            sample |= {"index": index, "name": loop.feed.describe(index)}
        else:
            sample["name"] = f"row {batch.rows[row]} of the batch"
        levels = {"timestep": batch.draws.get("timesteps", loop.output.timesteps), "log_snr": loop.output.log_snr}
        known = [(name, values) for name, values in levels.items() if values is not None and len(values)]
        sample |= {name: round(float(values[row]), 6) for name, values in known}  # a filler has no levels
        samples.append(sample)
    return samples


def _details(report: NonFinite, watch: Watch, samples: list[dict[str, Any]]) -> dict[str, str]:
    details: dict[str, list[str]] = {}
    if (forward := watch.forward) and not watch.returned_finite:
        details["first output not finite"] = [
            f"{forward.place}, in {name_of(forward.dtype)}",
            *(f"input {text}" for text in forward.inputs),
            *(f"output {text}" for text in forward.outputs),
        ]
    elif backward := watch.backward:
        maker = f"output of {backward.maker or 'the objective'}"
        place = f"parameter {backward.parameter}" if backward.parameter else maker
        details["first gradient not finite"] = [f"of the {place}", backward.gradient]
    details["bad samples"] = [_line(sample) for sample in samples]
    details["inputs"] = [describe(report.batch.inputs)]
    details["inputs of the network"] = watch.given
    details["outputs of the network"] = watch.returned
    return {title: "\n".join(lines) for title, lines in details.items() if lines}


def _line(sample: Mapping[str, Any]) -> str:
    levels = [f"{key} {sample[key]:g}" for key in ("timestep", "log_snr") if math.isfinite(sample.get(key, math.nan))]
    return ", ".join([str(sample["name"]), *levels])
