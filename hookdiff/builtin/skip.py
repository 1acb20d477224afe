"""The plugin that skips batches at the start of a run, such as a batch with a NaN."""

import logging

from attrs import define, field
from attrs.validators import ge

from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop

logger = logging.getLogger("hookdiff")


@define(eq=False)
class SkipBatches:
    """Skips the next batches of a run before any other plugin starts, in the same way as `on_nan`.

    The batches that follow are the same as if the skipped batches had been trained on. An epoch that ends meanwhile is
    counted, but `on_epoch_end` is not called.
    """

    num: int = field(validator=ge(1))  # number of batches to skip

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        progress, feed = loop.progress, loop.feed
        first = progress.position
        for _ in range(self.num):
            while not (size := feed.next_size(progress.epoch, progress.samples)):
                progress.end_epoch()
            progress.consume(size, "skipped")
        logger.info(
            "skipped batches: training begins at batch %s instead of %s", f"{progress.position:,}", f"{first:,}"
        )
