"""The installed package is complete: its modules, entry points, data files, command and types."""

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import click
import pytest

import hookdiff

ENTRIES = [entry for entry in distribution("hookdiff").entry_points if entry.group.startswith("hookdiff.")]
PACKAGES = sorted({entry.module.partition(".")[0] for entry in ENTRIES})

CONFIG = """
[run]
steps = 2
batch_size = 16
device = "cpu"
plugins = ["ema", "checkpoint", "fid"]
[data]
source = "digits"
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
[sampling]
steps = 2
[plugins.fid]
num_samples = 4
"""
SCRIPT = """
from attrs import define, field
from hookdiff import Loop, LoopConfig, SampleRequest, builtin_plugins, hookimpl
from hookdiff.data import digits
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.process import VP
from hookdiff.diffusion.sampling import Sampling
from hookdiff.diffusion.weighting import MinSNR
from hookdiff_networks import UNet
from torch.optim import AdamW


@define(eq=False)
class Counts:
    every: int = 1
    seen: int = field(default=0, init=False)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.seen += 1
        loop.log({"seen": self.seen})


model = UNet(in_channels=1, image_size=8, channels=8, num_res_blocks=1, head_dim=8)
counts = Counts()
loop = Loop(
    model,
    AdamW(model.parameters(), lr=1e-3),
    Diffusion(VP(schedule="cosine"), prediction="v_prediction", weighting=MinSNR(gamma=5)),
    digits(),
    LoopConfig(steps=2, batch_size=16),
    {**builtin_plugins(), "counts": counts},
    sampler=Sampling(steps=2),
    run_dir="mine",
)
reason = loop.run()
assert (reason, counts.seen) == ("done", 2)
assert loop.sample(SampleRequest(2)).images.shape == (2, 1, 8, 8)
"""


def call(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("package", ["hookdiff", *PACKAGES])
def test_each_module_is_installed_with_its_types(package: str) -> None:
    module = importlib.import_module(package)
    assert (files(module) / "py.typed").is_file()
    for found in pkgutil.walk_packages(module.__path__, f"{package}."):
        importlib.import_module(found.name)


def test_each_public_name_is_installed() -> None:
    for name in hookdiff.__all__:
        assert getattr(hookdiff, name) is not None


def test_each_template_of_a_package_is_installed_whole(tmp_path: Path) -> None:
    from hookdiff_new_plugin.kinds import KINDS, write

    assert len(KINDS) == 11
    for kind in KINDS:
        write(kind, "mine", tmp_path / kind)
        found = {path.relative_to(tmp_path / kind).as_posix() for path in (tmp_path / kind).rglob("*")}
        package, test = "hookdiff_mine", "tests/test_mine.py"
        wanted = {"pyproject.toml", "README.md", "example.toml", "conftest.py", ".github/workflows/test.yml", test}
        assert found >= {*wanted, f"{package}/__init__.py", f"{package}/py.typed"}, kind


def test_each_entry_point_loads() -> None:
    for entry in ENTRIES:
        found = entry.load()
        kinds = {"hookdiff.commands": click.Command, "hookdiff.plugins": type}
        assert isinstance(found, kinds.get(entry.group, Callable))


@pytest.mark.slow  # the tests of the wheel leave none out
def test_the_command_trains_resumes_and_samples(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    command = "-c", "from hookdiff.cli import main; main()"
    done = call(*command, "run", "small.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert call(*command, "resume", "runs/small", "--steps", 3, cwd=tmp_path).returncode == 0
    sampled = call(*command, "sample", "runs/small", "--num", 2, cwd=tmp_path)
    assert sampled.returncode == 0, sampled.stderr
    assert (tmp_path / "runs/small/samples/seed-0.png").is_file()
    assert call(*command, "run", "smal.toml", cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_a_script_trains_and_its_types_are_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = call("mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "metrics.jsonl").is_file()
    checked = call("-m", "mypy", "--strict", "mine.py", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    (tmp_path / "mine.py").write_text(
        SCRIPT.replace("loop.log({", "loop.hook.on_lag(loop=loop)\n        loop.net = model\n        loop.log({")
    )
    wrong = call("-m", "mypy", "--strict", "mine.py", cwd=tmp_path)
    assert "on_lag" in wrong.stdout
    assert '"net"' in wrong.stdout
