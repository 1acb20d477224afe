import math
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from hookdiff_progress.pace import Pace

Seconds = Callable[[int], float]


class Run:
    """A run with a simulated clock.

    `seconds(step)` is the time from the begin of a step to that of the next one, without `waits(step)` for the data.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, seconds: Seconds, first: int = 0, waits: Seconds = lambda step: 0.0
    ) -> None:
        self.now, self.step, self.pace, self.seconds, self.waits = 1000.0, first, Pace(), seconds, waits
        self.waited = 0.0
        patch.setattr("time.monotonic", lambda: self.now)
        self.pace.mark(first, first)

    def train(self, until: int) -> None:
        while self.step < until:
            self.now += self.seconds(self.step) + self.waits(self.step)
            self.waited += self.waits(self.step)
            self.step += 1
            self.pace.mark(self.step, self.step, self.waited)

    def left(self, total: int) -> float:
        left = self.pace.left(total)
        assert left is not None
        return left


@pytest.mark.parametrize("each", [0.002, 0.3, 7.0, 400.0])
@pytest.mark.parametrize("first", [0, 90_000])
def test_a_constant_speed(monkeypatch: pytest.MonkeyPatch, each: float, first: int) -> None:
    run = Run(monkeypatch, lambda _: each, first)
    assert run.pace.left(first + 1000) is None
    for done in (1, 2, 10, 500):
        run.train(first + done)
        assert run.left(first + 1000) == pytest.approx(each * (1000 - done))
        assert run.pace.images_per_second(64) == pytest.approx(64 / each)


def test_the_warm_up_of_the_first_step_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 60.0 if step == 0 else 0.1)
    run.train(2)
    assert run.left(1000) == pytest.approx(99.8)


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 0.5, 2.0, 3.0, 20.0])
@pytest.mark.parametrize("each", [0.01, 0.5, 2.0])
def test_another_speed_is_followed_within_a_minute(monkeypatch: pytest.MonkeyPatch, each: float, factor: float) -> None:
    run = Run(monkeypatch, lambda step: each * (factor if step >= 1000 else 1))
    run.train(1000)
    changed = run.now
    while run.now < changed + 60 or run.step < 1006:
        run.train(run.step + 1)
    assert run.left(run.step + 500) == pytest.approx(500 * each * factor, rel=0.02)


def test_waiting_for_the_data_is_part_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluates(step: int) -> float:
        return 60.0 if step % 100 == 50 else 0.5

    # Eight workers that need four seconds for a batch each: every eighth step waits for all of them.
    run = Run(monkeypatch, evaluates, waits=lambda step: 4.0 if step % 8 == 7 else 0.0)
    run.train(401)
    assert run.pace.images_per_second(64) == pytest.approx(64, rel=0.15)
    assert run.left(801) == pytest.approx(400 + 4 * 59.5, rel=0.15)


def test_long_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 0.05 + (30 if step and step % 100 == 0 else 0))
    run.train(101)
    assert run.left(1000) == pytest.approx(899 * 0.05)  # a single pause may not come again
    for done in (202, 250, 299, 350, 800, 999):
        run.train(done)
        coming = 9 - (done - 1) // 100
        assert run.left(1000) == pytest.approx((1000 - done) * 0.05 + 30 * coming, abs=31), done
        assert run.pace.images_per_second(2) == pytest.approx(40)


def test_two_pauses_that_are_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 3.1 if step in (10, 14) else 0.1)
    for done, most in ((1000, 10_300), (50_000, 5_010), (99_000, 105)):
        run.train(done)
        assert run.left(100_000) <= most


@pytest.mark.parametrize("slow", [2, 3, 5])
def test_slow_first_steps_are_forgotten(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    run = Run(monkeypatch, lambda step: 60.0 if step < slow else 0.1)
    run.train(slow + 4)
    assert run.left(2000) == pytest.approx((2000 - slow - 4) * 0.1, rel=0.01)


def test_an_hour_that_is_lost_once_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 3600 if step == 250 else 0.05 + (2 if step and step % 100 == 0 else 0))
    run.train(600)
    assert run.left(1000) < 60


def test_a_pause_under_way_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 0.5 + (20 if step and step % 10 == 0 else 0))
    run.train(40)
    before = run.left(100)
    run.now += 15
    assert run.left(100) == pytest.approx(before - 15)
    run.now += 1000
    assert run.left(100) >= before - 25


def test_steps_without_an_update_make_a_run_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda _: 1.0)
    for batch in range(1, 40):
        run.now += 1
        run.pace.mark(batch, batch // 2)
    assert run.left(100) == pytest.approx(2 * (100 - 19), rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(-3, 5), st.integers(-2, 5)), max_size=80), st.integers(0, 500))
def test_any_times_give_a_time_that_is_not_negative(marks: list[tuple[float, int, int]], total: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run, batches, steps = Run(patch, lambda _: 1.0), 0, 0
        for seconds, more_batches, more_steps in marks:  # also back, as in a rollback
            run.now, batches, steps = run.now + seconds, max(0, batches + more_batches), max(0, steps + more_steps)
            run.pace.mark(batches, steps)
            left = run.pace.left(total)
            assert left is None or 0 <= left < math.inf
            speed = run.pace.images_per_second(8)
            assert speed is None or 0 <= speed < math.inf
