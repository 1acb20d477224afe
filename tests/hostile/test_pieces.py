"""Forged checkpoints of several ranks with right digests: one message refuses them, or a run goes on; nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from tests.conftest import check_facts
from tests.hostile.test_checkpoints import KINDS, damage, forge_tensor, stamp
from tests.on_ranks import done
from tests.saved_on_ranks import run, spec_of

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

STEP = 2
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    done(folder, 2, run, spec_of(folder / "run", STEP))
    return folder / "run"


def resumed(source: Path, folder: Path, forge: Callable[[Path, dict[str, Any]], None]) -> str | None:
    """Forge a copy of the checkpoint, and resume it on one process: return the error, or None with finite weights."""
    run_dir = shutil.copytree(source, folder / "run")
    path = run_dir / "checkpoints" / f"step-{STEP:08d}"
    manifest = json.loads((path / "manifest.json").read_bytes())
    forge(path, manifest)
    stamp(path, manifest)
    result = run(spec_of(run_dir, STEP + 1, resume=True))
    (only,) = result["ranks"]
    shutil.rmtree(run_dir)
    if only["error"]:
        assert not result["begun"]
        return str(only["error"][1])
    weights = {name: value for name, value in result["ended"]["tensors"].items() if name.startswith("model/")}
    assert all(value.isfinite().all() for name, value in weights.items() if name != "model/mask")
    return None


@given(data=st.data())
def test_forged_places(data: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def forge(path: Path, manifest: dict[str, Any]) -> None:
        names = [name for name, part in manifest["parts"].items() if "sharded" in part]
        damage(data, manifest["parts"][data.draw(st.sampled_from(names))]["sharded"])

    resumed(saved, tmp_path_factory.mktemp("forged"), forge)


@given(data=st.data())
def test_forged_pieces(data: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def forge(path: Path, manifest: dict[str, Any]) -> None:
        file = path / data.draw(st.sampled_from(sorted(manifest["files"])))
        tensors = load_file(file)
        name = data.draw(st.sampled_from(sorted(tensors)))
        forged = forge_tensor(tensors.pop(name), data.draw(st.sampled_from(KINDS)))
        save_file({**tensors, name: forged} if forged is not None else tensors, file)

    resumed(saved, tmp_path_factory.mktemp("forged"), forge)


PLACES: dict[str, dict[str, Any]] = {
    "overlapping": {"pieces": {FIRST: [0, 0], SECOND: [3, 0]}},
    "with a hole": {"pieces": {FIRST: [0, 0]}},
    "of a larger tensor": {"shape": [8, 4]},
    "of terabytes": {"shape": [2**40, 4]},
    "of more than there can be": {"shape": [2**63, 2**63]},
    "before the beginning": {"pieces": {FIRST: [-4, 0], SECOND: [0, 0]}},
    "beyond the end": {"pieces": {FIRST: [0, 0], SECOND: [7, 0]}},
    "of another dtype": {"dtype": "float64"},
    "in no file": {"pieces": {"gone.safetensors": [0, 0], SECOND: [4, 0]}},
    "outside of the folder": {"pieces": {"../../../other.safetensors": [0, 0], SECOND: [4, 0]}},
    "in the file of another part": {"pieces": {"keeps-00001-of-00002.safetensors": [0, 0], SECOND: [4, 0]}},
    "in two dimensions of three": {"shape": [7, 4, 1]},
}


@pytest.mark.parametrize("kind", PLACES)
def test_places_that_no_rank_writes_are_refused(kind: str, saved: Path, tmp_path: Path) -> None:
    def forge(path: Path, manifest: dict[str, Any]) -> None:
        manifest["parts"]["model"]["sharded"]["blocks.0.0.weight"].update(PLACES[kind])

    check_facts(resumed(saved, tmp_path, forge), f"step-{STEP:08d}", "manifest.json")


def test_a_file_outside_of_the_folder_is_refused(saved: Path, tmp_path: Path) -> None:
    def forge(path: Path, manifest: dict[str, Any]) -> None:
        shutil.copy(path / FIRST, path.parents[2] / FIRST)
        manifest["files"][f"../../../{FIRST}"] = manifest["files"].pop(FIRST)

    check_facts(resumed(saved, tmp_path, forge), "manifest.json", f"../../../{FIRST}")


def test_a_tensor_that_is_whole_and_in_pieces_is_refused(saved: Path, tmp_path: Path) -> None:
    def forge(path: Path, manifest: dict[str, Any]) -> None:
        manifest["parts"]["model"]["file"] = FIRST

    check_facts(resumed(saved, tmp_path, forge), "manifest.json", FIRST)


@pytest.mark.parametrize("part", ["model", "optimizers"])
def test_values_that_are_not_finite_in_the_part_of_one_rank_are_refused_by_all(
    part: str, saved: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(saved, tmp_path / "run")
    path = run_dir / "checkpoints" / f"step-{STEP:08d}"
    file = path / f"{part}-00002-of-00002.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "blocks.0.0.weight" in name)
    tensors[name][-1] = torch.nan
    save_file(tensors, file)
    stamp(path, json.loads((path / "manifest.json").read_bytes()))
    result = done(tmp_path, 2, run, spec_of(run_dir, STEP + 1, resume=True))
    first, second = result["ranks"]
    assert first["error"] == second["error"]
    check_facts(first["error"][1], "blocks.0.0.weight")
    assert not result["begun"]


def test_a_run_of_two_ranks_that_is_untouched_goes_on(saved: Path, tmp_path: Path) -> None:
    assert resumed(saved, tmp_path, lambda path, manifest: None) is None
