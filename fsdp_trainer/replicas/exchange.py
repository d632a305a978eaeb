"""Sums of tensors over the groups of ranks that share a run."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from fsdp_trainer.base.eight_bit_messages import decode, encode

MESSAGE_BYTES = 2**26
"""Small tensors are sent together in messages of about this size."""
LATE_SECONDS = 5.0
"""A group may always come this much later to a sum than another; see `Patience`."""


class Patience:
    """The time that a group waits for another one in a sum.

    Groups have about equally many rows, so one that is as much later as this group needed for its
    own, and later than LATE_SECONDS, is taken to be stuck.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def left(self) -> timedelta:
        """Return how long a sum that begins now may take."""
        return timedelta(seconds=max(LATE_SECONDS, time.monotonic() - self._began))


def sum_over_groups(group: dist.ProcessGroup, tensors: Iterable[Tensor], wait: timedelta) -> None:
    """Sum tensors in place over the groups. Collective of their ranks with the same number.

    group: a process group of torchft's. Raises RuntimeError if one of them ends or does not come
    within `wait`; some of the tensors are then sums and some are not.
    """
    for message in messages(tensors):
        begin_sum(group, message, wait)()


class MeanInFlight:
    """Means of tensors over the groups, which are computed while this rank goes on."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        tensors: list[Tensor],
        counts: bool,
        wait: timedelta,
        quantize: bool,
    ):
        """Begin to sum in place. Collective. group: None: there is one group.

        counts: False if this group has nothing to add: its tensors are 0, and the mean is over the
        others. wait: as in sum_over_groups. quantize: whether to send 8-bit numbers.
        """
        self._tensors = tensors
        self._count = tensors[0].new_tensor([float(counts)]) if tensors else torch.ones(1)
        begin = begin_quantized_sum if quantize else begin_sum
        self._finish: list[Callable[[], None]] = []
        self._error: RuntimeError | None = None
        try:
            if group:
                self._finish = [begin(group, message, wait) for message in messages(tensors)]
                self._finish.append(begin_sum(group, [self._count], wait))
        except RuntimeError as error:
            self._error = error

    def finish(self) -> list[Tensor]:
        if self._error:
            raise self._error
        for finish in self._finish:
            finish()
        return [tensor / self._count.clamp_min(1) for tensor in self._tensors]


def begin_sum(
    group: dist.ProcessGroup, message: Sequence[Tensor], wait: timedelta
) -> Callable[[], None]:
    options = dist.AllreduceOptions()  # of a sum
    options.timeout = wait
    together = message[0]
    if len(message) > 1 or not together.is_contiguous():
        together = torch.cat([tensor.reshape(-1) for tensor in message])
    work = group.allreduce([together], options)

    def finish() -> None:
        work.wait()
        if together is not message[0]:
            write_parts(message, together)

    return finish


def begin_quantized_sum(
    group: dist.ProcessGroup, message: Sequence[Tensor], wait: timedelta
) -> Callable[[], None]:
    """Begin to sum the tensors of a message, each sent as 8-bit numbers; see `begin_sum`.

    Every group receives the numbers of all and adds them up in the same order, so that the sums
    are equal to the last bit.
    """
    together = torch.cat([tensor.reshape(-1) for tensor in message])
    [sent] = encode(together[None])
    received = [torch.empty_like(sent) for _ in range(group.size())]
    options = AllgatherOptions()
    options.timeout = wait
    work = group.allgather([received], [sent], options)

    def finish() -> None:
        work.wait()
        each = together.new_empty(len(received), len(together), dtype=torch.float32)
        decode(torch.stack(received), each)
        write_parts(message, each.sum(0).to(together.dtype))

    return finish


def write_parts(message: Sequence[Tensor], together: Tensor) -> None:
    parts = together.split([tensor.numel() for tensor in message])
    for tensor, values in zip(message, parts, strict=True):
        tensor.copy_(values.view_as(tensor))


def messages(tensors: Iterable[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield the tensors in groups that are sent together, each of one number format and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for of_kind in kinds.values():
        message: list[Tensor] = []
        size = 0
        for tensor in of_kind:
            if message and size + tensor.nbytes > MESSAGE_BYTES:
                yield message
                message, size = [], 0
            message.append(tensor)
            size += tensor.nbytes
        yield message
