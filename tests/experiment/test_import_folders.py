"""What a command line names is looked for in the working directory, then beside the config, in no run without trust."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from hookdiff import ConfigError, load_config
from tests.conftest import SMALL, check_refused, refused, write_small

PLUGIN = "from hookdiff import hookimpl\nclass Mine:\n    @hookimpl\n    def on_start(self): ...\n"
NAMED = ["hd_mine:Mine"]


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a config in "there" and a run in "run"; the shell stands in "here"."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("here", "there/lib", "run/code"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    for config in ("there/own.toml", "run/config.toml"):
        write_small(tmp_path / config)
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path
    sys.modules.pop("hd_mine", None)


@pytest.mark.parametrize(
    ("holders", "settings", "recorded"),
    [
        ("here", [], ["here", "there"]),
        ("there", [], ["there"]),
        ("there here", [], ["here", "there"]),
        ("here", ["run.import_from=."], ["here", "there"]),
        ("there/lib", ["run.import_from=lib"], ["there/lib", "there"]),
        ("", [], ["here", "there"]),
    ],
)
def test_the_command_line_starts_in_the_working_directory(
    top: Path, holders: str, settings: list[str], recorded: list[str]
) -> None:
    for holder in holders.split():
        (top / holder / "hd_mine.py").write_text(PLUGIN)
    folders = [str(top / each) for each in recorded]
    if not holders:
        with refused(ConfigError, *NAMED, f"looked in {', then in '.join(folders)}"):
            load_config(top / "there/own.toml", NAMED, settings)
        return
    run = load_config(top / "there/own.toml", NAMED, settings).resolved()["run"]
    assert str(Path(sys.modules.pop("hd_mine").__file__ or "").parent) == folders[0]
    assert run["import_from"] == (folders if len(folders) > 1 else folders[0])
    sys.path[:] = [path for path in sys.path if path not in folders]
    (top / "run" / "config.toml").write_text(tomli_w.dumps({**SMALL, "run": run}))
    assert "mine" in load_config(top / "run" / "config.toml", trust=True).plugins
    relative = {**run, "import_from": f"../{recorded[0]}"}  # in a config: from the folder of the config
    again = load_config(write_small(top / "there/own.toml", run=relative))
    assert again.resolved()["run"]["import_from"] == folders[0]


@pytest.mark.parametrize("place", ["run", "run/code"])
@pytest.mark.parametrize("way", ["shell", "config", "run.import_from=../PLACE", "run.import_from=link"])
def test_a_run_and_what_is_below_it_is_searched_only_with_trust(
    top: Path, monkeypatch: pytest.MonkeyPatch, way: str, place: str
) -> None:
    (top / place / "hd_mine.py").write_text(PLUGIN)
    (top / "there" / "link").symlink_to(top / place)
    monkeypatch.chdir(top / (place if way == "shell" else "here"))
    path = write_small(top / (place if way == "config" else "there") / "own.toml")
    settings = [way.replace("PLACE", place)] * ("=" in way)
    with refused(ConfigError, "hd_mine", top / place, "--trust"):
        load_config(path, NAMED, settings)
    assert not {"hd_mine", str(top / place)} & {*sys.modules, *sys.path}
    if (way, place) != ("config", "run"):  # the config's own run directory is never searched for it
        assert "mine" in load_config(path, NAMED, settings, trust=True).plugins


@pytest.mark.parametrize("folder", [".", "hookdiff-grad-length"])
def test_an_own_package_that_is_not_installed_is_named(top: Path, hookdiff: Any, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    entries = {"hookdiff.plugins": {"grad_length": "g:G"}, "hookdiff.parts": {"weighting.grad_length": "g:W"}}
    (Path(folder) / "pyproject.toml").write_text(tomli_w.dumps({"project": {"entry-points": entries}}))
    facts = "'grad_length'", "not installed", f"pip install -e {folder}"
    for words in (["--plugins", "grad_length"], ["--set", "diffusion.weighting=grad_length"]):
        refusal = hookdiff("check", top / "there/own.toml", *words)
        check_refused(refusal, *facts)
        assert "did you mean" not in refusal[2]
    check_refused(hookdiff("plugins", "grad_length"), *facts)
