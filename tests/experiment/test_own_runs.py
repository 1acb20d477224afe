"""A run that this user has made or once trusted asks no more for `--trust`; a copied, moved or edited one does."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

from hookdiff import ConfigError, load_config
from tests.conftest import check_facts, check_refused, output, pixels, refused, warnings, wide, write_small

Command = Callable[..., tuple[int, str, str]]
KEY = "data.cache_dir"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeed: Callable[..., str]) -> Path:
    """A run with a cache outside of it, made by the command from a config of the user."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for number in range(20):
        Image.fromarray(pixels(number, 8)).save(tmp_path / "pictures" / f"{number}.png")
    data = {"source": "folder", "path": "pictures", "image_size": 8, "store": "disk", "cache_dir": "cache"}
    write_small(tmp_path / "mine.toml", run={"steps": 1, "batch_size": 4, "plugins": ["checkpoint"]}, data=data)
    succeed("run", "mine.toml")
    return tmp_path / "runs" / "mine"


def folder() -> Path:
    return Path(click.get_app_dir("hookdiff"), "runs")


def test_ones_own_run_does_not_ask(run: Path, hookdiff: Command) -> None:
    for steps in (2, 3):  # each writes another config
        told = output(hookdiff("resume", run, "--steps", steps))
        assert "--trust" not in told
    check_facts(output(hookdiff("resume", "runs/mine")), "hookdiff resume runs/mine --steps N")
    assert load_config(run / "config.toml").data
    if os.name != "nt":
        assert {path.stat().st_mode & 0o777 for path in folder().iterdir()} == {0o600}
        assert folder().stat().st_mode & 0o777 == 0o700


def edit(run: Path) -> Path:
    (run / "config.toml").write_bytes((run / "config.toml").read_bytes() + b"\n")
    return run


def link(run: Path) -> Path:
    """A stranger's run whose config is a link to one of the user's."""
    other = copy(run)
    (other / "config.toml").unlink()
    (other / "config.toml").symlink_to(run / "config.toml")
    return other


def move(run: Path) -> Path:
    return run.rename(run.with_name("other"))


def copy(run: Path) -> Path:
    shutil.copytree(run, run.with_name("other"))
    return run.with_name("other")


@pytest.mark.parametrize("change", [copy, *wide(edit, move, link)])
def test_another_run_asks(run: Path, hookdiff: Command, change: Callable[[Path], Path]) -> None:
    other = change(run)
    check_refused(hookdiff("resume", other, "--steps", 2), other / "config.toml", KEY, "--trust")
    branch = other.with_name("branch")
    check_refused(hookdiff("resume", other, "--steps", 2, "--out", branch), KEY, "--trust")
    output(hookdiff("resume", other, "--steps", 2, "--trust"))
    output(hookdiff("resume", other, "--steps", 3))  # trusted once


def test_a_run_that_was_trusted_for_nothing_is_no_own_run(
    run: Path, hookdiff: Command, another_user: Callable[[], None]
) -> None:
    """A stranger's run that needs no trust is resumed, and what it gets later is a stranger's still."""
    another_user()
    output(hookdiff("resume", run, "--steps", 2, "--set", "data.cache_dir=cache"))
    check_refused(hookdiff("resume", run, "--steps", 3), KEY, "--trust")
    # Nor does a config of the user's own make a stranger's run its own.
    output(hookdiff("run", "mine.toml", "--resume", "--set", "run.steps=4"))
    check_refused(hookdiff("resume", run, "--steps", 5), KEY, "--trust")


@pytest.mark.wide
def test_a_home_that_cannot_be_written_asks(
    run: Path, hookdiff: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("HOME", "XDG_CONFIG_HOME", "APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    output(hookdiff("resume", run, "--steps", 2, "--trust"))
    check_facts(warnings(caplog), run, "--trust")
    with refused(ConfigError, run / "config.toml", KEY):
        load_config(run / "config.toml")


def test_only_the_first_rank_remembers(run: Path, monkeypatch: pytest.MonkeyPatch, another_user: Any) -> None:
    another_user()
    monkeypatch.setenv("RANK", "1")
    load_config(run / "config.toml", trust=True)
    assert not folder().exists()
    monkeypatch.setenv("RANK", "0")
    load_config(run / "config.toml", trust=True)
    assert len(list(folder().iterdir())) == 1
