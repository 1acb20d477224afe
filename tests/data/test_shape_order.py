"""Batches of samples of several shapes: each sample once in each pass over its shape, also across kills and sizes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff import Loop, LoopConfig, UserError
from hookdiff.data import Feed, PlainReader
from hookdiff.data.absent_data import FeedWithoutData
from hookdiff.data.batch import Batch
from hookdiff.data.feed_state import Facts

ISSUED = [1538, 744, 556, 390, 301, 176, 44, 30, 2]


class Shaped(PlainReader):
    """Sample i is filled with i; the shapes differ in height. As a third party would write it."""

    codec, left_out, unreadable, classes = None, (), (), None
    are_pictures = False

    def __init__(self, counts: Sequence[int], labels: Tensor | None = None) -> None:
        self.counts, self.labels = counts, labels
        self.shape_numbers = torch.repeat_interleave(torch.tensor(counts))
        mixed = torch.randperm(len(self.shape_numbers), generator=torch.Generator().manual_seed(3))
        self.shape_numbers = self.shape_numbers[mixed]

    def __len__(self) -> int:
        return len(self.shape_numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 2, 2

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(1, 1 + number, 2) for number in range(len(self.counts))]

    @property
    def samples(self) -> Any:
        return self

    @property
    def first(self) -> Batch:
        inputs, labels, indices, conditions = next(self.stacks([torch.zeros(1, dtype=torch.int64)], None))
        return Batch(inputs, labels, indices, conditions=conditions)

    def bound(self, *_: Any) -> Shaped:
        return copy(self)

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Any]:
        for share in shares:
            (number,) = self.shape_numbers[share].unique().tolist()
            inputs = share.float().view(-1, 1, 1, 1).expand(-1, *self.shapes[number])
            yield inputs, None if self.labels is None else self.labels[share], share, {}

    def describe(self, index: int) -> str:
        return f"sample {index}"

    def fingerprint(self) -> str | None:
        return None


def feed_of(counts: Sequence[int], batch_size: int, **options: Any) -> Feed:
    labels = options.pop("labels", None)
    return Feed(Shaped(counts, labels), **options).bind(batch_size, seed=5)


def seen(feed: Feed, epoch: int, start: int = 0) -> list[Tensor]:
    return [batch.indices for batch in feed.batches(epoch, start) if batch.indices is not None]


def numbers(feed: Feed, rows: Tensor) -> list[int]:
    return feed.by_shape.numbers[rows].tolist()


class Training:
    """A run over a feed, which may be killed and resumed with another batch size, as a Loop does it."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.epoch, self.samples = feed, 0, 0
        self.batches: list[tuple[int, Tensor]] = []

    def go(self, most: int) -> None:
        """Take at most `most` batches."""
        while most > 0:
            self.feed.begin(self.epoch)
            for rows in seen(self.feed, self.epoch, self.samples):
                self.batches.append((self.epoch, rows))
                self.samples += len(rows)
                most -= 1
                if not most:
                    break
            if self.feed.exhausted(self.epoch, self.samples):
                self.epoch, self.samples = self.epoch + 1, 0

    def resume(self, batch_size: int, **options: Any) -> None:
        """Go on in a new process with another batch size."""
        state = self.feed.state_dict()
        self.feed = feed_of(self.feed.reader.counts, batch_size, **options)
        self.feed.check_state(state)
        self.feed.load_state_dict(state)

    def check_passes(self) -> None:
        """Check that no sample comes again before all samples of its shape have come."""
        of_shape = self.feed.by_shape.numbers
        for number, count in enumerate(self.feed.reader.counts):
            rows = torch.cat([rows for _, rows in self.batches if of_shape[rows[0]] == number] or [of_shape[:0]])
            for each in rows.split(count):
                assert len(each.unique()) == len(each)


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5).filter(lambda counts: max(counts) >= 12)


