"""This process's place among the ranks, and what they agree on before the first collective."""

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

from fsdp_trainer.errors import Problem, RunFailed, Stopped, UserError
from fsdp_trainer.launch.nodes import first_host, port_of_job
from fsdp_trainer.launch.start import PARENT, die_with_parent

ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun
LINGER_SECONDS = 30.0
MEETING_SECONDS, LOOKS_A_SECOND = (
    0.02,
    5000,
)  # between two looks at who is there; of all ranks together at the store, which is one thread
T = TypeVar("T")


@dataclass
class World:
    """rank: of size; local_rank: on this node, which is node of nodes; launcher: what started this node's ranks, and will start them again.

    attempt: a name for this start of all ranks; store: it has the keys of this attempt alone.
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
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def launchers(self, timeout: float) -> list[str]:
        """Of all nodes, for rank 0; the others tell it theirs."""
        if self.local_rank == 0:
            self._put(f"launcher/node{self.node}", self.launcher)
        return (
            [self._get(f"launcher/node{node}", timeout) for node in range(self.nodes)]
            if self.main
            else []
        )

    def from_main(self, name: str, make: Callable[[], T], timeout: float) -> T:
        """What rank 0 makes, on every rank."""
        if self.main:
            value = make()
            self._put(name, value)
            return value
        value = self._get(name, timeout)
        self.store.add(f"{name}/heard", 1)
        return value

    def to_main(self, name: str, mine: T, timeout: float) -> list[T]:
        """Every rank's `mine`, in order, on rank 0; nothing on the others. Raises RunFailed with the ranks that did not come."""
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

    def beat(self) -> None:
        """Tell the ranks that wait in `node_by_node` that this one's work goes on."""
        self.store.add("beats", 1)

    def node_by_node(self, name: str, work: Callable[[], T], timeout: float) -> T:
        """Run `work` on rank 0, then on one rank of every node, then on all: the later ones find what the first left on disk.

        Waits outside any collective, so that hours of tokenising time nothing out: only `timeout` seconds without a beat do. All return
        together; a failure of one is the failure of all.
        """
        first, node, all_done = f"{name}/rank0", f"{name}/node{self.node}", f"{name}/all"
        mine = first if self.main else node
        for key in (
            []
            if self.main
            else [first]
            if self.local_rank == 0 or self.node == 0
            else [first, node]
        ):  # rank 0 is node 0's
            self._hear(name, key, timeout)
        failure = None
        try:
            result = work()
        except BaseException as error:
            told = f"{name} failed on rank {self.rank}: {type(error).__name__}: {error}"
            failure = error if isinstance(error, UserError | Stopped) else RunFailed(told)
            if not self.main and not isinstance(
                error, Stopped
            ):  # rank 0, which tells what all have in common, does not know
                print(f"rank {self.rank}: {failure}", file=sys.stderr)
            raise
        finally:
            if self.local_rank == 0:
                self._put(mine, failure)
            if failure or self.store.add(f"{name}/done", 1) == self.size:
                self._put(all_done, failure)
            if failure and self.main:
                self.linger(name)
        self._hear(name, all_done, timeout)
        return result

    def _hear(self, name: str, key: str, timeout: float) -> None:
        """Wait for what others did. Raises what it failed with, and RunFailed after `timeout` seconds without a beat."""
        beats, heard = 0, time.monotonic()
        while not self.store.check([key]):
            time.sleep(max(MEETING_SECONDS, self.size / LOOKS_A_SECOND))
            if (beats_now := self.store.add("beats", 0)) != beats:
                beats, heard = beats_now, time.monotonic()
            elif time.monotonic() - heard > timeout:
                silence = RunFailed(
                    f"{name}: nothing was heard of it for {timeout:g} s. Longer with  launch.data_timeout=…"
                )
                if not self.main:  # rank 0 may be the one that is not heard
                    print(f"rank {self.rank}: {silence}", file=sys.stderr)
                raise silence
        failure = self._get(key, timeout)
        if failure:
            self.store.add(f"{name}/heard", 1)
            self.linger(name)
            raise failure

    def linger(self, name: str, timeout: float = LINGER_SECONDS) -> None:
        """The store may end with rank 0: if it leaves, it gives the others time to hear why. Returns at once on them."""
        deadline = time.monotonic() + min(LINGER_SECONDS, timeout)
        while (
            self.main
            and self.store.add(f"{name}/heard", 0) < self.size - 1
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)


