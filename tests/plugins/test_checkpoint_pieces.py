"""Tensors that are put together from pieces: equal to whole ones in all that is done with them."""

import copy
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff.disk.tensors import write_tensors
from hookdiff.testing.compare import assert_same
from hookdiff_checkpoint.pieces import Pieces, pieced
from tests.conftest import refused

Cut = tuple[Tensor, dict[str, Any], dict[str | None, dict[str, Tensor]]]


@st.composite
def grids(draw: st.DrawFn) -> Cut:
    """Return a tensor, and pieces of it, cut at random places in each dimension: what is saved of them, and files."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    cuts = [sorted({0, *draw(st.lists(st.integers(0, size - 1), max_size=3)), size}) for size in shape]
    blocks = {f"{k}.safetensors": block for k, block in enumerate(product(*(list(pairwise(cut)) for cut in cuts)))}
    starts = {name: [begin for begin, _ in block] for name, block in blocks.items()}
    files = {name: {"w": whole[tuple(slice(*bounds) for bounds in block)].clone()} for name, block in blocks.items()}
    return whole, {"shape": shape, "dtype": "float32", "pieces": starts}, {**files}


@given(cut=grids(), data=st.data())
def test_any_grid_gives_the_whole_tensor_and_its_parts(cut: Cut, data: st.DataObject) -> None:
    whole, saved, files = cut
    found = pieced("w", saved, files)
    assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
    assert torch.equal(found, whole)
    places = [st.builds(slice, *[st.integers(-7, 7) | st.none()] * 2) for _ in whole.shape]
    part = tuple(data.draw(place) for place in places)
    assert torch.equal(found[part], whole[part])
    assert torch.equal(torch.zeros_like(whole[part]).copy_(found[part]), whole[part])


@given(cut=grids(), data=st.data())
def test_pieces_that_are_no_grid_are_refused(cut: Cut, data: st.DataObject) -> None:
    whole, saved, files = cut
    file, start = data.draw(st.sampled_from(sorted(saved["pieces"].items())))
    kinds = ["lost", "longer", "another dtype", *["moved", "larger", "smaller"] * bool(start)]
    kind = data.draw(st.sampled_from(kinds))
    if kind == "lost":
        del saved["pieces"][file]
    elif kind == "moved":
        by = data.draw(st.integers(-3, 3).filter(bool))
        saved["pieces"][file] = [start[0] + by, *start[1:]]
    elif kind == "longer":
        saved["pieces"][file] = [*start, 0]
    elif kind == "another dtype":
        files[file]["w"] = files[file]["w"].double()
    else:
        by = data.draw(st.integers(1, 3)) * (1 if kind == "larger" else -1)
        saved["shape"] = [max(0, whole.shape[0] + by), *whole.shape[1:]]
    with refused(ValueError, "w"):
        pieced("w", saved, files)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("shape", [2**62, 2**62], ValueError),
        ("shape", [2**70], ValueError),
        ("shape", [1] * 10_000, ValueError),
        ("shape", [-4, -4], ValueError),
        ("shape", [0, 2**40], ValueError),
        ("shape", [4.0, 4], TypeError),
        ("shape", None, TypeError),
        ("dtype", "float64", ValueError),
        ("dtype", "nn", ValueError),
        ("dtype", "no such", KeyError),
        ("pieces", {}, ValueError),
        ("pieces", {"gone.safetensors": [0, 0]}, KeyError),
        ("pieces", {"a": [0, 0], "b": [2**80, 0]}, ValueError),
        ("pieces", {"a": [0, 0], "b": ["2", 0]}, TypeError),
        ("pieces", [["a", [0, 0]]], AttributeError),
    ],
)
def test_what_no_rank_writes_is_refused_before_memory_is_taken(key: str, value: object, error: type[Exception]) -> None:
    files: dict[str | None, dict[str, Tensor]] = {"a": {"w": torch.ones(2, 4)}, "b": {"w": torch.zeros(2, 4)}}
    saved = {"shape": [4, 4], "dtype": "float32", "pieces": {"a": [0, 0], "b": [2, 0]}}
    assert pieced("w", saved, files).sum() == 8
    with pytest.raises(error):
        pieced("w", {**saved, key: value}, files)


def test_a_tensor_without_values_has_no_pieces() -> None:
    assert pieced("w", {"shape": [0, 3], "dtype": "int64", "pieces": {}}, {}).shape == (0, 3)


@pytest.fixture
def both() -> tuple[Tensor, Tensor]:
    """Return a tensor, and the same of two pieces."""
    whole = torch.randn(5, 3)
    return whole, Pieces((5, 3), torch.float32, {(0, 0): whole[:4].clone(), (4, 0): whole[4:].clone()})


def test_operations_return_plain_tensors(both: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    whole, pieces = both
    assert isinstance(pieces, Tensor)
    for made, expected in (
        (pieces + 1, whole + 1),
        (pieces.double(), whole.double()),
        (pieces.to("cpu", copy=True), whole),
        (pieces.detach().cpu().contiguous(), whole),
        (pieces[::2], whole[::2]),
        (pieces[-1], whole[-1]),
        (copy.deepcopy(pieces), whole),
        (torch.stack([pieces, whole]), torch.stack([whole, whole])),
    ):
        assert type(made) is Tensor
        assert torch.equal(made, expected)
    into = [torch.zeros(5, 3)]
    torch._foreach_copy_(into, [pieces])
    layer = nn.Linear(3, 5)
    layer.load_state_dict({"weight": pieces, "bias": torch.zeros(5)})
    assert torch.equal(into[0], whole)
    assert torch.equal(layer.weight, whole)
    assert (pieces.numel(), pieces.nbytes, pieces.stride()) == (15, 60, (3, 1))
    written = write_tensors(tmp_path / "pieces", {"w": pieces})
    assert written == write_tensors(tmp_path / "whole", {"w": whole})


def test_what_lies_in_one_piece_is_not_copied(both: tuple[Tensor, Tensor]) -> None:
    _, pieces = both
    part = pieces[1:3]
    assert isinstance(part, Pieces)
    part.read().fill_(7)
    assert torch.equal(pieces[:4].add(0)[1:3], torch.full((2, 3), 7.0))
    assert_same({"": part.add(0)}, {"": torch.full((2, 3), 7.0)})