@given(sizes, st.integers(1, 12), st.integers(1, 9), st.integers(1, 3))
def test_each_sample_comes_once_in_each_pass_and_the_rest_waits(
    counts: list[int], batch_size: int, epochs: int, ranks: int
) -> None:
    feed = feed_of(counts, batch_size)
    made = Counter[int]()
    for epoch in range(epochs):
        feed.begin(epoch)
        batches = seen(feed, epoch)
        for rows in batches:
            (number,) = {*numbers(feed, rows)}
            made[number] += 1
            assert len(rows) == batch_size
        assert feed.num_batches(epoch + 1, epoch) == len(batches)
        assert feed.exhausted(epoch, batch_size * len(batches))
        assert torch.equal(feed.order(epoch), torch.cat([feed.training[:0], *batches]))
    assert made == {k: total for k, n in enumerate(counts) if (total := epochs * n // batch_size)}
    assert feed.num_batches(epochs) == made.total()


@given(sizes, st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_without_drop_last_each_sample_comes_once_in_each_epoch_on_any_ranks(
    counts: list[int], batch_size: int, epochs: int, num_ranks: int
) -> None:
    batch_size = max(batch_size, num_ranks)
    feed = feed_of(counts, batch_size, drop_last=False)
    ranks = [Feed.of(feed).bind(batch_size, 5, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for epoch in range(epochs):
        batches, shares = seen(feed, epoch), [list(each.batches(epoch)) for each in ranks]
        assert sorted(torch.cat(batches).tolist()) == list(range(sum(counts)))
        for number in range(len(counts)):
            own = [len(rows) for rows in batches if numbers(feed, rows)[0] == number]
            assert max(own) - min(own) <= 1
            assert max(own) <= batch_size
        assert feed.num_batches(epoch + 1, epoch) == len(batches)
        for rows, *parts in zip(batches, *shares, strict=True):
            together = [each for part in parts if not part.is_filler for each in part.indices.tolist()]
            assert sorted(together) == sorted(rows.tolist())
            assert len({part.inputs.shape[1:] for part in parts}) == 1


def test_twenty_epochs_show_each_sample_twenty_times_less_what_waits() -> None:
    training = Training(feed_of(ISSUED, 32))
    training.go(training.feed.num_batches(20))
    assert (training.epoch, training.samples) == (20, 0)
    times = torch.bincount(torch.cat([rows for _, rows in training.batches]), minlength=sum(ISSUED))
    for number, count in enumerate(ISSUED):
        own = times[training.feed.by_shape.numbers == number]
        assert 20 * count - int(own.sum()) == 20 * count % 32
        assert {*own.tolist()} <= {19, 20} or count < 32
    training.check_passes()


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_run_that_is_killed_and_resumed_with_other_sizes_repeats_nothing(drop_last: bool) -> None:
    training = Training(feed_of(ISSUED, 32, drop_last=drop_last))
    training.go(4 * 118 + 50)
    assert training.epoch == 4
    for batch_size, most in ((48, 30), (48, 10), (20, 300), (20, 1), (32, 250)):
        training.resume(batch_size, drop_last=drop_last)
        expected = training.feed.num_batches(training.epoch + 1, training.epoch, training.samples)
        epoch = training.epoch
        training.go(most)
        taken = sum(number == epoch for number, _ in training.batches[-most:])
        assert taken == min(most, expected)
    training.check_passes()


@given(st.integers(1, 400), st.booleans())
def test_a_resumed_run_has_the_batches_of_the_whole_run(kill: int, drop_last: bool) -> None:
    whole, killed = (Training(feed_of([90, 40, 7], 8, drop_last=drop_last)) for _ in range(2))
    whole.go(kill + 20)
    killed.go(kill)
    killed.resume(8, drop_last=drop_last)
    killed.go(20)
    assert [(epoch, rows.tolist()) for epoch, rows in whole.batches] == [
        (epoch, rows.tolist()) for epoch, rows in killed.batches
    ]


def test_other_samples_begin_the_epoch_anew_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(feed_of([64, 32], 8))
    training.go(3)
    training.feed.reader.counts = [65, 31]
    with caplog.at_level(logging.WARNING, "hookdiff"):
        training.resume(8)
    assert "epoch 0 begins anew" in caplog.text
    assert training.feed.num_batches(1, 0, training.samples) == 8 + 3
    training.go(11)
    assert (training.epoch, training.samples) == (1, 0)


@pytest.mark.parametrize("drop_last", [True, False])
def test_balanced_batches_have_each_class_equally_often(drop_last: bool) -> None:
    counts = [60, 30, 6]
    labels = torch.arange(sum(counts)) ** 2 % 7 // 2
    feed = feed_of(counts, 4, labels=labels, balanced=True, drop_last=drop_last)
    drawn = torch.cat([rows for epoch in range(50) for rows in seen(feed, epoch)])
    shares = torch.bincount(labels[drawn]).double() / len(drawn)
    assert torch.allclose(shares, torch.full_like(shares, 1 / len(shares)), atol=0.03)
    plain = feed_of(counts, 4, drop_last=drop_last)
    for epoch in range(3):  # an epoch is as long as without weights
        batches = seen(feed, epoch)
        assert len(batches) == plain.num_batches(epoch + 1, epoch)
        assert all(len({*numbers(feed, rows)}) == 1 for rows in batches)
        if not drop_last:
            assert sum(map(len, batches)) == sum(counts)


def test_weights_draw_samples_and_shapes_in_proportion() -> None:
    feed = feed_of([300, 100, 50], 10)
    weights = torch.arange(450).double() % 4
    drawn = []
    for epoch in range(60):
        feed.begin(epoch)
        feed.weigh(weights)
        drawn += seen(feed, epoch)
    times = torch.bincount(torch.cat(drawn), minlength=450).double()
    for group in (torch.arange(450) % 4, feed.by_shape.numbers):
        expected = torch.zeros(4).double().index_add(0, group, weights) / weights.sum()
        found = torch.zeros(4).double().index_add(0, group, times) / times.sum()
        assert torch.allclose(found, expected, atol=0.015)


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_mean_number_of_batches_is_that_of_many_epochs(drop_last: bool) -> None:
    labels = torch.arange(96) % 4 // 3
    for options, tolerance in (({}, 0.0), ({"labels": labels, "balanced": True}, 0.2)):
        feed = feed_of([60, 30, 6], 8, drop_last=drop_last, **options)
        made = Counter(feed.shapes[numbers(feed, rows)[0]] for epoch in range(8 * 12) for rows in seen(feed, epoch))
        means = {shape: count / (8 * 12) for shape, count in made.items()}
        assert feed.by_shape.mean_batches == pytest.approx(means, abs=tolerance + 1e-9)
    assert feed.by_shape.small == [(1, 3, 2)]


def test_a_limit_repeats_samples_until_a_shape_fills_a_batch() -> None:
    feed = feed_of([20, 10, 5], 32, limit=8)
    training = Training(feed)
    training.go(40)
    rows = torch.cat([rows for _, rows in training.batches])
    assert {*rows.tolist()} == {*feed.training.tolist()}
    assert feed.num_batches() >= 1


def test_held_out_samples_come_shape_by_shape_on_any_ranks() -> None:
    feed = feed_of([50, 30], 8, held_out=0.25)
    batches = list(feed.unaugmented(feed.held_out_indices, 6))
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == feed.held_out_indices.tolist()
    ranks = [Feed.of(feed).bind(8, 5, rank=rank, num_ranks=3) for rank in range(3)]
    parts = [list(each.shared(each.held_out_indices)) for each in ranks]
    together = [i for rank in parts for batch in rank if not batch.is_filler for i in batch.indices.tolist()]
    assert sorted(together) == feed.held_out_indices.tolist()


def test_refusals_and_what_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"of their shapes has \d+, batch_size is \d+: lower batch_size or set"):
        feed_of([5, 6], 8)
    feed = feed_of([50, 30, 3], 8)
    with pytest.raises(UserError, match="no training sample has the shape"):
        feed.examples(lambda _: [0], (1, 9, 9))
    with caplog.at_level(logging.INFO, "hookdiff"):
        list(feed.batches(0))
    for text in ("samples of 3 shapes (2x1: 50, 2x2: 30, 2x3: 3)", "11 samples wait", "batch_size = 8", "2x3"):
        assert text in caplog.text


def test_examples_and_blanks_have_one_shape() -> None:
    feed = feed_of([5, 30, 3], 4)
    assert feed.shapes == [(1, 2, 2), (1, 1, 2), (1, 3, 2)]
    assert feed.examples(lambda total: range(total)).inputs.shape == (30, 1, 2, 2)
    assert feed.examples(lambda total: range(total), (1, 3, 2)).inputs.shape == (3, 1, 3, 2)
    assert feed.blank(4, (1, 3, 2)).inputs.shape == (4, 1, 3, 2)


def test_without_the_data_the_length_and_the_shapes_are_known() -> None:
    feed = feed_of([50, 30, 3], 8, labels=torch.zeros(83, dtype=torch.int64))
    absent = FeedWithoutData(Facts.of(feed.facts.state_dict())).bind(8)
    for epochs in (1, 7):
        assert absent.num_batches(epochs) == feed.num_batches(epochs)
    assert (absent.shapes, absent.shape) == (feed.shapes, feed.shape)


def test_a_loop_trains_all_shapes_for_exactly_its_length() -> None:
    net = torch.nn.Linear(2, 2)
    config = LoopConfig(epochs=3, batch_size=7)
    feed = Feed(Shaped([23, 11, 2]))
    losses: list[tuple[int, ...]] = []

    def loss(net: torch.nn.Module, batch: Batch) -> Tensor:
        losses.append(tuple(batch.inputs.shape))
        return net(batch.inputs).square().mean()

    loop = Loop(net, torch.optim.SGD(net.parameters(), 1e-6), loss, feed, config)
    expected = [loop.config.planned_steps(feed.bind(7))]
    with loop:
        for _ in loop.steps():
            expected.append(loop.config.expected_steps(loop.progress, loop.feed))
    assert {*expected} == {loop.progress.step} == {3 * 23 // 7 + 3 * 11 // 7}
    assert {shape[2] for shape in losses} == {1, 2}
