"""Disks that are full, read-only, gone, or that fail: one message, no traceback, and nothing that was saved is lost."""

import errno
import logging
import os
import shutil
from threading import Event

import pytest

from hookdiff import StorageError, UserError
from hookdiff.builtin.logged import Metrics
from hookdiff.testing import assert_same, toy_loop, weights
from hookdiff_checkpoint import Checkpoint, find_checkpoints, read_checkpoint
from tests.conftest import acting, check_facts, fill, free, read_only, records, refused, toy_run, warnings
from tests.plugins.test_checkpoint_announced import Do

STEPS = 12


def before(calls):
    """Return a plugin that calls each function before the step that it is given for, while no save is running."""
    return Do({step - 1: call for step, call in calls.items()}, waits=True)


def run(run_dir, calls, resume=False, steps=STEPS, **options):
    run_dir.mkdir(exist_ok=True)
    plugin = Checkpoint(**{"every": 2, "keep_last": 9, **options})
    plugins = {"at": before(calls), "metrics": Metrics(), "checkpoint": plugin}
    return toy_run(plugins, run_dir=run_dir, resume=resume, steps=steps, log_every=1)


def steps(run_dir):
    """The steps of the checkpoints, each of which is read whole."""
    checkpoints, problems = find_checkpoints(run_dir)
    assert not problems
    return sorted(read_checkpoint(info.path)["progress"]["step"] for info in checkpoints)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return weights(run(tmp_path_factory.mktemp("whole"), {}))


def logged(run_dir):
    return [line["step"] for line in records(run_dir)]


def warnings_of_checkpoints(caplog):
    return [warning for warning in warnings(caplog) if "metrics.jsonl" not in warning]


@pytest.fixture(params=["seen before", "met while writing"])
def any_disk(request, disk, monkeypatch):
    """Return a small disk, which says how full it is, or under a quota shows it only when a write fails."""
    usage = shutil.disk_usage
    if request.param == "met while writing":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 40))
    return disk


