"""What is saved, when, and what is kept: no save is ever lost to the next one."""

import math
import os
import re
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from hookdiff import UserError, hookimpl
from hookdiff.builtin.logged import Metrics
from hookdiff.run_dir import step_of
from hookdiff.testing import assert_same, toy_loop, weights
from hookdiff_checkpoint import Checkpoint, find_checkpoints, read_checkpoint
from hookdiff_checkpoint.saving import Part
from hookdiff_checkpoint.writer import Staging
from hookdiff_ema import EMA
from tests.conftest import Clock, RollBackAt, acting, check_facts, contents, refused, toy_run, warnings, wide
from tests.forked import python
from tests.plugins.test_checkpoint_announced import fails


def folders(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def names(*steps):
    return [f"step-{step:08d}" for step in steps]


def plain(run, steps=12, resume=False, extra=None, checkpoint=None, **options):
    """A run of the toy net with this plugin alone, on 4 batches an epoch."""
    run.mkdir(exist_ok=True)
    plugin = checkpoint or Checkpoint(**{"every": 2, "keep_last": 9, **options})
    plugins = {"metrics": Metrics(), **(extra or {}), "checkpoint": plugin}
    loop = toy_run(plugins, run_dir=run, resume=resume, steps=steps, batch_size=10)
    return loop


def test_a_run_killed_in_its_last_save_is_cleaned_up_though_no_step_is_left(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    plain(tmp_path / "run", 20, every=4, keep_last=3)
    shutil.copytree(folder / "step-00000012", folder / ".step-00000008.removed")
    (folder / ".step-00000008.removed" / "model.safetensors").unlink()
    (folder / "step-00000020").rename(folder / ".step-00000020.partial")
    plain(tmp_path / "run", 20, resume=True, every=4, keep_last=2)
    assert folders(tmp_path / "run") == names(16, 20)
    before = (folder / "step-00000020" / "manifest.json").read_bytes()
    plain(tmp_path / "run", 20, resume=True, every=4, keep_last=2)
    assert (folder / "step-00000020" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("begun", [0, 1])
def test_a_script_that_calls_run_step_saves_at_the_interval(tmp_path, begun):
    """Also after as many samples as the data has: the batches are its own, and no epoch ends."""
    loop = toy_loop({"checkpoint": Checkpoint(every=3, keep_last=9)}, run_dir=tmp_path, steps=99, batch_size=10)
    (batch, *_) = loop.feed.batches(0)
    with loop:
        for _ in zip(range(begun), loop.steps(), strict=False):
            pass  # steps of an epoch that the script leaves
        for _ in range(13 - begun):
            loop.run_step(batch)
    assert folders(tmp_path) == names(3, 6, 9, 12, 13)
    resumed = toy_loop({"checkpoint": Checkpoint()}, run_dir=tmp_path, resume=True, batch_size=10)
    with resumed:
        assert (resumed.progress.step, resumed.progress.position) == (13, 13)


@pytest.mark.wide
def test_a_script_says_which_checkpoint_it_resumes_from(tmp_path):
    """Also without any logging set up."""
    code = """
import sys
from pathlib import Path
from hookdiff.testing import toy_loop
from hookdiff_checkpoint import Checkpoint

steps, run = int(sys.argv[1]), Path(sys.argv[2])
run.mkdir(exist_ok=True)
(run / "kept").touch()
toy_loop({"checkpoint": Checkpoint()}, steps=steps, run_dir=run, resume=True).run()
"""
    run = tmp_path / "run"
    (_, _, first), (_, _, second) = (python(code, steps, run) for steps in (2, 4))
    assert first.splitlines()[0] == f"{run} has no checkpoint to go on from: the run starts anew"
    assert second.splitlines()[0] == f"resuming from {run / 'checkpoints' / 'step-00000002'}"


def test_it_needs_a_run_directory():
    with refused(UserError, "checkpoint", "run_dir"):
        toy_loop({"checkpoint": Checkpoint()}).run()


def score(values, name="score"):
    """Return a plugin that logs a value at the steps that it is given for."""

    def log(loop):
        if loop.progress.step in values:
            loop.log({name: values[loop.progress.step]})

    return acting(after_optimizer_step=log)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [10, 12]),
        ({"keep_last": 1}, [12]),
        ({"keep_every": 2}, [4, 8, 10, 12]),
        ({"keep_best": "score"}, [4, 10, 12]),
        ({"keep_best": "score", "best": "highest"}, [6, 10, 12]),
        ({"keep_best": "score", "best": "highest", "keep_every": 2}, [4, 6, 8, 10, 12]),
        ({"keep_best": "nan"}, [10, 12]),
        ({"keep_best": "equal"}, [6, 10, 12]),  # the newest of equally good ones
        ({"keep_best": "counted"}, [4, 10, 12]),  # 1.0 is of fewer samples
    ],
)
def test_keep_last_keep_every_and_keep_best(options, kept, tmp_path):
    logged = {
        "score": {2: 5.0, 4: 1.0, 5: 0.0, 6: 7.0, 8: 1.5, 10: math.nan},
        "nan": {2: math.nan},
        "equal": dict.fromkeys((2, 4, 6), 1.0),
        "counted": {2: 1.0, 4: 3.0, 6: 5.0, 8: 4.0},
        "counted/num": {2: 100, 4: 200, 6: 200, 8: 200},
    }
    extra = {name: score(values, name) for name, values in logged.items()}
    plain(tmp_path, extra=extra, **{"keep_last": 2, **options})
    assert folders(tmp_path) == names(*kept)


