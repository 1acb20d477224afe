"""A short training, in which each part of a step is timed and measured."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from attrs import define, field
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hookdiff import Batch, Loop
from hookdiff.authors import Stopwatch
from hookdiff.models import HeldBytes, storages
from hookdiff_debug.measure import SETTLED, Inputs, Layer, eager, measure_inputs, measure_layers, merged

_AT_WHOLE_RATE = 25  # updates after a warm-up that is longer than the trial
_TIME_LIMIT = 30.0  # seconds


@define
class Trial:
    """The measurements of a trial."""

    asked: int  # number of requested updates
    inputs: Inputs  # of the first batch, or of the first batch that is not finite
    losses: list[float] = field(factory=list)  # of each step, also of a step without an update
    outcome: str = "updated"  # `Step.outcome` of the last step
    rates: list[float] = field(factory=list)  # learning rate of each update, of the first group
    changes: list[float] = field(factory=list)  # RMS of an update over RMS of the weights, median over matrices
    layers: dict[str, Layer] = field(factory=dict)  # largest gradient of each layer after SETTLED updates
    steps_timed: int = 0
    seconds: float = 0.0  # of the steps that were timed
    parts: Mapping[tuple[str, str], float] = field(factory=dict)  # seconds by plugin and hook, without nested calls
    peak_memory: int | None = None  # bytes of a step; None where the trial is too short
    spoiled: list[str] = field(factory=list)  # samples of `inputs` that made the loss not finite

    @property
    def first_bad(self) -> int | None:
        """The first step, counted from 1, with a loss that is not finite."""
        return next((step for step, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)

    @property
    def is_warming_up(self) -> bool:
        return len(self.rates) > 1 and self.rates[-1] > self.rates[-2]

    def mean_loss(self, part: slice) -> float:
        """Return the mean loss of the steps in `part`; NaN for none."""
        return statistics.fmean(self.losses[part] or [math.nan])


def run_trial(loop: Loop, steps: int, whole_rate: bool = False) -> Trial:
    """Make `steps` updates with the entered `loop`, or as many as fit in half a minute.

    With `whole_rate`, a trial that ends while the learning rate still rises makes more updates. For these
    updates, `progress.step` runs through the warm-up in growing strides; updates at the configured rate follow.
    """
    clock, looks = Stopwatch(loop.device), list[dict[str, Layer]]()
    trial: Trial | None = None
    goal, stride = steps, 1.0  # goal: updates
    settled = min(SETTLED, steps // 2)
    loop.plugins.instrument(clock)
    began = time.monotonic()
    for number, batch in enumerate(_batches(loop, clock)):
        trial = trial or Trial(steps, measure_inputs(batch.inputs, loop.objective))
        if number == settled:
            clock.clear()
            trial.steps_timed, trial.seconds = 0, 0.0
        before = _matrices(loop) if number >= SETTLED else None
        start = time.perf_counter()
        # Memory is measured once the optimizers have state, but before weights are copied and steps are timed.
        with clock("loop", "run_step"), _peak(loop, batch, trial) if number == 1 < settled else nullcontext():
            step = loop.run_step(batch)
        with clock("loop", "log"):
            loop.log.flush()
        trial.seconds += time.perf_counter() - start
        trial.steps_timed += 1
        trial.losses.append(step.loss)
        trial.outcome = step.outcome
        if not (math.isfinite(step.loss) or trial.spoiled):
            rows = (~batch.inputs.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()
            trial.inputs = measure_inputs(batch.inputs, loop.objective) if rows else trial.inputs
            trial.spoiled = [loop.feed.describe(int(batch.indices[row])) for row in rows if batch.indices is not None]
        if step.outcome == "stopped":
            break
        if step.outcome == "updated":
            trial.rates.append(float(loop.optimizers[0].param_groups[0]["lr"]))
            if before is not None:
                trial.changes.append(_change(before, _matrices(loop)))
                looks.append(measure_layers(loop))
        if whole_rate and len(trial.rates) >= steps and trial.is_warming_up:
            loop.set_step(loop.progress.step + int(stride))
            goal, stride = len(trial.rates) + _AT_WHOLE_RATE, 1.25 * stride
        over = len(trial.rates) >= goal or len(trial.losses) >= 10 * steps  # a step may make no update
        if over or time.monotonic() - began > _TIME_LIMIT:
            break
    loop.plugins.instrument(None)
    assert trial is not None  # a feed without a batch is refused when the loop is made
    parts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span in clock.spans():
        if span.running:
            parts[span.running] += span.seconds
    trial.seconds += parts["data", "batches"]
    trial.parts, trial.layers = parts, merged(looks)
    return trial


@contextmanager
def _peak(loop: Loop, batch: Batch, trial: Trial) -> Iterator[None]:
    """Set the peak memory of `trial` to the most bytes held at one time in the `with` block.

    On a GPU, torch's allocator counts the bytes. Elsewhere the bytes of the tensors are counted: weights, state of
    optimizers and plugins, and all results of operations until they are freed.
    """
    if loop.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loop.device)
        yield
        trial.peak_memory = torch.cuda.max_memory_allocated(loop.device)
        return
    loop.gradients.reset()  # a step begins like this, so old gradients do not count
    state = tree_leaves(loop.state_dict())
    there = storages([*loop.model.parameters(), *loop.model.buffers(), batch.inputs, batch.labels, *state])
    with HeldBytes(there) as held, eager(loop.model):  # tensors of compiled code cannot be counted
        yield
    trial.peak_memory = sum(there.values()) + held.most


def _batches(loop: Loop, clock: Stopwatch) -> Iterator[Batch]:
    """Yield batches for ever; the end of an epoch is counted, but calls no hook."""
    while True:
        if loop.feed.begin(loop.progress.epoch):
            loop.hook.before_epoch(loop=loop)
        batches = loop.feed.batches(loop.progress.epoch, loop.progress.samples)
        while True:
            with clock("data", "batches"):
                batch = next(batches, None)
            if batch is None:
                break
            yield batch
        loop.progress.end_epoch()


def _matrices(loop: Loop) -> list[Tensor]:
    return [p.detach().clone() for p in loop.model.parameters() if p.dim() > 1 and p.requires_grad]


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    if not before:
        return math.nan
    sizes = torch.stack(torch._foreach_norm(before))
    moved = torch.stack(torch._foreach_norm(torch._foreach_sub(after, before)))
    return float((moved / sizes)[sizes > 0].nanmedian())
