"""Weights in the number format of the computation, from which fully_shard gathers.

With optim.offload a unit's parameters are in host memory or in files. fully_shard would copy and
convert them each time that it gathers them. Instead it gathers from copies, which are made again
after each update. They are on the device, or with sharding.cpu_offload in host memory.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.base.torch_private import gather_from_copies
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.parallelize import fsdp_modules


class WeightCopies:
    """The copies of all of this rank's parts of parameters."""

    def __init__(self, model: Decoder, on_host: bool):
        """Allocate the copies, and let fully_shard gather from them. on_host: see above."""
        self._copies = gather_from_copies(fsdp_modules(model), on_host)
        self.on_gpu = any(copy.is_cuda for copy in self._copies.values())
        """True if writing a copy does not make the host wait."""
        COPIES[model] = self

    def write_all(self) -> None:
        for parameter in self._copies:
            self.write(parameter, 0, local_part(parameter))
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def write(self, parameter: Tensor, first: int, numbers: Tensor) -> None:
        """Write some numbers of a parameter's part, from number `first` on, to its copy.

        To a GPU they are copied asynchronously: they must not change before that is done.
        """
        copy = self._copies[parameter]
        flat = numbers.reshape(-1).to(copy.dtype)
        if copy.is_cuda and not flat.is_pinned():
            flat = flat.pin_memory()
        copy[first : first + len(flat)].copy_(flat, non_blocking=True)


COPIES: WeakKeyDictionary[Decoder, WeightCopies] = WeakKeyDictionary()
"""The copies of each model that has some."""


def weights_changed(model: Decoder) -> None:
    """Write a model's copies again, if it has some.

    Must be called after others than its optimizer have changed its weights.
    """
    if copies := COPIES.get(model):
        copies.write_all()
