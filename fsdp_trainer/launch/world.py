"""The ranks before the first collective: this rank's numbers, and a store shared by all ranks."""

import errno
import os
import pickle
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_trainer.base.process import PARENT, die_with_parent
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.launch.nodes import first_host, port_of_job

NCCL_THAT_SHARES = (2, 30)
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # kernels of all ranks must fit on the GPU at the same time, or they wait for each other forever
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}
"""Environment variables with which NCCL connects ranks on one GPU."""


def share_gpus(ranks: int) -> None:
    """Let NCCL connect `ranks` ranks on each GPU. Raises UserError if it is too old for that."""
    version = torch.cuda.nccl.version()
    if version < NCCL_THAT_SHARES:
        reason = (
            f"NCCL connects several ranks on one GPU from 2.30 on, and here is "
            f"{'.'.join(map(str, version))}. For a GPU for each rank:  launch.ranks_per_gpu=1\n"
            "A newer one:  pip install --no-deps -U 'nvidia-nccl-cu13>=2.30'  (for CUDA 12: -cu12),"
            " or  LD_PRELOAD=…/libnccl.so.2  in the shell"
        )
        raise UserError("ranks cannot share a GPU", f"launch.ranks_per_gpu={ranks}", reason)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun
HEARD_SECONDS = 30.0  # for the others to read why rank 0 ends
POLL_SECONDS = 0.02
LOOPBACK = ("127.0.0.1", "::1")
MAX_POLLS_PER_SECOND = 5000  # by all ranks together, because the store has only one thread
T = TypeVar("T")


@dataclass
class World:
    """The numbers of this rank, and the store that all ranks share.

    size: number of ranks; local_rank: number of this rank on its node; node, nodes: number of this
    node, and of nodes; launcher: name of the process that started this node's ranks and may restart
    them; attempt: unique name of this start of all ranks; store: holds only keys of this attempt.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    launcher: str
    attempt: str
    store: dist.Store
    device: torch.device

    @property
    def main(self) -> bool:
        """True on rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    def launchers(self, timeout: float) -> list[str]:
        """Return the launchers of all nodes on rank 0, [] on the others."""
        if self.local_rank == 0:
            self._put(f"launcher/node{self.node}", self.launcher)
        nodes = range(self.nodes if self.main else 0)
        return [self._get(f"launcher/node{node}", timeout) for node in nodes]

    def from_main(self, name: str, make: Callable[[], T], timeout: float) -> T:
        """Call `make` on rank 0 and return its result on every rank."""
        if self.main:
            value = make()
            self._put(name, value)
            return value
        value = self._get(name, timeout)
        self.store.add(f"{name}/heard", 1)
        return value

    def to_main(self, name: str, mine: T, timeout: float) -> list[T]:
        """Return the values `mine` of all ranks, by rank, on rank 0; [] on the others.

        Raises RunFailed with the ranks that sent nothing within `timeout` seconds.
        """
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._put(keys[self.rank], mine)
        if not self.main:
            return []
        try:
            self.store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError:
            missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RunFailed(
                f"nothing was heard for {timeout:g} s from rank {', '.join(missing)}"
            ) from None
        return [pickle.loads(bytes.fromhex(value.decode())) for value in self.store.multi_get(keys)]

    def _put(self, key: str, value: Any) -> None:
        self.store.set(key, pickle.dumps(value).hex())

    def _get(self, key: str, timeout: float) -> Any:
        self.store.wait([key], timedelta(seconds=timeout))
        return pickle.loads(bytes.fromhex(self.store.get(key).decode()))

    def heartbeat(self) -> None:
        """Show ranks that wait in `rank0_then_nodes_then_all` that this one is still working."""
        self.store.add("heartbeats", 1)

    def rank0_then_nodes_then_all(self, name: str, work: Callable[[], T], timeout: float) -> T:
        """Run `work` on rank 0, then on one rank of every node, then on all, and return its result.

        Later ranks find the results of earlier ones on disk. They wait outside any collective, so
        that hours of tokenizing cause no timeout: only `timeout` seconds without a heartbeat do.
        All ranks return together, and a failure of one rank is raised on all.
        """
        first, node, all_done = f"{name}/rank0", f"{name}/node{self.node}", f"{name}/all"
        if not self.main:
            self._await(name, first, timeout)
            if self.local_rank and self.node:  # on node 0 the first one is rank 0
                self._await(name, node, timeout)
        failure = None
        try:
            result = work()
        except BaseException as error:
            failure = self._failure(name, error)
            raise
        finally:
            if self.local_rank == 0:
                self._put(first if self.main else node, failure)
            if failure or self.store.add(f"{name}/done", 1) == self.size:
                self._put(all_done, failure)
            if failure:
                self.wait_until_heard(name)
        self._await(name, all_done, timeout)
        return result

    def _failure(self, name: str, error: BaseException) -> BaseException:
        """Return the exception that all ranks raise for an error on this rank, and print it.

        Printed here because rank 0 prints only errors common to all ranks, and cannot know this
        rank's files. Stopped is common to all and is not printed.
        """
        if isinstance(error, Stopped):
            return error
        failure = error
        if not isinstance(error, UserError):
            cause = f"{type(error).__name__}: {error}"
            failure = RunFailed(f"{name} failed on rank {self.rank}: {cause}")
        self._print(failure)
        return failure

    def _print(self, failure: BaseException) -> None:
        if not self.main:
            print(safe(f"rank {self.rank}: {failure}"), file=sys.stderr)

    def _await(self, name: str, key: str, timeout: float) -> None:
        """Wait until other ranks have set `key`.

        Raises the exception stored under `key`, if any, and RunFailed after `timeout` seconds
        without a heartbeat.
        """
        heartbeats, heard_at = 0, time.monotonic()
        while not self.store.check([key]):
            time.sleep(max(POLL_SECONDS, self.size / MAX_POLLS_PER_SECOND))
            if (now := self.store.add("heartbeats", 0)) != heartbeats:
                heartbeats, heard_at = now, time.monotonic()
            elif time.monotonic() - heard_at > timeout:
                longer = "Longer with  launch.data_timeout=…"
                silence = RunFailed(f"{name}: nothing was heard of it for {timeout:g} s. {longer}")
                self._print(silence)  # rank 0 may be the silent one
                raise silence
        failure = self._get(key, timeout)
        if failure:
            self.store.add(f"{name}/heard", 1)
            self.wait_until_heard(name)
            raise failure

    def wait_until_heard(self, name: str, timeout: float = HEARD_SECONDS) -> None:
        """Wait on rank 0 until all others have read `name`, since the store may end with rank 0.

        Returns at once on the other ranks. Waits at most HEARD_SECONDS or `timeout` seconds.
        """
        deadline = time.monotonic() + min(HEARD_SECONDS, timeout)
        while self.main and time.monotonic() < deadline:
            if self.store.add(f"{name}/heard", 0) >= self.size - 1:
                return
            time.sleep(0.05)


