import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from hookdiff import build_loop, load_config
from hookdiff.disk.stamped_json import stamped
from hookdiff.testing.toy import toy_loop
from hookdiff_nan import NaN
from tests.conftest import Command, check_facts, check_refused, finish, output, wide
from tests.hostile.mutations import listing

Stops = Callable[..., tuple[Path, dict[str, Any]]]

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


class Fragile(Net):
    """Makes NaN where the weights are moved uphill."""

    def __init__(self, in_channels: int = 1):
        super().__init__(in_channels)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x, timesteps):
        h = self.layers(x) * self.scale * (0.5 - (self.scale - 1).abs().max()).sqrt()
        return self.last(h)


def spoilt() -> InMemory:
    images = digits().images.clone().float().div(127.5).sub(1)
    images[:90] = torch.nan
    return InMemory(images)


class Levelled(Net):
    def forward(self, x, timesteps, level):
        return super().forward(x, timesteps) * level.view(-1, 1, 1, 1)


def levelled() -> InMemory:
    images = digits().images
    levels = torch.ones(len(images))
    levels[:90] = torch.nan
    return InMemory(images, conditions={"level": levels})
'''

MIXED = """
import torch
from attrs import define, evolve
from hookdiff import hookimpl, saved

@define(eq=False)
class Mixed:
    "Draws early samples rarely, mixes each sample with another one, and makes the noise stronger in each step."

    scale: float = saved(1.0)

    @hookimpl(wrapper=True)
    def draw(self, batch):
        drawn = yield
        return drawn.with_draws({"noise": drawn.draws["noise"] * self.scale})

    @hookimpl
    def after_optimizer_step(self):
        self.scale *= 1.1

    @hookimpl
    def before_epoch(self, loop):
        loop.feed.weigh(torch.arange(len(loop.feed.samples)) + 1.0)

    @hookimpl
    def make_batch(self, loop, batch):
        return evolve(batch, inputs=0.5 * (batch.inputs + batch.inputs.roll(1, 0)))

class Breaks:
    @hookimpl(trylast=True)
    @torch.no_grad()
    def after_optimizer_step(self, loop):
        if loop.progress.step == 2:
            loop.plugins["uncertainty"].net.weight[3:] = torch.nan
"""

BASE: dict[str, Any] = {
    "run": {"steps": 30, "batch_size": 16, "micro_batch": 6, "log_every": 5, "device": "cpu", "plugins": ["nan"]},
    "data": {"source": "digits"},
    "model": {"use": "nets:Net"},
    "diffusion": {"process": "ddpm"},  # with epsilon a rate that is too high gets to NaN within a few steps
    "optimizer": {"use": "adamw", "lr": 1e-3},
}


def config(folder: Path, names: list[str], **tables: dict[str, Any]) -> Path:
    """Write a config and the module of its nets into `folder`."""
    (folder / "nets.py").write_text(NETS)
    changed = {name: {**BASE.get(name, {}), **table} for name, table in tables.items()}
    changed["run"] = {**BASE["run"], **tables.get("run", {}), "plugins": ["nan", *names]}
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps({**BASE, **changed}))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return tmp_path


@pytest.fixture
def hookdiff(hookdiff: Command) -> Command:
    """Return the command line, which trusts the nets of these tests when it replays a step."""
    return lambda *words: hookdiff(*words, *(["--trust"] if words[0] == "replay" else []))


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "nan").iterdir())


@pytest.fixture
def stops(folder: Path, hookdiff: Command) -> Stops:
    """Return a function that runs a `config`, which stops at a NaN, and returns the kept step and its report."""

    def run(names: list[str], **tables: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        code, _, err = hookdiff("run", config(folder, names, **tables), "--out", "run")
        assert code == 3, err
        (step,) = kept(folder)
        return step, json.loads((step / "report.json").read_text())

    return run


@pytest.mark.wide
def test_golden_output_of_a_step_that_comes_back_bit_for_bit_in_another_process(tmp_path: Path, start: Any) -> None:
    # fp16 with its scaler and void steps, dropout, batch norm, micro-batches of two sizes, and two threads.
    options: dict[str, Any] = {"amp": {"precision": "fp16", "init_scale": 2.0**24}, "checkpoint": {"every": 2}}
    path = config(tmp_path, ["amp", "lr", "clip", "checkpoint", "ema"], data={"source": "nets:spoilt"}, plugins=options)
    changes = ("--set", "plugins.nan.policy=skip", "--set", "plugins.nan.max_skips=2")
    code, _, err = finish(start(tmp_path, "run", path, "--out", "run", *changes, fresh=True, OMP_NUM_THREADS="2"))
    assert code == 3, err
    step = kept(tmp_path)[-1]
    before = listing(tmp_path / "run")
    code, out, err = finish(start(tmp_path, "replay", "--trust", step, fresh=True, OMP_NUM_THREADS="1"))
    assert (code, err) == (0, ""), out
    report = (step / "report.txt").read_text()
    assert json.loads((step / "report.json").read_text())["cause"] == "data"
    assert re.search(r"loss scale: \S+ \(batch \d+\) > ", report)
    assert out == f"{report}reproduced bit for bit: 1 loss, 16 losses of the samples, 6 gradients\n"
    assert listing(tmp_path / "run") == before


@pytest.mark.parametrize("every", [*wide(1), 100])
def test_the_report_of_a_rollback_is_the_same(folder: Path, every: int, hookdiff: Command) -> None:
    plugins = {"checkpoint": {"every": every}, "nan": {"policy": "rollback"}}
    path = config(folder, ["checkpoint"], data={"source": "nets:spoilt"}, plugins=plugins)
    ran = hookdiff("run", path, "--out", "run", "--skip-batches", "1", "--set", "run.batch_size=4")
    step = kept(folder)[0]
    assert ran[0] == (3 if every == 100 else 0)  # there is no checkpoint yet to go back to
    assert output(hookdiff("replay", step)).startswith((step / "report.txt").read_text())


@pytest.fixture(scope="module")
def spoilt_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a run that met data that is not finite, with checkpoints from before that step, and a copy."""
    folder, copy = (tmp_path_factory.mktemp(name) for name in ("spoilt", "copy"))
    path = config(folder, ["checkpoint"], data={"source": "nets:spoilt"}, plugins={"checkpoint": {"every": 1}})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "nets", raising=False)
        assert build_loop(load_config(path), folder / "run").run() == "on_nan"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return folder, copy


@pytest.fixture
def spoilt(spoilt_run: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kept step of the run, as it was; the working directory is the folder, and `nets` is imported from there."""
    folder, copy = spoilt_run
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    importlib.import_module("nets")
    return kept(folder)[0]


def test_the_differences_are_listed(spoilt: Path, hookdiff: Command) -> None:
    facts = json.loads((spoilt / "step.json").read_text())
    facts["versions"]["torch"], facts["machine"]["name"] = "1.0", "another"
    facts["results"]["gradients"]["last.bias"] = "0" * 64
    del facts["sha256"]
    (spoilt / "step.json").write_bytes(stamped(facts))
    code, out, _ = hookdiff("replay", spoilt)
    assert code == 1
    torch_line, name_line = sorted(out.splitlines()[:2], key=lambda line: "torch" not in line)
    check_facts(torch_line, "torch", torch.__version__, "1.0")
    check_facts(name_line, "name", "another")
    check_facts(out.splitlines()[-1], "gradients", "last.bias")


@pytest.mark.parametrize("changed", [NETS.replace("torch.nan", "-1.0"), NETS.replace("def spoilt", "def gone")])
def test_data_that_changed_or_is_gone_is_not_needed(spoilt: Path, changed: str, hookdiff: Command) -> None:
    Path("nets.py").write_text(changed)
    sys.modules.pop("nets")
    assert output(hookdiff("replay", spoilt)).startswith((spoilt / "report.txt").read_text())


def test_a_spoilt_condition_is_bad_data_and_in_the_kept_step(folder: Path, stops: Stops, hookdiff: Command) -> None:
    tables = {"data": {"source": "nets:levelled"}, "diffusion": {"conditions": ["level"]}}
    step, report = stops([], model={"use": "nets:Levelled"}, **tables)
    assert report["cause"] == "data"
    output(hookdiff("replay", step))
    (folder / "nets.py").write_text(NETS.replace("torch.nan", "-1.0"))
    sys.modules.pop("nets")
    output(hookdiff("replay", step))  # the step has its own data


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda step: shutil.rmtree(step), ["RUN/nan/step-"]),
        (lambda step: (step / "step.json").write_text("{"), ["step.json", "JSON", "line 1", "column 2"]),
        (lambda step: (step / "step.json").write_bytes(b"{\xff"), ["step.json", "utf-8", "position 1"]),
        (lambda step: (step / "step.json").write_text("{}"), ["step.json", "format"]),
        (lambda step: (step / "model.safetensors").write_bytes(b"no"), ["model.safetensors", "SHA-256"]),
        (lambda step: Path("nets.py").unlink(), ["nets"]),
    ],
)
def test_what_cannot_be_replayed_gives_one_message(spoil: Any, facts: Any, spoilt: Path, hookdiff: Command) -> None:
    spoil(spoilt)
    sys.modules.pop("nets")
    check_refused(hookdiff("replay", spoilt), *facts)


def test_the_steps_that_a_folder_holds_are_named(spoilt: Path, hookdiff: Command) -> None:
    check_refused(hookdiff("replay", spoilt.parents[1]), "step.json", spoilt.name)


def test_the_run_of_a_script_has_to_be_repeated_by_the_script(tmp_path: Path, hookdiff: Command) -> None:
    toy_loop({"nan": NaN()}, data=torch.full((40, 4), torch.nan), run_dir=tmp_path).run()
    (step,) = (tmp_path / "nan").iterdir()
    check_refused(hookdiff("replay", step), step, "config.toml", "script")


def test_an_overflow_is_finite_without_amp(stops: Stops, hookdiff: Command) -> None:
    options = {"amp": {"precision": "fp16", "init_scale": 2.0}}
    step, report = stops(["amp"], model={"use": "nets:Wide"}, plugins=options)
    assert report["cause"] == "overflow"
    check_facts(report["text"], "float16", "Wide")
    output(hookdiff("replay", step))
    assert "nan" not in output(hookdiff("replay", step, "--plugins", "no:amp")).splitlines()[-1]
    output(hookdiff("replay", step, "--set", "plugins.amp.precision=bf16"))


def test_a_step_is_changed_by_options(spoilt: Path, hookdiff: Command) -> None:
    check_refused(hookdiff("replay", spoilt, "--plugins", "no:nan"), "--plugins")
    code, out, _ = hookdiff("replay", spoilt, "--set", "run.micro_batch=16")
    assert code == 1
    check_facts(out.splitlines()[-1], "loss nan")


def test_a_nan_of_the_second_pass_comes_back_bit_for_bit(stops: Stops, hookdiff: Command) -> None:
    options: dict[str, Any] = {"sam": {"rho": 50.0, "after": 3}, "amp": {"precision": "fp16", "init_scale": 4.0}}
    step, report = stops(["amp", "tests.sam:SAM"], model={"use": "nets:Fragile"}, plugins=options)
    assert (report["cause"], report["step"]) == ("forward", 3)
    check_facts(report["text"], "layers (Sequential)", "last (Conv2d)")
    code, out, err = hookdiff("replay", step)
    assert (code, err) == (0, ""), out
    assert out.startswith((step / "report.txt").read_text())
    check_facts(out.splitlines()[-1], 1, 16, 7)  # loss, losses of the samples, gradients
    output(hookdiff("replay", step, "--set", "plugins.sam.after=9"))  # one pass is finite


@pytest.mark.parametrize(("rate", "more", "cause"), [(100.0, [], "backward"), *wide((0.1, ["mixed:Breaks"], "weight"))])
def test_a_module_of_a_plugin_comes_back_bit_for_bit(
    folder: Path, rate: float, more: list[str], cause: str, stops: Stops, hookdiff: Command
) -> None:
    (folder / "mixed.py").write_text(MIXED)
    original = {"process": {"use": "ddpm", "schedule": "cosine", "timesteps": 1000}}
    plugins = {"uncertainty": {"lr": rate}}
    step, report = stops(["tests.sam:Uncertainty", *more], plugins=plugins, diffusion=original)
    assert report["step"] > 0
    assert (report["cause"], report["parameter"]) == (cause, "uncertainty: weight")
    last = output(hookdiff("replay", step)).splitlines()[-1]
    check_facts(last, 1, 16, 7)  # the gradient of the learned weight counts


@pytest.mark.wide
def test_batches_that_a_plugin_makes_and_weighs_come_back(folder: Path, stops: Stops, hookdiff: Command) -> None:
    (folder / "mixed.py").write_text(MIXED)
    step, _ = stops(["mixed:Mixed"], data={"source": "nets:spoilt"})
    assert output(hookdiff("replay", step)).startswith((step / "report.txt").read_text())


@pytest.mark.parametrize("every", [2, *wide(0)])
def test_another_rate_trains_the_earlier_steps_again(every: int, folder: Path, stops: Stops, hookdiff: Command) -> None:
    growing = {"model": {"use": "nets:Net", "grow": 1.0}, "optimizer": {"use": "sgd", "lr": 0.3}}
    step, _ = stops(["checkpoint", "samples", "lr"], plugins={"checkpoint": {"every": every}}, **growing)
    place = json.loads((step / "step.json").read_text())["progress"]
    assert place["step"] > 2
    before = listing(folder / "run")
    first, last = output(hookdiff("replay", step, "--lr", "1e-4")).splitlines()
    begun = (place["step"] - 1) // 2 * 2 if every else 0
    check_facts(first, begun, place["position"], "0.0001")
    assert (f"checkpoints/step-{begun:08d}" in first) == (every > 0)
    assert "nan" not in last
    code, out, _ = hookdiff("replay", step, "--lr", "0.3")
    assert code == 1
    check_facts(out, "loss nan", "forward", "Net")
    assert listing(folder / "run") == before


def test_another_rate_cannot_change_the_first_weights(folder: Path, hookdiff: Command) -> None:
    path = config(folder, [], model={"use": "nets:Net", "grow": 1.0}, optimizer={"use": "sgd", "lr": 30.0})
    (folder / "nets.py").write_text(NETS.replace("return 0.02", "return -1.0"))
    assert hookdiff("run", path, "--out", "run")[0] == 3
    check_refused(hookdiff("replay", kept(folder)[0], "--lr", "1e-4"), "--lr")


def test_anomaly_names_the_operation(stops: Stops, hookdiff: Command) -> None:
    step, report = stops([], model={"use": "nets:Steep"})
    assert report["cause"] == "backward"
    check_facts(report["text"], "last (Conv2d)")
    out = output(hookdiff("replay", step, "--anomaly"))
    check_facts(out, "returned nan values", "nets.py", "sqrt()")  # torch's words, and the line of the net
    assert "dispatch.py" not in out


@pytest.mark.slow
def test_a_compiled_step_comes_back_compiled(tmp_path: Path, start: Any) -> None:
    path = config(tmp_path, ["compile", "checkpoint"], model={"use": "nets:Steep"})
    code, _, err = finish(start(tmp_path, "run", path, "--out", "run"))
    assert code == 3, err
    (step,) = kept(tmp_path)
    assert json.loads((step / "report.json").read_text())["cause"] == "backward"
    out, report = output(finish(start(tmp_path, "replay", "--trust", step))), (step / "report.txt").read_text()
    assert out.startswith(report)
    check_facts(out.removeprefix(report), 1, 16, 6)  # loss, losses of the samples, gradients


def test_a_missing_folder_is_refused_with_the_nearest(folder: Path, hookdiff: Command) -> None:
    (folder / "step-00000003-position-00000003").mkdir()
    (folder / "file").touch()
    asked = "step-00000003-position-0000003"
    check_refused(hookdiff("replay", asked), asked, "step-00000003-position-00000003")
    check_refused(hookdiff("replay", "file"), "file", "RUN/nan/step-")
