from typing import Any

import pytest
import torch

from hookdiff import Batch, Loop
from hookdiff.builtin.skip import SkipBatches
from hookdiff.images import feed_of
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import Restores, acting, refused, saved, toy_run


def seen(num: int, state: dict[str, Any] | None = None, **config: Any) -> list[tuple[int, list[int], float]]:
    """Return position, indices and noise of the batches that are trained on."""
    batches: list[tuple[int, list[int], float]] = []

    def note(loop: Loop, batch: Batch) -> None:
        assert batch.indices is not None
        batches.append((loop.progress.position, batch.indices.tolist(), float(batch.draws["noise"].sum())))

    skips = {"skip_batches": SkipBatches(num)} if num else {}
    toy_loop({"seen": acting(before_step=note), "state": Restores(state), **skips}, epochs=4, **config).run()
    return batches


@pytest.mark.parametrize("num", [1, 4, 5, 6, 13])
@pytest.mark.parametrize(
    ("batch_size", "rows", "options"),  # 5 batches an epoch; 3, with 4 samples left over; 1; 6, the last with 2 samples
    [(8, 40, {}), (12, 40, {}), (12, 40, {"limit": 5}), (8, 42, {"drop_last": False})],
)
def test_the_batches_after_the_skipped_ones_are_the_same(num: int, batch_size: int, rows: int, options: Any) -> None:
    feed = feed_of(torch.linspace(-1, 1, 4 * rows).reshape(rows, 4), **options)
    assert seen(num, data=feed, batch_size=batch_size) == seen(0, data=feed, batch_size=batch_size)[num:]


def test_a_resumed_run_skips_from_its_position() -> None:
    first = toy_run(steps=7)
    state = saved(first)
    assert seen(2, state) == seen(0)[9:]
    done = toy_run({"state": Restores(state), "skip_batches": SkipBatches(2)}, steps=7)  # which is already done
    assert_same(weights(done), weights(first))
    assert (done.progress.step, done.progress.position) == (7, 9)


def test_a_number_below_one_is_refused() -> None:
    with refused(ValueError, "num"):
        SkipBatches(0)
