"""The Fréchet distance against closed forms and other computations, and where rounding matters."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hookdiff_fid import Moments, frechet_distance
from tests.conftest import refused


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exactly(mean: list[float], covariance: list[list[float]], num: int = 10) -> Moments:
    scatter = torch.tensor(covariance, dtype=torch.float64) * (num - 1)
    return Moments(num, torch.tensor(mean, dtype=torch.float64), scatter)


def distance(a: Tensor, b: Tensor) -> float:
    return frechet_distance(Moments.from_features(a), Moments.from_features(b))


def close(a: Moments, b: Moments, rtol: float = 1e-12) -> bool:
    size = float(b.scatter.abs().max())
    return (
        a.num == b.num
        and torch.allclose(a.mean, b.mean, rtol=rtol, atol=rtol)
        and torch.allclose(a.scatter, b.scatter, rtol=rtol, atol=rtol * size)
    )


def test_moments_are_those_of_the_samples() -> None:
    features = normal(40, 5) + 3
    moments = Moments.from_features(features)
    assert moments.num == 40
    assert torch.allclose(moments.mean, features.mean(0), rtol=1e-13)
    assert torch.allclose(moments.covariance, torch.cov(features.T), rtol=1e-12)


def test_closed_forms() -> None:
    assert frechet_distance(exactly([3], [[1]]), exactly([0], [[4]])) == pytest.approx(10, rel=1e-14)
    a = exactly([1, -1], [[2, 0.5], [0.5, 1]])
    b = exactly([0, 0.5], [[1, -0.3], [-0.3, 3]])
    assert frechet_distance(a, b) == pytest.approx(4.17931185497, abs=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-13)


@pytest.mark.parametrize("num", [2, 20, 64, 500])
def test_a_set_is_at_distance_zero_from_itself_in_any_order(num: int) -> None:
    features = normal(num, 64) * torch.logspace(-6, 3, 64, dtype=torch.float64)
    moments = Moments.from_features(features)
    size = float(moments.covariance.trace())
    assert 0 <= frechet_distance(moments, moments) <= 1e-18 * size
    shuffled = features[torch.randperm(num, generator=torch.Generator().manual_seed(1))]
    assert 0 <= distance(features, shuffled) <= 1e-12 * size


def test_small_distances_keep_their_digits() -> None:
    features = normal(500, 32)
    moved = features * (1 + 1e-6)  # the trace formula would lose all but three digits of it
    moments = Moments.from_features(features)
    expected = 1e-12 * float(moments.covariance.trace() + moments.mean.square().sum())
    assert distance(features, moved) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num", [100, 2000])
def test_it_agrees_with_computations_by_sqrtm_and_by_eigenvalues(num: int) -> None:
    a = Moments.from_features(normal(num, 24, seed=1) @ normal(24, 24, seed=2))
    b = Moments.from_features(normal(num, 24, seed=3) @ normal(24, 24, seed=4) + 0.5)
    product = (a.covariance @ b.covariance).numpy()
    rest = float((a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace())
    by_sqrtm = rest - 2 * np.trace(scipy.linalg.sqrtm(product)).real
    by_eigenvalues = rest - 2 * np.sqrt(np.linalg.eigvals(product).real.clip(0)).sum()
    assert frechet_distance(a, b) == pytest.approx(by_sqrtm, rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(by_eigenvalues, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-12)


@pytest.mark.parametrize(("num_a", "num_b"), [(20, 20), (20, 50), (50, 20), (2, 300)])
def test_fewer_samples_than_dimensions(num_a: int, num_b: int) -> None:
    a, b = normal(num_a, 128, seed=1), normal(num_b, 128, seed=2) * 2
    centred_a, centred_b = ((x - x.mean(0)) / math.sqrt(len(x) - 1) for x in (a, b))
    nuclear = torch.linalg.matrix_norm(centred_a @ centred_b.T, "nuc")
    means = (a.mean(0) - b.mean(0)).square().sum()
    exact = means + centred_a.square().sum() + centred_b.square().sum() - 2 * nuclear
    assert distance(a, b) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("num", [20, 500])
def test_an_offset_common_to_both_sets_changes_nothing(num: int) -> None:
    a, b = normal(num, 32, seed=1), normal(num, 32, seed=2) * 1.5
    assert distance(a + 1000, b + 1000) == pytest.approx(distance(a, b), rel=1e-10)
    chunked = (Moments.from_chunks(torch.split(x + 1000, 7)) for x in (a, b))
    assert frechet_distance(*chunked) == pytest.approx(distance(a, b), rel=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("num", [20, 500])
def test_scales_with_the_square_of_the_features(num: int, scale: float) -> None:
    a, b = normal(num, 32, seed=1), normal(num, 32, seed=2) * 1.5
    assert distance(a * scale, b * scale) == pytest.approx(distance(a, b) * scale**2, rel=1e-12)


def test_sets_without_spread() -> None:
    assert distance(torch.ones(5, 3), torch.ones(5, 3)) == 0
    assert distance(torch.ones(5, 3), torch.zeros(5, 3)) == 3
    spread = normal(50, 3)
    expected = float(torch.cov(spread.T).trace() + spread.mean(0).square().sum())
    assert distance(spread, torch.zeros(5, 3)) == pytest.approx(expected, rel=1e-12)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_chunks_and_merges_do_not_matter(sizes: list[int], offset: float, seed: int) -> None:
    features = normal(sum(sizes), 6, seed=seed) + offset
    chunks = torch.split(features, sizes)
    whole = Moments.from_features(features)
    assert close(Moments.from_chunks(chunks), whole)

    parts = [Moments.from_features(chunk) for chunk in chunks]
    while len(parts) > 1:  # as a tree, as ranks would, and from the other end
        parts = [parts[-1].merge(parts[0]), *parts[1:-1]]
    assert close(parts[0], whole)


def test_any_float_type_is_taken_and_none_is_trained() -> None:
    features = normal(30, 4)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = features.to(dtype).requires_grad_()
        moments = Moments.from_features(rounded)
        assert moments.mean.dtype == moments.scatter.dtype == torch.float64
        assert not moments.scatter.requires_grad
        assert close(moments, Moments.from_features(rounded.double()))


@pytest.mark.parametrize(
    ("dim", "num", "expected", "within"), [(64, 500, 4.49, 0.14), (64, 5000, 0.444, 0.011), (256, 1000, 33.2, 0.18)]
)
def test_bias_of_finite_samples(dim: int, num: int, expected: float, within: float) -> None:
    repeats = 8 if dim < 256 else 2
    found = [distance(normal(num, dim, seed=2 * i), normal(num, dim, seed=2 * i + 1)) for i in range(repeats)]
    # The table gives the spread of single draws; four of it is loose for the mean and far from the next n.
    assert sum(found) / repeats == pytest.approx(expected, abs=4 * within)


def test_bias_falls_as_one_over_n() -> None:
    found = [distance(normal(num, 16, seed=1), normal(num, 16, seed=2)) * num for num in (500, 2000, 8000)]
    assert max(found) / min(found) < 1.4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_an_error_that_counts_rows(bad: float) -> None:
    features = normal(10, 3)
    features[2, 1] = features[7, 0] = features[7, 2] = bad
    with refused(ValueError, "2 of 10"):
        Moments.from_features(features)


def test_sets_that_cannot_be_compared() -> None:
    one, two, other = normal(1, 3), normal(2, 3), normal(5, 4)
    for a, b in ((one, two), (two, one)):
        with refused(ValueError, 2, 1):
            distance(a, b)
    with refused(ValueError, 3, 4):
        distance(two, other)
    with refused(ValueError, 3, 4):
        Moments.from_chunks([two, other])
    with refused(ValueError, "features"):
        Moments.from_chunks([])
    for shape in ((0, 3), (3, 0), (3,), (3, 2, 2)):
        with refused(ValueError, "n d", shape):
            Moments.from_features(torch.zeros(shape))


def test_the_sum_of_single_samples_is_a_set() -> None:
    features = normal(9, 4)
    assert close(Moments.from_chunks(torch.split(features, 1)), Moments.from_features(features))
