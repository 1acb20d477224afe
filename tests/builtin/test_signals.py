"""The first and the second signal, in the main process, in forked processes and in other threads."""

import os
import signal
import threading

import pytest

from hookdiff import hookimpl
from hookdiff.builtin.signals import Signals
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import toy_run
from tests.forked import python

INT, TERM = signal.SIGINT, signal.SIGTERM


def levels(caplog):
    return [record.levelname for record in caplog.records]


class Sends:
    """Sends the signal `number` to this process in the hook `where` at step `at`."""

    def __init__(self, where, number=INT, at=3):
        self.where, self.number, self.at, self.after = where, number, at, []

    def send(self, hook, loop):
        if hook == self.where and loop.progress.step == self.at:
            os.kill(os.getpid(), self.number)
            self.after.append(loop.progress.step)

    @hookimpl
    def on_start(self, loop):
        self.send("on_start", loop)

    @hookimpl
    def after_backward(self, loop):
        self.send("after_backward", loop)

    @hookimpl
    def between_steps(self, loop):
        self.send("between_steps", loop)

    @hookimpl
    def on_stop(self, loop):
        self.send("on_stop", loop)


@pytest.fixture(autouse=True)
def handlers():
    """Check that each test restores the signal handlers; a signal that the run lets through fails the test."""
    numbers = (INT, TERM, signal.SIGUSR1)
    guard = lambda *_: pytest.fail("the run let a signal through")  # noqa: E731
    before = {number: signal.signal(number, guard) for number in numbers}
    yield
    now = [signal.getsignal(number) for number in numbers]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == [guard] * 3


def stopped(sends, **options):
    signals = Signals(**options)
    loop = toy_loop({"signals": signals, "sends": sends})
    return loop, signals, loop.run()


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_first_signal_ends_the_run_after_the_current_step(number, caplog):
    loop, signals, reason = stopped(Sends("after_backward", number))
    assert (reason, loop.progress.step, signals.caught) == ("signal", 4, number)
    assert levels(caplog) == ["WARNING"]
    assert_same(weights(loop), weights(toy_run(steps=4)))


def test_a_signal_does_not_interrupt_a_save():
    loop, _, reason = stopped(sends := Sends("between_steps"))
    assert (reason, loop.progress.step, sends.after) == ("signal", 3, [3])


def test_a_signal_during_the_start_ends_the_run_before_its_first_step():
    loop, signals, reason = stopped(Sends("on_start", at=0))
    assert (reason, loop.progress.step, signals.caught) == ("signal", 0, INT)


def test_a_signal_at_the_end_leaves_a_run_done(caplog):
    loop, signals, reason = stopped(sends := Sends("on_stop", at=20))
    assert (reason, loop.end.reason, sends.after, signals.caught) == ("done", "done", [20], INT)
    assert levels(caplog) == ["WARNING"]


def test_a_signal_does_not_interrupt_the_closing_of_resources():
    class Opens:
        @hookimpl
        def on_start(self, loop):
            loop.resources.callback(lambda: os.kill(os.getpid(), INT))

    signals = Signals()
    assert toy_loop({"opens": Opens(), "signals": signals}).run() == "done"
    assert signals.caught == INT


def test_an_error_restores_the_handlers():
    class Fails:
        @hookimpl
        def after_backward(self):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        toy_loop({"signals": Signals(), "fails": Fails()}).run()


def test_usr1_ends_the_run_as_out_of_time(caplog):
    loop, signals, reason = stopped(Sends("after_backward", signal.SIGUSR1), usr1=True)
    assert (reason, loop.progress.step, signals.caught) == ("time", 4, None)
    assert levels(caplog) == ["WARNING"]


def test_golden_messages_of_usr1_and_a_later_sigterm(caplog):
    class Again(Sends):
        @hookimpl
        def on_stop(self):
            for number in (signal.SIGUSR1, TERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)

    _, signals, reason = stopped(Again("after_backward", signal.SIGUSR1), usr1=True)
    assert (reason, signals.caught) == ("time", TERM)
    assert caplog.messages == [
        "the time is nearly up: stopping after this step",
        "the run is already ending; a second signal ends the process at once",
    ]


def test_each_of_two_runs_counts_its_own_signals():
    signals, sends = Signals(), Sends("after_backward")
    for step in (4, 4):
        loop = toy_loop({"signals": signals, "sends": sends})
        assert (loop.run(), loop.progress.step, signals.caught) == ("signal", step, INT)
    assert toy_loop({"signals": signals}).run() == "done"
    assert signals.caught is None


FORKS = """
import os, signal, warnings
from hookdiff.builtin.signals import Signals
from hookdiff import hookimpl
from hookdiff.testing.toy import toy_loop

class Forks:
    @hookimpl
    def after_backward(self, loop):
        if loop.progress.step == 2:
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

warnings.simplefilter("ignore")  # of newer Pythons, which dislike forks beside threads
signals = Signals()
print(toy_loop({"signals": signals, "forks": Forks()}).run(), signals.caught)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_process_has_the_earlier_handlers():
    assert python(FORKS) == (0, f"{-TERM}\ndone None\n", "")


def test_another_thread_installs_no_handlers():
    reasons, before = [], signal.getsignal(INT)

    class Looks:
        @hookimpl
        def between_steps(self):
            assert signal.getsignal(INT) is before

    loop = toy_loop({"signals": Signals(usr1=True), "looks": Looks()})
    thread = threading.Thread(target=lambda: reasons.append(loop.run()))
    thread.start()
    thread.join()
    assert reasons == ["done"]
