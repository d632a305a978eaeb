"""A pool of worker processes that act as ranks, so that tests do not import torch for each run."""

import contextlib
import copy
import gc
import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.composing.handover import DESCRIPTOR, configuration_file
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.nodes import free_port

SERVER = "FSDP_TRAINER_TESTS_SERVER"
"""Environment variable with the address of the server that ranks are forked from, if it runs."""
PRELOAD = ["torch", "torch.distributed.checkpoint", "tests.ranks.warm"]
RANKS = 4
MOST_THREADS = 40
"""A worker with more threads gets no further job: each gloo thread wakes 100 times a second."""
SMALL = [
    "model=tiny", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_hidden_layers=2", "model.head_dim=8", "precision=fp32",
    "model.initializer_range=0.1", "batch.seq_len=64", "batch.rows=6", "batch.micro_rows=6",
    "optim.lr=3e-3", "optim.weight_decay=0.1",
    "schedule.warmup_steps=3", "checkpoint.every=null", "launch.timeout=60s",
    "launch.data_timeout=60s", "launch.watchdog=false",
]  # fmt: skip

SPIKY = [
    "train.spike_window=8", "checkpoint.every=6", "checkpoint.keep=9", "batch.micro_rows=3",
    "schedule=constant", "batch.rows=3", "optim.lr=1e-3",
]  # fmt: skip
"""Overrides for three rows a step, and a guard that learns the usual loss in few steps."""


class RankFailed(AssertionError):
    """A rank raised, died or got stuck. The pool's workers have been ended."""


@dataclass
class CommandResult:
    """Exit code and output of one rank's command line."""

    code: Any
    out: str = ""
    err: str = ""


@dataclass
class Run:
    """The folder of a run, read through its record files."""

    folder: Path
    ranks: list[CommandResult] = field(default_factory=list)

    @property
    def out(self):
        return self.ranks[0].out

    @property
    def err(self):
        return self.ranks[0].err

    @property
    def metrics(self):
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def events(self):
        return read_lines(self.folder / "events.jsonl")

    @property
    def checkpoints(self):
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*"))

    def __getitem__(self, name):
        """Return a column of the metrics: run["loss"]."""
        return [line[name] for line in self.metrics]

    column = __getitem__

    def event(self, name):
        return [line for line in self.events if line["event"] == name]


def write_chats(path, count, start=0):
    """Write short questions and answers of 26 to 41 tokens; return the file."""
    rows = [
        {"prompt": chr(97 + i % 26) * (1 + i % 9), "completion": f"{i * i % 97}" + "!" * (i % 7)}
        for i in range(start, start + count)
    ]
    return write_lines(path, rows)


def flip_bit(file):
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def read_lines(path):
    return lines_of(path.read_text()) if path.exists() else []


def lines_of(text):
    """Return what lines of JSON hold."""
    return [json.loads(line) for line in text.splitlines()]


