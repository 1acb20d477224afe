import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff import PASS, Finding, Loop, NonFinite, SampleRequest, Verdict, builtin_plugins, hookimpl
from hookdiff.log.event import Event
from hookdiff.run_dir.events_jsonl import read_events
from hookdiff.run_dir.history import History
from hookdiff_checkpoint import Checkpoint
from tests.conftest import Restores, RollBackAt, StopAt, acting, check_facts, toy_run


def train(run_dir: Path | None, plugins: Mapping[str, object], **options: Any) -> Loop:
    return toy_run({**builtin_plugins(), **plugins}, run_dir=run_dir, **{"steps": 6, "log_every": 1, **options})


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    return [(line.event.kind, line.step) for line in read_events(run_dir / "events.jsonl")]


def test_start_checkpoints_and_the_end_of_a_run_are_events(tmp_path: Path) -> None:
    with train(tmp_path, {"checkpoint": Checkpoint(every=4)}) as loop:
        loop.sample(SampleRequest(1))  # this trains nothing, and so it is no event
    assert kinds(tmp_path) == [("start", 0), ("checkpoint", 4), ("checkpoint", 6), ("stop", 6)]
    start, saved, _, stop = (line.event for line in read_events(tmp_path / "events.jsonl"))
    assert {"python", "torch", "hookdiff"} <= set(start.details["versions"])
    assert start.details["device"].startswith("cpu")
    check_facts(saved.text, "step-00000004")
    assert (stop.severity, stop.details) == ("info", {"reason": "done"})


def test_a_resumed_run_keeps_the_events_before_it(tmp_path: Path) -> None:
    train(tmp_path, {"checkpoint": Checkpoint(every=2), "stop": StopAt(3)})
    before = (tmp_path / "events.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    train(tmp_path, {"checkpoint": Checkpoint(every=2)}, resume=True)
    assert (tmp_path / "events.jsonl").read_text().startswith(before)
    again = [("resume", 2), ("checkpoint", 4), ("checkpoint", 6), ("stop", 6)]
    assert kinds(tmp_path) == [("start", 0), ("checkpoint", 2), ("checkpoint", 3), ("stop", 3), *again]
    assert History(tmp_path).events[3].event.details["reason"] == "plugin"


def test_a_branch_begins_with_the_events_of_its_trunk_up_to_its_own_first_step(tmp_path: Path) -> None:
    trunk, branch, early = tmp_path / "trunk", tmp_path / "branch", tmp_path / "early"
    train(trunk, {"checkpoint": Checkpoint(every=4, keep_last=2), "trouble": Trouble()})
    train(branch, {"checkpoint": Checkpoint(every=8)}, steps=8, resume=trunk)
    assert (branch / "events.jsonl").read_text().startswith((trunk / "events.jsonl").read_text())
    assert kinds(branch)[-3:] == [("resume", 6), ("checkpoint", 8), ("stop", 8)]
    train(early, {"checkpoint": Checkpoint(every=8)}, steps=5, resume=trunk / "checkpoints" / "step-00000004")
    before = [line for line in kinds(trunk) if line[1] <= 4]
    assert len(before) < len(kinds(trunk))
    assert kinds(early) == [*before, ("resume", 4), ("checkpoint", 5), ("stop", 5)]


class Trouble:
    """Makes the step after update 2 void, skips the batch after update 3, and reports a finding after update 4."""

    def __init__(self) -> None:
        self.is_over = False

    @hookimpl(wrapper=True)
    def unscale(self, loop: Loop) -> Any:
        result = yield
        if loop.progress.step == 2 and not self.is_over:
            self.is_over = True
            return False
        return result

    @hookimpl(wrapper=True)
    def make_batch(self, loop: Loop) -> Any:
        batch = yield
        return batch[:0] if loop.progress.position == 4 else batch

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == 4:
            loop.log.report(Finding("warning", "hot", "70 degrees", "a fan"))
            loop.log.event(Event("mine", "a\nb", details={"number": 1}))


def test_steps_without_an_update_and_findings_are_events(tmp_path: Path) -> None:
    train(tmp_path, {"trouble": Trouble()})
    events = read_events(tmp_path / "events.jsonl")[1:-1]
    assert kinds(tmp_path)[1:-1] == [("void", 2), ("skipped", 3), ("finding", 4), ("mine", 4)]
    assert [line.event.details.get("position") for line in events[:2]] == [2, 4]
    assert events[2].event == Event("finding", "hot\n  70 degrees\n  try a fan", "warning")
    assert events[3].event == Event("mine", "a\nb", "info", {"number": 1})


def test_a_step_that_a_plugin_holds_back_is_an_event(tmp_path: Path) -> None:
    holds = acting(optimizer_step=lambda loop: False if loop.progress.position in (2, 3) else PASS)
    train(tmp_path, {"holds": holds}, steps=3)
    held = [line for line in read_events(tmp_path / "events.jsonl") if line.event.kind == "held"]
    assert [(line.step, line.event.details["position"]) for line in held] == [(2, 2), (2, 3)]
    assert {line.event.severity for line in held} == {"info"}


class Explodes(RollBackAt):
    """Makes the loss of the batch at `position` NaN, and gives a verdict."""

    def __init__(self, position: int, verdict: Verdict) -> None:
        super().__init__(position)
        self.verdict = verdict

    @hookimpl
    def on_nan(self, report: NonFinite) -> Verdict:
        report.notes["cause"] = "a test"
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "after"),
    [("skip", [("skipped", 3)]), ("rollback", [("rollback", 2), ("skipped", 2)]), ("stop", [("stop", 3)])],
)
def test_a_step_that_is_not_finite_is_an_event(tmp_path: Path, verdict: Verdict, after: list[Any]) -> None:
    train(tmp_path, {"keeper": (keeper := Restores(at=2)), "explodes": Explodes(3, verdict)})
    assert keeper.state is not None
    events = read_events(tmp_path / "events.jsonl")
    at = [line.event.kind for line in events].index("nan")
    check_facts(events[at].event.text, "step 4", "nan", "a test")  # with the notes of the other plugins
    assert (events[at].event.severity, events[at].event.details) == ("error", {"position": 3})
    assert [(line.event.kind, line.step) for line in events[at + 1 :]][: len(after)] == after


