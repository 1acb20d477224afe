"""Plugins work together: in any order, without any one of them, and in a resumed run."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff import Loop, hookimpl
from hookdiff.data import InMemory, digits
from hookdiff.disk import flatten
from hookdiff.experiment.discovery import installed
from hookdiff.experiment.structure import Problems, arguments
from hookdiff.testing import assert_same, toy_loop, toy_model
from tests.conftest import check_facts

# Options with which each plugin does something in 12 steps; a plugin that is not named here has its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "amp": {"precision": "fp16", "init_scale": 2.0**22, "growth_interval": 4},
    "checkpoint": {"every": 2, "keep_last": 9},
    "clip": {"rule": {"use": "adaptive", "warmup": 2, "factor": 0.5}},
    "compile": {"backend": "eager"},  # the compiler itself takes most of a minute
    "ema": {"decay": 0.9, "std": [0.05, 0.1], "snapshot_every": 4},
    "fid": {"every": 4, "num_samples": 8},
    "loss": {"window": 20, "plateau": 0},
    "lr": {"warmup": 3},
    "samples": {"every": 4, "num": 4, "scale": 1},
    "spectral": {"layers": ["2.3"]},
    "stop_early": {"metric": "loss", "patience": 99},
}
KINDS: dict[str, Any] = {
    name: entry.load()
    for name, (entry, *_) in installed().items()
    if entry.dist is not None and entry.dist.name == "hookdiff"
}
DEAR = {"aim", "compile"}  # a run with one of these takes seconds
LOCAL = [name for name in KINDS if name not in DEAR]


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


def net() -> nn.Module:
    """Return the toy net with dropout, between layers that take and give digits."""
    before = torch.get_rng_state()
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 4), toy_model(dropout=0.2), nn.Linear(4, 64), nn.Unflatten(1, (1, 8, 8))
    )
    torch.set_rng_state(before)
    return model


DATA = InMemory(digits().images[:40])


def build(names: Iterable[str], run_dir: Path, listener: Listener | None = None, resume: bool = False) -> Loop:
    """Return a loop of 12 steps, with 4 batches in an epoch and the plugins in the order of `names`."""
    plugins = {
        name: (listener or Listener()) if name == "listener" else KINDS[name](**OPTIONS.get(name, {})) for name in names
    }
    run_dir.mkdir(exist_ok=True)
    options: dict[str, Any] = {"steps": 12, "batch_size": 10, "micro_batch": 4, "log_every": 3}
    return toy_loop(plugins, model=net(), data=DATA, run_dir=run_dir, resume=resume, **options)


def outcome(loop: Loop) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in the state of a run, and the rest as JSON: it writes floats to the last bit."""
    tensors, tree = flatten(loop.state_dict())
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(tree, sort_keys=True)


def assert_same_outcome(one: Loop, other: Loop) -> None:
    (tensors, tree), (other_tensors, other_tree) = outcome(one), outcome(other)
    assert_same(tensors, other_tensors)
    assert tree == other_tree


@pytest.fixture(scope="module")
def sorted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Listener]:
    listener = Listener()
    loop = build(sorted([*LOCAL, "listener"]), tmp_path_factory.mktemp("sorted"), listener)
    loop.run()
    return loop, listener


def files(folder: Path) -> dict[str, bytes]:
    """Return the pictures and weights that a run wrote, by path."""
    found = [path for path in folder.rglob("*") if path.suffix in (".png", ".safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


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


@given(order=st.permutations(sorted([*LOCAL, "listener"])))
def test_the_order_does_not_matter(
    order: list[str], sorted_run: tuple[Loop, Listener], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, heard = sorted_run
    listener = Listener()
    loop = build(order, tmp_path_factory.mktemp("order"), listener)
    loop.run()
    assert_same_outcome(loop, expected)
    assert listener.logged == heard.logged
    assert loop.run_dir is not None
    assert expected.run_dir is not None
    assert files(loop.run_dir) == files(expected.run_dir)


@pytest.mark.parametrize("left_out", LOCAL)
def test_any_plugin_can_be_left_out(left_out: str, tmp_path: Path) -> None:
    loop = build([name for name in LOCAL if name != left_out], tmp_path)
    assert loop.run() == "done"
    assert loop.progress.step == 12


def test_all_plugins_can_be_left_out(tmp_path: Path) -> None:
    loop = build([], tmp_path)
    assert loop.run() == "done"
    assert loop.progress.step == 12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["checkpoint", "debug", "ema", "fid", "gradients", "loss", "nan", "progress", "samples", "stop_early"]
)
def test_a_plugin_that_only_watches_changes_no_weight(name: str, tmp_path: Path) -> None:
    alone, watched = build([], tmp_path), build([name], tmp_path)
    alone.run()
    watched.run()
    assert_same(alone.model.state_dict(), watched.model.state_dict())


@pytest.mark.parametrize("name", KINDS)
class TestEveryPlugin:
    """Rules for each plugin of this distribution; a new plugin is tested as soon as it has an entry point."""

    def test_a_resumed_run_equals_an_uninterrupted_one(self, name: str, tmp_path: Path) -> None:
        for module in getattr(KINDS[name], "needs", {}):
            pytest.importorskip(module)
        names = list(dict.fromkeys([name, "checkpoint"]))
        whole = build(names, tmp_path / "whole")
        whole.run()
        for cut in (4, 6):  # at the end of an epoch, and in the middle of one
            saved = Path("checkpoints") / f"step-{cut:08d}"
            folder = tmp_path / f"from-{cut}"
            shutil.copytree(tmp_path / "whole" / saved, folder / saved)
            again = build(names, folder, resume=True)
            for parameter in again.model.parameters():
                nn.init.ones_(parameter)  # the checkpoint must replace these weights
            again.run()
            assert_same_outcome(again, whole)

    def test_an_unknown_key_is_named(self, name: str) -> None:
        problems = Problems()
        arguments(KINDS[name], {"no_such_key": 1}, f"plugins.{name}", problems)
        (problem,) = problems.found
        check_facts(problem, f"plugins.{name}.no_such_key")

    def test_a_bad_value_is_refused_with_its_key(self, name: str) -> None:
        for field in attrs.fields(KINDS[name]):
            if field.init:
                problems = Problems()
                arguments(KINDS[name], {field.alias: {"a": [[]]}}, f"plugins.{name}", problems)
                (problem,) = problems.found
                check_facts(problem, f"plugins.{name}.{field.alias}")

    def test_it_is_an_attrs_class_that_compares_by_identity(self, name: str) -> None:
        kind = KINDS[name]
        assert attrs.has(kind)
        assert kind.__eq__ is object.__eq__
        assert len({kind(), kind()}) == 2

    def test_it_has_a_docstring(self, name: str) -> None:
        kind = KINDS[name]
        assert kind.__doc__
        assert not kind.__doc__.startswith(f"{kind.__name__}(")  # a dataclass without a docstring gets such a text

    def test_it_needs_no_settings(self, name: str) -> None:
        fields = attrs.fields(KINDS[name])
        assert [field.name for field in fields if field.init and field.default is attrs.NOTHING] == []

    def test_its_package_has_its_name_and_its_types(self, name: str) -> None:
        (entry,) = installed()[name]
        package = entry.value.partition(":")[0]
        assert package == f"hookdiff_{name}"
        source = Path(__import__(package).__file__ or "").parent
        assert (source / "py.typed").exists()
