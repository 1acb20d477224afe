"""The run directory: its lock, and what is written in it when."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hookdiff import StorageError, UserError, build_loop, hookimpl, load_config
from hookdiff.builtin.run_dir import RunDir
from hookdiff.disk import lock_run_dir
from hookdiff.disk.paths import CONFIG, check_run_dir, run_of
from hookdiff.testing import toy_loop
from hookdiff_checkpoint import Checkpoint

TOLD = "hookdiff: {} is in use by process {} on {}; wait for it, stop it, or choose --out DIR\n"
USER = """
import os
import time
from pathlib import Path

import torch
from hookdiff import UserError, hookimpl

class Samples(torch.utils.data.Dataset):
    "Loaded by workers; each writes down that it is there."

    def __len__(self):
        return 64

    def __getitem__(self, index):
        Path(f"worker-{os.getpid()}").touch()
        return torch.full((1, 8, 8), index / 64), 0

class Waits:
    "Says when it is in the second step, and stays there."

    @hookimpl
    def after_backward(self, loop):
        if loop.progress.step == 1:
            Path("in-a-step").touch()
            time.sleep(60)

class Keeps:
    "Has a state that it does not like to see again."

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise UserError("not this state")
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


def test_a_second_loop_on_the_same_directory_is_refused_and_the_same_loop_is_not(tmp_path):
    run = tmp_path / "run"
    with run_dir_loop(run) as first:
        lock_run_dir(first)
        assert (run / ".lock").read_text() == f"{socket.gethostname()} {os.getpid()}\n"
        with pytest.raises(UserError, match=r"run is in use by another Loop of this process$"):
            run_dir_loop(run).run()
        run_dir_loop(tmp_path / "other").run()
    assert (run / ".lock").read_text() == ""
    run_dir_loop(run).run()
    first.reason = None
    first.run()  # once more


def test_a_loop_whose_directory_another_made_meanwhile_is_refused(tmp_path):
    class Another:
        @hookimpl
        def on_start(self):
            run_dir_loop(tmp_path / "run").run()

    loop = toy_loop({"another": Another(), "run_dir": RunDir()}, run_dir=tmp_path / "run", steps=2)
    with pytest.raises(UserError, match=r"run exists; go on with --resume"):
        loop.run()


def test_an_existing_directory_is_locked_before_the_model_is_touched(tmp_path):
    class Looks:
        @hookimpl(tryfirst=True)
        def prepare_model(self, loop):
            assert (loop.run_dir / ".lock").read_text()
            assert not (loop.run_dir / CONFIG).exists()

    toy_loop({"run_dir": RunDir(), "looks": Looks()}, run_dir=tmp_path, steps=1).run()
    assert (tmp_path / CONFIG).exists()


def test_a_folder_with_nothing_but_what_a_killed_start_leaves_is_empty(tmp_path):
    (tmp_path / ".lock").write_text("elsewhere 17\n")
    (tmp_path / f".{CONFIG}.partial").write_text("[ru")
    check_run_dir(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="exists; go on with"):
        check_run_dir(tmp_path)


def test_overwriting_leaves_the_lock_and_nothing_else(tmp_path):
    with run_dir_loop(tmp_path):
        pass
    before = (tmp_path / ".lock").stat().st_ino
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "file").touch()
    (tmp_path / "link").symlink_to("/etc")
    toy_loop({"run_dir": RunDir(overwrite=True)}, run_dir=tmp_path, steps=1).run()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", CONFIG}
    assert (tmp_path / ".lock").stat().st_ino == before


def test_a_lock_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: Is a directory$"):
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
def test_a_disk_that_fails_at_the_start_is_no_mistake_of_the_user(tmp_path, monkeypatch, number, kind):
    def fails(descriptor):
        raise OSError(number, os.strerror(number))

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "fsync", fails)
    for plugin, place in ((RunDir(), "run"), (Checkpoint(), "run/checkpoints")):
        with pytest.raises(UserError) as caught:
            toy_loop({"plugin": plugin}, run_dir=tmp_path / "run").run()
        assert type(caught.value) is kind
        assert str(caught.value) == f"{tmp_path / place}: cannot be written: {os.strerror(number)}"


def test_a_run_on_a_full_disk_exits_with_1(folder, disk, hookdiff):
    def fill(room):
        (disk / "ballast").unlink(missing_ok=True)
        with (disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - room)

    fill(4096)  # enough for the lock
    for _ in range(2):  # before the directory is there, and after
        told = "hookdiff: disk/run: cannot be written: No space left on device\n"
        assert hookdiff("run", "small.toml", "--out", "disk/run") == (1, "", told)
    (disk / "ballast").unlink()
    assert hookdiff("run", "small.toml", "--out", "disk/run", "--set", "run.steps=2")[0] == 0
    fill(0)
    assert hookdiff("resume", "disk/run", "--steps", 9) == (1, "", told)