def test_the_best_checkpoint_is_that_of_the_whole_run_across_a_resume(tmp_path):
    options = {"keep_last": 1, "keep_every": 3, "keep_best": "score"}
    plain(tmp_path, 8, extra={"score": score({4: 1.0, 8: 2.0})}, **options)
    assert folders(tmp_path) == names(4, 6, 8)
    plain(tmp_path, 16, resume=True, extra={"score": score({10: 3.0, 14: 0.5})}, **options)
    assert folders(tmp_path) == names(6, 12, 14, 16)  # the third and the sixth save, the best, the last


@pytest.mark.parametrize(
    ("extra", "facts"),
    [
        ({"score": score({5: 1.0})}, ("score", 5, "plugins.checkpoint.every")),
        ({"score": score({5: 1.0, 18: 2.0})}, ("score", 5)),  # which in 20 steps has a value that is saved
        ({"score": score({4: 1.0}, "scores")}, ("score", "scores")),
        ({}, ("score", "grad_norm", "loss")),
    ],
)
@pytest.mark.parametrize("steps", [8, *wide(20)])
def test_a_keep_best_without_a_saved_value_is_warned_of_once(extra, facts, steps, tmp_path, caplog):
    plain(tmp_path, steps, extra=extra, keep_last=3, keep_best="score")
    (warning,) = warnings(caplog)
    check_facts(warning, "keep_best", *facts)


def test_a_keep_best_that_is_logged_at_saved_steps_causes_no_warning(tmp_path, caplog):
    plain(tmp_path, extra={"score": score({4: math.nan})}, keep_last=2, keep_best="score")
    plain(tmp_path, 30, resume=True, extra={"score": score({18: 1.0})}, keep_last=2, keep_best="score")
    assert not warnings(caplog)


