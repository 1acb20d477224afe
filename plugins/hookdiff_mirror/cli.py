"""`hookdiff mirror`: rebuild a run in Aim, TensorBoard or W&B from its run directory."""

from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "name", required=True, metavar="NAME", help="aim, tensorboard, wandb, or another sink.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Option of the sink; may be repeated.")
def command(run: Path, name: str, settings: tuple[str, ...]) -> None:
    """Send RUN, a run directory, to a tracker. Only the files of the run directory are read.

    The options are those of [plugins.NAME] in the config of the run, if it has them. A mirror that was made before is
    replaced; only W&B keeps its older run, which can be deleted on its page. The run may be under way, unless it writes
    to the same place of the tracker itself.
    """
    from hookdiff import Sink, UserError, nearest
    from hookdiff.authors import mirror, tracked
    from hookdiff.experiment import make_plugin
    from hookdiff.run_dir import History

    history = History.of(run)
    if ":" not in name and name not in entry_points(group="hookdiff.plugins").names:
        known = _trackers()
        raise UserError(f"--to {name}: no tracker of that name{nearest(name, known)}; installed: {', '.join(known)}")
    sink = make_plugin(name, history.config, settings, run_dir=history.run_dir)
    own = make_plugin(name, history.config)  # to compare the places
    if not isinstance(sink, Sink) or not isinstance(own, Sink):
        raise UserError(f"--to {name}: this plugin is no tracker; installed: {', '.join(_trackers())}")
    is_own = name in history.config.get("run", {}).get("plugins", ())
    if history.state == "running" and is_own and sink.place(tracked(history)) == own.place(tracked(history)):
        raise UserError(f"{run} is under way and writes to {name} itself; wait for its end, or --set another place")
    try:
        sent = mirror(history, sink)
    except UserError:
        raise
    except Exception as error:  # trackers raise errors of any type
        raise UserError(f"--to {name}: the tracker failed: {type(error).__name__}: {error}") from error
    click.echo(f"{run}: {sent.steps:,} steps up to {sent.last:,}, {sent.pictures:,} pictures -> {sink.where}")


def _trackers() -> list[str]:
    """Return the names of the installed plugins that are sinks."""
    from hookdiff import Sink

    found = set()
    for entry in entry_points(group="hookdiff.plugins"):
        with suppress(ImportError, AttributeError):  # the package of another plugin may be broken
            kind = entry.load()
            if isinstance(kind, type) and issubclass(kind, Sink):
                found.add(entry.name)
    return sorted(found)
