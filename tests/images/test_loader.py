"""Test how workers handle signals."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import PATIENCE, check_facts
from tests.forked import python

# The script runs in its own process, which sends and blocks signals.
SCRIPT = """
import multiprocessing, os, signal
import torch
from functools import partial
from multiprocessing import connection, resource_sharer
from hookdiff.images.loader import Loader, read_batch

def read(epoch, index):
    if index == 0:  # as the worker hands over the memory of a sample
        with open("address", "w") as file:
            file.write(resource_sharer.DupFd(0)._id[0])
    heeds = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return torch.tensor([float(os.getpid()), float(heeds)]), None, 0, {}

before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
loader = Loader(partial(read_batch, read), 1, 2, False)
batches = loader.load((0, rows.numpy()) for rows in torch.arange(400).split(2))
worker, heeds = next(batches)[0][0].tolist()
worker = int(worker)
assert worker != os.getpid() and not heeds
with connection.Client(open("address").read(), authkey=multiprocessing.current_process().authkey):
    pass  # as a process that is killed while it takes one
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    os.kill(worker, number)
    assert next(batches)[0][0, 0] == worker
while not next(batches)[0][0, 1]:  # two that come together are one: the next is sent when the first has been handled
    pass
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise in whatever this process is at
os.kill(worker, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGTERM
os.write(1, b"ended")
os._exit(0)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_worker_survives_signals_to_all_processes_and_ends_at_the_second_sigterm(tmp_path):
    code, out, err = python(SCRIPT, folder=tmp_path, fresh=True)
    assert (code, out) == (0, "ended"), err
    assert "Traceback" not in err


SPAWNED = """
import multiprocessing, operator
from hookdiff.images.loader import Loader
if __name__ == "__main__":
    multiprocessing.set_start_method(METHOD)
    assert list(Loader(operator.neg, 1, 2, False).load([1, 2])) == [-1, -2]
"""


@pytest.mark.wide
@pytest.mark.skipif(os.name == "nt", reason="Windows has no forkserver")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_import_nothing_of_the_working_directory(tmp_path, method):
    """Python looks there first when it starts them, and it may be the run directory of a stranger."""
    run, script = tmp_path / "run", tmp_path / "script.py"
    run.mkdir()
    (run / "multiprocessing.py").write_text("open('canary', 'w')")
    script.write_text(SPAWNED.replace("METHOD", repr(method)))
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, cwd=run, env=around
    )
    assert done.returncode == 0, done.stderr
    assert not (run / "canary").exists()


FULL = """
import torch
from functools import partial
from hookdiff.images.loader import Loader, read_batch

def read(epoch, index):
    return torch.zeros(1 << 20), None, index, {}

list(Loader(partial(read_batch, read), 2, 2, False).load((0, rows.numpy()) for rows in torch.arange(64).split(8)))
"""


@pytest.mark.wide
def test_a_full_shared_memory_ends_in_one_message(tmp_path):
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "CODE": FULL}
    mounted = 'mount -t tmpfs -o size=8m tmpfs /dev/shm || exit 77; exec "$0" -c "$CODE"'
    command = ["unshare", "-m", "sh", "-c", mounted, sys.executable]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **paths})
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr}")
    assert done.returncode == 1
    check_facts(
        done.stderr.splitlines()[-1], "StorageError", "/dev/shm", "8.0 MiB", "--shm-size", "data.workers", "data.store"
    )
    assert done.stderr.count("Traceback") == 1  # that of the error itself
