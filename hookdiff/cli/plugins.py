"""`hookdiff plugins`: list the installed plugins, their keys, or the order of their calls."""

import ast
import inspect
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import click

from hookdiff.cli.arguments import checked_by, override_options
from hookdiff.cli.code import class_at
from hookdiff.experiment.toml_file import read_toml


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--order",
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    callback=checked_by(read_toml),
    help="Print the call order of each hook.",
)
@click.option("--markdown", is_flag=True, help="Print only the keys of NAME, as tables in Markdown.")
@override_options
def command(
    names: tuple[str, ...],
    order: Path | None,
    markdown: bool,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    trust: bool,
) -> None:
    """List the installed plugins.

    With NAME: print a description of these plugins, the import of their class for a script, and the keys of their
    tables. With --markdown, NAME may also be a part of a package, as KIND.NAME. With --order: print the plugins of
    CONFIG that each hook calls, in call order.
    """
    from hookdiff.options.imports import distribution, import_line, installed

    if order is not None:
        _print_order(order, plugins, settings, trust)
    elif markdown:
        _print_markdown(names)
    elif names:
        from hookdiff.experiment.discovery import plugin_class, plugin_name
        from hookdiff.options.help import plain_lines

        for name in names:
            plugin = plugin_class(name)
            path = name if ":" in name else installed()[name][0].value
            table = [f"[plugins.{plugin_name(name)}]", *plain_lines(plugin)]
            click.echo("\n".join([f"{name}: {inspect.getdoc(plugin)}\n", import_line(path), "", *table, ""]))
    else:
        for name, entries in installed().items():
            try:
                summary = _summary(name, entries)
            except Exception as error:  # a broken plugin must not hide the others
                summary = f"cannot be used: {error}"
            others = [distribution(entry) for entry in entries if not entry.dist or entry.dist.name != "hookdiff"]
            click.echo(f"{name:<12} {summary}" + f"  ({', '.join(others)})" * bool(others))


def _summary(name: str, entries: list[EntryPoint]) -> str:
    """Return the first line of the docstring, from the source where possible: the import of torch takes long."""
    from hookdiff.options.imports import check_needs

    found = class_at(entries[0].value) if len(entries) == 1 else None
    docstring = found and ast.get_docstring(found)
    if found is None or not docstring:
        from hookdiff.experiment.discovery import plugin_class

        return (inspect.getdoc(plugin_class(name)) or "").partition("\n")[0]
    keywords = [each for call in found.decorator_list if isinstance(call, ast.Call) for each in call.keywords]
    for needs in (each.value for each in keywords if each.arg == "needs"):
        with suppress(ValueError):  # no literal
            check_needs(name, ast.literal_eval(needs))
    return docstring.partition("\n")[0]


def _print_order(path: Path, names: tuple[str, ...], settings: tuple[str, ...], trust: bool) -> None:
    from hookdiff.experiment.config import load_config
    from hookdiff.loop.hookspecs import HOOK_NAMES
    from hookdiff.loop.registry import Plugins

    config = load_config(path, names, settings, trust=trust)
    plugins = Plugins({name: part.build() for name, part in config.plugins.items()})
    for hook in HOOK_NAMES:
        called = []
        for impl in plugins.order(hook):
            place = " (around)" if impl.wrapper else " (first)" if impl.tryfirst else " (last)" * impl.trylast
            called += [impl.plugin_name + place] * (impl.plugin_name != "defaults")
        click.echo(f"{hook:<22} {' > '.join(called) or '-'}")


def _print_markdown(names: tuple[str, ...]) -> None:
    from hookdiff.experiment.discovery import plugin_class
    from hookdiff.options.help import markdown
    from hookdiff.options.imports import PARTS, import_object, installed

    if not names:
        raise click.UsageError("--markdown needs the NAME of a plugin or part")
    for name in names:
        entries = installed(PARTS).get(name)
        given = frozenset({"params"}) if name.startswith("optimizer.") else frozenset()  # by hookdiff
        found = import_object(entries[0].value, f"the part {name!r}") if entries else plugin_class(name)
        click.echo(markdown(found, given), nl=False)
