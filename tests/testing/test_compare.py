"""Two runs are compared to the last bit, and a difference is described."""

import torch
from hypothesis import given, strategies as st

from hookdiff.testing.compare import ValueKey, all_differences, digest, of_state


def test_long_values_are_cut_to_the_part_that_differs() -> None:
    here = {"last": [[1.0, 2.0]] * 300, "text": "a" * 500 + "b" * 500, "short": [1], "empty": []}
    there = {"last": [[1.0, 2.0]] * 299 + [[1.0, 3.0]], "text": "a" * 999, "short": [1, 2], "empty": 1}
    described = [each.describe("A", "B") for each in all_differences(of_state(here), of_state(there))]
    last, text, empty, short = described
    assert last == "the saved value last/299/1 is 2.0 in A, and 3.0 in B"
    assert empty == "the saved value empty is [] in A, and 1 in B"
    assert short == "the saved value short/1 is only in B"
    before = "..." + "a" * 20
    assert text == f"the saved value text is {before}{'b' * 80}... in A, and {before}{'a' * 80}... in B"


@given(bit=st.integers(0, 31), entry=st.integers(0, 5))
def test_one_bit_of_a_digest_is_a_difference(bit: int, entry: int) -> None:
    values = torch.tensor([[0.0, 1.0, float("nan")], [float("inf"), -2.5, 1e-40]])
    flipped = values.clone()
    flipped.view(torch.uint8).flatten()[entry * 4 + bit // 8] ^= 1 << bit % 8
    here, there = ({ValueKey("saved value", "plugins/a~1b/x"): digest(each)} for each in (values, flipped))
    assert all_differences(here, here) == []
    (difference,) = all_differences(here, there)
    assert (difference.key.name, difference.key.plugin, difference.is_text) == ("plugins/a~1b/x", "a/b", False)


def test_tensors_of_another_type_or_shape_or_none_are_differences() -> None:
    here = {"a": torch.zeros(2), "b": torch.tensor(1), "c": torch.ones(1, dtype=torch.bool), "d": torch.zeros(3)}
    there = {"a": torch.zeros(2, 1), "b": torch.tensor(2), "e": torch.ones(1), "d": torch.zeros(3).bfloat16()}
    assert [each.describe("A", "B") for each in all_differences(here, there)] == [
        "a is a float32 tensor of shape [2] in A, and a float32 tensor of shape [2, 1] in B",
        "b differs by 1 between A and B",
        "c is only in A",
        "d is a float32 tensor of shape [3] in A, and a bfloat16 tensor of shape [3] in B",
        "e is only in B",
    ]
    digests = [{name: digest(value) for name, value in each.items()} for each in (here, there)]
    described = {each.key: each.describe("A", "B") for each in all_differences(*digests)}
    assert described["b"] == "b is tensor int64 [] 1 in A, and tensor int64 [] 2 in B"
    assert list(described) == ["a", "b", "c", "d", "e"]


def test_a_nan_equals_a_nan_and_a_tolerance_is_relative() -> None:
    here = {"x": torch.tensor([1.0, float("nan")]), "y": 1e6, "z": None, "w": float("nan")}
    assert all_differences(here, {name: value if value is None else value * 1 for name, value in here.items()}) == []
    there = {**here, "x": torch.tensor([1.001, float("nan")]), "y": 1e6 + 1}
    assert [each.key for each in all_differences(here, there)] == ["x", "y"]
    assert [each.key for each in all_differences(here, there, tolerance=1e-4)] == ["x"]
    for tolerance in (0.0, 1e-2):
        assert [each.key for each in all_differences(here, {**here, "x": torch.ones(2)}, tolerance)] == ["x"]
