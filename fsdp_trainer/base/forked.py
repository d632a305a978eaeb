"""Calls at the same time, each in a forked process, which has all that this one has imported."""

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from fsdp_trainer.base.process import cores

T = TypeVar("T")


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of calls, of which all but the last may run in processes of their own.

    On a machine with GPUs so does the last: its backward would start autograd's thread for each
    GPU, and no process forked later could compute gradients. What a call raises is raised here. One
    whose process dies is made here again.
    """
    forks = "fork" in multiprocessing.get_all_start_methods() and cores() > 1
    if not forks or torch.cuda.is_initialized():
        return [call() for call in calls]
    context = multiprocessing.get_context("fork")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the child would print it again
    children = []
    count = len(calls) - (torch.cuda.device_count() == 0)
    for call in calls[:count]:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_send_result, args=(call, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append((call, child, ours))
    here = [call() for call in calls[count:]]
    return [_received(*each) for each in children] + here


def _send_result(call: Callable[[], T], theirs: Connection) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        theirs.send((call(), None))
    except Exception as error:
        theirs.send((None, error))


def _received(call: Callable[[], T], child: BaseProcess, ours: Connection) -> T:
    """Return what a child sends, or raise it; make the call here if it sends nothing."""
    try:
        result, error = ours.recv()
    except Exception:  # nothing came, or an error that cannot be sent: it is raised here then
        return call()
    finally:
        child.join()
    if error is not None:
        raise error
    return result
