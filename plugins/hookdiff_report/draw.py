"""Draws the plots of a report with Bokeh, as JSON that its script in the page shows."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from hookdiff_report.curves import Plot, PlottedCurve
from hookdiff_report.words import shortened

# Each colour has a contrast ratio of at least 3 on the white and on the dark page.
PALETTE = ("#3d7edb", "#d2691e", "#2a9d6e", "#a765d1", "#c9487b", "#8a8520", "#5f7d8c", "#b5573f")
GOAL = "#1d8a4e"
_GREY = "#7a828c"  # colour of texts, until the page sets its own
_MOST_KINDS = 12


@frozen
class Sign:
    """How events of a kind are shown."""

    marker: str
    color: str
    label: str


_SIGNS = {
    "checkpoint": Sign("dash", "#7a828c", "checkpoint"),
    "resume": Sign("triangle", "#3d7edb", "resumed"),
    "rollback": Sign("inverted_triangle", "#a765d1", "rolled back"),
    "finding": Sign("diamond", "#d2691e", "finding, such as a spike"),
    "void": Sign("x", "#8a8520", "void step"),
    "skipped": Sign("x", "#2a9d6e", "skipped batch"),
    "held": Sign("x", "#5f7d8c", "update held back"),
    "nan": Sign("square", "#d43c3c", "not finite"),
}


def script() -> str:
    """Return the script of Bokeh that shows plots."""
    from bokeh.util.paths import bokehjs_path

    return (Path(bokehjs_path()) / "js" / "bokeh.min.js").read_text("utf-8")


def color(number: int) -> str:
    """Return a colour of the palette."""
    return PALETTE[number % len(PALETTE)]


def signs(plot: Plot) -> dict[str, Sign]:
    """Return the signs of the marks of a plot by kind, the known kinds first."""
    others = sorted({mark.kind for mark in plot.marks} - _SIGNS.keys())
    known = {**_SIGNS, **{kind: Sign("circle", "#5f7d8c", shortened(kind, 60)) for kind in others}}
    present = {kind: sign for kind, sign in known.items() if any(mark.kind == kind for mark in plot.marks)}
    return dict(list(present.items())[:_MOST_KINDS])


def draw(plot: Plot) -> Any:
    """Return the JSON of a plot, for `Bokeh.embed.embed_item`."""
    from bokeh.embed import json_item
    from bokeh.models import HoverTool, LogTicker, NumeralTickFormatter, PrintfTickFormatter, SaveTool
    from bokeh.models.annotations import Span
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
    shown.toolbar.update(logo=None, autohide=True)
    is_by_step = plot.x_label == "step"
    shown.xaxis.formatter = NumeralTickFormatter(format="0,0" if is_by_step else "0.[0]")
    shown.xaxis.ticker.desired_num_ticks = 5
    low, high = plot.range
    # Plain numbers, with no power of ten: 0.0001 and 12,000.
    is_large = max(abs(low), abs(high)) >= 10_000
    shown.yaxis.formatter = NumeralTickFormatter(format="0,0") if is_large else PrintfTickFormatter(format="%.4g")
    if not plot.is_log and low == high:
        shown.y_range.default_span = abs(low) or 1.0
    # In a narrow range Bokeh places ticks as on a linear axis; below a ratio of 1000, the low end would have no ticks.
    elif plot.is_log and 5 * low < high < 1000 * low:
        shown.yaxis.ticker = LogTicker(base=2)
    for axis in (*shown.xaxis, *shown.yaxis):
        axis.update(axis_line_color=None, major_tick_line_color=None, minor_tick_line_color=None)
        axis.update(axis_label_text_font_style="normal", axis_label_text_color=_GREY, major_label_text_color=_GREY)
        axis.update(axis_label_text_font_size="12px", major_label_text_font_size="12px")
    shown.xgrid.grid_line_color = None
    shown.ygrid.grid_line_color, shown.ygrid.grid_line_alpha = _GREY, 0.25
    renderers = [_draw_curve(shown, curve) for curve in plot.curves]
    tips = [("", "$name"), (plot.x_label, "@x{0,0.[0]}"), (plot.y_label, "@y{%.5g}")]
    shown.add_tools(HoverTool(renderers=renderers, tooltips=tips, formatters={"@y": "printf"}))
    shown.add_tools(SaveTool(filename=re.sub(r"\W+", "-", plot.key)[:60]))
    shown.y_range.renderers = renderers  # without the marks, which have a range of their own
    if plot.marks:
        _draw_marks(shown, plot)
    for goal in plot.goals:
        shown.add_layout(Span(location=goal, dimension="width", line_color=GOAL, line_width=2, line_dash="dotted"))
    if plot.goals:
        shown.y_range = _range([low, high, *plot.goals], plot.is_log)
    if is_by_step:  # the slider of the page moves this line
        shown.add_layout(Span(name="step", dimension="height", line_color=_GREY, line_width=1.5, visible=False))
    return json_item(shown)


def _range(values: Sequence[float], is_log: bool) -> Any:
    """Return a range with all values in it."""
    from bokeh.models import Range1d

    low, high = min(values), max(values)
    if is_log and low > 0:
        return Range1d(start=low / (high / low) ** 0.05, end=high * (high / low) ** 0.05)
    room = 0.05 * (high - low) or 1.0
    return Range1d(start=low - room, end=high + room)


def _draw_curve(shown: Any, curve: PlottedCurve) -> Any:
    """Draw the curve, and return its part that shows values at the pointer."""
    from bokeh.models import ColumnDataSource

    if curve.low is not None:
        columns: Any = {"x": curve.x, "y": curve.y, "low": curve.low}
        look: Any = {"fill_color": color(curve.color), "fill_alpha": 0.22, "level": "underlay"}
        return shown.varea("x", "low", "y", source=ColumnDataSource(columns), name=curve.label, **look)
    points: Any = {"x": "x", "y": "y", "source": ColumnDataSource({"x": curve.x, "y": curve.y}), "name": curve.label}
    is_faint, dash = curve.style == "faint", "dashed" if curve.style == "dashed" else "solid"
    look = {"line_color": color(curve.color), "line_alpha": 0.45 if is_faint else curve.alpha}
    level = "underlay" if is_faint else "glyph"  # drawn below the other curves
    shown.line(**points, **look, line_width=1 if is_faint else 2, line_dash=dash, level=level)
    if curve.style == "dots" or len(curve.x) == 1:
        shown.scatter(**points, **look, size=6, fill_color=color(curve.color))
    # A pointer finds a wide line more easily.
    return shown.line(**points, line_width=14, line_alpha=0)


def _draw_marks(shown: Any, plot: Plot) -> None:
    from bokeh.models import HoverTool, LinearScale, Range1d

    shown.extra_y_ranges, shown.extra_y_scales = {"marks": Range1d(start=0, end=1)}, {"marks": LinearScale()}
    renderers = []
    for lane, (kind, sign) in enumerate(signs(plot).items()):
        marks = [mark for mark in plot.marks if mark.kind == kind]
        columns = {"x": [mark.step for mark in marks], "text": [mark.text for mark in marks]}
        look: Any = {"marker": sign.marker, "angle": 1.5708 if sign.marker == "dash" else 0, "color": sign.color}
        source = {**columns, "y": [0.03 + 0.05 * lane] * len(marks)}
        renderers.append(
            shown.scatter("x", "y", source=source, name=kind, y_range_name="marks", size=9, line_width=2, **look)
        )
    shown.add_tools(HoverTool(renderers=renderers, tooltips=[("", "$name"), ("step", "@x{0,0}"), ("", "@text")]))
