"""All plugins together give the same run in any order."""

import gc
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hookdiff import Loop, hookimpl
from hookdiff.builtin.pictures import Pictures
from hookdiff.disk.tree import flatten
from hookdiff.testing import assert_same, toy_loop
from tests.first_party import KINDS, LOOP, OPTIONS, net

pytestmark = pytest.mark.wide

DEAR = {"aim", "compile", "report", "wandb"}  # a run with one of these takes seconds
# ddp is there, and excludes fsdp; lora gives other names to layers, of which spectral names one.
LOCAL = [name for name in KINDS if name not in DEAR and name not in ("fsdp", "lora")]


class Listener:
    """A plugin of a user: it reads gradients, logs values, keeps a state, and records the logged values."""

    def __init__(self) -> None:
        self.updates = torch.zeros(1)
        self.logged: dict[int, dict[str, float]] = {}

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        loop.log.average({"largest": loop.gradients.norms.max()})

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.updates += 1
        loop.log({"mine": self.updates[0]})

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        # The memory in use differs between equal runs.
        own = {name: value for name, value in values.items() if not name.startswith("memory/")}
        self.logged.setdefault(step, {}).update(own)

    def state_dict(self) -> dict[str, Tensor]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.updates = state["updates"]


def build(names: Iterable[str], run_dir: Path, listener: Listener) -> Loop:
    """Return a loop of 12 steps, with 4 batches in an epoch and the plugins in the order of `names`."""
    plugins = {name: listener if name == "listener" else KINDS[name](**OPTIONS.get(name, {})) for name in names}
    run_dir.mkdir(exist_ok=True)
    return toy_loop({**plugins, "images": Pictures()}, model=net(), run_dir=run_dir, **LOOP)


def outcome(loop: Loop) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in the state of a run, and the rest as JSON: it writes floats to the last bit."""
    tensors, tree = flatten(loop.state_dict())
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(tree, sort_keys=True)


@pytest.fixture(scope="module")
def sorted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Listener]:
    listener = Listener()
    loop = build(sorted([*LOCAL, "listener"]), tmp_path_factory.mktemp("sorted"), listener)
    loop.run()
    gc.freeze()  # what the plugins have imported: the plugin memory collects garbage in each run
    return loop, listener


def files(folder: Path) -> dict[str, bytes]:
    """Return the pictures and weights that a run wrote, by path."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".png", ".safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_plugins_do_something(sorted_run: tuple[Loop, Listener]) -> None:
    loop, listener = sorted_run
    assert {"loss", "lr", "clip/share", "ema/distance", "amp/scale", "fd/digits", "mine"} <= set().union(
        *map(set, listener.logged.values())
    )
    assert any(values.get("clip/share", 0) > 0 for values in listener.logged.values())
    assert listener.logged[12]["amp/void_steps"] > 0
    assert all(math.isfinite(value) for values in listener.logged.values() for value in values.values())
    assert loop.run_dir is not None
    assert {"samples/step-00000012.png", "checkpoints/step-00000008/ema.safetensors"} <= set(files(loop.run_dir))


@settings(max_examples=max(1, settings.default.max_examples // 6))  # each trains with all plugins
@given(order=st.permutations(sorted([*LOCAL, "listener"])))
def test_the_order_does_not_matter(
    order: list[str], sorted_run: tuple[Loop, Listener], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, heard = sorted_run
    listener = Listener()
    loop = build(order, tmp_path_factory.mktemp("order"), listener)
    loop.run()
    (tensors, tree), (expected_tensors, expected_tree) = outcome(loop), outcome(expected)
    assert_same(tensors, expected_tensors)
    assert tree == expected_tree
    assert listener.logged == heard.logged
    assert loop.run_dir is not None
    assert expected.run_dir is not None
    assert files(loop.run_dir) == files(expected.run_dir)
