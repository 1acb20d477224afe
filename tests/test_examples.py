"""The examples run as a user runs them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.conftest import PATIENCE, check_facts, finish

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the published plugin into a folder, and return the folder."""
    project = tmp_path_factory.mktemp("third_party")
    shutil.copytree(EXAMPLES / "third_party", project, dirs_exist_ok=True)
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, project], check=True, timeout=PATIENCE)
    return site


def test_a_published_plugin_is_found_configured_called_in_order_and_removed(
    site: Path, tmp_path: Path, write_config: Any, start: Any
) -> None:
    own = {"ema": {}, "lookahead": {"every": 2, "alpha": 0.8}}
    config = write_config(run={"steps": 10, "log_every": 5, "plugins": list(own)}, plugins=own)

    def run(*words: object, folder: Path = site) -> tuple[int, str, str]:
        return finish(start(folder, *words))

    rows = {line.split()[0]: line for line in run("plugins")[1].splitlines()}
    check_facts(rows["lookahead"], "hookdiff-lookahead 0.1.0")

    assert tomli.loads(run("check", config)[1])["plugins"]["lookahead"] == own["lookahead"]
    wrong = "--set", "plugins.lookahead.alhpa=1", "--set", "plugins.lookahead.every=0"
    code, _, err = run("check", config, *wrong)
    assert code == 2
    check_facts(err, "plugins.lookahead.alhpa", "'alpha'", "plugins.lookahead.every")

    order = dict(line.split(maxsplit=1) for line in run("plugins", "--order", config)[1].splitlines())
    assert order["on_start"] == "ema (first) > lookahead"
    assert order["optimizer_step"] == "lookahead (around)"

    code, out, err = run("run", config, "--out", tmp_path / "run")
    assert code == 0, err
    check_facts(out.splitlines()[0], "done", 10)

    # Without its package the name is unknown, and the message lists the installed plugins.
    code, _, err = run("check", config, folder=tmp_path)
    assert code == 2
    check_facts(err, "'lookahead'", "ema")
    assert "Traceback" not in err


def test_the_tests_of_the_published_plugin_pass(site: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "third_party" / "test_lookahead.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, *sys.path)))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout
    check_facts(done.stdout, "2 passed")


def test_embed_trains_in_both_styles(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "embed.py", "--steps", "8", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=PATIENCE)
    pushed, *_, sampled = done.stdout.splitlines()
    check_facts(pushed, "push", "done", 2)
    check_facts(sampled, tmp_path / "embed.png", "ema", 8)
    assert (tmp_path / "push" / "checkpoints" / "step-00000002" / "ema.safetensors").is_file()
    assert (tmp_path / "embed.png").is_file()


def test_the_basic_example_is_a_valid_config(hookdiff: Any) -> None:
    code, out, err = hookdiff("check", EXAMPLES / "basic.toml", "--plugins", "ema,amp,fid")
    assert code == 0, err
    assert tomli.loads(out)["run"]["plugins"][-3:] == ["ema", "amp", "fid"]
