"""Arguments and options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _split(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for names in given for name in names.split(",") if name.strip())


def config_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument CONFIG, a path."""
    return click.argument("config", type=click.Path(path_type=Path))(function)


def trust_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --trust, for commands that read the config of a run."""
    text = "Trust the config of a run: its code, its URLs, and the folders that it writes to."
    return click.option("--trust", is_flag=True, help=text)(function)


def override_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that change a config, and --trust."""
    for option in (  # click shows the option that is added last at the top
        trust_option,
        click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Set a key; may be repeated."),
        click.option(
            "--plugins", multiple=True, callback=_split, metavar="NAME,no:NAME", help="Add or remove plugins."
        ),
    ):
        function = option(function)
    return function


def training_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands that train, with `override_options` among them."""
    for option in (
        click.option("--usr1", is_flag=True, help="End the run at SIGUSR1 as out of time, with exit code 75."),
        click.option("--fresh", multiple=True, metavar="NAME", help="Ignore a plugin's saved state; may be repeated."),
        click.option("--skip-batches", default=0, type=click.IntRange(0), metavar="N", help="Skip the next N batches."),
        click.option("--lr", metavar="X", help="Set the learning rate: short for --set optimizer.lr=X."),
        override_options,
    ):
        function = option(function)
    return function
