"""`hookdiff mirror`: rebuild a run in Aim, TensorBoard or W&B from its run directory."""

from pathlib import Path

import click

from hookdiff.cli import complete_trackers, run_argument


@click.command()
@run_argument()
@click.option(
    "--to",
    "name",
    required=True,
    metavar="NAME",
    help="Tracker: aim, tensorboard, wandb, or another sink.",
    shell_complete=complete_trackers,
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Option of the sink; may be repeated.")
def command(run: Path, name: str, settings: tuple[str, ...]) -> None:
    """Send RUN, a run directory, to a tracker. Only the files of the run directory are read.

    The options of the tracker are those in [plugins.NAME] of the run's config, if there is such a table. An earlier
    mirror is replaced; only W&B keeps the older run, which you can delete on its page. A run that still trains can be
    sent, unless the run itself writes to the same place.
    """
    from hookdiff import Sink, UserError
    from hookdiff.authors import mirror, tracked
    from hookdiff.experiment import installed_that, make_plugin
    from hookdiff.run_dir import History

    history = History.of(run)
    sink = make_plugin(name, history.config, settings, run_dir=history.run_dir)
    run_sink = make_plugin(name, history.config)  # to compare the places of both sinks
    if not isinstance(sink, Sink) or not isinstance(run_sink, Sink):
        trackers = installed_that(lambda kind: issubclass(kind, Sink))
        raise UserError(f"--to {name}: this plugin is no tracker; use one of {', '.join(trackers)}")
    is_own = name in history.config.get("run", {}).get("plugins", ())
    if history.state == "running" and is_own and sink.place(tracked(history)) == run_sink.place(tracked(history)):
        raise UserError(f"{run} is under way and writes to {name} itself; wait for its end, or --set another place")
    try:
        sent = mirror(history, sink)
    except UserError:
        raise
    except Exception as error:  # trackers raise errors of any type
        raise UserError(f"--to {name}: the tracker failed: {type(error).__name__}: {error}") from error
    click.echo(f"{run}: {sent.steps:,} steps up to {sent.last:,}, {sent.pictures:,} pictures -> {sink.where}")
