"""Tests of the learning rate schedule."""

import pytest

from hookdiff.testing import assert_resumes
from hookdiff_example_lr_schedule import ExampleLrSchedule
from hookdiff_lr import LR


def test_the_rate_begins_at_the_highest_after_the_warm_up_and_halves() -> None:
    schedule = ExampleLrSchedule(half_life=10)
    factors = [schedule.factor(step, warmup=5, total=100) for step in (5, 15, 25, 1000)]
    assert factors == pytest.approx([1, 1 / 2, 1 / 4, 0], abs=1e-6)


def test_a_run_with_it_resumes() -> None:
    assert_resumes(lambda: LR(schedule=ExampleLrSchedule(half_life=4), warmup=2))
