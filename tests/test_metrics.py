import copy
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hookdiff import Loop, Metrics, hookimpl, run_state
from hookdiff.metrics import read_metrics
from hookdiff.testing import toy_loop


class Saver:
    """Keeps the state of the metrics at one step and gives it to them, or to those of another run, as they start."""

    def __init__(self, metrics: Metrics, at: int = 0, state: Any = None) -> None:
        self.metrics, self.at, self.state = metrics, at, state

    @hookimpl
    def on_start(self) -> None:
        if self.state is not None:
            self.metrics.load_state_dict(self.state)

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == self.at:
            self.state = run_state(loop)["plugins"]["metrics"]


def train(run_dir: Path | None, at: int = 0, state: Any = None, extra: Mapping[str, object] | None = None) -> Saver:
    metrics = Metrics()
    saver = Saver(metrics, at, state)
    toy_loop({"metrics": metrics, "saver": saver, **(extra or {})}, run_dir=run_dir).run()
    return saver


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


def test_a_new_run_replaces_the_lines_of_an_earlier_one(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]


@pytest.mark.parametrize(("at", "kept"), [(3, []), (5, [5]), (12, [5, 10]), (20, [5, 10, 15, 20])])
def test_a_resumed_run_cuts_what_came_after_its_checkpoint(tmp_path: Path, at: int, kept: list[int]) -> None:
    saver = train(tmp_path, at)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    again = train(tmp_path, state=saver.state)
    after = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert after[: len(kept)] == before[: len(kept)]
    assert [line["step"] for line in lines(tmp_path)] == [*kept, 5, 10, 15, 20]
    assert again.metrics.state_dict() == {"bytes": (tmp_path / "metrics.jsonl").stat().st_size}


def test_the_first_step_of_a_resumed_run_cuts_the_file_whether_or_not_it_writes(tmp_path: Path) -> None:
    saver = train(tmp_path, 10)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(before) == 4

    class Looks:
        @hookimpl
        def on_start(self) -> None:
            assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before)

        @hookimpl(trylast=True)
        def before_step(self) -> None:
            assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])

    metrics = Metrics()
    plugins = {"metrics": metrics, "saver": Saver(metrics, state=saver.state), "looks": Looks()}
    toy_loop(plugins, run_dir=tmp_path, steps=4).run()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])
    assert metrics.state_dict() == saver.state


def test_a_state_without_lines_empties_the_file(tmp_path: Path) -> None:
    saver = train(tmp_path, 3)
    metrics = Metrics()
    plugins = {"metrics": metrics, "saver": Saver(metrics, state=saver.state)}
    toy_loop(plugins, run_dir=tmp_path, steps=4).run()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_a_branch_begins_with_the_lines_of_the_run_it_comes_from(tmp_path: Path, of: str) -> None:
    saver = train(tmp_path / "run", 10)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    metrics = Metrics()
    plugins = {"metrics": metrics, "saver": Saver(metrics, state=saver.state)}
    source = checkpoint if of == "checkpoint" else tmp_path / "run"
    toy_loop(plugins, run_dir=tmp_path / "branch", steps=7, resume=source).run()
    after = (tmp_path / "branch" / "metrics.jsonl").read_bytes()
    assert after.splitlines()[:2] == before.splitlines()[:2]
    assert [line["step"] for line in lines(tmp_path / "branch")] == [5, 10, 5]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_file_that_was_lost_is_begun_anew(tmp_path: Path) -> None:
    saver = train(tmp_path, 10)
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path, state=saver.state)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]


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
                self.state = copy.deepcopy(run_state(loop))

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


def test_a_loop_that_runs_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    loop = toy_loop({"metrics": Metrics()}, run_dir=tmp_path, steps=10)
    loop.run()
    length = run_state(loop)["plugins"]["metrics"]["bytes"]
    assert length == (tmp_path / "metrics.jsonl").stat().st_size
    loop.config, loop.reason = type(loop.config)(steps=20, batch_size=8, log_every=5), None
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
