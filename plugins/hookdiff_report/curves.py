"""The plots of a report as plain data: their curves and captions."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy
from attrs import evolve, field, frozen

from hookdiff.authors import thin_curve
from hookdiff.run_dir import is_distance
from hookdiff_report.events import Mark, marks
from hookdiff_report.goals import Goal
from hookdiff_report.run import NEIGHBOURS, Array, ReportedRun
from hookdiff_report.words import count, number, shortened

MOST_POINTS = 2000
_PARTS = 500  # parts of a long loss curve, each about two pixels wide
_MOST_SPACES = 8  # feature spaces
_MOST_GROUPS = 8  # groups of parameters
Style = Literal["line", "faint", "dashed", "dots"]
Lines = Mapping[str, tuple[str, Style]]  # label and style by logged name


@frozen(eq=False)
class PlottedCurve:
    """A curve of a plot."""

    label: str
    x: Array
    y: Array
    style: Style = "line"
    color: int = 0  # number in the palette
    alpha: float = 1.0
    low: Array | None = None  # lower end of a band; y is the upper end

    @property
    def summary(self) -> str:
        """The curve in words."""
        finite = numpy.isfinite(self.y)
        x, y = self.x[finite], self.y[finite]
        if self.low is not None:
            return f"{self.label}: {number(numpy.nanmin(self.low))} to {number(y.max())}"
        return f"{self.label}: last {number(y[-1])}, lowest {number(y.min())} at {x[y.argmin()]:,.6g}"


def _with_values(curves: Iterable[PlottedCurve]) -> list[PlottedCurve]:
    return [curve for curve in curves if numpy.isfinite(curve.y).any()]


@frozen(eq=False)
class Plot:
    """A plot and its texts."""

    key: str
    title: str
    y_label: str
    caption: str
    curves: Sequence[PlottedCurve] = field(converter=_with_values)
    x_label: str = "step"
    log: bool = False  # a logarithmic axis is wanted
    dashed: str = ""  # added to the caption if there are dashed curves
    marks: Sequence[Mark] = ()
    goals: Sequence[float] = ()  # values to reach
    names: Collection[str] = ()  # logged names that are drawn

    @property
    def is_log(self) -> bool:
        """Whether the vertical axis is logarithmic; with values of zero or less it would be empty."""
        return self.log and self.range[0] > 0

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest finite value."""
        values = [part for curve in self.curves for part in (curve.y, curve.low) if part is not None]
        finite = numpy.concatenate([part[numpy.isfinite(part)] for part in values])
        return float(finite.min()), float(finite.max())

    @property
    def summary(self) -> str:
        """The plot in words, for screen readers."""
        return "; ".join(curve.summary for curve in self.curves[:8])


def plots(runs: Sequence[ReportedRun], goals: Sequence[Goal] = ()) -> list[Plot]:
    """Return the plots of the runs, with the goals; a plot without values is left out."""
    is_alone = len(runs) == 1
    known = [_loss(runs), _by_noise_level(runs), *_distances(runs), *(_variety(runs[0]) if is_alone else ())]
    known += [_rates(runs), _gradients(runs), *_throughput(runs), _memory(runs)]
    return [_with_goals(plot, goals, runs) for plot in [*known, *_others(known, goals, runs)] if plot.curves]


def _with_goals(plot: Plot, goals: Sequence[Goal], runs: Sequence[ReportedRun]) -> Plot:
    drawn = [goal for goal in goals if goal.name in plot.names]
    labels = {run: f" in {run.label}" * (len(runs) > 1) for run in runs}
    texts = [f" The goal {number(goal.value)} is {goal.outlook(run)}{labels[run]}." for goal in drawn for run in runs]
    return evolve(plot, goals=[goal.value for goal in drawn], caption="".join([plot.caption, *texts]))


