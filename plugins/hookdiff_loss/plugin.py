"""The plugin `loss`."""

from collections.abc import Mapping

from attrs import define, evolve, field
from attrs.validators import ge, gt, le, lt
from torch import Tensor

from hookdiff import Alarms, Batch, Evaluation, Every, Loop, hookimpl, parse_every, saved
from hookdiff.log import little_learned
from hookdiff.options import COUNT, about, numbers
from hookdiff_loss.diagnosis import Findings, LossTrends
from hookdiff_loss.held_out import Overfitting, fixed_loss, some_of
from hookdiff_loss.levels import NoiseLevels, bin_edges
from hookdiff_loss.smoothing import Smoothed

WORSE = 1.1  # error over the target's variance, which is the error of a constant prediction


@define(eq=False)
class LossMonitor(Evaluation):
    """Reports a loss that spikes, diverges, oscillates or stays flat, overfitting, and noise levels not learned.

    It logs the smoothed loss, the loss in bins of the log-SNR beside their floor (see `Diffusion.floor`), and the loss
    on held-out samples. The loss of a step is on the host already; other values stay on the device until the next log.
    """

    decay: float = field(
        default=0.99, validator=[ge(0), lt(1)], metadata=about("decay of the smoothed loss, per update")
    )
    window: int = field(
        default=100,
        validator=[ge(20), le(1_000_000)],
        metadata=about("number of past losses with which a loss is compared"),
    )
    spike: float = field(
        default=10.0,
        validator=gt(0),
        metadata=about("report a loss above the window's median by more than this", "robust standard deviations"),
    )
    plateau: int = field(
        default=2000,
        validator=ge(0),
        metadata=about("report a loss within 5 percent for this long, at least 10 windows; 0: never", "updates"),
    )
    bins: int = field(
        default=12,
        validator=[ge(3), le(1000)],
        metadata=about("number of bins of the log-SNR, equally wide except the outer two"),
    )
    patience: int = field(
        default=1000, validator=ge(1), metadata=about("report a noise level not learned for this long", "updates")
    )
    every: Every = field(
        default=Every(1, "epochs"),
        converter=parse_every,
        kw_only=True,
        metadata=about("how often the loss of held-out samples is measured; 0: only at the end"),
    )
    # Default: the model's own weights, with which all other values are measured. An average lags behind them.
    weights: str | None = field(
        default="model",
        kw_only=True,
        metadata=about('"model", or the name of an average to measure on held-out samples'),
    )
    _smoothed: Smoothed = saved(validator=numbers())
    _diagnosis: LossTrends = saved()
    _levels: NoiseLevels = saved()
    _batch: Batch | None = field(init=False, default=None)  # the batch of the current step
    _updates: int = saved(0, validator=COUNT)  # updates since the noise levels were logged
    _unlearned: int = saved(0, validator=COUNT)  # number of unlearned noise levels at the last log
    _alarms: Alarms = saved(factory=Alarms)
    _unexplained: float = saved(0.0, validator=numbers())  # error over the target's variance at the last log
    _overfitting: Overfitting = saved()

    def __attrs_post_init__(self) -> None:
        if 0 < self.plateau < 10 * self.window:
            raise ValueError(f"plateau ({self.plateau}) must be at least 10 times window ({self.window}), or 0")
        self._smoothed, self._overfitting = Smoothed(self.decay), Overfitting(self._alarms)
        self._diagnosis = LossTrends(self.window, self.spike, self.plateau, self._alarms)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        edges = bin_edges(loop.objective, self.bins)
        self._levels = NoiseLevels(loop.objective, edges, loop.device, self.patience)

    @hookimpl
    def before_step(self, batch: Batch) -> None:
        self._batch = batch

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        step, loss, output = loop.progress.step, loop.gradients.loss, loop.output
        # Not in before_step: a skipped batch may hold a NaN, which would stay in the mean.
        assert self._batch is not None
        self._levels.measure(self._batch.inputs, self._batch.weight)
        self._batch = None
        self._smoothed.add(loss)
        self._report(loop, self._diagnosis.observe(step, loss, self._unexplained > WORSE))
        self._updates += 1
        columns = [column for column in (output.log_snr, output.per_sample, output.timesteps) if column is not None]
        if len(columns) == 3:
            self._levels.add(*columns)
        if loop.log.due:
            loop.log({"loss/smooth": self._smoothed.mean})
            shape = {"loss/deviation": self._smoothed.deviation, "loss/spikes": self._diagnosis.num_spikes}
            loop.log(shape, detail=True)
            if len(columns) == 3:
                loop.log(self._levels.close(self._updates), detail=True)
            self._updates = 0

    @hookimpl
    def on_nan(self, loop: Loop) -> None:
        self._report(loop, self._diagnosis.conclude(loop.progress.step))

    def evaluate(self, loop: Loop) -> dict[str, Tensor]:
        """Return the loss on the held-out samples, the loss on as many training samples, and the difference."""
        held = loop.feed.held_out_indices
        if not len(held):
            return {}
        # Both losses use the same noise, so they differ only by their samples.
        held_out, trained = fixed_loss(loop, held), fixed_loss(loop, some_of(loop.feed.training, len(held)))
        return {"loss": held_out, "loss_trained": trained, "loss_gap": held_out - trained}

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if "val/loss_trained" in values:
            loop.log.report(self._overfitting.observe(step, values["val/loss"], values["val/loss_trained"]), step)
        self._unexplained = values.get("loss/unexplained", self._unexplained)
        if values.get("loss/unlearned", self._unlearned) != self._unlearned:
            unlearned = self._levels.unlearned()  # a second transfer from the device
            self._unlearned = len(unlearned)
            why = f"for {self.patience} updates it explains less than half of what the mean and variance of the data do"
            finding = little_learned(self._levels.ranges(unlearned), why)
            if [k for k in unlearned if self._alarms.news(step, f"level {k}", finding)]:
                loop.log.report(finding, step)

    def _report(self, loop: Loop, findings: Findings) -> None:
        for kind, finding in findings.items():
            why = f"{finding.why}; learning rate {float(loop.optimizers[0].param_groups[0]['lr']):.3g}"
            if kind == "divergence" and self._unexplained > WORSE:
                why += "; the error is larger than that of a constant prediction"
            loop.log.report(evolve(finding, why=why))