def write_lines(path, rows):
    """Write a line of JSON for each row; return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_json(path):
    return json.loads(path.read_text())


def write_json(path, content):
    path.write_text(json.dumps(content))


def edit_json(path, **changes):
    """Change keys of the object in a file."""
    write_json(path, read_json(path) | changes)


def wait_for_step(step, run):
    """Raise OSError if training waits for the write."""
    deadline = time.monotonic() + 300
    while len(read_lines(run / "metrics.jsonl")) < step:
        if time.monotonic() > deadline:
            raise OSError("training waited for the write")
        time.sleep(0.01)


def ranks_below(pid):
    """Return the process ids of all descendants of `pid` that are ranks, by RANK."""
    pids = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            env = dict(
                item.partition("=")[::2]
                for item in Path(f"/proc/{child}/environ").read_text().split("\0")
            )
            pids |= {env["RANK"]: int(child)} if "RANK" in env else {}
            pids |= ranks_below(child)
        except OSError:
            continue
    return pids


def wait_until(condition, process=None):
    """Poll `condition` until it returns a true value, and return that.

    Raises AssertionError after 300 s, or if `process` ends.
    """
    deadline = time.monotonic() + 300
    while not (result := condition()):
        assert not process or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)
    return result


def end(processes):
    """Kill the processes that a test started and that still run."""
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def alive(pid):
    """Return True if a process runs; False if it has ended, even if it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start_server():
    """Start the server that ranks are forked from, for all processes that this one starts.

    It imports torch and transformers once, while pytest's workers collect tests.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    os.environ[SERVER] = forkserver._forkserver._forkserver_address


def use_server(address):
    """Fork ranks from the server of another process."""
    server = forkserver._forkserver
    if server._forkserver_address != address:
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = do_nothing  # it would start one of our own


class World:
    """A pool of ranks. `call` runs a function on each, `command` a command line."""

    def __init__(self):
        os.environ["OMP_NUM_THREADS"] = "1"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        if SERVER in os.environ:
            use_server(os.environ[SERVER])
        self.workers = []
        self.worn_out = []

    def call(
        self,
        ranks,
        function,
        *args,
        env=None,
        timeout=600,
        patience=20,
    ):
        """Run `function(*args)` on each rank with torchrun's variables; return its results by rank.

        patience: seconds after the first failure for other ranks to end. Raises RankFailed.
        """
        self.replace_worn_out()
        while len(self.workers) < ranks:
            self.workers.append(self.new_worker())
        workers = self.workers[:ranks]
        port = str(free_port())
        for rank, (_, pipe) in enumerate(workers):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            pipe.send((pack((function, args)), place | (env or {})))
        answers = {}
        deadline = time.monotonic() + timeout
        while len(answers) < ranks and time.monotonic() < deadline:
            waiting = {workers[rank][1]: rank for rank in range(ranks) if rank not in answers}
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=0.5):
                rank = waiting[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = ("died", workers[rank][0].exitcode, True)
                if answers[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + patience)
        if any(kind != "done" for kind, *_ in answers.values()) or len(answers) < ranks:
            self.close()
            lines = [
                f"rank {r}: {' '.join(map(str, answers.get(r, ('stuck',))[:2]))}"
                for r in range(ranks)
            ]
            raise RankFailed("\n".join(lines))
        self.worn_out = [rank for rank in range(ranks) if answers[rank][2]]
        return [answers[rank][1] for rank in range(ranks)]

    def command(
        self,
        *argv,
        ranks=1,
        code=0,
        seam=None,
        **options,
    ):
        """Run a command line on every rank; each must exit with `code`.

        seam: a function whose context manager is entered on every rank. options: see call.
        """
        argv = split(argv)
        composed = compose_once(argv) if ranks > 1 and code != 2 else None
        results = self.call(ranks, command, argv, seam, composed, **options)
        said = "\n".join(
            f"rank {i} exit {result.code}\n{result.out}{result.err}"
            for i, result in enumerate(results)
        )
        assert [result.code for result in results] == [code] * ranks, said
        assert not any("Traceback" in result.err for result in results), said
        return results

    def train(
        self,
        folder,
        *overrides,
        ranks=1,
        base=None,
        **options,
    ):
        """Do a small training into `folder`. base: overrides instead of SMALL."""
        place = [f"run.root={folder.parent}", f"run.name={folder.name}"]
        results = self.command(
            "train", *(SMALL if base is None else base), *place, *overrides, ranks=ranks, **options
        )
        return Run(folder, results)

    def new_worker(self):
        """Start a process that waits for jobs; return it and our end of its pipe."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def replace_worn_out(self):
        """Replace the workers whose last job left them with too many threads.

        All others keep their rank, because torch's caches in them are of that rank.
        """
        for rank in self.worn_out:
            end_workers([self.workers[rank]])
            self.workers[rank] = self.new_worker()
        self.worn_out = []

    def close(self):
        """End the workers; the next call makes new ones."""
        end_workers(self.workers)
        self.workers, self.worn_out = [], []


def end_workers(workers):
    """End some workers of a pool."""
    for process, pipe in workers:
        process.kill()
        process.join()
        pipe.close()


