"""The examples, run as a user runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = """
[run]
steps = 10
batch_size = 16
log_every = 5
plugins = ["ema", "lookahead"]
[data]
source = "digits"
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
[plugins.lookahead]
every = 2
alpha = 0.8
"""


def run(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; `path` is searched for packages as site-packages is."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, "-c", "from hookdiff.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the published plugin is installed into."""
    project = tmp_path_factory.mktemp("third_party")
    shutil.copytree(EXAMPLES / "third_party", project, dirs_exist_ok=True)
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, project], check=True)
    return site


def test_a_published_plugin_is_found_configured_heard_in_order_and_removed(site: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    listed = run("plugins", path=site)
    assert "lookahead    Keeps a slow copy" in listed.stdout
    assert "(hookdiff-lookahead 0.1.0)" in listed.stdout

    checked = run("check", config, path=site)
    assert tomli.loads(checked.stdout)["plugins"]["lookahead"] == {"every": 2, "alpha": 0.8}
    wrong = run("check", config, "--set", "plugins.lookahead.alhpa=1", "--set", "plugins.lookahead.every=0", path=site)
    assert wrong.returncode == 2
    assert "plugins.lookahead.alhpa: unknown key; did you mean 'alpha'?" in wrong.stderr
    assert "plugins.lookahead.every: " in wrong.stderr

    order = run("plugins", "--order", config, path=site).stdout.splitlines()
    assert "on_start               ema (first) > lookahead" in order
    assert "optimizer_step         lookahead (around)" in order

    trained = run("run", config, "--out", tmp_path / "run", path=site)
    assert trained.returncode == 0, trained.stderr
    assert "done after 10 steps" in trained.stdout

    # Removed: the name is gone, and the message says what there is.
    gone = run("check", config)
    assert gone.returncode == 2
    assert "no plugin named 'lookahead'" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_lookahead_is_that_of_the_paper(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hookdiff.testing import toy_loop, toy_model, weights

    monkeypatch.syspath_prepend(site)
    from hookdiff_lookahead import Lookahead

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    plain, start = [], weights(toy_loop())
    loop = toy_loop(optimizers=sgd, steps=2)
    with loop:
        for _ in loop.steps():
            plain.append(weights(loop))
    looked = toy_loop({"lookahead": Lookahead(every=2, alpha=0.25)}, model=toy_model(), optimizers=sgd, steps=2)
    looked.run()
    for name, value in weights(looked).items():
        torch.testing.assert_close(value, start[name] + 0.25 * (plain[1][name] - start[name]))


def test_embed_trains_in_both_styles(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "embed.py", "--steps", "8", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "push: done after 2 steps" in done.stdout
    assert (tmp_path / "push" / "checkpoints" / "step-00000002" / "ema.safetensors").is_file()
    assert (tmp_path / "embed.png").is_file()
    assert "from the ema weights of step 8" in done.stdout


def test_the_first_example_is_a_good_config() -> None:
    checked = run("check", EXAMPLES / "basic.toml", "--plugins", "ema,amp,fid")
    assert checked.returncode == 0, checked.stderr
    assert tomli.loads(checked.stdout)["run"]["plugins"][-3:] == ["ema", "amp", "fid"]
