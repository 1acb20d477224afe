"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def config_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument CONFIG, a path."""
    return click.argument("config", type=click.Path(path_type=Path))(function)


def override_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--plugins` and `--set`, which change a config from the command line."""
    for option in (
        click.option(
            "--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Set a key; may be given several times."
        ),
        click.option(
            "--plugins",
            multiple=True,
            callback=lambda ctx, parameter, given: tuple(
                n.strip() for part in given for n in part.split(",") if n.strip()
            ),
            metavar="NAME,no:NAME",
            help="Plugins to add to the config's, or to take away.",
        ),
    ):
        function = option(function)
    return function


def training_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what all commands that train take: `override_options` and those of one process of a run."""
    for option in (
        click.option("--usr1", is_flag=True, help="On SIGUSR1 save and exit with 75, as when run.max_time is over."),
        click.option("--fresh", multiple=True, metavar="NAME", help="When it goes on, start this plugin anew."),
        click.option(
            "--skip-batches", default=0, type=click.IntRange(0), metavar="N", help="Pass over the next N batches."
        ),
        click.option("--lr", metavar="X", help="The learning rate: short for --set optimizer.lr=X."),
        override_options,
    ):
        function = option(function)
    return function
