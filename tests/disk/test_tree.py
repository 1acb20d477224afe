from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff.disk.tree import flatten, unflatten
from tests.conftest import refused

# Few characters, so that keys collide; /, ~, 0 and 1 have a meaning in a flat name.
keys = st.text("/~01aé", max_size=3)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
tensors = st.integers(0, 99).map(lambda number: torch.tensor([number]))
inside = st.recursive(
    scalars | tensors,
    lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
states = st.dictionaries(keys, inside, max_size=4)


def comparable(node: Any) -> Any:
    """Return the state with each tensor as a pair that `==` can compare."""
    if isinstance(node, Mapping):
        return {key: comparable(value) for key, value in node.items()}
    if isinstance(node, list):
        return [comparable(value) for value in node]
    return ("tensor", node.tolist()) if isinstance(node, Tensor) else node


@given(state=states)
def test_a_flattened_state_can_be_restored(state: dict[str, Any]) -> None:
    flat, tree = flatten(state)
    assert comparable(unflatten(flat, tree)) == comparable(state)


@given(state=states)
def test_no_two_tensors_share_a_name(state: dict[str, Any]) -> None:
    def count(node: Any) -> int:
        if isinstance(node, Mapping | list):
            return sum(map(count, node.values() if isinstance(node, Mapping) else node))
        return isinstance(node, Tensor)

    assert len(flatten(state)[0]) == count(state)


def test_an_empty_key_is_a_key() -> None:
    state = {"": {"a": torch.zeros(1)}, "a": torch.ones(1)}
    assert comparable(unflatten(*flatten(state))) == comparable(state)


def test_names_are_paths_and_names_of_weights_are_unchanged() -> None:
    flat, tree = flatten({"0.weight": torch.zeros(1), "a/b": {"c~d": torch.zeros(1), "n": 1}})
    assert (list(flat), tree) == (["0.weight", "a~1b/c~0d"], {"a/b": {"n": 1}})


def test_flattening_a_state_does_not_change_it() -> None:
    state = {"a": {"t": torch.zeros(1), "n": 1}}
    flat, tree = flatten(state)
    unflatten(flat, tree)["a"]["n"] = 2
    assert (list(state["a"]), tree) == (["t", "n"], {"a": {"n": 1}})


@pytest.mark.parametrize(
    ("state", "place", "what"),
    [
        ({3: 1}, "state", 3),
        ({"a": {"b": {None: 1}}}, "state/a/b", None),
        ({"a/b": {"c": {1, 2}}}, "state/a~1b/c", "set"),
        ({"a": [0, [1, b"x"]]}, "state/a/1/1", "bytes"),
        ({"a": [{"b": 1j}]}, "state/a/0/b", "complex"),
        ({"a": numpy.float32(1)}, "state/a", "numpy.float32"),
        ({"a": torch.float32}, "state/a", "torch.dtype"),
    ],
)
def test_a_value_that_a_state_cannot_hold_is_named_by_its_place(state: Any, place: str, what: Any) -> None:
    with refused(TypeError, place, what):
        flatten(state)
