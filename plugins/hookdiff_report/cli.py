"""`hookdiff report`: write one HTML file about a run, or a comparison of several runs."""

from pathlib import Path

import click

from hookdiff import UserError
from hookdiff.cli import check_output, out_option, overwrite_option


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RUN...")
@out_option("HTML file to write.  [default: report.html in RUN, in the current folder for several runs; overwritten]")
@click.option(
    "--goal", "texts", multiple=True, metavar="NAME=X", help="Draw a target, such as fd/digits=0.4; may be repeated."
)
@overwrite_option
@click.option("--open", "is_shown", is_flag=True, help="Show the report in the browser.")
def command(runs: tuple[Path, ...], out: Path | None, texts: tuple[str, ...], overwrite: bool, is_shown: bool) -> None:
    """Write one HTML file about RUN, a run directory. Several runs are compared.

    The file has everything in it: plots, pictures, events, config and environment. It loads nothing from the network,
    and equal run directories give equal files. The run may be under way.
    """
    from hookdiff import shown
    from hookdiff.disk import new_file
    from hookdiff.run_dir import MOST_LINES, History
    from hookdiff.terminal import byte_size
    from hookdiff_report.goals import Goal
    from hookdiff_report.page import page

    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError("hookdiff report needs the package bokeh: pip install 'hookdiff[report]'") from None
    try:
        goals = [Goal.of(text) for text in texts]
    except ValueError as error:
        raise UserError(f"--goal {error}") from None
    histories = (History.of(run, MOST_LINES) for run in runs)
    different = list({history.run_dir.resolve(): history for history in histories}.values())
    path = out or (different[0].run_dir if len(different) == 1 else Path()) / "report.html"
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--out {shown(path)}: expected a name that ends in .html")
    check_output(path, overwrite or out is None)
    try:
        data = page(different, goals).encode("utf-8", "replace")
    except OSError as error:  # such as a folder that has the name of a file
        raise UserError(f"{shown(error.filename)}: cannot be read: {error.strerror}") from None
    try:
        with new_file(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise UserError(f"{shown(path)}: cannot be written: {error.strerror or error}") from None
    click.echo(f"{shown(path)}: {byte_size(len(data))}")
    if is_shown:
        click.launch(str(path.resolve()))