def _others(known: Sequence[Plot], goals: Sequence[Goal], runs: Sequence[ReportedRun]) -> Iterator[Plot]:
    """Yield a plot for each name with a goal that no other plot shows."""
    drawn = {name for plot in known if plot.curves for name in plot.names}
    for name in dict.fromkeys(goal.name for goal in goals if goal.name not in drawn):
        lines: Lines = {name: (name, "dots")}
        yield Plot(
            f"goal/{name}", shortened(name, 60), "value", "A value with a goal.", _logged(runs, lines), names=lines
        )


def _logged(runs: Sequence[ReportedRun], lines: Lines) -> Iterator[PlottedCurve]:
    """Yield the curves of logged values. Several runs are compared by one name, which most of the runs have logged."""
    shown = list(lines)
    if len(runs) > 1:  # never by a dashed line, which is a threshold or a floor of other values
        solid = [name for name, (_, style) in lines.items() if style != "dashed"]
        shown = sorted(solid, key=lambda name: -sum(name in run.history.series for run in runs))[:1]
    for place, run in enumerate(runs):
        for name in shown:
            label, style = lines[name]
            points = run.points(name)
            points = _means(*points) if name == "loss/smooth" else thin_curve(*points, MOST_POINTS)
            if len(runs) > 1:
                label = run.label if name == next(iter(lines)) else f"{run.label}: {label}"
                yield PlottedCurve(label, *points, "dots" if style == "dots" else "line", place)
            elif style == "faint" and len(points[0]) < len(run.points(name)[0]):
                yield _band(label, *run.points(name))
            else:
                yield PlottedCurve(label, *points, style, 0 if style == "faint" else shown.index(name))


def _loss(runs: Sequence[ReportedRun]) -> Plot:
    caption = (
        "How far the network's predictions are from the truth, on the training images: lower is better. A diffusion "
        "model never reaches zero, because the noise cannot be guessed entirely. Spikes and steady rises are bad "
        "signs; images that were held out from training should stay close to the others."
    )
    lines: Lines = {
        "loss/smooth": ("smoothed", "line"),
        "loss": ("as logged", "faint"),
        "val/loss": ("held-out images", "dots"),
        "val/loss_trained": ("as many training images, same noise", "dots"),
    }
    events = marks(runs[0]) if len(runs) == 1 else ()
    curves = list(_logged(runs, lines))
    if not all("loss/smooth" in run.history.series for run in runs):
        caption += f" Without the plugin loss, the smoothed loss is the mean of {NEIGHBOURS} logged lines."
        labels = ["smoothed"] if len(runs) == 1 else [run.label for run in runs]
        smooth = [PlottedCurve(labels[k], *_means(*run.loss), color=k) for k, run in enumerate(runs)]
        curves = [*smooth, *(curves if len(runs) == 1 else ())]
    if any(len(run.loss[0]) > MOST_POINTS for run in runs):
        band = ", the band goes from their lowest to their highest loss" * (len(runs) == 1)
        caption += f" A long run is divided into {_PARTS} parts: the line shows their means{band}."
    return Plot("loss", "Loss", "loss", caption, curves, log=True, marks=events, names=lines)


def _gradients(runs: Sequence[ReportedRun]) -> Plot:
    caption = (
        "The length of the gradient over all weights, before clipping. Sudden peaks come from odd samples or a "
        "learning rate near its limit."
    )
    lines: Lines = {"grad_norm": ("gradient norm", "line"), "clip/threshold": ("clip threshold", "dashed")}
    dashed = " Clipping by the norm scales gradients above the threshold down to it."
    return Plot(
        "gradients", "Gradient norm", "norm", caption, _logged(runs, lines), log=True, dashed=dashed, names=lines
    )


def _memory(runs: Sequence[ReportedRun]) -> Plot:
    caption = (
        "Memory of the device on which the network trains; on a CPU, that of the process. A curve that rises without "
        "end is a leak."
    )
    lines: Lines = {
        "memory/peak": ("peak so far", "line"),
        "memory/allocated": ("in use", "line"),
        "memory/reserved": ("reserved", "line"),
    }
    return Plot("memory", "Memory", "MiB", caption, _logged(runs, lines), names=lines)


