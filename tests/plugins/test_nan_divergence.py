import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from torch import nn

from hookdiff import Batch, Loop, build_loop, hookimpl, load_config
from hookdiff.testing.toy import toy_loop
from hookdiff_nan import NaN
from tests.conftest import Command, acting, check_facts, toy_run, wide, write_small


def trained(folder: Path, *names: str, inject: object = None, resume: Path | None = None, **tables: Any) -> Loop:
    """Train a small U-Net with the plugins `names` and nan, and return its loop."""
    tables = {**tables, "run": {"steps": 60, **tables.get("run", {}), "plugins": ["nan", *names]}}
    config = load_config(write_small(folder / "config.toml", **tables))
    extra = {"inject": inject} if inject else {}
    loop = build_loop(config, folder / "run", plugins=extra, resume=resume or False)
    loop.run()
    return loop


def diagnosis(loop: Loop) -> Any:
    return loop.plugins["nan"].diagnosis  # type: ignore[attr-defined]


FP16 = {"amp": {"precision": "fp16", "init_scale": 256.0}}
BF16 = {"amp": {"precision": "bf16"}}
V = {"prediction": "v_prediction"}
FLOW = {"process": {"use": "flow"}}
DIVERGING: dict[str, tuple[list[str], dict[str, Any]]] = {
    "slightly too high": ([], {"optimizer": {"use": "sgd", "lr": 0.5}}),
    "much too high": ([], {"optimizer": {"use": "sgd", "lr": 10.0}}),
    "at once": ([], {"optimizer": {"use": "adamw", "lr": 1e10}}),
    "a loss that is infinite": ([], {"optimizer": {"use": "sgd", "lr": 1e30}}),
    "adamw": ([], {"optimizer": {"use": "adamw", "lr": 1e3}}),
    "weight decay": ([], {"optimizer": {"use": "adamw", "lr": 50.0, "weight_decay": 0.1}}),
    "clipped": (["clip"], {"optimizer": {"use": "sgd", "lr": 1e4}, "diffusion": {"process": "ddpm"}}),
    "clipped adamw": (["clip"], {"optimizer": {"use": "adamw", "lr": 1e3}}),
    "fp16": (["amp"], {"optimizer": {"use": "sgd", "lr": 3.0}, "plugins": FP16}),
    "fp16 at once": (["amp", "clip"], {"optimizer": {"use": "adamw", "lr": 100.0}, "plugins": FP16}),
    "bf16": (["amp"], {"optimizer": {"use": "sgd", "lr": 1.0}, "plugins": BF16}),
    "warm-up": (["lr"], {"optimizer": {"use": "sgd", "lr": 10.0}, "plugins": {"lr": {"warmup": 50}}}),
    "flow": ([], {"optimizer": {"use": "sgd", "lr": 1.0, "momentum": 0.9}, "diffusion": FLOW}),
    "v": ([], {"optimizer": {"use": "sgd", "lr": 1.0}, "diffusion": {"prediction": "v_prediction"}}),
}
first = ("slightly too high", "a loss that is infinite", "clipped adamw", "fp16", "warm-up")


@pytest.mark.parametrize("case", [*first, *wide(*(case for case in DIVERGING if case not in first))])
def test_a_rate_that_is_too_high_is_named_with_a_lower_one(case: str, tmp_path: Path) -> None:
    names, tables = DIVERGING[case]
    loop = trained(tmp_path, *names, **tables)
    assert loop.end.reason == "on_nan"
    diagnosed = diagnosis(loop)
    assert diagnosed.cause == "divergence", diagnosed
    (folder,) = (tmp_path / "run" / "nan").iterdir()
    assert json.loads((folder / "report.json").read_text())["cause"] == "divergence"
    rate = tables["optimizer"]["lr"]
    if case != "warm-up":  # it does not reach that rate
        check_facts(diagnosed.text, f"{rate:g}", 0.005 if rate == 0.5 else 0.01)


@pytest.mark.wide
def test_the_step_with_weights_to_go_on_from_is_named_also_after_a_resume(tmp_path: Path) -> None:
    def at(rate: float, steps: int, folder: str, resume: Path | None = None) -> Loop:
        (tmp_path / folder).mkdir(exist_ok=True)
        tables = {"optimizer": {"use": "sgd", "lr": rate}, "plugins": {"checkpoint": {"every": 1, "keep_last": 60}}}
        return trained(tmp_path / folder, "checkpoint", resume=resume, run={"steps": steps}, **tables)

    run, named = tmp_path / "first" / "run", []
    assert at(1e-3, 8, "first").end.reason == "done"
    for rate in (10.0, 1e-3):  # the second begins with ruined weights
        loop = at(rate, 20, "first", run)
        assert loop.end.reason == "on_nan"
        named += re.findall(r"from a checkpoint of step (\d+)", diagnosis(loop).text)
    assert named == ["8", "8"]
    assert at(1e-3, 20, "second", run / "checkpoints" / "step-00000008").end.reason == "done"


