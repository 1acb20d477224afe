"""Reads the configs of many runs. Most of their tables are the same, and a text is parsed once."""

import re
from collections.abc import Mapping
from typing import Any

import tomli
from attrs import define, field

from hookdiff.disk import read_file
from hookdiff.run_dir import CONFIG, History

_HEAD = re.compile(r"^(?=\[)", re.MULTILINE)
_UNUSUAL = ("[[", '"""', "'''")  # tables that are no pieces of text


@define(eq=False)
class Configs:
    """Configs that were read, by the text of each table."""

    _tables: dict[str, Mapping[str, Any]] = field(init=False, factory=dict)

    def read(self, history: History) -> Mapping[str, Any]:
        """Return the config of a run, with tables that other configs share; raises UserError as `History` does."""
        try:
            text = read_file(history.run_dir / CONFIG).decode()
            if any(mark in text for mark in _UNUSUAL):
                return history.config
            return self._joined([self._table(piece) for piece in _HEAD.split(text)])
        except (OSError, ValueError, RecursionError):
            return history.config

    def _table(self, text: str) -> Mapping[str, Any]:
        if text not in self._tables:
            self._tables[text] = tomli.loads(text)
        return self._tables[text]

    def _joined(self, tables: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the tables as one; raises ValueError if two have a key."""
        whole: dict[str, Any] = {}
        made_here: set[int] = set()  # of the dicts that were made here; the others are tables of other configs too
        for table in tables:
            place, rest = whole, table
            while rest:
                (name, inner), *others = rest.items()
                if others or not isinstance(inner, dict):
                    if not place.keys().isdisjoint(rest):
                        raise ValueError(name)
                    place.update(rest)
                    break
                if not isinstance(inside := place.setdefault(name, {}), dict):
                    raise ValueError(name)
                if id(inside) not in made_here:
                    place[name] = inside = dict(inside)
                    made_here.add(id(inside))
                place = inside
                rest = inner
        return whole
