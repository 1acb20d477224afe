import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hookdiff import Due, Every, LoopConfig, Progress, parse_every
from hookdiff.loop.end import End
from tests.conftest import refused

amounts = st.integers(0, 10**15)
intervals = (
    st.builds(Every, amounts.map(float), st.sampled_from(["steps", "epochs"]))
    | st.builds(Every, amounts, st.sampled_from(["steps", "epochs"]))
    | st.builds(Every, st.floats(0, 1e15), st.just("seconds"))
)


@given(every=intervals)
def test_an_interval_is_read_back_from_its_text(every: Every) -> None:
    assert parse_every(str(every)) == every
    assert parse_every(every) is every


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (500, Every(500)),
        ("500", Every(500)),
        (" 500 steps ", Every(500)),
        ("1 step", Every(1)),
        ("1e6", Every(1_000_000)),
        ("2 epochs", Every(2, "epochs")),
        ("1epoch", Every(1, "epochs")),
        ("30 s", Every(30, "seconds")),
        ("0.5 sec", Every(0.5, "seconds")),
        ("15 min", Every(900, "seconds")),
        ("1.5 h", Every(5400, "seconds")),
        (0, Every(0)),
    ],
)
def test_every_unit_is_read(text: int | str, every: Every) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize(
    "value",
    ["", "soon", "-5", "0 days", "2 Epochs", "h", True, None, 1.5, "1.5 epochs", "0.5", "inf", "nan", "9" * 400],
)
def test_any_other_value_is_refused_and_named(value: Any) -> None:
    with refused(ValueError, f"{value!r:.200}"):
        parse_every(value)


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (Every(1_000_000), "1000000"),
        (Every(2.0, "epochs"), "2 epochs"),
        (Every(1_080_000, "seconds"), "1080000 s"),
        (Every(0.25, "seconds"), "0.25 s"),
    ],
)
def test_an_interval_is_written_in_full(every: Every, text: str) -> None:
    assert str(every) == text


@given(amount=st.integers(1, 50), count=st.integers(1, 200))
def test_steps_and_epochs_are_due_at_their_multiples(amount: int, count: int) -> None:
    for every, other in itertools.permutations((Every(amount), Every(amount, "epochs"))):
        kind = "step" if every.unit == "steps" else "epoch"
        due = Due(every), Due(other)
        assert [getattr(d, f"after_{kind}")(count) for d in due] == [count % amount == 0, False]


@pytest.mark.parametrize("unit", ["steps", "epochs", "seconds"])
def test_an_interval_of_zero_is_never_due(unit: str) -> None:
    due = Due(Every(0, unit))
    assert not any(due.after_step(number) or due.after_epoch(number) for number in range(1, 5))


def test_time_is_measured_from_the_last_due_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [105.0, 109.9, 110.0, 111.0, 119.9, 127.0, 136.0, 137.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    due = Due("10 s", since=100.0)
    seen = []
    while clock:
        seen.append(due.after_step(1))
        assert not due.after_epoch(1)
        clock.pop(0)
    assert seen == [False, False, True, False, False, True, False, True]


@given(outcomes=st.lists(st.sampled_from(["updated", "void", "skipped", "held"]), max_size=20))
def test_every_batch_counts_but_only_an_update_counts_as_a_step(outcomes: list[Any]) -> None:
    progress = Progress(0, 0, 0, 0)
    steps = [progress.consume(8, outcome, 0.5, 2.0) for outcome in outcomes]
    updates = [outcome == "updated" for outcome in outcomes]
    assert progress == Progress(sum(updates), len(outcomes), 0, 8 * len(outcomes))
    assert [step.step for step in steps] == list(itertools.accumulate(map(int, updates)))
    assert all(
        (step.outcome, step.loss, step.grad_norm) == (o, 0.5, 2.0) for step, o in zip(steps, outcomes, strict=True)
    )


@given(counts=st.tuples(*[st.integers(0, 10**9)] * 4))
def test_progress_is_saved_whole(counts: tuple[int, int, int, int]) -> None:
    progress = Progress(0, 0, 0, 0)
    progress.load_state_dict(Progress(*counts).state_dict())
    assert progress == Progress(*counts)
    progress.end_epoch()
    assert progress == Progress(counts[0], counts[1], counts[2] + 1, 0)


@pytest.mark.parametrize(
    ("config", "place", "seconds", "reason"),
    [
        ({}, (10**9, 10**9), 1e9, None),
        ({"steps": 10}, (9, 99), 0, None),
        ({"steps": 10}, (10, 0), 0, "done"),
        ({"epochs": 2}, (99, 1), 0, None),
        ({"epochs": 2}, (0, 2), 0, "done"),
        ({"steps": 10, "epochs": 2}, (10, 1), 0, "done"),
        ({"steps": 10, "epochs": 2}, (5, 2), 0, "done"),
        ({"steps": 10, "max_time": "1 min"}, (5, 0), 59.9, None),
        ({"steps": 10, "max_time": "1 min"}, (5, 0), 60, "time"),
        ({"steps": 10, "max_time": "1 min"}, (10, 0), 61, "done"),  # a run that is done needs no resume
        ({"max_time": 0}, (5, 0), 1e9, None),
    ],
)
def test_a_run_is_over_when_a_limit_is_reached(
    config: dict[str, Any], place: tuple[int, int], seconds: float, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, epoch = place
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    end = End()
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 + seconds)
    assert end.is_reached(LoopConfig(**config), Progress(step, step, epoch, 0)) == (reason is not None)
    assert end.reason == reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in ("steps", "epochs", "batch_size", "micro_batch", "log_every")),
        *(("seed", -1), ("max_time", "2 epochs"), ("max_time", 500)),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: Any) -> None:
    with refused(ValueError, key):
        LoopConfig(**{key: value})
