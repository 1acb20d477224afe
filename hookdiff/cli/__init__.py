"""The command line: one module a command, imported when it is called, so that `--help` stays fast."""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.util
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import click

from hookdiff.cli.exits import FAILED, WRONG_INPUT

COMMANDS = {
    "run": "Train from a config.",
    "resume": "Go on with a run that was stopped, for longer or in another directory if you like.",
    "check": "Check a config and print it with every default; build nothing.",
    "data": "Look at what a config would train on: sizes, classes, what is broken, and a picture of it.",
    "sample": "Make images from a trained run.",
    "plugins": "List the installed plugins, or the order in which a config's are called.",
    "hooks": "Print the contract: every hook, when it fires, and who may change what.",
}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(entry.name for entry in entry_points(group="hookdiff.commands"))]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            command: click.Command = importlib.import_module(f"hookdiff.cli.{name}").command
            return command
        for entry in entry_points(group="hookdiff.commands"):
            if entry.name == name:
                loaded: click.Command = entry.load()
                return loaded
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [*COMMANDS.items()]
        rows += sorted((entry.name, _summary(entry)) for entry in entry_points(group="hookdiff.commands"))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(entry: EntryPoint) -> str:
    """Return the first line of what the module of a plugin's command says of itself, after its name.

    It is read and not imported, since that would import the plugin. Where there is none: who brings the command.
    """
    package, *inner = entry.module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder, *inner).with_suffix(".py")
        if inner and source.is_file():
            with suppress(SyntaxError, ValueError, OSError):  # a broken package must not hide the other commands
                first_line = (ast.get_docstring(ast.parse(source.read_bytes())) or "").partition("\n")[0]
                if said := first_line.rpartition("`: ")[2]:
                    return said[0].upper() + said[1:]
    return f"(from {entry.dist.name if entry.dist else entry.value})"


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("hookdiff"), prog_name="hookdiff")
def group() -> None:
    """Train diffusion models with a loop you can read; every feature is a plugin.

    Exit codes: 0 done; 2 the input is wrong; 3 stopped by on_nan; 75 out of time, go on with `hookdiff resume`; 130 or
    143 stopped by a signal; 1 anything else.
    """


def main() -> None:
    """Run the command line; the user's mistakes end in one message and exit code 2."""
    try:
        code = group.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except Exception as error:
        from hookdiff.errors import StorageError, UserError

        if isinstance(error, OSError) and error.errno in _DISK:  # of a plugin that does not look at its own files
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"hookdiff: {where}{error.strerror}", err=True)
            sys.exit(FAILED)
        if not isinstance(error, UserError):
            raise
        click.echo(f"hookdiff: {error}", err=True)
        sys.exit(FAILED if isinstance(error, StorageError) else WRONG_INPUT)
