"""Files of torch.save, opened without running anything, and where the numbers of a tensor lie.

A pickle may claim anything about a tensor. What is read are consecutive numbers of one member of
the archive, which is stored as it is.
"""

import math
import pickle
import re
import struct
import sys
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.base.torch_private import fake_load, file_offset
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, read_number
from fsdp_trainer.errors import UserError

ZIP, NAMED = b"PK\x03\x04", re.compile(r"GLOBAL (\S+)")
"""First bytes of a file, and how torch names what it does not unpickle."""
ORDER, ALIGNMENT = "/byteorder", "/.storage_alignment"
SETTINGS = (ORDER, ALIGNMENT)
"""Members that say how the others are stored."""
LOCAL_HEADER = 30
"""Bytes before the name of a member; the last four are the lengths of that and of what follows."""


class TorchArchive:
    """A file of torch.save. content: what it holds, without the numbers of its tensors."""

    def __init__(self, file: Path, what: str, ignored: tuple[str, ...] = ()):
        """Open the file. what: it holds, for messages. ignored: see fake_load.

        Raises UserError.
        """
        self.file = file
        self._what = what
        try:
            self._sizes = _sizes_of_members(file)
            self.content = fake_load(file, ignored)
        except pickle.UnpicklingError as error:
            named = NAMED.search(str(error))
            more = f" ({named[1]})" if named else ""
            raise self._error(
                f"holds more than tensors{more}, and reading that could run code of others.\nSave a"
                " state_dict() alone"
            ) from None
        except Exception as error:  # a damaged pickle raises whatever its instructions lead to
            first = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"is no file of torch.save, or not the whole of it: {first}"
            raise self._error(reason) from None

    def tensor(self, name: str, tensor: Tensor) -> TensorOnDisk:
        """Return a tensor of `content`. name: for messages. Raises UserError."""
        if not _is_plain(tensor):
            reason = f"{name} is no plain tensor, or has no numbers. Save it as a dense one"
            raise self._error(reason)
        if not tensor.is_contiguous():
            reason = f"{name} is a view that is not contiguous. Save it with  .contiguous()"
            raise self._error(reason)
        offset = file_offset(tensor)
        before = int(tensor.storage_offset()) * tensor.element_size()
        size = self._sizes.get(offset - before, 0)
        if tensor.numel() and offset - before not in self._sizes:
            reason = f"{name} is not where torch.save puts it. Write the file with torch.save again"
            raise self._error(reason)
        if before < 0 or before + tensor.numel() * tensor.element_size() > size:
            raise self._error(f"ends before {name}: copied or downloaded in part, do it again")
        shape = tuple(tensor.shape)
        return TensorOnDisk(tensor.dtype, shape, [Chunk(self.file, offset, whole_slice(shape))])

    def number(self, name: str, tensor: Tensor) -> float:
        """Return the number in a tensor of `content`. Raises UserError and OSError."""
        on_disk = self.tensor(name, tensor)
        if math.prod(on_disk.shape) != 1:
            raise self._error(f"{name} is not one number: it has the shape {list(on_disk.shape)}")
        return read_number(self.file, on_disk.chunks[0].offset, on_disk.dtype)

    def _error(self, reason: str) -> UserError:
        return UserError(f"cannot read {self._what}", str(self.file), reason)


def _is_plain(tensor: Tensor) -> bool:
    try:
        file_offset(tensor)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False  # sparse, or on no device
    is_changed = tensor.is_neg() or tensor.is_conj() or tensor.is_quantized
    return tensor.layout == torch.strided and not is_changed


def _sizes_of_members(file: Path) -> dict[int, int]:
    """Return the bytes of each member of an archive, by the byte at which they begin.

    Raises ValueError for a file that torch.save does not write, among others.
    """
    sizes = {}
    with file.open("rb") as opened:
        if opened.read(len(ZIP)) != ZIP:
            raise ValueError("its first bytes are others, or torch before 1.6 has written it")
        with ZipFile(opened) as archive:
            for member in archive.infolist():
                opened.seek(member.header_offset + LOCAL_HEADER - 4)
                name, extra = struct.unpack("<HH", opened.read(4))
                begin = member.header_offset + LOCAL_HEADER + name + extra
                opened.seek(begin)  # ZipFile compares checksums, which torch can leave away
                short = min(99, member.file_size) if member.filename.endswith(SETTINGS) else 0
                _require_plain(member, opened.read(short))
                sizes[begin] = member.file_size
    return sizes


def _require_plain(member: ZipInfo, content: bytes) -> None:
    """Raise ValueError for a member that is compressed, or says that others are another way.

    content: what it holds if it is one of SETTINGS.
    """
    name = member.filename
    if member.compress_type != ZIP_STORED or member.compress_size != member.file_size:
        raise ValueError(f"{name} in it is compressed. Write it with torch.save again")
    if name.endswith(ORDER) and content != sys.byteorder.encode():
        raise ValueError(f"{name} says {content!r}: only this computer's order is read")
    if name.endswith(ALIGNMENT) and not int(content):
        raise ValueError(f"{name} says {content!r}")