def test_a_run_that_is_done_says_so_on_a_disk_that_is_read_only(folder, disk, mount, hookdiff):
    assert hookdiff("run", "small.toml", "--out", "disk/run", "--set", "run.steps=2")[0] == 0
    mount("-o", "remount,ro", disk)
    for words in ("resume disk/run", "run small.toml --out disk/run --resume --set run.steps=2"):
        code, out, err = hookdiff(*words.split())
        assert (code, err) == (0, "")
        assert out.startswith("disk/run was done already, with 2 of 2 steps; ")
    told = "hookdiff: disk/run: cannot be written: Read-only file system\n"
    assert hookdiff("resume", "disk/run", "--steps", 9) == (2, "", told)
    assert hookdiff("run", "small.toml", "--out", "disk/run", "--overwrite") == (2, "", told)


def test_a_run_that_cannot_go_on_leaves_its_config(folder):
    with_keeper = ["checkpoint", "hd_run_dir:Keeps"]
    build_loop(load_config(folder / "small.toml", with_keeper, ["run.steps=2"]), folder / "run").run()
    before = (folder / "run" / CONFIG).read_bytes()
    for out in ("run", "branch"):
        loop = build_loop(load_config(folder / "small.toml", with_keeper), folder / out, resume=folder / "run")
        with pytest.raises(UserError, match="not this state"):
            loop.run()
    assert (folder / "run" / CONFIG).read_bytes() == before
    assert not (folder / "branch").exists()


def test_who_only_looks_neither_locks_nor_writes(folder, hookdiff):
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.steps=1")[0] == 0
    (folder / "run" / ".lock").unlink()
    with build_loop(
        load_config(folder / "run" / CONFIG), folder / "run", resume=True, hooks=("prepare_model", "restore")
    ):
        assert hookdiff("sample", "run", "--num", 1, "--out", "x.png")[0] == 0
    assert not (folder / "run" / ".lock").exists()


def test_which_run_a_path_belongs_to(tmp_path):
    run = tmp_path / "runs" / "mine"
    step = run / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (run / CONFIG).touch()
    assert run_of(run) == run
    assert run_of(step) == run
    for path, told in (
        (run / "checkpoints", "checkpoints is no run directory: it has no config.toml"),
        (run / CONFIG, "config.toml is no run directory: it has no config.toml"),
        (tmp_path / "runs" / "mien", "mien: no such folder; did you mean 'mine'?"),
        (tmp_path / "no" / "where", "where: no such folder"),
    ):
        with pytest.raises(UserError) as error:
            run_of(path)
        assert str(error.value).endswith(told)


def start(folder, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *sys.path))), "OMP_NUM_THREADS": "1"}
    code = "from hookdiff.cli import main; main()"
    with (folder / "stderr").open("wb") as file:  # no pipe, which stays open as long as a worker lives
        return subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, env=environment, stderr=file)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_one_run_has_one_writer_and_a_dead_one_is_followed_at_once(folder, hookdiff, write_config, caplog):
    write_config(data={"source": "hd_run_dir:Samples", "workers": 2}, run={"plugins": ["checkpoint"]})
    process = start(folder, "run", "small.toml", "--out", "run", "--plugins", "hd_run_dir:Waits")
    try:
        for _ in range(3000):
            if (folder / "in-a-step").exists():
                break
            assert process.poll() is None, (folder / "stderr").read_text()
            time.sleep(0.02)
        told = TOLD.format("run", process.pid, socket.gethostname())
        for way in ("--resume", "--overwrite"):
            assert hookdiff("run", "small.toml", "--out", "run", way) == (2, "", told)
        assert (folder / "run" / CONFIG).exists()
        loaded = {int(path.name.partition("-")[2]) for path in folder.glob("worker-*")}
        workers = loaded - {process.pid, os.getpid()}  # which looked at the shape of the data
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # so that they outlive it, for which they look every five seconds
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    try:
        assert hookdiff("run", "small.toml", "--out", "run", "--resume", "--set", "data.workers=0")[0] == 0
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)  # they were alive: else there is no such process
    assert f"run: took over the lock of process {process.pid}, which is gone" in caplog.text
    assert "run has no checkpoint to go on from: the run starts anew" in caplog.messages
