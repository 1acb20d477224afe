"""A run whose steps become slow says so once, with the cause."""

import subprocess
import sys
import time

import pytest
import torch

from hookdiff import PASS, hookimpl
from hookdiff.builtin.slow_steps import SlowSteps, shown
from hookdiff.machine import Usage, num_cpus
from hookdiff.testing import toy_loop
from tests.conftest import check_facts


class Sleeps:
    """Makes the steps from `begin` to `end` slow."""

    def __init__(self, begin, end, seconds=0.6):
        self.begin, self.end, self.seconds, self.events = begin, end, seconds, []

    @hookimpl
    def compute_loss(self, loop):
        time.sleep(self.seconds if self.begin <= loop.progress.step < self.end else 0.005)
        return PASS

    @hookimpl
    def on_event(self, event, step):
        if event.kind == "finding":
            self.events.append((step, event.text))


def events_of(*stretches, steps=60):
    plugins = {f"sleeps{k}": Sleeps(*stretch) for k, stretch in enumerate(stretches)}
    toy_loop({"slow_steps": SlowSteps(), **plugins}, steps=steps).run()
    return plugins["sleeps0"].events


def test_a_slow_stretch_is_reported_once_and_the_next_one_again():
    events = events_of((30, 36), (50, 56))
    assert [step for step, _ in events] == [34, 54]
    check_facts(events[0][1], "steps have become slow", "usually")


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0673, "67.3 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (2.48, "2.48 s")]
)
def test_the_time_of_a_step_is_shown_in_a_unit_that_fits(seconds, expected):
    assert shown(seconds) == expected


def test_a_few_slow_steps_are_no_news():
    assert events_of((30, 33)) == []
    assert events_of((30, 40, 0.1)) == []


def test_steps_that_are_slow_from_the_start_are_the_usual_ones():
    assert events_of((0, 60, 0.01)) == []


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (Usage(10.0, 10.0, 25.0, 0, 0.0), "other processes use 1.5 of the"),
        (Usage(10.0, 10.0, 10.0, 10_000, 0.0), "1000 pages a second"),
        (Usage(10.0, 10.0, 25.0, 0, 4.0), "4.0 of 10.0 s"),
        (Usage(10.0, 10.0, 11.0, 0, None), None),
        (Usage(10.0, 10.0, None, 0, None), None),
    ],
)
def test_the_cause_is_what_the_counts_show(counts, words):
    cause = counts.cause()
    assert cause is None if words is None else words in cause


@pytest.mark.parametrize(("threads", "is_advised"), [(1, False), (2, True)])
def test_fewer_threads_are_advised_where_there_are_several(monkeypatch, threads, is_advised):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert ("run.threads = 1" in Usage(10.0, 10.0, 25.0, 0, 0.0).cause()) == is_advised


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the time of all processes")
def test_another_process_is_the_cause():
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cpus())]
    try:
        before = Usage.now()
        time.sleep(1)
        cause = Usage.now().since(before).cause()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert cause is not None
    assert "other processes" in cause
