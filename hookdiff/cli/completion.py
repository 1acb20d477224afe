"""Completion in a shell: plugins, keys of a config and names of parts, from a table in the user's cache.

A completion imports neither torch nor a plugin. The table is written by commands that import all plugins anyway, and by
`hookdiff plugins`, which lists all parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from hookdiff.disk.files import new_file
from hookdiff.disk.paths import user_cache
from hookdiff.errors import PluginError
from hookdiff.options.imports import PARTS, PLUGINS, entries_of, installed


def prepare_completion(asked: str) -> None:
    """Prepare to answer a shell; if it asks for the completion script ("bash_source"), write the table, too."""
    add_completion_class(_Bash)
    if asked.endswith("_source"):
        write_table()


def write_table(anew: bool = False) -> None:
    """Write the table, unless the cache is not writable or already has a table of the installed packages."""
    if _table() and not anew:
        return
    with suppress(Exception):  # a broken plugin stops no command; `hookdiff schema` reports its error
        from hookdiff.authors.sinks import Sink
        from hookdiff.cli.json_schema import config_schema
        from hookdiff.experiment.catalog import kinds

        schema = config_schema()
        keys: dict[str, list[str]] = {}
        for key, values in _keys(schema, schema["definitions"]):
            keys[key] = list(dict.fromkeys([*keys.get(key, ()), *values]))
        plugins = kinds()["plugin"].members()
        trackers = [member.name for member in plugins if not member.error and issubclass(member.target, Sink)]
        table = {"of": _installation(), "keys": keys, "trackers": trackers, "overview": _overview()}
        with new_file(_place()) as partial:
            partial.write_text(json.dumps(table), "utf-8")


def overview_of_parts() -> dict[str, Any]:
    """Return the `summaries` of built-in parts by kind and name, and the `defaults`.

    `defaults` are the members, as "kind.name", of a config that names none, and of its plugins. They are read from the
    table, unless it cannot be written.
    """
    write_table()
    from_table: dict[str, Any] | None = _table().get("overview")
    return _overview() if from_table is None else from_table


def _overview() -> dict[str, Any]:
    from hookdiff.diffusion import Diffusion, Sampling
    from hookdiff.experiment.catalog import kinds
    from hookdiff.options.choices import Choice
    from hookdiff.options.default_names import DEFAULT_OPTIMIZER, DEFAULT_PLUGINS
    from hookdiff.options.help import keys
    from hookdiff.options.structure import options_of

    catalog, parts = kinds(), list[Any]()
    built_in = {kind.name: [kind.member(name) for name in kind.known if ":" not in name] for kind in catalog.values()}
    with suppress(PluginError):  # a package claims the name of a default
        diffusion = Diffusion()
        parts = [each for part in (diffusion, Sampling().fit(diffusion)) for each in options_of(part).values()]
    defaults = {f"plugin.{name}" for name in DEFAULT_PLUGINS} | {f"optimizer.{DEFAULT_OPTIMIZER}"}
    defaults |= {f"{part.kind}.{part.use}" for part in parts if isinstance(part, Choice)}
    for member in catalog["plugin"].members():
        chosen = keys(member.target) if member.target else ()
        defaults |= {f"{key.kind.kind}.{json.loads(key.default)}" for key in chosen if key.kind and key.default}
    return {
        "summaries": {kind: {member.name: member.summary for member in members} for kind, members in built_in.items()},
        "defaults": sorted(defaults),
    }


def complete_plugins(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Complete the last name of a list: plugins, and after "n" also `no:NAME`."""
    before, _, name = typed.rpartition(",")
    head = typed.removesuffix(name)
    names = [each for each in installed() if each not in before.split(",")]
    return [head + each for each in (*names, *(f"no:{plugin}" for plugin in names if name)) if each.startswith(name)]


def complete_settings(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Complete `TABLE.KEY=VALUE`: keys, and values that are names."""
    keys = _table().get("keys", {})
    words = [f"{key}=" for key in keys if f"{key}=".startswith(typed) and f"{key}=" != typed]
    if len(words) < 2:  # a shell adds a space after a single word, which a key with values must not have
        key = words[0].removesuffix("=") if words else typed.partition("=")[0]
        words = [each for value in keys.get(key, ()) if (each := f"{key}={value}").startswith(typed)] or words
    return words


def complete_values(key: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function that completes the values of the `key` of a config, if they are names."""
    return lambda ctx, parameter, typed: [v for v in _table().get("keys", {}).get(key, ()) if v.startswith(typed)]


def complete_trackers(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Complete the name of a tracker."""
    return [name for name in _table().get("trackers", ()) if name.startswith(typed)]


class _Bash(BashComplete):
    """Joins the words that Bash splits at "=" and ":", and completes only the part after the last of these."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words = [""]
        for word in filter(None, (*args, incomplete)):
            is_joined = word in ("=", ":") or words[-1].endswith(("=", ":"))
            words[-1:] = [words[-1] + word] if is_joined else [words[-1], word]
        *args, self.typed = words[1:] if incomplete else [*words[1:], ""]
        return args, self.typed

    def format_completion(self, item: CompletionItem[Any]) -> str:
        known = re.sub(r"^--[\w-]+=", "", re.sub(r"[^=:]*$", "", self.typed))
        return f"{item.type},{item.value.removeprefix(known)}"


def _keys(schema: dict[str, Any], known: dict[str, Any], above: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each key that a table of `schema` may have, with its values that are names."""
    for part in _parts(schema, known):
        for name, inner in part.get("properties", {}).items():
            key = f"{above}.{name}".removeprefix(".")
            if inner.get("type") != "object":
                values = [value for each in _parts(inner, known) for value in each.get("enum", ())]
                is_switch = any(each.get("type") == "boolean" for each in _parts(inner, known))
                yield key, [*["true", "false"] * is_switch, *(str(value) for value in values if value is not None)]
            if key.count(".") < 3:  # plugins.NAME.KEY.OPTION, the option of a part
                yield from _keys(inner, known, key)


def _parts(schema: dict[str, Any], known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    inner = [*schema.get("anyOf", ()), *schema.get("allOf", ()), schema.get("then", {})]
    inner += [known[schema["$ref"].rpartition("/")[2]]] if "$ref" in schema else []
    for each in filter(None, inner):
        yield from _parts(each, known)


def _table() -> dict[str, Any]:
    """Return the table of the packages that are installed now, or an empty table."""
    with suppress(OSError, ValueError, AttributeError):
        table: dict[str, Any] = json.loads(_place().read_text("utf-8"))
        return table if table.get("of") == _installation() and "overview" in table else {}  # older ones have none
    return {}


def _place() -> Path:
    return user_cache() / f"completion-{_digest(sys.prefix)}.json"


def _installation() -> str:
    """Return a digest of the installed distributions, by name and version, and of their entry points."""
    folders = {folder.name for path in sys.path for folder in Path(path).glob("*.*-info")}
    entries = {f"{entry.group} {entry.name} {entry.value}" for group in (PLUGINS, PARTS) for entry in entries_of(group)}
    return _digest("\n".join(sorted(folders | entries)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
