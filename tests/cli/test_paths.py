"""Paths and options: all commands refuse wrong paths, keep existing files and spell their options alike."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hookdiff.cli import group
from tests.conftest import check_facts, wide


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
    lines = {"plugins": ["plugins", "--order", "wrong.xyz"]}
    for words, command in commands():
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        if arguments and isinstance(arguments[0].type, click.Path) and arguments[0].metavar != "[FILE]":
            lines[" ".join(words)] = [*words, "wrong.xyz"]
    return lines


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


@pytest.mark.parametrize("kind", ["missing", *wide("folder")])
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


# The options and arguments that name a file or a folder to read; all others name what is written.
READ = {"--from", "--images", "--mask", "--prompts", "--text-encoder", "--feature-weights", "--weights", "folder"}
# For each of the others a line that would write what exists; and those that start a new run or never replace a folder.
WRITTEN = {
    "run --out": "run c.toml --out there.run",
    "resume --out": "resume there.run --out full",
    "sample --out": "sample there.run --out there.png",
    "sample --each": "sample there.run --each full",
    "export out": "export there.run there.safetensors",
    "fid --save": "fid full --save there.npz",
    "report --out": "report there.run --out there.html",
    "ema --out": "ema c.toml --draw --out there.png",
    "doctor --out": "doctor c.toml --out there.png",
    "lr --out": "lr c.toml --out there.png",
    "init --out": "init --out there.toml",
    "data --out": "data c.toml --out there.png",
    "data --to-shards": "data c.toml --to-shards shards",
    "schema file": "schema there.json",
    "profile --trace": "profile c.toml --trace there.json",
}


def test_nothing_that_exists_is_replaced_without_overwrite(tmp_path: Path) -> None:
    named = {
        " ".join([*words, each.opts[-1]]): command
        for words, command in commands()
        for each in command.params
        if {"FILE", "DIR"} & set((each.metavar or "").strip("[]").split("|")) and each.opts[-1] not in READ
    }
    assert named.keys() == WRITTEN.keys()
    lacking = {name for name, each in named.items() if not any("--overwrite" in option.opts for option in each.params)}
    assert lacking == {"resume --out"}
    for folder, name in (("there.run", "config.toml"), ("full", "000000-a.png"), ("shards", "shard-000000.tar")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("")
    (tmp_path / "there.run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "loss": 1.0}) + "\n")
    (tmp_path / "c.toml").write_text('[data]\nsource = "digits"\n[run]\nsteps = 2\n[model]\nuse = "unet"\n')
    for line in WRITTEN.values():
        if not (tmp_path / line.split()[-1]).exists():
            (tmp_path / line.split()[-1]).write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    codes, messages = outcomes(list(WRITTEN.values()), tmp_path)
    assert [code.split()[1] for code in codes] == ["2"] * len(WRITTEN), messages
    for name, message in zip(WRITTEN, messages, strict=True):
        assert ("exists; add --overwrite to replace it, " in message) != (name in lacking), (name, message)
        assert "exists" in message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# What an option with a value is followed by in its help; a choice lists its values.
METAVARS = {
    click.types.IntParamType: {"N"},
    click.types.FloatParamType: {"X", "X X"},
    click.Path: {"FILE", "DIR", "FILE|DIR", "CONFIG"},
    click.types.StringParamType: {"NAME", "NAME|FILE", "NAME,no:NAME", "A,B,...", "HEX", "FILE", "X"}
    | {"KEY=VALUE", "TABLE.KEY=VALUE", "NAME=X", "TEXT", "WIDTHxHEIGHT"},
}
# These mean something else in each command.
DIFFERENT = {"--out", "--steps", "--num", "--columns", "--lr", "--set", "--to"}


def test_an_option_has_one_spelling_in_all_commands() -> None:
    helps: dict[str, set[str | None]] = {}
    for words, command in commands():
        for option in command.params:
            if isinstance(option, click.Option):
                name = option.opts[-1]
                helps.setdefault(name, set()).add(option.help)
                assert option.opts == (["-o", "--out"] if name == "--out" else [name]), words
                if not option.is_flag and not isinstance(option.type, click.Choice):
                    (allowed,) = (each for kind, each in METAVARS.items() if isinstance(option.type, kind))
                    assert option.metavar in allowed, (words, name)
    assert {name for name, texts in helps.items() if len(texts) > 1} == DIFFERENT
