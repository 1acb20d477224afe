"""The runs as a table: for a terminal, for a pipe, and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from hookdiff import UserError, nearest, shown
from hookdiff_runs.differences import as_json, differences, texts
from hookdiff_runs.rows import Row

_STYLES = {"running": "green", "stopped": "yellow", "crashed": "red", "damaged": "red"}
_GAP = 2  # columns between two cells
_LEAST, _MOST_PADDED = 12, 40  # columns of a name; a longer one is wrapped, or in a pipe moves the rest of its line
_MOST_KEYS, _MOST_TEXT = 12, 100  # of a run, and letters of each
_NARROWEST = 40  # columns for the differences; with less room they get lines of their own
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@define(eq=False)
class Runs:
    """The rows and what they have in common."""

    rows: Sequence[Row]
    metrics: Sequence[str] = field(init=False)  # with a best value
    differing: Mapping[Row, Mapping[str, Any]] = field(init=False)  # keys and values
    _texts: Mapping[Row, Sequence[str]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.metrics = sorted({name for row in self.rows for name in row.best})
        whole = [row for row in self.rows if row.config]
        found = differences([row.config for row in whole])
        self.differing = {**{row: {} for row in self.rows}, **dict(zip(whole, found, strict=True))}
        self._texts = dict(zip(whole, texts(found), strict=True))

    def sort(self, key: str) -> None:
        """Sort by a column, a metric or a key of the config; runs without a value come last."""
        columns: dict[str, Callable[[Row], Any]] = {
            "name": lambda row: row.name,
            "state": lambda row: row.state,
            "step": lambda row: row.step,
            "loss": lambda row: row.loss,
            "age": lambda row: -row.time,
        }
        known = [*columns, *self.metrics, *dict.fromkeys(key for one in self.differing.values() for key in one)]
        if key not in known:
            raise UserError(f"--sort {key}: no such column{nearest(key, known)}; known: {', '.join(known)}")

        def place(row: Row) -> tuple[bool, bool, Any]:
            others = {**self.differing[row], **{name: best for name, (best, _) in row.best.items()}}
            value = columns[key](row) if key in columns else others.get(key)
            is_number = isinstance(value, int | float)
            missing = value is None or (is_number and math.isnan(value))
            return missing, not is_number, 0 if missing else value if is_number else str(value)

        self.rows = sorted(self.rows, key=place)

    def as_values(self) -> list[dict[str, Any]]:
        """Return the rows as values of JSON; null stands for what is not known."""
        return [
            {
                "name": row.name,
                "state": row.state,
                "problem": row.problem or None,
                "step": row.step,
                "steps": row.steps,
                "loss": _finite(row.loss),
                "loss_name": row.loss_name or None,
                "best": {name: {"value": value, "step": step} for name, (value, step) in row.best.items()},
                "time": _finite(row.time),
                "differs": {key: as_json(value) for key, value in self.differing[row].items()},
            }
            for row in self.rows
        ]

    def as_text(self) -> str:
        lines = [self._heads, *([*self._cells(row), "  ".join(self._differs(row))] for row in self.rows)]
        widths = [min(_MOST_PADDED, max(len(line[k]) for line in lines)) for k in range(len(lines[0]) - 1)]
        padded = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)] + line[-1:] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def print(self) -> None:
        """Print a table that fits on the terminal."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False)
        *heads, last = self._heads
        lines = [self._cells(row) for row in self.rows]
        widths = [max(len(line[k]) for line in [heads, *lines]) + _GAP for k in range(len(heads))]
        while len(widths) > 2 and _LEAST + sum(widths[1:]) > console.width:
            widths.pop()  # the last columns do not fit
        differs = [self._differs(row) for row in self.rows]
        name, room = max(_LEAST, min(widths[0], _MOST_PADDED)), console.width - sum(widths[1:]) - _NARROWEST
        is_wide = any(differs) and room >= min(name, _MOST_PADDED // 2)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP, 0, 0), show_edge=False)
        table.add_column(heads[0], overflow="fold", min_width=_LEAST, max_width=min(name, room) if is_wide else name)
        for head in heads[1 : len(widths)]:
            table.add_column(head, no_wrap=True)
        if is_wide:
            table.add_column(last, overflow="fold")
        for row, line, found in zip(self.rows, lines, differs, strict=True):
            styles = ["", _STYLES.get(row.state, ""), *[""] * len(line)]
            cells = [Text(cell, style) for cell, style in zip(line[: len(widths)], styles, strict=False)]
            table.add_row(*cells, *[Text("  ".join(found))] * is_wide)
        console.print(table)
        if any(differs) and not is_wide:
            below = Table.grid(padding=(0, _GAP, 0, 0))
            below.add_column(overflow="fold", max_width=console.width // 3)
            below.add_column(overflow="fold")
            for row, found in zip(self.rows, differs, strict=True):
                below.add_row(Text(shown(row.name)), Text("  ".join(found)))
            console.print(f"\n{last}:", style="bold")
            console.print(below)

    @property
    def _heads(self) -> list[str]:
        return ["run", "state", "step", "loss", *map(shown, self.metrics), "age", "differs"]

    def _cells(self, row: Row) -> list[str]:
        """Return the cells without the last one."""
        best = [f"{row.best[name][0]:.4g} @{row.best[name][1]}" if name in row.best else "-" for name in self.metrics]
        step = str(row.step) if row.steps is None else f"{row.step}/{row.steps}"
        loss = f"{row.loss:.4g}" if row.loss_name else "-"
        return [shown(row.name), row.state, step, loss, *best, _age(row.time)]

    def _differs(self, row: Row) -> list[str]:
        """Return "key=value" for the keys in which the configs differ, or why the run directory cannot be read."""
        if row.problem:
            return [row.problem]
        found = [shown(text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}...") for text in self._texts[row]]
        more = len(found) - _MOST_KEYS
        return [*found[:_MOST_KEYS], f"and {more} more"] if more > 0 else found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _age(moment: float) -> str:
    """Return the time since `moment` in its largest unit: "12 s", "5 min", "3 h" or "12 d"."""
    seconds = max(0.0, time.time() - moment)  # clocks of machines differ
    if not seconds < 1e12:
        return "-"
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
    return f"{int(seconds // size)} {unit}"
