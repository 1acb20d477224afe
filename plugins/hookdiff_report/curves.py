"""The plots of a report as plain data: which curves they have, and what their captions say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy
from attrs import define, field, frozen

from hookdiff_report.facts import Array, Run, count, number
from hookdiff_report.timeline import shortened

MOST_POINTS = 2000
_MOST_SPACES = 8
Style = Literal["line", "faint", "dashed", "dots"]
_LEVEL = re.compile(r"(\d+):([^.]*(?:\.\d+)?)\.\.(.+)")  # 03:-5.4..-3.8


@frozen(eq=False)
class Curve:
    """A curve of a plot."""

    label: str
    x: Array
    y: Array
    style: Style = "line"
    color: int = 0  # in the palette
    alpha: float = 1.0


@frozen(eq=False)
class Mark:
    """Something that happened, at the foot of a plot."""

    kind: str
    x: float
    text: str


@define(eq=False)
class Plot:
    """A plot and its texts."""

    key: str
    title: str
    caption: str
    y_label: str
    curves: list[Curve]
    x_label: str = "step"
    is_log: bool = False
    marks: list[Mark] = field(factory=list)
    summary: str = ""

    def __attrs_post_init__(self) -> None:
        # Values that a logarithm does not have would leave an empty plot.
        values = numpy.concatenate([curve.y for curve in self.curves])
        self.is_log = self.is_log and bool((values[numpy.isfinite(values)] > 0).all())
        self.summary = "; ".join(_summary(curve) for curve in self.curves[:8])


@frozen
class Line:
    """A logged value in a plot."""

    name: str
    label: str
    style: Style = "line"
    color: int = 0


@frozen
class Chart:
    """A plot of logged values by step. Several runs are compared by the first of `compared` that they have."""

    key: str
    title: str
    y_label: str
    caption: str
    lines: Sequence[Line]
    compared: Sequence[str]
    is_log: bool = False

    def plot(self, runs: Sequence[Run]) -> Plot | None:
        """Return the plot, or None if no run has logged any of the values."""
        curves: list[Curve] = []
        for number_of_run, run in enumerate(runs):
            known = run.history.series
            if len(runs) == 1:
                chosen = [(line, line.label, line.color) for line in self.lines if line.name in known]
            else:
                name = next((name for name in self.compared if name in known), None)
                chosen = [(line, run.label, number_of_run) for line in self.lines if line.name == name]
            for line, label, color in chosen:
                style: Style = line.style if len(runs) == 1 or line.style == "dots" else "line"
                alpha = 0.7 if style == "faint" else 1.0
                curves.append(Curve(label, *thin(*run.points(line.name)), style, color, alpha))
        curves = [curve for curve in curves if numpy.isfinite(curve.y).any()]
        if not curves:
            return None
        return Plot(self.key, self.title, self.caption, self.y_label, curves, is_log=self.is_log)


_LOSS = Chart(
    "loss",
    "Loss",
    "loss",
    "How far the network's predictions are from the truth, on the training images: lower is better. A diffusion model "
    "never reaches zero, because the noise cannot be guessed entirely. Spikes and steady rises are bad signs; images "
    "that were held out from training should stay close to the others.",
    (
        Line("loss", "as logged", "faint"),
        Line("loss/smooth", "smoothed"),
        Line("val/loss", "held-out images", "dots", 1),
        Line("val/loss_trained", "as many training images, same noise", "dots", 2),
    ),
    ("loss/smooth", "loss"),
    is_log=True,
)
_REST = (
    Chart(
        "gradients",
        "Gradient norm",
        "norm",
        "The length of the gradient over all weights, before clipping. Gradients above the threshold are scaled down "
        "to it. Sudden peaks come from odd samples or a learning rate near its limit.",
        (Line("grad_norm", "gradient norm"), Line("clip/threshold", "clip threshold", "dashed", 1)),
        ("grad_norm",),
        is_log=True,
    ),
    Chart(
        "memory",
        "Memory",
        "MiB",
        "Memory of the device on which the network trains; on a CPU, that of the process. A curve that rises without "
        "end is a leak.",
        (
            Line("memory/allocated", "in use"),
            Line("memory/reserved", "reserved", "line", 2),
            Line("memory/peak", "peak so far", "dashed", 1),
        ),
        ("memory/peak", "memory/allocated"),
    ),
)


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the plots of the runs; a plot without values is left out."""
    names = sorted({name for run in runs for name in run.history.series})
    loss = _LOSS.plot(runs)
    if loss and len(runs) == 1:
        loss.marks = _marks(runs[0])
    gradients, memory = (chart.plot(runs) for chart in _REST)
    measured = [chart.plot(runs) for chart in _distances(runs)]
    kept = [chart.plot(runs) for chart in _precision(names)] if len(runs) == 1 else []
    found = [loss, _by_noise_level(runs), *measured, *kept, _rates(names).plot(runs), gradients, _pace(runs), memory]
    return [plot for plot in found if plot is not None]