def environment_of_ranks(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return an environment with RANK, WORLD_SIZE … as set by torchrun; None without a launcher.

    In an srun step of several tasks the values are derived from Slurm's variables.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return dict(env)
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return {
            **env,
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "GROUP_RANK": env.get("SLURM_NODEID", "0"),
            "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": env.get("MASTER_PORT") or str(port_of_job(env)),
        }
    return None


def join(env: Mapping[str, str], device: str, timeout: float, ranks_per_gpu: int = 1) -> World:
    """Find this process's rank, and open the store that all ranks share.

    device, ranks_per_gpu: values of the keys of launch. Creates no process group.
    """
    if PARENT in env:
        die_with_parent(int(env[PARENT]))
    rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    local_rank = int(env.get("LOCAL_RANK", 0))
    store = open_store(env, rank, size, timeout)
    own_device = device_of_rank(device, rank, local_rank, ranks_per_gpu)
    attempt = rendezvous(store, rank, size, timeout)
    return World(
        rank,
        size,
        local_rank,
        node=int(env.get("GROUP_RANK", 0)),
        nodes=int(env.get("GROUP_WORLD_SIZE", 1)),
        launcher=launcher_of(env),
        attempt=attempt,
        store=dist.PrefixStore(attempt, store),
        device=own_device,
    )


def store_at(host: str, port: int = 0, **options: Any) -> dist.TCPStore:
    """Return a store that listens at this address alone. port: 0: any that is free.

    torch's own would listen at all addresses of the machine, and a store knows no password.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    place = host, listener.getsockname()[1]
    options |= {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(*place, master_listen_fd=listener.detach(), **options)


def open_store(env: Mapping[str, str], rank: int, size: int, timeout: float) -> dist.Store:
    """Open the store at MASTER_ADDR. Its server is rank 0, or torchrun's agent.

    The agent's store also holds keys of earlier attempts. Raises UserError if the port is in use.
    """
    if size == 1 and "MASTER_ADDR" not in env:
        return dist.HashStore()
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    seconds = timedelta(seconds=timeout)
    try:
        if serves and address in LOOPBACK:
            return store_at(address, port, world_size=size, timeout=seconds)
        return dist.TCPStore(address, port, size, serves, seconds, False)
    except (dist.DistNetworkError, OSError) as error:
        in_use = "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE
        if not serves or not in_use:
            raise
        reason = "is in use on this node (see  ss -ltnp ): another run, or a process that it left"
        raise UserError(
            "the ranks cannot meet",
            f"MASTER_PORT={port}",
            f"{reason}. Set another, the same for all ranks",
        ) from None


def device_of_rank(device: str, rank: int, local_rank: int, ranks_per_gpu: int = 1) -> torch.device:
    """Return the device of a rank according to the keys of launch, and make it current.

    Raises UserError if there are too few GPUs, GPUs that torch cannot use, or ranks that share one
    where NCCL does not allow it.
    """
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if torch.cuda.device_count():
            raise unusable_gpus(device)
        if device == "cuda":
            reason = "torch sees none here. Use  launch.device=cpu  or a CUDA build of torch"
            raise UserError("there is no GPU", "launch.device=cuda", reason)
        if ranks_per_gpu > 1:
            reason = "torch sees none here. Use  launch.ranks_per_gpu=1 launch.nproc_per_node=2"
            raise UserError("there is no GPU", f"launch.ranks_per_gpu={ranks_per_gpu}", reason)
        return torch.device("cpu")
    number = local_rank // ranks_per_gpu
    if number >= (gpus := torch.cuda.device_count()):
        enough = -(-int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)) // gpus)
        reason = (
            f"this node has {gpus} that are visible (CUDA_VISIBLE_DEVICES), and rank {rank} would "
            f"take number {number + 1}. Use  auto\n"
            f"Or let ranks share a GPU, to try a layout of several:  launch.ranks_per_gpu={enough}"
        )
        if "SLURM_LOCALID" in os.environ:
            reason += "\nUnder srun every task must see all GPUs of its node: --gpus-per-node, not "
            reason += "--gpus-per-task or --gpu-bind"
        raise UserError("there are fewer GPUs than ranks", "launch.nproc_per_node", reason)
    if ranks_per_gpu > 1:
        share_gpus(ranks_per_gpu)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def unusable_gpus(device: str) -> UserError:
    """Return the error for GPUs that the driver reports but torch cannot use.

    Any driver reports its GPUs, but torch's libraries may need a newer driver. Without this error
    one rank for each GPU would train on the CPU.
    """
    try:
        torch.cuda.init()
        reason = "torch does not say why"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    count = torch.cuda.device_count()
    reason = (
        f"the driver has {count}, and this torch, built for CUDA {torch.version.cuda}, cannot use "
        f"them: {reason}\nInstall a newer driver, or a torch for an older CUDA; to train on the "
        "CPU:  launch.device=cpu"
    )
    return UserError("the GPUs cannot be used", f"launch.device={device}", reason)


def rendezvous(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Return a name that is unique to this attempt and the same on all its ranks.

    Raises RunFailed if not all ranks join within `timeout` seconds.

    torchrun's store may hold keys of earlier attempts. Its number of restarts cannot tell attempts
    apart: it differs between nodes (pytorch#135712) and does not grow when nodes join. So rank 0
    creates a name, and closes it when all other ranks have registered under it. A rank that finds a
    name already closed sees an earlier attempt, and keeps waiting. A name of an earlier attempt
    that was never closed is replaced by the new one.
    """
    offered, deadline, mine = "name of the attempt", time.monotonic() + timeout, ""
    if rank == 0:
        mine = uuid.uuid4().hex
        store.set(offered, mine)
    while time.monotonic() < deadline:
        if rank == 0 and store.add(f"{mine}/here", 0) == size - 1:
            store.set(f"{mine}/closed", "")
            return mine
        if rank and store.check([offered]):
            name = store.get(offered).decode()
            closed = store.check([f"{name}/closed"])
            if closed and name == mine:
                return name
            if not closed and name != mine:
                mine = name
                store.add(f"{name}/here", 1)
        time.sleep(max(POLL_SECONDS, size / MAX_POLLS_PER_SECOND))
    raise RunFailed(
        f"rank {rank} waited {timeout:.0f} s for all {size} ranks to start. Where nodes come and "
        "go (torchrun --nnodes=MIN:MAX), torchrun needs  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  in "
        "its environment"
    )


def launcher_of(env: Mapping[str, str]) -> str:
    """Return a name of this node's torchrun, the same for all ranks and attempts that it starts.

    Without torchrun the name is new at each call.
    """
    if errors := env.get("TORCHELASTIC_ERROR_FILE"):
        return Path(errors).parents[2].name  # …/RUN_ID_random/attempt_0/RANK/error.json
    if ELASTIC in env:
        return f"{socket.gethostname()}:{os.getppid()}"
    return uuid.uuid4().hex


def connect(world: World, timeout: float) -> None:
    """Create the default process group: gloo on the CPU, and NCCL too if ranks compute on GPUs."""
    options: dict[str, Any] = {"device_id": world.device} if world.device.type == "cuda" else {}
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=world.store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        **options,
    )
