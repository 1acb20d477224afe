"""The Fréchet distance against closed forms and other computations, and where rounding matters."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff.features import Gaussian, Moments, frechet_distance
from tests.conftest import refused
from tests.features.conftest import normal


def exactly(mean: list[float], covariance: list[list[float]]) -> Gaussian:
    return Gaussian(torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64))


def distance(a: Tensor, b: Tensor) -> float:
    return frechet_distance(Moments.of(a), Moments.of(b))


def by_singular_values(a: Tensor, b: Tensor) -> float:
    """Return the distance by the singular values of the product of both centred sets."""
    centred_a, centred_b = ((x - x.mean(0)) / math.sqrt(len(x) - 1) for x in (a, b))
    nuclear = torch.linalg.matrix_norm(centred_a @ centred_b.T, "nuc")
    means = (a.mean(0) - b.mean(0)).square().sum()
    return float(means + centred_a.square().sum() + centred_b.square().sum() - 2 * nuclear)


def test_closed_forms() -> None:
    assert frechet_distance(exactly([3], [[1]]), exactly([0], [[4]])) == pytest.approx(10, rel=1e-14)
    a = exactly([1, -1], [[2, 0.5], [0.5, 1]])
    b = exactly([0, 0.5], [[1, -0.3], [-0.3, 3]])
    assert frechet_distance(a, b) == pytest.approx(4.17931185497, abs=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-13)


@pytest.mark.parametrize("num", [2, 20, 64, 500])
def test_a_set_is_at_distance_zero_from_itself_in_any_order(num: int) -> None:
    features = normal(num, 64) * torch.logspace(-6, 3, 64, dtype=torch.float64)
    moments = Moments.of(features)
    size = float(moments.fit().variance)
    assert 0 <= frechet_distance(moments, moments) <= 1e-18 * size
    shuffled = features[torch.randperm(num, generator=torch.Generator().manual_seed(1))]
    assert 0 <= distance(features, shuffled) <= 1e-12 * size


def test_small_distances_keep_their_digits() -> None:
    features = normal(500, 32)
    moved = features * (1 + 1e-6)  # the trace formula would lose all but three digits of it
    moments = Moments.of(features)
    expected = 1e-12 * float(moments.fit().variance + features.mean(0).square().sum())
    assert distance(features, moved) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num", [100, 2000])
def test_it_agrees_with_computations_by_sqrtm_and_by_eigenvalues(num: int) -> None:
    a = normal(num, 24, seed=1) @ normal(24, 24, seed=2)
    b = normal(num, 24, seed=3) @ normal(24, 24, seed=4) + 0.5
    left, right = torch.cov(a.T), torch.cov(b.T)
    product = (left @ right).numpy()
    rest = float((a.mean(0) - b.mean(0)).square().sum() + left.trace() + right.trace())
    by_sqrtm = rest - 2 * np.trace(scipy.linalg.sqrtm(product)).real
    by_eigenvalues = rest - 2 * np.sqrt(np.linalg.eigvals(product).real.clip(0)).sum()
    assert distance(a, b) == pytest.approx(by_sqrtm, rel=1e-9)
    assert distance(a, b) == pytest.approx(by_eigenvalues, rel=1e-9)
    assert distance(b, a) == pytest.approx(distance(a, b), rel=1e-12)


@given(
    sizes=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    dim=st.integers(1, 24),
    offset=st.sampled_from([0.0, 0.1, 100.0]),
    scale=st.sampled_from([1.0, 1.001, 3.0, 1e-4]),
    decay=st.sampled_from([0, -3, -7]),
    seed=st.integers(0, 2**31),
)
def test_properties_of_a_distance(
    sizes: tuple[int, int], dim: int, offset: float, scale: float, decay: int, seed: int
) -> None:
    spectrum = torch.logspace(0, decay, dim, dtype=torch.float64)
    a, b = normal(sizes[0], dim, seed=seed) * spectrum, normal(sizes[1], dim, seed=seed + 1) * spectrum * scale + offset
    found, size = distance(a, b), float(torch.cat([a, b]).var(0).sum()) + 1e-300
    near = lambda value: pytest.approx(value, rel=1e-9, abs=1e-12 * size)  # noqa: E731
    assert found >= 0
    assert distance(a, a) == 0
    assert distance(b, a) == near(found)
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(seed))
    assert distance(a[order], b) == near(found)
    rotation = torch.linalg.qr(normal(dim, dim, seed=seed))[0]
    assert distance(a @ rotation, b @ rotation) == near(found)
    shift = normal(dim, seed=seed + 2)  # the mean term adds to the rest, which no shift changes
    means = (a.mean(0) - b.mean(0)).square().sum()
    moved = (a.mean(0) + shift - b.mean(0)).square().sum()
    assert distance(a + shift, b) - float(moved) == near(found - float(means))
    half = len(a) // 2
    merged = Moments.of(a[:half]).merge(Moments.of(a[half:]))
    assert frechet_distance(merged, Moments.of(b)) == near(found)


@pytest.mark.parametrize(("num_a", "num_b"), [(20, 20), (20, 50), (50, 20), (2, 300)])
def test_fewer_samples_than_dimensions(num_a: int, num_b: int) -> None:
    a, b = normal(num_a, 128, seed=1), normal(num_b, 128, seed=2) * 2
    assert distance(a, b) == pytest.approx(by_singular_values(a, b), rel=1e-12)


@pytest.mark.parametrize("num", [20, 500])
def test_an_offset_common_to_both_sets_changes_nothing(num: int) -> None:
    a, b = normal(num, 32, seed=1), normal(num, 32, seed=2) * 1.5
    assert distance(a + 1000, b + 1000) == pytest.approx(distance(a, b), rel=1e-10)
    chunked = (Moments.of(torch.split(x + 1000, 7)) for x in (a, b))
    assert frechet_distance(*chunked) == pytest.approx(distance(a, b), rel=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1e6, 1e-100, 1e100, 3e150])
@pytest.mark.parametrize("num", [20, 500])
def test_scales_with_the_square_of_the_features(num: int, scale: float) -> None:
    a, b = normal(num, 32, seed=1), normal(num, 32, seed=2) * 1.5
    assert distance(a * scale, b * scale) == pytest.approx(distance(a, b) * scale**2, rel=1e-12)


@pytest.mark.parametrize("num", [40, 300])
def test_features_that_never_vary_or_depend_on_others(num: int) -> None:
    a, b = normal(num, 32, seed=1), normal(num, 32, seed=2) * 1.5
    expected = distance(a, b)
    dead = torch.zeros(num, 5, dtype=torch.float64)
    assert distance(torch.cat([a, dead], 1), torch.cat([b, dead], 1)) == pytest.approx(expected, rel=1e-12)
    turned = torch.linalg.qr(normal(40, 40, seed=3))[0][:32]  # they span 32 of 40 dimensions
    assert distance(a @ turned, b @ turned) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("num_a", "num_b"), [(300, 300), (300, 40), (40, 300)])
def test_eigenvalues_that_fall_to_the_rounding_error(num_a: int, num_b: int) -> None:
    # Roots of the eigenvalues of the product would lose half their digits here.
    spectrum = torch.logspace(0, -6, 48, dtype=torch.float64)
    a, b = normal(num_a, 48, seed=1) * spectrum, normal(num_b, 48, seed=2) * spectrum * 1.3
    assert distance(a, b) == pytest.approx(by_singular_values(a, b), rel=1e-9)


def test_statistics_that_were_published() -> None:
    a, b = normal(500, 16, seed=1), normal(300, 16, seed=2) * 1.5
    published = Gaussian(b.mean(0), torch.cov(b.T))
    assert frechet_distance(Moments.of(a), published) == pytest.approx(distance(a, b), rel=1e-12)
    assert frechet_distance(published, published) == 0


def test_sets_without_spread() -> None:
    assert distance(torch.ones(5, 3), torch.ones(5, 3)) == 0
    assert distance(torch.ones(5, 3), torch.zeros(5, 3)) == 3
    spread = normal(50, 3)
    expected = float(torch.cov(spread.T).trace() + spread.mean(0).square().sum())
    for a, b in ((spread, torch.zeros(5, 3)), (torch.zeros(5, 3), spread)):
        assert distance(a, b) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("dim", "num", "expected", "within"), [(64, 500, 4.49, 0.14), (64, 5000, 0.444, 0.011), (256, 1000, 33.2, 0.18)]
)
def test_bias_of_finite_samples(dim: int, num: int, expected: float, within: float) -> None:
    repeats = 8 if dim < 256 else 2
    found = [distance(normal(num, dim, seed=2 * i), normal(num, dim, seed=2 * i + 1)) for i in range(repeats)]
    # `within` is the deviation of a single draw. Four times as much is loose for a mean, and far from the next n.
    assert sum(found) / repeats == pytest.approx(expected, abs=4 * within)


def test_bias_falls_as_one_over_n() -> None:
    found = [distance(normal(num, 16, seed=1), normal(num, 16, seed=2)) * num for num in (500, 2000, 8000)]
    assert max(found) / min(found) < 1.4


def test_sets_that_cannot_be_compared() -> None:
    one, two, other = normal(1, 3), normal(2, 3), normal(5, 4)
    for a, b in ((one, two), (two, one)):
        with refused(ValueError, 2, 1):
            distance(a, b)
    with refused(ValueError, 3, 4):
        distance(two, other)
