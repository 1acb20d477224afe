"""The plugin `nan`."""

import logging
from collections.abc import Generator, Mapping
from typing import Any, Literal

from attrs import astuple, define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff import Loop, LossOutput, NonFinite, Sink, UserError, Verdict, hookimpl
from hookdiff.loop import DevicePart, implements
from hookdiff.machine import first_rank_says
from hookdiff.options import COUNT, about, is_below, numbers
from hookdiff_nan.diagnose import ADVICE, STEP_HOOKS, Diagnosis, copied, diagnose, of_first_rank
from hookdiff_nan.divergence import REMEMBERED, Update, on_host, rate_of, size_of
from hookdiff_nan.kept_steps import kept_in
from hookdiff_nan.record import batch_state, outcome, write_record
from hookdiff_nan.watch import Watch

logger = logging.getLogger("hookdiff")


@define(frozen=True)
class NaNState:
    """The saved state of `NaN`."""

    last: list[tuple[int, float, float, float]] = field(validator=numbers())  # step, loss, gradient norm, rate
    sizes: list[tuple[int, float]] = field(validator=numbers(finite=False))  # step, norm of the weights before it
    in_a_row: int = field(validator=COUNT)
    furthest: int = field(validator=COUNT)


@define(eq=False)
class NaN:
    """Finds the cause of a step that is not finite, and keeps the step so that `hookdiff replay` can run it again.

    The report names the cause in one word: weight, data, draw, divergence, overflow, forward, loss or backward.
    """

    policy: Literal["stop", "skip", "rollback"] = field(
        default="stop",
        metadata=about('"stop", "skip" the batch, or "rollback" to the last checkpoint and train on the next batches'),
    )
    max_skips: int = field(
        default=3, validator=ge(1), metadata=about("stop after more skips or rollbacks than this without a new update")
    )
    folder: str = field(
        default="nan", validator=is_below, metadata=about("folder of the kept steps, in the run directory")
    )
    keep: int = field(
        default=3,
        validator=ge(0),
        metadata=about("number of steps to keep (the first) for `hookdiff replay`; each is as large as the weights"),
    )
    diagnosis: Diagnosis | None = field(default=None, init=False)  # about the last step that was not finite
    num_begun: int = field(default=0, init=False)  # steps in this process
    _in_a_row: int = field(default=0, init=False)  # steps left out since the last new update
    _furthest: int = field(default=0, init=False)  # largest step that was left out
    _last: list[Update] = field(factory=list, init=False)  # the last updates
    _sizes: list[tuple[int, float | Tensor]] = field(factory=list, init=False)  # step, norm of the weights before it
    _watch: Watch = field(init=False)  # watches the step of the newest diagnosis

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._watch = Watch(loop.model, loop.adopted.named_parameters())

    @hookimpl(tryfirst=True)
    def before_step(self, loop: Loop) -> None:
        self.num_begun += 1
        if not self._sizes or loop.progress.step >= self._sizes[-1][0] + REMEMBERED:
            self._sizes = [*self._sizes[-1:], (loop.progress.step, size_of(loop))]

    @hookimpl(wrapper=True)
    def micro_step(self) -> Generator[None, LossOutput, LossOutput]:
        self._watch.begin()
        output = yield
        self._watch.finish(output.loss)
        return output

    @hookimpl(tryfirst=True)
    def after_backward(self, loop: Loop) -> None:
        newest = Update(loop.progress.step + 1, loop.gradients.loss, loop.gradients.total_norm, rate_of(loop))
        self._last = [*self._last[1 - REMEMBERED :], newest]

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart]:
        """Return an empty list, because losses and norms can also be noted after the update."""
        return []

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step > self._furthest:
            self._in_a_row = 0

    @hookimpl(wrapper=True)
    def on_nan(self, loop: Loop, report: NonFinite) -> Generator[None, list[Verdict], list[Verdict]]:
        try:
            states, problem = _states(loop), ""  # before the other plugins, which may change their state in on_nan
        except UserError as error:  # for example, an optimizer has weights outside the model
            states, problem = {}, str(error)
        verdicts = yield
        self._last, sizes = on_host(self._last), [float(size) for _, size in self._sizes]
        diagnosis = of_first_rank(diagnose(loop, report, self._watch, self._last, sizes))
        self.diagnosis = diagnosis
        others = dict(report.notes)
        report.notes.clear()  # the cause must be the first note
        report.notes.update({"cause": str(diagnosis), "try": ADVICE[diagnosis.cause], **diagnosis.details, **others})
        rates = [f"{group['lr']:g}" for optimizer in loop.optimizers for group in optimizer.param_groups]
        report.notes["epoch"] = f"{loop.progress.epoch}, {loop.progress.samples} samples into it"
        report.notes["learning rate"] = ", ".join(dict.fromkeys(rates))
        if self._last:
            losses = " ".join(f"{update.loss:.4g}" for update in self._last)
            norms = " ".join(f"{update.grad_norm:.4g}" for update in self._last)
            title = f"updates {self._last[0].step} to {self._last[-1].step}"
            report.notes[title] = f"losses {losses}\ngradient norms {norms}"
        verdict = self._verdict(loop, report, diagnosis)
        if problem:
            report.notes["replay"] = f"not kept: {problem}"
        else:
            self._keep(loop, report, diagnosis, states)
        return [*verdicts, verdict]

    def _verdict(self, loop: Loop, report: NonFinite, diagnosis: Diagnosis) -> Verdict:
        self._in_a_row += 1
        self._furthest = max(self._furthest, loop.progress.step)
        rules = (
            (self.policy == "skip" and diagnosis.cause == "weight", "skipping cannot repair a weight"),
            (self.policy != "stop" and self._in_a_row > self.max_skips, f"max_skips is {self.max_skips} in a row"),
        )
        for holds, why in rules:
            if holds:
                report.notes["policy"] = f"{self.policy}, but {why}: stop"
                return "stop"
        return self.policy

    def _keep(self, loop: Loop, report: NonFinite, diagnosis: Diagnosis, states: Mapping[str, Any]) -> None:
        if loop.run_dir is None or not self.keep:
            return
        root = loop.run_dir / self.folder
        path = root / f"step-{report.step:08d}-position-{report.position:08d}"
        if first_rank_says(len(kept_in(root) - {path.name}) >= self.keep):
            report.notes["replay"] = f"not kept: {root} has {self.keep} steps already (plugins.nan.keep)"
            return
        parts = {**states, "buffers": loop.buffers.kept, "model": copied(loop.model.state_dict())}
        loaded = report.batch if report.batch.replaced is None else report.batch.replaced
        parts["batch"] = batch_state(loaded, loop.feed)
        results = outcome(loop, report.batch)
        if not loop.is_main:
            return
        try:
            write_record(path, loop, report, diagnosis, parts, results, self.num_begun == 1)
        except OSError as error:
            report.notes["replay"] = f"not kept: {path} cannot be written: {error.strerror or error}"
            return
        report.notes["replay"] = f"hookdiff replay {path}"

    def state_dict(self) -> dict[str, Any]:
        """Return the last losses and norms, and the counts of steps that were left out."""
        last, sizes = map(astuple, on_host(self._last)), [(step, float(size)) for step, size in self._sizes]
        return {"last": list(last), "sizes": sizes, "in_a_row": self._in_a_row, "furthest": self._furthest}

    def load_state_dict(self, state: NaNState) -> None:
        """Restore a saved state; steps that were left out before a rollback still count."""
        self._last = [Update(*values) for values in state.last]
        self._sizes = list(state.sizes)
        self._in_a_row = max(self._in_a_row, state.in_a_row)
        self._furthest = max(self._furthest, state.furthest)


def _states(loop: Loop) -> dict[str, Any]:
    """Return copies of the state of the data, and of the plugins that take part in a step."""
    with loop.log.muted():  # without this, copying the state of the log would send the log to the sinks
        state = loop.state_dict()
    plugins = {}
    for name, plugin in loop.plugins.items():
        if name in state["plugins"] and implements(plugin, *STEP_HOOKS) and not isinstance(plugin, Sink):
            plugins[name] = state["plugins"][name]
    return copied({"data": state["data"], "plugins": plugins})
