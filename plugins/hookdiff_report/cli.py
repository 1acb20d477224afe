"""`hookdiff report`: write one HTML file about a run, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path

import click

from hookdiff import UserError


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="HTML file to write.  [default: report.html in RUN; in the current folder for several runs]",
)
@click.option("--open", "is_shown", is_flag=True, help="Show the report in the browser.")
def command(runs: tuple[Path, ...], out: Path | None, is_shown: bool) -> None:
    """Write one HTML file about RUN, a run directory. Several runs are compared.

    The file has everything in it: plots, pictures, events, config and environment. It loads nothing from the network,
    and equal run directories give equal files. An earlier report is replaced. The run may be under way.
    """
    from hookdiff.disk import check_writable
    from hookdiff.errors import shown
    from hookdiff.history import History
    from hookdiff_report.output import check_name, replace
    from hookdiff_report.page import page

    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError("hookdiff report needs the package bokeh: pip install 'hookdiff[report]'") from None
    found = {history.run_dir.resolve(): history for history in map(History.of, runs)}
    path = out or (Path("report.html") if len(found) > 1 else next(iter(found.values())).run_dir / "report.html")
    check_name(path)
    check_writable(path)
    try:
        text = page(list(found.values()))
    except OSError as error:  # such as a folder that has the name of a file
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    size = replace(path, text)
    click.echo(f"{shown(path)}: {size / 1e6:.1f} MB")
    if is_shown:
        click.launch(str(path.resolve()))
