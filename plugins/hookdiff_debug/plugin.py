"""The plugin `debug`."""

import math

from attrs import define, field
from attrs.validators import ge

from hookdiff import Alarms, Batch, Due, Every, Finding, Loop, NonFinite, hookimpl, parse_every, saved
from hookdiff.diffusion import as_diffusion
from hookdiff.loop import DevicePart
from hookdiff.options import COUNT, about
from hookdiff_debug.checks import check_gradients, check_inputs, check_outputs, check_response
from hookdiff_debug.measure import SETTLED, measure_inputs, measure_layers, measure_outputs, untouched

_EARLY = 64  # updates 1, 2, 4 and so on to this one are always measured: most mistakes show early
_SILENT = 2  # measurements in a row in which a layer has no gradient


@define(eq=False)
class Debug:
    """Warns of data out of range, dead layers, and a network that ignores its inputs.

    It measures the batch, the gradients, and how the network's output changes if samples exchange images or times. It
    reports each finding once, and again when the finding comes back. A measurement costs four calls of the network
    without gradients and three transfers from the device; the steps between cost nothing.
    """

    every: Every = field(
        default=Every(500),
        converter=parse_every,
        metadata=about("how often to measure, besides updates 1, 2, 4 and so on to 64; 0: only these updates"),
    )
    num: int = field(default=32, validator=ge(2), metadata=about("images of a batch on which to measure the network"))
    _due: Due = field(init=False)
    _alarms: Alarms = saved(factory=Alarms)  # by the name of the check
    _silent: dict[str, int] = saved(factory=dict, validator=COUNT)  # measurements without a gradient, by layer
    _batch: Batch | None = field(init=False, default=None)  # of the current step, if it is measured
    _numbers: dict[str, float] = field(init=False, factory=dict)  # of the current measurement
    _inputs: Finding = field(init=False)  # about the batch that was measured last

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._due = Due(self.every)

    @hookimpl
    def before_step(self, loop: Loop, batch: Batch) -> None:
        self._batch = batch if self._is_due(loop) else None
        if self._batch is not None:
            self._look_at_inputs(loop, batch)

    @hookimpl
    def on_nan(self, loop: Loop, report: NonFinite) -> None:
        if self._batch is None:
            self._look_at_inputs(loop, report.batch)
        self._batch = None
        if self._inputs.severity != "ok":
            report.notes["debug"] = str(self._inputs)  # the NaN may come from the data

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        if self._batch is None:
            return
        step = loop.progress.step
        with untouched(loop):
            outputs = measure_outputs(loop, self._batch[slice(min(self.num, loop.config.micro_batch or self.num))])
        layers = measure_layers(loop)
        settled = step >= SETTLED
        dead = [name for name, layer in layers.items() if settled and layer.norm == 0]
        self._silent = {name: self._silent.get(name, 0) + 1 for name in dead}
        silent = [name for name, looks in self._silent.items() if looks >= _SILENT]
        findings = {"inputs": self._inputs}
        if settled:
            findings["gradients"] = check_gradients(layers, silent, outputs)
        findings |= {"output": check_outputs(outputs, settled), "response": check_response(outputs, settled)}
        for name, finding in findings.items():
            loop.log.report(self._alarms.news(step + 1, name, finding), step + 1)
            if finding.severity == "error":
                break  # later findings follow from this one, or can wait
        numbers = {"silent_layers": float(sum(not layer.norm for layer in layers.values()))}
        if outputs is not None:
            numbers |= {"output_mean": outputs.mean, "output_std": outputs.std, "by_image": outputs.by_image}
            numbers |= {"by_time": outputs.by_time, "by_label": outputs.by_label}
        self._numbers |= {f"debug/{name}": value for name, value in numbers.items() if not math.isnan(value)}

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart]:
        """Return no work: only some steps are measured."""
        return []

    @hookimpl
    def needs_host(self, loop: Loop) -> bool:
        return self._batch is not None

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if self._batch is not None:
            loop.log(self._numbers, detail=True)
            self._batch = None

    def _is_due(self, loop: Loop) -> bool:
        step, progress = loop.progress.step + 1, loop.progress
        early = step <= _EARLY and step & (step - 1) == 0
        epoch_began = progress.samples == 0 and self.every.after_epoch(progress.epoch)
        # `after_step` comes first, so that it is called in each step: a time interval restarts when it is due.
        return self._due.after_step(step) or early or epoch_began

    def _look_at_inputs(self, loop: Loop, batch: Batch) -> None:
        inputs = measure_inputs(batch.inputs, loop.objective)
        diffusion = as_diffusion(loop.objective, "is_normalized")
        self._inputs = check_inputs(inputs, diffusion is not None and diffusion.is_normalized)
        numbers = {"min": inputs.low, "max": inputs.high, "mean": inputs.mean, "std": inputs.std}
        self._numbers = {f"debug/input_{name}": value for name, value in numbers.items()}
