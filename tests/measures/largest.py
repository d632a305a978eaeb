"""The sizes of the tensors that are made while something is computed."""

import re
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Moved(TorchDispatchMode):
    """Bytes of matrices with so many columns that operators read and write, by number format.

    Of a matrix product only the result is counted; gathers and scatters touch a number a row.
    """

    def __init__(self, columns):
        super().__init__()
        self.columns, self.bytes = columns, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if not function.is_view and not re.search("empty|gather|scatter", name):
            read = {"mm": (), "addmm": (), "copy_": args[1:]}.get(name, args)
            for x in filter(is_tensor, (*read, out)):
                if x.dim() == 2 and x.shape[1] == self.columns:
                    self.bytes[x.dtype] += x.nbytes
        return out


class Largest(TorchDispatchMode):
    """Elements of the tensors that are made, other than those of their arguments, and the most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.numel = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        outputs = [x for x in (out if isinstance(out, tuple | list) else [out]) if is_tensor(x)]
        self.numel = max([self.numel, *(x.numel() for x in outputs)])
        self.sizes |= {x.numel() for x in outputs} - {x.numel() for x in args if is_tensor(x)}
        return out


def is_tensor(value):
    return isinstance(value, torch.Tensor)
