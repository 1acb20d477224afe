"""The first and the second signal, in the main process, in forked processes and in other threads."""

import os
import signal
import threading

import pytest

from hookdiff import UserError
from hookdiff.builtin.signals import Signals
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import acting, check_facts, refused, toy_run
from tests.forked import python

INT, TERM = signal.SIGINT, signal.SIGTERM


def levels(caplog):
    return [record.levelname for record in caplog.records]


def sends(hook, number=INT, at=3, after=None):
    """Return a plugin that sends a signal to this process in a hook of step `at`, and then appends to `after`."""

    def send(loop):
        if loop.progress.step == at:
            os.kill(os.getpid(), number)
            if after is not None:
                after.append(at)

    return acting(**{hook: send})


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


def stopped(*plugins, **options):
    signals = Signals(**options)
    loop = toy_loop({"signals": signals, **{str(number): plugin for number, plugin in enumerate(plugins)}})
    return loop, signals, loop.run()


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_first_signal_ends_the_run_after_the_current_step(number, caplog):
    loop, signals, reason = stopped(sends("after_backward", number))
    assert (reason, loop.progress.step, signals.caught) == ("signal", 4, number)
    assert levels(caplog) == ["WARNING"]
    assert_same(weights(loop), weights(toy_run(steps=4)))


def test_a_signal_does_not_interrupt_a_save():
    loop, _, reason = stopped(sends("between_steps", after=(after := [])))
    assert (reason, loop.progress.step, after) == ("signal", 3, [3])


def test_a_signal_during_the_start_ends_the_run_before_its_first_step():
    loop, signals, reason = stopped(sends("on_start", at=0))
    assert (reason, loop.progress.step, signals.caught) == ("signal", 0, INT)


def test_a_signal_at_the_end_leaves_a_run_done(caplog):
    loop, signals, reason = stopped(sends("on_stop", at=20, after=(after := [])))
    assert (reason, loop.end.reason, after, signals.caught) == ("done", "done", [20], INT)
    assert levels(caplog) == ["WARNING"]


def test_a_signal_does_not_interrupt_the_closing_of_resources():
    def open_(loop):
        loop.resources.callback(os.kill, os.getpid(), INT)

    signals = Signals()
    assert toy_loop({"opens": acting(on_start=open_), "signals": signals}).run() == "done"
    assert signals.caught == INT


def test_an_error_restores_the_handlers():
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        toy_loop({"signals": Signals(), "fails": acting(after_backward=fail)}).run()


def test_golden_messages_of_usr1_which_ends_the_run_as_out_of_time_and_a_later_sigterm(caplog):
    def send_again():
        for number in (signal.SIGUSR1, TERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)

    first = sends("after_backward", signal.SIGUSR1)
    loop, signals, reason = stopped(first, acting(on_stop=send_again), usr1=True)
    assert (reason, loop.progress.step, signals.caught) == ("time", 4, TERM)
    assert levels(caplog) == ["WARNING"] * 2
    assert caplog.messages == [
        "the time is nearly up: stopping after this step",
        "the run is already ending; a second signal ends the process at once",
    ]


def test_usr1_without_its_option_asks_for_a_save_and_the_run_goes_on(caplog):
    asked, first = [], sends("after_backward", signal.SIGUSR1)
    hears = acting(on_save_request=lambda loop: asked.append(loop.progress.step))
    assert [stopped(first, *more)[2] for more in ((hears,), ())] == ["done"] * 2
    warned = [text for text, level in zip(caplog.messages, levels(caplog), strict=True) if level == "WARNING"]
    assert (asked, len(warned)) == ([4], 1)  # of the run in which no plugin saves
    check_facts(warned[0], "on_save_request")


def test_a_system_without_usr1_refuses_the_option_alone(monkeypatch):
    monkeypatch.delattr(signal, "SIGUSR1")
    assert stopped()[2] == "done"
    with refused(UserError, "--usr1", "SIGUSR1", "max_time"):
        stopped(usr1=True)


def test_each_of_two_runs_counts_its_own_signals():
    signals = Signals()
    for _ in range(2):
        loop = toy_loop({"signals": signals, "sends": sends("after_backward")})
        assert (loop.run(), loop.progress.step, signals.caught) == ("signal", 4, INT)
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
@pytest.mark.wide
def test_a_forked_process_has_the_earlier_handlers():
    assert python(FORKS) == (0, f"{-TERM}\ndone None\n", "")


def test_another_thread_installs_no_handlers():
    reasons, before = [], signal.getsignal(INT)

    def look():
        assert signal.getsignal(INT) is before

    loop = toy_loop({"signals": Signals(usr1=True), "looks": acting(between_steps=look)})
    thread = threading.Thread(target=lambda: reasons.append(loop.run()))
    thread.start()
    thread.join()
    assert reasons == ["done"]
