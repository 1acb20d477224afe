"""The hook on_checkpoint: once for each save that is on the disk, and never for another."""

import errno
import os
import signal
import threading
import time

import pytest

from hookdiff import StorageError, hookimpl
from hookdiff.run_dir import step_of
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint, find_checkpoints
from tests.conftest import Logged, RollBackAt, StopAt, acting, check_facts, fill, free, warnings


class Do:
    """Calls each function once, before the batch at its position; with `waits`, after the save under way."""

    def __init__(self, calls, waits=False):
        self.calls, self.waits = calls, waits

    @hookimpl
    def before_step(self, loop):
        if call := self.calls.pop(loop.progress.position, None):
            if self.waits:
                loop.plugins["checkpoint"].on_nan(loop)
            call()


def train(run, steps, extra=None, resume=False, **options):
    """Train on 4 batches an epoch, with a save every 2 steps; return the places that were announced, and the loop."""
    run.mkdir(exist_ok=True)
    places, checkpoint = [], Checkpoint(**{"every": 2, "keep_last": 9, **options})
    # Position and epoch are read from the folder of the checkpoint when the hook fires.
    note = lambda path: places.append((step_of(path.name), *find_checkpoints(path)[0][0].place))  # noqa: E731
    plugins = {"announced": acting(on_checkpoint=note), **(extra or {}), "checkpoint": checkpoint}
    loop = toy_loop(plugins, run_dir=run, resume=resume, steps=steps, batch_size=10)
    try:
        loop.run()
    except (StorageError, RuntimeError, KeyboardInterrupt) as error:
        return places, error
    return places, loop


def on_disk(run):
    """Return step, position and epoch of all checkpoints, the oldest first."""
    checkpoints, problems = find_checkpoints(run)
    assert not problems
    return [(step_of(info.path.name), *info.place) for info in reversed(checkpoints)]


@pytest.mark.parametrize(
    ("steps", "options", "saves"),
    [
        (6, {}, [(2, 2, 0), (4, 4, 1), (6, 6, 1)]),
        (8, {"every": 4}, [(4, 4, 1), (8, 8, 2)]),  # the last steps of an epoch, and of the run
        (8, {"every": "1 epochs"}, [(4, 4, 1), (8, 8, 2)]),
        (12, {"extra": {"stop": StopAt(4)}}, [(2, 2, 0), (4, 4, 1)]),
        (6, {"extra": {"bad": RollBackAt(5)}}, [(2, 2, 0), (4, 4, 1), (6, 8, 2)]),
    ],
)
def test_each_save_is_announced_once(steps, options, saves, tmp_path):
    places, _ = train(tmp_path, steps, **options)
    assert places == on_disk(tmp_path) == saves


def test_a_value_that_is_logged_at_the_end_of_an_epoch_belongs_to_its_save(tmp_path):
    score = acting(on_epoch_end=lambda loop: loop.log({"score": float(loop.progress.epoch)}))
    train(tmp_path, 12, extra={"score": score}, every=4, keep_last=1, keep_best="score")
    assert [step for step, *_ in on_disk(tmp_path)] == [4, 12]


def test_a_second_save_of_a_step_is_a_checkpoint_of_its_own(tmp_path):
    void = acting(unscale=lambda loop: loop.progress.position != 6)
    stop = acting(between_steps=lambda loop: loop.stop() if loop.progress.position == 7 else None)
    places, _ = train(tmp_path, 9, extra={"void": void, "stop": stop})
    assert places == [(2, 2, 0), (4, 4, 1), (6, 6, 1), (6, 7, 1)]
    assert on_disk(tmp_path) == [(2, 2, 0), (4, 4, 1), (6, 7, 1)]


@pytest.mark.parametrize("disk_full", ["continue", "stop"])
def test_a_save_that_fails_is_not_announced_and_its_repetition_is(disk_full, disk):
    run = disk / "run"
    do = Do({5: lambda: fill(disk), 7: lambda: free(disk)}, waits=True)
    places, end = train(run, 11, extra={"do": do}, disk_full=disk_full)
    free(disk)
    assert places == on_disk(run)
    assert [step for step, *_ in places] == ([2, 4, 8, 10, 11] if disk_full == "continue" else [2, 4])
    assert isinstance(end, StorageError) == (disk_full == "stop")


