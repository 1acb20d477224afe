"""Test how workers handle signals."""

import os
import subprocess
import sys

import pytest

from tests.conftest import PATIENCE

# The script runs in its own process: when a worker dies, torch raises at an arbitrary line of the parent.
SCRIPT = """
import os, signal
import torch
from functools import partial
from hookdiff.data.loader import Loader, read_batch

def read(epoch, index):
    heeds = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return torch.tensor([float(os.getpid()), float(heeds)]), None, 0, {}

before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
batches = Loader(partial(read_batch, read), 1, 2, False).load((0, rows.numpy()) for rows in torch.arange(400).split(2))
worker, heeds = next(batches)[0][0].tolist()
worker = int(worker)
assert worker != os.getpid() and not heeds
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    os.kill(worker, number)
    assert next(batches)[0][0, 0] == worker
while not next(batches)[0][0, 1]:  # two that come together are one: the next is sent when the first has been handled
    pass
try:
    os.kill(worker, signal.SIGTERM)
    list(batches)
except (RuntimeError, OSError, EOFError):  # by what the worker was at when it died
    os.write(1, b"ended")
os._exit(0)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_worker_survives_signals_to_all_processes_and_ends_at_the_second_sigterm():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "ended", done.stderr
