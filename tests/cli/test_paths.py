"""A wrong path is refused at once by every command, and `-o` is `--out` in all of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hookdiff.cli import group
from tests.conftest import check_facts


def commands(
    parent: click.Group = group, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands of the command line and of their groups, with their words."""
    context = click.Context(parent)
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        elif command is not None:
            yield (*above, name), command


def with_a_path() -> dict[str, list[str]]:
    """The commands that read a path, with words for them in which that path is `wrong.xyz`."""
    found = {"plugins": ["plugins", "--order", "wrong.xyz"]}
    for words, command in commands():
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        if arguments and isinstance(arguments[0].type, click.Path):
            found[" ".join(words)] = [*words, "wrong.xyz"]
    return found


# Prints a line for each command: whether torch is imported by then, and the exit code. The messages are on stderr.
ALL = """
import sys
from hookdiff.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["hookdiff", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("torch" in sys.modules, end.code, flush=True)
"""


def outcomes(lines: list[str], folder: Path) -> tuple[list[str], list[str]]:
    process = subprocess.run(
        [sys.executable, "-c", ALL], input="\n".join(lines), cwd=folder, capture_output=True, text=True, timeout=300
    )
    return process.stdout.splitlines(), process.stderr.splitlines()


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_wrong_path_is_refused_before_torch_is_imported(kind: str, tmp_path: Path) -> None:
    table = with_a_path()
    assert {"run", "sample", "selftest resume", "lr", "replay", "fid"} <= table.keys()
    if kind == "folder":  # it may hold pictures or runs, which is the right thing for these
        (tmp_path / "wrong.xyz").mkdir()
        table = {name: words for name, words in table.items() if name not in ("ema", "fid", "init", "runs")}
    codes, messages = outcomes([" ".join(words) for words in table.values()], tmp_path)
    assert dict(zip(table, codes, strict=True)) == dict.fromkeys(table, "False 2")
    for name, message in zip(table, messages, strict=True):
        assert message.startswith("hookdiff: "), (name, message)
        check_facts(message, "wrong.xyz")


def test_o_is_short_for_out() -> None:
    options = [(words, option.opts) for words, command in commands() for option in command.params]
    having = {words: opts for words, opts in options if "--out" in opts}
    assert {("run",), ("sample",), ("lr",)} <= having.keys()
    assert having == {words: ["-o", "--out"] for words in having}
