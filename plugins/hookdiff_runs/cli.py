"""`hookdiff runs`: list the runs in a folder, with state, loss, FID and what differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hookdiff import UserError
from hookdiff_runs.rows import STATES


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default="runs", metavar="[DIR]")
@click.option(
    "--sort", default="name", metavar="KEY", help="name, state, step, loss, age, a metric or a key that differs."
)
@click.option("--state", type=click.Choice(STATES), help="List only the runs in this state.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON, with all keys that differ.")
def command(folder: Path, sort: str, state: str | None, is_json: bool) -> None:
    """List the runs in DIR and the folders in it, three levels deep. The runs may be under way.

    loss is the newest loss/smooth, or else loss. Each FID that was logged has a column with its lowest value and step.
    age is the time since the last line was written. The last column has the config keys that are not the same in all
    runs.
    """
    from hookdiff import shown
    from hookdiff.disk import no_such_folder
    from hookdiff.run_dir import find_runs
    from hookdiff_runs.rows import read_row
    from hookdiff_runs.table import Runs

    if not folder.exists():
        raise no_such_folder(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; expected a folder with runs")
    rows = [read_row(history, folder) for history in find_runs(folder)]
    runs = Runs([row for row in rows if state in (None, row.state)])
    if runs.rows:
        runs.sort(sort)
    if is_json:
        click.echo(json.dumps(runs.as_values(), indent=1))
    elif not runs.rows:
        click.echo(f"{shown(folder)}: no {state} runs" if state else f"{shown(folder)}: no runs")
    elif sys.stdout.isatty():
        runs.print()
    else:
        click.echo(runs.as_text())
