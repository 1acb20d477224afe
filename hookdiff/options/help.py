"""The keys of a config as tables, made from the classes and functions that take them."""

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from hookdiff.options.choices import Choice, parts
from hookdiff.options.fields import limits_of
from hookdiff.options.structure import as_toml, fields_of, hints_of, parameters

_ARGUMENT = re.compile(r"^    +(\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


@attrs.define(frozen=True)
class Key:
    """A key of a config."""

    name: str
    default: str  # as TOML; an empty string where there is none
    help: str
    kind: type[Choice] | None = None  # the kind of part, if the key chooses one


def keys(target: Callable[..., Any]) -> list[Key]:
    """Return the keys that `target`, a class or a function, takes.

    Their help is the metadata of an attrs field, or the text of the argument in the docstring.
    """
    fields, hints, texts = fields_of(target), hints_of(target), argument_texts(target)
    table = []
    for name, parameter in parameters(target).items():
        metadata = fields[name].metadata if name in fields else {}
        text = metadata.get("help") or texts.get(name, "")
        notes = [metadata.get("unit", ""), _range(fields[name].validator) if name in fields else ""]
        beside = ", ".join(filter(None, notes))
        kind = _kind(hints.get(name))
        default = None if parameter.default is attrs.NOTHING else as_toml(parameter.default)
        if isinstance(default, dict) and kind:
            default = default["use"]
        table.append(Key(name, _written(default), text + (beside and f" ({beside})"), kind))
    return table


def _range(validator: Any) -> str:
    """Return the limits of a number in words; an empty string if there are none."""
    known = [(way, limit) for way, limit in limits_of(validator) if abs(limit) < math.inf]
    limits = [(way, f"{int(limit):,}" if limit == int(limit) else f"{limit:g}") for way, limit in known]
    if [way for way, _ in limits] == [">=", "<="]:
        return " to ".join(limit for _, limit in limits)
    words = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
    return ", ".join(f"{words[way]} {limit}" for way, limit in limits)


def plain_lines(target: Callable[..., Any]) -> Iterator[str]:
    """Yield the keys of `target` as lines of text for a terminal."""
    for key in keys(target):
        yield f"  {key.name} = {key.default}".rstrip(" =").ljust(28) + f"  {key.help}"
        for use, part in parts(key.kind).items() if key.kind else ():
            options = ", ".join(f"{option.name} = {option.default}".rstrip(" =") for option in keys(part))
            yield f"    {use:<24}  {summary(part)}{f' ({options})' if options else ''}"


def markdown(target: Callable[..., Any], without: frozenset[str] = frozenset()) -> str:
    """Return the table of the keys of `target`, and a table for each kind of part among them."""
    shown = [key for key in keys(target) if key.name not in without]
    lines = ["| key | default | |", "|---|---|---|", *map(_row, shown)] if shown else []
    for key in shown:
        if not key.kind:
            continue
        lines += ["", f"`{key.name}` is one of these, or `module:Name`:", "", "| use | option | default | |"]
        lines.append("|---|---|---|---|")
        for use, part in parts(key.kind).items():
            lines += [f"| `{use}` | | | {summary(part)} |", *(f"| {_row(option)}" for option in keys(part))]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    return f"| `{key.name}` | {f'`{key.default}`' if key.default else ''} | {key.help} |"


def summary(target: object) -> str:
    """Return the first sentence of the docstring, without its full stop."""
    return (inspect.getdoc(target) or "").partition("\n")[0].removesuffix(".")


def _kind(hint: Any) -> type[Choice] | None:
    members = typing.get_args(hint) or (hint,)
    return next((m for m in members if isinstance(m, type) and issubclass(m, Choice)), None)


def _written(default: Any) -> str:
    """Return a default as TOML."""
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return f'"{default}"'
    return f"[{', '.join(map(_written, default))}]" if isinstance(default, list) else str(default)


def argument_texts(target: Callable[..., Any]) -> dict[str, str]:
    """Return the texts of the arguments in a docstring that has a section "Args:"."""
    _, _, section = (inspect.getdoc(target) or "").partition("\nArgs:\n")
    section = re.split(r"\n\n(?=\w+:\n)", section)[0]
    return {name: " ".join(text.split()).removesuffix(".") for name, text in _ARGUMENT.findall(section)}
