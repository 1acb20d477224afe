"""Draws the plots of a report with Bokeh, as JSON that its script in the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
from attrs import frozen

from hookdiff_report.curves import Curve, Plot

# Each has a contrast of at least 3 on white and on the dark page.
PALETTE = ("#3d7edb", "#d2691e", "#2a9d6e", "#a765d1", "#c9487b", "#8a8520", "#5f7d8c", "#b5573f")
_GREY = "#7a828c"  # of texts until the page sets its own


@frozen
class Sign:
    """How events of a kind are shown."""

    marker: str
    color: str
    label: str


SIGNS = {
    "checkpoint": Sign("dash", "#7a828c", "checkpoint"),
    "resume": Sign("triangle", "#3d7edb", "resumed"),
    "rollback": Sign("inverted_triangle", "#a765d1", "rolled back"),
    "finding": Sign("diamond", "#d2691e", "finding, such as a spike"),
    "void": Sign("x", "#8a8520", "void step"),
    "skipped": Sign("x", "#2a9d6e", "skipped batch"),
    "held": Sign("x", "#5f7d8c", "update held back"),
    "nan": Sign("square", "#d43c3c", "not finite"),
}
OTHER = Sign("circle", "#5f7d8c", "other event")


def script() -> str:
    """Return the script of Bokeh that shows plots."""
    from bokeh.util.paths import bokehjs_path

    path = Path(bokehjs_path()) / "js" / "bokeh.min.js"
    return path.read_text("utf-8")


def color(number: int) -> str:
    """Return a colour of the palette."""
    return PALETTE[number % len(PALETTE)]


def kinds(plot: Plot) -> list[str]:
    """Return the kinds of the marks of a plot, at most 12, the known ones first."""
    present = {mark.kind for mark in plot.marks}
    return [*(kind for kind in SIGNS if kind in present), *sorted(present - SIGNS.keys())][:12]


def draw(plot: Plot) -> dict[str, Any]:
    """Return the JSON of a plot, for `Bokeh.embed.embed_item`."""
    from bokeh.embed import json_item
    from bokeh.models import BasicTickFormatter, HoverTool, LinearScale, Range1d, SaveTool
    from bokeh.plotting import figure

    shown: Any = figure(
        height=300,
        sizing_mode="stretch_width",
        y_axis_type="log" if plot.is_log else "linear",
        x_axis_label=plot.x_label,
        y_axis_label=plot.y_label,
        tools="box_zoom,pan,wheel_zoom,reset",
        active_drag=None,
        active_scroll=None,
        toolbar_location="above",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        min_border_right=12,
    )
    shown.toolbar.logo = None
    shown.toolbar.autohide = True
    shown.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    shown.xaxis.ticker.desired_num_ticks = 5
    if not plot.is_log:
        shown.yaxis.formatter = BasicTickFormatter(power_limit_low=-4, power_limit_high=7)
    for part in (*shown.xaxis, *shown.yaxis):
        part.update(axis_line_color=None, major_tick_line_color=None, minor_tick_line_color=None)
        part.update(axis_label_text_font_style="normal", axis_label_text_color=_GREY, major_label_text_color=_GREY)
        part.update(axis_label_text_font_size="12px", major_label_text_font_size="12px")
    for grid in (*shown.xgrid, *shown.ygrid):
        grid.update(grid_line_color=_GREY, grid_line_alpha=0.25)
    shown.xgrid.grid_line_color = None
    renderers = [_draw_curve(shown, curve) for curve in plot.curves]
    tips = [("", "$name"), (plot.x_label, "@x{0,0.[0]}"), (plot.y_label, "@y{%.5g}")]
    shown.add_tools(HoverTool(renderers=renderers, tooltips=tips, formatters={"@y": "printf"}))
    shown.add_tools(SaveTool(filename=re.sub(r"\W+", "-", plot.key)[:60]))
    shown.y_range.renderers = renderers  # not the marks, which have a range of their own
    if plot.marks:
        shown.extra_y_ranges, shown.extra_y_scales = {"marks": Range1d(start=0, end=1)}, {"marks": LinearScale()}
        _draw_marks(shown, plot)
    return json_item(shown)  # type: ignore[return-value]


def _draw_curve(shown: Any, curve: Curve) -> Any:
    """Draw the curve; return the part of it that answers to the pointer."""
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource({"x": numpy.asarray(curve.x, float), "y": numpy.asarray(curve.y, float)})
    look = {"line_color": color(curve.color), "line_alpha": curve.alpha, "name": curve.label}
    dash, width = "dashed" if curve.style == "dashed" else "solid", 1 if curve.style == "faint" else 2
    shown.line("x", "y", source=source, line_width=width, line_dash=dash, **look)
    if curve.style == "dots" or len(curve.x) == 1:
        shown.scatter("x", "y", source=source, size=6, fill_color=color(curve.color), **look)
    # A pointer finds a wide line more easily.
    return shown.line("x", "y", source=source, line_width=14, line_alpha=0, name=curve.label)


def _draw_marks(shown: Any, plot: Plot) -> None:
    from bokeh.models import HoverTool

    renderers = []
    for lane, kind in enumerate(kinds(plot)):
        sign = SIGNS.get(kind, OTHER)
        marks = [mark for mark in plot.marks if mark.kind == kind]
        source = {
            "x": numpy.array([mark.x for mark in marks], float),
            "y": [0.03 + 0.05 * lane] * len(marks),
            "text": [mark.text for mark in marks],
        }
        look = {"size": 9, "angle": 1.5708 if sign.marker == "dash" else 0, "marker": sign.marker, "name": kind}
        renderers.append(
            shown.scatter("x", "y", source=source, y_range_name="marks", color=sign.color, line_width=2, **look)
        )
    shown.add_tools(HoverTool(renderers=renderers, tooltips=[("", "$name"), ("step", "@x{0,0}"), ("", "@text")]))
