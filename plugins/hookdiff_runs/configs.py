"""Reads the configs of many runs. Most of their tables are the same, and equal texts are parsed once."""

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

import tomli
from attrs import define, field

from hookdiff.disk import read_file
from hookdiff.run_dir import CONFIG, History

_HEAD = re.compile(r"^(?=\[)", re.MULTILINE)
_UNUSUAL = ("[[", '"""', "'''")  # a text with one of these is parsed as a whole, not table by table


@define(eq=False)
class Configs:
    """A cache of the parsed tables of configs, by the texts of the tables."""

    _tables: dict[str, Mapping[str, Any]] = field(init=False, factory=dict)

    def read(self, history: History) -> Mapping[str, Any]:
        """Return the config of a run, with tables that other configs share; raises UserError as `History` does."""
        try:
            text = read_file(history.run_dir / CONFIG).decode()
            if any(mark in text for mark in _UNUSUAL):
                return history.config
            return reduce(_merged, map(self._table, _HEAD.split(text)))
        except (OSError, ValueError, RecursionError):
            return history.config

    def _table(self, text: str) -> Mapping[str, Any]:
        if text not in self._tables:
            self._tables[text] = tomli.loads(text)
        return self._tables[text]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return two tables as one, without changing them; raises ValueError if both have a value for one key."""
    whole = dict(first)
    for key, value in second.items():
        if key not in whole:
            whole[key] = value
        elif isinstance(whole[key], dict) and isinstance(value, dict):
            whole[key] = _merged(whole[key], value)
        else:
            raise ValueError(key)
    return whole
