import copy
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hookdiff import Loop, hookimpl
from hookdiff.builtin import Metrics
from hookdiff.builtin.metrics import read_metrics
from hookdiff.testing import toy_loop


class Saver:
    """Keeps the state of the run at one step, and restores one."""

    def __init__(self, at: int = 0, state: Any = None) -> None:
        self.at, self.state = at, state

    @hookimpl
    def restore(self) -> Any:
        return self.state

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == self.at:
            self.state = copy.deepcopy(loop.state_dict())


def train(run_dir: Path | None, at: int = 0, extra: Mapping[str, object] | None = None) -> Any:
    """Train 20 steps, and return the state at the step `at`."""
    saver = Saver(at)
    toy_loop({"metrics": Metrics(), "saver": saver, **(extra or {})}, run_dir=run_dir).run()
    return saver.state


def goes_on(
    run_dir: Path, state: Any, steps: int = 20, resume: Path | bool = True, extra: Mapping[str, object] | None = None
) -> Any:
    """Go on from `state`, and return the state at the end."""
    plugins = {"metrics": Metrics(), "saver": Saver(state=state), **(extra or {})}
    loop = toy_loop(plugins, run_dir=run_dir, steps=steps, resume=resume)
    loop.run()
    return loop.state_dict()


def length(state: Any) -> Any:
    return state["plugins"]["metrics"]["bytes"]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_step_that_logged_is_one_line(tmp_path: Path) -> None:
    began = time.time()
    train(tmp_path)
    told = lines(tmp_path)
    assert [line["step"] for line in told] == [5, 10, 15, 20]
    for line in told:
        assert list(line) == ["step", "time", "loss", "grad_norm"]
        assert began - 1 <= line["time"] <= time.time() + 1


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    class Reader:
        @hookimpl
        def before_step(self, loop: Loop) -> None:
            assert len(lines(tmp_path) if loop.progress.step >= 5 else []) == loop.progress.step // 5

    train(tmp_path, extra={"reader": Reader()})


def test_the_run_directory_is_made_when_the_first_line_is(tmp_path: Path) -> None:
    class Look:
        @hookimpl
        def before_step(self, loop: Loop) -> None:
            assert (tmp_path / "a").exists() == (loop.progress.step >= 5)

    train(tmp_path / "a" / "b", extra={"look": Look()})
    assert len(lines(tmp_path / "a" / "b")) == 4


def test_without_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None)
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    loop = toy_loop({"metrics": Metrics()}, run_dir=tmp_path)
    loop.is_main = False
    loop.run()
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_replaces_the_lines_of_an_earlier_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    assert caplog.messages == []
    train(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    train(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]
    assert caplog.messages == [
        f"{tmp_path}/metrics.jsonl: replaces the 4 lines of an earlier run",
        f"{tmp_path}/metrics.jsonl: replaces the 1 line of an earlier run",
    ]


@pytest.mark.parametrize("at", [3, 5, 12, 20])
def test_a_resumed_run_cuts_what_came_after_its_checkpoint(tmp_path: Path, at: int) -> None:
    state = train(tmp_path, at)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    end = goes_on(tmp_path, state)
    after = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert after[: at // 5] == before[: at // 5]
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]
    assert length(end) == (tmp_path / "metrics.jsonl").stat().st_size


def test_the_first_step_of_a_resumed_run_cuts_the_file_whether_or_not_it_writes(tmp_path: Path) -> None:
    state = train(tmp_path, 10)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(before) == 4

    class Looks:
        @hookimpl
        def on_start(self) -> None:
            assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before)

        @hookimpl(trylast=True)
        def before_step(self) -> None:
            assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])

    end = goes_on(tmp_path, state, steps=14, extra={"looks": Looks()})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])
    assert length(end) == length(state)


