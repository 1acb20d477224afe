"""The run directory: its lock, and the moments at which its files are written."""

import errno
import json
import os
import shutil
import signal
import socket
import time

import pytest
import tomli
import torch

from hookdiff import StorageError, UserError, build_loop, builtin_plugins, hookimpl, load_config
from hookdiff.builtin.directory import RunDir
from hookdiff.disk.lock import lock_run_dir
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.layout import check_run_dir, run_of
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint
from tests.conftest import acting, check_facts, check_refused, contents, fill, free, output, records, refused, wait_for
from tests.forked import python

USER = """
import os
import time
from pathlib import Path

import torch
from hookdiff import UserError, hookimpl

class Samples(torch.utils.data.Dataset):
    "Each worker that loads a sample leaves a file with its process id."

    def __len__(self):
        return 64

    def __getitem__(self, index):
        Path(f"worker-{os.getpid()}").touch()
        return torch.full((1, 8, 8), index / 64), 0

class Pauses:
    "Stays in the second step."

    @hookimpl
    def after_backward(self, loop):
        if loop.progress.step == 1:
            Path("in-a-step").touch()
            while True:
                time.sleep(0.02)

class TakesAway:
    "Takes the lock of the run away."

    @hookimpl
    def after_optimizer_step(self, loop):
        (loop.run_dir / ".lock").unlink(missing_ok=True)

class Keeps:
    "Refuses its own state."

    @hookimpl
    def on_start(self): ...

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise UserError("not this state")
"""


