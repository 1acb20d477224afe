"""Joins the parts of a report to one HTML page, which loads nothing from outside."""

import base64
import hashlib
from collections.abc import Sequence

import jinja2
import numpy

from hookdiff.run_dir import History
from hookdiff_report import curves, events, gallery, run_summary, settings
from hookdiff_report.draw import GOAL, color, draw, script, signs
from hookdiff_report.goals import Goal, check_goals, goals_in_config
from hookdiff_report.run import named
from hookdiff_report.scrubber import scrubber
from hookdiff_report.words import count


@numpy.errstate(all="ignore")  # a damaged file may hold huge numbers, which overflow
def page(histories: Sequence[History], goals: Sequence[Goal] = ()) -> str:
    """Return the HTML of the report with `goals`; default: the goals of the configs.

    Raises OSError for a file of a run that cannot be read, and UserError for a goal of a name that no run has logged.
    """
    runs = named(histories)
    check_goals(goals, runs)
    goals = goals or list(dict.fromkeys(goal for run in runs for goal in goals_in_config(run)))
    plots = curves.plots(runs, goals)
    groups, films, num_more = gallery.pictures(runs)
    loader = jinja2.PackageLoader("hookdiff_report")
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.undefined = jinja2.StrictUndefined
    templates.policies["json.dumps_kwargs"] = {}  # Bokeh needs the keys in their order
    # A browser computes the digest of a script with these line endings.
    css, own_script = (loader.get_source(templates, f"page.{end}")[0].replace("\r\n", "\n") for end in ("css", "js"))
    scripts = [*([script()] if plots else []), own_script]
    return templates.get_template("page.html").render(
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared",
        policy=_policy(scripts),
        css=css,
        scripts=scripts,
        runs=runs,
        plots=plots,
        drawn=[draw(plot) for plot in plots],
        groups=groups,
        frames=[strip.sources for group in groups for strip in group.strips],
        films=films,
        num_more=num_more,
        differences=settings.differences(runs),
        environment=settings.environment(runs),
        facts={run: run_summary.facts(run, goals) for run in runs},
        scrubber=scrubber(runs, groups),
        titles=gallery.TITLES,
        goal_color=GOAL,
        values_of=run_summary.values,
        model_of=run_summary.model,
        timeline_of=events.timeline,
        diagnoses={run: events.diagnoses(run) for run in runs},
        config_of=settings.config_text,
        signs_of=signs,
        color=color,
        count=count,
        most_points=curves.MOST_POINTS,
        names={"model": "model (raw weights)", "ema": "ema (moving average)"},
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows `scripts`, and the styles and pictures in the page itself."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