def _rates(runs: Sequence[ReportedRun]) -> Plot:
    names = [name for name in _names(runs) if name == "lr" or name.startswith("lr/")]
    caption = "The learning rate scales every update that the optimizer makes to the weights."
    caption += _more(len(names) - _MOST_GROUPS, "groups of parameters")
    titles = {"lr": "learning rate"}
    lines: Lines = {n: (titles.get(n, n.removeprefix("lr/")), "line") for n in names[:_MOST_GROUPS]}
    return Plot("lr", "Learning rate", "learning rate", caption, _logged(runs, lines), names=lines)


def distances(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """Return the names of the logged Fréchet distances, each with its title."""
    parts = [(name, *name.split("/", 1)) for name in _names(runs) if is_distance(name)]
    kinds = {"fid": "FID", "fd": "Fréchet distance"}
    return [(name, f"{kinds[kind]} ({shortened(space, 60)})") for name, kind, space in parts]


def _distances(runs: Sequence[ReportedRun]) -> Iterator[Plot]:
    names = distances(runs)
    for name, title in names[:_MOST_SPACES]:
        used = [value for run in runs for value in run.points(f"{name}/num")[1] if math.isfinite(value)]
        num = " to ".join(dict.fromkeys((count(min(used)), count(max(used))))) if used else ""
        caption = (
            "The distance between two clouds of image features, one of generated images and one of the data: lower is "
            f"better. {f'It is measured with {num} generated images; fewer' if num else 'Fewer'} images give larger "
            f"values.{' Values with different n cannot be compared.' if ' to ' in num else ''}"
        )
        caption += _more(len(names) - _MOST_SPACES, "feature spaces")
        lines: Lines = {name: ("generated images", "dots"), f"{name}/floor": ("floor", "dashed")}
        dashed = " The floor is what a perfect model would get with as many images; slightly less is noise."
        title = f"{title}, n = {num}" if num else title
        curves = _logged(runs, lines)
        yield Plot(name, title, "distance", caption, curves, log=True, dashed=dashed, names=lines)


def _variety(run: ReportedRun) -> Iterator[Plot]:
    caption = (
        "Precision and density: how many generated images look like images of the data. Recall and coverage: how much "
        "of the data's variety is generated. 1 is the aim."
    )
    names = [name for name in _names([run]) if name.startswith("precision/")]
    caption += _more(len(names) - _MOST_SPACES, "feature spaces")
    for name in names[:_MOST_SPACES]:
        space = name.removeprefix("precision/")
        kinds = ("precision", "recall", "density", "coverage")
        lines: Lines = {f"{kind}/{space}": (kind, "dots") for kind in kinds}
        title = f"Fidelity and variety ({shortened(space, 60)})"
        yield Plot(name, title, "share", caption, _logged([run], lines), names=lines)


def _throughput(runs: Sequence[ReportedRun]) -> Iterator[Plot]:
    paces = [run.pace() for run in runs]
    units = {pace.unit for pace in paces if pace}
    if len(units) != 1:  # images and steps cannot share an axis
        return
    caption = (
        "The speed of the training, from the times of the logged lines. Samples, evaluations and checkpoints between "
        "two lines slow it down. The time before the first line of each process is left out."
    )
    curves = [
        PlottedCurve(run.label if len(runs) > 1 else f"mean {number(pace.mean)}", pace.steps, pace.rates, color=place)
        for place, (run, pace) in enumerate(zip(runs, paces, strict=True))
        if pace
    ]
    yield Plot("pace", "Throughput", units.pop(), caption, curves)


def _by_noise_level(runs: Sequence[ReportedRun]) -> Plot:
    curves = []
    for color, run in enumerate(runs):
        bins = [(len(logged[0]), name) for name, logged in run.history.series.items() if name.startswith("loss/snr-")]
        steps, is_alone = run.points(max(bins, default=(0, ""))[1])[0], len(runs) == 1
        if not len(steps):
            continue
        for share, alpha in ((0.1, 0.35), (0.25, 0.5), (0.5, 0.7)) if is_alone and len(steps) > 10 else ():
            until = steps[round(share * len(steps)) - 1]
            curves.append(
                PlottedCurve(f"up to step {count(until)}", *_levels(run, "snr", until), color=color, alpha=alpha)
            )
        label = f"up to step {count(steps[-1])}" if is_alone else run.label
        curves.append(PlottedCurve(label, *_levels(run, "snr"), "dots", color))
        label = "floor" if is_alone else f"floor of {run.label}"
        curves.append(PlottedCurve(label, *_levels(run, "floor"), "dashed", 1 if is_alone else color))
    caption = (
        "The same loss, sorted by how noisy the image was: almost pure noise on the left, almost clean on the right "
        "(log-SNR is the logarithm of signal over noise). Each curve is a mean over a tenth of the logged steps."
    )
    dashed = (
        " The floor is the error of the best guess from mean and variance of the data alone: a network that has "
        "learned what images look like is below it."
    )
    return Plot("levels", "Loss by noise level", "loss", caption, curves, x_label="log-SNR", log=True, dashed=dashed)


def _levels(run: ReportedRun, kind: str, until: float = math.inf) -> tuple[Array, Array]:
    """Return the middles of the bins of log-SNR, and the mean of each bin over a tenth of the logs up to a step."""
    bins = []
    for name in _names([run]):
        if not name.startswith(f"loss/{kind}-"):
            continue
        low, _, high = name.partition(":")[2].partition("..")  # loss/snr-03:-5.4..-3.8
        steps, values = run.points(name)
        recent = values[steps <= until][-max(1, len(values) // 10) :]
        recent = recent[numpy.isfinite(recent)]
        try:
            if len(recent):
                bins.append((float(low), float(high), recent.mean()))
        except ValueError:  # not a bin of the plugin loss
            continue
    lows, highs, means = numpy.array(bins, float).reshape(-1, 3).T
    widths = (highs - lows)[numpy.isfinite(highs - lows)]
    width = numpy.median(widths) if len(widths) else 1.0
    # The outer bins are open; they are shown with the width of the others.
    lows = numpy.where(numpy.isfinite(lows), lows, highs - width)
    highs = numpy.where(numpy.isfinite(highs), highs, lows + width)
    return (lows + highs) / 2, means


def _more(num: int, things: str) -> str:
    return f" {count(num)} more {things} are not shown." if num > 0 else ""


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    return sorted({name for run in runs for name in run.history.series})


def _parts(x: Array, y: Array) -> Iterator[tuple[float, Array]]:
    """Yield the middle and the finite values of each of equally long parts of a curve; NaN if a part has none."""
    for steps, values in zip(numpy.array_split(x, _PARTS), numpy.array_split(y, _PARTS), strict=True):
        finite = values[numpy.isfinite(values)]
        yield steps[len(steps) // 2], finite if len(finite) else numpy.array([math.nan])


def _means(x: Array, y: Array) -> tuple[Array, Array]:
    """Return a long curve as its first point, the means of its parts, and its last point; a short curve unchanged.

    Lines through the lowest and highest points of a noisy loss would fill the plot.
    """
    if len(x) <= MOST_POINTS:
        return x, y
    middles, means = numpy.array([(middle, values.mean()) for middle, values in _parts(x, y)]).T
    return numpy.array([x[0], *middles, x[-1]]), numpy.array([y[0], *means, y[-1]])


def _band(label: str, x: Array, y: Array) -> PlottedCurve:
    """Return the band from the lowest to the highest value of each part of a curve."""
    middles, low, high = numpy.array([(middle, values.min(), values.max()) for middle, values in _parts(x, y)]).T
    return PlottedCurve(label, middles, high, "faint", low=low)
