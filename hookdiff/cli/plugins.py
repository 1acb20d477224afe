"""`hookdiff plugins`: list the installed plugins and parts, their keys, or the order of the calls."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli.arguments import checked_by, json_option, override_options
from hookdiff.cli.code import definition_at
from hookdiff.experiment.toml_file import read_toml

if TYPE_CHECKING:
    from hookdiff.experiment.catalog import Member


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--order",
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    callback=checked_by(read_toml),
    help="Print the plugins of CONFIG that each hook calls, in order.",
)
@click.option("--markdown", is_flag=True, help="Print only the keys of NAME, a plugin or part, as tables in Markdown.")
@json_option
@override_options
def command(
    names: tuple[str, ...],
    order: Path | None,
    markdown: bool,
    as_json: bool,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    trust: bool,
) -> None:
    """List the installed plugins and all parts.

    NAME is a plugin (ema), a kind of part (sampler), or a part (sampler.ddim, or only ddim). For a kind, list all of
    its parts, including hookdiff's own. For a plugin or part, print a description, the import for a script, and the
    keys of its table. If NAME is a plugin and a kind (loss), print the plugin and then the kind. With --order: print
    the plugins of CONFIG that each hook calls, in call order.
    """
    if order is not None:
        calls = _order(order, plugins, settings, trust)
        lines = (f"{hook:<22} {' > '.join(called) or '-'}" for hook, called in calls.items())
        click.echo(json.dumps(calls, indent=1) if as_json else "\n".join(lines))
    elif markdown:
        _print_markdown(names)
    elif names or as_json:
        from hookdiff.cli.completion import overview_of_parts
        from hookdiff.experiment.catalog import kinds, named

        defaults = overview_of_parts()["defaults"]
        parts = [named(name) for name in names] or [kind.members() for kind in kinds().values()]
        if as_json:
            facts = ({**each.facts(), "is_default": _title(each) in defaults} for members in parts for each in members)
            click.echo(json.dumps(list(facts), indent=1))
            return
        for members, name in zip(parts, names, strict=True):
            described = [member for member in members if member.kind != name]
            for member in described:
                click.echo("\n".join(_description(member)))
            texts = {
                _title(each): f"{each.summary}  ({', '.join(each.distributions)})"
                for each in members
                if each not in described
            }
            _print_rows(texts, defaults, max(map(len, texts), default=0))
    else:
        _print_all()


def _print_all() -> None:
    """Print all plugins and parts, each kind below its name; packages that are published are read from their source."""
    from hookdiff.cli.completion import overview_of_parts
    from hookdiff.options.imports import PARTS, PLUGINS, distribution, installed

    known = overview_of_parts()
    kinds: dict[str, dict[str, str]] = {kind: dict(texts) for kind, texts in known["summaries"].items()}
    for group in (PLUGINS, PARTS):
        for name, entries in installed(group).items():
            try:
                summary = _summary(name, entries)
            except Exception as error:  # a broken package must not hide the others
                summary = f"cannot be used: {error}"
            others = [distribution(entry) for entry in entries if not entry.dist or entry.dist.name != "hookdiff"]
            kind, _, member = ("plugin", "", name) if group == PLUGINS else name.partition(".")
            kinds.setdefault(kind, {})[member] = summary + f"  ({', '.join(others)})" * bool(others)
    click.echo("* is a default: a config has it that names no other.")
    width = max(len(name) for texts in kinds.values() for name in texts)
    for kind, texts in kinds.items():
        click.echo(f"\n{kind}")
        _print_rows(texts, known["defaults"], width, kind)


def _print_rows(texts: Mapping[str, str], defaults: Collection[str], width: int, kind: str = "") -> None:
    """Print the texts of the members of a `kind` by name, aligned; the defaults are marked."""
    for name, text in texts.items():
        mark = "*" if f"{kind}.{name}".removeprefix(".") in defaults else " "
        click.echo(f"{mark} {name:<{width}}  {text}")


def _title(member: Member) -> str:
    return f"{member.kind}.{member.name}"


def _description(member: Member) -> list[str]:
    from hookdiff.experiment.discovery import plugin_name
    from hookdiff.options.help import plain_lines
    from hookdiff.options.imports import import_line

    title = member.name if member.kind == "plugin" else _title(member)
    if member.error:
        return [f"{title}: {member.summary}", ""]
    key = "source" if member.kind == "source" else "use"
    table = f"[plugins.{plugin_name(member.name)}]" if member.kind == "plugin" else f'{key} = "{member.name}"'
    owners = f"  ({', '.join(member.distributions)})" * bool(member.distributions)
    lines = [f"{title}: {inspect.getdoc(member.target)}\n", import_line(member.path) + owners, ""]
    return [*lines, table, *plain_lines(member.target), ""]


def _summary(name: str, entries: list[EntryPoint]) -> str:
    """Return the first line of the docstring, from the source where possible: the import of torch takes long."""
    from hookdiff.options.imports import check_needs, distribution

    # A part of the core may have the same name as a part of a package.
    is_sure = len(entries) == 1 and ("." not in name or distribution(entries[0]).partition(" ")[0] == "hookdiff")
    definition = definition_at(entries[0].value) if is_sure else None
    docstring = definition and ast.get_docstring(definition)
    if definition is None or not docstring:
        from hookdiff.experiment.catalog import named

        return named(name)[0].summary
    keywords = [each for call in definition.decorator_list if isinstance(call, ast.Call) for each in call.keywords]
    for needs in (each.value for each in keywords if each.arg == "needs"):
        with suppress(ValueError):  # `needs` is not a literal
            check_needs(name, ast.literal_eval(needs))
    return docstring.partition("\n")[0]


def _order(path: Path, names: tuple[str, ...], settings: tuple[str, ...], trust: bool) -> dict[str, list[str]]:
    from hookdiff.experiment.config import load_config
    from hookdiff.loop.hookspecs import HOOK_NAMES
    from hookdiff.loop.registry import Plugins

    config = load_config(path, names, settings, trust=trust)
    plugins = Plugins({name: part.build() for name, part in config.plugins.items()})
    calls: dict[str, list[str]] = {hook: [] for hook in HOOK_NAMES}
    for hook, called in calls.items():
        for impl in plugins.order(hook):
            place = " (around)" if impl.wrapper else " (first)" if impl.tryfirst else " (last)" * impl.trylast
            called += [impl.plugin_name + place] * (impl.plugin_name != "defaults")
    return calls


def _print_markdown(names: tuple[str, ...]) -> None:
    from hookdiff.experiment.catalog import named
    from hookdiff.options.help import markdown

    if not names:
        raise click.UsageError("--markdown needs the NAME of a plugin or part")
    for member in (member for name in names for member in named(name)):
        left_out = frozenset({"params"}) if member.kind == "optimizer" else frozenset()  # hookdiff sets it
        click.echo(markdown(member.target, left_out), nl=False)