def test_a_save_that_fails_and_is_repeated_at_its_own_step(disk):
    run = disk / "run"
    places, _ = train(run, 6, extra={"do": Do({5: lambda: fill(disk)}, waits=True), "frees": Frees(disk)}, every=6)
    assert places == on_disk(run) == [(6, 6, 1)]


class Frees:
    """Frees the disk after a save has failed: when the run is over."""

    def __init__(self, disk):
        self.disk = disk

    @hookimpl(trylast=True)
    def between_steps(self, loop):
        if loop.progress.step == 6:
            loop.plugins["checkpoint"].on_nan(loop)  # waits for the save under way
            free(self.disk)


@pytest.mark.parametrize("options", [{"keep_best": "loss", "keep_last": 1}, {"keep_last": 1}, {"keep_every": 2}])
def test_checkpoints_that_are_removed_later_are_announced_too(options, tmp_path):
    places, _ = train(tmp_path, 12, extra={"logged": Logged()}, **options)
    assert places == [(2, 2, 0), (4, 4, 1), (6, 6, 1), (8, 8, 2), (10, 10, 2), (12, 12, 3)]
    assert set(on_disk(tmp_path)) <= set(places)


def test_a_resumed_run_announces_only_its_own(tmp_path):
    assert train(tmp_path, 4)[0] == [(2, 2, 0), (4, 4, 1)]
    assert train(tmp_path, 4, resume=True)[0] == []
    assert train(tmp_path, 7, resume=True)[0] == [(6, 6, 1), (7, 7, 1)]


def test_a_branch_announces_only_its_own_and_has_a_checkpoint_if_it_ends_in_its_first_step(tmp_path):
    train(tmp_path / "trunk", 4)
    ends = {"bad": RollBackAt(4, verdict="stop")}
    for branch, extra, saves in (("whole", {}, [(6, 6, 1), (7, 7, 1)]), ("ended", ends, [(4, 4, 1)])):
        places, _ = train(tmp_path / branch, 7, resume=tmp_path / "trunk", extra=extra)
        assert places == on_disk(tmp_path / branch) == saves, branch
    assert train(tmp_path / "ended", 6, resume=True)[0] == [(6, 6, 1)]


def fails():
    raise RuntimeError("mine")


@pytest.mark.usefixtures("slow_disk")
def test_a_save_under_way_when_the_run_fails(tmp_path):
    places, error = train(tmp_path, 12, extra={"do": Do({4: fails})}, every=4)
    assert str(error) == "mine"
    assert places == on_disk(tmp_path) == [(4, 4, 1)]


def test_a_save_that_fails_as_the_run_fails_is_warned_of_and_not_announced(tmp_path, monkeypatch, caplog):
    def fails_to_sync(descriptor):
        time.sleep(0.1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    breaks = Do({3: lambda: monkeypatch.setattr(os, "fsync", fails_to_sync)}, waits=True)
    # The step fails while the save of the step before it is under way.
    places, error = train(tmp_path, 12, extra={"breaks": breaks, "fails": Do({4: fails})})
    assert str(error) == "mine"
    assert places == on_disk(tmp_path) == [(2, 2, 0)]
    _, warning = warnings(caplog)  # the first one is that nothing writes what is logged
    check_facts(warning, tmp_path / "checkpoints", "Input/output error")


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals")
def test_a_wait_for_a_save_that_is_interrupted(tmp_path, monkeypatch):
    sync, signals = os.fsync, [signal.SIGINT]

    def slow(descriptor):
        if signals and threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
            os.kill(os.getpid(), signals.pop())  # KeyboardInterrupt in the training, which waits for this save
            time.sleep(0.5)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    places, error = train(tmp_path, 12, every=1)
    assert isinstance(error, KeyboardInterrupt)
    assert places == on_disk(tmp_path) == [(1, 1, 0)]