@define(eq=False)
class Spoil:
    """Makes a value of the step at position `at` not finite, or gives a sample the value `large`."""

    kind: str
    at: int
    large: float = 0.0

    @hookimpl
    @torch.no_grad()
    def before_step(self, loop: Loop, batch: Batch) -> None:
        if loop.progress.position != self.at:
            return
        convolutions = [module for module in loop.model.modules() if isinstance(module, nn.Conv2d)]
        middle = convolutions[len(convolutions) // 2]
        if self.kind == "data":
            batch.inputs[0] = torch.nan
        elif self.kind == "large":
            batch.inputs[0] = self.large
        elif self.kind == "draw":
            batch.draws["noise"][0] = torch.inf
        elif self.kind == "weight":
            middle.weight[0] = torch.nan
        elif self.kind == "forward":
            middle.register_forward_hook(lambda module, args, output: output * (-1 - output.detach().square()).sqrt())
        elif self.kind == "backward":
            middle.register_forward_hook(lambda module, args, output: output + 0 * (output - output).sqrt())
        elif self.kind == "overflow":
            convolutions[0].register_forward_hook(lambda module, args, output: (output * 1e7).to(output.dtype) / 1e7)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("data", 0),
        ("weight", 14),
        ("overflow", 14),
        *wide(("data", 14), ("draw", 14), ("forward", 14), ("backward", 14), ("weight", 0)),
    ],
)
def test_a_healthy_run_with_a_nan_keeps_its_own_cause(kind: str, at: int, tmp_path: Path) -> None:
    # One sample in a batch, and a weighting by the signal: the losses differ by orders of magnitude.
    diffusion = {"process": {"use": "vp"}, "prediction": "sample", "weighting": {"use": "min_snr", "gamma": 1e4}}
    names = ["amp"] if kind == "overflow" else []
    tables = {"run": {"batch_size": 1}, "diffusion": diffusion, "optimizer": {"use": "adamw", "lr": 1e-2}}
    options = {"plugins": {"amp": {"precision": "fp16", "init_scale": 1.0}}} if names else {}
    loop = trained(tmp_path, *names, inject=Spoil(kind, at), **tables, **options)
    assert (loop.end.reason, loop.progress.position) == ("on_nan", at)
    assert diagnosis(loop).cause == kind
    if at == 14:
        losses = [update[1] for update in loop.plugins["nan"].state_dict()["last"]]  # type: ignore[attr-defined]
        assert max(losses) > 100 * min(losses)


@pytest.mark.parametrize("large", [1e10, *wide(1e30)])
def test_one_odd_batch_is_no_divergence(large: float, tmp_path: Path) -> None:
    loop = trained(tmp_path, inject=Spoil("large", 12, large), optimizer={"use": "sgd", "lr": 0.01}, diffusion=V)
    assert loop.end.reason == "on_nan"
    assert diagnosis(loop).cause != "divergence"


def test_a_large_loss_that_falls_is_no_divergence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].weight.mul_(1e3)

    def spoil(loop: Loop) -> None:
        if loop.progress.position == 12:
            loop.model[1].register_forward_hook(lambda *args: args[-1] * torch.nan)

    loop = toy_run({"nan": NaN(), "spoils": acting(before_step=spoil)}, model=model)
    assert diagnosis(loop).cause == "forward"


def test_a_slow_divergence_is_named(caplog: pytest.LogCaptureFixture) -> None:
    # The loss of a linear model grows by a constant factor.
    torch.manual_seed(0)
    optimizers: Any = lambda net: torch.optim.SGD(net.parameters(), 3.0)  # noqa: E731
    loop = toy_loop({"nan": NaN()}, model=nn.Linear(4, 4), optimizers=optimizers, steps=1000)
    assert loop.run() == "on_nan"
    assert loop.progress.step > 20
    assert diagnosis(loop).cause == "divergence"
    check_facts(diagnosis(loop).text, 3, 0.01)


@pytest.mark.wide
def test_a_replay_names_the_divergence_and_a_lower_rate_helps(tmp_path: Path, hookdiff: Command, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    tables = {"run": {"plugins": ["nan", "checkpoint"]}, "optimizer": {"use": "sgd", "lr": 9.9}}
    path = write_small(tmp_path / "config.toml", **tables)
    assert hookdiff("run", path, "--out", tmp_path / "run")[0] == 3
    (step,) = (tmp_path / "run" / "nan").iterdir()
    code, out, _ = hookdiff("replay", step)
    assert (code, out.startswith((step / "report.txt").read_text())) == (0, True)
    (cause,) = [line for line in out.splitlines() if "cause" in line]
    check_facts(cause, "divergence", 9.9, 0.01)
    losses = next(line for line in out.splitlines() if "losses" in line).split("losses ")[1].split()
    check_facts(cause, f"{float(losses[0]):.2g}")  # that of the first update
    assert hookdiff("replay", step, "--lr", "0.01")[0] == 0
