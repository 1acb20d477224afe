from typing import Any

import pytest
import torch

from hookdiff import Batch, Loop, hookimpl
from hookdiff.builtin.skip import SkipBatches
from hookdiff.images import feed_of
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import Restores, refused, saved, toy_run


class Seen:
    """Records the batches that are trained on."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int], float]] = []

    @hookimpl
    def before_step(self, loop: Loop, batch: Batch) -> None:
        assert batch.indices is not None
        noise = float(batch.draws["noise"].sum())
        self.batches.append((loop.progress.position, batch.indices.tolist(), noise))


def seen(num: int, state: dict[str, Any] | None = None, **config: Any) -> list[tuple[int, list[int], float]]:
    listener = Seen()
    plugins: dict[str, object] = {"seen": listener}
    if state:
        plugins["state"] = Restores(state)
    if num:
        plugins["skip_batches"] = SkipBatches(num)
    toy_loop(plugins, epochs=4, **config).run()
    return listener.batches


@pytest.mark.parametrize("num", [1, 4, 5, 6, 13])
@pytest.mark.parametrize("batch_size", [8, 12])  # 5 batches an epoch; or 3, with 4 samples left over
def test_the_batches_after_the_skipped_ones_are_the_same(num: int, batch_size: int) -> None:
    assert seen(num, batch_size=batch_size) == seen(0, batch_size=batch_size)[num:]


def test_a_smaller_last_batch_counts_as_one() -> None:
    data = torch.linspace(-1, 1, 168).reshape(42, 4)
    whole = seen(0, data=feed_of(data, drop_last=False))
    assert len(whole[5][1]) == 2
    assert seen(5, data=feed_of(data, drop_last=False)) == whole[5:]
    assert seen(6, data=feed_of(data, drop_last=False)) == whole[6:]


def test_a_resumed_run_skips_from_its_position() -> None:
    first = toy_run(steps=7)
    state = saved(first)
    assert seen(2, state) == seen(0)[9:]
    kept = toy_run({"state": Restores(state), "skip_batches": SkipBatches(2)}, steps=7)  # which is already done
    assert_same(weights(kept), weights(first))
    assert (kept.progress.step, kept.progress.position) == (7, 9)


def test_a_number_below_one_is_refused() -> None:
    with refused(ValueError, "num"):
        SkipBatches(0)
