"""The keys in which the configs of several runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hookdiff.run_dir import flat

_OWN = {"run.name", "run.import_from"}  # these differ between runs that train the same
PLUGINS = "run.plugins"
_MISSING = "(not set)"


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of the keys, as "table.key", that are not the same in all configs: a dict for each config.

    A key that only some configs have is a difference if the others have the same part in that table. So for a plugin
    that not all runs have, only run.plugins differs; for another network, model.use and shared keys differ.
    """
    values = [dict(flat(config)) for config in configs]
    differing: list[dict[str, Any]] = [{} for _ in configs]
    for key in dict.fromkeys(key for each in values for key in each):
        if key in _OWN or _is_common([each.get(key, _MISSING) for each in values]):
            continue
        kinds = [_kind(config, key) for config in configs]
        present = {kind for kind, each in zip(kinds, values, strict=True) if key in each}
        compared = [n for n, kind in enumerate(kinds) if key in values[n] or kind in present]
        if len({as_text(values[n].get(key, _MISSING)) for n in compared}) > 1:
            for n in compared:
                differing[n][key] = values[n].get(key)
    return differing


def _is_common(values: Sequence[Any]) -> bool:
    """Return whether a quick comparison shows that all values are the same, as they are for most keys."""
    first, kind = values[0], type(values[0])
    if kind in (list, float):  # 1 equals 1.0 inside a list, and NaN does not equal itself
        return len(set(map(repr, values))) == 1
    return all(type(value) is kind and value == first for value in values)


def texts(differing: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return differences as "key=value", and for run.plugins as "with a,b", the plugins that not all runs have."""
    result = []
    for values, plugins in zip(differing, own_plugins(differing), strict=True):
        pairs = {name: f"{name}={_MISSING if value is None else as_text(value)}" for name, value in values.items()}
        if isinstance(values.get(PLUGINS), list):
            pairs[PLUGINS] = f"with {','.join(plugins)}" if plugins else ""
        result.append([*filter(None, pairs.values())])
    return result


def own_plugins(differing: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the plugins of each run that not all runs have."""
    lists = [value if isinstance(value := values.get(PLUGINS), list) else None for values in differing]
    names = [[as_text(plugin) for plugin in plugins] for plugins in lists if plugins is not None]
    common = set.intersection(*map(set, names)) if names else set()
    return [[name for name in map(as_text, plugins or ()) if name not in common] for plugins in lists]


def as_text(value: object) -> str:
    """Return a value of TOML as text."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # an integer with thousands of digits
        return "..."


def as_json(value: object) -> object:
    """Return a value of TOML as a value of JSON, which has no NaN, no infinity and no dates."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | str):
        return value
    return value if isinstance(value, int | float) and abs(value) < 1e300 else as_text(value)


def _kind(config: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """Return the parts that are used in the tables around `key`; None if there is no such table."""
    table: Any = config
    uses = []
    for name in key.split(".")[:-1]:
        table = table.get(name)
        if not isinstance(table, dict):
            return None
        uses.append(as_text(table.get("use", "")))
    return tuple(uses)
