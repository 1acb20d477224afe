import itertools
import multiprocessing
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff import Batch, Feed, InMemory, Loop, Progress, UserError
from hookdiff.images import feed_of
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from tests.conftest import Batches, StopAt, as_list, refused, toy_run
from tests.forked import python

CPU = torch.device("cpu")


class Numbers:
    """A source in which sample i is the number i; `looked_up` lists the samples that this process loaded."""

    def __init__(self, length: int = 23) -> None:
        self.length, self.looked_up = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.looked_up.append(index)
        return torch.full((1, 2, 2), float(index))


class Augmented(Numbers):
    """Draws from every generator that an augmentation may use."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = torch.tensor([index, random.random(), numpy.random.rand(), float(torch.rand(()))])
        return draws.reshape(1, 2, 2), index % 3


def bound(source: Any, batch_size: int = 5, seed: int = 0, rank: int = 0, num_ranks: int = 1, **options: Any) -> Feed:
    return feed_of(source, **options).bind(batch_size, seed, CPU, rank, num_ranks)


def indices(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch.indices]


@pytest.mark.parametrize("seed", [0, 2**40])
def test_the_number_of_workers_changes_no_pixel(seed: int) -> None:
    here, two = (bound(Augmented(), seed=seed, workers=workers, drop_last=False) for workers in (0, 2))
    for one, other in zip(here.batches(1), two.batches(1), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert as_list(one.labels) == as_list(other.labels) == [index % 3 for index in indices([other])]


def test_an_augmentation_depends_on_seed_epoch_and_sample_alone() -> None:
    def drawn(epoch: int = 0, start: int = 0, **options: Any) -> dict[int, tuple[float, ...]]:
        batches = bound(Augmented(), drop_last=False, **options).batches(epoch, start)
        rows = torch.cat([batch.inputs.flatten(1) for batch in batches]).tolist()
        return {int(index): tuple(rest) for index, *rest in rows}

    plain = drawn()
    assert drawn(batch_size=7) == plain
    assert drawn(start=13).items() <= plain.items()
    assert drawn(rank=1, num_ranks=3).items() <= plain.items()
    values = {value for rows in (plain, drawn(epoch=1), drawn(seed=1)) for row in rows.values() for value in row}
    assert len(values) == 3 * 23 * 3  # each sample, epoch, seed and generator gives other values


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    start=st.integers(0, 40),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
    in_memory=st.booleans(),
)
def test_an_epoch_resumes_at_any_sample(
    length: int, batch_size: int, start: int, epoch: int, drop_last: bool, in_memory: bool
) -> None:
    batch_size, start = min(batch_size, length), min(start, length)
    source = InMemory(torch.arange(length).float().reshape(-1, 1, 1, 1)) if in_memory else Numbers(length)
    feed = bound(source, batch_size, drop_last=drop_last)
    order = feed.order(epoch).tolist()
    batches = list(feed.batches(epoch, start))
    expected = order[start : length - (length - start) % batch_size] if drop_last else order[start:]
    assert indices(batches) == expected
    assert [int(batch.inputs.flatten(1)[k, 0]) for batch in batches for k in range(len(batch))] == expected
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert feed.exhausted(epoch, start + sum(batch.total for batch in batches))
    assert feed.exhausted(epoch, start) == (not batches)


@given(st.integers(1, 23), st.integers(1, 5), st.booleans(), st.none() | st.integers(1, 30))
def test_the_counts_of_an_epoch_match_its_batches(size: int, ranks: int, drop_last: bool, limit: int | None) -> None:
    feed = bound(Numbers(27), max(size, ranks), num_ranks=ranks, drop_last=drop_last, limit=limit, held_out=4)
    batches = list(feed.batches(0))
    assert as_list(feed.training) == as_list(bound(Numbers(27), 1, held_out=4).training[:limit])
    order, num = feed.order(0).tolist(), len(feed.training)
    assert sorted(order[:num]) == as_list(feed.training)
    assert order == [order[k % num] for k in range(max(num, feed.batch_size) if limit else 23)]
    assert (feed.num_batches(), len(feed)) == (len(batches), sum(batch.total for batch in batches))
    assert len(feed) == (len(order) - len(order) % feed.batch_size if drop_last else len(order))
    assert feed.exhausted(0, len(feed))
    assert not feed.exhausted(0, len(feed) - 1 if not drop_last else len(feed) - feed.batch_size)


@given(num_ranks=st.integers(1, 5), batch_size=st.integers(5, 23), start=st.integers(0, 10), drop_last=st.booleans())
def test_the_ranks_split_each_batch_evenly(num_ranks: int, batch_size: int, start: int, drop_last: bool) -> None:
    def epoch(rank: int = 0, num_ranks: int = 1) -> list[Batch]:
        return list(bound(Numbers(), batch_size, 0, rank, num_ranks, drop_last=drop_last).batches(2, start))

    for whole, *parts in zip(epoch(), *[epoch(rank, num_ranks) for rank in range(num_ranks)], strict=True):
        assert {part.total for part in parts} == {whole.total} == {len(whole)}
        assert sum(part.weight for part in parts) == pytest.approx(1)
        assert [len(part) for part in parts if part.is_filler] == [1] * max(0, num_ranks - len(whole))
        parts = [part for part in parts if not part.is_filler]
        assert (sorted(indices(parts)), len(set(indices(parts)))) == (sorted(indices([whole])), len(whole))
        assert all(indices([part]) == [indices([whole])[row] for row in part.rows] for part in parts)
        assert 0 < max(map(len, parts)) <= min(map(len, parts)) + 1


def test_each_epoch_has_another_order() -> None:
    feed = bound(Numbers(200), batch_size=200)
    orders = [tuple(feed.order(epoch).tolist()) for epoch in range(4)]
    orders.append(tuple(bound(Numbers(200), batch_size=200, seed=1).order(0).tolist()))
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert len(set(orders)) == 5
    for one, other in itertools.pairwise(orders):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10  # on average one sample keeps its place


def test_epochs_follow_each_other_in_a_run() -> None:
    data, batches = torch.linspace(-1, 1, 160).reshape(40, 4), Batches()
    loop = toy_run({"batches": batches}, data=Feed(InMemory(data), drop_last=False), batch_size=12, epochs=2, seed=4)
    assert indices(batches.seen) == [*loop.feed.order(0).tolist(), *loop.feed.order(1).tolist()]
    assert loop.progress == Progress(step=8, position=8, epoch=2, samples=0)


@pytest.mark.parametrize(("length", "drop_last", "way_out"), [(4, True, ("drop_last",)), (0, True, ()), (0, False, ())])
def test_too_few_samples_are_refused_at_once(length: int, drop_last: bool, way_out: tuple[str, ...]) -> None:
    with refused(UserError, length, "batch_size", 5, *way_out):
        bound(Numbers(length), drop_last=drop_last, limit=None if length else 8)


def test_a_batch_too_small_for_the_ranks_is_refused_at_once() -> None:
    with refused(UserError, "batch_size", 3, 4):
        bound(Numbers(), batch_size=3, num_ranks=4)


def test_fewer_samples_than_a_batch_are_one_batch_if_none_is_dropped() -> None:
    assert [len(batch) for batch in bound(Numbers(4), drop_last=False).batches(0)] == [4]


class Bytes(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([[[0, 51, 255, index]]], dtype=torch.uint8)


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_become_numbers_from_minus_one_to_one(workers: int) -> None:
    for batch in bound(Bytes(), workers=workers).batches(0):
        assert batch.inputs.dtype == torch.float32
        assert (batch.inputs[:, 0, 0, :3].tolist(), batch.labels) == ([[-1, pytest.approx(-0.6), 1]] * 5, None)


def replaced(at: int, value: Any) -> Numbers:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            return value if index == at else super().__getitem__(index)

    return Broken()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("value", "kind"), [(numpy.zeros(4), "ndarray"), (("x.png", 3), "str"), (None, "NoneType")])
def test_a_sample_that_is_no_tensor_is_refused(value: Any, kind: str, workers: int) -> None:
    feed = bound(replaced(17, value), drop_last=False, workers=workers)
    with refused(UserError, 17, kind) as caught:
        list(feed.batches(0))
    traceback.clear_frames(caught.tb)  # otherwise the workers end seconds later, at a garbage collection


def test_labels_are_none_if_some_samples_have_none() -> None:
    class Half(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, int | None]:
            return torch.zeros(1, 1, 1), index if index % 2 else None

    assert all(batch.labels is None for batch in bound(Half()).batches(0))


def test_the_shape_is_looked_up_once() -> None:
    source = Numbers()
    feed = bound(source)
    assert (feed.shape, feed.shape, source.looked_up) == ((1, 2, 2), (1, 2, 2), [0])
    assert bound(InMemory(torch.zeros(9, 3, 4, 5))).shape == (3, 4, 5)


def test_nothing_is_loaded_ahead_without_workers() -> None:
    source = Numbers()
    feed = bound(source)
    next(feed.batches(0))
    assert source.looked_up == feed.order(0)[:5].tolist()


@pytest.mark.parametrize("given", [torch.zeros(8, 4), InMemory(torch.zeros(8, 4)), feed_of(Numbers(8))])
def test_anything_with_a_length_is_data(given: Any) -> None:
    assert sorted(indices(Feed.of(given).bind(4).batches(0))) == list(range(8))


def test_a_feed_has_a_length_before_a_run_has_it() -> None:
    feed = feed_of(Numbers(9))
    assert feed
    assert len(feed) == 9


def test_two_loops_may_share_a_feed() -> None:
    feed = feed_of(Numbers(40), drop_last=False)
    one, other = toy_loop(data=feed, batch_size=7, seed=1), toy_loop(data=feed, batch_size=11, seed=2)
    assert [len(batch) for batch in one.feed.batches(0)] == [7] * 5 + [5]
    assert one.feed.order(0).tolist() != other.feed.order(0).tolist()
    assert not other.feed.drop_last


class Rows(Numbers):
    """A source with four numbers per sample, as the toy net needs."""

    def __getitem__(self, index: int) -> Tensor:
        return Augmented()[index][0].flatten() / 23


def train(source: Any, **options: Any) -> Loop:
    return toy_run(data=feed_of(source, **options), model=toy_model(dropout=0.5), steps=6)


def test_loading_does_not_change_the_draws_of_training() -> None:
    # Without workers, the process that trains loads the samples, and seeds its generators for each.
    loop = train(Rows())
    assert_same(weights(loop), weights(train(Rows(), workers=2)))
    first = torch.cat([batch.inputs for epoch in range(3) for batch in loop.feed.batches(epoch)])
    order = torch.cat([loop.feed.order(epoch)[:16] for epoch in range(3)])

    class Played(Rows):
        """Returns the recorded pixels in the same order, without drawing any number."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __getitem__(self, index: int) -> Tensor:
            assert order[self.count] == index
            self.count += 1
            return first[self.count - 1]

    assert_same(weights(loop), weights(train(Played())))


