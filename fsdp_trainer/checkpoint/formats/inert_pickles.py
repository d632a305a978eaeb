"""Reading of pickles in which torch describes tensors. Nothing that they name is imported or run.

Each name that such a pickle may have has a stand-in here, and any other is refused. Lists stand for
tuples, so that nothing can be hashed but texts, numbers and stand-ins: the hash of a tuple that
holds another one twice, and so on, is never done. Nor is its text, which no message may have.
"""

import io
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "float8_e4m3fnuz", "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint8", "uint16",
        "uint32", "uint64", "bool", "complex64", "complex128",
    )
}  # fmt: skip
"""Number formats by torch's names."""
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
PARTS, LONGEST_CALL = 9, 1000
"""What an object may be made of: parts that are kept, and parts at all, such as those of a path."""


class Pickled:
    """Stands for an object of torch. state: its fields by name, or what else it was pickled with.

    parts: the first things that it was made of.
    """

    __slots__ = ("parts", "state")

    def __init__(self, *parts: Any):
        self.parts = parts[:PARTS]
        self.state: Any = {}

    def change(self, state: Any) -> None:
        self.state = state


def _first(content: Any = (), *_: Any) -> Any:
    return content


def _member(kind: Any, name: Any) -> Pickled:
    if kind is not Pickled or not isinstance(name, str):
        raise pickle.UnpicklingError("it reads something else than the member of an enumeration")
    return Pickled()


def _dictionary(*_: Any) -> dict[Any, Any]:
    return {}


STAND_INS: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    **{
        (f"torch.distributed.checkpoint.{module}", name): Pickled
        for module, names in {
            "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties"
            " ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
            "filesystem": "_StorageInfo",
            "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
        }.items()
        for name in names.split()
    },
    # of torch before 2.3
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): Pickled,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): Pickled,
    ("torch", "strided"): Pickled,
    ("torch", "contiguous_format"): Pickled,
    ("torch", "preserve_format"): Pickled,
    ("torch", "device"): Pickled,
    ("torch._utils", "_rebuild_device"): Pickled,
    ("torch.serialization", "_get_layout"): Pickled,
    ("pathlib", "Path"): Pickled,
    ("pathlib", "PosixPath"): Pickled,
    ("pathlib._local", "PosixPath"): Pickled,
    ("builtins", "getattr"): _member,  # members of enumerations, by Python 3.11.0 to 3.11.3
    ("torch", "Size"): _first,
    ("builtins", "set"): _first,
    ("collections", "OrderedDict"): _dictionary,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._utils", "_rebuild_tensor_v2"): Pickled,
    ("torch._utils", "_rebuild_tensor_v3"): Pickled,
}
OPCODES = (
    "PROTO MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT "
    "BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES "
    "BINBYTES EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL "
    "BINPERSID "
)
PLAIN = b"".join(getattr(pickle, name) for name in OPCODES.split())
"""Instructions that can only make numbers, texts, lists and stand-ins, in memory of their size."""


def _build(reader: Any) -> None:
    state = reader.stack.pop()
    if type(reader.stack[-1]) is not Pickled:
        raise pickle.UnpicklingError("it changes what is no object")
    reader.stack[-1].change(state)


def _call(reader: Any) -> None:
    parts = reader.stack.pop()
    if len(parts) > LONGEST_CALL:  # each call copies them
        raise pickle.UnpicklingError(f"it makes an object of {len(parts):,} parts")
    reader.stack[-1] = reader.stack[-1](*parts)


def _last(count: int) -> Callable[[Any], None]:
    def gather(reader: Any) -> None:
        start = len(reader.stack) - count
        reader.stack[start:] = [reader.stack[start:]]

    return gather


class InertUnpickler(pickle._Unpickler):
    """Reads a pickle with stand-ins for all that it names.

    The unpickler in C reserves memory as an instruction says, without looking at the file's size.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in PLAIN},
        pickle.FRAME[0]: lambda reader: reader.read(8),
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.TUPLE[0]: pickle._Unpickler.dispatch[pickle.LIST[0]],
        pickle.EMPTY_TUPLE[0]: pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]],
        pickle.TUPLE1[0]: _last(1),
        pickle.TUPLE2[0]: _last(2),
        pickle.TUPLE3[0]: _last(3),
        pickle.EMPTY_SET[0]: pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]],
        pickle.ADDITEMS[0]: pickle._Unpickler.dispatch[pickle.APPENDS[0]],
    }

    def __init__(self, content: bytes):
        file = io.BytesIO(content)
        super().__init__(file)
        self.read, self.readline = file.read, file.readline
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append

    def load(self) -> Any:
        """Return the content. Unlike Python's own loop, this one does not go through frames."""
        read, dispatch = self.read, self.dispatch
        while (code := read(1)) != pickle.STOP:
            dispatch[code[0]](self)
        return self.stack.pop()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Return what torch says about the numbers of a tensor."""
        return pid


def read_pickle(content: bytes) -> Any:
    """Return what a pickle holds: texts, numbers, lists, dicts and objects of Pickled.

    Raises ValueError for one that is damaged or names anything else.
    """
    try:
        return InertUnpickler(content).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # a damaged pickle raises whatever its instructions lead to
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None


class PlainTensor(NamedTuple):
    """A tensor whose numbers are consecutive. first: place of the first one in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int


@lru_cache(maxsize=4096)  # most parts of a checkpoint have the shapes of others
def plain_tensor(content: bytes) -> PlainTensor:
    """Return the tensor that a pickle of torch.save describes. Raises ValueError for any other."""
    tensor = read_pickle(content)
    try:
        (_, dtype, key, *_), first, shape, strides, _, _, *more = tensor.parts
        if more and isinstance(more[0], torch.dtype):  # numbers without a storage of their own type
            dtype = more.pop(0)
        if key != "0" or any(more):
            raise ValueError("a tensor of another kind")
        expected = 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and stride != expected:
                raise ValueError("a view that is not contiguous")
            expected *= size
        if first < 0 or not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor of another kind")
        return PlainTensor(dtype, tuple(shape), first)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"no tensor ({error})") from None
