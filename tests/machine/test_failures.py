"""What ranks say of the error that ends a run; real processes that talk over gloo."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from hookdiff.errors import OnAnotherRank, UserError
from hookdiff.machine.failures import Failures, is_from_elsewhere
from hookdiff.machine.joining import joined, leave
from tests.conftest import wait_until
from tests.forked import forked

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo")


def work(number: int, port: int, folder: Path) -> None:
    """Keep the store of two ranks until it is killed; or be one of them, and fail once the store has ended."""
    if number == 2:
        store = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        while store:
            time.sleep(1)
    numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    with joined("cpu"):
        failures = Failures()
        failures.begin()
        distributed.all_reduce(torch.ones(1))
        (folder / f"joined {number}").touch()
        wait_until((folder / "killed").exists)
        failures.add(ValueError("gone"))
        print("RESULT", failures.first("ValueError: gone"), flush=True)
    leave(0)


def test_without_the_store_a_rank_says_what_it_knows(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with forked(tmp_path, 3, work, port, tmp_path) as (first, second, store):
        wait_until(lambda: (tmp_path / "joined 0").exists() and (tmp_path / "joined 1").exists())
        store.process.kill()
        store.process.wait()
        (tmp_path / "killed").touch()
        for rank, one in enumerate((first, second)):
            code, out, err = one.finish()
            assert (code, out) == (0, f"RESULT rank {rank}: ValueError: gone\n"), err


def test_an_error_comes_from_elsewhere_if_another_rank_has_sent_its_cause() -> None:
    sent, own = ValueError("on rank 1: gone"), UserError("a path")
    sent.__cause__, own.__cause__ = OnAnotherRank("on rank 1: gone"), KeyError("x")
    outer = RuntimeError("no checkpoint")
    outer.__cause__ = sent
    assert [is_from_elsewhere(error) for error in (sent, outer, own, ValueError())] == [True, True, False, False]


def test_alone_an_error_is_the_only_one() -> None:
    failures = Failures()
    failures.begin()
    failures.add(ValueError("gone"))
    assert failures.first("ValueError: gone") == "ValueError: gone"
