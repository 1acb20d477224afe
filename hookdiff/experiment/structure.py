"""Turns a TOML table into checked arguments of whatever it configures: an attrs class, a module, a function.

The rules: no unknown key, no coercion (the string "false" is no bool, 7 is no string; an int is a float), attrs
validators run field by field, and all problems are told at once.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import PurePath
from typing import Any, cast

import attrs
import cattrs
import tomli
from cattrs.errors import BaseValidationError, StructureHandlerNotFoundError

from hookdiff.choices import Choice, find
from hookdiff.errors import PluginError, nearest
from hookdiff.progress import Every, parse_every


class Text(str):
    """A value from the command line: read as whatever its key expects."""


class Invalid(ValueError):
    """A table that does not fit; `problems` are the places inside of it, as ".shift", with their messages."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{place.lstrip('.')}: {message}" for place, message in problems))
        self.problems = problems


class Problems:
    """What is wrong with a config, place by place."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, where: str, message: str) -> None:
        """Note a problem at `where`, as "run.steps"."""
        self.found.append(f"{where}: {message}")

    def add_error(self, where: str, error: BaseException) -> None:
        """Note all that `error` says of the value at `where`."""
        for place, message in _problems(error):
            self.add(f"{where}{place}", message)


def arguments(
    target: Callable[..., Any],
    table: Mapping[str, Any],
    where: str,
    problems: Problems,
    beside: Iterable[str] = (),
) -> dict[str, Any]:
    """Check `table` against the signature of `target` and return the typed arguments it sets.

    Problems are added under `where`; `beside` are keys of the same place that others read. Arguments that `target`
    requires and the table lacks are not looked for here: whoever builds may add some (`missing` tells).
    """
    known = parameters(target)
    hints = hints_of(target)
    result = {}
    for key, value in table.items():
        if key not in known:
            keys = (*known, *beside)
            moved: Mapping[str, str] = getattr(target, "moved_keys", {})
            way_out = f"; write {moved[key]}" if key in moved else nearest(key, keys)
            problems.add(f"{where}.{key}", f"unknown key{way_out}; known: {', '.join(keys) or 'none'}")
            continue
        try:
            result[key] = _value(value, hints.get(key, Any))
        except (ValueError, TypeError, PluginError) as error:
            problems.add_error(f"{where}.{key}", error)
    # attrs runs no validator once one field has failed. Here each sees an instance of what is known so far.
    defaults = {name: parameter.default for name, parameter in known.items()}
    so_far = types.SimpleNamespace(**{**defaults, **result})
    for key, field in fields_of(target).items():
        if key in result and field.validator is not None:
            try:
                field.validator(so_far, field, result[key])
            except (ValueError, TypeError) as error:
                told = _message(error).removeprefix(f"'{field.name}' ").removeprefix(f"{field.name} ")
                problems.add(f"{where}.{key}", told)
    return result


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of `target` that a config may set; none where Python does not know them."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        known = inspect.signature(target).parameters
    except ValueError:  # some callables that are written in C
        return {}
    return {n: p for n, p in known.items() if p.kind not in skipped and n not in ("self", "params")}


def missing(target: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return the parameters without a default that `given` does not set."""
    return [n for n, p in parameters(target).items() if p.default is inspect.Parameter.empty and n not in given]


