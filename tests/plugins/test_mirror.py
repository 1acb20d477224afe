import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff import Loop, Sink, TrackedRun, builtin_plugins
from hookdiff.testing.toy import toy_loop
from hookdiff_aim import Aim
from hookdiff_tensorboard import TensorBoard
from hookdiff_wandb import WandB
from tests.conftest import Command, Restores, Succeed, acting, check_facts, check_refused, warnings
from tests.plugins import test_aim, test_tensorboard, test_wandb

pytestmark = pytest.mark.usefixtures("here")
no_account = test_wandb.no_account
RECORDER = """
import json
from attrs import define, field
from hookdiff import Sink

@define(eq=False)
class Recorder(Sink):
    path: str = "calls.txt"
    failing: str = ""

    @property
    def where(self):
        return f"the file {self.path}"

    def note(self, method, *what):
        if method == self.failing:
            raise ConnectionError("the tracker is gone")
        with open(self.path, "a") as file:
            print(json.dumps([method, *what]), file=file)

    def clear(self, run): open(self.path, "w").close()
    def open(self, run): self.note("open", run.hparams["run"]["steps"], run.step)
    def scalars(self, step, time, values): self.note("scalars", step, sorted(values))
    def images(self, step, time, images): self.note("images", step, {n: p.pixels.shape for n, p in images.items()})
    def texts(self, step, time, texts): self.note("texts", step, sorted(texts))
    def distributions(self, step, time, found): self.note("distributions", step, sorted(found))
    def event(self, step, time, event): self.note("event", step, event.kind)
    def close(self): self.note("close")
"""


def log_each_kind(loop: Loop) -> None:
    """Log something of each kind at even steps."""
    step = loop.progress.step
    if step % 2 == 0:
        loop.log.images({"samples": torch.full((1, 1, 4, 6), step / 10), "samples/colour": torch.ones(1, 3, 2, 2)})
        loop.log.texts({"prompt": f"cat {step}"})
        loop.log.distributions({"weights": torch.tensor([0.0, 0.0, 0.5, 1.0])})


def make_loop(run_dir: Path, steps: int = 4, plugins: Any = None, tables: Any = None, resume: bool = False) -> Loop:
    hparams = {"run": {"steps": steps}, **(tables or {})}
    extras = acting(after_optimizer_step=log_each_kind)
    everything = {**builtin_plugins(signals=False), "extras": extras, **(plugins or {})}
    return toy_loop(everything, run_dir=run_dir, steps=steps, log_every=1, hparams=hparams, resume=resume)


@pytest.fixture
def run() -> Path:
    """A run directory, in the working directory."""
    make_loop(Path("runs/x")).run()
    return Path("runs/x")


@pytest.fixture
def recorder(install: Callable[..., None]) -> None:
    """Install the sink of another package."""
    install("hookdiff-recorder", {"recorder": "recorder:Recorder"}, recorder=RECORDER)


def test_golden_message_for_tensorboard(run: Path, hookdiff: Command) -> None:
    place = run.resolve() / "tensorboard"
    for _ in range(2):  # the second one replaces the first
        assert hookdiff("mirror", run, "--to", "tensorboard") == (
            0,
            f"runs/x: 5 steps up to 4, 4 pictures -> {place} (tensorboard --logdir {place})\n",
            "",
        )
    assert len(list(place.iterdir())) == 1
    events = test_tensorboard.read(place)
    assert list(test_tensorboard.values(events, "loss")) == [1, 2, 3, 4]
    assert [image.step for image in events.Images("samples/colour")] == [2, 4]
    assert test_tensorboard.texts(events, "prompt") == {2: "    cat 2", 4: "    cat 4"}
    assert [histogram.histogram_value.num for histogram in events.Histograms("weights")] == [4, 4]
    assert list(test_tensorboard.texts(events, "events/stop")) == [4]


@pytest.mark.wide
def test_wandb_gets_a_new_run(run: Path, succeed: Succeed) -> None:
    for _ in range(2):
        out = succeed("mirror", run, "--to", "wandb", "--set", "project=tests", "--set", "timeout=300")
        check_facts(out, "runs/x", "5 steps", "4 pictures", "the new W&B run", "wandb sync")
    _, second = test_wandb.runs(run)
    assert (second["name"], second["project"], second["config"]["run"]) == ("x", "tests", {"steps": 4})
    assert [step for step, row in second["history"].items() if "loss" in row] == [1, 2, 3, 4]
    for name in ("samples", "samples/colour"):
        assert [step for step, row in second["history"].items() if name in row] == [2, 4]
    assert "events/stop" in second["history"][4]


@test_aim.needs_aim
@pytest.mark.wide
def test_the_aim_run_is_replaced(run: Path, succeed: Succeed) -> None:
    make_loop(Path("runs/other")).run()
    for name in (run, run, "runs/other"):
        out = succeed("mirror", name, "--to", "aim", "--set", "experiment=rebuilt")
        check_facts(out, name, "5 steps", "4 pictures", "aim up --repo")
    mirrored, _ = test_aim.only(Path("runs"), "x"), test_aim.only(Path("runs"), "other")
    assert mirrored["run_dir"] == str(run.resolve())
    assert mirrored["experiment"] == "rebuilt"
    assert mirrored["hparams"] == {"run": {"steps": 4}}
    assert list(mirrored["metrics"]["loss"]) == [1, 2, 3, 4]
    assert list(mirrored["images"]["samples"]) == [2, 4]
    assert mirrored["texts"]["prompt"] == {2: "cat 2", 4: "cat 4"}
    assert mirrored["events"]["stop"] == {4: "done"}
    assert mirrored["closed"]


