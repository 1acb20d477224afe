"""The runs as a table: for a terminal, for a pipe, and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import click
from attrs import define, field

from hookdiff import UserError, nearest, shown
from hookdiff.run_dir import flat
from hookdiff.terminal import in_words
from hookdiff_runs.differences import PLUGINS, as_json, as_text, differences, own_plugins, texts
from hookdiff_runs.rows import Row

_COLORS = {"running": "green", "stopped": "yellow", "crashed": "red", "damaged": "red"}
_NAME, _DIFFERS = "name", "differs"
_COLUMNS = (_NAME, "state", "step", "loss", "age", _DIFFERS)
_HEADS = {_NAME: "run", "loss": "smooth loss"}
_GAP = 2  # columns between two cells
_LEAST, _MOST_PADDED = 12, 40  # columns of a name; a longer name is shortened, or in a pipe moves the rest of its line
_NARROWEST = 24  # columns for the differences; with less room they are left out
_MOST_KEYS, _MOST_TEXT = 12, 100  # keys shown of a run, and characters of each


@define(eq=False, slots=False)
class Runs:
    """The rows of the table, with the metrics and the config differences of all runs."""

    rows: Sequence[Row]
    metrics: Sequence[str] = field(init=False)  # metrics with a best value
    differing: Mapping[Row, Mapping[str, Any]] = field(init=False)  # keys and values
    _texts: Mapping[Row, Sequence[str]] = field(init=False)
    _own_plugins: Mapping[Row, Sequence[str]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.metrics = sorted({name for row in self.rows for name in row.best})
        whole = [row for row in self.rows if row.config]
        differing = differences([row.config for row in whole])
        self.differing = {**{row: {} for row in self.rows}, **dict(zip(whole, differing, strict=True))}
        self._texts = dict(zip(whole, texts(differing), strict=True))
        self._own_plugins = dict(zip(whole, own_plugins(differing), strict=True))

    @property
    def keys(self) -> list[str]:
        """The keys of the configs that differ."""
        return list(dict.fromkeys(key for values in self.differing.values() for key in values))

    @property
    def usual(self) -> list[str]:
        """The columns that the table has by default."""
        return [*_COLUMNS[:4], *self.metrics, *_COLUMNS[4:]]

    @cached_property
    def _configs(self) -> Mapping[Row, Mapping[str, Any]]:
        return {row: dict(flat(row.config)) for row in self.rows}

    def check(self, names: Iterable[str], option: str) -> None:
        """Raise UserError unless each name is a column, a metric or a key of a config."""
        known = dict.fromkeys([*_COLUMNS, *self.metrics, *self.keys])
        for name in names:
            if name not in known and not any(name in config for config in self._configs.values()):
                every = {**known, **dict.fromkeys(key for config in self._configs.values() for key in config)}
                text = f"{option} {name}: no such column{nearest(name, every)}; known: {', '.join(known)}"
                raise UserError(f"{text}, and all keys of the configs")

    def sort(self, key: str) -> None:
        """Sort by a column, a metric or a key of the config; runs without a value come last."""
        self.check([key], "--sort")

        def place(row: Row) -> tuple[bool, bool, Any]:
            value = -row.time if key == "age" else self._value(row, key)
            is_number = isinstance(value, int | float)
            missing = value is None or (is_number and math.isnan(value))
            return missing, not is_number, 0 if missing else value if is_number else str(value)

        self.rows = sorted(self.rows, key=place)

    def as_values(self) -> list[dict[str, Any]]:
        """Return the rows as values of JSON; an unknown value is null."""
        return [
            {
                "name": row.name,
                "state": row.state,
                "problem": row.problem or None,
                "step": row.step,
                "steps": row.steps,
                "loss": _finite(row.loss),
                "best": {name: {"value": value, "step": step} for name, (value, step) in row.best.items()},
                "time": _finite(row.time),
                "differs": {key: as_json(value) for key, value in self.differing[row].items()},
            }
            for row in self.rows
        ]

    def table(self, columns: Sequence[str], width: int | None, is_diff: bool = False) -> list[str]:
        """Return the lines of the table, at most `width` wide: the heads, the runs, and the names of missing columns.

        If `width` is None, as in a pipe, no column is missing. `is_diff`: run.plugins has what not all runs have.
        """
        lines = [[shown(_HEADS.get(name, name)) for name in columns]]
        text = self._difference if is_diff else self._text
        lines += [[text(row, name) for name in columns] for row in self.rows]
        sizes = [max(_size(line[k]) for line in lines) for k in range(len(columns))]
        sizes = [min(size, _MOST_PADDED) if name == _NAME else size for name, size in zip(columns, sizes, strict=True)]
        missing: list[str] = []
        if width is not None:
            places, sizes = _fitted(columns, sizes, width)
            missing = [name for k, name in enumerate(columns) if k not in places]
            columns, lines = [columns[k] for k in places], [[line[k] for k in places] for line in lines]
        states = ["", *(_COLORS.get(row.state, "") for row in self.rows)]
        rendered = [
            _line(columns, line, sizes, state, is_cut=width is not None)
            for line, state in zip(lines, states, strict=True)
        ]
        if missing:
            note = f"not shown: {', '.join(map(shown, missing))}; choose with --columns, or see --json"
            rendered += ["", *click.wrap_text(note, width or 0).split("\n")]
        return rendered

    def _value(self, row: Row, name: str) -> Any:
        if name in row.best:
            return row.best[name][0]
        known = {_NAME: row.name, "state": row.state, "step": row.step, "loss": row.loss}
        return known[name] if name in known else self.differing[row].get(name, self._configs[row].get(name))

    def _text(self, row: Row, name: str) -> str:
        """Return a cell."""
        match name:
            case "name" | "state":
                return shown(row.name if name == _NAME else row.state)
            case "step":
                return f"{row.step:,}" if row.steps is None else f"{row.step:,}/{row.steps:,}"
            case "loss":
                return f"{row.loss:.4g}" if row.has_loss else "-"
            case "age":
                return _age(row.time)
            case "differs":
                return "  ".join(self._differs(row))
        if name in self.metrics:
            return f"{row.best[name][0]:.4g} @{row.best[name][1]:,}" if name in row.best else "-"
        value = self._value(row, name)
        return "-" if value is None else shown(_shortened(as_text(value)))

    def _difference(self, row: Row, name: str) -> str:
        """Return a cell of a table of the differences."""
        if name == PLUGINS and any(self._own_plugins.values()):  # else the same plugins stand in another order
            return shown(_shortened(",".join(self._own_plugins.get(row, ())))) or "-"
        return self._text(row, name)

    def _differs(self, row: Row) -> list[str]:
        """Return "key=value" for the keys in which the configs differ, or why the run directory cannot be read."""
        if row.problem:
            return [row.problem]
        pairs = [shown(_shortened(text)) for text in self._texts[row]]
        more = len(pairs) - _MOST_KEYS
        return [*pairs[:_MOST_KEYS], f"and {more} more"] if more > 0 else pairs


def _fitted(columns: Sequence[str], sizes: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Return the places of the columns that fit, and their sizes; name and differences take less if they have to."""
    least = [
        min(size, {_NAME: _LEAST, _DIFFERS: _NARROWEST}.get(n, size)) for n, size in zip(columns, sizes, strict=True)
    ]
    places: list[int] = []
    for place in range(len(columns)):
        if sum(least[k] + _GAP for k in places) + least[place] <= width:
            places.append(place)
    places = places or [0]
    chosen, room = [least[k] for k in places], width - sum(least[k] + _GAP for k in places) + _GAP
    for at, place in enumerate(places):  # the name first
        more = min(sizes[place] - least[place], max(0, room))
        chosen[at], room = chosen[at] + more, room - more
    return places, chosen


def _line(columns: Sequence[str], cells: Sequence[str], sizes: Sequence[int], color: str, is_cut: bool) -> str:
    parts = []
    for name, cell, size in zip(columns, cells, sizes, strict=True):
        over = _size(cell) - size
        if over > 0 and is_cut:
            cell = _begin(cell[::-1], size)[::-1] if name == _NAME else _begin(cell, size)  # names differ at their ends
        padding = " " * (max(0, size - _size(cell)) + _GAP)
        parts.append((click.style(cell, color) if name == "state" and color and is_cut else cell) + padding)
    return "".join(parts).rstrip()


def _begin(text: str, size: int) -> str:
    from rich.cells import set_cell_size

    return set_cell_size(text, max(0, size - 3)) + "..."[:size]


def _size(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _age(moment: float) -> str:
    """Return the time since `moment`, roughly; "-" if it is not known."""
    seconds = time.time() - moment
    return in_words(max(0.0, seconds)) if seconds < 1e12 else "-"  # clocks of machines differ
