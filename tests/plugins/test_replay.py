import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from hookdiff.cli import main
from hookdiff.testing import toy_loop
from hookdiff_nan import NaN

NETS = '''
import torch
from torch import nn
from hookdiff import InMemory
from hookdiff.data import digits


class Net(nn.Module):
    """Its weight `gain` grows until it has no square root."""

    def __init__(self, in_channels: int = 1, grow: float = 0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.2), nn.SiLU()
        )
        self.last = nn.Conv2d(8, in_channels, 3, padding=1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.grow = grow

    def forward(self, x, timesteps):
        self.calls += 1
        h = self.last(self.layers(x))
        return h * (1 + self.grow * (self.first - self.layers[0].weight.mean()).sqrt()) if self.grow else h

    @property
    def first(self):
        return 0.02


class Wide(Net):
    """Needs numbers that float16 does not have."""

    def forward(self, x, timesteps):
        return super().forward(x, timesteps) + self.layers(x).mul(1e4).square().sum(1, keepdim=True) * 1e-9


class Steep(Net):
    """Has no derivative at zero, which it comes to after three calls."""

    def forward(self, x, timesteps):
        h = super().forward(x, timesteps)
        return h + (h * (self.calls < 7) + 0 * h).square().sum().sqrt() * 0 if self.calls > 6 else h


def spoilt():
    images = digits().images.clone().float().div(127.5).sub(1)
    images[:90] = torch.nan
    return InMemory(images)
'''

BASE: dict[str, Any] = {
    "run": {"steps": 30, "batch_size": 16, "micro_batch": 6, "log_every": 5, "device": "cpu", "plugins": ["nan"]},
    "data": {"source": "digits"},
    "model": {"use": "nets:Net"},
    "optimizer": {"use": "adamw", "lr": 1e-3},
}


def config(folder: Path, names: list[str], **tables: dict[str, Any]) -> Path:
    """Write a config and the module of its nets into `folder`."""
    (folder / "nets.py").write_text(NETS)
    changed = {name: {**BASE.get(name, {}), **table} for name, table in tables.items()}
    changed["run"] = {**BASE["run"], **tables.get("run", {}), "plugins": ["nan", *names]}
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps({**BASE, **changed}))
    return path


def hookdiff(*arguments: str | Path) -> int:
    """Run the command line in this process and return its exit code."""
    before = sys.argv, torch.get_num_threads()
    sys.argv = ["hookdiff", *map(str, arguments)]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before[0]
        torch.set_num_threads(before[1])
    raise AssertionError("the command line ends with an exit code")


def process(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-c", "from hookdiff.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return tmp_path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "nan").iterdir())


