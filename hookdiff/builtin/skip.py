"""Passing over batches: the way past one that a run cannot digest."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import ge

from hookdiff.hookspecs import hookimpl

if TYPE_CHECKING:
    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")


@define(eq=False)
class SkipBatches:
    """Passes over the next `num` batches of a run, first of all who start, as if on_nan had decided to skip them.

    The position moves on, so what follows is what would have followed. An epoch that ends on the way is counted, and
    nobody hears of its end: nothing was trained.
    """

    num: int = field(validator=ge(1))

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        """Move the progress on; of a run that resumes it is loaded by now."""
        progress, feed = loop.progress, loop.feed
        first = progress.position
        for _ in range(self.num):
            if feed.exhausted(progress.samples):
                progress.end_epoch()
            left = len(feed.training) - progress.samples
            progress.consume(min(feed.batch_size, left), "skipped", math.nan, math.nan)
        last = progress.position - 1
        log.info("skipped batch %d" if first == last else "skipped batches %d to %d", *sorted({first, last}))
