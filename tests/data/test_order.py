from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff import Feed, InMemory, UserError
from hookdiff.data.order import split
from hookdiff.images import feed_of
from hookdiff.images.source_reader import replacements
from tests.conftest import refused

CPU = torch.device("cpu")


def make_feed(labels: list[int] | None, batch_size: int = 1, seed: int = 0, **options: Any) -> Feed:
    length = 100 if labels is None else len(labels)
    data = InMemory(torch.zeros(length, 1), None if labels is None else torch.tensor(labels))
    return feed_of(data, **options).bind(batch_size, seed)


sets = st.lists(st.integers(-1, 4), min_size=2, max_size=60)


@given(labels=st.none() | sets, amount=st.floats(0.01, 0.99) | st.integers(1, 59), seed=st.integers(0, 3))
def test_held_out_samples_are_never_trained_on(labels: list[int] | None, amount: Any, seed: int) -> None:
    length = 100 if labels is None else len(labels)
    count = amount if isinstance(amount, int) else round(amount * length)
    if not 0 < count < length:
        with refused(UserError, "held_out", amount, length, count):
            make_feed(labels, held_out=amount)
        return
    feed = make_feed(labels, held_out=amount, seed=seed)
    held, training = set(feed.held_out_indices.tolist()), set(feed.training.tolist())
    assert len(held) == len(feed.held_out_indices) == count
    assert held | training == set(range(length))
    assert not held & training
    for epoch in range(3):
        assert set(feed.order(epoch).tolist()) == training
    # held-out samples do not depend on the run's seed
    assert torch.equal(feed.held_out_indices, make_feed(labels, held_out=amount, seed=seed + 1).held_out_indices)
    if labels is not None:
        for label in set(labels):
            assert abs(sum(labels[index] == label for index in held) - count * labels.count(label) / length) < 1


@given(labels=sets, seed=st.integers(0, 3), epoch=st.integers(0, 3), held_out=st.sampled_from([0, 1]))
def test_balanced_classes_come_equally_often(labels: list[int], seed: int, epoch: int, held_out: int) -> None:
    feed = make_feed(labels, seed=seed, balanced=True, held_out=held_out)
    order = feed.order(epoch)
    assert torch.equal(order, feed.order(epoch))
    assert len(order) == len(labels) - held_out
    assert not set(order.tolist()) & set(feed.held_out_indices.tolist())
    present = {labels[index] for index in feed.training.tolist()}
    drawn = [labels[index] for index in order.tolist()]
    counts = [drawn.count(label) for label in present]
    assert set(drawn) <= present
    assert max(counts) - min(counts) <= 1
    for label in present:  # no sample repeats before all of its class have come
        times = [order.tolist().count(index) for index in feed.training.tolist() if labels[index] == label]
        assert max(times) - min(times) <= 1


def test_each_epoch_balances_with_other_samples() -> None:
    feed = make_feed([0] * 90 + [1] * 10, balanced=True)
    first, second = (set(feed.order(epoch).tolist()) for epoch in range(2))
    assert len(first) == len(second) == 60
    assert first != second


def test_balance_needs_labels() -> None:
    with refused(UserError, "balanced", "labels"):
        make_feed(None, balanced=True)


def test_counts_of_an_epoch_leave_out_held_out_samples() -> None:
    feed = make_feed(None, batch_size=8, held_out=0.1)
    assert (len(feed), feed.num_batches(), len(list(feed.batches(0)))) == (88, 11, 11)
    with refused(UserError, 5, "batch_size", 8):
        make_feed(None, batch_size=8, held_out=95)


def test_held_out_and_training_samples_can_be_read() -> None:
    feed = Feed(InMemory(torch.arange(20.0).view(20, 1), torch.arange(20) % 2), held_out=6).bind(4)
    for part in (feed.held_out_indices, feed.training):
        batches = list(feed.unaugmented(part, batch_size=4))
        assert [len(batch) for batch in batches][:-1] == [4] * (len(batches) - 1)
        assert torch.cat([batch.inputs for batch in batches]).flatten().tolist() == part.tolist()
        assert torch.equal(torch.cat([batch.indices for batch in batches if batch.indices is not None]), part)
        assert torch.equal(torch.cat([batch.labels for batch in batches if batch.labels is not None]), part % 2)
    assert list(feed.unaugmented(feed.held_out_indices[:0])) == []


@given(length=st.integers(1, 20), data=st.data())
def test_a_replacement_is_the_next_readable_sample_of_the_same_part(length: int, data: Any) -> None:
    parts = split(torch.arange(length), None, data.draw(st.integers(0, length - 1)))
    unreadable = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    groups = [(part, part) for part in parts]
    if any(unreadable[part].all() for part in parts if len(part)):
        with pytest.raises(UserError):
            replacements(groups, unreadable)
        return
    found, following = replacements(groups, unreadable), torch.arange(length)
    for part in parts:
        assert set(found[part].tolist()) <= set(part.tolist())
        following[part] = part.roll(-1)
    for index in range(length):
        expected = index
        while unreadable[expected]:
            expected = int(following[expected])
        assert found[index] == expected
