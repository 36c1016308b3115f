"""Signals: the first raises, later ones never cut the saving short, none is lost while a process is being started."""

import os
import signal
import threading

import pytest

from drafter import signals
from drafter.errors import Interrupted


@pytest.fixture(autouse=True)
def listening():
    with signals.listening(signal.SIGUSR1, signal.SIGUSR2):
        yield
    signals.listen()


def test_the_first_signal_raises_and_later_ones_are_ignored():
    with pytest.raises(Interrupted) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.value.exit_code == 128 + signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGUSR2)


def test_a_signal_between_starting_a_process_and_knowing_it_waits_for_the_end():
    known = []
    with pytest.raises(Interrupted), signals.held(), signals.held():
        os.kill(os.getpid(), signal.SIGUSR1)
        known.append("pid")
    assert known == ["pid"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_drops_in_a_destructor_is_raised_by_the_next_look():
    class Dropping:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Interrupted):
        dropped = Dropping()
        del dropped
        signals.raise_if_received()


def test_another_threads_hold_holds_nothing_back():
    inside, over = threading.Event(), threading.Event()

    def hold():
        with signals.held():
            inside.set()
            over.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(5)
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGUSR1)
    over.set()
    thread.join()


def test_nothing_interrupts_the_end():
    signals.mute()
    os.kill(os.getpid(), signal.SIGUSR1)
    signals.raise_if_received()


@pytest.mark.parametrize(("before", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_lost_terminal_ends_what_was_not_started_with_nohup(before, ends):
    own = signal.signal(signal.SIGHUP, before)
    try:
        assert (signal.SIGHUP in signals.wanted()) == ends
        assert {signal.SIGINT, signal.SIGTERM} <= set(signals.wanted())
    finally:
        signal.signal(signal.SIGHUP, own)
