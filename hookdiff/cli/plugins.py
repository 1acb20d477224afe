"""`hookdiff plugins`: list the installed plugins, their keys, or the order of their calls."""

import inspect
from pathlib import Path

import click

from hookdiff.cli.options import override_options


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--order", type=click.Path(path_type=Path), metavar="CONFIG", help="Print the call order of each hook.")
@override_options
def command(names: tuple[str, ...], order: Path | None, plugins: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """List the installed plugins.

    With NAME: print a description of these plugins, and the keys of their tables. With --order: print the plugins of
    CONFIG that each hook calls, in call order.
    """
    from hookdiff.experiment.discovery import distribution, installed, plugin_class
    from hookdiff.experiment.reference import plain

    if order is not None:
        _print_order(order, plugins, settings)
    elif names:
        for name in names:
            plugin = plugin_class(name)
            click.echo("\n".join([f"{name}: {inspect.getdoc(plugin)}\n\n[plugins.{name}]", *plain(plugin), ""]))
    else:
        for name, entries in installed().items():
            try:
                summary = (inspect.getdoc(plugin_class(name)) or "").partition("\n")[0]
            except Exception as error:  # a broken plugin must not hide the others
                summary = f"cannot be used: {error}"
            others = [distribution(entry) for entry in entries if not entry.dist or entry.dist.name != "hookdiff"]
            click.echo(f"{name:<12} {summary}" + f"  ({', '.join(others)})" * bool(others))


def _print_order(path: Path, names: tuple[str, ...], settings: tuple[str, ...]) -> None:
    from hookdiff.experiment.config import load_config
    from hookdiff.hookspecs import HOOK_NAMES
    from hookdiff.plugins import Plugins

    config = load_config(path, names, settings)
    plugins = Plugins({name: part.build() for name, part in config.plugins.items()})
    for hook in HOOK_NAMES:
        called = []
        for impl in plugins.order(hook):
            place = " (around)" if impl.wrapper else " (first)" if impl.tryfirst else " (last)" * impl.trylast
            called += [impl.plugin_name + place] * (impl.plugin_name != "defaults")
        click.echo(f"{hook:<22} {' > '.join(called) or '-'}")
