import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hookdiff import Loop, SampleRequest, hookimpl
from hookdiff.builtin.logged import Metrics
from hookdiff.run_dir.metrics_jsonl import read_metrics
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint
from tests.conftest import Restores, RollsBack, StopAt, acting, check_one, fill, free, records, toy_run, warnings, wide


def train(run_dir: Path, at: int = 0, **extra: object) -> Any:
    """Train for 20 steps, and return the state after step `at`."""
    keeper = Restores(at=at)
    toy_loop({"metrics": Metrics(), "keeper": keeper, **extra}, run_dir=run_dir).run()
    return keeper.state


def continue_from(run_dir: Path, state: Any, steps: int = 20, resume: Path | bool = True, **extra: object) -> Any:
    """Continue from `state`, and return the state at the end."""
    plugins = {"metrics": Metrics(), "state": Restores(state), **extra}
    return toy_run(plugins, run_dir=run_dir, steps=steps, resume=resume).state_dict()


def length(state: Any) -> Any:
    return state["plugins"]["metrics"]["bytes"]


def test_each_step_that_logs_writes_one_line(tmp_path: Path) -> None:
    began = time.time()
    train(tmp_path)
    assert [line["step"] for line in records(tmp_path)] == [5, 10, 15, 20]
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert list(line) == ["step", "time", "loss", "grad_norm"]
        assert began - 1 <= line["time"] <= time.time() + 1