IN_MEMORY = InMemory(torch.zeros(40, 4))


@pytest.mark.parametrize(
    "make",
    [lambda: toy_loop(data=IN_MEMORY).feed, lambda: toy_loop().feed, lambda: bound(Augmented(), workers=2)],
    ids=["memory", "default", "workers"],
)
def test_data_that_this_process_does_not_read_leaves_its_default_generators_alone(make: Callable[[], Feed]) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    list(make().batches(0))
    assert states() == before


def test_no_workers_are_left_after_a_run() -> None:
    before = multiprocessing.active_children()  # another test may have left a loop that holds its workers
    loop = toy_loop({"stop": StopAt(4)}, data=feed_of(Rows(), workers=1), steps=6)  # four steps are two epochs
    loop.run()
    assert set(multiprocessing.active_children()) <= set(before)
    assert loop.run() == "done"  # with new workers
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.wide
def test_a_process_that_still_holds_its_workers_can_end() -> None:
    code = """
import torch
from hookdiff.images import feed_of

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.zeros(1, 2, 2)

feed = feed_of(Rows(), workers=1).bind(4)
print(len(list(feed.batches(0))))
"""
    assert python(code)[:2] == (0, "2\n")


@given(num=st.integers(1, 9), num_ranks=st.integers(1, 5), batch_size=st.integers(5, 8))
def test_ranks_share_an_evaluation_with_as_many_passes(num: int, num_ranks: int, batch_size: int) -> None:
    feeds = [bound(Numbers(), batch_size, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    shares = [list(feed.shared(torch.arange(num))) for feed in feeds]
    assert len({len(share) for share in shares}) == 1
    assert sorted(indices([batch for share in shares for batch in share if not batch.is_filler])) == list(range(num))
    assert all(len(batch) for share in shares for batch in share)
    assert sum(batch.weight for share in shares for batch in share) == pytest.approx(len(shares[0]))


def test_a_reader_without_the_defaults_of_plain_reader_is_refused() -> None:
    class Rows:
        stacks = texts = None

    with refused(UserError, "Rows", "captions, check, close", "hookdiff.data.PlainReader"):
        Feed(Rows())  # type: ignore[arg-type]
