"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def _split(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for names in given for name in names.split(",") if name.strip())


def config_argument(function: Command) -> Command:
    """Add the argument CONFIG, a path."""
    return click.argument("config", type=click.Path(path_type=Path))(function)


# Click shows the option that is added last at the top.


def override_options(function: Command) -> Command:
    """Add the options that change a config."""
    text = "Set a key; may be given several times."
    function = click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help=text)(function)
    text = "Add plugins to those of the config; no:NAME removes one."
    return click.option("--plugins", multiple=True, callback=_split, metavar="NAME,no:NAME", help=text)(function)


def training_options(function: Command) -> Command:
    """Add the options of all commands that train; `override_options` are among them."""
    text = "End the run at SIGUSR1 as out of time, with exit code 75."
    function = click.option("--usr1", is_flag=True, help=text)(function)
    text = "Start this plugin anew in a resumed run; may be given several times."
    function = click.option("--fresh", multiple=True, metavar="NAME", help=text)(function)
    text = "Skip the next N batches."
    function = click.option("--skip-batches", default=0, type=click.IntRange(0), metavar="N", help=text)(function)
    text = "Set the learning rate: short for --set optimizer.lr=X."
    function = click.option("--lr", metavar="X", help=text)(function)
    return override_options(function)
