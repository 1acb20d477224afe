"""The JSON Schema of a config, draft-07, made from the declarations that check a config; editors use it."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.sampling import Sampling
from hookdiff.experiment.catalog import Member, kinds
from hookdiff.experiment.config import SECTIONS, RunConfig
from hookdiff.options.choices import Choice
from hookdiff.options.every import UNITS, Every
from hookdiff.options.fields import limits_of, one_of
from hookdiff.options.fitted import is_fitted
from hookdiff.options.help import keys
from hookdiff.options.structure import COLLECTIONS, as_toml, described, fields_of, hints_of, missing, parameters

Schema = dict[str, Any]

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}
_LIMITS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
_EVERY = rf"^\s*\d+(\.\d+)?(e[-+]?\d+)?\s*({'|'.join(UNITS)}|)\s*$"
_PATH: Schema = {"type": "string", "pattern": ":"}  # module:Name


def config_schema() -> Schema:
    """Return the schema of a config, with all plugins and parts that are installed.

    `module:Name` may have any options, and so may a plugin or part with missing packages.
    """
    catalog = kinds()
    known = {name: kind.members() for name, kind in catalog.items()}
    plugins = [member.name for member in known["plugin"]]
    tables: Schema = {
        name: _table(target) for name, target in (("run", RunConfig), ("diffusion", Diffusion), ("sampling", Sampling))
    }
    tables["run"] |= {
        "anyOf": [{"required": ["steps"]}, {"required": ["epochs"]}],
        "not": {"required": ["steps", "epochs"]},
    }
    tables["run"]["required"] = []  # the name is that of the file
    tables["run"]["properties"]["plugins"]["items"] = _name_schema(plugins)
    for section in SECTIONS:
        shared = {
            key: schema
            for kind in section.shared
            for key, schema in _table(kind)["properties"].items()
            if key in described(kind)
        }
        members, checks_needed = known[section.kind], section.table == "data"
        table = _choice_table(members, section.key, section.default, shared, checks_needed)
        tables[section.table] = {"type": "object", **table}
    tables["plugins"] = {"type": "object", "properties": {m.name: _options_of(m) for m in known["plugin"]}}
    has_paths = {"properties": {"run": {"properties": {"plugins": {"contains": _PATH}}, "required": ["plugins"]}}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A config of hookdiff",
        "type": "object",
        "properties": tables,
        "required": ["run", "data", "model"],
        "additionalProperties": False,
        # Only a plugin `module:Class` has a table of another name.
        "if": has_paths,
        "else": {"properties": {"plugins": {"propertyNames": {"enum": plugins}}}},
        "definitions": {
            name: {"type": ["string", "object"], **_choice_table(known[name], "use", kind.choice.default, {})}
            for name, kind in catalog.items()
            if kind.choice
        },
    }


def _name_schema(names: Iterable[str]) -> Schema:
    """Return the schema of a name out of `names`, or `module:Name`. `anyOf` completes; the condition gives messages."""
    names = list(names)
    return {"type": "string", "anyOf": [{"enum": names}, {}], "if": {"not": _PATH}, "then": {"enum": names}}


def _options_of(member: Member) -> Schema:
    """Return the schema of the options of a plugin or a part; any options if it cannot be used."""
    return {"type": "object"} if member.error else {"description": member.summary, **_table(member.target)}


def _choice_table(
    members: list[Member], key: str, default: str | None, shared: Mapping[str, Schema], checks_needed: bool = True
) -> Schema:
    """Return the schema of a table in which `key` names one of `members`, and of the name alone.

    The editor completes keys by `properties` and names by `anyOf`. Conditions check, because their messages are clear.
    """
    tables = {member.name: _options_of(member) for member in members}
    options = [table.get("properties", {}) for table in tables.values()]
    loose = {name: {"description": each.get("description", "")} for every in options for name, each in every.items()}
    rules: list[Schema] = []
    for name, table in tables.items():
        is_it: Schema = {"type": "object", "properties": {key: {"const": name}}}
        if name != default:  # a table without the key has the default
            is_it["required"] = [key]
        properties = {**shared, **table.get("properties", {}), key: {}}
        needed = table.get("required", []) if checks_needed else []
        closed = {
            "properties": properties,
            "required": needed,
            "additionalProperties": table.get("additionalProperties", True),
        }
        rules.append({"if": is_it, "then": closed})
    alone = [name for name, table in tables.items() if not table.get("required")]
    rules.append({"if": {"type": "string"}, "then": _name_schema(alone)})
    return {
        "properties": {**loose, **shared, key: _name_schema(tables)},
        "anyOf": [{"enum": alone}, {}],
        "allOf": [*rules, *([{"if": {"type": "object"}, "then": {"required": [key]}}] if default is None else [])],
    }


def _table(target: Callable[..., Any]) -> Schema:
    fields, hints, properties = fields_of(target), hints_of(target), dict[str, Schema]()
    for key in keys(target):
        option = fields.get(key.name)
        default = as_toml(parameters(target)[key.name].default)
        if option and option.metadata.get("rest"):
            continue
        schema = _limited(_value(hints[key.name]), option.validator if option else None)
        properties[key.name] = {**({"allOf": [schema]} if "$ref" in schema else schema), "description": key.help}
        if default is not None and not (isinstance(default, float) and not math.isfinite(default)):
            properties[key.name]["default"] = default
    rest = next((_value(hints[name]) for name, field in fields.items() if field.metadata.get("rest")), None)
    others = is_fitted(target) if rest is None else rest.get("additionalProperties", {})
    needed = [name for name in missing(target, {}) if name in properties]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": others}


def _value(hint: Any) -> Schema:
    """Return the schema of a type. A type that no config can hold, or that is unknown, takes any value."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_value(member) for member in inner if member not in (types.NoneType, Tensor)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in _PLAIN:
        return {"type": _PLAIN[origin]}
    if origin is Every:
        return {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _EVERY}]}
    if origin in COLLECTIONS:
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            return {"type": "array", "items": list(map(_value, inner)), "minItems": len(inner), "maxItems": len(inner)}
        return {"type": "array", "items": _value(inner[0]) if inner else {}}
    if isinstance(origin, type) and issubclass(origin, Choice):
        return {"$ref": f"#/definitions/{origin.kind}"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _value(inner[1]) if inner else {}}
    return _table(origin) if fields_of(origin) else {}


def _limited(schema: Schema, validator: Any) -> Schema:
    """Return `schema` with the limits and the names of an attrs validator."""
    if "anyOf" in schema:
        return {"anyOf": [_limited(member, validator) for member in schema["anyOf"]]}
    if schema.get("type") == "array":
        items = schema["items"]
        is_list = isinstance(items, list)
        return {**schema, "items": [_limited(i, validator) for i in items] if is_list else _limited(items, validator)}
    if schema.get("type") in ("integer", "number"):
        return schema | {_LIMITS[way]: limit for way, limit in limits_of(validator) if math.isfinite(limit)}
    names = validator.names if isinstance(validator, one_of) else getattr(validator, "options", ())  # of attrs' in_
    return {**schema, "enum": list(names)} if names and schema.get("type") == "string" else schema
