"""A whole config as TOML: one line a key, marks of the keys that are set, and the help of keys without a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tomli_w
from attrs import define

from hookdiff.errors import UserError, nearest, shown
from hookdiff.experiment.config import Config
from hookdiff.experiment.part import Part
from hookdiff.options.choices import Choice
from hookdiff.options.help import keys
from hookdiff.options.structure import described, fields_of, options_of, parameters

SET = "# set"  # behind a key that the config or the command line sets
FILLED = "# of the model"  # behind a key that a part, such as a pretrained network, sets

Path = tuple[str, ...]


@define(frozen=True)
class Table:
    """A table of a config, without the tables inside it."""

    path: Path
    values: Mapping[str, Any]
    has_tables: bool
    without_value: Mapping[str, str]  # the help of keys that have no value

    @property
    def name(self) -> str:
        """The name, such as "plugins.ema"."""
        return ".".join(self.path)


def tables_of(config: Config, resolved: Mapping[str, Any], by_data: Sequence[str] = ()) -> list[Table]:
    """Return the tables of `config`, whose values are `resolved`. The data gives the keys `by_data` of [model]."""
    takers = dict(_takers(config))

    def walk(path: Path, values: Mapping[str, Any]) -> Iterator[Table]:
        inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
        plain = {key: value for key, value in values.items() if key not in inner}
        lacking = {key: text for key, text in takers.get(path, {}).items() if key not in values}
        if path == ("model",):
            lacking |= dict.fromkeys(by_data, "the data gives it")
        yield Table(path, plain, bool(inner), lacking)
        for key, value in inner.items():
            yield from walk((*path, key), value)

    return [table for name, values in resolved.items() for table in walk((name,), values)]


def chosen_tables(tables: Sequence[Table], name: str) -> list[Table]:
    """Return the table called `name` and the tables inside it. A plugin may be named without "plugins.".

    Raises:
        UserError: if there is no such table; the message suggests the nearest.
    """
    for full in (name, f"plugins.{name}"):
        if inside := [table for table in tables if f"{table.name}.".startswith(f"{full}.")]:
            return inside
    known = [table.name for table in tables]
    plugins = [other.removeprefix("plugins.") for other in known]
    raise UserError(f"no table {name!r}{nearest(name, [*known, *plugins])}; known: {', '.join(known)}")


def toml_lines(tables: Sequence[Table], config: Config, plugins: bool, call: str | None) -> Iterator[str]:
    """Yield the lines of TOML.

    Args:
        tables: what `tables_of` or `chosen_tables` returns.
        config: the config, which knows the keys that are set.
        plugins: whether the command line changes the plugins.
        call: how the model is called, if it is known.
    """
    for table in tables:
        if table.has_tables and not table.values and not table.without_value:
            continue
        yield ""
        yield f"[{'.'.join(map(_key, table.path))}]"
        if table.path == ("model",) and call:
            yield f"# {shown(call)}"
        for key, value in table.values.items():
            place = (*table.path, key)
            is_set = _is_set(place, config.given) or (plugins and place == ("run", "plugins"))
            mark = SET if is_set else FILLED if _is_filled(place, config.filled) else ""
            yield f"{_key(key)} = {_in_line(value)}" + f"  {mark}" * bool(mark)
        for key, text in table.without_value.items():
            yield f"# {_key(key)}: {shown(text) or 'not set'}"


def nested(table: Table, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `table`, with the tables inside it, in the tables around it."""
    inner = resolved
    for key in table.path:
        inner = inner[key]
    for key in reversed(table.path):
        inner = {key: inner}
    return dict(inner)


def _takers(config: Config) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield each table with the keys that it may have, and their help."""
    diffusion = config.diffusion.build()
    yield from _of_value(("run",), config.run)
    yield from _of_value(("diffusion",), diffusion)
    yield from _of_value(("sampling",), config.sampling.build().fit(diffusion))
    for part in (config.data, config.model, config.optimizer):
        yield from _of_part((part.where,), part)
    for name, part in config.plugins.items():
        yield from _of_part(("plugins", name), part)


def _of_part(path: Path, part: Part) -> Iterator[tuple[Path, dict[str, str]]]:
    helps = _helps(part.target)
    for kind in part.shared:
        helps |= {key: text for key, text in _helps(kind).items() if key in described(kind) and key not in helps}
    yield path, helps
    targets: list[tuple[Callable[..., Any], Mapping[str, Any]]] = [(part.target, part.arguments), *part.shared.items()]
    for target, given in targets:
        for key, parameter in parameters(target).items():
            yield from _of_value((*path, key), given.get(key, parameter.default))


def _of_value(path: Path, value: object) -> Iterator[tuple[Path, dict[str, str]]]:
    inner: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    if fields_of(type(value)) or isinstance(value, Choice):
        yield path, _helps(type(value))
        inner = options_of(value)
    for key, each in inner.items():
        yield from _of_value((*path, str(key)), each)


def _helps(target: Callable[..., Any]) -> dict[str, str]:
    return {key.name: key.help for key in keys(target)}


def _is_set(place: Path, given: Any) -> bool:
    """Return whether the tables `given` set the key at `place`. A part may be given by its name alone."""
    for number, key in enumerate(place):
        if not isinstance(given, Mapping):
            return isinstance(given, str) and place[number:] == ("use",)
        if key not in given:
            return False
        given = given[key]
    return True


def _is_filled(place: Path, filled: Sequence[str]) -> bool:
    return any(f"{'.'.join(place)}.".startswith(f"{each}.") for each in filled)


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).rpartition(" = ")[0]


def _in_line(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_in_line, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_in_line(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")