def test_in_other_processes_every_bit_comes_back(tmp_path: Path) -> None:
    # fp16 with its scaler and void steps, dropout, batch norm, micro-batches of two sizes, and two threads.
    options: dict[str, Any] = {"amp": {"precision": "fp16", "init_scale": 2.0**24}, "checkpoint": {"every": 2}}
    path = config(tmp_path, ["amp", "lr", "clip", "checkpoint", "ema"], data={"source": "nets:spoilt"}, plugins=options)
    ran = process(
        tmp_path,
        "run",
        path,
        "--out",
        "run",
        "--set",
        "plugins.nan.policy=skip",
        "--set",
        "plugins.nan.max_skips=2",
        OMP_NUM_THREADS="2",
    )
    assert ran.returncode == 3, ran.stderr
    step = kept(tmp_path)[-1]
    before = snapshot(tmp_path / "run")
    again = process(tmp_path, "replay", step, OMP_NUM_THREADS="1")
    assert again.returncode == 0, again.stdout + again.stderr
    report = (step / "report.txt").read_text()
    assert "cause: data: inputs hold values that are not finite: sample " in report
    assert re.search(r"loss scale: \S+ \(batch \d+\) > ", report)
    assert again.stdout == f"{report}reproduced bit for bit: 1 loss, 16 losses of the samples, 6 gradients\n"
    assert again.stderr == ""
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("every", [1, 100])
def test_the_report_of_a_rollback_is_the_same(folder: Path, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    plugins = {"checkpoint": {"every": every}, "nan": {"policy": "rollback"}}
    path = config(folder, ["checkpoint"], data={"source": "nets:spoilt"}, plugins=plugins)
    assert hookdiff("run", path, "--out", "run", "--skip-batches", "1", "--set", "run.batch_size=4") in (0, 3)
    capsys.readouterr()
    step = kept(folder)[0]
    report = (step / "report.txt").read_text()
    assert ("there is no checkpoint yet" in report) == (every == 100)
    assert hookdiff("replay", step) == 0
    assert capsys.readouterr().out.startswith(f"{report}reproduced bit for bit")


@pytest.fixture
def spoilt(folder: Path) -> Path:
    """A run that met data that is not finite; its checkpoints are from before."""
    path = config(folder, ["checkpoint"], data={"source": "nets:spoilt"}, plugins={"checkpoint": {"every": 1}})
    assert hookdiff("run", path, "--out", "run") == 3
    return kept(folder)[0]


def test_what_differs_is_told(spoilt: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((spoilt / "step.json").read_text())
    facts["versions"]["torch"], facts["machine"]["name"] = "1.0", "another"
    facts["outcome"]["gradients"]["last.bias"] = "0"
    (spoilt / "step.json").write_text(json.dumps(facts))
    assert hookdiff("replay", spoilt) == 1
    out = capsys.readouterr().out
    told = out.splitlines()
    assert f"differs: torch is {torch.__version__}, it was 1.0" in told[:2]
    assert any(line.startswith("differs: name is ") and line.endswith(", it was another") for line in told[:2])
    assert told[-1] == "not reproduced: gradients: the first that differs is last.bias"


def test_data_that_changed_is_told(spoilt: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "nets.py").write_text(NETS.replace("torch.nan", "-1.0"))
    sys.modules.pop("nets")
    assert hookdiff("replay", spoilt) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "differs: the data has changed: the same samples have other values"
    assert told[-1].startswith("not reproduced: the step is finite: loss ")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda step: shutil.rmtree(step), ": no such folder; expected one such as RUN/nan/step-"),
        (lambda step: (step / "step.json").unlink(), "is no step that was kept for replay: it has no step.json"),
        (
            lambda step: (step / "step.json").write_text("{"),
            "step.json is damaged: it is no JSON from line 1, column 2 on",
        ),
        (lambda step: (step / "step.json").write_bytes(b"{\xff"), "step.json is damaged: it is not UTF-8 at byte 1"),
        (lambda step: (step / "step.json").write_text("{}"), "step.json is damaged: it lacks 'format'"),
        (lambda step: (step / "step.json").write_text("[]"), "step.json is damaged: what it holds is not what was"),
        (lambda step: (step / "model.safetensors").unlink(), "model.safetensors cannot be read: No such file"),
        (lambda step: (step / "model.safetensors").write_bytes(b"no"), "model.safetensors is not what was written"),
        (lambda step: (step / "config.toml").unlink(), "config.toml cannot be read: No such file"),
        (lambda step: Path("nets.py").unlink(), "cannot import nets: No module named 'nets'"),
    ],
)
def test_what_cannot_be_replayed_is_one_message(
    spoil: Any, message: str, spoilt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(spoilt)
    sys.modules.pop("nets")
    assert hookdiff("replay", spoilt) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_folder_that_holds_steps_is_told_of(spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hookdiff("replay", spoilt.parents[1]) == 2
    assert f"it has no step.json; it holds {spoilt.name}" in capsys.readouterr().err


def test_the_run_of_a_script_has_to_be_repeated_by_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = torch.full((40, 4), torch.nan)
    toy_loop({"nan": NaN()}, data=data, run_dir=tmp_path).run()
    (step,) = (tmp_path / "nan").iterdir()
    assert hookdiff("replay", step) == 2
    assert "has no config.toml: a script made the run" in capsys.readouterr().err


def test_no_amp_shows_an_overflow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"amp": {"precision": "fp16", "init_scale": 2.0}}
    path = config(folder, ["amp"], model={"use": "nets:Wide"}, plugins=options)
    assert hookdiff("run", path, "--out", "run") == 3
    (step,) = kept(folder)
    assert "cause: overflow: beyond what float16 holds, first in the model (Wide)" in (step / "report.txt").read_text()
    assert hookdiff("replay", step) == 0
    assert hookdiff("replay", step, "--no-amp") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the step is finite: loss ")
    assert hookdiff("replay", step, "--set", "plugins.amp.precision=bf16") == 0


def test_no_amp_needs_amp(spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hookdiff("replay", spoilt, "--no-amp") == 2
    assert "this run has no plugin 'amp'" in capsys.readouterr().err
    assert hookdiff("replay", spoilt, "--set", "run.micro_batch=16") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the step is not finite: loss nan, gradient norm nan"
    assert hookdiff("replay", spoilt, "--plugins", "no:nan") == 2
    assert "replay needs the plugin that kept the step" in capsys.readouterr().err


@pytest.mark.parametrize("every", [2, 0])
def test_another_rate_trains_the_steps_before_again(
    every: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"checkpoint": {"every": every}}
    path = config(
        folder,
        ["checkpoint", "samples", "lr"],
        model={"use": "nets:Net", "grow": 1.0},
        optimizer={"use": "sgd", "lr": 0.3},
        plugins=options,
    )
    assert hookdiff("run", path, "--out", "run") == 3
    (step,) = kept(folder)
    place = json.loads((step / "step.json").read_text())["progress"]
    assert place["step"] > 2
    capsys.readouterr()
    before = snapshot(folder / "run")
    assert hookdiff("replay", step, "--lr", "1e-4") == 0
    told = capsys.readouterr().out.splitlines()
    begun = (place["step"] - 1) // 2 * 2 if every else 0
    source = (
        f"checkpoints/step-{begun:08d}"
        if every
        else "the start of the run, as no checkpoint from before the step is left"
    )
    assert told[0] == f"training batches {begun} to {place['position']} at lr 0.0001, from {source} (step {begun})"
    assert told[1].startswith("the step is finite: loss ")
    assert hookdiff("replay", step, "--lr", "0.3") == 1
    assert (
        "the step is not finite: loss nan, gradient norm nan\nforward: the model (Net) made NaN"
        in capsys.readouterr().out
    )
    assert snapshot(folder / "run") == before


def test_no_rate_made_the_first_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder, [], model={"use": "nets:Net", "grow": 1.0}, optimizer={"use": "sgd", "lr": 30.0})
    (folder / "nets.py").write_text(NETS.replace("return 0.02", "return -1.0"))
    assert hookdiff("run", path, "--out", "run") == 3
    assert hookdiff("replay", kept(folder)[0], "--lr", "1e-4") == 2
    assert "made by no update" in capsys.readouterr().err


def test_anomaly_names_the_operation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder, [], model={"use": "nets:Steep"})
    assert hookdiff("run", path, "--out", "run") == 3
    (step,) = kept(folder)
    assert (
        "cause: backward: the derivative of what follows last (Conv2d) is not finite"
        in (step / "report.txt").read_text()
    )
    assert hookdiff("replay", step, "--anomaly") == 0
    told = capsys.readouterr().out
    assert "returned nan values" in told
    assert "nets.py" in told
    assert "sqrt()" in told
    assert "dispatch.py" not in told