def work(pipe):
    """Run a worker: one job after the other, until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    await_stores()
    keep_result_shapes()
    keep_placements()
    draw_only_what_is_held()
    os.fsync = lambda file: None  # it only matters when the machine loses power
    freeze, gc.freeze, gc.unfreeze = gc.freeze, do_nothing, do_nothing
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before, handlers = dict(os.environ), [signal.getsignal(s) for s in signals]
    while True:
        try:
            job, env = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(env)
        # as after a real rank's imports: garbage collection would go through all of torch's
        # objects, which takes a third of a small run. The end of a run must not unfreeze them
        freeze()
        try:
            function, args = pickle.loads(job)
            answer = ("done", function(*args))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
        for s, handler in zip(signals, handlers, strict=True):
            signal.signal(s, handler)
        forget_meshes()
        pipe.send_bytes(pack((*answer, is_worn_out())))
        del answer
        collect_garbage()


def forget_meshes():
    """Clear torch's caches whose keys or values hold the meshes of a finished run.

    The one of DTensor operators returns them to a later run whose mesh has the same shape. All keep
    the groups open, whose threads wake 100 times a second.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", do_nothing)()
    # private, so another version of torch may not have them
    owners = {"_gen_transform_infos": _redistribute, "build_from_mesh": MeshTopoInfo}
    for name, owner in owners.items():
        if cached := getattr(owner, name, None):
            cached.cache_clear()


def is_worn_out():
    """Return True if this worker has too many threads, even after garbage collection."""
    if thread_count() > MOST_THREADS:
        collect_garbage()
    return thread_count() > MOST_THREADS


def thread_count():
    return len(os.listdir("/proc/self/task"))


def collect_garbage():
    """Close what a job has left open.

    A rank may not get another job for long, and each process group has a thread that wakes 100
    times a second.
    """
    gc.collect()  # only objects created by the job, so it is quick


def do_nothing():
    """Take the place of a function that is not wanted, as gc.freeze in a worker."""


class Packer(pickle.Pickler):
    """A pickler that writes tensors as their bytes.

    multiprocessing would open a file of shared memory for each, and torch.save takes ten times as
    long.
    """

    def reducer_override(self, value):
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        if value.requires_grad or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        flat = value.reshape(-1).contiguous().view(torch.uint8)
        return unpack_tensor, (flat.numpy().tobytes(), value.dtype, value.shape)


def unpack_tensor(data, dtype, shape):
    """Return the tensor that a Packer has written."""
    import torch

    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def pack(value):
    """Return a value's bytes for `pickle.loads`."""
    file = io.BytesIO()
    Packer(file).dump(value)
    return file.getvalue()


def await_stores():
    """Make torch connect to the store of rank 0 as soon as it listens.

    torch itself tries at once, and again only after half a second.
    """
    import torch.distributed as dist

    class Store(dist.TCPStore):
        def __init__(self, host_name, port, world_size=None, is_master=False, *rest, **options):
            if not is_master:
                await_port(host_name, port)
            super().__init__(host_name, port, world_size, is_master, *rest, **options)

    dist.TCPStore = dist.rendezvous.TCPStore = Store


