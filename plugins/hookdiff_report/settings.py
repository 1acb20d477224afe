"""The configs of runs and how they differ, and the machines and versions that they ran with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define

from hookdiff.disk import CONFIG, read_file
from hookdiff_report.facts import Run, count
from hookdiff_report.timeline import shortened

_MOST_TEXT = 100_000  # letters of a config
_MOST_COLUMNS = 6


@define(frozen=True)
class Table:
    """Names beside the values of several runs."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def config_text(run: Run) -> str:
    """Return the text of config.toml."""
    try:
        return shortened(read_file(run.history.run_dir / CONFIG).decode("utf-8", "replace"), _MOST_TEXT)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def differences(runs: Sequence[Run]) -> Table:
    """Return the keys of the configs that are not the same in all runs."""
    flat = [_flat(run.config) for run in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [one.get(key, "") for one in flat]) for key in keys]
    return Table([run.label for run in runs], [row for row in rows if len(set(row[1])) > 1])


def environment(runs: Sequence[Run]) -> Table:
    """Return what the processes of the runs ran with: a column for each that differs from the one before."""
    columns: list[tuple[str, dict[str, str]]] = []
    for run in runs:
        found: list[tuple[str, dict[str, str]]] = []
        for logged in run.history.events:
            details = logged.event.details
            if logged.event.kind in ("start", "resume") and details:
                versions = details.get("versions")
                others = {name: _text(value) for name, value in details.items() if name != "versions"}
                flat = {**others, **{name: _text(value) for name, value in _mapping(versions).items()}}
                if not found or flat != found[-1][1]:
                    found.append((f"from step {count(logged.step)}", flat))
        if len(runs) > 1:
            found = [(run.label, flat) for _, flat in found[-1:]]
        columns += found
    columns = columns if len(runs) > 1 else columns[-_MOST_COLUMNS:]
    names = list(dict.fromkeys(name for _, flat in columns for name in flat))
    heads = [head for head, _ in columns]
    return Table(heads, [(name, [flat.get(name, "") for _, flat in columns]) for name in names])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _flat(table: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", table)]  # no recursion: tables may be nested without end
    while waiting:
        prefix, inner = waiting.pop()
        for name, value in inner.items():
            if isinstance(value, dict) and value:
                waiting.append((f"{prefix}{name}.", value))
            else:
                found[f"{prefix}{name}"] = _text(value)
    return found


def _text(value: object) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # an integer with thousands of digits
        text = "..."
    return shortened(text, 300)
