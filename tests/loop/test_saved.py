"""Fields of plugins that go into checkpoints."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from hookdiff import Evaluation, Loop, PluginError, UserError, hookimpl, saved
from hookdiff.disk.tree import flatten, unflatten
from hookdiff.loop.saved import checked, keeps_state, restore_state, state_of
from hookdiff.options import COUNT, numbers, shaped
from hookdiff.testing.toy import toy_loop
from tests.conftest import kept, refused


class Scaler:
    """Writes and reads its state itself, as those of torch do."""

    scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


@define(eq=False)
class Part:
    size: int
    values: list[float] = saved(factory=list, validator=numbers(least=0))
    scaler: Scaler = saved(factory=Scaler)


@define(eq=False)
class Keeper:
    """Has a field of each kind."""

    option: int = 3
    best: float = saved(math.inf, validator=numbers(finite=False))
    name: str | None = saved(None)
    counts: dict[str, int] = saved(factory=dict, validator=COUNT)
    pairs: list[tuple[int, float]] = saved(factory=list)
    _at: int = saved(0, key="measured_at", validator=COUNT)
    mean: Tensor = saved(validator=shaped(2))
    slow: dict[str, Tensor] = saved()
    part: Part = saved()
    not_saved: int = field(default=0, init=False)

    @hookimpl
    def on_start(self) -> None:
        self.mean, self.slow, self.part = torch.zeros(2), {"a": torch.zeros(3), "b": torch.zeros(())}, Part(7)


def filled() -> Keeper:
    keeper = Keeper()
    keeper.on_start()
    keeper.best, keeper.name, keeper.counts, keeper.pairs, keeper._at = 0.5, "x", {"a": 1}, [(1, 2.0)], 4
    keeper.mean.fill_(3)
    keeper.slow["a"].fill_(4)
    keeper.part.values, keeper.part.scaler.scale = [1.0, 2.0], 8.0
    keeper.not_saved = 9
    return keeper


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    tensors, tree = flatten(state)
    return unflatten(copy.deepcopy(tensors), json.loads(json.dumps(tree)))


def test_the_saved_fields_and_no_others_come_back() -> None:
    state = through_a_file(state_of(filled()))
    assert sorted(state) == ["best", "counts", "mean", "measured_at", "name", "pairs", "part", "slow"]
    assert state["part"] == {"values": [1.0, 2.0], "scaler": {"scale": 8.0}}
    again = Keeper(option=5)
    again.on_start()
    mean, slow, part = again.mean, again.slow["a"], again.part
    restore_state(again, state)
    assert (again.option, again.not_saved) == (5, 0)
    assert (again.best, again.name, again.counts, again.pairs, again._at) == (0.5, "x", {"a": 1}, [(1, 2.0)], 4)
    assert (again.part.size, again.part.values, again.part.scaler.scale) == (7, [1.0, 2.0], 8.0)
    # Filled in place: they keep their device, and whoever holds them sees the values.
    assert (again.mean is mean, again.slow["a"] is slow, again.part is part) == (True, True, True)
    assert (mean.tolist(), slow.tolist()) == ([3, 3], [4, 4, 4])
    assert state_of(again).keys() == state.keys()


def change(*path: str, to: Any) -> dict[str, Any]:
    state = through_a_file(state_of(filled()))
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return state


@pytest.mark.parametrize(
    ("path", "value", "facts"),
    [
        ("best", "low", ("best", "expected a number", "'low'")),
        ("best", math.nan, ("best", "numbers")),
        ("name", 3, ("name", "expected a string", "3")),
        ("counts", {"a": -1}, ("counts", "at least 0")),
        ("pairs", [[1, 2.0, 3]], ("pairs", "list of 2")),
        ("measured_at", 0.5, ("measured_at", "integer")),
        ("mean", 1.0, ("mean", "expected a tensor")),
        ("mean", torch.zeros(3), ("mean", "shape 2", "(3,)")),
        ("slow", {"a": 1.0}, ("slow.a", "expected a tensor")),
        ("part.values", [-1.0], ("part.values", "at least 0")),
        ("part.scaler", 1, ("part.scaler", "table")),
        ("part", {}, ("part", "needs values, scaler")),
        ("other", 1, ("other", "unknown key", "known: best, name")),
    ],
)
def test_a_state_is_checked_before_anything_is_loaded(path: str, value: Any, facts: tuple[str, ...]) -> None:
    with refused(ValueError, *facts):
        checked(Keeper, change(*path.split("."), to=value))


@pytest.mark.parametrize(
    ("path", "value", "facts"),
    [
        ("slow", {"a": torch.zeros(3)}, ("slow", "'b'")),
        ("slow.a", torch.zeros(4), ("slow.a", "shape (4,)", "expected (3,)")),
    ],
)
def test_tensors_that_do_not_fit_those_of_the_run_are_refused(path: str, value: Any, facts: tuple[str, ...]) -> None:
    again = Keeper()
    again.on_start()
    with refused(ValueError, *facts):
        restore_state(again, change(*path.split("."), to=value))


def test_a_missing_key_names_the_plugin_and_the_way_out() -> None:
    memory = kept({"keeper": Keeper()}, at=7)
    del memory.state["plugins"]["keeper"]["best"]
    with refused(UserError, "'keeper'", "needs best", "--fresh keeper"):
        toy_loop({"keeper": Keeper(), "memory": memory}).run()


@frozen
class Taken:
    count: int = field(validator=COUNT)


@define(eq=False)
class Own:
    """Writes and reads its state itself, of a declared type."""

    count: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Taken) -> None:
        self.count = state.count


def test_a_plugin_gets_what_its_own_method_is_annotated_to_take() -> None:
    own = Own()
    restore_state(own, {"count": 3})
    assert own.count == 3
    with refused(ValueError, "count", "at least 0"):
        checked(Own, {"count": -1})
    unchecked = Scaler()  # a dict of anything
    restore_state(unchecked, {"scale": "x"})
    assert unchecked.scale == "x"
    assert checked(nn.Linear, {"any": 1}) == {"any": 1}


def test_who_keeps_a_state() -> None:
    assert all(map(keeps_state, (Keeper, Keeper(), Own, Own(), nn.Linear(1, 1))))
    assert not any(map(keeps_state, (Taken, Taken(1), object(), int, 3, None)))


def test_a_subclass_of_an_evaluation_may_have_options_and_state() -> None:
    @define(eq=False)
    class Error(Evaluation):
        needed: int
        worst: float = saved(0.0)

        def evaluate(self, loop: Loop) -> dict[str, float]:
            return {}

    assert state_of(Error(3)) == {"measured_at": None, "worst": 0.0}


def test_saved_fields_beside_a_state_dict_are_refused() -> None:
    @define(eq=False)
    class Both(Own):
        lost: int = saved(0)

        @hookimpl
        def on_start(self) -> None: ...

    with refused(PluginError, "'both'", "state_dict", "lost"):
        toy_loop({"both": Both()})


@define(eq=False)
class SavesTensorsForNumbers:
    losses: list[float] = saved(factory=list)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.losses.append(loop.output.loss)  # type: ignore[arg-type]  # the mistake


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved() -> None:
    with toy_loop({"mine": SavesTensorsForNumbers()}) as loop:
        loop.state_dict()
        next(loop.steps())
        with refused(PluginError, "'mine'", "losses", "item 1", "expected a number", "tensor"):
            loop.state_dict()