def resolved(target: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` and the defaults of `target` as TOML values.

    What TOML cannot say (None) is left out, and so is a default that would not come back as it is.
    """
    table, hints = {}, hints_of(target)
    for name, parameter in parameters(target).items():
        value = as_toml(given.get(name, parameter.default))
        if value is not None and (name in given or _comes_back(parameter.default, value, hints.get(name, Any))):
            table[name] = value
    return table


def _comes_back(default: Any, said: Any, kind: Any) -> bool:
    try:
        return bool(_structure(said, kind) == default)
    except (ValueError, TypeError):
        return False


def as_toml(value: Any) -> Any:
    """Return `value` as TOML says it; None where it cannot say all of it."""
    if isinstance(value, Every):
        return int(value.amount) if value.unit == "steps" else str(value)
    if isinstance(value, enum.Enum):
        return as_toml(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Choice):
        return {"use": value.use, **_fields_as_toml(value)}
    if fields_of(type(value)):
        return _fields_as_toml(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [as_toml(item) for item in value]
        return None if None in items else items
    if isinstance(value, Mapping):
        table = {str(key): as_toml(item) for key, item in value.items()}
        return None if None in table.values() else table
    plain = (bool, int, float, str, datetime.date, datetime.time)
    return value if isinstance(value, plain) else None


def _fields_as_toml(value: Any) -> dict[str, Any]:
    return resolved(type(value), _options(value))


def _options(value: Any) -> dict[str, Any]:
    """Return the arguments that make `value`, which keeps each under its own name."""
    fields = fields_of(type(value))
    return {name: getattr(value, fields[name].name if name in fields else name) for name in parameters(type(value))}


def fields_of(target: Any) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of an attrs class by the names of its arguments; of anything else, none."""
    if not (inspect.isclass(target) and attrs.has(target)):
        return {}
    return {field.alias: field for field in cast(Any, target).__attrs_attrs__ if field.init}


def hints_of(target: Any) -> dict[str, Any]:
    """Return the types of the arguments that have one."""
    if fields := fields_of(target):
        return {alias: _hint(field.type, _scope(target, field.name)) for alias, field in fields.items() if field.type}
    scope = getattr(inspect.unwrap(target.__init__ if inspect.isclass(target) else target), "__globals__", {})
    typed = {name: parameter.annotation for name, parameter in parameters(target).items()}
    return {name: _hint(kind, scope) for name, kind in typed.items() if kind is not inspect.Parameter.empty}


def _scope(target: type, field: str) -> dict[str, Any]:
    """Return the names of the module of the class, `target` or a base of it, that declares `field`."""
    owners = (kind for kind in target.__mro__ if field in vars(kind).get("__annotations__", {}))
    return vars(sys.modules[next(owners, target).__module__])


def _hint(annotation: Any, scope: dict[str, Any]) -> Any:
    alone = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(alone, scope)["it"]
    except (AttributeError, NameError, SyntaxError, TypeError):  # most often only checkers import its name
        return Any


def _value(value: Any, kind: Any) -> Any:
    if not isinstance(value, Text):
        return _structure(value, kind)
    members = typing.get_args(kind)
    if value == "none" and types.NoneType in members and not any("none" in getattr(m, "known", ()) for m in members):
        return None
    first: Exception | None = None
    for reading in _readings(value):
        try:
            return _structure(reading, kind)
        except (ValueError, TypeError) as error:
            first = first or error
    assert first
    raise first


def _readings(text: str) -> Iterator[Any]:
    """Read the value as TOML, then as a list without its brackets, then as it stands."""
    for source in (text, f"[{text}]") if "," in text else (text,):
        try:
            yield tomli.loads(f"x = {source}")["x"]
        except (ValueError, RecursionError):
            continue
    yield str(text)


def _structure(value: Any, kind: Any) -> Any:
    try:
        return _converter.structure(value, kind)
    except StructureHandlerNotFoundError:
        raise ValueError(f"cannot be set in a config: it takes {_named(kind)}") from None
    except (BaseValidationError, OverflowError) as error:
        raise Invalid(_problems(error)) from None


def _exactly(wanted: type | tuple[type, ...], described: str) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        # bool is an int for isinstance, and no number for a config.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"expected {described}, got {value!r}")
        return float(cast(float, value)) if wanted == (int, float) else value

    return hook


def _union(value: Any, kind: Any) -> Any:
    members = [member for member in typing.get_args(kind) if member is not types.NoneType]
    members.sort(key=lambda member: member is not type(value))
    errors = []
    for member in members:
        try:
            return _converter.structure(value, member)
        except StructureHandlerNotFoundError:
            continue
        except (ValueError, TypeError, OverflowError, BaseValidationError, PluginError) as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else ValueError(f"expected {_named(kind)}, got {value!r}")


def _sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, got {value!r}")
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        if len(value) != len(inner):
            raise ValueError(f"expected a list of {len(inner)}, got {len(value)} items")
        kinds: Sequence[Any] = inner
    else:
        kinds = [inner[0] if inner else Any] * len(value)
    items = [
        _inside(f"item {number}", item, item_kind)
        for number, (item, item_kind) in enumerate(zip(value, kinds, strict=True), 1)
    ]
    made = origin or kind
    return made(items) if made in (list, set, frozenset) else tuple(items)


def _mapping(value: Any, kind: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, got {value!r}")
    keys, values = typing.get_args(kind) or (str, Any)
    return {_inside(key, key, keys): _inside(key, item, values) for key, item in value.items()}


def _attrs_class(value: Any, kind: Any) -> Any:
    """Check a table inside a table by the same rules."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, got {value!r}")
    problems = Problems()
    given = arguments(kind, value, "", problems)
    if lacking := missing(kind, value):
        problems.add("", f"needs {', '.join(lacking)}")
    if problems.found:
        raise Invalid([(place, message) for place, _, message in (line.partition(": ") for line in problems.found)])
    return kind(**given)


def _choice(value: Any, kind: type[Choice]) -> Choice:
    """Read a name, or a table whose `use` is a name and whose other keys are options of what it names."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, (str, dict)):
        raise ValueError(f"expected a name or a table with `use`, got {value!r}")
    table = {"use": value} if isinstance(value, str) else {"use": kind.default, **value}
    chosen: Choice = _attrs_class(table, find(kind, _value(table.pop("use"), Any)))
    try:
        _options(chosen)
    except AttributeError as error:
        raise ValueError(f"{error}; make it an attrs class, which keeps its options") from None
    return chosen


def _inside(place: str, value: Any, kind: Any) -> Any:
    try:
        return _structure(value, kind)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {_message(error)}") from None


def _literal(value: Any, kind: Any) -> Any:
    allowed = typing.get_args(kind)
    if value not in allowed or type(value) not in map(type, allowed):
        close = nearest(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
        raise ValueError(f"expected one of {', '.join(map(repr, allowed))}, got {value!r}{close}")
    return value


def _every(value: Any, _: Any) -> Every:
    if not isinstance(value, (int, str, Every)):
        raise ValueError(f"expected steps (500), epochs ('2 epochs') or time ('15 min'), got {value!r}")
    return parse_every(value)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_sequence(kind: Any) -> bool:
    return (typing.get_origin(kind) or kind) in (tuple, list, set, frozenset, Sequence, Collection, Iterable)


def _is_mapping(kind: Any) -> bool:
    return (typing.get_origin(kind) or kind) in (dict, Mapping, MutableMapping)


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _named(kind: Any) -> str:
    members = typing.get_args(kind) if _is_union(kind) else (kind,)
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", types.NoneType: None}
    told = [
        " or ".join(map(repr, typing.get_args(member)))
        if _is_literal(member)
        else names.get(member, getattr(member, "__name__", str(member)))
        for member in members
    ]
    return " or ".join(name for name in told if name)


def _problems(error: BaseException) -> list[tuple[str, str]]:
    """Return what `error` says, with the places inside the value that it says it of."""
    if isinstance(error, BaseValidationError):
        return [problem for inner in error.exceptions for problem in _problems(inner)]
    return error.problems if isinstance(error, Invalid) else [("", _message(error))]


def _message(error: BaseException) -> str:
    """Return the message for a user: attrs' validators raise tuples of arguments."""
    if isinstance(error, Invalid):
        return str(error)
    return str(error.args[0]) if error.args else type(error).__name__


_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook(bool, _exactly(bool, "true or false"))
_converter.register_structure_hook(int, _exactly(int, "an integer"))
_converter.register_structure_hook(float, _exactly((int, float), "a number"))
_converter.register_structure_hook(str, _exactly(str, "a string"))
_converter.register_structure_hook(Every, _every)
_converter.register_structure_hook_func(_is_union, _union)
_converter.register_structure_hook_func(_is_sequence, _sequence)
_converter.register_structure_hook_func(_is_mapping, _mapping)
_converter.register_structure_hook_func(lambda kind: bool(fields_of(kind)), _attrs_class)
_converter.register_structure_hook_func(lambda kind: isinstance(kind, type) and issubclass(kind, Choice), _choice)
_converter.register_structure_hook_func(_is_literal, _literal)
