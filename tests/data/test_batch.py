import pytest
import torch
from attrs import evolve, fields_dict
from hypothesis import given, strategies as st

from hookdiff import Batch, Feed, LossOutput
from hookdiff.models.objective import join
from hookdiff.testing.threads import on_ranks


def batch_of(num: int) -> Batch:
    rows = torch.arange(num)
    return Batch(rows.float().unsqueeze(1), rows * 10, rows + 100, {"noise": -rows.float()}, total=3 * num)


@given(num=st.integers(1, 20), size=st.none() | st.integers(1, 25))
def test_slices_together_are_the_whole_batch(num: int, size: int | None) -> None:
    whole = batch_of(num)
    parts = whole.split(size)
    for name in ("inputs", "labels", "indices"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert torch.equal(torch.cat([part.draws["noise"] for part in parts]), whole.draws["noise"])
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 0 < len(parts[-1]) <= (size or num)
    assert {part.total for part in parts} == {3 * num}
    if size is None or size >= num:
        assert parts == [whole]


@pytest.mark.parametrize("times", [None, 1, 3])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_filler_counts_nowhere(times: int | None, size: int | None) -> None:
    """Two samples on three ranks; a plugin returns each sample `times` times, or the batch itself."""

    def step(number: int) -> tuple[list[int], int, float, list[float], float]:
        feed = Feed(torch.arange(6.0).reshape(6, 1), drop_last=False).bind(4, rank=number, num_ranks=3)
        *_, given = feed.batches(0)
        made = given if times is None else Batch(given.inputs.repeat(times, 1), indices=given.indices)
        batch = made.in_place_of(given, can_differ=True)
        assert len(batch.own(torch.zeros(batch.total, 2))) == len(batch)
        parts = batch[slice(None)].split(size)  # as a plugin that makes a pass over some of the samples
        output = join([LossOutput(part.inputs.mean(), part.inputs.flatten()) for part in parts], parts)
        assert output.per_sample is not None
        rows = [] if batch.is_filler else list(batch.rows)
        return rows, batch.total, sum(part.weight for part in parts), output.per_sample.tolist(), len(parts)

    rows, totals, weights, columns, passes = zip(*on_ranks(3, step), strict=True)
    num = 2 * (times or 1)
    assert (totals, weights) == ((num,) * 3, (0.5, 0.5, 0))
    assert sorted(row for own in rows for row in own) == list(range(num))
    assert [len(column) for column in columns] == [num / 2, num / 2, 0]
    assert len(set(passes)) == 1  # else the ranks would wait for each other


def test_slices_lack_the_fields_that_the_batch_lacks() -> None:
    part = Batch(torch.zeros(5, 1))[1:3]
    assert (len(part), part.labels, part.indices, part.draws, part.total) == (2, None, None, {}, 5)


def test_draws_are_added_and_all_else_stays() -> None:
    mask = {"mask": torch.ones(2, 1)}
    batch = Batch(torch.zeros(2, 1), torch.ones(2), torch.arange(2), {"noise": torch.ones(2)}, 9, mask)
    batch = evolve(batch, rows=range(0, 8, 4), most=4, is_filler=True, replaced=Batch(torch.ones(2, 1)))
    drawn = batch.with_draws({"timesteps": torch.arange(2)})
    assert {name: values.tolist() for name, values in drawn.draws.items()} == {"noise": [1, 1], "timesteps": [0, 1]}
    assert list(batch.draws) == ["noise"]
    for name in fields_dict(Batch).keys() - {"draws"}:
        assert getattr(drawn, name) is getattr(batch, name), name
