"""Turns plain values into checked arguments of the attrs class, module or function that takes them.

The rules: unknown keys are refused; values are not coerced (the string "false" is no bool, 7 is no string), except int
to float; attrs validators run field by field; all problems are reported at once.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import attrs
import cattrs
import tomli
import torch
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError, StructureHandlerNotFoundError
from torch import Tensor

from hookdiff.errors import ConfigError, PluginError, nearest
from hookdiff.options.choices import Choice, find
from hookdiff.options.every import Every, parse_every

T = TypeVar("T")

_OF_CATTRS = (BaseValidationError, ForbiddenExtraKeysError, StructureHandlerNotFoundError)
_REFUSED = (ValueError, TypeError, OverflowError, PluginError, *_OF_CATTRS)  # raised for a value that does not fit
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Tensor: "a tensor"}
COLLECTIONS = (tuple, list, set, frozenset, Sequence, Collection, Iterable)


REST = {"rest": True}  # metadata of a field that takes all keys that no other field has


class Text(str):
    """A value from the command line, which is read as the type that its key expects."""


class Problems(ValueError):
    """The problems of a config, or of a table in it, each as "place: message"."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __str__(self) -> str:
        return "; ".join(line.lstrip(".: ") for line in self.found)

    def add(self, where: str, problem: str | BaseException) -> None:
        """Add a problem, or all problems of an error, of the value at `where`, such as "run.steps"."""
        if isinstance(problem, Problems):
            self.found += [where + line for line in problem.found]
        elif isinstance(problem, BaseValidationError):
            self.found += cattrs.transform_error(problem, where, lambda error, _: _message(error))
        else:
            self.found.append(f"{where}: {problem if isinstance(problem, str) else _message(problem)}")

    def refuse(self, path: Path) -> None:
        """Raise ConfigError that lists all problems of the config at `path`, unless there are none."""
        if self.found:
            count = f"{len(self.found)} problem" + ("s" if len(self.found) > 1 else "")
            raise ConfigError(f"{path}: {count}\n" + "\n".join(f"  {line}" for line in self.found))


def arguments(
    target: Callable[..., Any], table: Mapping[str, Any], where: str, problems: Problems, beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Check `table` against the signature of `target` and return the typed arguments it sets.

    Problems are added under `where`; `beside` are other keys that the table may have. An argument that `target`
    requires and the table lacks is no problem here, since it may be given later: see `missing`.
    """
    known, hints, result = parameters(target), hints_of(target), {}
    for key, value in table.items():
        if key not in known:
            keys = (*known, *beside)
            way_out = _elsewhere(target, key) or nearest(key, keys)
            problems.add(f"{where}.{key}", f"unknown key{way_out}; known: {', '.join(keys) or 'none'}")
            continue
        try:
            result[key] = _value(value, hints[key])
        except _REFUSED as error:
            problems.add(f"{where}.{key}", error)
    # attrs runs no validators once one has failed. Here each validator sees the fields that are known so far.
    so_far = types.SimpleNamespace(**{name: parameter.default for name, parameter in known.items()} | result)
    for key, field in fields_of(target).items():
        if key in result and field.validator is not None:
            try:
                field.validator(so_far, field, result[key])
            except (ValueError, TypeError) as error:
                message = _message(error).removeprefix(f"'{field.name}' ").removeprefix(f"{field.name} ")
                problems.add(f"{where}.{key}", message)
    return result


def _elsewhere(target: Callable[..., Any], key: str) -> str:
    """Return a text that names the parts of the same kind that have `key`; "" if there are none."""
    names = [f"use = {name!r}" for name, other in _known(target).items() if key in parameters(other)]
    return f"; it is a key with {' or '.join(names)}" if names else ""


def _known(target: object) -> Mapping[str, type]:
    """Return the classes of the kind of `target` by name, if it is a `Choice`."""
    return target.known if inspect.isclass(target) and issubclass(target, Choice) else {}


def structured(kind: type[T], values: Any) -> T:
    """Return plain `values` and tensors as the type `kind`, such as an attrs class.

    Raises:
        Problems: for all values that do not fit, each with its place.
    """
    try:
        return _converter.structure(values, kind)
    except Problems:
        raise
    except _REFUSED as error:
        problems = Problems()
        problems.add("", error)
        raise problems from None


def numbers(least: float = -math.inf, finite: bool = True) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator of a number, a tensor, or a list or dict of them: no NaN, and no number below `least`.

    `finite=False` permits infinities; None passes.
    """

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, Tensor):
            good = bool(((value >= least) & (not finite or value.isfinite())).all())
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                check(instance, attribute, item)
            return
        else:
            # An integer of 2**63 or more fits no tensor; no count of a run comes near it.
            is_number, most = isinstance(value, int | float), 2.0**63 if isinstance(value, int) else math.inf
            good = not is_number or (least <= value <= most and (not finite or math.isfinite(value)))
        if not good:
            lowest = f" of at least {least:g}" if least > -math.inf else ""
            raise ValueError(f"{attribute.name} must hold {'finite ' * finite}numbers{lowest}, got {_shown(value)}")

    return check


