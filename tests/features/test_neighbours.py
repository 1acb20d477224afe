"""Distances that are computed in parts equal the distances of all pairs at once."""

import pytest
import torch

from hookdiff.features import distances, nearest_neighbours, neighbours
from tests.conftest import refused
from tests.features.conftest import normal


@pytest.mark.parametrize("pairs", [1, 200, 1 << 24])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_parts_are_those_of_all_pairs(pairs: int, offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_PAIRS", pairs)
    a, b = normal(30, 5, seed=1), normal(20, 5, seed=2)
    parts = list(distances(a + offset, b + offset))
    assert len(parts) == (1 if pairs == 1 << 24 else 30 if pairs == 1 else 3)
    assert [place.start for place, _ in parts[1:]] == [place.stop for place, _ in parts[:-1]]
    expected = (a[:, None] - b).square().sum(2).sqrt()
    # Adding 1e6 rounds the rows themselves by 1e-10.
    assert torch.allclose(torch.cat([part for _, part in parts]), expected, rtol=1e-12, atol=1e-8 if offset else 0)


@pytest.mark.parametrize("pairs", [60, 1 << 24])
def test_nearest_neighbours(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_PAIRS", pairs)
    a, b = normal(30, 5, seed=1), normal(20, 5, seed=2)
    pairs_of = (a[:, None] - b).square().sum(2).sqrt()
    found, numbers = nearest_neighbours(a, b, 3)
    assert torch.allclose(found, pairs_of.sort(dim=1).values[:, :3])
    assert torch.equal(numbers[:, 0], pairs_of.argmin(1))

    own = (a[:, None] - a).square().sum(2).sqrt()
    found, numbers = nearest_neighbours(a, a, 2, within=True)
    assert torch.allclose(found, own.sort(dim=1).values[:, 1:3])
    assert not (numbers == torch.arange(30)[:, None]).any()


def test_a_copy_of_a_row_is_its_neighbour_at_distance_zero() -> None:
    a = normal(4, 3) + 1000
    found, numbers = nearest_neighbours(torch.cat([a, a]), torch.cat([a, a]), within=True)
    assert torch.equal(found, torch.zeros(8, 1, dtype=torch.float64))
    assert torch.equal(numbers[:4, 0], torch.arange(4, 8))


def test_too_few_neighbours_are_refused() -> None:
    with refused(ValueError, 3):
        nearest_neighbours(normal(2, 2), normal(2, 2), 3)
    with refused(ValueError, 2):
        nearest_neighbours(normal(2, 2), normal(2, 2), 2, within=True)
