"""Training on several ranks equals training on one process; real processes that talk over gloo."""

import math
import signal
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hookdiff_checkpoint import find_checkpoints, read_checkpoint
from tests.conftest import records, wide, write_small
from tests.on_ranks import apart, done, started, train, train_config

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

USUAL: dict[str, Any] = {"ema": {"decay": 0.9}, "clip": {"rule": {"use": "norm", "max_norm": 0.5}}}
Trained = Callable[..., dict[str, Any]]


@pytest.fixture
def on_ranks(tmp_path: Path) -> Trained:
    """Return a function that trains as a spec says on `num` ranks, and returns what `train` returns."""

    def call(num: int, **spec: Any) -> dict[str, Any]:
        return done(tmp_path, num, train, spec)

    return call


def samples(result: dict[str, Any]) -> list[Any]:
    """Return the samples of each step with their noise, over all ranks."""
    return [
        sorted(row for share in shares for row in share)
        for shares in zip(*(one["seen"] for one in result["ranks"]), strict=True)
    ]


@pytest.mark.parametrize(
    ("num", "plugins", "optimizer", "dtype", "tolerance"),
    [
        (2, {"ddp": {}}, "adamw", "float32", 1e-5),
        *wide((2, {"ddp": {}}, "muon", "float64", 1e-12)),
        (2, {"fsdp": {}}, "adamw", "float32", 1e-5),
        *wide((2, {"fsdp": {}}, "muon", "float64", 1e-12)),
        pytest.param(
            *(2, {"fsdp": {"reshard": False, "checkpointing": True, "sync_once": True}, "looks": {}}),
            *("adamw", "float64", 1e-12),
            marks=pytest.mark.wide,
        ),
        *wide((4, {"fsdp": {"replicas": 2}}, "muon", "float64", 1e-12)),
    ],
    ids=str,
)
def test_ranks_train_as_one_process(
    on_ranks: Trained, num: int, plugins: dict[str, Any], optimizer: str, dtype: str, tolerance: float
) -> None:
    # Shares of 4 and 3 samples, in passes of 2 and 1, and a last batch that is smaller.
    config = {"batch_size": 7, "micro_batch": 2, "epochs": 3, "steps": 20}
    spec: dict[str, Any] = {"plugins": {**plugins, **USUAL}, "optimizer": optimizer, "dtype": dtype, "config": config}
    alone, together = train(spec), on_ranks(num, **spec)
    assert apart(alone, together) < tolerance
    assert samples(alone) == samples(together)
    (own,) = alone["ranks"]
    clipped = [norm > 0.5 for *_, norm in own["steps"]]
    assert any(clipped)
    for one in together["ranks"]:
        assert one["steps"] == together["ranks"][0]["steps"]
        assert one["passes"] == together["ranks"][0]["passes"]
        assert len(one["steps"]) == len(own["steps"]) == 20
        for (step, outcome, *values), (*expected, loss, norm) in zip(one["steps"], own["steps"], strict=True):
            assert [step, outcome] == expected
            assert values == pytest.approx([loss, norm], rel=10 * tolerance)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("num", "plugin"),
    [
        (2, "ddp"),
        (3, "fsdp"),
        pytest.param(3, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_last_batch_of_fewer_samples_than_ranks_is_trained_on(num: int, plugin: str, tmp_path: Path) -> None:
    # An epoch is a batch of four samples and one of a single sample, or of two.
    numpy.save(tmp_path / "set.npy", numpy.random.default_rng(0).integers(0, 256, (3 + num, 8, 8), dtype=numpy.uint8))
    config = write_small(
        tmp_path / "small.toml",
        run={"batch_size": 4},
        data={"source": "array", "path": str(tmp_path / "set.npy"), "drop_last": False, "flip": True},
        optimizer={"use": "adamw"},
    )
    spec = {"path": config, "plugins": ("loss", "gradients", "ema", "checkpoint", "nan"), "steps": [3, 4, 8]}
    alone = train_config({**spec, "out": tmp_path / "alone"})
    ranks = {**spec, "plugins": (*spec["plugins"], plugin), "out": tmp_path / "ranks"}
    assert done(tmp_path, num, train_config, ranks)["step"] == alone["step"] == 8
    places = [read_checkpoint(find_checkpoints(tmp_path / name)[0][0].path)["progress"] for name in ("alone", "ranks")]
    assert places[0] == places[1] == {"step": 8, "position": 8, "epoch": 4, "samples": 0}
    lines = [records(tmp_path / name) for name in ("alone", "ranks")]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == list(range(1, 9))
    for own, line in zip(*lines, strict=True):
        assert line["loss"] == pytest.approx(own["loss"], abs=1e-6)
        # The noise scale is that of the parts, which one process does not have.
        named = [name for name in own if name.startswith(("loss", "gradients", "ema")) and "noise_scale" not in name]
        assert {name: line[name] for name in named} == pytest.approx(
            {name: own[name] for name in named}, rel=1e-3, abs=1e-6
        )
        assert all(map(math.isfinite, line.values()))


@pytest.mark.wide
@pytest.mark.parametrize(("rank", "plugin"), [(1, "ddp"), pytest.param(0, "fsdp", marks=pytest.mark.slow)])
def test_what_is_logged_after_a_kill_is_that_of_an_undisturbed_run(rank: int, plugin: str, tmp_path: Path) -> None:
    # Saved amid a window of the log and of the first batches, over which the variance of the data is measured.
    numpy.save(tmp_path / "set.npy", numpy.random.default_rng(0).integers(0, 256, (25, 8, 8), dtype=numpy.uint8))
    config = write_small(
        tmp_path / "small.toml",
        run={"batch_size": 5, "micro_batch": 2},
        data={"source": "array", "path": str(tmp_path / "set.npy"), "drop_last": False, "flip": True, "held_out": 4},
        optimizer={"use": "adamw"},
        plugins={"checkpoint": {"every": 3}, "clip": {"rule": {"use": "adaptive", "warmup": 2, "factor": 0.5}}},
    )
    measuring = ("loss", "gradients", "ema", "clip", "nan", "lr", "debug")
    spec = {"path": config, "plugins": (*measuring, "checkpoint", plugin), "steps": [15], "log_every": 4}
    assert done(tmp_path, 2, train_config, {**spec, "out": tmp_path / "whole"})["step"] == 15
    with started(tmp_path, 2, train_config, {**spec, "out": tmp_path / "run", "killed": (rank, 8)}) as processes:
        assert processes[rank].finish()[0] == -signal.SIGKILL
        assert processes[1 - rank].finish()[0] > 0
    # The kill may cut off the save of step 6, which both ranks write in a thread.
    saved = [checkpoint.path.name for checkpoint in find_checkpoints(tmp_path / "run")[0]]
    assert saved in (["step-00000006", "step-00000003"], ["step-00000003"])
    done(tmp_path, 2, train_config, {**spec, "out": tmp_path / "run"})
    whole, resumed = (records(tmp_path / name) for name in ("whole", "run"))
    own = ["gradients/noise_scale"] * (plugin == "ddp")  # of the gradients of each rank, which fsdp never has
    assert {"loss/unexplained", "val/loss", "ema/distance", *own} <= {*chain(*whole)}
    clocks = ("speed", "memory", "time")
    for one in (*whole, *resumed):
        for name in [name for name in one if name.startswith(clocks)]:
            del one[name]
    assert resumed == whole


@pytest.mark.wide
def test_bf16_equals_one_process_that_averages_the_gradients_of_the_ranks(on_ranks: Trained) -> None:
    amp = {"amp": {"precision": "bf16"}, **USUAL}
    halves = train({"plugins": {**amp, "halves": {}}})
    assert apart(halves, on_ranks(2, plugins={"ddp": {}, **amp})) < 1e-6
    assert apart(halves, train({"plugins": amp})) > 1e-5  # the gradients of a whole batch are rounded in another way


def test_dropout_alone_depends_on_the_rank(on_ranks: Trained) -> None:
    spec = {"plugins": {"ddp": {}}, "dropout": 0.3}
    alone, together = train(spec), on_ranks(2, **spec)
    assert samples(alone) == samples(together)
    assert apart(alone, together) > 1e-3


@pytest.mark.parametrize(
    ("plugin", "within", "rank"),
    [
        ("ddp", False, 1),
        *wide(("ddp", True, 0)),
        *wide(("fsdp", False, 0)),
        ("fsdp", True, 1),
        pytest.param("ddp", False, 0, marks=pytest.mark.slow),
        pytest.param("ddp", True, 1, marks=pytest.mark.slow),
        pytest.param("fsdp", False, 1, marks=pytest.mark.slow),
        pytest.param("fsdp", True, 0, marks=pytest.mark.slow),
    ],
)
def test_a_stop_on_one_rank_ends_all_at_the_same_step(on_ranks: Trained, plugin: str, within: bool, rank: int) -> None:
    asks = {"asks": {"at": 7, "rank": rank, "within": within}}
    result = on_ranks(2, plugins={plugin: {}, **USUAL, **asks})
    for one in result["ranks"]:
        made = [step for step, outcome, *_ in one["steps"] if outcome == "updated"]
        assert made == list(range(1, 8))
        assert one["end"] == ("plugin", "enough")
    alone = train({"plugins": {plugin: {}, **USUAL}, "config": {"steps": 7}})
    assert apart(alone, result) < 1e-5


@pytest.mark.parametrize("plugin", ["ddp", *wide("fsdp")])
def test_a_nan_on_one_rank_is_met_by_all(on_ranks: Trained, plugin: str) -> None:
    spec = {"plugins": {plugin: {}, **USUAL, "spoils": {"position": 5, "rank": 1}, "nan": {"keep": 0}}}
    result = on_ranks(2, **spec)
    for one in result["ranks"]:
        assert [outcome for _, outcome, *_ in one["steps"]] == ["updated"] * 5 + ["stopped"]
        assert one["end"] == ("on_nan", "")
    assert all(value.isfinite().all() for value in result["weights"].values())


def test_a_plugin_may_leave_out_another_number_of_samples_on_each_rank(on_ranks: Trained) -> None:
    config = {"micro_batch": 2, "steps": 20}
    alone = train({"plugins": {"drops": {}, **USUAL}, "config": config})
    together = on_ranks(2, plugins={"ddp": {}, "drops": {}, **USUAL}, config=config)
    indices = [[[index for index, _ in step] for step in samples(result)] for result in (alone, together)]
    assert indices[0] == indices[1]
    steps = [[outcome for _, outcome, *_ in one["steps"]] for one in together["ranks"]]
    assert steps[0] == steps[1]
    assert together["ranks"][0]["passes"] == together["ranks"][1]["passes"]


def test_fsdp_follows_parameters_that_are_thawed_and_frozen(on_ranks: Trained) -> None:
    plugins = {"thaws": {}, "fsdp": {}, **USUAL}
    assert apart(train({"plugins": plugins}), on_ranks(2, plugins=plugins)) < 1e-5


@pytest.mark.parametrize("plugin", ["ddp", *wide("fsdp")])
def test_ranks_may_have_expanded_buffers(on_ranks: Trained, plugin: str) -> None:
    spec = {"plugins": {plugin: {}}, "expanded": True, "config": {"steps": 3}}
    together = on_ranks(2, **spec)
    assert apart(train(spec), together) < 1e-5
    assert together["weights"]["of_shown"].tolist() == together["weights"]["shown"].tolist() * 4 == [4.0] * 4
