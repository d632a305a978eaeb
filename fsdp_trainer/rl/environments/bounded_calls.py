"""Calls of environments side by side, each with a time limit. Imports no torch."""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

Call = Callable[[], Any]
"""A call of an environment: it returns a value, or an awaitable of one."""


class TookTooLong(Exception):
    """Raised in place of the value of a call that reached its time limit."""


def call_all(calls: Sequence[Call], at_once: int, seconds: float) -> list[Any]:
    """Return for each call its value, or the exception that it raised.

    at_once: calls that are made at the same time. seconds: time limit of each, from its own start.
    A thread cannot be ended: one that reached the limit is left alone, and another takes its place.
    """
    results: list[Any] = [None] * len(calls)
    waiting = list(enumerate(calls))[::-1]
    running: dict[int, tuple[Future, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            i, call = waiting.pop()
            running[i] = start(call, seconds), time.monotonic() + seconds
        _wait_for_one(running)
        for i, (future, ends_at) in list(running.items()):
            if future.done():
                results[i] = future.exception() or future.result()
            elif time.monotonic() >= ends_at:
                results[i] = TookTooLong(f"took more than {seconds:g} s")
            else:
                continue
            del running[i]
    return results


def _wait_for_one(running: dict[int, tuple[Future, float]]) -> None:
    """Wait until one of the calls is done, or has reached its time limit."""
    is_done = threading.Event()
    for future, _ in running.values():
        future.add_done_callback(lambda _: is_done.set())
    nearest = min(ends_at for _, ends_at in running.values())
    is_done.wait(max(0.0, nearest - time.monotonic()))


def start(call: Call, seconds: float) -> Future:
    """Start a call in a thread of its own; an awaitable that it returns is awaited in one loop."""
    future: Future = Future()

    def run() -> None:
        try:
            value = call()
            if inspect.isawaitable(value):
                limited = asyncio.wait_for(_as_coroutine(value), seconds)
                value = asyncio.run_coroutine_threadsafe(limited, event_loop()).result()
            future.set_result(value)
        except TimeoutError:
            future.set_exception(TookTooLong(f"took more than {seconds:g} s"))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="environment").start()
    return future


async def _as_coroutine(value: Awaitable[Any]) -> Any:
    return await value


@lru_cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop in which all environments of this process await, run by one thread.

    Connections that an environment keeps between its calls belong to a loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="environments").start()
    return loop
