"""Times the steps of a Loop, as they are and part by part."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import define, evolve
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from hookdiff import Config, Every, Loop, UserError, build_loop
from hookdiff.device_part import wait_for
from hookdiff_profile.spans import Recorder

SETTLING = 3  # steps that are not timed: allocators and kernels settle
_TRACED = 3  # steps
_ENDLESS = 1_000_000_000  # steps


@define
class Profile:
    """The time of a step."""

    device: str
    images: int  # of a step
    seconds: float  # of a step, median
    parts: Mapping[str, float]  # seconds of a step by part, the longest first; their sum is a little longer
    busy: float | None = None  # share of the time in which the GPU computes; None on other devices


class _Over(Exception):
    """Ends a run in which nothing is to be saved."""


@contextmanager
def running(config: Config) -> Iterator[tuple[Loop, Callable[[], float]]]:
    """Yield a Loop in a temporary directory, and a function that makes a step and returns its seconds.

    Plugins but `progress` do as in a run, and the run ends as if by an error, so that none draws or saves at the end.
    """
    with TemporaryDirectory() as folder:
        endless = evolve(config.run, steps=_ENDLESS, epochs=None, max_time=Every(0, "seconds"))
        quiet = {name: part for name, part in config.plugins.items() if name != "progress"}
        loop = build_loop(evolve(config, run=endless, plugins=quiet), Path(folder) / config.run.name)
        try:
            with loop:
                steps = loop.steps()

                def step() -> float:
                    begun = time.perf_counter()
                    if next(steps, None) is None:
                        raise UserError(f"the run ended after {loop.progress.step} steps: {loop.end.reason}")
                    wait_for(loop.device)
                    return time.perf_counter() - begun

                for _ in range(SETTLING):
                    step()
                yield loop, step
                raise _Over
        except _Over:
            pass


def measure(config: Config, steps: int, trace: Path | None = None) -> Profile:
    """Return the profile of `steps` steps of `config`; write a Chrome trace of some more to the file `trace`.

    Raises UserError for a config that cannot be built, and OSError for a file that cannot be written.
    """
    with running(config) as (loop, step):
        seconds = statistics.median(step() for _ in range(steps))
        recorder = Recorder(loop.device)
        loop.plugins.instrument(recorder)
        for _ in range(steps):
            step()
        loop.plugins.instrument(None)
        busy = None
        if trace or loop.device.type == "cuda":
            busy = _traced(loop, step, trace)
        parts = {name: total / steps for name, total in recorder.parts().items()}
        return Profile(loop.device.type, loop.config.batch_size, seconds, parts, busy)


def _traced(loop: Loop, step: Callable[[], float], trace: Path | None) -> float | None:
    """Write a trace with all operators, if wanted, and return the share of the time in which a GPU computes."""
    on_gpu = loop.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    loop.plugins.instrument(lambda plugin, hook: record_function(f"{plugin}: {hook}"))
    with profile(activities=activities, acc_events=True) as profiled:  # torch 2.11 warns without it
        seconds = sum(step() for _ in range(_TRACED))
    loop.plugins.instrument(None)
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)  # torch writes nothing without it, and does not say so
        profiled.export_chrome_trace(str(trace))
    if not on_gpu:
        return None
    return busy_seconds(profiled.events() or ()) / seconds


def busy_seconds(events: Iterable[Any]) -> float:
    """Return the seconds in which a GPU did at least one thing, from the events of torch's profiler.

    A kernel also counts in the operator that launched it, and in each annotation around it: these are left out.
    """
    work = (one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation)
    total = end = 0.0
    for start, stop in sorted((one.time_range.start, one.time_range.end) for one in work):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6