def run_of(run_dir: Path, steps: int, resume: bool = False, log_every: int = 10, **extra: object) -> Loop:
    run_dir.mkdir(exist_ok=True)
    plugins = {"metrics": Metrics(), **extra, "checkpoint": Checkpoint(every=8)}
    return toy_loop(plugins, run_dir=run_dir, steps=steps, resume=resume, log_every=log_every)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return the lines of an unbroken run with a line every 10 steps, and those with a line every step."""
    folders = {log_every: tmp_path_factory.mktemp("unbroken") for log_every in (10, 1)}
    for log_every, folder in folders.items():
        run_of(folder, 40, log_every=log_every).run()
    return records(folders[10]), records(folders[1])


@pytest.mark.parametrize(
    ("parts", "steps"),
    [((25, 40), (10, 20, 25)), ((20, 40), (10, 20)), *wide(((7, 9, 40), (9,))), *wide(((39, 40), (10, 20, 30, 39)))],
)
def test_a_run_that_is_done_ends_with_the_open_means_and_a_longer_one_has_the_lines_of_one_run(
    tmp_path: Path, parts: tuple[int, ...], steps: tuple[int, ...], unbroken: tuple[Any, Any]
) -> None:
    whole, each = unbroken
    assert [line["step"] for line in whole] == [10, 20, 30, 40]
    for index, length in enumerate(parts[:-1]):
        run_of(tmp_path / "parts", length, resume=index > 0).run()
    *earlier, last = records(tmp_path / "parts")
    assert [line["step"] for line in (*earlier, last)] == list(steps)
    assert earlier == whole[: len(earlier)]
    window = each[(length - 1) // 10 * 10 : length]
    for name in ("loss", "grad_norm"):
        assert last[name] == pytest.approx(sum(line[name] for line in window) / len(window), rel=1e-6)

    before = (tmp_path / "parts" / "metrics.jsonl").read_bytes()
    again = run_of(tmp_path / "parts", length, resume=True)
    assert again.run() == "done"  # it is already, and makes no step
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == before

    longer = run_of(tmp_path / "parts", parts[-1], resume=True)
    longer.run()
    assert records(tmp_path / "parts") == whole


@pytest.mark.parametrize("how", ["signal", "error", *wide(*("plugin", "time", "on_nan"))])
def test_a_run_that_is_to_go_on_leaves_its_means_open(tmp_path: Path, how: Any) -> None:
    def end(loop: Loop) -> None:
        if loop.progress.step == 25:
            if how == "error":
                raise KeyError("x")
            loop.stop(how)

    with pytest.raises(KeyError) if how == "error" else nullcontext():
        run_of(tmp_path, 40, ends=acting(after_optimizer_step=end)).run()
    assert [line["step"] for line in records(tmp_path)] == [10, 20]


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    def read(loop: Loop) -> None:
        assert len(records(tmp_path) if loop.progress.step >= 5 else []) == loop.progress.step // 5

    train(tmp_path, reader=acting(before_step=read))


def test_the_first_line_makes_the_run_directory(tmp_path: Path) -> None:
    def look(loop: Loop) -> None:
        assert (tmp_path / "a").exists() == (loop.progress.step >= 5)

    train(tmp_path / "a" / "b", look=acting(before_step=look))
    assert len(records(tmp_path / "a" / "b")) == 4


def test_golden_warning_of_lines_that_a_new_run_replaces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    assert caplog.messages == []
    train(tmp_path)
    assert [line["step"] for line in records(tmp_path)] == [5, 10, 15, 20]
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    train(tmp_path)
    assert [line["step"] for line in records(tmp_path)] == [5, 10, 15, 20]
    assert caplog.messages == [
        f"{tmp_path}/metrics.jsonl: replaces the 4 lines of an earlier run",
        f"{tmp_path}/metrics.jsonl: replaces the 1 line of an earlier run",
    ]


@pytest.mark.parametrize("at", [3, 5, 12, 20])
def test_a_resumed_run_cuts_the_lines_after_its_checkpoint(tmp_path: Path, at: int) -> None:
    state = train(tmp_path, at)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    end = continue_from(tmp_path, state)
    after = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert after[: at // 5] == before[: at // 5]
    assert [line["step"] for line in records(tmp_path)] == [5, 10, 15, 20]
    assert length(end) == (tmp_path / "metrics.jsonl").stat().st_size


def test_the_file_is_cut_before_the_first_step_of_a_resumed_run_whether_or_not_it_writes(tmp_path: Path) -> None:
    state = train(tmp_path, 10)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(before) == 4

    class Looks:
        @hookimpl
        def on_start(self) -> None:
            assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before)

        @hookimpl(trylast=True)
        def on_ready(self) -> None:
            assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])

    end = continue_from(tmp_path, state, steps=14, looks=Looks())
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:-1] == before[:2]
    assert records(tmp_path)[-1]["step"] == 14
    assert length(end) == length(state)  # which does not count the last line


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_a_branch_begins_with_the_lines_of_its_source(tmp_path: Path, of: str) -> None:
    state = train(tmp_path / "run", 10)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    continue_from(tmp_path / "branch", state, steps=17, resume=checkpoint if of == "checkpoint" else tmp_path / "run")
    after = (tmp_path / "branch" / "metrics.jsonl").read_bytes()
    assert after.splitlines()[:2] == before.splitlines()[:2]
    assert [line["step"] for line in records(tmp_path / "branch")] == [5, 10, 15, 17]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_lost_file_begins_anew_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = train(tmp_path, 10)
    (tmp_path / "metrics.jsonl").unlink()
    continue_from(tmp_path, state)
    assert [line["step"] for line in records(tmp_path)] == [15, 20]
    check_one(warnings(caplog), tmp_path / "metrics.jsonl", "step 10")


def test_a_branch_of_a_lone_checkpoint_begins_without_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = train(tmp_path / "run", 10)
    (tmp_path / "lone").mkdir()
    continue_from(tmp_path / "branch", state, resume=tmp_path / "lone")
    assert [line["step"] for line in records(tmp_path / "branch")] == [15, 20]
    assert caplog.messages == []


def test_a_damaged_end_is_cut_to_the_last_whole_line_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = train(tmp_path, 10)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first, both = whole.index(b"\n") + 1, length(state)
    for left in (0, 1, first - 1, first, first + 1, both - 1, both, both + 1):
        for zeros in (0, len(whole) - left):  # some file systems keep the length and lose the blocks
            path.write_bytes(whole[:left] + bytes(zeros))
            caplog.clear()
            again = continue_from(tmp_path, state, 13)  # the run ends before it logs again
            num_kept = 0 if left < first else first if left < both else both
            content = path.read_bytes()
            assert content[:num_kept] == whole[:num_kept]
            assert json.loads(content[num_kept:])["step"] == 13  # the last line
            assert length(again) == num_kept
            assert len(warnings(caplog)) == (num_kept < both)
            if num_kept < both:
                check_one(warnings(caplog), path, f"{both - num_kept} bytes", f"step {5 if num_kept else 0}", "step 10")
            continue_from(tmp_path, again, 15)
            there = [5, 10][: whole[:num_kept].count(b"\n")]
            assert [line["step"] for line in records(tmp_path)] == [*there, 15]
            assert len(warnings(caplog)) == (num_kept < both)  # no second warning


def test_a_rollback_removes_later_lines(tmp_path: Path) -> None:
    with toy_loop({"metrics": Metrics(), "back": RollsBack(at=10, position=17)}, run_dir=tmp_path) as loop:
        for step in loop.steps():
            if step.outcome == "skipped":
                assert [line["step"] for line in records(tmp_path)] == [5, 10]
    assert loop.progress.position == 20 + 17 - 10 + 1
    assert [line["step"] for line in records(tmp_path)] == [5, 10, 15, 20]


def test_a_loop_that_trains_nothing_leaves_the_lines_of_a_run_that_goes_on(tmp_path: Path) -> None:
    state = train(tmp_path, 10)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with toy_loop({"metrics": Metrics(), "state": Restores(state)}, run_dir=tmp_path, resume=True) as loop:
        loop.sample(SampleRequest(2))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_loop_that_runs_again_appends_to_the_file(tmp_path: Path) -> None:
    loop = toy_loop({"metrics": Metrics(), "stop": StopAt(10)}, run_dir=tmp_path, steps=20)
    loop.run()
    assert length(loop.state_dict()) == (tmp_path / "metrics.jsonl").stat().st_size
    loop.run()
    assert [line["step"] for line in records(tmp_path)] == [5, 10, 15, 20]


def test_nan_and_infinities_are_null_and_read_as_nan(tmp_path: Path) -> None:
    def log(loop: Loop) -> None:
        if loop.progress.step == 5:
            loop.log({"a": math.nan, "b": math.inf, "c": -math.inf})

    train(tmp_path, odd=acting(after_optimizer_step=log))
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    written = json.loads(first, parse_constant=pytest.fail)
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert all(written[name] is None and math.isnan(read[0].values[name]) for name in "abc")
    assert read[0].values["loss"] == written["loss"]
    assert [line.step for line in read] == [5, 10, 15, 20]


def test_lines_wait_while_the_disk_is_full(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fill_and_free(loop: Loop) -> None:
        if loop.progress.step == 2:
            fill(disk)
        if loop.progress.step == 12:
            free(disk)
            assert 2 <= (disk / "metrics.jsonl").read_bytes().count(b"\n") < 5

    full = acting(before_step=fill_and_free, after_optimizer_step=lambda loop: loop.log({"n" * 2000: 1.0}))
    toy_loop({"metrics": Metrics(), "full": full}, run_dir=disk, log_every=1).run()
    assert [line["step"] for line in records(disk)] == list(range(1, 21))
    check_one(warnings(caplog), disk / "metrics.jsonl", "No space left on device")
