"""The plugin `ema`."""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import define, field, setters
from attrs.validators import and_, ge, gt, le, lt
from torch import Tensor, nn

from hookdiff import Alarms, Due, Every, Finding, Loop, Reason, UserError, hookimpl, listed, parse_every
from hookdiff.log import Raised, judge, warning_if
from hookdiff.loop import DevicePart
from hookdiff.machine import fill_, local_parts, whole
from hookdiff.options import COUNT, REST, about, chosen, numbers, structured
from hookdiff_ema.average import Average, Length, each, make_averages
from hookdiff_ema.profiles import MAX_STD, Ratio, Warmup
from hookdiff_ema.snapshots import FOLDER, Snapshot, remove_later, write_snapshot
from hookdiff_ema.weights import Weights

NAME = "ema"  # name of the first average in a SampleRequest
KEY = "ema"  # key of the rest of the state, beside the keys of the model
STILL = "ema/still"  # logged: number of updates since an average last changed, the largest of all averages
MANY = 200  # updates without a change after which to warn
BACK = 0.8  # share of max_distance below which the average follows the weights again

logger = logging.getLogger("hookdiff")


@define(frozen=True)
class Numbers:
    """The saved state, except the first average."""

    num_updates: int = field(validator=COUNT)
    labels: list[str]
    averages: dict[str, dict[str, Tensor]]  # the averages after the first, by label
    still: list[tuple[float, int | None]] = field(validator=numbers())
    alarms: Raised


@define(frozen=True)
class EMAState:
    """The saved state of `EMA`."""

    weights: dict[str, Tensor] = field(metadata=REST)  # the first average: the keys of the model
    ema: Numbers

    @property
    def averages(self) -> list[dict[str, Tensor]]:
        """All averages, in the order of their labels."""
        return [self.weights, *(self.ema.averages[label] for label in self.ema.labels[1:])]