@pytest.mark.slow
def test_a_compiled_step_comes_back_compiled(tmp_path: Path) -> None:
    path = config(tmp_path, ["compile", "checkpoint"], model={"use": "nets:Steep"})
    ran = process(tmp_path, "run", path, "--out", "run")
    assert ran.returncode == 3, ran.stderr
    (step,) = kept(tmp_path)
    report = (step / "report.txt").read_text()
    assert "cause: backward: the derivative of what follows last (Conv2d) is not finite" in report
    again = process(tmp_path, "replay", step)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout == f"{report}reproduced bit for bit: 1 loss, 16 losses of the samples, 6 gradients\n"


def test_help_tells_what_each_way_does_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert hookdiff("replay", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "With --anomaly: 0 if an operation of the backward is found and named, 1 if none made a NaN." in told
    assert "--no-amp Try it without mixed precision" in told
    assert "--lr FLOAT RANGE Train from the checkpoint before the step up to it" in told


def test_a_folder_that_is_not_there_is_told_with_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000003-position-00000003").mkdir()
    (folder / "file").touch()
    assert hookdiff("replay", "step-00000003-position-0000003") == 2
    assert ": no such folder; did you mean 'step-00000003-position-00000003'?" in capsys.readouterr().err
    assert hookdiff("replay", "file") == 2
    assert "hookdiff: file: is no folder; expected one such as RUN/nan/step-" in capsys.readouterr().err
