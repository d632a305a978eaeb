"""Limits on the time that a block of Python code may take."""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlow(BaseException):
    """Raised in a block that exceeds its time limit.

    No Exception, so that the code in the block cannot handle it by mistake.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after `seconds`, between two operations of Python code.

    A single long operation in C is not interrupted.
    """
    ident = ctypes.c_ulong(threading.get_ident())
    lock, is_over = threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TooSlow))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_over = True


@contextmanager
def search_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after `seconds`, also within a search of a regular expression.

    Such a search looks for signals, and only the main thread gets them: others have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
