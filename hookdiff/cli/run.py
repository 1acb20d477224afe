"""`hookdiff run`: train a model from a config."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookdiff.cli.arguments import (
    config_argument,
    length_options,
    length_settings,
    out_option,
    overwrite_option,
    training_options,
)
from hookdiff.cli.garbage_collection import freeze_modules
from hookdiff.cli.output import say
from hookdiff.errors import NoCheckpoint, UserError, nearest
from hookdiff.run_dir.layout import check_run_dir

if TYPE_CHECKING:
    from hookdiff.experiment.config import Config
    from hookdiff.loop.loop import Loop

EXIT_CODES = {"done": 0, "plugin": 0, "on_nan": 3, "time": 75, "signal": 130}  # 75 is EX_TEMPFAIL: try again
logger = logging.getLogger("hookdiff")


@click.command()
@config_argument
@length_options
@training_options
@out_option("Run directory.  [default: runs/ and the name of the run]", metavar="DIR")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint, or else start a new run.")
@overwrite_option
def command(
    config: Path,
    steps: int | None,
    epochs: int | None,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    settings: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a model from CONFIG, a TOML file."""
    if resume and overwrite:
        raise UserError("give --resume or --overwrite, not both")
    settings = (*settings, *length_settings(steps, epochs))
    train_from_config(config, out, resume=resume, overwrite=overwrite, settings=settings, **options)


def train_from_config(
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
    trust: bool,
) -> None:
    """Train from the config at `path`, print a summary, and exit with the code of the outcome.

    run_dir: None means runs/NAME. resume: see `build_loop`; True also starts a run that has no directory yet.
    trust: see `load_config`.
    """
    from hookdiff.experiment.config import load_config
    from hookdiff.experiment.launch import launched
    from hookdiff.machine.joining import leave, num_launched, shown_once
    from hookdiff.machine.ranks import first_rank_does, first_rank_says

    logger.setLevel(logging.INFO)
    if lr is not None:
        settings = (*settings, f"optimizer.lr={lr}")
    with shown_once():
        config = load_config(path, plugins, settings, trust=trust)
        for name in fresh:
            if name not in config.plugins:
                near = nearest(name, config.plugins) or f"; choose from: {', '.join(config.plugins) or 'none'}"
                raise UserError(f"--fresh {name}: this run has no such plugin{near}")
    run_dir = run_dir or Path("runs") / config.run.name
    options = {"fresh": fresh, "skip_batches": skip_batches}
    with launched(config):
        is_again, code = first_rank_does(lambda: _earlier_attempt(run_dir))
        if is_again and code is None:
            try:
                code = _train(config, run_dir, resume=run_dir, overwrite=False, usr1=usr1, **options)
            except NoCheckpoint:  # start as the first attempt did: a new run, or a branch
                overwrite = resume is not True
        if code is None:
            code = _train(config, run_dir, resume=resume, overwrite=overwrite, usr1=usr1, **options)
        code = first_rank_says(code)  # all wait for the first rank: torchrun kills the others once one has ended
    if num_launched() > 1:
        leave(code)
    sys.exit(code)


def _earlier_attempt(run_dir: Path) -> tuple[bool, int | None]:
    """Return whether torchrun has restarted the run of `run_dir`, and the exit code of the attempt that ended the run.

    torchrun restarts after every exit code but 0. The code is None if the run has crashed, or was killed.
    """
    from hookdiff.machine.joining import job_name, num_restarts
    from hookdiff.run_dir.outcome_json import read_outcome
    from hookdiff.run_dir.torchrun import is_job

    if not num_restarts() or not is_job(run_dir, job_name()):
        return False, None
    return True, EXIT_CODES.get(read_outcome(run_dir).reason or "error")


def _train(config: Config, run_dir: Path, *, resume: bool | Path, overwrite: bool, usr1: bool, **options: Any) -> int:
    """Train, print a summary, and return the exit code."""
    from hookdiff import experiment
    from hookdiff.builtin.signals import Signals
    from hookdiff.experiment.build import unused_classes
    from hookdiff.experiment.discovery import installed_that
    from hookdiff.loop.contract_checks import implements
    from hookdiff.machine.ranks import first_rank_does
    from hookdiff.options.default_names import DEFAULT_PLUGINS

    def checked_resume() -> bool | Path:
        """Return whether and from where to resume; only the first rank looks, before it makes the directory."""
        goes_on = resume if resume is not True or run_dir.exists() else False
        check_run_dir(run_dir, goes_on in (True, run_dir), overwrite)
        return goes_on

    goes_on = first_rank_does(checked_resume)
    if resume is True and not goes_on:
        logger.info("%s does not exist: the run starts anew", run_dir)
    freeze_modules()
    experiment.try_config(config, resume=bool(goes_on))
    signals = Signals(usr1)
    loop = experiment.build_loop(
        config, run_dir, resume=goes_on, overwrite=overwrite, plugins={"signals": signals}, **options
    )
    if not loop.plugins.implement("restore"):
        saving = " or ".join(
            f"--plugins {name}" for name in installed_that(lambda kind: implements(kind, "restore"), DEFAULT_PLUGINS)
        )
        logger.warning("no plugin saves checkpoints, so the weights are lost at the end; add %s", saving)
    if warning := unused_classes(config, loop.feed.num_classes):
        logger.warning(warning)
    reason = loop.run()
    if loop.is_main:
        say(_report(config, loop, reason, goes_on, run_dir))
    return 128 + signals.caught if signals.caught and reason == "signal" else EXIT_CODES[reason]


def _is_remembered(run_dir: Path) -> bool:
    from hookdiff.disk.reading import read_file
    from hookdiff.experiment.own_runs import is_remembered
    from hookdiff.run_dir.config_toml import CONFIG

    path = run_dir / CONFIG
    return path.is_file() and is_remembered(path, read_file(path))


def _report(config: Config, loop: Loop, reason: str, resume: bool | Path, run_dir: Path) -> str:
    """Return the report at the end of the command: the summary, and how to go on."""
    from hookdiff.cli.summary import run_summary

    and_trust = " --trust" * (bool(config.needs_trust) and not _is_remembered(run_dir))
    if reason == "done" and resume and loop.progress.step == loop.first_step:
        unit, length, done = "steps", config.run.steps, loop.progress.step
        if config.run.epochs is not None:
            unit, length, done = "epochs", config.run.epochs, loop.progress.epoch
        source, out = (run_dir, "") if resume is True else (resume, f" --out {run_dir}" * (resume != run_dir))
        assert length is not None
        known = f"is already done, with {done:,} of {length:,} {unit}"
        if done > length:
            known = (
                f"already has {done:,} {unit}, and --{unit} {length} is the length of the whole run: no step was made"
            )
        return f"{source} {known}; to train longer: hookdiff resume {source} --{unit} N{out}{and_trust}"
    report = run_summary(loop, reason, config.run.name, time.monotonic() - loop.end.start_time)
    if reason in ("signal", "time") and loop.progress.step and loop.plugins.implement("restore"):
        report += f"\nto continue: hookdiff resume {run_dir}{and_trust}"
    if reason == "on_nan":
        report += (
            "\n--resume repeats the step; unless a remedy is named above, add --skip-batches 1 to skip its batch, or "
            "--lr X for a lower learning rate"
        )
    return report
