"""Arguments and options that several commands share. Paths are checked before a command imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookdiff.cli.completion import complete_plugins, complete_settings, complete_values
from hookdiff.cli.output import say
from hookdiff.disk.paths import check_writable, why_missing
from hookdiff.errors import UnknownWeights, UserError
from hookdiff.experiment.toml_file import read_toml
from hookdiff.run_dir.layout import run_of

if TYPE_CHECKING:
    from hookdiff.experiment.loaded_run import Run


class WrongPath(click.ClickException):
    """A path that a command cannot use. Under torchrun, only the first process prints the error."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        say(f"hookdiff: {self.message}", err=True)


def check_exists(path: Path) -> None:
    """Check that `path` exists.

    Raises:
        UserError: if it does not; the message suggests the nearest name.
    """
    if not path.exists():
        raise UserError(f"{path}: {why_missing(path)}")


def _config_or_run(path: Path) -> None:
    if path.is_dir():
        run_of(path)
    else:
        read_toml(path)


def checked_by(check: Callable[[Path], object]) -> Callable[..., Path | None]:
    """Return a callback of click that refuses the paths for which `check` raises UserError."""

    def checked(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        try:
            if path is not None:
                check(path)
        except UserError as error:
            raise WrongPath(str(error)) from None
        return path

    return checked


def path_argument(
    name: str, check: Callable[[Path], object], metavar: str | None = None, required: bool = True
) -> Callable[[Any], Any]:
    """Return the decorator of a path argument that refuses the paths that `check` refuses with a UserError.

    The error comes without delay if `check`, the module of the command and its package do not import torch.
    """
    kind = click.Path(path_type=Path)
    return click.argument(name, type=kind, metavar=metavar, required=required, callback=checked_by(check))


def run_argument(metavar: str = "RUN") -> Callable[[Any], Any]:
    """Return the decorator of the argument `run`, the directory of a run or a checkpoint in it."""
    return path_argument("run", run_of, metavar)


def config_or_run_argument(name: str, metavar: str) -> Callable[[Any], Any]:
    """Return the decorator of an argument that is the file of a config, or the directory of a run."""
    return path_argument(name, _config_or_run, metavar)


def _split(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for names in given for name in names.split(",") if name.strip())


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds `options`; click shows the last option at the top."""
    return lambda function: reduce(lambda made, option: option(made), options, function)


config_argument = path_argument("config", read_toml)
# For commands that read the config of a run.
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Trust the config of a run, now and later: its code, its URLs, and the folders that it writes to.",
)
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Set a key; may be repeated.",
    shell_complete=complete_settings,
)
# For commands that change a config.
override_options = _all(
    trust_option,
    settings_option,
    click.option(
        "--plugins",
        multiple=True,
        callback=_split,
        metavar="NAME,no:NAME",
        help="Add or remove plugins.",
        shell_complete=complete_plugins,
    ),
)
# For commands that train.
training_options = _all(
    click.option(
        "--usr1",
        is_flag=True,
        help="At SIGUSR1, end the run with exit code 75 (out of time); default: save, and go on.",
    ),
    click.option("--fresh", multiple=True, metavar="NAME", help="Ignore a plugin's saved state; may be repeated."),
    click.option("--skip-batches", default=0, type=click.IntRange(0), metavar="N", help="Skip the next N batches."),
    click.option("--lr", metavar="X", help="Set the learning rate, as --set optimizer.lr=X does."),
    override_options,
)
length_options = _all(
    click.option("--epochs", type=click.IntRange(1), metavar="N", help="Set the length of the whole run to N epochs."),
    click.option("--steps", type=click.IntRange(1), metavar="N", help="Set the length of the whole run to N updates."),
)


def length_settings(steps: int | None, epochs: int | None) -> tuple[str, ...]:
    """Return the settings that `--steps` or `--epochs` stands for. Raises UserError if both are given."""
    if steps and epochs:
        raise UserError("give --steps or --epochs, not both")
    return (f"run.steps={steps or 'none'}", f"run.epochs={epochs or 'none'}") if steps or epochs else ()


# For commands that use the weights of a run.
weights_option = click.option(
    "--weights", metavar="NAME|FILE", help="An average (ema), model, or a safetensors file.  [default: an average]"
)
# For commands that sample: the arguments of `Run.sampling`.
solver_options = _all(
    click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps of the sampler."),
    click.option(
        "--sampler",
        metavar="NAME",
        help="ddim, ddpm, euler, heun, dpmpp_2m, or an installed one.",
        shell_complete=complete_values("sampling.sampler"),
    ),
)
guidance_option = click.option("--guidance-scale", type=float, metavar="X", help="Scale of classifier-free guidance.")
seed_option = click.option("--seed", default=0, metavar="N", help="Seed of the noise.")
device_option = click.option(
    "--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps.  [default: the run's own, or a GPU if there is one]"
)
# For commands that write files.
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace a file, folder or run that exists.")


def out_option(text: str, metavar: str = "FILE") -> Callable[..., Any]:
    """Return the option of a command's main output, with `text` as its help."""
    return click.option("-o", "--out", type=click.Path(path_type=Path), metavar=metavar, help=text)


# For commands that print text.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def check_free(path: Path, overwrite: bool) -> None:
    """Raise UserError if `path` exists and `overwrite` is false."""
    if not overwrite and os.path.lexists(path):
        raise UserError(f"{path} exists; add --overwrite to replace it, or choose another name")


def check_output(path: Path, overwrite: bool) -> None:
    """Raise UserError if no file can be written at `path`, or if one exists and `overwrite` is false."""
    check_writable(path)
    check_free(path, overwrite)


@contextmanager
def chosen_weights(run: Run, name: str | None) -> Iterator[str]:
    """Give `run` the weights that `--weights` names, until the end of the `with`; see `Run.weights`.

    Raises:
        UserError: for an unknown name; the message lists the known names.
    """
    try:
        with run.weights(name) as held:
            yield held
    except UnknownWeights as error:
        raise UserError(f"{run.path}: --weights: {error}, or a file that ends in .safetensors") from None
