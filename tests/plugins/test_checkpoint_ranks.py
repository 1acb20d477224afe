"""Checkpoints of several ranks: real processes that talk over gloo, real files, real kills."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hookdiff.disk.tree import flatten
from hookdiff.testing.compare import assert_same
from hookdiff_checkpoint import find_checkpoints, read_checkpoint
from tests.conftest import Torchrun, check_facts, output, slow, wide, write_small
from tests.on_ranks import done, started
from tests.plugins import test_checkpoint_faults
from tests.saved_on_ranks import SHARDED, Net, run, spec_of

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

COPIED = {"ddp": {}, "ema": {"decay": 0.9}, "checkpoint": {"every": 2}}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of six steps on two ranks."""
    made = tmp_path_factory.mktemp("six")
    done(made, 2, run, spec_of(made / "run", 6))
    return made


@pytest.fixture
def on_ranks(tmp_path: Path) -> Run:
    """Return a function that trains on `num` ranks, and returns what `tests.saved_on_ranks.run` returns."""

    def call(num: int, run_dir: Path, steps: int, **options: Any) -> dict[str, Any]:
        spec = spec_of(run_dir, steps, **options)
        return run(spec) if num == 1 else done(tmp_path, num, run, spec)

    return call


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two states are the same, to the last bit."""
    assert_same(one["tensors"], other["tensors"])
    assert one["tree"] == other["tree"]


def on_disk(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint."""
    state = read_checkpoint(path)
    tensors, tree = flatten({key: value for key, value in state.items() if key != "versions"})
    return {"tensors": tensors, "tree": tree}


def steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints, each of which is read whole; nothing else may lie beside them."""
    saved: list[int] = test_checkpoint_faults.steps(run_dir)
    assert sorted(os.listdir(run_dir / "checkpoints")) == [f"step-{step:08d}" for step in saved]
    return saved


def newest(run_dir: Path) -> Path:
    return find_checkpoints(run_dir)[0][0].path


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        (1, (2,), "rows"),
        *wide((2, (1, 4), "adamw"), (1, (2,), "muon")),
        *slow((1, (2,), "adamw"), (2, (1, 4), "rows"), (2, (1, 4), "muon"), (3, (2,), "adamw")),
    ],
)
def test_what_is_saved_on_some_ranks_is_loaded_on_any_number(
    before: int, after: tuple[int, ...], optimizer: str, on_ranks: Run, tmp_path: Path
) -> None:
    saved = on_ranks(before, tmp_path / "run", 5, optimizer=optimizer)
    assert_equal(saved["ended"], on_disk(newest(tmp_path / "run")))
    for num in after:
        other = shutil.copytree(tmp_path / "run", tmp_path / f"on {num}")
        resumed = on_ranks(num, other, 6, optimizer=optimizer, resume=True, seed=1)
        assert_equal(resumed["begun"], saved["ended"])
        assert any("optimizers" in name for name in resumed["begun"]["sharded"]) == (num > 1)
        assert resumed["ranks"][0]["step"] == 6
        assert_equal(resumed["ended"], on_disk(newest(other)))


def test_the_first_average_is_whole_and_all_else_of_several_ranks_in_pieces(folder: Path) -> None:
    path = newest(folder / "run")
    pieces = {f"{part}-0000{n}-of-00002" for part in ("model", "optimizers", "ema", "keeps") for n in (1, 2)}
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        "ema.safetensors",
        *(f"{name}.safetensors" for name in pieces),
    }
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format"] == 4
    assert manifest["parts"]["model"]["sharded"]["blocks.0.0.weight"] == {
        "shape": [7, 4],
        "dtype": "float32",
        "pieces": {"model-00001-of-00002.safetensors": [0, 0], "model-00002-of-00002.safetensors": [4, 0]},
    }
    first = load_file(path / "ema.safetensors")
    Net().load_state_dict(first)
    state = read_checkpoint(path)
    assert_same(first, {name: value for name, value in state["plugins"]["ema"].items() if name != "ema"})
    kept = [load_file(file) for file in sorted(path.glob("model-*"))]
    assert_same({"": torch.cat([piece["last.weight"] for piece in kept])}, {"": state["model"]["last.weight"] + 0})
    weights = read_checkpoint(path)["optimizers"]["0"]["weights"]
    assert all(entry["step"] == 6 for entry in weights.values())


@pytest.mark.wide
def test_ranks_that_share_nothing_write_the_files_of_one_process(on_ranks: Run, tmp_path: Path) -> None:
    copied = on_ranks(2, tmp_path / "copied", 4, plugins=COPIED)
    assert [one["announced"] for one in copied["ranks"]] == [["step-00000002", "step-00000004"], []]
    on_ranks(1, tmp_path / "alone", 4, plugins=COPIED)
    one, other = (newest(tmp_path / name) for name in ("copied", "alone"))
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    formats = [json.loads((path / "manifest.json").read_bytes())["format"] for path in (one, other)]
    assert formats == [3, 3]


@pytest.mark.wide
@pytest.mark.parametrize("rank", [*slow(0), 1])
def test_weights_that_one_rank_spoils_are_in_no_checkpoint(rank: int, on_ranks: Run, tmp_path: Path) -> None:
    spoil = {"spoil": {"at": 4, "rank": rank}}
    result = on_ranks(2, tmp_path / "run", 12, plugins={**spoil, **SHARDED})
    assert steps(tmp_path / "run") == [2]
    first, second = result["ranks"]
    assert first["end"] == second["end"]
    assert first["end"][0] == "on_nan"
    assert first["step"] == second["step"]


@pytest.mark.wide
def test_a_rollback_takes_all_ranks_to_the_same_checkpoint(on_ranks: Run, tmp_path: Path) -> None:
    plugins = {"bad": {"position": 7}, **SHARDED, "checkpoint": {"every": 3}}
    result = on_ranks(2, tmp_path / "run", 9, plugins=plugins)
    assert [one["end"][0] for one in result["ranks"]] == ["done", "done"]
    assert result["ended"]["tree"]["progress"] == {"step": 9, "position": 11, "epoch": 2, "samples": 8}
    on_ranks(2, tmp_path / "cut", 4, plugins=plugins)
    assert_equal(on_ranks(2, tmp_path / "cut", 9, plugins=plugins, resume=True)["ended"], result["ended"])


def test_the_first_rank_removes_what_is_not_kept(on_ranks: Run, tmp_path: Path) -> None:
    scores = {"2": 3.0, "4": 1.0, "6": 2.0, "8": 2.0}
    plugins = {"score": {"values": scores}, **SHARDED, "checkpoint": {"every": 2, "keep_last": 2, "keep_best": "score"}}
    result = on_ranks(2, tmp_path / "run", 10, plugins=plugins)
    assert steps(tmp_path / "run") == [4, 8, 10]
    announced = [f"step-{step:08d}" for step in (2, 4, 6, 8, 10)]
    assert [one["announced"] for one in result["ranks"]] == [announced, []]


PLACES = [
    (1, "optimizers-"),
    *slow((0, "step-00000004"), (0, "model-"), (1, ".ema"), (0, "ema.safetensors"), (0, "manifest")),
]


@pytest.mark.parametrize(("rank", "name"), PLACES)
@pytest.mark.wide
def test_a_disk_full_for_one_rank_costs_all_this_save(rank: int, name: str, on_ranks: Run, tmp_path: Path) -> None:
    plugins = {"fault": {"at": 4, "rank": rank, "kind": "ENOSPC", "name": name}, **SHARDED}
    result = on_ranks(2, tmp_path / "run", 8, plugins=plugins)
    assert steps(tmp_path / "run") == [2, 6, 8]
    said = [[text for text in one["said"] if "No space left" in text] for one in result["ranks"]]
    assert [len(texts) for texts in said] == [1, 0]
    check_facts(said[0][0], tmp_path / "run" / "checkpoints", "step-00000002")
    assert [one["end"][0] for one in result["ranks"]] == ["done", "done"]


@pytest.mark.parametrize(
    ("rank", "kind", "disk_full"), [(0, "EIO", "continue"), *slow((1, "EIO", "continue")), *wide((1, "ENOSPC", "stop"))]
)
def test_a_disk_that_fails_for_one_rank_ends_the_run_on_all(
    rank: int, kind: str, disk_full: str, on_ranks: Run, tmp_path: Path
) -> None:
    fault = {"at": 4, "rank": rank, "kind": kind, "name": "model-"}
    plugins = {"fault": fault, **SHARDED, "checkpoint": {"every": 2, "disk_full": disk_full}}
    result = on_ranks(2, tmp_path / "run", 40, plugins=plugins)
    first, second = result["ranks"]
    assert first["error"] == second["error"]
    assert first["error"][0] == "StorageError"
    check_facts(first["error"][1], "step-00000002")
    assert first["step"] == second["step"] <= 7
    assert steps(tmp_path / "run") == [2]


@pytest.mark.slow
def test_ranks_without_a_common_disk_are_refused_if_they_share_the_weights(on_ranks: Run, tmp_path: Path) -> None:
    (tmp_path / "on 0").mkdir()
    (tmp_path / "on 1").mkdir()
    first, second = on_ranks(2, tmp_path / "on RANK", 4)["ranks"]
    assert (first["step"], first["error"][0], second["error"][0]) == (0, "UserError", "UserError")
    check_facts(first["error"][1], "run/checkpoints", "rank 1")
    assert not list((tmp_path / "on 0" / "run" / "checkpoints").iterdir())


@pytest.mark.wide
def test_a_checkpoint_that_one_rank_cannot_read_is_named_with_the_rank(on_ranks: Run, tmp_path: Path) -> None:
    (tmp_path / "on 0").mkdir()
    (tmp_path / "on 1" / "run").mkdir(parents=True)
    on_ranks(2, tmp_path / "on RANK", 2, plugins=COPIED)
    first, second = on_ranks(2, tmp_path / "on RANK", 4, plugins=COPIED, resume=True)["ranks"]
    for one in (first, second):
        check_facts(one["error"][1], "on rank 1", "run/checkpoints/step-00000002")


@pytest.mark.parametrize("rank", [*slow(0), 1])
@pytest.mark.wide
def test_a_save_is_completed_though_the_training_of_one_rank_fails(rank: int, tmp_path: Path) -> None:
    plugins = {"crash": {"at": 5, "rank": rank}, **SHARDED}
    with started(tmp_path, 2, run, spec_of(tmp_path / "run", 8, plugins=plugins)) as processes:
        ends = [process.finish() for process in processes]
    assert all(code for code, *_ in ends)
    assert "mine" in ends[rank][2]
    assert steps(tmp_path / "run") == [2, 4]


@pytest.mark.parametrize(("rank", "name"), PLACES)
@pytest.mark.wide
def test_a_rank_that_is_killed_in_a_save_leaves_whole_checkpoints_and_lets_no_other_wait(
    rank: int, name: str, on_ranks: Run, folder: Path, tmp_path: Path
) -> None:
    plugins = {"fault": {"at": 4, "rank": rank, "kind": "killed", "name": name}, **SHARDED}
    with started(tmp_path, 2, run, spec_of(tmp_path / "run", 30, plugins=plugins)) as processes:
        ends = [process.finish() for process in processes]
    assert ends[rank][0] == -signal.SIGKILL
    assert ends[1 - rank][0] not in (0, -signal.SIGKILL), ends[1 - rank]
    found, problems = find_checkpoints(tmp_path / "run")
    assert not problems
    # All of the checkpoint is there when it is about to get its name.
    is_whole = name == "step-00000004"
    assert [one.path.name for one in found] == [".step-00000004.partial"] * is_whole + ["step-00000002"]
    resumed = on_ranks(2, tmp_path / "run", 6, resume=True)
    assert_equal(resumed["ended"], on_disk(newest(folder / "run")))
    assert resumed["begun"]["tree"]["progress"]["step"] == (4 if is_whole else 2)
    assert steps(tmp_path / "run") == [2, 4, 6]


@pytest.mark.parametrize("num", [1, *slow(2)])
@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "ema.safetensors", "manifest.json"])
def test_no_rank_uses_a_damaged_checkpoint(file: str, num: int, on_ranks: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    damaged = newest(tmp_path / "run") / file
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    result = on_ranks(num, tmp_path / "run", 5, resume=True)
    assert_equal(result["begun"], on_disk(folder / "run" / "checkpoints" / "step-00000004"))
    said = [text for one in result["ranks"] for text in one["said"] if "step-00000006" in text]
    assert len(said) == 1
    check_facts(said[0], file)


@pytest.mark.wide
def test_commands_on_one_process_read_a_run_of_two_ranks(torchrun: Torchrun, tmp_path: Path, hookdiff: Any) -> None:
    config = write_small(
        tmp_path / "small.toml",
        run={"steps": 4, "plugins": ["fsdp", "ema", "checkpoint"]},
        plugins={"checkpoint": {"every": 2}},
    )
    code, _, err = torchrun(2, "-m", "hookdiff", "run", config, "--out", tmp_path / "run")
    assert code == 0, err
    path = newest(tmp_path / "run")
    assert (path / "model-00002-of-00002.safetensors").exists()
    state = read_checkpoint(path)
    for weights, expected in (("ema", load_file(path / "ema.safetensors")), ("model", state["model"])):
        output(hookdiff("export", tmp_path / "run", tmp_path / f"{weights}.safetensors", "--weights", weights))
        exported = load_file(tmp_path / f"{weights}.safetensors")
        assert_same(exported, {name: expected[name] for name in exported})
    code, _, err = hookdiff("sample", tmp_path / "run", "--num", 2, "--out", tmp_path / "two.png")
    assert code == 0, err
    output(hookdiff("resume", tmp_path / "run", "--steps", 5))
    assert (newest(tmp_path / "run") / "model.safetensors").exists()
