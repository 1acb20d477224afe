"""Puts the parts of a report together, as one HTML page that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

import jinja2
import numpy
from attrs import define, frozen

from hookdiff.history import History
from hookdiff_report import curves, facts, gallery, settings, timeline
from hookdiff_report.draw import OTHER, SIGNS, color, draw, kinds, script
from hookdiff_report.facts import Run

_MOST_VALUES = 400  # rows of the table of logged values
_MOST_MODEL = 100_000  # letters of the structure of the network


@frozen
class Fact:
    """A number at the top of the page."""

    name: str
    value: str
    note: str = ""


@define
class Shown:
    """What the page says about one run."""

    run: Run
    progress: float | None  # 0 to 1
    summary: str
    facts: Sequence[Fact]
    diagnoses: Sequence[timeline.Diagnosis]
    more_diagnoses: int
    events: Sequence[timeline.Row]
    more_events: int
    config: str
    model: str
    values: Sequence[tuple[str, str, str, str, str]]  # name, number of values, last, lowest, highest

    @property
    def by_name(self) -> Mapping[str, Fact]:
        """The facts by their names."""
        return {fact.name: fact for fact in self.facts}


def page(histories: Sequence[History]) -> str:
    """Return the HTML of the report; raises OSError for a file of a run that cannot be read."""
    runs = facts.named(histories)
    plots = curves.plots(runs)
    budget = gallery.Budget(gallery.BUDGET)
    stills = gallery.stills(runs[0], budget) if len(runs) == 1 else []
    groups = gallery.groups(runs, budget)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hookdiff_report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css, js = (
        (resources.files("hookdiff_report") / "templates" / f"page.{end}").read_text("utf-8") for end in ("css", "js")
    )
    scripts = [script() if plots else "", js]
    frames = [[list(one) for one in strip.sources] for group in groups for strip in group.strips]
    shown = [_shown(run) for run in runs]
    return templates.get_template("page.html").render(
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared",
        policy=_policy(scripts),
        scripts=scripts,
        plots=plots,
        legends=[_legend(plot) for plot in plots],
        items=_json([draw(plot) for plot in plots]),
        groups=groups,
        frames=_json(frames),
        stills=stills,
        shown=shown,
        fact_names=list(dict.fromkeys(fact.name for one in shown for fact in one.facts)),
        differences=settings.differences(runs),
        environment=settings.environment(runs),
        color=color,
        css=css,
        count=facts.count,
        most_points=curves.MOST_POINTS,
        names={"model": "model (raw weights)", "ema": "ema (moving average)"},
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy: these scripts, pictures and styles in the page itself, and nothing else."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts if text]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json(value: object) -> str:
    """Return JSON that may stand in a script element: no letter of it can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _legend(plot: curves.Plot) -> list[dict[str, str]]:
    entries = [
        {"style": curve.style, "color": color(curve.color), "alpha": f"{curve.alpha:g}", "label": curve.label}
        for curve in plot.curves
    ]
    for kind in kinds(plot):
        sign = SIGNS.get(kind, OTHER)
        label = sign.label if kind in SIGNS else timeline.shortened(kind, 60)
        entries.append({"style": sign.marker, "color": sign.color, "label": label})
    return entries


def _shown(run: Run) -> Shown:
    events, more_events = timeline.timeline(run.history.events)
    found, more_found = timeline.diagnoses(run.history.events)
    step, total = run.history.step, run.total
    return Shown(
        run=run,
        progress=min(1.0, step / total) if total else None,
        summary=f"step {facts.count(step)}" + (f" of {facts.count(total)}" if total else ""),
        facts=_facts(run),
        diagnoses=found,
        more_diagnoses=more_found,
        events=events,
        more_events=more_events,
        config=settings.config_text(run),
        model=_model(run),
        values=_values(run),
    )


def _facts(run: Run) -> list[Fact]:
    found: list[Fact] = []
    is_smooth = "loss/smooth" in run.history.series
    loss = ("loss/smooth", "Loss, smoothed") if is_smooth else ("loss", "Loss")
    for name, title in (loss, ("val/loss", "Loss, held out")):
        if best := _best(run, name):
            found.append(Fact(title, facts.number(run.history.last(name)), f"lowest {best[0]} {best[1]}"))
    for distance, title in curves.distances([run]):
        if best := _best(run, distance):
            num = run.history.last(f"{distance}/num")
            note = best[1] if math.isnan(num) else f"{best[1]}, n = {facts.count(num)}"
            found.append(Fact(f"Best {title}", best[0], note))
    return [*found[:6], *_times(run), *_memory(run)]


def _best(run: Run, name: str) -> tuple[str, str] | None:
    """Return the lowest value of a logged name and its step, for people; None if there is no finite one."""
    steps, values = run.points(name)
    finite = numpy.isfinite(values)
    if not finite.any():
        return None
    place = int(values[finite].argmin())
    return facts.number(values[finite][place]), f"at step {facts.count(steps[finite][place])}"


def _times(run: Run) -> Iterator[Fact]:
    pace, note = run.pace(), ""
    if pace:
        value = f"{pace.mean:,.0f}" if pace.mean >= 10 else f"{pace.mean:.2g}"
        yield Fact("Throughput", value, f"{pace.unit} per second")
        left = (run.total or 0) - run.history.step
        if run.state == "running" and left > 0:
            note = f"about {facts.duration(left * pace.size / pace.mean)} left"
    if run.seconds:
        yield Fact("Time", facts.duration(run.seconds), note)


def _memory(run: Run) -> Iterator[Fact]:
    peak = run.history.last("memory/peak")
    if not math.isnan(peak):
        yield Fact("Peak memory", f"{peak:,.0f} MiB" if peak < 10_000 else f"{peak / 1024:,.1f} GiB")


def _model(run: Run) -> str:
    texts = [logged.values["model"] for logged in run.history.texts if "model" in logged.values]
    return timeline.shortened(texts[-1], _MOST_MODEL) if texts else ""


def _values(run: Run) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for name in sorted(set(run.history.series) - {"time"})[:_MOST_VALUES]:
        _, values = run.points(name)
        finite = values[numpy.isfinite(values)]
        last = facts.number(float(values[-1]))
        low, high = (facts.number(float(end)) for end in (finite.min(), finite.max())) if len(finite) else ("", "")
        rows.append((timeline.shortened(name, 100), facts.count(len(values)), last, low, high))
    return rows
