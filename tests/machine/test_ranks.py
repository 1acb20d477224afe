from pathlib import Path

import pytest

from hookdiff.machine.ranks import agree, first_rank_says, gathered_or_raised, num_ranks, rank, standing_in
from tests.conftest import two_ranks


def test_a_single_process_is_the_first_of_one_rank() -> None:
    assert (rank(), num_ranks(), [first_rank_says(value) for value in (True, False)]) == (0, 1, [True, False])


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_flag_of_one_rank_is_enough(own: bool, other: bool) -> None:
    assert agree(own) == own  # alone
    with standing_in(0, 2, lambda kind, value: [value, other]):
        assert agree(own) == (own or other)


RANK = """
import time, torch
from hookdiff import Due, hookimpl
from hookdiff.testing.toy import toy_loop

class Evaluates:
    "Sums over the ranks after each step, and again when it is due: all ranks must be due at the same step."
    due, steps = None, []
    @hookimpl
    def on_start(self, loop):
        self.due = Due("0.1 s")
    @hookimpl
    def after_optimizer_step(self, loop):
        distributed.all_reduce(torch.ones(3))
        time.sleep(0.005)
        if self.due.after_step(loop.progress.step):
            distributed.all_reduce(torch.ones(2))
            self.steps.append(loop.progress.step)
        if len(self.steps) == 3 and not loop.config.max_time.amount:
            loop.stop()

plugin = Evaluates()
first = toy_loop({"evaluates": plugin}, steps=10_000)
second = toy_loop({"evaluates": plugin}, steps=10_000, max_time="0.3 s")
for loop in (first, second):
    distributed.barrier()
    time.sleep(0.15 * rank)  # the clock of the second rank starts later
    loop.run()
result = first.progress.step, second.end.reason, second.progress.step, plugin.steps
"""


def test_intervals_of_time_are_due_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    one, other = two_ranks(RANK, tmp_path)
    assert one == other
    first, reason, second, evaluated = one
    assert len(evaluated) >= 3
    assert (reason, first, second > 0) == ("time", evaluated[2], True)


RAISED = """
from hookdiff import UserError
from hookdiff.machine.ranks import gathered_or_raised
def only(kind, at):
    def call():
        if rank == at:
            raise kind("the disk is gone")
        return rank
    return call
result = [gathered_or_raised(lambda: 10 * rank)]
for kind, at in ((ValueError, 1), (UserError, 0), (OSError, 1), (ValueError, 5)):
    try:
        result.append(gathered_or_raised(only(kind, at)))
    except Exception as error:
        code = [error.exit_code] if hasattr(error, "exit_code") else []
        result.append((type(error).__name__, str(error), *code))
"""


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = two_ranks(RAISED, tmp_path)
    own = "the disk is gone"
    of_first, of_second = f"on rank 0: {own}", f"on rank 1: {own}"
    assert first == [[0, 10], ("ValueError", of_second), ("UserError", own, 2), ("OnAnotherRank", of_second, 1), [0, 1]]
    assert second == [[0, 10], ("ValueError", own), ("OnAnotherRank", of_first, 2), ("OSError", own), [0, 1]]


def test_alone_an_error_is_raised_as_it_is() -> None:
    assert gathered_or_raised(lambda: 3) == [3]
    with pytest.raises(KeyError):
        gathered_or_raised(lambda: {}["x"])


ASIDE = """
import os, threading
from hookdiff.machine.background_group import BackgroundGroup
class Odd(Exception):
    "Another process cannot read it."
    def __init__(self, first, second):
        super().__init__(first)
aside, result = BackgroundGroup(), []
def beside(call):
    "Call it on all ranks in threads, while the training goes on."
    def work():
        try:
            result.append(aside.gathered_or_raised(call))
        except Exception as error:
            result.append((type(error).__name__, str(error)))
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        distributed.all_reduce(torch.ones(3))
    thread.join()
def fails(*errors):
    def call():
        if errors[rank]:
            raise errors[rank]
    return call
beside(lambda: 10 * rank)
beside(fails(None, OSError(28, "full")))
beside(fails(ValueError("first"), ValueError("second")))
beside(fails(None, Odd("one", "two")))
beside(lambda: "well")
if rank:
    print("RESULT", result, flush=True)
    os._exit(0)
try:
    aside.gathered_or_raised(lambda: 1)
except OSError as error:
    result.append((type(error).__name__, str(error)))
aside.close()
"""


def test_threads_beside_the_training_end_alike_on_all_ranks(tmp_path: Path) -> None:
    first, second = two_ranks(ASIDE, tmp_path)
    errors = [("OSError", "[Errno 28] full"), ("ValueError", "first"), ("RuntimeError", "Odd: one")]
    assert second == [[0, 10], *errors, ["well", "well"]]
    assert first == [*second, ("ConnectionError", "another rank has ended; its own message says why")]