def test_a_run_goes_on_when_the_disk_is_full(any_disk, whole, caplog):
    disk = any_disk
    caplog.set_level(logging.INFO)
    loop = run(disk / "run", {5: lambda: fill(disk), 10: lambda: free(disk)})
    assert_same(weights(loop), whole)
    assert steps(disk / "run") == [2, 4, 10, 12]
    (warning,) = warnings_of_checkpoints(caplog)
    check_facts(warning, f"{disk}/run/checkpoints", "No space left on device", "step-00000004")
    assert logged(disk / "run") == list(range(1, 13))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len([line for line in said if f"{disk}/run/checkpoints" in line]) == 1  # that it can be written again
    assert not [path for path in (disk / "run" / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_run_stops_when_the_disk_is_full_and_the_config_says_so(any_disk, caplog):
    with refused(StorageError, "No space left on device", "step-00000004"):
        run(any_disk / "run", {5: lambda: fill(any_disk)}, disk_full="stop")
    assert steps(any_disk / "run") == [2, 4]
    assert not warnings_of_checkpoints(caplog)


def test_golden_message_of_an_end_that_is_not_saved(disk, whole):
    with pytest.raises(StorageError) as caught:
        run(disk / "run", {12: lambda: fill(disk)})
    assert str(caught.value) == (
        f"the end of the run is not saved: no checkpoint could be written in {disk}/run/checkpoints: "
        f"No space left on device\n  the last good checkpoint is {disk}/run/checkpoints/step-00000010"
    )
    free(disk)
    again = run(disk / "run", {}, resume=True)
    assert again.first_step == 10
    assert_same(weights(again), whole)
    assert steps(disk / "run") == [2, 4, 6, 8, 10, 12]


def test_a_disk_that_is_full_from_the_start_leaves_no_checkpoint(disk):
    with refused(StorageError, disk / "run", "No space left on device") as caught:
        run(disk / "run", {2: lambda: fill(disk)}, disk_full="stop")
    assert "step-" not in str(caught.value)


def test_a_folder_that_is_read_only_is_refused_before_the_first_step(disk):
    (disk / "run").mkdir()
    read_only(disk)
    calls = {1: lambda: pytest.fail("a step was begun")}
    with refused(UserError, disk / "run" / "checkpoints", "Read-only file system") as caught:
        run(disk / "run", calls)
    assert not isinstance(caught.value, StorageError)


@pytest.fixture
def own_disk(tmp_path, small_disk):
    """A run directory whose checkpoints are on a disk of their own."""
    return small_disk(tmp_path / "run" / "checkpoints").parent


@pytest.mark.parametrize("disk_full", ["continue", "stop"])
def test_a_disk_that_becomes_read_only_ends_the_run(disk_full, own_disk):
    with refused(StorageError, "Read-only file system", "step-00000004"):
        run(own_disk, {6: lambda: read_only(own_disk / "checkpoints")}, disk_full=disk_full)
    assert steps(own_disk) == [2, 4]


def test_a_checkpoint_that_cannot_be_removed_causes_only_a_warning(tmp_path, whole, mount, caplog):
    first = tmp_path / "checkpoints" / "step-00000002"
    calls = {4: lambda: mount("--bind", first, first)}  # a folder that is in use so cannot be renamed
    assert_same(weights(run(tmp_path, calls, keep_last=1)), whole)
    (warning,) = warnings(caplog)
    check_facts(warning, first, "Device or resource busy")
    assert steps(tmp_path) == [2, 12]


def test_a_missing_folder_is_created_again(tmp_path, whole, caplog):
    loop = run(tmp_path, {6: lambda: shutil.rmtree(tmp_path / "checkpoints")})
    assert_same(weights(loop), whole)
    assert steps(tmp_path)[-4:] == [6, 8, 10, 12]
    (warning,) = warnings(caplog)
    check_facts(warning, tmp_path / "checkpoints")


def test_a_folder_that_is_removed_during_a_save_is_created_again(tmp_path, monkeypatch, caplog):
    sync, names = os.fsync, []

    def goes(descriptor):
        names.append(descriptor)
        if len(names) == 12:
            shutil.rmtree(tmp_path / "checkpoints")
        return sync(descriptor)

    monkeypatch.setattr(os, "fsync", goes)
    run(tmp_path, {}, steps=8)
    (warning,) = warnings(caplog)
    check_facts(warning, tmp_path / "checkpoints")
    assert steps(tmp_path)[-1] == 8


@pytest.mark.parametrize("number", range(1, 7))
def test_a_sync_that_fails_ends_the_run_at_the_next_step(number, tmp_path, monkeypatch, caplog):
    """The syncs are of the two files of tensors, the manifest, their folder (twice), and its parent."""
    sync, calls, failed = os.fsync, [], Event()

    def fails(descriptor):
        calls.append(descriptor)
        if len(calls) == number:
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    def wait(loop):
        if loop.progress.step == 5:
            failed.wait(300)

    calls_at = {3: lambda: monkeypatch.setattr(os, "fsync", fails)}
    plugins = {
        "wait": acting(after_optimizer_step=wait),
        "at": before(calls_at),
        "checkpoint": Checkpoint(every=2, keep_last=1),
    }
    loop = toy_loop(plugins, run_dir=tmp_path, steps=40)
    with refused(StorageError, tmp_path / "checkpoints", "Input/output error", "step-00000002") as caught:
        loop.run()
    assert isinstance(caught.value.__cause__, OSError)
    assert str(caught.value).count("Input/output error") == 1
    assert len(warnings(caplog)) == 1  # that nothing writes what is logged
    assert loop.progress.step in (4, 5, 6)
    monkeypatch.undo()
    # What could not be synced may be there, but nothing was removed for it.
    assert steps(tmp_path) == ([2, 4] if number == 6 else [2])


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path):
    run(tmp_path, {}, steps=4)
    (tmp_path / "checkpoints").chmod(0)
    try:
        with refused(UserError, "checkpoints", "Permission denied"):
            run(tmp_path, {}, resume=True)
    finally:
        (tmp_path / "checkpoints").chmod(0o755)
