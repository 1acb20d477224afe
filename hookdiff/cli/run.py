"""`hookdiff run`: train a model from a config."""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import click

from hookdiff.cli.options import config_argument, training_options
from hookdiff.cli.output import say
from hookdiff.errors import UserError, nearest

EXIT_CODES = {"done": 0, "plugin": 0, "on_nan": 3, "time": 75, "signal": 130}  # 75 is EX_TEMPFAIL: try again
log = logging.getLogger("hookdiff")


@click.command()
@config_argument
@training_options
@click.option("--out", type=click.Path(path_type=Path), help="Run directory.  [default: runs/ and the name]")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint; start anew if there is none.")
@click.option("--overwrite", is_flag=True, help="Delete an earlier run in the run directory.")
def command(config: Path, out: Path | None, resume: bool, overwrite: bool, **options: Any) -> None:
    """Train a model from CONFIG, a TOML file."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    train(config, out, resume=resume, overwrite=overwrite, **options)


def train(
    path: Path,
    run_dir: Path | None,
    *,
    resume: bool | Path,
    overwrite: bool = False,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    lr: str | None,
    skip_batches: int,
    fresh: tuple[str, ...],
    usr1: bool,
    trust: bool | None = None,
) -> None:
    """Train from the config at `path`, print a summary, and exit with the code of the outcome.

    run_dir: None means runs/NAME. resume: see `build_loop`; True also starts a run that has no directory yet.
    trust: see `load_config`.
    """
    from hookdiff import experiment
    from hookdiff.builtin.signals import Signals
    from hookdiff.cli.summary import summary
    from hookdiff.disk.paths import check_run_dir
    from hookdiff.experiment.build import unused_classes
    from hookdiff.experiment.config import load_config

    log.setLevel(logging.INFO)
    if lr is not None:
        settings = (*settings, f"optimizer.lr={lr}")
    config = load_config(path, plugins, settings, trust=trust)
    for name in fresh:
        if name not in config.plugins:
            near = nearest(name, config.plugins) or f"; its plugins: {', '.join(config.plugins) or 'none'}"
            raise UserError(f"--fresh {name}: this run has no such plugin{near}")
    run_dir = run_dir or Path("runs") / config.run.name
    if resume is True and not run_dir.exists():
        resume = False
        log.info("%s does not exist: the run starts anew", run_dir)
    check_run_dir(run_dir, resume in (True, run_dir), overwrite)
    experiment.try_config(config, resume=bool(resume))
    signals = Signals(usr1)
    added = {"signals": signals}
    loop = experiment.build_loop(
        config, run_dir, resume=resume, overwrite=overwrite, fresh=fresh, skip_batches=skip_batches, plugins=added
    )
    if warning := unused_classes(config, loop.feed.num_classes):
        log.warning(warning)
    reason = loop.run()
    and_trust = " --trust" * bool(config.own_code)
    if reason == "done" and resume and loop.progress.step == loop.first_step:
        unit = "steps" if config.run.epochs is None else "epochs"
        source, out = (run_dir, "") if resume is True else (resume, f" --out {run_dir}" * (resume != run_dir))
        out += and_trust
        length, made = getattr(config.run, unit), getattr(loop.progress, unit.removesuffix("s"))
        known = f"is already done, with {made} of {length} {unit}"
        if made > length:
            known = (
                f"already has {made} {unit}, and --{unit} {length} is the length of the whole run: nothing was trained"
            )
        say(f"{source} {known}; to train longer: hookdiff resume {source} --{unit} N{out}")
    else:
        say(summary(loop, reason, config.run.name, time.monotonic() - loop.end.start_time))
        if reason in ("signal", "time") and loop.progress.step and loop.plugins.implement("restore"):
            say(f"to continue: hookdiff resume {run_dir}{and_trust}")
    sys.exit(128 + signals.caught if signals.caught and reason == "signal" else EXIT_CODES[reason])
