"""The configs of runs and how they differ, and the machines and versions that they ran with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from attrs import frozen

from hookdiff.disk import read_file
from hookdiff.run_dir import BEGINS, CONFIG, flat
from hookdiff_report.run import ReportedRun
from hookdiff_report.words import count, shortened

_MOST_TEXT = 100_000  # characters of a config
_MOST_VALUE = 300  # characters of a value in a config
_MOST_COLUMNS = 6


@frozen
class Table:
    """Values by name, in columns."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    @classmethod
    def of(cls, columns: Sequence[tuple[str, Mapping[str, str]]]) -> Table:
        """Return the table with these columns, each with its heading."""
        names = dict.fromkeys(name for _, column in columns for name in column)
        rows = [(name, [column.get(name, "") for _, column in columns]) for name in names]
        return cls([head for head, _ in columns], rows)


def config_text(run: ReportedRun) -> str:
    """Return the text of config.toml."""
    try:
        return shortened(read_file(run.history.run_dir / CONFIG).decode("utf-8", "replace"), _MOST_TEXT)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def differences(runs: Sequence[ReportedRun]) -> Table:
    """Return the keys of the configs that are not the same in all runs."""
    table = Table.of([(run.label, dict(_as_json(run.config))) for run in runs])
    return Table(table.heads, [(name, _apart(texts)) for name, texts in sorted(table.rows) if len(set(texts)) > 1])


def _apart(texts: Sequence[str]) -> Sequence[str]:
    """Return short forms of values; the forms of different values differ."""
    plain = [_plain(text) for text in texts]
    if len(set(plain)) == len(set(texts)):
        return plain
    begin = max(0, len(commonprefix([*filter(None, texts)])) - 20)  # noqa: RUF071 of letters, not of paths
    return [f"{'...' if begin and text else ''}{shortened(text[begin:], _MOST_VALUE)}" for text in texts]


def environment(runs: Sequence[ReportedRun]) -> Table:
    """Return machine and versions of the processes of a run: a column for each that differs from the process before.

    With several runs, each run has one column, for its last process.
    """
    columns: list[tuple[str, dict[str, str]]] = []
    for run in runs:
        added: list[tuple[str, dict[str, str]]] = []
        for logged in run.history.events:
            if logged.event.kind in BEGINS and logged.event.details:
                values = _as_json(logged.event.details)
                facts = {name.removeprefix("versions."): _plain(text) for name, text in values}
                facts.pop("steps", None)  # a fact about the run, not the machine
                if not added or facts != added[-1][1]:
                    added.append((f"from step {count(logged.step)}", facts))
        columns += added[-_MOST_COLUMNS:] if len(runs) == 1 else [(run.label, facts) for _, facts in added[-1:]]
    return Table.of(columns)


def _as_json(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values as JSON by their keys, such as "run.steps"."""
    for key, value in flat(table):
        try:
            yield key, json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, RecursionError):  # an integer with thousands of digits
            yield key, "..."


def _plain(text: str) -> str:
    """Return the text of a value in JSON for people: a string has no quotes."""
    return shortened(json.loads(text) if text.startswith('"') else text, _MOST_VALUE)
