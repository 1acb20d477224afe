"""Times the steps of a Loop, as they are and part by part."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import define, evolve
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from hookdiff import Config, Every, Loop, UserError, build_loop
from hookdiff.authors import Span, Stopwatch, wait_for
from hookdiff.loop import HOOKS

SETTLING = 3  # steps that are not timed: allocators and kernels settle
_TRACED = 3  # steps in a trace
_SPARE = 20  # steps that a run needs for its warm-up, besides those that settle and those that are timed
_LONG = Every(86400, "seconds")
# Names for the work of the loop itself between two hooks, by the hook before or the hook after.
_AFTER = {"unscale": "finite check"}
_BEFORE = {"make_batch": "data"}
_LOOP = "loop"  # the rest of the loop's own work


@define
class Profile:
    """The time of a step."""

    device: str
    images: int  # images of a step
    seconds: float  # median seconds of a step
    parts: Mapping[str, float]  # seconds of a step by part, the longest first; the sum is a little above `seconds`
    first: int  # steps of the run before the first that is timed; the warm-up of the rate is over
    length: int | None  # steps of the run; None without an end
    is_longer: bool  # whether the run of the config was too short, so that it was made longer
    busy: float | None = None  # share of the time in which the GPU computes; None on other devices


class _Over(Exception):
    """Ends a run in which nothing is to be saved."""


@contextmanager
def running(config: Config, num: int) -> Iterator[tuple[Loop, Callable[[], float]]]:
    """Yield a Loop in a temporary directory, and a function that makes a step and returns its seconds, for `num` steps.

    All plugins except `progress` act as in a run. The run ends as if by an error, so that no plugin draws or saves at
    its end. The warm-up of the rate is over: at a rate near 0, weights that begin at 0 stay so small that a CPU takes
    many times as long to compute with them.
    """
    with TemporaryDirectory() as folder:
        loop = _build(config, num + SETTLING, Path(folder) / config.run.name)
        try:
            with loop:
                steps = loop.steps()

                def step() -> float:
                    begun = time.perf_counter()
                    if next(steps, None) is None:
                        raise UserError(f"the run ended after {loop.progress.step} steps: {loop.end.reason}")
                    wait_for(loop.device)
                    return time.perf_counter() - begun

                _warm_up(loop, step, num + SETTLING)
                for _ in range(SETTLING):
                    step()
                yield loop, step
                raise _Over
        except _Over:
            pass


def _build(config: Config, num: int, run_dir: Path) -> Loop:
    """Build the Loop of `config`, made longer if `num` steps and a warm-up do not fit in."""
    has_end = config.run.steps is not None or config.run.epochs is not None
    run = evolve(config.run, max_time=Every(0, "seconds") if has_end else _LONG)
    config = evolve(config, run=run, plugins={n: part for n, part in config.plugins.items() if n != "progress"})
    loop = build_loop(config, run_dir)
    if (length := _length(loop)) is not None and length < num + _SPARE:
        longer = evolve(config, run=evolve(run, steps=num + _SPARE, epochs=None))
        loop = build_loop(longer, run_dir, feed=loop.feed)
    return loop


def _length(loop: Loop) -> int | None:
    return loop.config.planned_steps(loop.feed)


def _warm_up(loop: Loop, step: Callable[[], float], num: int) -> None:
    """Make steps until the rates stop rising, skipping more and more steps in between; leave `num` steps of the run."""
    last, rate, stride, reached = (_length(loop) or math.inf) - num, -1.0, 1.0, 0
    while loop.progress.step < last:
        step()
        before, rate = rate, sum(float(group["lr"]) for each in loop.optimizers for group in each.param_groups)
        if rate <= before:  # the step before had the highest rate
            loop.set_step(reached)
            return
        reached = loop.progress.step
        loop.set_step(reached + int(min(stride, last - reached)))
        stride *= 1.5


def measure(config: Config, steps: int, trace: Path | None = None) -> Profile:
    """Return the profile of `steps` steps of `config`; write a Chrome trace of some more to the file `trace`.

    Raises:
        UserError: for a config that cannot be built.
        OSError: for a file that cannot be written.
    """
    with running(config, 2 * steps + _TRACED) as (loop, step):
        first, length = loop.progress.step, _length(loop)
        seconds = statistics.median(step() for _ in range(steps))
        stopwatch = Stopwatch(loop.device)
        loop.plugins.instrument(stopwatch)
        for _ in range(steps):
            step()
        loop.plugins.instrument(None)
        busy = None
        if trace or loop.device.type == "cuda":
            busy = _traced(loop, step, trace)
        each = {name: total / steps for name, total in parts_of(stopwatch).items()}
        is_longer = length != config.run.planned_steps(loop.feed)
        return Profile(loop.device.type, loop.config.batch_size, seconds, each, first, length, is_longer, busy)


def _traced(loop: Loop, step: Callable[[], float], trace: Path | None) -> float | None:
    """Write a trace with all operators, if wanted, and return the share of the time in which a GPU computes."""
    on_gpu = loop.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    loop.plugins.instrument(lambda plugin, hook: record_function(f"{plugin}: {hook}"))
    with profile(activities=activities, acc_events=True) as profiled:  # torch 2.11 warns without it
        seconds = sum(step() for _ in range(_TRACED))
    loop.plugins.instrument(None)
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)  # without the folder, torch writes nothing, and raises no error
        profiled.export_chrome_trace(str(trace))
    if not on_gpu:
        return None
    return busy_seconds(profiled.events() or ()) / seconds


def busy_seconds(events: Iterable[Any]) -> float:
    """Return the seconds in which a GPU did at least one thing, from the events of torch's profiler.

    A kernel also counts in the operator that launched it, and in annotations around it, so both are left out.
    """
    work = (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    total = end = 0.0
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in work):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def parts_of(stopwatch: Stopwatch) -> dict[str, float]:
    """Return the seconds of each part of the timed steps, the longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in stopwatch.spans():
        seconds[_part(span)] += span.seconds
    return dict(sorted(seconds.items(), key=lambda part: -part[1]))


def _part(span: Span) -> str:
    if span.running is None:
        return _AFTER.get(span.after) or _BEFORE.get(span.before, _LOOP)
    plugin, hook = span.running
    return HOOKS[hook].work or _LOOP if plugin == "defaults" else f"{plugin}: {hook}"
