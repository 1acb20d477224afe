"""Arguments and options that several commands share."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import click


def _split(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for names in given for name in names.split(",") if name.strip())


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds `options`; click shows the last one at the top."""
    return lambda function: reduce(lambda made, option: option(made), options, function)


config_argument = click.argument("config", type=click.Path(path_type=Path))
# For commands that read the config of a run.
trust_option = click.option(
    "--trust", is_flag=True, help="Trust the config of a run: its code, its URLs, and the folders that it writes to."
)
# For commands that change a config.
override_options = _all(
    trust_option,
    click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Set a key; may be repeated."),
    click.option("--plugins", multiple=True, callback=_split, metavar="NAME,no:NAME", help="Add or remove plugins."),
)
# For commands that train.
training_options = _all(
    click.option("--usr1", is_flag=True, help="End the run at SIGUSR1 as out of time, with exit code 75."),
    click.option("--fresh", multiple=True, metavar="NAME", help="Ignore a plugin's saved state; may be repeated."),
    click.option("--skip-batches", default=0, type=click.IntRange(0), metavar="N", help="Skip the next N batches."),
    click.option("--lr", metavar="X", help="Set the learning rate: short for --set optimizer.lr=X."),
    override_options,
)
