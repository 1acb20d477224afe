"""`hookdiff runs`: list the runs in a folder, with state, loss, FID and what differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff import UserError
from hookdiff.cli import json_option
from hookdiff_runs.rows import STATES

if TYPE_CHECKING:
    from hookdiff.run_dir import History

_RUNS = "runs"  # the folder by default


@click.command()
@click.argument("places", nargs=-1, metavar="[DIR...] [NAME...]")
@click.option(
    "--sort", default="name", metavar="NAME", help="name, state, step, loss, age, a metric or a key of the configs."
)
@click.option("--state", type=click.Choice(STATES), help="List only the runs in this state.")
@click.option("--columns", metavar="A,B,...", help="Show these columns: any name for --sort, or differs.")
@click.option(
    "--diff",
    "is_diff",
    is_flag=True,
    help="Show only the config keys that differ, one in each column, and of the plugins only those of some runs.",
)
@json_option
def command(
    places: tuple[str, ...], sort: str, state: str | None, columns: str | None, is_diff: bool, as_json: bool
) -> None:
    """List the runs in DIR and the folders in it, three levels deep. The runs may be under way.

    NAME is a pattern, such as 'sweep-*': only runs with such a name, or path below DIR, are listed. Without DIR, the
    folder "runs" is searched.

    loss is smoothed: the newest loss/smooth, or without the plugin loss the mean of the last 10 logged losses. Each FID
    that was logged has a column with its lowest value and step. age is the time since the last line was written. The
    last column has the config keys that are not the same in all runs.
    """
    import shutil

    from hookdiff import shown
    from hookdiff_runs.configs import Configs
    from hookdiff_runs.rows import read_row
    from hookdiff_runs.table import Runs

    if as_json and (columns or is_diff):
        raise UserError("--json prints all columns and all keys that differ; leave out --columns and --diff")
    configs = Configs()
    rows = [read_row(history, name, configs) for name, history in _found(places)]
    runs = Runs([row for row in rows if state in (None, row.state)])
    if runs.rows:
        runs.sort(sort)
    if as_json:
        click.echo(json.dumps(runs.as_values(), indent=1))
    elif not runs.rows:
        click.echo(f"{shown(' '.join(places) or _RUNS)}: no {f'{state} ' if state else ''}runs")
    else:
        chosen = list(filter(None, (name.strip() for name in columns.split(",")))) if columns else runs.usual
        if columns:
            runs.check(chosen, "--columns")
        elif is_diff:
            chosen = ["name", *runs.keys]
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(runs.table(chosen, width, is_diff)))
        if is_diff and len(chosen) == 1:
            click.echo("The configs are equal.")


def _found(places: Sequence[str]) -> Iterator[tuple[str, History]]:
    """Yield the runs in the folders among `places`, each with its name; only those that match a pattern, if any."""
    from hookdiff.disk import no_such_folder
    from hookdiff.run_dir import find_runs

    patterns = [place for place in places if set("*?[") & set(place) and not Path(place).exists()]
    folders = [Path(place) for place in places if place not in patterns] or [Path(_RUNS)]
    for folder in folders:
        if not folder.exists():
            raise no_such_folder(folder)
        if not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder with runs")
    for folder in folders:
        for history in find_runs(folder):
            path = history.run_dir if len(folders) > 1 else history.run_dir.relative_to(folder)
            name = history.name if path == Path() else str(path)
            if not patterns or any(fnmatchcase(text, p) for p in patterns for text in (name, history.run_dir.name)):
                yield name, history
