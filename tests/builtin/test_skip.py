from typing import Any

import pytest
import torch

from hookdiff import Batch, Loop, hookimpl
from hookdiff.builtin.skip import SkipBatches
from hookdiff.testing import assert_same, toy_loop, weights


class Seen:
    """Writes down which batches are trained on."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int], float]] = []

    @hookimpl
    def before_step(self, loop: Loop, batch: Batch) -> None:
        assert batch.indices is not None
        noise = float(batch.draws["noise"].sum())
        self.batches.append((loop.progress.position, batch.indices.tolist(), noise))


class Saved:
    """Restores a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    @hookimpl
    def restore(self) -> dict[str, Any]:
        return self.state


def seen(num: int, state: dict[str, Any] | None = None, **config: Any) -> list[tuple[int, list[int], float]]:
    listener = Seen()
    plugins: dict[str, object] = {"seen": listener}
    if state:
        plugins["saved"] = Saved(state)
    if num:
        plugins["skip_batches"] = SkipBatches(num)
    toy_loop(plugins, epochs=4, **config).run()
    return listener.batches


@pytest.mark.parametrize("num", [1, 4, 5, 6, 13])
@pytest.mark.parametrize("batch_size", [8, 12])  # 5 batches an epoch; and 3, with 4 samples left over
def test_what_follows_is_what_would_have_followed(num: int, batch_size: int) -> None:
    assert seen(num, batch_size=batch_size) == seen(0, batch_size=batch_size)[num:]


def test_a_last_smaller_batch_is_a_batch() -> None:
    data = torch.linspace(-1, 1, 168).reshape(42, 4)
    from hookdiff import Feed

    whole = seen(0, data=Feed(data, drop_last=False))
    assert len(whole[5][1]) == 2
    assert seen(5, data=Feed(data, drop_last=False)) == whole[5:]
    assert seen(6, data=Feed(data, drop_last=False)) == whole[6:]


def test_a_resumed_run_skips_from_where_it_stands() -> None:
    first = toy_loop(steps=7)
    first.run()
    state = first.state_dict()
    assert seen(2, state) == seen(0)[9:]
    kept = toy_loop({"saved": Saved(state), "skip_batches": SkipBatches(2)}, steps=7)
    kept.run()  # it is done already
    assert_same(weights(kept), weights(first))
    assert (kept.progress.step, kept.progress.position) == (7, 9)


def test_a_number_below_one_skips_nothing_and_is_refused() -> None:
    with pytest.raises(ValueError, match="num"):
        SkipBatches(0)
