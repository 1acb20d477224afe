from typing import Any

import pytest
from attrs import define, field

from hookdiff import Loop, Periodic, hookimpl
from hookdiff.testing.toy import toy_loop


@define(eq=False)
class Notes(Periodic):
    """Keeps the steps of its calls. It has the hooks of the base class too, and calls no super()."""

    steps: list[int] = field(init=False, factory=list)
    heard: list[str] = field(init=False, factory=list)

    def act(self, loop: Loop) -> None:
        self.steps.append(loop.progress.step)

    @hookimpl
    def on_start(self) -> None:
        self.heard.append("on_start")

    @hookimpl
    def after_optimizer_step(self) -> None:
        self.heard.append("after_optimizer_step")

    @hookimpl
    def on_epoch_end(self) -> None:
        self.heard.append("on_epoch_end")

    @hookimpl
    def on_stop(self) -> None:
        self.heard.append("on_stop")


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (3, 8, [3, 6, 8]),
        (4, 8, [4, 8]),  # the last step is due, and is not repeated
        ("1 epochs", 12, [5, 10, 12]),
        ("2 epochs", 10, [10]),
        (0, 8, [8]),
        ("1 h", 8, [8]),
    ],
)
def test_it_acts_at_intervals_and_at_the_end(every: Any, steps: int, expected: list[int]) -> None:
    notes = Notes(every=every)
    toy_loop({"notes": notes}, steps=steps).run()
    assert notes.steps == expected


@pytest.mark.parametrize("reason", ["plugin", "signal", "time"])
def test_it_does_not_act_at_the_end_of_a_run_that_is_not_done(reason: Any) -> None:
    notes = Notes(every=3)
    with toy_loop({"notes": notes}, steps=8) as loop:
        for step in loop.steps():
            if step.step == 4:
                loop.stop(reason)
    assert notes.steps == [3]


def test_a_subclass_has_hooks_of_its_own() -> None:
    notes = Notes(every=2)
    toy_loop({"notes": notes}, steps=5).run()
    assert notes.heard == ["on_start", *["after_optimizer_step"] * 5, "on_epoch_end", "on_stop"]
    assert notes.steps == [2, 4, 5]


def test_a_plugin_runs_twice() -> None:
    notes = Notes(every=0)
    toy_loop({"notes": notes}, steps=5).run()
    toy_loop({"notes": notes}, steps=5).run()
    assert notes.steps == [5, 5]


def test_a_class_that_does_nothing_is_refused() -> None:
    class Idle(Periodic):
        """Has no `act`."""

    with pytest.raises(TypeError, match="act"):
        Idle()  # type: ignore[abstract]
