"""Forged checkpoints with right digests: a run resumes with finite weights, or one message refuses it; nothing else."""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hookdiff import Loop, UserError
from hookdiff.builtin import builtin_plugins
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint
from hookdiff_clip import Clip
from hookdiff_debug import Debug
from hookdiff_ema import EMA
from hookdiff_gradients import GradientMonitor
from hookdiff_loss import LossMonitor
from hookdiff_nan import NaN
from hookdiff_stop_early import StopEarly

STEP = 6
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
}


def build(run: Path, optimizer: str, steps: int, resume: bool = True, seed: int = 0) -> Loop:
    plugins = {
        **builtin_plugins(signals=False),
        "amp": AMP("fp16", init_scale=4.0),
        "clip": Clip("adaptive"),
        "debug": Debug(),
        "ema": EMA(decay=[0.9, 0.99]),
        "gradients": GradientMonitor(),
        "loss": LossMonitor(every=2),
        "nan": NaN(),
        "stop_early": StopEarly(metric="loss", patience=1000),
        "checkpoint": Checkpoint(every=STEP, keep_last=1),
    }
    options: dict[str, Any] = {"run_dir": run, "resume": resume, "steps": steps, "micro_batch": 4, "log_every": 2}
    return toy_loop(plugins, model=toy_model(seed), optimizers=OPTIMIZERS[optimizer], **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {name: tmp_path_factory.mktemp(name) / "run" for name in OPTIMIZERS}
    for name, run in runs.items():
        build(run, name, STEP, resume=False).run()
    return runs


def stamp(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with right digests of all files and of itself."""
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.pop("sha256", None)
    text = json.dumps(manifest, indent=1).encode().removeprefix(b"{\n")
    digest = hashlib.sha256(text).hexdigest().encode()
    (folder / "manifest.json").write_bytes(b'{"sha256": "%s",\n' % digest + text)


def forge_tensor(tensor: torch.Tensor, kind: str) -> torch.Tensor | None:
    """Return another tensor in place of `tensor`; None leaves it out."""
    made: dict[str, Any] = {
        "removed": lambda: None,
        "empty": lambda: tensor.new_zeros(0),
        "one number": lambda: tensor.new_ones(1),
        "scalar": lambda: tensor.new_ones(()),
        "longer": lambda: tensor.new_ones(*tensor.shape, 2),
        "shorter": lambda: tensor.flatten()[:-1].clone(),
        "flat": lambda: tensor.flatten().clone() if tensor.dim() != 1 else tensor[:, None].clone(),
        "half": lambda: tensor.half() if tensor.is_floating_point() else tensor.int(),
        "double": lambda: tensor.double(),
        "integers": lambda: torch.ones_like(tensor, dtype=torch.int64 if tensor.dtype != torch.int64 else torch.uint8),
        "nan": lambda: torch.full_like(tensor, math.nan if tensor.is_floating_point() else -1),
        "infinite": lambda: torch.full_like(tensor, math.inf if tensor.is_floating_point() else 2**62),
        "negative": lambda: -tensor.abs() - 1,
        "zeros": lambda: torch.zeros_like(tensor),
    }
    result: torch.Tensor | None = made[kind]()
    return result


KINDS = ("removed", "empty", "one number", "scalar", "longer", "shorter", "flat", "half", "double", "integers")
KINDS = (*KINDS, "nan", "infinite", "negative", "zeros")


def check(run: Path, optimizer: str) -> str:
    """Resume `run`: return "refused", with nothing loaded and no file changed, or "went on", with finite weights."""
    loop = build(run, optimizer, STEP + 2, seed=1)
    before, files = {name: value.clone() for name, value in weights(loop).items()}, contents(run)
    try:
        reason = loop.run()
    except UserError:
        assert_same(weights(loop), before)
        assert contents(run) == files
        return "refused"
    assert reason in ("done", "on_nan")
    for name, value in weights(loop).items():
        assert value.isfinite().all(), name
    return "went on"


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in (".lock",)}


def copied(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    other = tmp_path_factory.mktemp("forged") / "run"
    shutil.copytree(run, other)
    return other, other / "checkpoints" / f"step-{STEP:08d}"


@contextmanager
def forging(
    data: st.DataObject, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a checkpoint and its manifest to change; then make its digests right, and check its run."""
    optimizer = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    run, folder = copied(saved[optimizer], tmp_path_factory)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    yield folder, manifest
    stamp(folder, manifest)
    check(run, optimizer)
    shutil.rmtree(run.parent)


@given(data=st.data())
def test_forged_tensors(data: st.DataObject, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    with forging(data, saved, tmp_path_factory) as (folder, manifest):
        file = folder / data.draw(st.sampled_from(sorted(manifest["files"])))
        tensors = load_file(file)
        for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=3, unique=True)):
            forged = forge_tensor(tensors.pop(name), data.draw(st.sampled_from(KINDS)))
            tensors |= {name: forged} if forged is not None else {}
        save_file(tensors, file)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a tree of JSON."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [*([path] if path else []), *(place for key, value in items for place in places(value, (*path, key)))]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
extremes = st.sampled_from([2**63, -(2**63), 10**400, -1, 0, math.inf, -math.inf, math.nan, 1e308, "", "\x1b[31m", "0"])
values = st.recursive(
    scalars | extremes,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def damage(data: st.DataObject, root: Any, value: st.SearchStrategy[Any] = values) -> None:
    """Replace, remove or add a value at a random place of a tree of JSON."""
    place = data.draw(st.sampled_from(places(root)))
    for key in place[:-1]:
        root = root[key]
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "remove":
        del root[place[-1]]
    elif change == "add" and isinstance(root[place[-1]], dict):
        root[place[-1]][data.draw(st.text(max_size=5))] = data.draw(value)
    else:
        root[place[-1]] = data.draw(value)


@given(data=st.data())
def test_forged_values(data: st.DataObject, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    with forging(data, saved, tmp_path_factory) as (_, manifest):
        damage(data, manifest["parts"][data.draw(st.sampled_from(sorted(manifest["parts"])))])


def test_an_untouched_run_goes_on(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    for optimizer, run in saved.items():
        assert check(copied(run, tmp_path_factory)[0], optimizer) == "went on"


@pytest.mark.parametrize("kind", ["shorter", "one number", "double", "nan", "negative", "removed"])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_forged_moment_is_refused(
    name: str, kind: str, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, folder = copied(saved["adamw"], tmp_path_factory)
    tensors = load_file(folder / "optimizers.safetensors")
    key = next(key for key in tensors if key.endswith(f"3.weight/{name}"))
    forged = forge_tensor(tensors.pop(key), kind)
    save_file(tensors if forged is None else {**tensors, key: forged}, folder / "optimizers.safetensors")
    stamp(folder, json.loads((folder / "manifest.json").read_bytes()))
    expected = "went on" if (name, kind) == ("exp_avg", "negative") else "refused"
    assert check(run, "adamw") == expected


def test_an_emptied_file_of_the_optimizer_is_refused(
    saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for optimizer in OPTIMIZERS:
        run, folder = copied(saved[optimizer], tmp_path_factory)
        save_file({}, folder / "optimizers.safetensors")
        stamp(folder, json.loads((folder / "manifest.json").read_bytes()))
        assert check(run, optimizer) == "refused"


def test_momentum_may_be_added_on_resume(tmp_path: Path) -> None:
    def run(momentum: float, steps: int, resume: bool) -> Loop:
        options: dict[str, Any] = {"run_dir": tmp_path, "resume": resume, "steps": steps}
        loop = toy_loop(
            {"checkpoint": Checkpoint()},
            optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum),
            **options,
        )
        loop.run()
        return loop

    run(0.0, 4, resume=False)
    assert run(0.9, 6, resume=True).progress.step == 6
