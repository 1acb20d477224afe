"""Workers: which signals they heed."""

import os
import signal

import pytest
import torch
from torch.utils.data import Dataset

from hookdiff.data.loader import Loader


class Pids(Dataset):
    """Each sample is the number of the process that loads it."""

    def __getitem__(self, address):
        return torch.tensor(os.getpid()), 0, 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_worker_goes_on_through_what_is_sent_to_all_and_ends_at_the_second_sigterm():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    batches = Loader(Pids(), 1, 2, False).load(0, torch.arange(40).split(2))
    worker = int(next(batches)[0][0])
    assert worker != os.getpid()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
        assert int(next(batches)[0][0]) == worker
    os.kill(worker, signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"worker \(pid.* (killed by signal: Terminated|exited unexpectedly)"):
        list(batches)
