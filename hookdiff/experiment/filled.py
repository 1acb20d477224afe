"""Fills open keys of a config with what a part knows, such as the process of a pretrained network."""

import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from hookdiff.options.fitted import Elsewhere

logger = logging.getLogger("hookdiff")


def fill(tables: dict[str, Any], known: Elsewhere, by: str) -> list[str]:
    """Set the keys of `tables` that are open to the values in `known`, and return them, as "diffusion.process".

    Warn of facts for which `tables` have another value. `by` names the part that knows the values.
    """
    filled = list[str]()
    _move(tables, known.moved)
    for values, are_facts in ((known.facts, True), (known.defaults, False)):
        for place, given, value in _fill(tables, values, filled):
            if are_facts:
                logger.warning("%s = %s, but %s has %s", place, _shown(given), by, _shown(value))
    for text in known.warnings:
        logger.warning("%s", text)
    return filled


def _fill(
    table: dict[str, Any], values: Mapping[str, Any], filled: list[str], where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place, the value of `table` and the other value wherever these differ."""
    for key, value in values.items():
        place, given = f"{where}{key}", table.get(key)
        if key not in table:
            table[key] = deepcopy(value)
            filled.append(place)
        elif not isinstance(value, Mapping):
            if value not in (given, given.get("use") if isinstance(given, Mapping) else None):
                yield place, given, value
        elif "use" in value and _as_table(given).get("use", value["use"]) != value["use"]:
            yield place, given, value
        else:
            table[key] = _as_table(given)
            yield from _fill(table[key], value, filled, f"{place}.")


def _move(table: dict[str, Any], moved: Mapping[str, Any]) -> None:
    for key, value in moved.items():
        if isinstance(value, Mapping):
            _move(table[key], value)
        else:
            table[key] = value


def _as_table(given: Any) -> dict[str, Any]:
    """Return the table of a part, of which a config may give the name alone."""
    return given if isinstance(given, dict) else {"use": str(given)}


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_shown(each)}' for key, each in value.items())} }}"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
