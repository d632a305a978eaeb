"""All uses of private parts of torch: the place to look when a new version breaks something.

Each docstring says why no public name serves. Checked against torch 2.11 and 2.13; where the two
differ, the docstring says so. Heavy imports stay inside functions.
"""

import errno
import inspect
import os
import platform
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial, wraps
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import _VersionWrapper

# DTensors


def local_shape_and_offset(parameter: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part, and its offset in each dimension of the full tensor.

    torch has no public function for the place of a shard. Strided and uneven shards are supported.
    """
    return compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )


def shape_and_offset_at(
    parameter: DTensor, coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what `local_shape_and_offset` returns on the rank at a coordinate of the mesh.

    There is no public function for the part of another rank.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh_shape = tuple(parameter.device_mesh.shape)
    return _compute_local_shape_and_global_offset(
        parameter.shape, mesh_shape, list(coordinate), parameter.placements
    )


def dtensor_like(other: DTensor, local: Tensor, shape: torch.Size) -> DTensor:
    """Return `local` as this rank's part of a tensor of `shape`, with the placements of `other`.

    DTensor.from_local would move tensors that sharding.cpu_offload keeps on the host to the mesh's
    device.
    """
    return placed_dtensor(other, local, shape, other.placements)


def row_dtensor(other: DTensor, local: Tensor) -> DTensor:
    """Return `local` as this rank's part of a tensor with one element for each row of `other`.

    Its shape is that of `other` with a last dimension of 1. Ranks that hold different columns of
    the same rows hold copies.
    """
    last = other.ndim - 1
    placements = tuple(
        Replicate() if getattr(place, "dim", None) == last else place for place in other.placements
    )
    return placed_dtensor(other, local, torch.Size((*other.shape[:-1], 1)), placements)


def placed_dtensor(
    other: DTensor, local: Tensor, shape: torch.Size, placements: tuple[Placement, ...]
) -> DTensor:
    """Return `local` as this rank's part of a tensor of `shape` on the mesh of `other`."""
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(other.device_mesh, placements, whole)
    return DTensor(local, spec, requires_grad=False)


@contextmanager
def metadata_outside_modes() -> Iterator[None]:
    """Within, DTensor finds out the shapes of results outside of all dispatch modes.

    It computes them with fake tensors of the whole size, for which it takes the active
    FakeTensorMode. A count of live tensors would contain them; there is no option against it.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def outside(*args: Any) -> Any:
        with _disable_current_modes():
            return original(*args)

    with patch.object(ShardingPropagator, name, outside):
        yield


# Process groups


def group_named(name: Any) -> dist.ProcessGroup:
    """Return the group that compiled graphs know by this name. There is no public function."""
    return dist.distributed_c10d._resolve_process_group(name)


def sequence_number(group: dist.ProcessGroup, device_type: str) -> Callable[[], int]:
    """Return a function that counts the collectives begun on a group's backend, in less than 1 µs.

    The public way, the flight recorder, exists for NCCL alone and needs a dump for each count.
    """
    backend: Any = group._get_backend(torch.device(device_type))
    return backend._get_sequence_number_for_group


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives.

    init_device_mesh has no argument for it: its groups have torch's default.
    """
    if hasattr(dist, "set_timeout"):  # torch 2.15
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# Checkpoints

NUMBERS, DESCRIPTION, ORDER = "data/0", "data.pkl", "byteorder"
"""Members of a file of torch.save with one tensor."""
COMPRESSION, LARGEST_RECORD = 8, 2**16
"""Byte of a member's header that says how it is compressed, and bytes of the other members."""


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return the entry that `.metadata` of a distributed checkpoint has for a tensor's location.

    offset, length: bytes in `file`. DCP's reader expects this class, which has no public name.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


class Numbers(NamedTuple):
    """A tensor that torch.save wrote. offset, length: bytes of its numbers in the file.

    description: the pickle of the tensor without them.
    """

    offset: int
    length: int
    description: bytes


def numbers_in(path: Path, offset: int, length: int) -> Numbers:
    """Return the tensor that lies in some bytes of a file.

    torch.load can only read complete tensors and files. Raises OSError, RuntimeError if torch.save
    wrote no tensor there, and ValueError if it is not stored as it is in memory.
    """
    from torch.distributed.checkpoint.utils import _create_file_view

    with path.open("rb") as file:
        if offset + length > os.fstat(file.fileno()).st_size:
            raise ValueError("the end of the file")
        part: Any = _create_file_view(file, offset, length)
        try:
            archive: Any = torch._C.PyTorchFileReader(part)
        except OSError as error:
            if error.errno == errno.EINVAL:  # it has looked for an archive before the file's begin
                raise ValueError("no archive") from None
            raise
        has_order = archive.has_record(ORDER)  # torch before 2.1 has written none
        small = [DESCRIPTION, ORDER] if has_order else [DESCRIPTION]
        size_of = _sizes_of_records(archive, file, offset + length)
        if any(size_of(name) > LARGEST_RECORD for name in small):
            raise ValueError("a tensor with a long description")
        if has_order and archive.get_record(ORDER) != sys.byteorder.encode():
            raise ValueError("numbers in another order of bytes")
        file.seek(offset + archive.get_record_header_offset(NUMBERS) + COMPRESSION)
        if file.read(2) != bytes(2):
            raise ValueError("compressed numbers")
        begin = offset + archive.get_record_offset(NUMBERS)
        size = size_of(NUMBERS)
        if begin + size > offset + length:
            raise ValueError("a part of a tensor")
        file.seek(begin + size)
        if file.read(2) != b"PK":  # of the archive's next entry, or of its directory
            raise ValueError("numbers at another place")
        return Numbers(begin, size, archive.get_record(DESCRIPTION))


def _sizes_of_records(archive: Any, file: BinaryIO, end: int) -> Callable[[str], int]:
    """Return a function from the name of a record to its bytes; -1 if there is none.

    end: the place in the file where the archive ends.
    """
    if hasattr(archive, "get_record_size"):
        return archive.get_record_size
    file.seek(max(0, end - LARGEST_RECORD))  # torch 2.11 does not say, and the directory is last
    try:
        with zipfile.ZipFile(BytesIO(file.read(min(end, LARGEST_RECORD)))) as directory:
            entries = directory.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise RuntimeError(str(error)) from None
    sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
    return lambda name: sizes.get(name, -1)


COPIES = ("_codecs.encode", "builtins.bytearray", "builtins.set", "collections.Counter",
          "collections.OrderedDict", "torch.Size")  # fmt: skip
MOST_COPIED = 2**24
"""What torch.load(weights_only=True) calls that makes a copy, and items of all copies in a file."""


class NotLoaded:
    """Stands for an object of a class that is not unpickled."""

    def __init__(self, *parts: Any):
        """parts: what the object is made of, which is ignored."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the object's content."""


def fake_load(file: Path, ignored: tuple[str, ...] = ()) -> Any:
    """Return what torch.save wrote, without the numbers of its tensors; unpickles only tensors.

    ignored: beginnings of the names of classes for whose objects a NotLoaded stands.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    others = get_unsafe_globals_in_checkpoint(file) if ignored else []
    stand_ins: list[Any] = [(NotLoaded, name) for name in others if name.startswith(ignored)]
    with FakeTensorMode(), safe_globals(stand_ins), bounded_copies():
        return torch.load(file, weights_only=True, map_location="cpu")


@contextmanager
def bounded_copies() -> Iterator[None]:
    """Within, torch.load(weights_only=True) copies at most MOST_COPIED items in a file.

    A few bytes of a pickle can otherwise ask for a value of any size: bytearray(2**40), or one that
    is doubled again and again. There is no option against it.
    """
    from torch import _weights_only_unpickler as unpickler

    items = 0

    def bounded(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*parts: Any) -> Any:
            nonlocal items
            items += sum(map(len, parts[:1]))
            known = name != "_codecs.encode" or parts[1:] == ("latin1",)
            if items > MOST_COPIED or not known:
                raise ValueError(f"its {name} is not one that torch.save writes")
            return make(*parts)

        return call

    allowed: dict[str, Any] = unpickler._get_allowed_globals()
    with patch.dict(allowed, {name: bounded(name, allowed[name]) for name in COPIES}):
        yield


def file_offset(tensor: Tensor) -> int:
    """Return the byte of the file at which the numbers of a tensor of `fake_load` begin."""
    storage: Any = tensor.untyped_storage()
    return storage._checkpoint_offset + int(tensor.storage_offset()) * tensor.element_size()


# FSDP2


def fsdp_tensors(module: Any) -> dict[str, list[Tensor | None]]:
    """Return the tensors that fully_shard holds for a module, by purpose.

    FSDP2 has no public access to its gathered parameters and its buffers. Before torch 2.13 a
    module has one group instead of a list; some of the buffers are elsewhere and missing here.
    """
    held: dict[str, list[Tensor | None]] = {
        "parameters": [], "gradients": [], "gathered": [], "communication": []
    }  # fmt: skip
    for group in _fsdp_groups(module):
        for parameter in group.fsdp_params:
            held["parameters"].append(parameter._sharded_param_data)
            held["gradients"].append(parameter.sharded_param.grad)
            # the unsharded parameter exists from the first all-gather on
            unsharded = getattr(parameter, "_unsharded_param", None)
            held["gathered"] += [
                *parameter.all_gather_outputs,
                parameter.unsharded_accumulated_grad,
                getattr(unsharded, "grad", None),
            ]
        previous = getattr(group.comm_ctx, "all_gather_state", None)
        for result in (group._all_gather_result, getattr(previous, "all_gather_result", None)):
            held["communication"].append(getattr(result, "all_gather_output", None))
        for reduction in getattr(group.comm_ctx, "reduce_scatter_states", []):
            held["communication"].append(getattr(reduction, "reduce_scatter_input", None))
    return held


def reduce_scatter_groups(module: Any) -> list[dist.ProcessGroup]:
    """Return the process groups that set_separate_reduce_scatter_group created for a module.

    FSDP2 creates them with torch's default timeout and gives no public access. Needs torch 2.13.
    """
    return [group.mesh_info.reduce_scatter_process_group for group in _fsdp_groups(module)]


def accumulate_gradients(module: Any) -> None:
    """Add the gradients that a backward left on gathered parameters to the step's gradients.

    Gradients of several micro-batches are summed in the reduction's number format. FSDP2 does this
    at the end of a backward through the module; there is no public way to do it after a backward
    that does not go through the module.
    """
    for group in _fsdp_groups(module):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def placement_on(mesh: DeviceMesh) -> Callable[[Shard], Any]:
    """Return a function for fully_shard's shard_placement_fn that places a shard on another mesh.

    mesh: [shard] or [replicate, shard]. One unit with parameters on two meshes needs private names
    in torch 2.13 and does not exist in 2.11. All parameters of a mesh must share one description of
    it, so call this once per mesh.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim > 1:
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda shard: ShardPlacementResult(shard, info)


class RankChunks(Sequence[Tensor]):
    """The chunks of a tensor by rank, as torch makes them for a shard, each when it is read."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self.tensor, self.ranks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        rows = self.tensor.size(self.dim)
        each = -(-rows // self.ranks)
        if not 0 <= rank < self.ranks:
            raise IndexError(rank)
        if rank and rank * each >= rows:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, rank * each, min(each, rows - rank * each))


@contextmanager
def chunks_when_read() -> Iterator[None]:
    """Within, fully_shard makes a parameter's chunk of this rank, and not those of all ranks.

    It needs that and the first one. With thousands of ranks the others take most of its time, and
    there is no option against it. A version of torch that makes them elsewhere makes all of them,
    with a warning.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    name = "_chunk_with_empty"
    if not hasattr(_fsdp_param, name):
        _warn_of_missing(name, "every rank makes the chunks of all ranks, slowly if they are many")
        yield
        return
    with patch.object(_fsdp_param, name, RankChunks):
        yield


@cache
def _warn_of_missing(names: str, consequence: str) -> None:
    """Warn, once, that FSDP2 lacks private names that a faster way needs."""
    warnings.warn(f"FSDP2 of torch {torch.__version__} lacks {names}: {consequence}", stacklevel=3)


@contextmanager
def around_units(method: str, call: Callable[[Any, str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Within, run `call(unit, name, real)` in place of a method of all units of fully_shard.

    method: unshard, wait_for_unshard or post_backward. name: of the unit's module, "" for the root.
    real: calls the method. FSDP2 has no public hooks around its communication.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original = getattr(FSDPParamGroup, method)

    @wraps(original)
    def replaced(unit: Any, *args: Any, **options: Any) -> Any:
        return call(unit, unit._module_fqn or "", lambda: original(unit, *args, **options))

    with patch.object(FSDPParamGroup, method, replaced):
        yield


def unsharded_gradients(unit: Any) -> list[Tensor]:
    """Return the gradients of a unit of fully_shard that are not reduced yet."""
    gradients = []
    for parameter in unit.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        gradients += [parameter.unsharded_accumulated_grad, getattr(whole, "grad", None)]
    return [gradient for gradient in gradients if isinstance(gradient, Tensor)]


def reduced_gradients(unit: Any) -> list[Tensor]:
    gradients = [parameter.sharded_param.grad for parameter in unit.fsdp_params]
    return [gradient for gradient in gradients if gradient is not None]


VOTE = "_initialize_pipeline_distributed_state"


@contextmanager
def no_pipeline_vote() -> Iterator[None]:
    """Within, stages of a pipeline take shapes as known, and exchange nothing about them first.

    Before its first step torch's pipeline lets the ranks vote on whether they know the shapes of
    what they receive, and reads the result. There is no option against it. Needs torch 2.13; in
    2.15 the vote has another name.
    """
    from torch.distributed.pipelining import schedules

    def known(_schedule: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            setattr(stage, "_inference_mode", schedules.InferenceMode.STATIC)  # noqa: B010

    schedule, names = schedules._PipelineSchedule, ("_warmup_p2p", VOTE)
    name = next((name for name in names if hasattr(schedule, name)), None)
    with patch.object(schedule, name, known) if name else nullcontext():
        yield


def gather_from_copies(modules: list[Any], on_host: bool) -> dict[Tensor, Tensor]:
    """Let fully_shard gather all units from copies, and return these by parameter.

    The copies are flat, in the number format of the computation, and not yet filled. With
    CPUOffloadPolicy, fully_shard copies and converts the parameters themselves each time that it
    gathers them; it has no option against it. modules: the root first. on_host: True for copies in
    host memory, from which they are still copied to the device each time.
    """
    modules[0]._get_fsdp_state()._lazy_init()  # it would otherwise replace the copies
    copies: dict[Tensor, Tensor] = {}
    for group in (group for module in modules for group in _fsdp_groups(module)):
        for parameter in group.fsdp_params:
            dtype = parameter.param_dtype or parameter.sharded_param.dtype
            size = parameter._sharded_param_data.numel()
            on_gpu = parameter.device.type == "cuda"
            device = torch.device("cpu") if on_host else parameter.device
            copy = torch.zeros(size, dtype=dtype, device=device, pin_memory=on_gpu and on_host)
            parameter._sharded_param_data = copies[parameter.sharded_param] = copy
            # gradients are copied to pinned memory, whatever memory the parameter is in
            parameter.pin_memory = on_gpu
    return copies


def set_local_tensor(tensor: Any, local: Tensor) -> None:
    """Let a DTensor hold its numbers, or a part of them, in another tensor.

    There is no public way to move the numbers of a parameter that optimizers and modules know.
    """
    tensor._local_tensor = local


def replace_all_gathers(module: Any, new: Callable[[int], Any]) -> None:
    """Gather a unit's parameters with `new(ranks)`, as set_custom_all_gather does.

    ranks: number of ranks that shard them. That method refuses units with parameters on two meshes,
    such as blocks with divided experts.
    """
    for group in _fsdp_groups(module):
        if group.mesh_info.shard_mesh_size > 1:
            group._all_gather_comm = new(group.mesh_info.shard_mesh_size)


def replace_reduce_scatters(module: Any, new: Callable[[], Any]) -> None:
    """Reduce a unit's gradients with `new()`, as set_custom_reduce_scatter does.

    See `replace_all_gathers`.
    """
    for group in _fsdp_groups(module):
        if group.mesh_info.shard_mesh_size > 1:
            group._reduce_scatter_comm = new()


class _OneBuffer:
    """Allocates the two buffers of a reduction of one rank as one."""

    def __init__(self) -> None:
        self._first: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, and the same one the second time."""
        first, self._first = self._first, None
        if first is not None and (first.shape, first.dtype) == (torch.Size(size), dtype):
            if first.is_cuda:
                # FSDP2 frees a message after an event in front of what this stream does with the
                # result, and the caching allocator does not know the stream
                first.record_stream(torch.cuda.current_stream(device))
            return first
        self._first = torch.empty(*size, dtype=dtype, device=device)
        return self._first


class _One(float):
    """A factor that divides a tensor without making another."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Return the quotient, which is the tensor."""
        return args[0]


class _Whole:
    """Methods in place of those of FSDP2's parameter, where one rank holds all of it.

    FSDP2 casts the stored numbers to a temporary, copies this to the gathered parameter, and the
    gradient to a message. Here the gathered parameter is the stored one, or one cast of it, and the
    gradient goes to the stored one. All is done on the stream that computes and updates, so nothing
    else has to order it. unit: the FSDPParamGroup that may take the gradient; None: FSDP2 must send
    it to replicas or to the host.
    """

    unit: Any = None
    shared: Tensor | None = None
    """The stored numbers, flat, if modules compute with them; None: with a cast of them."""

    @property
    def all_gather_inputs(self: Any) -> list[Tensor]:
        """Return what FSDP2 copies to the gathered parameter: nothing if that is the stored one."""
        stored = self._sharded_param_data
        if self.is_encoded or stored.device.type != self.device.type:
            return super().all_gather_inputs  # type: ignore[misc]
        shared = stored if stored.dtype == (self.param_dtype or stored.dtype) else None
        if shared is not self.shared:  # first, or after the stored numbers have moved
            self.shared = shared
            self.all_gather_outputs.clear()
            vars(self).pop("_unsharded_param", None)
        return [stored if shared is None else stored[:0]]

    @property
    def is_encoded(self: Any) -> bool:
        """True if the stored tensor has its own way to be gathered, as with float8."""
        return hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")

    def init_all_gather_outputs(
        self: Any, sizes: list[int], dtypes: list[torch.dtype], *args: Any, **options: Any
    ) -> None:
        """Allocate the gathered parameter, in the number format of the computation."""
        if not self.is_encoded:
            dtypes = [self.param_dtype or dtype for dtype in dtypes]
        super().init_all_gather_outputs(sizes, dtypes, *args, **options)  # type: ignore[misc]

    def init_unsharded_param(self: Any) -> None:
        """Make the parameter that modules have while it is gathered."""
        outputs = self.all_gather_outputs
        if self.shared is not None:
            self.all_gather_outputs = [self.shared]
        super().init_unsharded_param()  # type: ignore[misc]
        self.all_gather_outputs = outputs  # FSDP2 frees these

    @torch.no_grad()
    def accumulate_unsharded_grad_if_needed(self: Any) -> None:
        """Add the gradient to that of the stored parameter, rounded as FSDP2 rounds it."""
        super().accumulate_unsharded_grad_if_needed()  # type: ignore[misc]
        if self.unit is None or not self.unit.reduce_grads:
            return
        gathered, whole = vars(self).get("_unsharded_param"), self.unsharded_accumulated_grad
        if whole is None:
            whole = getattr(gathered, "grad", None)
        if whole is None:
            return
        self.unsharded_accumulated_grad = gathered.grad = None
        if self.unit.reshard_after_backward:  # FSDP2 frees the unit next; the cast needs memory
            self.free_unsharded_param()
        new, stored = self._get_grad_inner_tensor(whole), self.sharded_param
        new = _narrowed(new, self.reduce_dtype or new.dtype, self.orig_dtype)
        if stored.grad is not None:
            stored.grad._local_tensor += new
            return
        cast = new.to(self.orig_dtype).contiguous()
        alone = cast is not new or _is_alone(new)
        stored.grad = self.to_sharded_dtensor(cast if alone else cast.clone())


def _narrowed(tensor: Tensor, *formats: torch.dtype) -> Tensor:
    """Return a tensor rounded to each of the formats that does not hold all of its numbers."""
    for dtype in formats:
        if torch.promote_types(tensor.dtype, dtype) != dtype:
            tensor = tensor.to(dtype)
    return tensor


def _is_alone(tensor: Tensor) -> bool:
    """Return True if a tensor uses all of its storage, and nothing else uses it."""
    storage = tensor.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)  # the tensor and the object above
    return storage.nbytes() == tensor.nbytes and users <= 2


REPLACED = {
    "all_gather_inputs", "init_all_gather_outputs", "init_unsharded_param",
    "accumulate_unsharded_grad_if_needed",
}  # fmt: skip
"""Methods of FSDP2's parameter that `_Whole` replaces. FSDP2's unit must call them."""
CALLED = {"_sharded_local_tensor", "_get_grad_inner_tensor", "to_sharded_dtensor"}
"""Methods that it calls."""


@cache
def _class_of_whole(usual: type) -> type:
    """Return FSDP2's class of a parameter with the methods of `_Whole`, or as it is.

    The latter, with a warning, if a version of FSDP2 works in another way.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    calls: set[str] = set()
    for name in ("wait_for_unshard", "post_backward"):
        calls.update(inspect.unwrap(getattr(FSDPParamGroup, name)).__code__.co_names)
    missing = (REPLACED - calls) | (REPLACED | CALLED) - {*dir(usual)}
    if issubclass(usual, _Whole):
        return usual
    if not missing:
        return type(usual.__name__, (_Whole, usual), {})
    _warn_of_missing(", ".join(sorted(missing)), "on one rank it copies every parameter")
    return usual


def spare_one_rank(module: Any) -> None:
    """Do without FSDP2's copies of parameters and gradients that no other rank shares.

    FSDP2 also divides gradients by the factor, even by 1, in a temporary, and copies the result to
    a second buffer: 16 bytes a float32. A copy of a tensor to itself does nothing. Replicas send
    the second buffer, to which the first is copied undivided.
    set_custom_reduce_scatter refuses units with parameters on two meshes.
    """
    for group in _fsdp_groups(module):
        alone = group.mesh_info.mesh.size() == 1
        if alone:
            group._reduce_scatter_comm = _OneBuffer()
            group.gradient_divide_factor = None
        elif group.mesh_info.shard_mesh_size == 1:
            group.gradient_divide_factor = _One(1)
        for parameter in group.fsdp_params if group.mesh_info.shard_mesh_size == 1 else []:
            moves = parameter.offload_to_cpu and parameter.device.type != "cpu"
            parameter.__class__ = _class_of_whole(parameter.__class__)
            parameter.unit = group if alone and not moves else None


def keep_second_copy(module: Any, mesh: DeviceMesh) -> None:
    """Let a unit keep a copy from forward to backward, sharded over the mesh's last dimension.

    mesh: [groups, ranks of a group], of which every unit has the same one. With a number as
    reshard_after_forward, fully_shard would create process groups for each unit, and with a
    pipeline different ones on different ranks. Parameters on another mesh keep no copy.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _fsdp_groups(module):
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


def free_second_copy(module: Any) -> None:
    """Free the copies of a unit that no backward has used.

    FSDPModule.reshard leaves them until the next backward.
    """
    for group in _fsdp_groups(module):
        for parameter in group.fsdp_params:
            parameter._sharded_post_forward_param = None
            parameter._sharded_post_forward_param_data = None


@contextmanager
def gathered_after_forward(modules: list[Any]) -> Iterator[None]:
    """Within, units stay gathered after forward; afterwards they are resharded as before.

    set_reshard_after_forward cannot restore a second copy.
    """
    groups = [group for module in modules for group in _fsdp_groups(module)]
    before = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [group for group in state._fsdp_param_groups if group]
    return [state._fsdp_param_group] if state._fsdp_param_group else []


# Activation checkpointing


def replace_saved_results(
    context: Any, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> None:
    """Pack every tensor that selective checkpointing saves in a forward.

    It saves them in its own dictionary, which saved_tensors_hooks do not see. The values of that
    are dictionaries in torch 2.13 and lists in 2.11.
    """

    def packed(result: Any) -> Any:
        if isinstance(result, _VersionWrapper) and isinstance(result.val, Tensor):
            return PackedResult(pack(result.val), unpack)
        return result

    for results in context.storage.values():
        items = results.items() if isinstance(results, dict) else enumerate(results)
        for i, result in list(items):
            results[i] = tree_map(packed, result)


class PackedResult:
    """A packed saved result, with the interface of torch's `_VersionWrapper`."""

    def __init__(self, content: Any, unpack: Callable[[Any], Tensor]):
        self.content = content
        self.unpack = unpack

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        return self.unpack(self.content)


# The compiler


class RepeatableRecomputation:
    """The context of a recomputation that backward may run more than once.

    recomputation: the second of `create_selective_checkpoint_contexts`, which drops a kept result
    as soon as it is used, and has no option to keep it. Kept results are freed with the graph.
    """

    def __init__(self, recomputation: Any):
        self.recomputation = recomputation
        self.results: dict[Any, dict[int, Any]] = {}

    def __enter__(self) -> Any:
        stored = self.recomputation.storage
        self.results = {key: dict(results) for key, results in stored.items()}
        return self.recomputation.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.recomputation.__exit__(*error)
        self.recomputation.storage.update(self.results)
        self.results = {}


def set_activation_memory_budget(budget: float) -> None:
    """Set the share of activations that compiled blocks keep for backward.

    budget: between 0 and 1; 1 leaves the choice to the compiler. It is read when a block is
    compiled. torch documents this setting under its private name.
    """
    from torch._functorch import config

    config.activation_memory_budget = budget


def partitioned_backend(run: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a backend of torch.compile that divides graphs as inductor does.

    run: returns what runs the graph of a forward or of a backward. There is no public backend with
    inductor's decompositions and partitioner that takes a function for the rest.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def backend(graph: Any, inputs: list[Any], **_options: Any) -> Any:
        with config.patch(unlift_effect_tokens=True):
            compiled = aot_autograd(
                fw_compiler=lambda module, _: run(module),
                decompositions=select_decomp_table,
                partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
                keep_inference_input_mutations=True,
            )
            return compiled(graph, inputs)

    return backend


def functional_graph(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    """Return the graph of a function as inductor would get it, without torch.compile's guards.

    There is no public table of inductor's decompositions. torch.compile selects the parts of a
    tensor that is unpacked.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def select_each(tensor: Tensor, dim: int = 0) -> list[Tensor]:
        return [tensor.select(dim, i) for i in range(tensor.shape[dim])]

    functional = torch.func.functionalize(function, remove="mutations")
    table = select_decomp_table() | {torch.ops.aten.unbind.int: select_each}
    with patch.object(torch.compiler, "is_compiling", lambda: True):
        module = make_fx(functional, table)(*tensors)
    module.graph.eliminate_dead_code()
    return module


@contextmanager
def graph_for_each_shape() -> Iterator[None]:
    """Within, torch.compile makes as many graphs as there are shapes, and none of several shapes.

    Its limit, and what it makes of the second shape, have no public setting.
    """
    from torch._dynamo import config

    with config.patch(recompile_limit=1000, automatic_dynamic_shapes=False):
        yield


@cache
def operator_types() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def missing_compiler(device_type: str) -> str | None:
    """Return what this machine lacks for torch.compile on `device_type`; None if nothing.

    torch.compile itself fails only when it first compiles, in the middle of a step.
    """
    return _missing_for_triton() if device_type == "cuda" else _missing_for_cpp()


def _missing_for_triton() -> str | None:
    from torch.utils._triton import has_triton

    if not has_triton():
        return "no Triton that knows its GPU"
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton looks for it
    if any(map(shutil.which, names)):
        return None
    return f"no C compiler ({' or '.join(names)}), which Triton needs"


def _missing_for_cpp() -> str | None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return f"no C++ compiler ({config.cpp.cxx[-1]}; the environment's CXX names another)"
    return None


def count_compiled_graphs() -> tuple[int, int]:
    """Return the number of graphs that this process compiled, and of those found in the cache.

    torch exposes these counts only in its logs.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]


def on_compilation(begins: Callable[[Any], None], ends: Callable[[Any], None]) -> None:
    """Call `begins` and `ends` around each compilation from now on. A second call adds nothing.

    torch has no public hook.
    """
    from torch._dynamo.callback import callback_handler

    if begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begins)
        callback_handler.register_end_callback(ends)


def is_compiler_error(error: BaseException) -> bool:
    """Return whether torch.compile raised an error: its errors have no common public base class."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def stop_allocating_to_graph(graph: Any, device: torch.device, pool: Any) -> None:
    """Let the allocator work as before a CUDA graph was recorded, if a failure left it recording.

    CUDAGraph.capture_end raises before it tells the allocator, which then never frees again, and a
    graph that has not ended does not give up its pool. pool: the one that the graph was given.
    There is no public function for it.
    """
    index = device.index or 0
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
    try:
        graph.pool()
    except RuntimeError:  # it has not ended
        torch._C._cuda_releasePool(index, pool)


def graph_is_kept() -> bool:
    """Return, when called in a backward, whether the graph is retained for another (retain_graph).

    autograd has no public function for it. Needs torch >= 2.11.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_in_backward() -> bool:
    """Return whether autograd is running a backward: it has no public function for it."""
    return torch._C._current_graph_task_id() != -1


# Attention


def attention_and_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention, with the shape of q, and the logarithm of each query's sum of exponentials.

    q, k, v: [batch, heads, length, head_dim]. bias: added to scores, broadcast to [batch, heads,
    queries, keys]. The second result is [batch, heads, queries] float32. For a query without any
    key, both results are undefined.
    torch's public attention keeps the logarithm for its own backward; varlen_attn, which can
    return it, accepts no bias. On CUDA this calls the memory-efficient kernel, which does.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = _expanded(bias, q, k)
    out, logsumexp, *_ = efficient(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, logsumexp[..., : q.shape[2]]  # the kernel may round the number of queries up


def attention_gradients(
    grad: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    out, logsumexp: the results of `attention_and_logsumexp`, or these merged with the results for
    other keys; the gradients are then those of the merged result. There is no public backward.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        results = (grad, q, k, v, out, logsumexp)
        return flash(*results, 0.0, causal, attn_mask=bias, scale=scale)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    # the kernel requires a seed, but without dropout nothing is random
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    padded = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % 32))
    bias = _expanded(bias, q, k)
    inputs = (grad, q, k, v, bias, out, padded, seed, seed)
    return efficient(*inputs, 0.0, wanted, causal, scale=scale)[:3]


Bounds = tuple[Tensor | None, Tensor | None, int, int]
"""Where documents end among queries and among keys, and the longest of either."""


def unmasked_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, kernel: str, bounds: Bounds | None
) -> tuple[Tensor, Tensor]:
    """Return what `attention_and_logsumexp` does, by a faster kernel, which needs 16-bit numbers.

    k, v: may have fewer heads. kernel: cudnn or flash. bounds: [1, heads, tokens, head_dim] are
    documents one after the other, for flash alone; None: each row is one.
    """
    if kernel == "cudnn" and bounds is None:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, logsumexp, *_ = cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, logsumexp.view(q.shape[:3])
    flash = torch.ops.aten._flash_attention_forward
    ends = bounds or (None, None, q.shape[2], k.shape[2])
    given = (_by_token(x, bounds) for x in (q, k, v))
    out, logsumexp, *_ = flash(*given, *ends, 0.0, causal, False, scale=scale)
    return out.view(q.transpose(1, 2).shape).transpose(1, 2), logsumexp.view(q.shape[:3])


def unmasked_gradients(
    grad: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    kernel: str,
    bounds: Bounds | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v. See `unmasked_attention` and `attention_gradients`."""
    # the kernels require a state of random numbers, but without dropout they draw none
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    if kernel == "cudnn" and bounds is None:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        sizes = (None, None, None, q.shape[2], k.shape[2])
        sums = logsumexp[..., None]
        return cudnn(grad, q, k, v, out, sums, seed, seed, *sizes, 0.0, causal, scale=scale)
    flash = torch.ops.aten._flash_attention_backward
    ends = bounds or (None, None, q.shape[2], k.shape[2])
    given = (_by_token(x, bounds) for x in (grad, q, k, v, out))
    sums = logsumexp if bounds is None else logsumexp[0]
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    gradients = flash(*given, sums, *ends, 0.0, causal, random, seed, scale=scale)
    return tuple(
        x.view(like.transpose(1, 2).shape).transpose(1, 2)
        for x, like in zip(gradients, (q, k, v), strict=True)
    )


def _by_token(x: Tensor, bounds: Bounds | None) -> Tensor:
    """Return [n, heads, length, width] with heads behind the length, and with bounds without n."""
    return x.transpose(1, 2) if bounds is None else x.transpose(1, 2).squeeze(0)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a bias expanded to all four dimensions, as the memory-efficient kernel requires.

    Its rows begin at multiples of 16 bytes.
    """
    if bias is None:
        return None
    keys = k.shape[2]
    aligned = torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys]
    return aligned.expand(*q.shape[:3], keys)


# Linear layers

PACKED_ROWS = 8
"""Rows that the packed layout is made for. It is also the best or nearly so for 2 to 32 rows."""


def can_pack() -> bool:
    """Return whether `pack_weight` has a faster layout for this processor."""
    return torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


def pack_weight(weight: Tensor) -> Tensor:
    """Return a copy of a float32 matrix, [outputs, inputs], in oneDNN's layout for a few rows.

    torch.compile packs weights in the same way. The public torch.utils.mkldnn also needs inputs and
    results in oneDNN's format, which costs two copies per call.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result of `F.linear` for a weight packed by `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
