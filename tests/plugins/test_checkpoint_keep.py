from pathlib import Path

import pytest

from hookdiff_checkpoint.folder import CheckpointInfo
from hookdiff_checkpoint.keep import choose

# Newest first: the run was stopped twice, and what it saved then is not scheduled.
LOSSES = {9: 0.5, 8: 0.4, 7: 0.3, 6: 0.1, 5: 0.6, 4: 0.2}
FOUND = [CheckpointInfo(Path(f"{n}"), (n, 0), n, n not in (9, 8), {"loss": loss}) for n, loss in LOSSES.items()]


@pytest.mark.parametrize(
    ("last", "every", "best", "highest", "kept"),
    [
        (1, 0, None, False, [9, 7]),  # 7 is what a rollback goes back to
        (2, 0, None, False, [9, 8, 7]),
        (4, 0, None, False, [9, 8, 7, 6]),
        (1, 4, None, False, [9, 8, 7, 4]),
        (1, 0, "loss", False, [9, 7, 6]),
        (1, 0, "loss", True, [9, 7, 5]),
        (1, 0, "fd", False, [9, 7]),
    ],
)
def test_the_newest_the_scheduled_the_regular_and_the_best_are_kept(
    last: int, every: int, best: str | None, highest: bool, kept: list[int]
) -> None:
    assert [one.number for one in choose(FOUND, last, every, best, highest)] == kept
