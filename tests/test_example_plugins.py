"""The published plugins of the examples are installed and run as a user does it, and follow their papers."""

import copy
import csv
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli
import torch
from attrs import evolve
from safetensors.torch import load_file
from torch import Tensor, nn

from hookdiff import Batch, Loop, LossOutput, TrackedRun, UserError, hookimpl
from hookdiff.experiment.discovery import plugin_class
from hookdiff.testing.compare import weights
from hookdiff.testing.contract import assert_keeps_contract
from hookdiff.testing.run_checks import assert_any_order, assert_removable, assert_resumes
from hookdiff.testing.sink_checks import assert_tracks
from hookdiff.testing.toy import ToyObjective, toy_loop, toy_model
from tests.conftest import Batches, check_facts, check_refused, finish, output, records, refused, toy_run
from tests.forked import python, run_python

PLUGINS = Path(__file__).parents[1] / "examples" / "plugins"
NAMES = sorted(path.parent.name for path in PLUGINS.glob("*/pyproject.toml"))

Run = Callable[..., tuple[int, str, str]]

OPTIONS: dict[str, dict[str, Any]] = {  # with which each plugin acts before and after step 5
    "csv": {},
    "freeze": {"weights": ["down.*"], "until": 7},
    "lookahead": {"every": 3},
    "sam": {"rho": 0.5},
    "target": {"metric": "loss", "value": 100.0, "times": 8},
    "uncertainty": {},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the published plugins into a folder, and return the folder."""
    projects = tmp_path_factory.mktemp("projects")
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGINS, projects, dirs_exist_ok=True)
    options = "--quiet", "--no-deps", "--no-build-isolation", "--target", site
    run_python("-m", "pip", "install", *options, *(projects / name for name in NAMES), folder=projects)
    return site


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process import the published plugins."""
    monkeypatch.syspath_prepend(site)


def tensors(run: Path) -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint, by file and name."""
    newest = max((run / "checkpoints").glob("step-*"))
    return {f"{file.name}: {name}": t for file in newest.glob("*.safetensors") for name, t in load_file(file).items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


# All plugins


def test_each_package_is_small_and_its_plugin_is_listed_with_its_keys(installed: None, succeed: Any) -> None:
    rows = {line.split()[0]: line for line in succeed("plugins").splitlines() if line.startswith("  ")}
    for name in NAMES:
        module = PLUGINS / name / f"hookdiff_{name}.py"
        assert len(module.read_text().splitlines()) <= 60, name
        assert (PLUGINS / name / "README.md").is_file(), name
        check_facts(rows[name], f"hookdiff-{name} 0.1.0")
        check_facts(succeed("plugins", name), f"[plugins.{name}]", *OPTIONS[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_plugin_keeps_every_promise(name: str, installed: None) -> None:
    options = {"freeze": {"weights": ["0.*"], "until": 7}}.get(name, OPTIONS[name])
    make = partial(plugin_class(name), **options)
    assert_keeps_contract(make, steps=10)
    assert_resumes(make, at=(1, 5, 8), steps=10)
    assert_any_order(make, steps=10)
    assert_removable(make, changes="nothing" if name in ("csv", "target") else "training", steps=10)


@pytest.mark.slow
def test_selftest_finds_no_difference_after_a_kill(site: Path, write_config: Any, start: Any) -> None:
    plugins = ["sam", "uncertainty", "lr", "amp", "clip", "ema", "nan", "checkpoint", "csv"]
    adopted = {"adopted": ["uncertainty"]}
    config = write_config(
        run={"steps": 40, "log_every": 3, "micro_batch": 5, "plugins": plugins},
        model={"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8, "dropout": 0.1},
        # The first steps overflow, and are void.
        plugins={"amp": {"precision": "fp16", "init_scale": 1e9}, "lr": adopted, "clip": adopted},
    )
    output(finish(start(site, "selftest", "resume", config, "--steps", 16)))


def test_a_published_plugin_is_found_configured_called_in_order_and_removed(
    site: Path, installed: None, tmp_path: Path, hookdiff: Run, succeed: Any, write_config: Any, start: Any
) -> None:
    tables = {"ema": {}, "lookahead": {"every": 2, "alpha": 0.8}}
    config = write_config(run={"steps": 10, "log_every": 5, "plugins": list(tables)}, plugins=tables)

    assert tomli.loads(succeed("check", config))["plugins"]["lookahead"] == tables["lookahead"]
    wrong = "--set", "plugins.lookahead.alhpa=1", "--set", "plugins.lookahead.every=0"
    check_refused(hookdiff("check", config, *wrong), "plugins.lookahead.alhpa", "'alpha'", "plugins.lookahead.every")

    order = dict(line.split(maxsplit=1) for line in succeed("plugins", "--order", config).splitlines())
    assert order["on_start"] == "ema (first) > lookahead"
    assert order["optimizer_step"] == "lookahead (around)"

    check_facts(succeed("run", config, "--out", tmp_path / "run").splitlines()[0], "done", 10)

    # Without its package the name is unknown, and the message lists the installed plugins.
    code, _, err = finish(start(tmp_path, "check", config, PYTHONPATH=os.pathsep.join(set(sys.path) - {str(site)})))
    assert code == 2
    check_facts(err, "'lookahead'", "ema")
    assert "Traceback" not in err


# lookahead


@pytest.mark.wide
def test_the_own_tests_of_a_published_plugin_pass(site: Path, tmp_path: Path) -> None:
    shutil.copy(PLUGINS / "lookahead" / "test_lookahead.py", tmp_path)
    tests = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    code, out, _ = python(tests, folder=tmp_path, PYTHONPATH=os.pathsep.join([str(site), *sys.path]))
    assert code == 0, out
    check_facts(out, "2 passed")


# sam


class Scale:
    """A plugin that divides the loss by exp(scale), with a scale of its own."""

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        self.module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.module.weight)
        loop.adopt(self, self.module, sgd(self.module))

    @hookimpl
    def reduce_loss(self, output: LossOutput) -> Tensor:
        assert output.per_sample is not None
        scale = self.module.weight.sum()
        return (output.per_sample / scale.exp() + scale).mean()


def normed() -> nn.Module:
    """Return a net on four numbers with batch norm."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize(("make", "micro_batch"), [(normed, None), (toy_model, None), (toy_model, 3)])
def test_sam_equals_a_plain_loop(installed: None, make: Callable[[], nn.Module], micro_batch: int | None) -> None:
    from hookdiff_sam import SAM

    model = make()
    reference = copy.deepcopy(model)
    scale, batches = Scale(), Batches()
    plugins = {"sam": SAM(rho=0.3), "scale": scale, "batches": batches}
    loop = toy_run(plugins, model=model, optimizers=sgd, steps=6, micro_batch=micro_batch)

    s = torch.zeros((), requires_grad=True)
    parameters = list(reference.parameters())
    optimizer = torch.optim.SGD([*parameters, s], lr=0.5)

    def backward(batch: Batch) -> None:
        optimizer.zero_grad()
        per_sample = ToyObjective()(reference, batch).per_sample
        assert per_sample is not None
        torch.autograd.backward((per_sample / s.exp() + s).mean())

    for batch in batches.seen:
        backward(batch)
        state = copy.deepcopy(reference.state_dict())  # batch norm sees the batch here, and not at the worst weights
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(0.3 * g / norm)
        backward(batch)
        reference.load_state_dict(state)
        optimizer.step()

    assert len(batches.seen) == 6
    torch.testing.assert_close(weights(loop), dict(reference.state_dict()), rtol=0, atol=1e-6)
    torch.testing.assert_close(scale.module.weight.detach().sum(), s.detach(), rtol=0, atol=1e-6)


@pytest.mark.wide
def test_sam_trains_in_fp16_and_leaves_out_steps_that_overflow(
    installed: None, succeed: Any, write_config: Any, tmp_path: Path
) -> None:
    run = {"steps": 4, "log_every": 1, "plugins": ["sam", "amp", "nan"]}
    config = write_config(run=run, plugins={"amp": {"precision": "fp16", "init_scale": 2.0**30}})
    succeed("run", config, "--out", tmp_path / "run")
    last = records(tmp_path / "run")[-1]
    assert last["amp/void_steps"] > 0
    assert math.isfinite(last["loss"])


# csv


class Late:
    """A plugin that logs at steps 6 and 7, and at the end of each epoch."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step in (6, 7):
            loop.log({"late, and with a comma": loop.progress.step / 2})

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        loop.log({"epochs": loop.progress.epoch})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_the_numbers_of_each_run_and_costs_none_when_it_fails(installed: None) -> None:
    from hookdiff_csv import Csv

    def read(folder: Path) -> dict[tuple[int, str], float]:
        table = [(int(row.pop("step")), row) for row in rows(folder / "a.csv")]
        return {(step, name): float(value) for step, row in table for name, value in row.items() if value}

    assert_tracks(lambda folder: Csv(path=str(folder / "a.csv")), read)


def test_values_of_the_same_step_share_a_row_and_an_earlier_step_replaces_later_ones(
    installed: None, tmp_path: Path
) -> None:
    from hookdiff_csv import Csv

    toy_loop({"csv": Csv(), "late": Late()}, run_dir=tmp_path, epochs=2, batch_size=10, log_every=1).run()
    table = rows(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in table] == list(range(1, 9))
    assert [row["epochs"] for row in table] == ["", "", "", "1.0", "", "", "", "2.0"]

    sink = Csv(path=str(tmp_path / "other.csv"))
    sink.open(TrackedRun(run_dir=None, hparams={}, is_branch=False, step=0))
    for step, value in ((1, 0.5), (2, math.nan), (3, math.inf), (2, 4.0), (3, 5.0)):  # as after a rollback to step 1
        sink.scalars(step, 0.0, {"loss": value})
    assert (tmp_path / "other.csv").read_text() == "step,loss\n1,0.5\n2,4.0\n3,5.0\n"


def test_a_write_that_fails_in_the_middle_is_repeated(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hookdiff_csv import Csv

    failed: list[int] = []
    write = csv.DictWriter.writerow

    def write_half(self: Any, row: Mapping[str, Any]) -> Any:
        if row["step"] == 2 and not failed:
            failed.append(2)
            write(self, {"step": 2})
            raise OSError("no space")
        return write(self, row)

    monkeypatch.setattr("csv.DictWriter.writerow", write_half)
    sink = Csv(path="a.csv")
    toy_loop({"csv": sink, "curve": Curve(3, 2, 1)}, run_dir=tmp_path, steps=3).run()
    assert failed
    assert (tmp_path / "a.csv").read_text() == "step,curve\n1,3.0\n2,2.0\n3,1.0\n"


def test_a_table_without_a_run_directory_is_refused(installed: None) -> None:
    from hookdiff_csv import Csv

    with refused(UserError, "plugins.csv.path", "metrics.csv"):
        toy_loop({"csv": Csv()}).run()


# uncertainty


class Known:
    """An objective on one weight, with a loss that is a known function of the log-SNR."""

    def draw(self, batch: Batch, generator: torch.Generator) -> Batch:
        log_snr = torch.rand(len(batch), generator=generator) * 12 - 6
        return evolve(batch, draws={"log_snr": log_snr})

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
        log_snr = batch.draws["log_snr"]
        per_sample = known(log_snr) + 0 * net(batch.inputs).flatten(1).sum(1)
        return LossOutput(per_sample.mean(), per_sample, log_snr=log_snr, weights=torch.full_like(log_snr, 2.0))


def known(log_snr: Tensor) -> Tensor:
    return (log_snr / 3).exp()


def test_the_learned_weight_is_the_loss_of_the_noise_level(installed: None) -> None:
    from hookdiff_uncertainty import Uncertainty

    plugin = Uncertainty(features=64)
    toy_loop({"uncertainty": plugin}, objective=Known(), steps=400, batch_size=40).run()
    log_snr = torch.linspace(-5, 5, 11)
    torch.testing.assert_close(plugin.log_variance(log_snr).detach(), (2 * known(log_snr)).log(), rtol=0, atol=0.1)
    assert plugin.log_variance(torch.tensor([-math.inf, math.inf])).isfinite().all()


@pytest.mark.wide
def test_the_learned_weight_does_not_depend_on_micro_batch(
    installed: None, succeed: Any, write_config: Any, tmp_path: Path
) -> None:
    run = {"steps": 5, "log_every": 1, "plugins": ["uncertainty", "checkpoint", "lr", "clip"]}
    adopted = {"adopted": ["uncertainty"]}
    diffusion = {"process": {"use": "vp", "schedule": "cosine", "timesteps": 20}, "weighting": "min_snr"}
    config = write_config(run=run, plugins={"lr": adopted, "clip": adopted}, diffusion=diffusion)
    for size in (16, 5):
        succeed("run", config, "--out", tmp_path / str(size), "--set", f"run.micro_batch={size}")
    whole, in_parts = tensors(tmp_path / "16"), tensors(tmp_path / "5")
    assert any(name.startswith("uncertainty.safetensors") and "linear" in name for name in whole)
    torch.testing.assert_close(whole, in_parts, rtol=1e-3, atol=1e-5)

    succeed("run", config, "--out", tmp_path / "plain", "--plugins", "no:uncertainty,no:lr,no:clip")
    first, plain = records(tmp_path / "16"), records(tmp_path / "plain")
    assert first[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)  # u starts at zero
    assert first[1]["loss"] != plain[1]["loss"]


def test_an_objective_without_a_log_snr_is_refused(installed: None) -> None:
    from hookdiff_uncertainty import Uncertainty

    class Nameless(ToyObjective):
        def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
            return evolve(super().__call__(net, batch), log_snr=None)

    with refused(UserError, "uncertainty"):
        toy_loop({"uncertainty": Uncertainty()}, objective=Nameless()).run()


# freeze


def test_chosen_weights_stay_until_the_step_and_are_trained_after_it(installed: None) -> None:
    from hookdiff_freeze import Freeze

    with toy_loop({"freeze": Freeze(weights=["0.*", "?.bias"], until=5)}) as loop:
        seen = [weights(loop)]
        for _ in loop.steps():
            seen.append(weights(loop))
    frozen = {"0.weight", "0.bias", "3.bias"}
    assert frozen < set(seen[0])
    for step, (before, after) in enumerate(itertools.pairwise(seen)):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == (set(before) - frozen if step < 5 else set(before)), step
    assert all(p.requires_grad for p in loop.model.parameters())


def test_patterns_without_a_weight_or_with_all_weights_are_refused(
    installed: None, hookdiff: Run, write_config: Any, tmp_path: Path
) -> None:
    config = write_config(run={"plugins": ["freeze"]})
    for value in ("[]", "['dwon.*']", "['*']"):
        done = hookdiff("run", config, "--out", tmp_path / "run", "--set", f"plugins.freeze.weights={value}")
        check_refused(done, "plugins.freeze", "weights")


# target


class Curve:
    """A plugin that logs one number of a list in each step."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        loop.log({"curve": self.numbers[loop.progress.step - 1]})


@pytest.mark.parametrize(
    ("mode", "times", "curve", "end"),
    [
        ("min", 1, (3, 2.5, 2, 1), 3),
        ("min", 2, (2, 3, 2, 1, 1), 4),
        ("min", 2, (2, math.nan, 2, 2), 4),
        ("max", 1, (1, 1.5, 2, 3), 3),
        ("max", 3, (2, 2, 1, 2), None),
    ],
)
def test_a_run_ends_at_its_target(
    installed: None, mode: Literal["min", "max"], times: int, curve: tuple[float, ...], end: int | None
) -> None:
    from hookdiff_target import Target

    plugins = {"target": Target(metric="curve", value=2.0, mode=mode, times=times), "curve": Curve(*curve)}
    loop = toy_loop(plugins, steps=len(curve))
    assert loop.run() == ("plugin" if end else "done")
    assert loop.progress.step == (end or len(curve))
    if end:
        check_facts(loop.end.message, "curve", 2)


@pytest.mark.wide
def test_a_run_at_its_target_stays_ended_unless_the_target_is_harder(
    installed: None, hookdiff: Run, succeed: Any, write_config: Any, tmp_path: Path
) -> None:
    run = {"steps": 6, "log_every": 2, "plugins": ["target", "checkpoint"]}
    config = write_config(run=run, plugins={"target": {"metric": "loss", "value": 100.0}})
    for words, step in (((), 2), (("--resume",), 2), (("--resume", "--set", "plugins.target.value=0.0"), 6)):
        succeed("run", config, "--out", tmp_path / "run", *words)
        outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
        assert (outcome["step"], outcome["reason"]) == (step, "plugin" if step == 2 else "done")

    check_refused(hookdiff("check", config, "--set", "plugins.target.mode=maximum"), "plugins.target.mode", "max")


def test_the_first_rank_decides_whether_the_target_is_reached(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import hookdiff_target

    asked: list[bool] = []
    monkeypatch.setattr(hookdiff_target, "first_rank_says", lambda reached: asked.append(reached))
    loop = toy_loop({"target": hookdiff_target.Target(metric="curve", value=2.0), "curve": Curve(3, 2, 1)}, steps=3)
    assert loop.run() == "done"
    assert asked[-3:] == [False, True, True]