def keep_result_shapes():
    """Compute the result shapes of each DTensor operator once, instead of again in every job.

    They depend only on the arguments.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find = getattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", None)
    cache = {}

    def find_once(self, schema):
        key = schema.op, *arguments(schema, lambda spec: spec.tensor_meta)
        try:
            if key not in cache:
                cache[key] = find(self, schema)
        except TypeError:  # an argument cannot be hashed
            return find(self, schema)
        return cache[key]

    if find:  # a private method, which another version of torch may not have
        ShardingPropagator._propagate_tensor_meta_non_cached = find_once


def keep_placements():
    """Decide once where the results of each DTensor operator lie, instead of again in every job.

    It depends only on the arguments and the shape of their mesh. torch's own cache holds the mesh
    itself, with a run's process groups, so it is cleared after each job.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._pytree import tree_leaves

    find = getattr(ShardingPropagator, "propagate_op_sharding_non_cached", None)
    cache = {}

    def find_once(self, schema):
        leaves = tree_leaves([schema.args_schema, schema.kwargs_schema])
        meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, DTensorSpec)]
        if not meshes or any(mesh is not meshes[0] for mesh in meshes):
            return find(self, schema)
        mesh = meshes[0]
        given = arguments(
            schema, lambda spec: (spec.placements, spec.shard_order, spec.tensor_meta)
        )
        key = schema.op, tuple(mesh.shape), mesh.mesh_dim_names, *given
        try:
            if key in cache:
                return OutputSharding(on_mesh(mesh, cache[key]))
        except TypeError:  # an argument cannot be hashed
            return find(self, schema)
        result = find(self, schema)
        if result.redistribute_schema is None:
            cache[key] = on_mesh(None, result.output_spec)
        return result

    if find:
        ShardingPropagator.propagate_op_sharding_non_cached = find_once


def draw_only_what_is_held():
    """Let transformers draw no weights on the meta device, where nothing holds them.

    It takes a tenth of a small run of its models.
    """
    # the server has not imported it where there are GPUs
    model = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    draw = getattr(model, "_initialize_weights", None)

    def draw_if_held(self, module, *more):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not own or not all(tensor.is_meta for tensor in own):
            draw(self, module, *more)

    if draw:  # a private method, which another version of transformers may not have
        model._initialize_weights = draw_if_held


def arguments(schema, of_tensor):
    """Return the arguments of a DTensor operator as a key. of_tensor: returns the part of one."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.utils._pytree import tree_leaves

    given = [*schema.args_schema, *schema.kwargs_schema.items()]
    lengths = tuple(len(x) if isinstance(x, list | tuple) else -1 for x in given)
    leaves = (
        of_tensor(leaf) if isinstance(leaf, DTensorSpec) else (type(leaf), leaf)
        for leaf in tree_leaves(given)
    )
    return lengths, *leaves


def on_mesh(mesh, spec):
    """Return a copy of a DTensorSpec, or of several, on another mesh of the same shape."""
    if spec is None:
        return None
    if isinstance(spec, list | tuple):
        return type(spec)(on_mesh(mesh, each) for each in spec)
    placed = copy.copy(spec)
    placed.__dict__.update(mesh=mesh, _hash=None)
    return placed


def await_port(host, port):
    """Wait until a port accepts connections, for about a second at most."""
    for _ in range(100):
        try:
            socket.create_connection((host, port)).close()
            return
        except OSError:
            time.sleep(0.01)


def compose_once(argv):
    """Return the configuration of all ranks of a training, composed once as by our launcher.

    None if each rank must compose it itself.
    """
    if argv[0] != "train" or any("${" in word for word in argv):
        return None
    try:
        return compose("train", argv[1:])
    except UserError:
        return None  # rank 0 reports the error


def split(words):
    """Return words of a command line; a text may have several: "train.steps=2 optim=lion"."""
    return [word for text in words for word in re.split(r"\s+(?=[\w.]+=)", str(text))]


def command(argv, seam, composed=None):
    """Run a command line in this process; return its exit code and output.

    seam: see World.command. composed: the configuration, if a launcher passes it.
    """
    from fsdp_trainer.cli import main

    out, err = io.StringIO(), io.StringIO()
    if composed:
        with configuration_file(composed) as file:
            os.environ[DESCRIPTOR] = str(os.dup(file.fileno()))
    with (
        seam() if seam else contextlib.nullcontext(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(argv)
    return CommandResult(code, out.getvalue(), err.getvalue())


def cli(*words, code=0):
    """Run a command line in this process, which must end with `code`.

    For tests that have imported transformers: a worker would spend seconds importing it again.
    """
    result = command(split(words), None)
    assert result.code == code, result
    return result


def verify(*words, code=0):
    """Run `verify` in this process and return its output."""
    return cli("verify", *words, code=code).out
