"""Moments do not depend on how the features come in chunks, and bad features are refused."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff.features.moments import Gaussian, Moments
from tests.conftest import refused
from tests.features.conftest import normal


def covariance(gaussian: Gaussian) -> Tensor:
    if gaussian.covariance is not None:
        return gaussian.covariance
    assert gaussian.rows is not None
    return gaussian.rows.T @ gaussian.rows


def close(a: Moments, b: Moments, rtol: float = 1e-12) -> bool:
    one, other = a.fit(), b.fit()
    size = float(covariance(other).abs().max())
    return (
        a.num == b.num
        and torch.allclose(one.mean, other.mean, rtol=rtol, atol=rtol)
        and torch.allclose(covariance(one), covariance(other), rtol=rtol, atol=rtol * size)
    )


@pytest.mark.parametrize(("num", "dim"), [(40, 5), (5, 40), (2, 2), (3000, 7), (1500, 1400)])
def test_moments_are_those_of_the_samples(num: int, dim: int) -> None:
    features = normal(num, dim) + 3
    found = Moments.of(torch.split(features, 97)).fit()
    assert found.num == num
    assert torch.allclose(found.mean, features.mean(0), rtol=1e-13)
    assert torch.allclose(covariance(found), torch.cov(features.T), rtol=1e-12, atol=1e-12)
    assert float(found.variance) == pytest.approx(float(torch.cov(features.T).trace()), rel=1e-12)
    assert (found.rows is not None) == (num <= dim)  # few samples are worth more than their covariance


@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=8),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
def test_chunks_and_merges_do_not_matter(sizes: list[int], offset: float, seed: int) -> None:
    sizes = [*sizes, 2]
    features = normal(sum(sizes), 6, seed=seed) + offset
    chunks = torch.split(features, sizes)
    whole = Moments.of(features)
    assert close(Moments.of(chunks), whole, 1e-9)
    assert close(Moments.of(reversed(chunks)), whole, 1e-9)

    parts = [Moments.of(chunk) for chunk in chunks]
    assert close(Moments.merged(parts), whole, 1e-9)
    for part in filter(lambda one: one.num, parts):
        part.tensors()  # parts of many samples hold their mean and scatter from then on
    while len(parts) > 1:  # as a tree, as ranks would, and from the other end
        parts = [parts[-1].merge(parts[0]), *parts[1:-1]]
    assert close(parts[0], whole, 1e-9)


def test_a_mean_far_larger_than_the_spread_costs_no_digits() -> None:
    spread = normal(5000, 3, seed=4)
    features = spread + 1e6
    found = Moments.of(torch.split(features, 64)).fit()
    # Adding 1e6 rounds the samples themselves by 1e-10.
    assert torch.allclose(covariance(found), torch.cov(spread.T), rtol=0, atol=1e-9)


def test_merging_changes_neither_part() -> None:
    parts = [Moments.of(normal(num, 4, seed=num)) for num in (3, 2000)]
    before = [covariance(part.fit()).clone() for part in parts]
    both = parts[0].merge(parts[1])
    both.add(normal(5000, 4))
    for part, kept in zip(parts, before, strict=True):
        assert torch.equal(covariance(part.fit()), kept)


def test_the_features_are_not_changed_and_may_change_afterwards() -> None:
    features = normal(2000, 4)
    before = features.clone()
    moments = Moments.of(features)
    expected = covariance(moments.fit()).clone()
    assert torch.equal(features, before)
    features.zero_()
    moments.add(normal(0, 4))
    assert torch.equal(covariance(moments.fit()), expected)


@pytest.mark.parametrize("num", [3, 40, 3000])
def test_a_file_keeps_them(num: int) -> None:
    moments = Moments.of(normal(num, 8))
    again = Moments.from_tensors(moments.tensors())
    assert close(again, moments, rtol=0)
    for other in (moments, again):
        other.add(normal(10, 8, seed=1))
    assert close(again, moments)


def test_an_empty_state() -> None:
    empty, full = Moments(), Moments.of(normal(9, 4))
    assert (empty.num, empty.dim) == (0, None)
    assert close(Moments.merged([empty, full, empty]), full, rtol=0)
    with refused(ValueError, 2, 0):
        empty.fit()


def test_any_float_type_is_taken_and_none_is_trained() -> None:
    features = normal(30, 4)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = features.to(dtype).requires_grad_()
        found = Moments.of(rounded).fit()
        assert found.mean.dtype == covariance(found).dtype == torch.float64
        assert not found.mean.requires_grad
        assert close(Moments.of(rounded), Moments.of(rounded.double()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_an_error_that_counts_rows(bad: float) -> None:
    features = normal(10, 3)
    features[2, 1] = features[7, 0] = features[7, 2] = bad
    with refused(ValueError, "2 of 10"):
        Moments.of(features)


def test_features_that_are_none_are_refused() -> None:
    for shape in ((3, 0), (3,), (3, 2, 2)):
        with refused(ValueError, "n d", shape):
            Moments.of(torch.zeros(shape))
    with refused(ValueError, "float", torch.int64):
        Moments.of(torch.zeros(3, 2, dtype=torch.int64))
    for join in (
        lambda: Moments.of([normal(2, 3), normal(5, 4)]),
        lambda: Moments.of(normal(2, 3)).merge(Moments.of(normal(5, 4))),
    ):
        with refused(ValueError, 3, 4):
            join()


def test_features_beyond_the_range_of_float64_are_refused() -> None:
    with refused(ValueError, "range", "float64"):
        Moments.of(normal(50, 3) * 1e200).fit()


@pytest.mark.parametrize(
    ("mean", "covariance", "fact"),
    [
        (torch.zeros(2), torch.eye(3), "(3, 3)"),
        (torch.zeros(2), torch.tensor([[1.0, 0.5], [0.4, 1.0]]), "symmetric"),
        (torch.zeros(2), torch.tensor([[1.0, 0.0], [0.0, -1.0]]), "negative"),
        (torch.zeros(2), torch.full((2, 2), math.nan), "finite"),
        (torch.tensor([math.inf, 0.0]), torch.eye(2), "finite"),
    ],
)
def test_what_is_no_gaussian_is_refused(mean: Tensor, covariance: Tensor, fact: str) -> None:
    with refused(ValueError, fact):
        Gaussian(mean.double(), covariance.double())
