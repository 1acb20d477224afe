"""Skipping batches at the start, such as one with a NaN."""

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
    """Skips the next `num` batches of a run, as if on_nan had decided to skip them, before any other plugin starts.

    The position moves on, so the same batches follow as if these had been trained on. An epoch that ends on the way is
    counted, but `on_epoch_end` does not fire, since nothing was trained.
    """

    num: int = field(validator=ge(1))

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        """Move the progress on; that of a resumed run is loaded by now."""
        progress, feed = loop.progress, loop.feed
        first = progress.position
        for _ in range(self.num):
            if feed.exhausted(progress.samples):
                progress.end_epoch()
            left = len(feed.training) - progress.samples
            progress.consume(min(feed.batch_size, left), "skipped", math.nan, math.nan)
        last = progress.position - 1
        log.info("skipped batch %d" if first == last else "skipped batches %d to %d", *sorted({first, last}))