def test_a_state_without_lines_empties_the_file(tmp_path: Path) -> None:
    state = train(tmp_path, 3)
    goes_on(tmp_path, state, steps=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_a_branch_begins_with_the_lines_of_the_run_it_comes_from(tmp_path: Path, of: str) -> None:
    state = train(tmp_path / "run", 10)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    goes_on(tmp_path / "branch", state, steps=17, resume=checkpoint if of == "checkpoint" else tmp_path / "run")
    after = (tmp_path / "branch" / "metrics.jsonl").read_bytes()
    assert after.splitlines()[:2] == before.splitlines()[:2]
    assert [line["step"] for line in lines(tmp_path / "branch")] == [5, 10, 15]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_file_that_was_lost_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = train(tmp_path, 10)
    (tmp_path / "metrics.jsonl").unlink()
    goes_on(tmp_path, state)
    assert [line["step"] for line in lines(tmp_path)] == [15, 20]
    told = "is not there, and begins anew after step 10"
    assert caplog.messages == [f"{tmp_path}/metrics.jsonl {told}"]


def test_a_branch_of_a_checkpoint_without_its_run_begins_with_no_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = train(tmp_path / "run", 10)
    (tmp_path / "lone").mkdir()
    goes_on(tmp_path / "branch", state, resume=tmp_path / "lone")
    assert [line["step"] for line in lines(tmp_path / "branch")] == [15, 20]
    assert caplog.messages == []


def test_any_end_that_was_lost_is_cut_back_to_a_whole_line_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = train(tmp_path, 10)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first, both = whole.index(b"\n") + 1, length(state)
    for left in (0, 1, first - 1, first, first + 1, both - 1, both, both + 1):
        for zeros in (0, len(whole) - left):  # of some file systems, whose length is right and whose blocks are not
            path.write_bytes(whole[:left] + bytes(zeros))
            caplog.clear()
            again = goes_on(tmp_path, state, 13)  # which is saved before it logs again
            kept = 0 if left < first else first if left < both else both
            assert path.read_bytes() == whole[:kept]
            assert length(again) == kept
            ends = f"its lines end at step {5 if kept else 0}, and the run goes on from step 10"
            told = [f"{path} is {both - kept} bytes shorter than the checkpoint says: {ends}"]
            assert caplog.messages == (told if kept < both else [])
            goes_on(tmp_path, again, 15)
            there = [5, 10][: whole[:kept].count(b"\n")]
            assert [line["step"] for line in lines(tmp_path)] == [*there, 15]
            assert len(caplog.messages) == (kept < both)  # once


def test_a_rollback_takes_back_the_lines_written_since(tmp_path: Path) -> None:
    class Back:
        state = None

        @hookimpl(wrapper=True)
        def compute_loss(self, loop: Loop) -> Any:
            output = yield
            output.loss.data.mul_(math.nan if loop.progress.position == 17 else 1)
            return output

        @hookimpl(trylast=True)
        def after_optimizer_step(self, loop: Loop) -> None:
            if loop.progress.position == 10:
                self.state = copy.deepcopy(loop.state_dict())

        @hookimpl
        def restore(self) -> Any:
            return self.state

        @hookimpl
        def on_nan(self) -> str:
            return "rollback"

    loop = toy_loop({"metrics": Metrics(), "back": Back()}, run_dir=tmp_path)
    loop.run()
    assert loop.progress.position == 20 + 17 - 10 + 1
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]


class StopAt:
    """Ends the run after a step; run again, it goes on."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == self.step:
            loop.stop()


def test_a_loop_that_runs_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    loop = toy_loop({"metrics": Metrics(), "stop": StopAt(10)}, run_dir=tmp_path, steps=20)
    loop.run()
    assert length(loop.state_dict()) == (tmp_path / "metrics.jsonl").stat().st_size
    loop.run()
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_values_that_are_no_numbers_are_null_and_read_as_nan(tmp_path: Path) -> None:
    class Odd:
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            if loop.progress.step == 5:
                loop.log({"a": math.nan, "b": math.inf, "c": -math.inf})

    train(tmp_path, extra={"odd": Odd()})
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    told = json.loads(first, parse_constant=refuse)
    assert (told["a"], told["b"], told["c"]) == (None, None, None)
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert all(math.isnan(read[0][name]) for name in "abc")
    assert read[0]["loss"] == told["loss"]
    assert [line["step"] for line in read] == [5, 10, 15, 20]


def test_lines_that_are_damaged_are_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, good = tmp_path / "metrics.jsonl", b'{"step": 1, "loss": null}\n'
    path.write_bytes(good * 2)
    assert [record["step"] for record in read_metrics(path)] == [1, 1]
    assert caplog.messages == []
    torn = [b'{"step": 4, "lo{"step": 5}', bytes(9), b"\xff\xfe{", b"3", b"[1]", b'{"step": "x"}', b"", b'{"step": 6']
    for line in torn:
        path.write_bytes(good + line + b"\n" + good)
        assert [record["step"] for record in read_metrics(path)] == [1, 1]
    assert caplog.messages == [f"{path}: passed over line 2, which cannot be read"] * len(torn)
    path.write_bytes(b"\n".join(torn) + b"\n" + good)
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert caplog.messages[-1] == f"{path}: passed over line 1 and 7 more, which cannot be read"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_lines_wait_while_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics, full = Metrics(), Path("/dev/full")

    class Disk:
        """The file is on a full disk during steps 3 to 12."""

        file: Any = None

        @hookimpl
        def before_step(self, loop: Loop) -> None:
            if loop.progress.step == 2:
                self.file, metrics._file = metrics._file, loop.resources.enter_context(full.open("wb", buffering=0))
            if loop.progress.step == 12:
                metrics._file = self.file

    toy_loop({"metrics": metrics, "disk": Disk()}, run_dir=tmp_path, log_every=1).run()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))
    (record,) = caplog.records
    told = "cannot be written: No space left on device; what is logged waits until there is room"
    assert record.getMessage() == f"{tmp_path}/metrics.jsonl: {told}"