def calls(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("recorder")
def test_the_sink_of_another_package_gets_all_in_order(run: Path, succeed: Succeed) -> None:
    out = succeed("mirror", run, "--to", "recorder", "--set", "path=mine.txt")
    assert out == "runs/x: 5 steps up to 4, 4 pictures -> the file mine.txt\n"
    lines = calls(Path("mine.txt"))
    assert lines[0] == ["open", 4, 0]
    assert lines[-1] == ["close"]
    steps = [call[1] for call in lines[1:-1]]
    assert steps == sorted(steps)
    assert {call[0] for call in lines if call[1:2] == [2]} == {"scalars", "images", "texts", "distributions"}
    shapes = {name: len(shape) for call in lines if call[0] == "images" for name, shape in call[2].items()}
    assert shapes == {"samples": 2, "samples/colour": 3}  # grey stays grey
    assert [call[2] for call in lines if call[0] == "event"] == ["start", "stop"]


@pytest.mark.usefixtures("recorder")
def test_options_come_from_the_config_of_the_run(succeed: Succeed) -> None:
    make_loop(Path("run"), tables={"plugins": {"recorder": {"path": "configured.txt"}}}).run()
    succeed("mirror", "run", "--to", "recorder")
    assert calls(Path("configured.txt"))
    succeed("mirror", "run", "--to", "recorder", "--set", "path=other.txt")
    assert calls(Path("other.txt")) == calls(Path("configured.txt"))


@pytest.mark.usefixtures("recorder")
def test_a_run_under_way_and_a_damaged_line(run: Path, succeed: Succeed, caplog: pytest.LogCaptureFixture) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "ti\n')
    (run / "samples" / "step-00000004.png").write_bytes(b"\x89PNG broken")
    succeed("mirror", run, "--to", "recorder")
    (warning,) = warnings(caplog)
    check_facts(warning, "metrics.jsonl", "line 5")
    assert [call[1] for call in calls(Path("calls.txt")) if call[0] == "scalars"] == [1, 2, 3, 4]

    with make_loop(Path("runs/live"), steps=3) as loop:
        for step in loop.steps():
            if step.step == 2:
                succeed("mirror", "runs/live", "--to", "recorder")
    # The log of step 2 is not over.
    assert [call[1] for call in calls(Path("calls.txt")) if call[0] == "scalars"] == [1]


def test_a_run_that_writes_to_the_tracker_itself_is_left_alone(hookdiff: Command, succeed: Succeed) -> None:
    loop = make_loop(Path("live"), steps=3)
    loop.hparams["run"]["plugins"] = ["tensorboard"]
    with loop:
        for _ in loop.steps():
            pass
        check_refused(hookdiff("mirror", "live", "--to", "tensorboard"), "live", "under way", "tensorboard")
        assert hookdiff("mirror", "live", "--to", "tensorboard", "--set", "timeout=300")[0] == 2
        succeed("mirror", "live", "--to", "tensorboard", "--set", "dir=elsewhere")
    succeed("mirror", "live", "--to", "tensorboard")


def test_the_places_of_the_sinks(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "runs" / "x", {}, is_branch=False, step=0)
    assert Aim().place(run) == Aim(name="other", experiment="other").place(run) == str(tmp_path / "runs")
    assert Aim().place(run) != Aim(repo=str(tmp_path)).place(run)
    assert TensorBoard().place(run) == TensorBoard(timeout=300).place(run) != TensorBoard(dir="here").place(run)
    assert WandB().place(run) != WandB().place(run)  # each mirror is a new W&B run
    assert Sink().place(run) == Sink(timeout=300).place(run)


@pytest.mark.wide
def test_the_outcome_of_a_run_is_its_last_end_though_an_earlier_one_had_more_steps(succeed: Succeed) -> None:
    fails, state = acting(before_step=lambda loop: 1 / (5 - loop.progress.step)), Restores(at=2)
    with pytest.raises(ZeroDivisionError):
        make_loop(Path("run"), steps=6, plugins={"fails": fails, "state": state}).run()
    make_loop(Path("run"), steps=3, plugins={"state": Restores(state.state)}, resume=True).run()
    check_facts(succeed("mirror", "run", "--to", "wandb", "--set", "timeout=300"), "4 steps", "up to 3")
    (found,) = test_wandb.runs(Path("run"))
    assert found["exit"] == 0


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("failing", ["open", "event", "close"])
def test_a_tracker_that_fails_gives_one_message(failing: str, run: Path, hookdiff: Command) -> None:
    done = hookdiff("mirror", run, "--to", "recorder", "--set", f"failing={failing}")
    check_refused(done, "recorder", "ConnectionError", "the tracker is gone")
    assert len(done[2].splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("runs/x", "--to", "tensorbord"), ("tensorbord", "did you mean 'tensorboard'")),
        (("runs/x", "--to", "aimm"), ("aimm", "did you mean 'aim'")),
        (("runs/x", "--to", "ema"), ("ema", "aim, tensorboard, wandb")),
        (("runs/x", "--to", "tensorboard", "--set", "folder=x"), ("plugins.tensorboard.folder", "dir")),
        (("runs/x", "--to", "tensorboard", "--set", "timeout=soon"), ("plugins.tensorboard.timeout", "soon")),
        (("runs/x", "--to", "tensorboard", "--set", "dir=file/inner"), ("tensorboard", "NotADirectoryError")),
    ],
)
def test_wrong_input(words: tuple[str, ...], facts: tuple[str, ...], run: Path, hookdiff: Command) -> None:
    Path("file").write_text("")
    check_refused(hookdiff("mirror", *words), *facts)