@define(eq=False, on_setattr=setters.NO_OP)  # validated when made; each step sets fields
class EMA:
    """Keeps moving averages of the weights, to sample with.

    After every update of the weights, shadow <- decay * shadow + (1 - decay) * weights. The shadow has at least
    float32, holds tied weights once, and does not change in steps without an update.

    The length of an average is a decay, a half-life, or the width of a power function that grows with the training
    (Karras et al. 2024, arXiv 2312.02696, eq. 2). A number gives the first average. Lists give further averages, in the
    order `decay`, `half_life`, `std`. From snapshots of two widths `hookdiff ema` makes averages of other widths later.
    """

    decay: Length = field(default=None, validator=each(and_(ge(0), lt(1))), metadata=about("decay per update"))
    half_life: Length = field(
        default=None,
        validator=each(and_(gt(0), lt(math.inf))),
        metadata=about("half-life, in place of a decay", "updates"),
    )
    std: Length = field(
        default=None,
        validator=each(and_(gt(0), le(MAX_STD))),
        metadata=about("width as a share of training; default: 0.1, if no length is set"),
    )
    warmup: Warmup = field(
        default=Ratio(), converter=chosen[Warmup], metadata=about("how `decay` or `half_life` rises")
    )
    device: Literal["model", "cpu"] = field(
        default="model", metadata=about('"model": on the device of the model; "cpu": saves GPU memory')
    )
    max_distance: float = field(
        default=0.5, validator=gt(0), metadata=about("warn if the relative distance from the weights is larger")
    )
    snapshot_every: Every = field(
        default=Every(0), converter=parse_every, metadata=about("how often to write each `std` to `RUN/ema`; 0: never")
    )
    snapshot_dtype: Literal["float32", "float16"] = field(
        default="float32", metadata=about('"float32", or "float16": half the size, relative error 2e-4')
    )
    num_updates: int = field(default=0, init=False)
    _averages: list[Average] = field(init=False)
    _weights: Weights = field(init=False)
    _taken: list[Tensor] = field(init=False)  # this rank's parts of the weights, in the averages' device and dtype
    # The work of a recorded step. Other steps of the run do the same work, so that the rounding is the same.
    _recorded: list[DevicePart] = field(factory=list, init=False)
    _one: Tensor = field(init=False)
    _pending: bool = field(default=False, init=False)  # the averages do not include the newest fetched weights
    _due: Due = field(init=False)
    _folder: Path = field(init=False)  # of the snapshots
    _snapped: int | None = field(default=None, init=False)  # step of the newest snapshot
    _alarms: Alarms = field(factory=Alarms, init=False)

    def __attrs_post_init__(self) -> None:
        if self.snapshot_every.amount and self.std is None:
            raise ValueError("snapshot_every needs std: only power functions can be combined after training")
        self._averages = make_averages(NAME, self.decay, self.half_life, self.std, self.warmup)

    @property
    def averages(self) -> tuple[Average, ...]:
        """All averages, in the order of their labels."""
        return tuple(self._averages)

    @property
    def shadow(self) -> dict[str, Tensor]:
        """The first average, by parameter name."""
        return self._settled(self._averages[0])

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        if self.snapshot_every.amount and loop.run_dir is None:
            raise UserError("plugins.ema.snapshot_every needs a place for files: Loop(..., run_dir=Path('runs/mine'))")
        self._folder = (loop.run_dir or Path()) / FOLDER
        self._weights = Weights(loop.model, torch.device("cpu") if self.device == "cpu" else None)
        self._taken = local_parts(self._weights.tensors.values())
        self._due, self._recorded = Due(self.snapshot_every), []
        for average in self._averages:
            average.start(self._weights.tensors)

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop) -> None:
        if self.snapshot_every.amount and loop.is_main:
            remove_later(self._folder, loop.progress.step)

    @hookimpl(tryfirst=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        if self._recorded:
            for part in () if loop.gradients.is_applied else self._recorded:
                part.prepare()
                part.work(self._one)
            self.num_updates += 1
        else:
            self._settle()
            self._weights.fetch()
            self._pending = True
            if not self._weights.wait_is_long:
                self._settle()
        if loop.log.due:
            self._log(loop)

    def _settle(self) -> None:
        """Update the averages with the weights that were fetched last."""
        if self._pending:
            self._weights.wait()
            for average in self._averages:
                average.update(self._taken, self.num_updates)
            self.num_updates += 1
            self._pending = False

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart]:
        """Return the updates of averages that read the weights directly; the host updates averages of copies."""

        def part(average: Average) -> DevicePart:
            share, update = average.on_device(self._taken)

            def fill() -> None:
                share.fill_(1 - average.decay(self.num_updates))

            return DevicePart("after", update, fill)

        self._one = torch.ones((), device=loop.device)
        self._recorded = [part(average) for average in self._averages if self._weights.are_direct]
        return self._recorded

    def _log(self, loop: Loop) -> None:
        self._settle()
        still = [average.count_still(loop.config.log_every) for average in self._averages]
        loop.log({STILL: torch.stack(still).max()}, detail=True)
        for average in self._averages:
            loop.log({f"{average.prefix}/decay": average.decay(self.num_updates - 1)}, detail=True)
            is_first = average is self._averages[0]
            loop.log({f"{average.prefix}/distance": average.distance(self._taken)}, detail=not is_first)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if STILL not in values:
            return
        lost = self._weights.replaced()
        what = f"ema: parameters were replaced, and the average follows the old parameters: {listed(lost, 3)}"
        remedy = "to change them in place (copy_), or in the hook prepare_model"
        finding = Finding("warning", what, "", remedy) if lost else None
        loop.log.report(self._alarms.news(step, "replaced", finding), step)
        for average in self._averages:
            distance = values[f"{average.prefix}/distance"]
            is_lost, over = distance > self.max_distance, distance < BACK * self.max_distance
            what = f"ema: the average {average.label} no longer follows the weights"
            remedy = "a shorter average or a warmup, if the loss is fine"
            far = judge(f"distance {distance:.2g}", warning_if(is_lost, what, remedy))
            loop.log.report(self._alarms.news(step, f"{average.prefix}/distance", far, over=over), step)
            # `still` of an average costs a transfer, so it is read only if an average has not moved.
            is_still = values[STILL] >= MANY and float(average.still) >= MANY
            what = f"ema: the average {average.label} has not moved for {values[STILL]:.0f} updates"
            why, remedy = "neither have the weights", "a learning rate above 0"
            if distance:
                why, remedy = "the weights have moved: its decay is too close to 1", "a lower decay"
            still = judge(why, warning_if(is_still, what, remedy))
            loop.log.report(self._alarms.news(step, f"{average.prefix}/still", still), step)

    @hookimpl
    def offer_weights(self) -> dict[str, Callable[[], Mapping[str, Tensor]]]:
        offered = {f"{NAME}/{average.label}": partial(self._settled, average) for average in self._averages}
        return {NAME: partial(self._settled, self._averages[0]), **offered}

    def _settled(self, average: Average) -> dict[str, Tensor]:
        self._settle()
        return average.shadow

    @hookimpl(trylast=True, specname="after_optimizer_step")
    def snapshot_after_step(self, loop: Loop) -> None:
        if self._due.after_step(loop.progress.step):
            self._snapshot(loop)

    @hookimpl(trylast=True)
    def on_epoch_end(self, loop: Loop) -> None:
        if self._due.after_epoch(loop.progress.epoch):
            self._snapshot(loop)

    @hookimpl(trylast=True)
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason == "done" and self.snapshot_every.amount:
            self._snapshot(loop)

    def _snapshot(self, loop: Loop) -> None:
        self._settle()
        step, start = loop.progress.step, loop.progress.step - self.num_updates
        if self._snapped == step or not self.num_updates:
            return
        self._snapped = step
        if loop.is_main:
            remove_later(self._folder, step)  # snapshots of steps that a rollback has undone
        for average in self._averages:
            if average.std is not None:
                path = self._folder / f"step-{step:08d}-std={average.std}.safetensors"
                snapshot = Snapshot(path, average.std, step, start, self.snapshot_dtype)
                values = {key: whole(value) for key, value in self._weights.in_model_keys(average.shadow).items()}
                if not loop.is_main:
                    continue
                try:
                    write_snapshot(snapshot, values, self._weights.names.keys())
                except OSError as error:
                    logger.warning("ema: %s cannot be written: %s", path, error.strerror or error)

    def state_dict(self) -> dict[str, Any]:
        """Return the first average under the keys of the model, and the rest of the state under `KEY`."""
        self._settle()
        first, *others = (self._weights.in_model_keys(average.shadow) for average in self._averages)
        labels = [average.label for average in self._averages]
        rest = {
            "num_updates": self.num_updates,
            "labels": labels,
            "averages": dict(zip(labels[1:], others, strict=True)),
            "still": [average.still_state for average in self._averages],
            "alarms": self._alarms.state_dict(),
        }
        return {**first, KEY: rest}

    @hookimpl
    def check_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the averages have other lengths than those of the run, or are not of `model`."""
        saved = structured(EMAState, state)
        labels, of_run = saved.ema.labels, [average.label for average in self._averages]
        # A decay may differ, as any hyper-parameter may. A power function must stay the same from its first step.
        if len(labels) != len(of_run) or any(a != b and "std=" in a + b for a, b in zip(labels, of_run, strict=True)):
            raise ValueError(f"the saved averages are {', '.join(labels)}, those of the run {', '.join(of_run)}")
        if len(saved.ema.still) != len(labels):
            raise ValueError(f"{KEY}.still: there are {len(labels)} averages")
        expected = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        every = model.named_parameters(remove_duplicate=False)
        parameters = {name: parameter for name, parameter in every if name in expected}
        for label, values in zip(labels, saved.averages, strict=True):
            if differing := values.keys() ^ expected.keys():
                raise ValueError(f"{label} is of another model: only one of the two has {min(differing)!r}")
            for name, parameter in parameters.items():
                shape, dtype = parameter.shape, torch.promote_types(parameter.dtype, torch.float32)
                if (values[name].shape, values[name].dtype) != (shape, dtype):
                    raise ValueError(f"{label}: {name} is not a tensor of shape {tuple(shape)} and {dtype}")
                if not values[name].isfinite().all():
                    raise ValueError(f"{label}: {name} is not finite")

    def load_state_dict(self, state: EMAState) -> None:
        self._pending = False
        for average, values, still in zip(self._averages, state.averages, state.ema.still, strict=True):
            for name, value in average.shadow.items():
                fill_(value, values[name])
            average.still_state = still
        self._alarms.load_state_dict(state.ema.alarms)
        self.num_updates = state.ema.num_updates
        self._snapped = None
