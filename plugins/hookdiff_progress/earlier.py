"""How much longer a run took than its steps alone, before it was resumed."""

import statistics
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from hookdiff.history import BEGINS, History

_FEWEST = 10  # intervals between two lines


def overhead(run_dir: Path) -> float:
    """Return the time that the earlier processes of a run took, divided by that of their steps without pauses.

    Pauses are evaluations, samples and saves. The usual step is the median over the intervals between two lines of
    metrics.jsonl, so pauses in most of these count as steps. 1 if there are too few lines.
    """
    try:
        history = History(run_dir)
        steps, times = history.series.get("time", ([], []))
        begins = sorted(logged.time for logged in history.events if logged.event.kind in BEGINS)
    except OSError:  # the bar can do without
        return 1.0
    process = [bisect_right(begins, time) for time in times]
    spans = [
        (times[after] - times[before], steps[after] - steps[before])
        for before, after in pairwise(range(len(steps)))
        if process[before] == process[after] and times[after] > times[before]
    ]
    if len(spans) < _FEWEST:
        return 1.0
    usual = statistics.median(seconds / made for seconds, made in spans)
    return max(1.0, sum(seconds for seconds, _ in spans) / sum(made for _, made in spans) / usual)