def shaped(*sizes: int | None, dtype: torch.dtype | None = None) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator of a tensor with these sizes (None: any) and this dtype (None: any)."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        fits = len(value.shape) == len(sizes) and all(
            wanted in (None, it) for wanted, it in zip(sizes, value.shape, strict=True)
        )
        if not fits or dtype not in (None, value.dtype):
            expected = " ".join("n" if size is None else str(size) for size in sizes) or "()"
            kind = f" of {dtype}" if dtype else ""
            raise ValueError(f"{attribute.name} must be a tensor{kind} of shape {expected}, got {_shown(value)}")

    return check


COUNT = numbers(least=0)  # validator


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of `target` that a config may set; none if Python does not know them."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        known = inspect.signature(target).parameters
    except ValueError:  # some callables that are written in C
        return {}
    return {n: p for n, p in known.items() if p.kind not in skipped and n not in ("self", "params")}


def described(kind: type) -> list[str]:
    """Return the keys of the attrs class `kind` that have a help text: the fields that a config may set."""
    return [name for name, field in fields_of(kind).items() if "help" in field.metadata]


def missing(target: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return the parameters without a default that `given` does not set."""
    return [n for n, p in parameters(target).items() if p.default is inspect.Parameter.empty and n not in given]


def resolved(target: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` and the defaults of `target` as TOML values.

    None, which TOML does not have, is left out, as is a default that would be read as another value.
    """
    table, hints = {}, hints_of(target)
    for name, parameter in parameters(target).items():
        value = as_toml(given.get(name, parameter.default))
        if value is not None and (name in given or _comes_back(parameter.default, value, hints[name])):
            table[name] = value
    return table


def _comes_back(default: Any, written: Any, kind: Any) -> bool:
    try:
        return bool(_converter.structure(written, kind) == default)
    except _REFUSED:
        return False


def as_toml(value: Any) -> Any:
    """Return `value` as a TOML value; None if TOML cannot express it or a part of it."""
    if isinstance(value, Every):
        return int(value.amount) if value.unit == "steps" else str(value)
    if isinstance(value, enum.Enum):
        return as_toml(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if fields_of(type(value)) or isinstance(value, Choice):
        use = {"use": value.use} if isinstance(value, Choice) else {}
        return use | resolved(type(value), options_of(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [as_toml(item) for item in value]
        return None if None in items else items
    if isinstance(value, Mapping):
        table = {str(key): as_toml(item) for key, item in value.items()}
        return None if None in table.values() else table
    plain = (bool, int, float, str, datetime.date, datetime.time)
    return value if isinstance(value, plain) else None


def options_of(value: Any) -> dict[str, Any]:
    """Return the arguments of `value`, from its attributes."""
    fields = fields_of(type(value))
    return {name: getattr(value, fields[name].name if name in fields else name) for name in parameters(type(value))}


def fields_of(target: Any) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of an attrs class by the names of its arguments; an empty dict for any other object."""
    is_attrs = inspect.isclass(target) and attrs.has(target)
    return {field.alias: field for field in attrs.fields(target) if field.init} if is_attrs else {}


def hints_of(target: Any, *, marks: bool = False) -> dict[str, Any]:
    """Return the type of each argument that a config may set; Any if it has no type that can be evaluated.

    `marks` keeps types with Annotated as they are.
    """
    fields, inner = fields_of(target), inspect.unwrap(target)
    scope, written = _scope(inner), {name: parameter.annotation for name, parameter in parameters(target).items()}
    return {n: _hint(fields[n].type if n in fields else kind, scope, marks) for n, kind in written.items()}


def hint_of(annotation: Any, owner: Any) -> Any:
    """Return the type of an `annotation` in the class or function `owner`; Any if it cannot be evaluated."""
    return _hint(annotation, _scope(owner))


def _scope(owner: Any) -> dict[str, Any]:
    """Return the names that the annotations of a class or a function may use."""
    scope: dict[str, Any] = {}
    for base in reversed(owner.__mro__) if inspect.isclass(owner) else [owner]:
        scope |= getattr(sys.modules.get(getattr(base, "__module__", "")), "__dict__", {})
    return scope


def marks_of(target: Any, kind: type[T]) -> dict[str, T]:
    """Return the marks of a `kind`, such as `Writes` in `Annotated[str, Writes()]`, by the names of arguments."""
    return {
        name: mark
        for name, hint in hints_of(target, marks=True).items()
        for mark in _metadata(hint)
        if isinstance(mark, kind)
    }


def _metadata(hint: Any) -> Iterator[Any]:
    """Yield the metadata that Annotated gives to a type and to its parts."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        yield from _metadata(part)


def result_of(target: Callable[..., Any]) -> Any:
    """Return the type that a function is annotated to return; Any if it has no type that can be evaluated."""
    try:
        annotation = inspect.signature(target).return_annotation
    except (TypeError, ValueError):  # some callables that are written in C
        return Any
    return hint_of(annotation, inspect.unwrap(target))


def _hint(annotation: Any, scope: dict[str, Any], marks: bool = False) -> Any:
    if annotation in (None, inspect.Parameter.empty):
        return Any
    alone = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(alone, scope, include_extras=marks)["it"]
    except (AttributeError, NameError, SyntaxError, TypeError):
        return Any


def _value(value: Any, kind: Any) -> Any:
    if not isinstance(value, Text):
        return _structured(value, kind)
    members = typing.get_args(kind)
    if value == "none" and types.NoneType in members and not any("none" in _known(member) for member in members):
        return None
    errors = []
    for reading in _readings(value):
        try:
            return _structured(reading, kind)
        except _REFUSED as error:
            errors.append(error)
    raise errors[0]


def _structured(value: Any, kind: Any) -> Any:
    try:
        return _converter.structure(value, kind)
    except (AttributeError, NameError):  # a library's class has annotations that cannot be read
        raise TypeError(f"cannot be set in a config: it takes {_named(kind)}") from None


def _readings(text: str) -> Iterator[Any]:
    """Yield the value read as TOML, then read as a list without brackets, then as plain text."""
    for source in (text, f"[{text}]") if "," in text else (text,):
        try:
            yield tomli.loads(f"x = {source}")["x"]
        except (ValueError, RecursionError):
            continue
    yield str(text)


def _scalar(value: Any, kind: Any) -> Any:
    # isinstance counts a bool as an int; a config does not.
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"expected {_NAMES[kind]}, got {_shown(value)}")
    if kind is int and abs(value) >= 2**64:
        raise ValueError(f"expected an integer of at most 64 bits, got {_shown(value)}")
    if kind is str and "\0" in value:  # no file name has one
        raise ValueError(f"expected a string without zero bytes, got {_shown(value)}")
    try:
        return kind(value)
    except OverflowError:  # an integer too large for a float
        raise ValueError(f"expected a number below 1.8e308, got {_shown(value)}") from None


def _tensor(value: Any, kind: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"expected a tensor, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _union(value: Any, kind: Any) -> Any:
    if value is None and types.NoneType in typing.get_args(kind):
        return None
    members = [member for member in typing.get_args(kind) if member is not types.NoneType]
    errors = []
    for member in sorted(members, key=lambda member: member is not type(value)):
        try:
            return _converter.structure(value, member)
        except StructureHandlerNotFoundError:
            continue
        except _REFUSED as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else ValueError(f"expected {_named(kind)}, got {_shown(value)}")


def _sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, got {_shown(value)}")
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind) or (Any, ...)
    kinds = inner if origin is tuple and inner[-1] is not Ellipsis else inner[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"expected a list of {len(kinds)}, got {len(value)} items")
    places = [f": item {number}" for number in range(1, len(value) + 1)]
    items = _each(zip(places, value, kinds, strict=True))
    return origin(items) if origin in (list, set, frozenset) else tuple(items)


def _mapping(value: Any, kind: Any) -> Any:
    keys, values = typing.get_args(kind) or (str, Any)
    table = _table(value)
    items = _each((f".{key}", item, values) for key, item in table.items())
    return dict(zip(_each((f".{key}", key, keys) for key in table), items, strict=True))


def _each(values: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    """Structure values, each with its place and type; raise Problems for all that do not fit."""
    items, problems = [], Problems()
    for place, value, kind in values:
        try:
            items.append(_converter.structure(value, kind))
        except _REFUSED as error:
            problems.add(place, error)
    if problems.found:
        raise problems
    return items


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, got {_shown(value)}")
    return value


def _attrs_class(value: Any, kind: Any) -> Any:
    """Check a table inside a table by the same rules."""
    problems, value = Problems(), _table(value)
    if rest := next((name for name, field in fields_of(kind).items() if field.metadata.get("rest")), None):
        others = {key: item for key, item in value.items() if key not in parameters(kind) or key == rest}
        value = {**{key: item for key, item in value.items() if key not in others}, rest: others}
    options = arguments(kind, value, "", problems)
    if lacking := missing(kind, value):
        problems.add("", f"needs {', '.join(lacking)}")
    if problems.found:
        raise problems
    try:
        return kind(**options)
    except ValueError as error:  # from a check of several fields
        problems.add("", error)
        raise problems from None


def _choice(value: Any, kind: type[Choice]) -> Choice:
    """Read the name of a class, or a table with this name as `use` and the options of the class."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, (str, dict)):
        raise ValueError(f"expected a name or a table with `use`, got {_shown(value)}")
    table = {"use": value} if isinstance(value, str) else {"use": kind.default, **value}
    chosen: Choice = _attrs_class(table, find(kind, _value(table.pop("use"), Any)))
    try:
        options_of(chosen)
    except AttributeError as error:
        raise ValueError(f"{error}; make it an attrs class, which keeps its options") from None
    return chosen


def _literal(value: Any, kind: Any) -> Any:
    allowed = typing.get_args(kind)
    if value not in allowed or type(value) not in map(type, allowed):
        close = nearest(str(value), map(str, allowed))
        raise ValueError(f"expected one of {', '.join(map(repr, allowed))}, got {_shown(value)}{close}")
    return value


def _named(kind: Any) -> str:
    """Return the type in words, without alternatives that TOML does not have."""
    members = typing.get_args(kind)
    if _is(*_UNION)(kind):
        known = [member for member in members if member is not types.NoneType]
        return " or ".join(_named(member) for member in known if member is not Tensor or known == [Tensor])
    if _is(typing.Literal)(kind):
        return " or ".join(map(repr, members))
    if _is(list, tuple)(kind):
        return "a list"
    return _NAMES[kind] if kind in _NAMES else getattr(kind, "__name__", str(kind))


def _message(error: BaseException) -> str:
    if isinstance(error, StructureHandlerNotFoundError):
        return f"cannot be set in a config: it takes {_named(error.type_)}"
    # attrs' validators raise errors with several arguments.
    return str(error.args[0]) if error.args else str(error) or type(error).__name__


def _is(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: (typing.get_origin(kind) or kind) in origins


_UNION = (typing.Union, types.UnionType)
_converter = cattrs.Converter()
for _kind in (bool, int, float, str):
    _converter.register_structure_hook(_kind, _scalar)
_converter.register_structure_hook(Tensor, _tensor)
_converter.register_structure_hook(Every, lambda value, _: parse_every(value))
_converter.register_structure_hook_func(_is(*_UNION), _union)
_converter.register_structure_hook_func(_is(*COLLECTIONS), _sequence)
_converter.register_structure_hook_func(_is(dict, Mapping, MutableMapping), _mapping)
_converter.register_structure_hook_func(lambda kind: bool(fields_of(kind)), _attrs_class)
_converter.register_structure_hook_func(lambda kind: isinstance(kind, type) and issubclass(kind, Choice), _choice)
_converter.register_structure_hook_func(_is(typing.Literal), _literal)
