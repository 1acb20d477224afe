"""The command line. Each command is a module that is imported only for its call, so that `--help` stays fast."""

import errno
import os
import re
import sys
import time
from contextlib import suppress
from importlib.metadata import EntryPoint, version

import click
from click.shell_completion import CompletionItem

from hookdiff.cli.code import file_of
from hookdiff.cli.garbage_collection import collect_rarely
from hookdiff.cli.output import drop_unwritten, log_to_stderr, open_streams, say
from hookdiff.errors import HookError, OnAnotherRank, PluginError, UserError, nearest
from hookdiff.machine.safe_path import keep_safe_path
from hookdiff.options.default_names import COMMAND_GROUPS
from hookdiff.options.imports import entries_of
from hookdiff.terminal.bars import shown_works

COMMANDS = ("run", "resume", "check", "plugins", "hooks", "schema")  # packages of plugins add more commands
GROUP = "hookdiff.commands"
VARIABLE = "_HOOKDIFF_COMPLETE"  # a shell sets this variable to ask click for completions
_MOMENT = 3.0  # seconds
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def _entries() -> list[EntryPoint]:
    entries = [EntryPoint(name, f"hookdiff.cli.{name}:command", GROUP) for name in COMMANDS]
    return entries + sorted(entries_of(GROUP), key=lambda entry: entry.name)


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.name for entry in _entries()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        match = next((entry for entry in _entries() if entry.name == name), None)
        command: click.Command | None = match.load() if match else None
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        """Complete the names of commands, without importing all commands as click does."""
        entries = [entry for entry in _entries() if entry.name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(entry.name, help=_summary(entry)) for entry in entries), *options]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command as click does; a name that is none is refused with the nearest one."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no command named {args[0]!r}{nearest(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        entries = {entry.name: entry for entry in _entries()}
        grouped = {name for names in COMMAND_GROUPS.values() for name in names}
        groups = {**COMMAND_GROUPS, "Of other packages": tuple(name for name in entries if name not in grouped)}
        width = max(map(len, entries))
        for title, names in groups.items():
            rows = [(name.ljust(width), _summary(entries[name])) for name in names if name in entries]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _summary(entry: EntryPoint) -> str:
    """Return the summary of a command, after "`hookdiff NAME`: " in its module's docstring; else the distribution.

    The file is read and not imported, because the import would take long.
    """
    if source := file_of(entry.module):
        first_line = source.read_text("utf-8", errors="replace").partition("\n")[0]
        if match := re.match(r'"""`hookdiff [\w-]+`: (.+?)(?:""")?$', first_line):
            return match[1][0].upper() + match[1][1:]
    return f"(from {entry.dist.name if entry.dist else entry.value})"


@click.command(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Documentation: docs/index.md in the repository. The tutorial begins in docs/tutorial/README.md.",
)
@click.version_option(version("hookdiff"), prog_name="hookdiff")
def group() -> None:
    """Train diffusion models with a loop that you can read. Every feature is a plugin.

    \b
    Example:
      hookdiff init photos              write photos.toml, for a folder of images
      hookdiff run photos.toml          train: about ten minutes
      hookdiff sample runs/photos       make images
      hookdiff NAME --help              the options of a command

    Exit codes: 0 success; 2 wrong input; 3 stopped by the hook on_nan; 75 out of time, continue with `hookdiff resume`;
    130 stopped by SIGINT; 143 stopped by SIGTERM; 1 any other error.
    """  # noqa: D301 click leaves the lines as they are after the character \b


def main() -> None:
    """Run the command line; a UserError ends it with one message and exit code 2."""
    keep_safe_path()
    collect_rarely()
    open_streams()
    log_to_stderr()
    try:
        if asked := os.environ.get(VARIABLE):
            from hookdiff.cli.completion import prepare_completion

            prepare_completion(asked)
        with shown_works():
            sys.exit(group.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # torchrun ends this process once the first has shown the error
            time.sleep(_MOMENT)
        with suppress(OSError):
            error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except Exception as error:
        message = str(error)
        if isinstance(error, OSError) and error.errno in _DISK:  # from a plugin that does not handle errors of files
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        elif isinstance(error, HookError | PluginError):  # their tracebacks show only the core
            notes = (note.removeprefix("hookdiff: ") for note in getattr(error, "__notes__", ()))
            message = "\n  ".join([message, *notes])
        elif not isinstance(error, UserError):
            raise
        if not isinstance(error, OnAnotherRank):
            say(f"hookdiff: {message}", err=True)
        sys.exit(getattr(error, "exit_code", 1))
    finally:
        drop_unwritten()