def environment_of_ranks(env: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE … as torchrun sets them; made from Slurm's variables in an srun step of several tasks; None without a launcher."""
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


def join(env: Mapping[str, str], device: str, timeout: float) -> World:
    """Find this process's place and open the store that all ranks share. No process group yet."""
    if PARENT in env:
        die_with_parent(int(env[PARENT]))
    rank, size, local_rank = (
        int(env.get("RANK", 0)),
        int(env.get("WORLD_SIZE", 1)),
        int(env.get("LOCAL_RANK", 0)),
    )
    store: dist.Store
    if size == 1 and "MASTER_ADDR" not in env:
        store = dist.HashStore()
    else:
        hosted = (
            env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )  # torchrun's agent keeps the store, with the keys of earlier attempts
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        serves = rank == 0 and not hosted
        try:
            store = dist.TCPStore(
                address,
                port,
                size,
                is_master=serves,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except dist.DistNetworkError as error:
            if serves and "EADDRINUSE" in str(error):
                why = "is in use on this node (ss -ltnp says by whom): another run, or what is left of one. Set another, the same for all ranks"
                raise UserError(
                    "the ranks cannot meet", [Problem(f"MASTER_PORT={port}", why)]
                ) from None
            raise
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "there is no GPU",
            [
                Problem(
                    "launch.device=cuda",
                    "torch sees none here. Use  launch.device=cpu  or a CUDA build of torch",
                )
            ],
        )
    chosen = (
        "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    )
    place = torch.device(chosen, local_rank) if chosen == "cuda" else torch.device("cpu")
    if chosen == "cuda":
        if local_rank >= (there := torch.cuda.device_count()):
            why = f"this node has {there} that are visible (CUDA_VISIBLE_DEVICES), and rank {rank} would take number {local_rank + 1}"
            raise UserError(
                "there are fewer GPUs than ranks",
                [Problem("launch.nproc_per_node", f"{why}. Use  auto")],
            )
        torch.cuda.set_device(place)
    attempt = meet(store, rank, size, timeout)
    node, nodes = int(env.get("GROUP_RANK", 0)), int(env.get("GROUP_WORLD_SIZE", 1))
    return World(
        rank,
        size,
        local_rank,
        node,
        nodes,
        launcher_of(env),
        attempt,
        dist.PrefixStore(attempt, store),
        place,
    )


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """A name that all ranks of this attempt have, and none of another. Raises RunFailed if they do not all come within `timeout` seconds.

    torchrun's store may hold the keys of earlier attempts, the number of restarts differs from node to node (pytorch#135712), and does
    not grow when nodes join. So rank 0 makes a name up and closes it when all the others have put theirs under it: a name that is closed
    when one comes is of an attempt before, and one that is never closed is replaced.
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
        time.sleep(max(MEETING_SECONDS, size / LOOKS_A_SECOND))
    raise RunFailed(
        f"rank {rank} waited {timeout:.0f} s for all {size} ranks to start. Where nodes come and go (torchrun --nnodes=MIN:MAX), torchrun needs "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  in its environment"
    )


def launcher_of(env: Mapping[str, str]) -> str:
    """A name of this node's torchrun, the same for all ranks and all attempts that it starts; any new name without torchrun."""
    errors = env.get("TORCHELASTIC_ERROR_FILE")  # …/RUN_ID_random/attempt_0/RANK/error.json
    return (
        Path(errors).parents[2].name
        if errors
        else f"{socket.gethostname()}:{os.getppid()}"
        if ELASTIC in env
        else uuid.uuid4().hex
    )


def connect(world: World, timeout: float) -> None:
    """Make the default process group: gloo for the host, and NCCL where ranks compute on GPUs."""
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