def _rates(names: Sequence[str]) -> Chart:
    groups = [name for name in names if name == "lr" or name.startswith("lr/")][:8]
    lines = [Line(name, name, color=k) for k, name in enumerate(groups)]
    caption = "The size of the steps by which the optimizer changes the weights."
    return Chart("lr", "Learning rate", "learning rate", caption, lines, groups[:1])


def distances(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the names of the logged Fréchet distances, each with its title."""
    found = []
    for name in sorted({name for run in runs for name in run.history.series}):
        kind, _, space = name.partition("/")
        if kind in ("fid", "fd") and space and not space.endswith(("/num", "/floor")):
            found.append((name, f"{'FID' if kind == 'fid' else 'Fréchet distance'} ({shortened(space, 60)})"))
    return found


def _distances(runs: Sequence[Run]) -> Iterator[Chart]:
    for name, title in distances(runs)[:_MOST_SPACES]:
        used = sorted({value for run in runs for value in run.points(f"{name}/num")[1] if math.isfinite(value)})
        num = " or ".join(map(count, used[:4])) or "an unknown number of"
        compared = "two clouds of image features, one of generated images and one of the data"
        many = " Values with different n cannot be compared." if len(used) > 1 else ""
        caption = (
            f"The distance between {compared}: lower is better. Each value is measured with {num} generated images in "
            f"its feature space; fewer images give larger values. The floor is what a perfect model would "
            f"get with as many.{many}"
        )
        lines = (Line(name, "generated images", "dots"), Line(f"{name}/floor", "floor", "dashed", 2))
        yield Chart(name, f"{title}, n = {num}", "distance", caption, lines, (name,), is_log=True)


def _precision(names: Sequence[str]) -> Iterator[Chart]:
    for name in [name for name in names if name.startswith("precision/")][:_MOST_SPACES]:
        space = name.removeprefix("precision/")
        caption = (
            "Precision and density: how many generated images look like images of the data. Recall and coverage: how "
            "much of the data's variety is generated. 1 is the aim."
        )
        kinds = ("precision", "recall", "density", "coverage")
        lines = [Line(f"{one}/{space}", one, "dots", k) for k, one in enumerate(kinds)]
        yield Chart(name, f"Fidelity and variety ({shortened(space, 60)})", "share", caption, lines, ())


def _pace(runs: Sequence[Run]) -> Plot | None:
    curves, units = [], set()
    for k, run in enumerate(runs):
        if pace := run.pace():
            units.add(pace.unit)
            label = f"mean {number(pace.mean)}" if len(runs) == 1 else run.label
            curves.append(Curve(label, pace.steps, pace.rates, color=k))
    if len(units) != 1:
        return None
    unit = units.pop()
    caption = (
        f"Training {unit} per second, from the times of the logged lines. Samples, evaluations and checkpoints between "
        "two lines slow it down. The time before the first line of each process is left out."
    )
    return Plot("pace", "Throughput", caption, f"{unit} per second", curves)


# The loss by noise level


def _levels(run: Run, kind: str, until: float) -> tuple[Array, Array]:
    """Return the middles of the bins of the log-SNR, and the mean in each over the logs before `until` (0 to 1)."""
    found: list[tuple[float, float, float]] = []
    for name in sorted(run.history.series):
        match = _LEVEL.fullmatch(name.removeprefix(f"loss/{kind}-")) if name.startswith(f"loss/{kind}-") else None
        values = run.points(name)[1]
        last = max(1, round(until * len(values)))
        recent = values[max(0, last - max(1, len(values) // 10)) : last]
        recent = recent[numpy.isfinite(recent)]
        if match and len(recent):
            try:
                found.append((float(match[2]), float(match[3]), float(recent.mean())))
            except ValueError:  # no bin of the monitor
                continue
    widths = [high - low for low, high, _ in found if math.isfinite(high - low)]
    half = (sorted(widths)[len(widths) // 2] if widths else 1.0) / 2
    middles = [(max(low, high - 2 * half) + min(high, low + 2 * half)) / 2 for low, high, _ in found]
    return numpy.array(middles, float), numpy.array([value for *_, value in found], float)


def _by_noise_level(runs: Sequence[Run]) -> Plot | None:
    curves: list[Curve] = []
    for color, run in enumerate(runs):
        name = next((name for name in run.history.series if name.startswith("loss/snr-")), None)
        if name is None:
            continue
        steps, is_alone = run.points(name)[0], len(runs) == 1
        for share, alpha in ((0.1, 0.35), (0.25, 0.5), (0.5, 0.7)) if is_alone and len(steps) > 10 else ():
            label = f"up to step {count(steps[round(share * len(steps)) - 1])}"
            curves.append(Curve(label, *_levels(run, "snr", share), color=color, alpha=alpha))
        label = f"up to step {count(steps[-1])}" if is_alone else run.label
        curves.append(Curve(label, *_levels(run, "snr", 1.0), "dots", color))
        label, color = ("floor", 1) if is_alone else (f"floor of {run.label}", color)
        curves.append(Curve(label, *_levels(run, "floor", 1.0), "dashed", color))
    curves = [curve for curve in curves if len(curve.y)]
    if not curves:
        return None
    caption = (
        "The same loss, sorted by how noisy the image was: almost pure noise on the left, almost clean on the right "
        "(log-SNR is the logarithm of signal over noise). Each curve is a mean over a tenth of the logged steps. The "
        "floor is the error of the best guess from mean and variance of the data alone: a network that has learned "
        "what images look like is below it."
    )
    return Plot("levels", "Loss by noise level", caption, "loss", curves, x_label="log-SNR", is_log=True)


# Events


def _marks(run: Run) -> list[Mark]:
    """Return the events, at most 200 of each kind; those that are close to each other are one."""
    events = [one for one in run.history.events if one.event.kind not in ("start", "stop")]
    if not events:
        return []
    steps, marks = [one.step for one in events], []
    low = min(steps)
    width = max(1, (max([*steps, run.history.step]) - low) / 200)
    groups: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for one in events:
        groups.setdefault((one.event.kind, int((one.step - low) // width)), []).append((one.step, one.event.text))
    for (kind, _), group in groups.items():
        first, last, text = group[0][0], group[-1][0], group[-1][1].partition("\n")[0][:120]
        if len(group) > 1:
            text = f"{count(len(group))} times, steps {count(min(first, last))} to {count(max(first, last))}; {text}"
        marks.append(Mark(kind, float(first), text))
    return marks


# Points


def thin(x: Array, y: Array, most: int = MOST_POINTS) -> tuple[Array, Array]:
    """Return at most `most` points of a curve: of each of equally long parts its lowest and its highest one.

    The first and the last point are kept. A part without a finite value keeps one point, which is a gap.
    """
    if len(x) <= most:
        return x, y
    edges = numpy.linspace(1, len(x) - 1, (most - 2) // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in pairwise(edges.tolist()):
        part = y[begin:end]
        finite = numpy.flatnonzero(numpy.isfinite(part))
        if len(finite):
            kept.add(begin + int(finite[part[finite].argmin()]))
            kept.add(begin + int(finite[part[finite].argmax()]))
        elif len(part):
            kept.add(begin)
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def _summary(curve: Curve) -> str:
    finite = numpy.flatnonzero(numpy.isfinite(curve.y))
    if not len(finite):
        return f"{curve.label}: no number"
    x, y = curve.x[finite], curve.y[finite]
    low = int(y.argmin())
    return f"{curve.label}: last {number(y[-1])}, lowest {number(y[low])} at {x[low]:,.6g}"