def test_a_run_removes_only_its_own_checkpoints(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    plain(tmp_path / "run", 4)
    saved = tmp_path / "run" / "checkpoints"
    shutil.copytree(saved / names(2)[0], saved / "favourite")
    shutil.copytree(saved / names(2)[0], elsewhere)
    shutil.rmtree(saved / names(2)[0])
    (saved / names(2)[0]).symlink_to(elsewhere, target_is_directory=True)
    (saved / "notes.txt").write_text("mine")
    (saved / "step-00000001").write_text("a file")
    (saved / "plots").mkdir()
    plain(tmp_path / "run", 20, resume=True, keep_last=1)
    assert folders(tmp_path / "run") == sorted(
        ["favourite", "notes.txt", "plots", "step-00000001", *names(2), *names(20)]
    )
    assert (elsewhere / "manifest.json").exists()


def test_a_damaged_checkpoint_does_not_displace_good_ones(tmp_path):
    plain(tmp_path, 12)
    broken = tmp_path / "checkpoints" / names(10)[0]
    (broken / "model.safetensors").write_bytes(b"gone")
    shutil.rmtree(tmp_path / "checkpoints" / names(12)[0])
    plain(tmp_path, 11, resume=True, every=3, keep_last=3)  # from 8 on; saves at 9 and 11
    assert folders(tmp_path) == names(8, 9, 10, 11)
    assert find_checkpoints(tmp_path)[0][0].path.name == names(11)[0]


# What a killed process may leave of the saves of steps 2 and 6: changes of the folder, and the step of the resumed run.
MODEL, MANIFEST = "model.safetensors", "manifest.json"
LEFT = {
    "nothing written": (["rmtree 6", "mkdir .6.partial"], 4),
    "no manifest yet": (["replace 6 .6.partial", f"replace .6.partial/{MANIFEST} .6.partial/.{MANIFEST}.partial"], 4),
    "half a file": (["replace 6 .6.partial", f"truncate .6.partial/{MODEL}"], 4),
    "whole, without its name": (["replace 6 .6.partial"], 6),
    "whole, beside an earlier one": (["copytree 6 .6.partial", f"truncate 6/{MODEL}"], 6),
    "neither has the name": (["copytree 6 .6.partial", "replace 6 .6.replaced"], 6),
    "a new one fails after the old lost its name": (["replace 6 .6.replaced", "mkdir .6.partial"], 6),
    "the old one is not removed yet": (["copytree 6 .6.replaced", f"remove .6.replaced/{MODEL}"], 6),
    "a removal begun": (["replace 2 .2.removed"], 6),
    "a removal half done": (["replace 2 .2.removed", f"remove .2.removed/{MODEL}"], 6),
}
CALLS = {"truncate": lambda path: os.truncate(path, 90), "copytree": shutil.copytree, "rmtree": shutil.rmtree}


@pytest.mark.parametrize(("commands", "begun"), LEFT.values(), ids=LEFT)
def test_the_leftovers_of_a_killed_process_are_settled(commands, begun, three, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(three, run)
    for command in commands:
        call, *paths = command.split()
        named = [re.sub(r"\d", lambda step: names(int(step[0]))[0], path) for path in paths]
        CALLS.get(call, getattr(os, call, None))(*(run / "checkpoints" / path for path in named))
    again = plain(run, resume=True)
    assert again.first_step == begun
    gone = [2] if ".2.removed" in commands[0] else []
    assert folders(run) == names(*(step for step in range(2, 14, 2) if step not in gone))
    assert_same(weights(again), whole_run)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    run = tmp_path_factory.mktemp("three") / "run"
    plain(run, 6)
    return run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return weights(plain(tmp_path_factory.mktemp("whole") / "run"))


SLOW_SAVES = """
import sys
from pathlib import Path
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint

calls, last = 0, int(sys.argv[2])
def audit(event, arguments):  # each change of a name is a moment to die in
    global calls
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") and "checkpoints" in str(arguments[0]):
        calls += 1
        if calls == last:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
plugin = Checkpoint(every=2, keep_last=2)
toy_loop({"checkpoint": plugin}, run_dir=Path(sys.argv[1]), resume=True, steps=12, batch_size=10).run()
"""


@pytest.mark.slow
def test_a_process_may_be_killed_at_any_rename(whole_run, tmp_path):
    moment, run = 0, tmp_path / "run"
    run.mkdir()
    deaths, newest = 0, 0
    while deaths < 20:
        moment += 1
        code, _, err = python(SLOW_SAVES, run, moment * 7 % 37 + 1)
        checkpoints, problems = find_checkpoints(run)
        assert not problems
        steps = [read_checkpoint(info.path)["progress"]["step"] for info in checkpoints]
        assert max(steps, default=0) >= newest  # nothing is ever lost
        newest = max(steps, default=0)
        if code == 0:
            assert_same(load_file(checkpoints[0].path / "model.safetensors"), whole_run)
            shutil.rmtree(run / "checkpoints")
            newest = 0
        else:
            assert code == -signal.SIGKILL, err
            deaths += 1


@pytest.mark.parametrize("every", ["1 epochs", 4])
def test_a_save_knows_that_the_epoch_has_ended(every, tmp_path):
    ends = []
    notes = acting(on_epoch_end=lambda loop: ends.append(loop.progress.epoch))

    def keep(path):
        position, epoch = find_checkpoints(path)[0][0].place
        shutil.copytree(path, tmp_path / f"{position}-{epoch}" / "checkpoints" / path.name)

    plain(tmp_path / "run", 9, extra={"notes": notes, "keep": acting(on_checkpoint=keep)}, every=every)
    assert ends == [1, 2]
    for place, later in {"4-1": [2], "8-2": []}.items():
        ends.clear()
        plain(tmp_path / place, 9, resume=True, extra={"notes": notes})
        assert ends == later


def test_a_save_on_request_is_one_more_save_from_which_no_rollback_begins(tmp_path):
    ask = acting(after_backward=lambda loop: loop.save() if loop.progress.step in (2, 3, 5) else None)
    plain(tmp_path, extra={"ask": ask}, every=6)
    saves = {step_of(save.path.name): save.scheduled for save in find_checkpoints(tmp_path)[0]}
    assert saves == {3: False, 4: False, 6: True, 12: True}


def test_every_may_be_a_time(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    plain(tmp_path / "often", 11, extra={"clock": clock}, every="25 s")
    assert folders(tmp_path / "often") == names(3, 6, 9, 11)
    plain(tmp_path / "seldom", 12, extra={"clock": clock}, every="15 min")
    assert folders(tmp_path / "seldom") == names(12)


def test_two_runs_in_one_script_may_use_the_plugin_one_after_the_other(tmp_path):
    plugin = Checkpoint(every=2, keep_last=9)
    first = plain(tmp_path / "one", 6, checkpoint=plugin)
    second = plain(tmp_path / "two", 6, checkpoint=plugin)
    assert_same(weights(first), weights(second))
    assert folders(tmp_path / "one") == folders(tmp_path / "two") == names(2, 4, 6)
    assert plain(tmp_path / "one", 9, resume=True, checkpoint=plugin).first_step == 6


def test_an_earlier_run_in_the_folder_is_refused_and_left_unchanged(tmp_path):
    def writers():
        return {"metrics": Metrics(), "ema": EMA(std=[0.1], snapshot_every=5)}

    plain(tmp_path, extra=writers())
    before = contents(tmp_path)
    assert "metrics.jsonl" in map(str, before)
    for resume in (False, tmp_path / "checkpoints" / names(4)[0]):
        with refused(UserError, tmp_path / "checkpoints", "resume", "run_dir"):
            plain(tmp_path, 20, resume=resume, extra=writers())
    assert contents(tmp_path) == before


def test_a_run_may_branch_off_one_checkpoint(whole_run, tmp_path):
    plain(tmp_path / "run", 6)
    again = plain(tmp_path / "branch", resume=tmp_path / "run" / "checkpoints" / names(4)[0])
    assert again.first_step == 4
    assert_same(weights(again), whole_run)
    assert folders(tmp_path / "run") == names(2, 4, 6)
    assert folders(tmp_path / "branch") == names(6, 8, 10, 12)


def look(seen):
    """Return a plugin that notes the step and position before each step, and the name of each announced checkpoint."""
    note = lambda loop: seen.append((loop.progress.step, loop.progress.position))  # noqa: E731
    return acting(before_step=note, on_checkpoint=lambda path: seen.append(path.name))


@pytest.mark.usefixtures("slow_disk")
def test_a_rollback_waits_for_the_current_save(tmp_path):
    loop = plain(tmp_path, 6, extra={"bad": RollBackAt(4), "look": look(seen := [])}, every=4)
    # The save of step 4 begins just before the batch that is bad.
    assert seen[4:8] == [(4, 4), names(4)[0], (4, 5), (5, 6)]
    assert loop.progress.position == 7
    assert folders(tmp_path) == names(4, 6)


def test_training_goes_on_while_a_save_is_written(tmp_path, slow_disk, monkeypatch):
    plain(tmp_path, 3, extra={"look": look(seen := [])}, every=1)
    # The save of each step is over only when the next one is due, and the snapshot was not touched meanwhile.
    assert seen == [(0, 0), (1, 1), names(1)[0], (2, 2), names(2)[0], names(3)[0]]
    monkeypatch.undo()
    for step in range(1, 4):
        alone = plain(tmp_path / f"to-{step}", step, every=0)
        assert_same(load_file(tmp_path / "checkpoints" / names(step)[0] / "model.safetensors"), weights(alone))


def test_another_plugins_failure_at_the_end_costs_no_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="mine"):
        plain(tmp_path, extra={"fails": acting(on_stop=fails)}, every=0)
    assert folders(tmp_path) == names(12)


def test_a_plugin_may_have_any_name(tmp_path):
    class Holds:
        def __init__(self):
            self.held = torch.zeros(1)

        def state_dict(self):
            return {"held": self.held}

        def load_state_dict(self, state):
            self.held = state["held"]

        @hookimpl
        def after_optimizer_step(self):
            self.held += 1

    odd = [".hidden", "../up", "a b:C", "é", "nul\n", "%2Ehidden", "log", "-"]
    plain(tmp_path, 4, extra={name: Holds() for name in odd})
    extra = {name: Holds() for name in odd}
    plain(tmp_path, 6, resume=True, extra=extra)
    assert [plugin.held.item() for plugin in extra.values()] == [6] * len(odd)
    assert {path.parent for path in tmp_path.rglob("*.safetensors")} == {
        tmp_path / "checkpoints" / name for name in names(2, 4, 6)
    }


class Watch:
    """Notes the addresses of the memory that the writer has between two steps."""

    def __init__(self):
        self.addresses = {}

    @hookimpl(trylast=True)
    def between_steps(self, loop):
        writer = loop.plugins["checkpoint"]._run.writer
        if writer._reserving:
            writer._reserving.result()
        self.addresses[loop.progress.step] = {
            name: buffer.data_ptr() for name, buffer in writer._staging._buffers.items()
        }


@pytest.mark.parametrize(("every", "reserves"), [(3, True), (0, False)])
def test_the_memory_of_all_saves_is_taken_after_the_first_step(tmp_path, every, reserves):
    watch, ema = Watch(), EMA(decay=0.9)
    used = {"ema": ema, "checkpoint": Checkpoint(every=every), "watch": watch}
    loop = toy_run(used, run_dir=tmp_path, steps=7)
    assert bool(watch.addresses[1]) == reserves
    assert watch.addresses[1] == watch.addresses[4] == watch.addresses[7]
    saved = read_checkpoint(sorted((tmp_path / "checkpoints").iterdir())[-1])
    assert_same(saved["model"], weights(loop))
    assert_same({name: saved["plugins"]["ema"][name] for name in ema.shadow}, ema.shadow)


def test_weights_that_are_tied_are_copied_once_and_untied_ones_apart():
    one, other = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    staging = Staging()

    def copies(**tensors):
        copied = staging.copy({"model": Part(tensors, {}, {}, {})})["model"].tensors
        assert_same(copied, tensors)
        return len({copy.data_ptr() for copy in copied.values()})

    assert copies(a=one, b=one) == 1
    assert copies(a=one, b=other) == 2
    assert copies(a=one, b=one.t()) == 2
    assert copies(a=one, b=one[:0]) == 2
    assert copies(a=one.bfloat16(), b=one) == 2