SCRIPT = """
import torch
from hookdiff import Loop, LoopConfig, builtin_plugins
from hookdiff.testing.toy import ToyObjective, toy_model

model = toy_model()
for name, plugins, hparams in (
    ("given", builtin_plugins(), {"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "note": "mine"}),
    ("not-given", builtin_plugins(), None),
    ("bare", {}, None),
):
    optimizer, config = torch.optim.SGD(model.parameters(), lr=0.1), LoopConfig(steps=6, batch_size=8, log_every=2)
    Loop(model, optimizer, ToyObjective(), torch.zeros(40, 4), config, plugins, run_dir=name, hparams=hparams).run()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, write_config):
    (tmp_path / "hd_run_dir.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_config(run={"plugins": ["checkpoint"]})
    return tmp_path


def run_dir_loop(path, **options):
    return toy_loop({"run_dir": RunDir()}, run_dir=path, steps=2, **options)


def test_a_script_leaves_the_files_of_a_run(folder, hookdiff):
    output(hookdiff("run", "small.toml", "--plugins", "no:checkpoint", "--set", "run.log_every=2", "--out", "cli"))
    (folder / "script.py").write_text(SCRIPT)
    code, _, warned = python("import runpy; runpy.run_path('script.py', run_name='__main__')")
    assert code == 0, warned
    names = {path.name for path in (folder / "cli").iterdir()} - {"samples"}
    for name in ("given", "not-given"):
        assert {path.name for path in (folder / name).iterdir()} == names
        assert [line["step"] for line in records(folder / name)] == [2, 4, 6]
        assert json.loads((folder / name / "outcome.json").read_text())["reason"] == "done"
    run = {"steps": 6, "seed": 0, "batch_size": 8, "log_every": 2, "max_time": "0"}
    config = {"run": run, "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "note": "mine"}
    assert tomli.loads((folder / "given" / CONFIG).read_text()) == config
    assert tomli.loads((folder / "not-given" / CONFIG).read_text()) == {"run": run}
    assert not (folder / "bare").exists()
    for words in (("sample",), ("resume",), ("doctor",)):
        check_refused(hookdiff(*words, "given"), "config.toml", "data.source", "model.use", "script")
    (warning,) = warned.splitlines()
    check_facts(warning, "bare", "Loop(..., plugins={**builtin_plugins(), ...})", "metrics.jsonl")


def test_hparams_that_no_toml_file_can_hold_are_refused_before_anything_is_written(tmp_path):
    with refused(UserError, "hparams", "NoneType"):
        run_dir_loop(tmp_path / "run", hparams={"model": {"depth": None}}).run()
    assert not (tmp_path / "run").exists()


def test_a_loop_that_trains_nothing_does_not_warn_of_a_bare_run_directory(tmp_path, caplog):
    with toy_loop(run_dir=tmp_path):
        pass
    assert not caplog.messages


def test_a_second_loop_in_the_same_directory_is_refused(tmp_path):
    run = tmp_path / "run"
    with run_dir_loop(run) as first:
        next(first.steps())
        lock_run_dir(run, first.resources)
        assert (run / ".lock").read_text() == f"{socket.gethostname()} {os.getpid()}\n"
        with refused(UserError, run, "Loop"):
            toy_loop({"run_dir": RunDir(overwrite=True)}, run_dir=run).run()
        assert not (run / "outcome.json").exists()
        run_dir_loop(tmp_path / "other").run()
    assert (run / ".lock").read_text() == ""
    toy_loop({"run_dir": RunDir(overwrite=True)}, run_dir=run, steps=2).run()
    first.run()  # a second run of the first loop


def test_a_directory_that_another_run_has_just_made_is_refused(tmp_path):
    def another():
        run_dir_loop(tmp_path / "run").run()

    loop = toy_loop({"another": acting(on_start=another), "run_dir": RunDir()}, run_dir=tmp_path / "run", steps=2)
    with refused(UserError, tmp_path / "run", "--resume"):
        loop.run()
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["reason"] == "done"  # of the other run


def refuse(loop):
    """Log, and then raise an error."""
    loop.log({"mine": 1.0})
    loop.log.images({"its": torch.zeros(1, 1, 8, 8)})
    raise UserError("refused")


def test_a_start_that_is_refused_changes_no_file(tmp_path):
    run = tmp_path / "run"

    def loop(plugins=(), overwrite=False, core=True, **options):
        usual = builtin_plugins(overwrite=overwrite, signals=False) if core else {}
        return toy_loop({**usual, **dict(plugins)}, run_dir=run, log_every=1, **options)

    saves = {"checkpoint": Checkpoint(every=2)}
    loop(saves, steps=4).run()
    shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / ".step-00000008.partial")
    before, place = contents(run), os.stat(run).st_mtime_ns
    cases = [
        *({"plugins": plugins} for plugins in ({}, saves)),  # a used directory
        {"plugins": saves, "core": False},
        {"plugins": saves, "resume": run / "checkpoints" / "step-00000002"},
        {"plugins": saves, "resume": True, "seed": 1},
    ]
    for ways in ({"resume": True}, {"overwrite": True}):
        cases += [{"plugins": saves, "hparams": {"model": {"depth": None}}, **ways}]
        cases += [{"plugins": {**saves, "refuses": acting(on_start=refuse)}, **ways}]
    late = {"refuses": acting(on_ready=refuse)}
    cases += [{"plugins": plugins, "resume": True} for plugins in ({**saves, **late}, {**late, **saves})]
    for case in cases:
        with refused(UserError):
            loop(**case).run()
        assert contents(run) == before, case
        assert os.stat(run).st_mtime_ns == place, case


def test_an_existing_directory_is_locked_before_the_model_is_prepared(tmp_path):
    class Looks:
        @hookimpl(tryfirst=True)
        def prepare_model(self, loop):
            assert (loop.run_dir / ".lock").read_text()
            assert not (loop.run_dir / CONFIG).exists()

    toy_loop({"run_dir": RunDir(), "looks": Looks()}, run_dir=tmp_path, steps=1).run()
    assert (tmp_path / CONFIG).exists()


def test_the_leftovers_of_a_killed_start_count_as_an_empty_folder(tmp_path):
    (tmp_path / ".lock").write_text("elsewhere 17\n")
    (tmp_path / f".{CONFIG}.partial").write_text("[ru")
    check_run_dir(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with refused(UserError, tmp_path, "--resume", "--overwrite", "--out"):
        check_run_dir(tmp_path)


def test_a_run_that_was_done_but_not_recorded_so_is_recorded_when_it_is_resumed(tmp_path):
    def train(run, resume):
        plugins = {"run_dir": RunDir(), "checkpoint": Checkpoint()}
        assert toy_loop(plugins, run_dir=run, resume=resume, steps=2).run() == "done"

    run, branch = tmp_path / "run", tmp_path / "branch"
    train(run, resume=False)
    outcome = (run / "outcome.json").read_bytes()
    (run / "outcome.json").unlink()  # as if the run was killed between its last checkpoint and this file
    train(branch, resume=run)
    assert not branch.exists()
    train(run, resume=True)
    assert (run / "outcome.json").read_bytes() == outcome
    (run / "outcome.json").write_text("why it was done")
    train(run, resume=True)
    assert (run / "outcome.json").read_text() == "why it was done"


def test_a_run_under_way_has_no_outcome_of_an_earlier_process(tmp_path):
    are_there = []
    looks = acting(before_step=lambda: are_there.append((tmp_path / "outcome.json").exists()))
    for steps in (2, 4):
        plugins = {"run_dir": RunDir(), "checkpoint": Checkpoint(), "looks": looks}
        toy_loop(plugins, run_dir=tmp_path, resume=steps > 2, steps=steps).run()
        assert (tmp_path / "outcome.json").exists()
    assert are_there == [False] * 4


def test_overwriting_leaves_the_lock_and_nothing_else(tmp_path):
    run_dir_loop(tmp_path).run()
    before = (tmp_path / ".lock").stat().st_ino
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "file").touch()
    (tmp_path / "link").symlink_to("/etc")
    toy_loop({"run_dir": RunDir(overwrite=True)}, run_dir=tmp_path, steps=1).run()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", CONFIG, "outcome.json"}
    assert (tmp_path / ".lock").stat().st_ino == before


def test_a_lock_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with refused(UserError, tmp_path / ".lock", "folder"):
        run_dir_loop(tmp_path).run()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EIO, StorageError),
        (errno.EACCES, UserError),
        (errno.EROFS, UserError),
    ],
)
def test_a_failing_disk_is_a_storage_error(tmp_path, monkeypatch, number, kind):
    def fails(descriptor):
        raise OSError(number, os.strerror(number))

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "fsync", fails)
    for plugin, place in ((RunDir(), "run"), (Checkpoint(), "run/checkpoints")):
        with refused(UserError, tmp_path / place, os.strerror(number)) as caught:
            toy_loop({"plugin": plugin}, run_dir=tmp_path / "run").run()
        assert type(caught.value) is kind


@pytest.mark.wide
def test_a_run_on_a_full_disk_exits_with_1(folder, disk, hookdiff):
    def is_refused(*words):
        code, out, err = hookdiff(*words)
        assert (code, out) == (1, "")
        check_facts(err, "disk/run", "No space left on device")

    fill(disk, room=4096)  # enough for the lock
    for _ in range(2):  # before the run directory exists, and after
        is_refused("run", "small.toml", "--out", "disk/run")
    free(disk)
    assert hookdiff("run", "small.toml", "--out", "disk/run", "--set", "run.steps=2")[0] == 0
    fill(disk)
    is_refused("resume", "disk/run", "--steps", 9)


@pytest.mark.wide
def test_a_run_that_is_done_needs_no_writable_disk(folder, disk, mount, hookdiff):
    assert hookdiff("run", "small.toml", "--out", "disk/run", "--set", "run.steps=2")[0] == 0
    mount("-o", "remount,ro", disk)
    for words in ("resume disk/run", "run small.toml --out disk/run --resume --set run.steps=2"):
        code, out, err = hookdiff(*words.split())
        assert (code, err) == (0, "")
        check_facts(out, "disk/run", "2 of 2 steps")
    for words in ("resume disk/run --steps 9", "run small.toml --out disk/run --overwrite"):
        check_refused(hookdiff(*words.split()), "disk/run", "Read-only file system")


def test_a_run_that_cannot_be_resumed_keeps_its_config(folder):
    with_keeper = ["checkpoint", "hd_run_dir:Keeps"]
    build_loop(load_config(folder / "small.toml", with_keeper, ["run.steps=2"]), folder / "run").run()
    before = (folder / "run" / CONFIG).read_bytes()
    for out in ("run", "branch"):
        loop = build_loop(load_config(folder / "small.toml", with_keeper), folder / out, resume=folder / "run")
        with refused(UserError, "not this state"):
            loop.run()
    assert (folder / "run" / CONFIG).read_bytes() == before
    assert not (folder / "branch").exists()


def test_a_command_that_only_reads_neither_locks_nor_writes(folder, hookdiff):
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.steps=1")[0] == 0
    (folder / "run" / ".lock").unlink()
    config, hooks = load_config(folder / "run" / CONFIG), ("prepare_model", "restore")
    with build_loop(config, folder / "run", resume=True, hooks=hooks):
        assert hookdiff("sample", "run", "--num", 1, "--out", "x.png")[0] == 0
    assert not (folder / "run" / ".lock").exists()


def test_a_path_is_resolved_to_its_run(tmp_path):
    run = tmp_path / "runs" / "mine"
    step = run / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (run / CONFIG).touch()
    assert run_of(run) == run_of(step) == run
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "elsewhere").symlink_to("gone")
    for path, fact in (
        (run / "checkpoints", CONFIG),
        (tmp_path / "itself", "link"),
        (tmp_path / "elsewhere", "link"),
        (run / CONFIG, CONFIG),
        (tmp_path / "runs" / "mien", "'mine'"),
        (tmp_path / "no" / "where", "folder"),
    ):
        with refused(UserError, path, fact):
            run_of(path)


@pytest.mark.wide
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_golden_message_of_a_run_in_use_and_takeover_of_a_dead_one(folder, start, hookdiff, write_config, caplog):
    write_config(data={"source": "hd_run_dir:Samples", "workers": 2}, run={"plugins": ["checkpoint"]})
    process = start(folder, "run", "small.toml", "--out", "run", "--plugins", "hd_run_dir:Pauses")
    try:
        wait_for(folder / "in-a-step", process)
        begun = time.localtime((folder / "run" / ".lock").stat().st_mtime)
        owner = f"{time.strftime('%Y-%m-%d %H:%M:%S', begun)}, as process {process.pid} on {socket.gethostname()}"
        in_use = f"hookdiff: run has been running since {owner}; wait for it, stop it, or choose --out DIR\n"
        before = contents(folder / "run")
        for way in ((), ("--resume",), ("--overwrite",)):
            assert hookdiff("run", "small.toml", "--out", "run", *way) == (2, "", in_use)
        with refused(UserError, "has been running since"):
            toy_loop(builtin_plugins(), run_dir=folder / "run").run()
        assert (folder / "run" / CONFIG).exists()
        assert contents(folder / "run") == before
        loaded = {int(path.name.partition("-")[2]) for path in folder.glob("worker-*")}
        workers = loaded - {process.pid, os.getpid()}  # the run itself loads a sample for its shape
        assert len(workers) == 2
        for worker in workers:
            # A stopped worker outlives the run: it cannot check, every five seconds, that the run is alive.
            os.kill(worker, signal.SIGSTOP)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    try:
        assert hookdiff("run", "small.toml", "--out", "run", "--resume", "--set", "data.workers=0")[0] == 0
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)  # fails if a worker was not alive
    (took_over,) = [message for message in caplog.messages if str(process.pid) in message]
    check_facts(took_over, "run")
    assert any("checkpoint" in message for message in caplog.messages)  # the run has no checkpoint yet and starts anew


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no folder that is in use")
@pytest.mark.parametrize("way", ["move", "remove", "lock"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_directory_that_goes_away_ends_the_run(tmp_path, saves, way):
    run = tmp_path / "run"

    def take_away(loop):
        if loop.progress.step == 3 and way == "lock":
            (run / ".lock").unlink()
        elif loop.progress.step == 3:
            run.rename(tmp_path / "elsewhere")
        if way == "remove":
            shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)

    plugins = {**builtin_plugins(signals=False), "takes": acting(after_optimizer_step=take_away)}
    plugins |= {"checkpoint": Checkpoint(every=2)} if saves else {}
    with refused(StorageError, run, ".lock"):
        toy_loop(plugins, run_dir=run, log_every=1).run()
    assert run.exists() == (way == "lock")


def test_a_command_without_its_lock_exits_with_1(folder, hookdiff):
    words = ("--plugins", "hd_run_dir:TakesAway", "--set", "run.log_every=1")
    code, _, err = hookdiff("run", "small.toml", "--out", "run", *words)
    assert code == 1, err
    check_facts(err, "run", ".lock")
    assert len([line for line in err.splitlines() if line.startswith("hookdiff: ")]) == 1


ANOTHER = """
from hookdiff import builtin_plugins
from hookdiff.testing import toy_loop

toy_loop(builtin_plugins(overwrite=True), run_dir="run", steps=2, log_every=1).run()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_a_second_process_is_refused_and_one_that_found_no_lock_trains_alone(tmp_path):
    run = tmp_path / "run"

    def train_another(loop):
        if loop.progress.step == 1:
            code, _, err = python(ANOTHER, folder=tmp_path)
            assert code == 1
            check_facts(err, "run", f"process {os.getpid()} on {socket.gethostname()}")
            (run / ".lock").unlink()
            assert python(ANOTHER, folder=tmp_path)[0] == 0
            before.update(contents(run))

    before = {}
    plugins = {**builtin_plugins(signals=False), "another": acting(after_backward=train_another)}
    with refused(StorageError, run, ".lock"):
        toy_loop(plugins, run_dir=run, log_every=1).run()
    assert before
    assert contents(run) == before
