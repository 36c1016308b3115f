"""Signals: the first raises Interrupted, later ones are ignored, so that nothing interrupts saving."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from drafter.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a request to end, a lost terminal

_received: int | None = None
_holds = 0
_held_back = False
_muted = False


def wanted() -> tuple[int, ...]:
    """SIGNALS, without SIGHUP if it is ignored already: under nohup a lost terminal must not stop the program."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(signum for signum in SIGNALS if not (ignored and signum == signal.SIGHUP))


def listen(*signums: int) -> None:
    """From now on the first of these signals raises Interrupted in the main thread."""
    global _received, _muted
    _received, _muted = None, False
    for signum in signums:
        signal.signal(signum, _note)


@contextlib.contextmanager
def listening(*signums: int) -> Iterator[None]:
    """`listen` until the end of the block, then restore the handlers."""
    before = {signum: signal.getsignal(signum) for signum in signums}
    listen(*signums)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def mute() -> None:
    """From now on ignore every signal: the program is cleaning up."""
    global _muted
    _muted = True


def raise_if_received() -> None:
    """Raise Interrupted if a signal has come: Python drops what a handler raises inside a destructor or a callback.

    For the main loops; never call it while cleaning up.
    """
    if _received is not None and not _muted:
        raise Interrupted(_received)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay signals to the end of the block, for example between starting a process and recording it."""
    global _holds, _held_back
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run only in the main thread
        return
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        if _held_back and not _holds and _received is not None:
            _held_back = False
            raise Interrupted(_received)


def taken(signum: int) -> None:
    """Note that an event loop's own handler received the first signal, so that later ones are ignored."""
    global _received
    _received = signum


def _note(signum: int, _frame) -> None:
    global _received, _held_back
    if _received is not None or _muted:
        return
    _received = signum
    if _holds:
        _held_back = True
    else:
        raise Interrupted(signum)
