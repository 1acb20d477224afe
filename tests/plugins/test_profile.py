import gzip
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from hookdiff import load_config
from hookdiff.authors import Stopwatch
from hookdiff_profile.cli import advice
from hookdiff_profile.steps import busy_seconds, parts_of, running
from hookdiff_profile.trials import Change, Outcome, changes
from tests.conftest import check_facts, check_refused, output, wide

Small = Callable[..., Path]
TICKS = """
import weakref
from attrs import define
from hookdiff import hookimpl

now, alive, counts = [0.0], weakref.WeakSet(), []

@define(eq=False)
class Ticks:
    "Lets a second pass in each step, and counts the loops that are in memory at the start of one."

    @hookimpl
    def on_start(self):
        alive.add(self)
        counts.append(len(alive))

    @hookimpl
    def after_backward(self):
        now[0] += 1
"""


@pytest.fixture
def ticks(user_module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module `hd_profile_ticks` of a plugin that moves the clock on; else the clock stands still."""
    user_module("hd_profile_ticks", TICKS)
    module = importlib.import_module("hd_profile_ticks")
    monkeypatch.setattr("time.perf_counter", lambda: module.now[0])
    yield module
    del sys.modules[module.__name__]  # the next test begins with its own counts


@pytest.fixture
def small(write_config: Small, here: Path) -> Small:
    return lambda *plugins, **tables: write_config(run={"plugins": list(plugins)}, **tables)


def test_each_moment_belongs_to_the_inner_hook_or_to_the_loop_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    record = Stopwatch(torch.device("cpu"))
    for hook, inner in (("draw", None), ("accumulate", "backward"), ("unscale", None), ("after_backward", None)):
        with record("mine" if hook == "after_backward" else "defaults", hook):
            now[0] += 2
            if inner:
                with record("defaults", inner):
                    now[0] += 30
        now[0] += 10
    with record("defaults", "make_batch"):
        pass
    parts = parts_of(record)
    assert next(iter(parts)) == "backward"
    own = {"draw of noise and times": 2, "mine: after_backward": 2}
    assert parts == {**own, "loop": 24, "backward": 30, "finite check": 10, "data": 10}


def test_a_gpu_is_busy_while_it_does_anything() -> None:
    def event(start: float, stop: float, **given: Any) -> FunctionEvent:
        return FunctionEvent(0, "", 0, start, stop, **{"device_type": DeviceType.CUDA, **given})

    launch = event(0, 90, device_type=DeviceType.CPU)
    launch.append_kernel("kernel", 0, 40)
    kernels = [event(20, 60), event(50, 70), event(80, 85)]  # the second in another stream
    assert busy_seconds([event(10, 100, is_user_annotation=True), launch, *kernels]) == pytest.approx(55e-6)
    assert busy_seconds([]) == 0


def test_the_time_of_a_plugin_stands_at_its_hook(small: Small, ticks: Any, hookdiff: Any, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    config = small("hd_profile_ticks:Ticks", "ema", "clip", "checkpoint", "samples", "progress")
    profile = json.loads(output(hookdiff("profile", config, "--steps", 4, "--no-try", "--json")))
    parts = profile["parts"]
    assert (profile["seconds"], parts["ticks: after_backward"], sum(parts.values())) == (1, 1, 1)
    core = {"data", "draw of noise and times", "forward and loss", "backward", "finite check", "optimizer", "logs"}
    assert core <= parts.keys()
    assert {"ema: after_optimizer_step", "clip: after_backward"} <= parts.keys()
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert (profile["device"], profile["images"], profile["busy"], profile["changes"]) == ("cpu", 16, None, [])
    assert set(tmp_path.iterdir()) - before <= {config, tmp_path / "__pycache__"}


@pytest.mark.parametrize(
    ("run", "warmup", "length", "first"),
    [
        ({"steps": 3000}, 0.05, 3000, 150),
        ({"steps": 100_000}, 0.5, 100_000, 50_000),
        ({"steps": 60}, 10, 60, 10),
        ({"epochs": 2}, 0.05, 224, 11),
        *wide(({"epochs": 1, "batch_size": 900}, 0.05, 33, 1)),  # of 1 step: longer than the config says
        ({"steps": 8}, 0.05, 33, 1),
        ({"steps": 3000}, 0, 3000, 0),
    ],
)
def test_a_run_keeps_its_length_and_is_measured_at_its_whole_rate(
    run: dict[str, int], warmup: float, length: int, first: int, small: Small
) -> None:
    rates = set()
    path = small("lr", optimizer={"use": "adamw", "lr": 0.001}, plugins={"lr": {"warmup": warmup}})
    config = load_config(path)
    config = evolve(config, run=evolve(config.run, **{"steps": None, **run}))
    with running(config, num=10) as (loop, step):
        assert loop.config.planned_steps(loop.feed) == length
        assert first <= loop.progress.step <= 1.5 * first + 9
        for _ in range(10):
            step()
            rates |= {group["lr"] for group in loop.optimizers[0].param_groups}
    assert rates == {0.001}


def test_the_table_and_the_trace_are_for_reading(small: Small, hookdiff: Any, tmp_path: Path) -> None:
    done = hookdiff("profile", small("clip"), "--steps", 2, "--no-try", "--trace", "new/step.json.gz")
    first, place, *lines = output(done).splitlines()
    # On a busy machine one more line says that the parts took longer than the step.
    columns, *rows, last = [line for line in lines if not line.lstrip().startswith("its parts")]
    check_facts(first, "small", "ms a step", 16, "cpu", "img/s")
    check_facts(place, "step 5 of 30", "warm-up", "config")
    assert columns.split() == ["part", "ms", "share"]
    assert sum(float(row.rsplit(maxsplit=1)[1].rstrip("%")) for row in rows) == pytest.approx(100, abs=1)
    check_facts(last, "step.json.gz", "perfetto")
    events = json.loads(gzip.decompress((tmp_path / "new" / "step.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"clip: after_backward", "defaults: compute_loss", "aten::convolution"} <= names


def test_changes_are_measured_in_images_and_leave_nothing_in_memory(small: Small, hookdiff: Any, ticks: Any) -> None:
    # "eager" compiles nothing, which keeps the test short.
    config = small("hd_profile_ticks:Ticks", plugins={"compile": {"backend": "eager"}})
    sizes = ("--set", "data.held_out=1750", "--set", "run.batch_size=24")
    listed = json.loads(output(hookdiff("profile", config, "--steps", 2, "--json", *sizes)))["changes"]
    changes_by_text = {" ".join(each["plugins"] + each["settings"]): each for each in listed}
    assert "47" in changes_by_text.pop("run.batch_size=48")["why"]
    ratios = {text: each.get("ratio") for text, each in changes_by_text.items()}
    assert ratios == {"amp": 1, "compile": 1, "run.channels_last=false": 1, "run.batch_size=12": 0.5}
    # After the profile, the config and the first change, only the config and one change at a time are in memory.
    assert ticks.counts[3:] == [2] * 3


def test_the_changes_follow_from_the_config(small: Small, load_small: Any) -> None:
    def of(*plugins: str, device: str = "cpu", stored: bool = True, channels_last: bool = True) -> list[str]:
        return [str(change) for change in changes(load_small(plugins=plugins), device, stored, channels_last)]

    sizes = ["--set run.batch_size=32", "--set run.batch_size=8"]
    assert of() == ["--plugins amp", "--set run.channels_last=false", *sizes, "--plugins compile"]
    assert of("amp", "compile", channels_last=False) == ["--plugins no:amp", "--set run.channels_last=true", *sizes]
    assert of(device="cuda")[-3:] == [f"--plugins {n}" for n in ("compile", "cuda_graphs", "compile,cuda_graphs")]
    assert of("cuda_graphs", device="cuda") == of()
    assert of("amp", "compile", stored=False)[-1] == "--set data.store=disk"
    assert of("amp", "compile", stored=False)[-2].startswith("--set data.workers=")


def test_the_three_best_changes_come_first() -> None:
    outcomes = [
        Outcome(Change(("amp",)), 1.5),
        Outcome(Change(settings=("run.channels_last=true",)), 0.9),
        Outcome(Change(settings=("run.batch_size=32",)), 1.1),
        Outcome(Change(settings=("run.batch_size=8",)), 1.2),
        Outcome(Change(("compile",)), why="no compiler"),
        Outcome(Change(settings=("data.workers=1",)), 1.05),
    ]
    assert advice(outcomes).splitlines() == [
        "try first, with the speed over the present speed:",
        "  1.50  --plugins amp",
        "  1.20  --set run.batch_size=8",
        "  1.10  --set run.batch_size=32",
        "  also measured: --set data.workers=1 1.05, --set run.channels_last=true 0.90",
        "  not measured: --plugins compile: no compiler",
    ]
    assert advice([Outcome(Change(("amp",)), 1.02)]) == "nothing that was tried is faster:\n  1.02  --plugins amp"


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ((".",), ("directory", "small.toml")),
        (("small.toml", "--trace", "small.toml/step.json"), ("small.toml/step.json",)),
        (("small.toml", "--set", "run.batch_size=2000"), ("batch_size", "2,000", "1,797")),
        (("small.toml", "--set", "model.chanels=8"), ("chanels", "channels")),
    ],
)
def test_a_wrong_input_is_one_message(small: Small, hookdiff: Any, words: tuple[str, ...], facts: Any) -> None:
    small()
    check_refused(hookdiff("profile", *words, "--no-try"), *facts)
