"""The plugin `loss`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field
from attrs.validators import ge, gt, lt
from torch import Tensor

from hookdiff import Batch, Due, Every, Loop, Reason, hookimpl, parse_every
from hookdiff_loss.diagnosis import Diagnosis, Finding
from hookdiff_loss.held_out import Overfitting, fixed_loss, some_of
from hookdiff_loss.levels import NoiseLevels, bin_edges
from hookdiff_loss.smoothing import Smoothed

log = logging.getLogger("hookdiff")

ADVICE = {
    "divergence": (
        "the learning rate, {rate}, is probably too high\n"
        "  try a tenth of it, a longer warm-up, or clipped gradients; step {step} was still good"
    ),
    "spike": (
        "\n  a batch of odd samples or a learning rate near its limit ({rate}); one that comes back does no harm,"
        " and clipped gradients make it smaller"
    ),
    "drop": "\n  a loss that falls at once is seldom learning: look at the data (repeated, blank) from that step on",
    "oscillation": (
        "\n  the learning rate, {rate}, is at the edge of what is stable, or the data comes in an order that repeats;"
        " try a third of the rate"
    ),
    "plateau": (
        "\n  converged at the learning rate {rate}; samples get better long after, so judge by them or a distance"
    ),
    "recovery": "",
}
WORSE = 1.1  # share of the target's variance that is left: no network at all leaves 1
NEWS = ("plateau", "recovery")  # told, but no warning
UNLEARNT = (
    "the network learns next to nothing at %s: less than half of what mean and variance of the data alone tell\n"
    "  so for %d updates; a learning rate too low or too high, a weighting or times that leave these levels out,"
    " or a network that does not see its timestep"
)
OVERFITS = "%s\n  stop there, or use more data, augmentation, dropout, or a smaller network"


@define(eq=False)
class Loss:
    """Tells in words when the loss spikes, diverges, swings or rests, where the network learns nothing, and overfits.

    It logs the loss smoothed, in bins of the log-SNR beside their floor (see `Diffusion.floor`), and on samples that
    are held out. The loss of a step is on the host already; all else waits on the device for the next log.
    """

    decay: float = field(default=0.99, validator=[ge(0), lt(1)])  # of the smoothed loss, per update
    window: int = field(default=100, validator=ge(20))  # updates that tell what is usual
    spike: float = field(default=10.0, validator=gt(0))  # robust deviations from the median of the window
    plateau: int = field(default=2000, validator=ge(0))  # updates without a change of 5 percent; 0: not told
    bins: int = field(default=12, validator=ge(3))  # of the log-SNR; the outer two have no end
    patience: int = field(default=1000, validator=ge(1))  # updates before a noise level counts as not learnt
    every: Every = field(default=Every(1, "epochs"), converter=parse_every)  # held-out loss, if samples are held out
    _smoothed: Smoothed = field(init=False)
    _diagnosis: Diagnosis = field(init=False)
    _levels: NoiseLevels = field(init=False)
    _inputs: Tensor | None = field(init=False, default=None)  # images of the step under way
    _updates: int = field(init=False, default=0)  # since the noise levels were logged
    _unlearnt: int = field(init=False, default=0)  # noise levels, when last logged
    _named: list[int] = field(init=False, factory=list)  # those of them that were told
    _unexplained: float = field(init=False, default=0.0)  # share of the target's variance, when last logged
    _overfitting: Overfitting = field(init=False, factory=Overfitting)
    _due: Due = field(init=False)
    _measured_at: int | None = field(init=False, default=None)  # step of the last held-out loss

    def __attrs_post_init__(self) -> None:
        if 0 < self.plateau < 10 * self.window:
            raise ValueError(f"plateau ({self.plateau}) must be at least 10 times window ({self.window}), or 0")
        self._smoothed, self._diagnosis = Smoothed(self.decay), Diagnosis(self.window, self.spike, self.plateau)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        edges = bin_edges(loop.objective, self.bins)
        self._levels = NoiseLevels(loop.objective, edges, loop.device, self.patience)
        self._due, self._measured_at = Due(self.every), None

    @hookimpl
    def before_step(self, batch: Batch) -> None:
        self._inputs = batch.inputs

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        step, loss, output = loop.progress.step, loop.gradients.loss, loop.output
        # Not before the step: a skipped batch may hold a NaN, of which no mean recovers.
        assert self._inputs is not None
        self._levels.measure(self._inputs)
        self._inputs = None
        self._smoothed.add(loss)
        self._say(loop, self._diagnosis.observe(step, loss, self._unexplained > WORSE))
        self._updates += 1
        columns = [column for column in (output.log_snr, output.per_sample, output.timesteps) if column is not None]
        if len(columns) == 3:
            self._levels.add(*columns)
        if loop.log.due:
            loop.log({"loss/smooth": self._smoothed.mean})
            shape = {"loss/deviation": self._smoothed.deviation, "loss/spikes": self._diagnosis.num_spikes}
            loop.log(shape, detail=True)
            if len(columns) == 3:
                loop.log(self._levels.close(self._updates, loop.num_ranks > 1), detail=True)
            self._updates = 0
        if self._due.after_step(step):
            self._measure(loop)

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        if self._due.after_epoch(loop.progress.epoch):
            self._measure(loop)

    @hookimpl
    def on_nan(self, loop: Loop) -> None:
        self._say(loop, self._diagnosis.conclude(loop.progress.step))

    @hookimpl
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason == "done" and self.every.amount and self._measured_at != loop.progress.step:
            self._measure(loop)

    def _measure(self, loop: Loop) -> None:
        held = loop.feed.held
        if not len(held):
            return
        self._measured_at = loop.progress.step
        # Of as many samples that are trained on, with the same noise: the two differ by the samples alone.
        held_out, trained_on = fixed_loss(loop, held), fixed_loss(loop, some_of(loop.feed.training, len(held)))
        values = {"loss/held_out": held_out, "loss/trained_on": trained_on, "loss/held_out_gap": held_out - trained_on}
        loop.log(values)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if "loss/held_out" in values and (
            overfits := self._overfitting.observe(step, values["loss/held_out"], values["loss/trained_on"])
        ):
            self._tell(loop, OVERFITS, overfits)
        self._unexplained = values.get("loss/unexplained", self._unexplained)
        if values.get("loss/unlearnt", self._unlearnt) != self._unlearnt:
            unlearnt = self._levels.unlearnt()  # a second look at the device
            if not set(unlearnt) <= set(self._named):
                self._tell(loop, UNLEARNT, self._levels.ranges(unlearnt), self.patience)
            self._unlearnt, self._named = len(unlearnt), sorted({*self._named, *unlearnt})

    def _say(self, loop: Loop, findings: Iterable[Finding]) -> None:
        for finding in findings:
            rate = f"{float(loop.optimizers[0].param_groups[0]['lr']):.3g}"
            text = finding.text
            if finding.kind == "divergence":
                text += ", worse than no network at all;" if self._unexplained > WORSE else ";"
                text += " "
            text += ADVICE[finding.kind].format(rate=rate, step=finding.step)
            if finding.kind not in NEWS:
                self._tell(loop, "%s", text)
            elif loop.is_main:
                log.info("%s", text)

    def _tell(self, loop: Loop, message: str, *values: object) -> None:
        if loop.is_main:
            log.warning(message, *values)

    def state_dict(self) -> dict[str, Any]:
        """Return what the curve, the noise levels and the held-out loss have shown, and what was told of it."""
        return {
            "smoothed": self._smoothed.state_dict(),
            "diagnosis": self._diagnosis.state_dict(),
            "levels": self._levels.state_dict(),
            "updates": self._updates,
            "unlearnt": self._unlearnt,
            "named": list(self._named),
            "unexplained": self._unexplained,
            "overfitting": self._overfitting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self._smoothed.load_state_dict(state["smoothed"])
        self._diagnosis.load_state_dict(state["diagnosis"])
        self._levels.load_state_dict(state["levels"])
        self._updates, self._unexplained = state["updates"], state["unexplained"]
        self._unlearnt, self._named = state["unlearnt"], list(state["named"])
        self._overfitting.load_state_dict(state["overfitting"])