@pytest.mark.parametrize("hook", ["before_step", "on_stop"])
def test_an_error_is_named_in_the_last_event_and_the_outcome(tmp_path: Path, hook: str) -> None:
    def fail(loop: Loop) -> None:
        if loop.progress.step == 2:
            raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, {"fails": acting(**{hook: fail})}, steps=3 if hook == "before_step" else 2)
    last = read_events(tmp_path / "events.jsonl")[-1]
    assert (last.step, last.event.kind, last.event.severity) == (2, "stop", "error")
    check_facts(last.event.text, "ZeroDivisionError", "by nothing")
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["reason"], outcome["message"]) == ("error", "ZeroDivisionError: by nothing")


def test_texts_and_distributions_are_cut_on_resume_and_the_network_is_the_first_text(tmp_path: Path) -> None:
    def log(loop: Loop) -> None:
        loop.log.texts({"note": f"at {loop.progress.step}"})
        loop.log.distributions({"weights": loop.gradients.norms})

    notes_each_step = acting(after_optimizer_step=log)
    train(tmp_path, {"notes": notes_each_step, "checkpoint": Checkpoint(every=2), "stop": StopAt(3)})
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    train(tmp_path, {"notes": notes_each_step, "checkpoint": Checkpoint(every=2)}, resume=True)
    history = History(tmp_path)
    notes = [(line.step, line.values["note"]) for line in history.texts if "note" in line.values]
    assert notes == [(step, f"at {step}") for step in range(1, 7)]
    assert "Linear" in history.texts[0].values["model"]
    assert [line.step for line in history.distributions] == list(range(1, 7))
    assert sum(history.distributions[0].values["weights"].counts) == 4


def test_without_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None, {"trouble": Trouble()})
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_nothing(second_rank: None, tmp_path: Path) -> None:
    train(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_each_line_is_strict_json_whatever_is_logged(tmp_path: Path) -> None:
    def log(loop: Loop) -> None:
        details = {"v": math.nan, "deep": [{"w": (math.inf, 1.0)}], "bad \udc80": "a \udc80"}
        loop.log.event(Event("odd", "b \udc80", details=details))
        loop.log.texts({"prompt \udc80": "c \udc80"})
        loop.log.distributions({"weights \udc80": torch.zeros(1)})
        loop.log({"loss \udc80": -math.inf})

    train(tmp_path, {"odd": acting(after_optimizer_step=log)}, steps=1)
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            whole = json.loads(line, parse_constant=pytest.fail)
            assert list(whole)[:2] == ["step", "time"]
            repr(whole).encode()  # there is no lone surrogate in it
    (odd,) = (line.event for line in History(tmp_path).events if line.event.kind == "odd")
    assert odd.details == {"v": None, "deep": [{"w": [None, 1.0]}], "bad \\udc80": "a \\udc80"}
    assert odd.text == "b \\udc80"
    assert "loss \\udc80" in History(tmp_path).series
