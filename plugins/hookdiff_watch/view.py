"""Shows a run on a terminal of any size, as lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define

from hookdiff import shown
from hookdiff.run_dir import LoggedEvent
from hookdiff.terminal import duration, flow, rate, step_label
from hookdiff_watch.canvas import DottedCurve, chart
from hookdiff_watch.followed import Followed
from hookdiff_watch.picture import half_blocks

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {"running": "bold green", "done": "bold green", "stopped": "bold yellow", "crashed": "bold red"}
_SEVERITIES = {"error": "red", "warning": "yellow"}
_MOST_NOTES = 8  # most events shown
_SIDE_BY_SIDE = 72  # columns of a terminal that has samples beside the curves
_LEAST = 5  # least lines of curves or samples
_SMALLEST = 22  # columns of a small curve
_GAP = 2  # columns between two parts


@define(frozen=True)
class Screen:
    """A terminal, or a pipe."""

    width: int
    height: int
    has_blocks: bool  # the terminal shows braille and block characters
    has_colours: bool  # 256 or more, which pictures need


def view(run: Followed, screen: Screen) -> list[Text]:
    """Return at most `screen.height` lines of at most `screen.width` columns."""
    from rich.text import Text

    head = [*_head(run, screen), *_flow(_values(run), screen)]
    most = max(1, min(_MOST_NOTES, screen.height // 5))
    notes = [_note(*note) for note in _newest(run.notes, most)]
    if run.picture and not screen.has_colours:
        head.append(Text(shown(f"samples: {run.picture}")))
    rows = screen.height - len(head) - len(notes) - 2
    body = _body(run, screen, rows) if rows >= _LEAST and screen.has_blocks else []
    parts = [part for part in (head, body, notes) if part]
    lines = [line for part in parts for line in [*part, Text()]][:-1]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis" if screen.has_blocks else "crop"
        line.truncate(screen.width, overflow=line.overflow)
    return lines[: screen.height]


def _head(run: Followed, screen: Screen) -> list[Text]:
    from rich.text import Text

    name = Text(shown(run.run_dir.resolve().name), "bold")
    parts = [name, Text(run.state, _STYLES.get(run.state, "bold"))]
    parts.append(Text(step_label(run.step, run.total)))
    if run.state == "running":
        parts += map(Text, _pace(run))
    if run.message:
        parts.append(Text(shown(run.message), "yellow"))
    lines = _flow(parts, screen)
    if run.total is not None and screen.has_blocks:
        filled = min(screen.width, screen.width * run.step // run.total)
        lines.append(Text.assemble(("\u2501" * filled, "green"), ("\u2500" * (screen.width - filled), "dim")))
    return lines


def _pace(run: Followed) -> list[str]:
    parts = []
    if run.speed is not None:
        parts.append(rate(run.speed, "steps/s"))
        if run.batch_size is not None:
            parts.append(rate(run.speed * run.batch_size))
    if run.left is not None:
        parts.append(f"ETA {duration(run.left)}")
    if run.age is not None:
        parts.append(f"last line {duration(run.age)} ago")
    return parts


def _values(run: Followed) -> list[Text]:
    """Return the newest value of each name, and the lowest FID."""
    from rich.text import Text

    parts = []
    for name in run.names:
        values = run.series[name]
        text = f"{name} {values[max(values)]:.4g}"
        finite = [(value, step) for step, value in values.items() if math.isfinite(value)]
        if "/" in name and not name.startswith("loss/") and len(finite) > 1:
            lowest, step = min(finite)
            text = f"{text} (best {lowest:.4g} at step {step:,})"
        parts.append(Text(shown(text)))
    return parts


def _body(run: Followed, screen: Screen, rows: int) -> list[Text]:
    """Return the curves and the samples, side by side or, on a narrow terminal, one below the other."""
    if not (run.picture and screen.has_colours):
        return _curves(run, screen.width, rows)
    if screen.width >= _SIDE_BY_SIDE:
        left = screen.width * 3 // 5
        curves = _curves(run, left, rows)
        return _beside([curves, half_blocks(run.picture, screen.width - left - _GAP, rows)], left)
    if rows < 2 * _LEAST + 1:
        return _curves(run, screen.width, rows)
    curves = _curves(run, screen.width, rows // 2)
    return [*curves, *half_blocks(run.picture, screen.width, rows - len(curves))]


def _curves(run: Followed, width: int, rows: int) -> list[Text]:
    """Return the loss, and below it small curves of the other values that fit."""
    from rich.text import Text

    styles = {"loss": "cyan", "loss/smooth": "magenta"}  # the last curve is drawn over the other
    losses = [DottedCurve.of(run.series[name], style) for name, style in styles.items() if name in run.series]
    others = [name for name in run.names if name not in styles]
    others.sort(key=lambda name: name in ("grad_norm", "lr"))  # sorts the FID first
    others = others[: max(1, (width + _GAP) // (_SMALLEST + _GAP))] if rows >= 2 * _LEAST or not losses else []
    small = max(_LEAST, rows // 3) if others and losses else rows
    lines = []
    if losses:
        title = Text("  ").join(Text(name, f"bold {style}") for name, style in styles.items() if name in run.series)
        lines = chart(title, losses, width, rows - small if others else rows, is_log=True, with_axis=True)
    if others:
        each = (width + _GAP) // len(others) - _GAP
        parts = []
        for name in others:
            heading, curve = Text(shown(name), "bold cyan"), DottedCurve.of(run.series[name], "cyan")
            parts.append(chart(heading, [curve], each, small, is_log=name != "lr", with_axis=False))
        lines += _beside(parts, each)
    return lines


def _beside(parts: Sequence[list[Text]], width: int) -> list[Text]:
    """Return the lines of parts side by side; each part but the last gets `width` columns."""
    from rich.text import Text

    lines = []
    for row in range(max(map(len, parts))):
        line = Text()
        for number, part in enumerate(parts):
            piece = part[row].copy() if row < len(part) else Text()
            if number < len(parts) - 1:
                piece.truncate(width, overflow="ellipsis", pad=True)
                piece.append(" " * _GAP)
            line.append_text(piece)
        lines.append(line)
    return lines


def _flow(parts: Sequence[Text], screen: Screen) -> list[Text]:
    """Return the parts with gaps between them, in as many lines as they need."""
    for part in parts:
        part.truncate(screen.width, overflow="ellipsis" if screen.has_blocks else "crop")
    return flow(parts, screen.width, len(parts))


def _newest(notes: Sequence[tuple[LoggedEvent, int]], most: int) -> list[tuple[LoggedEvent, int]]:
    """Return the newest `most` events in their order; up to half of them are the newest warnings and errors."""
    places = range(len(notes))
    serious = [place for place in places if notes[place][0].event.severity in _SEVERITIES][-max(1, most // 2) :]
    others = [place for place in places if place not in serious]
    chosen = [*serious, *others[max(0, len(others) - most + len(serious)) :]]
    return [notes[place] for place in sorted(chosen)]


def _note(logged: LoggedEvent, number: int) -> Text:
    """Return one line about an event, with the first line of its text."""
    from rich.text import Text

    event = logged.event
    times = f" ({number:,} times)" if number > 1 else ""
    text = f"step {logged.step:,}  {event.kind}{times}: {event.text.partition(chr(10))[0]}"
    return Text(shown(text), _SEVERITIES.get(event.severity, "dim"))
