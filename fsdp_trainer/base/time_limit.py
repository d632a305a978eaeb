"""A limit on the time that a block of Python code may take, in any thread."""

import ctypes
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
