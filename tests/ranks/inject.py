"""Faults that break a training on purpose.

This is the only file of the tests that names the places inside the package where faults are
injected. A fault is a context manager that can be sent to a rank:

    train("run", ranks=2, seam=inject.bad_gradient(3))
    with inject.setting("records_kept_bytes", 150): ...

Most faults are tied to a phase (`at("clip", act, rank=1, step=3)`), which is public. Functions that
no phase reaches are in POINTS, and limits that a test lowers are in SETTINGS. If one of them moves
or is renamed, only its line there changes.
"""

import contextlib
import errno
import functools
import importlib.util
import math
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tables import rows

from fsdp_trainer.base import phases
from fsdp_trainer.errors import RunFailed

POINTS = dict(
    rows("""
# states on a disk
state_part → fsdp_trainer.optim.offload.offloaded_optimizer:DiskOptimizer._update_in_memory
state_file → fsdp_trainer.optim.offload.state_files:reserve
state_piece → fsdp_trainer.optim.offload.state_files:move_piece
state_open → fsdp_trainer.optim.offload.state_files:os.open
# data
row_read → fsdp_trainer.data.order.mixture:Mixture.read_rows
batch_read → fsdp_trainer.training.batches:Assembler.assemble
stream_read → fsdp_trainer.data.stream.row_stream:read_unit
stream_step → fsdp_trainer.training.streamed_source:StreamFeed.next_step
stream_waits → fsdp_trainer.training.streamed_source:StreamFeed._report_waiting
file_read → fsdp_trainer.data.store.tokenize_tasks:read_unit
file_hash → fsdp_trainer.data.store.fingerprint:content_hash
tokenize_texts → fsdp_trainer.data.tokens.samples:SampleBuilder.tokenize
tokenize_part → fsdp_trainer.data.store.tokenize_tasks:tokenize
worker_task → fsdp_trainer.data.store.tokenize_workers:_send_next
list_tasks → fsdp_trainer.data.store.component_store:ComponentStores._tasks
prepare → fsdp_trainer.data.store.component_store:ComponentStores._make
remote_open → fsdp_trainer.data.files.remote_files:url_to_fs
pack_rows → fsdp_trainer.data.order.row_order:RowOrder._pack
plan_epoch → fsdp_trainer.data.order.row_order:RowOrder._plan
# a step
build → fsdp_trainer.run.run:build
fill → fsdp_trainer.run.build:fill
fuses_update → fsdp_trainer.run.build:fuses_update
train_step → fsdp_trainer.training.step_runner:StepRunner.train_step
fit → fsdp_trainer.training.trainer:Trainer.fit
learning_rate → fsdp_trainer.training.trainer:learning_rate
objective → fsdp_trainer.training.objective:CrossEntropy.__call__
rewarded_objective → fsdp_trainer.methods.policy_gradient:PolicyGradient.__call__
reported_loss → fsdp_trainer.training.step:negative_log_likelihood
compute_again → fsdp_trainer.training.step:ForwardBackward.compute_separately
compare_copies → fsdp_trainer.training.corruption:Corruption.check_copies
varlen_kernel → fsdp_trainer.models.attention:_varlen
mixing_kinds → fsdp_trainer.models.hf.probe:mixing_kinds
probed → fsdp_trainer.models.hf.probe:probed
image_states → fsdp_trainer.models.hf.image_tower:first_rows
rotary_embedding → fsdp_trainer.models.decoder:rotate
# checkpoints and exports
checkpoint_write → fsdp_trainer.checkpoint.store:write_file
checkpoint_complete → fsdp_trainer.checkpoint.store:CheckpointStore._complete
checkpoint_wait → fsdp_trainer.checkpoint.store:CheckpointStore.wait
mirror_put → fsspec.implementations.local:LocalFileSystem.put_file
mirror_read → fsdp_trainer.checkpoint.bucket:Bucket._blocks
tensor_read → fsdp_trainer.checkpoint.formats.tensor_files:read
frozen_digest → fsdp_trainer.checkpoint.frozen_weights:_digest
checksum → fsdp_trainer.checkpoint.atomic_files:checksum
commit → fsdp_trainer.checkpoint.atomic_files:commit
export_write → fsdp_trainer.checkpoint.formats.safetensors_file:write
export_threads → fsdp_trainer.checkpoint.exports.hf_folder:in_threads
# records and trackers
records_write → fsdp_trainer.observe.records:Records.write
event → fsdp_trainer.observe.records:Records.event
say → fsdp_trainer.observe.console:Console.say
open_tracker → fsdp_trainer.observe.tracker_threads:open_tracker
# ranks, nodes and machines
destroy_groups → torch.distributed:destroy_process_group
wait_for_node → fsdp_trainer.launch.world:World.rank0_then_nodes_then_all
join_world → fsdp_trainer.launch.world:rendezvous
node_joins → fsdp_trainer.launch.nodes:Meeting.accept
node → fsdp_trainer.launch.start:Node
start_rank → fsdp_trainer.launch.start:start_process
run_claim → fsdp_trainer.run.run_lock:RunLock.read
cuda_runtime → torch.cuda:cudart
device_memory → fsdp_trainer.parallel.memory_check:device_bytes
host_memory → fsdp_trainer.parallel.memory_check:host_bytes
free_memory → fsdp_trainer.parallel.parallelize:free_bytes
device_files → fsdp_trainer.config.devices:glob
device_speed → fsdp_trainer.apps.doctor.speed:products
link_speed → fsdp_trainer.apps.doctor.speed:there_and_back
disk_speed → fsdp_trainer.apps.doctor.speed:disk
float8_gains → fsdp_trainer.parallel.convert:worth_float8
versions → fsdp_trainer.launch.facts:versions
torch_version → fsdp_trainer.config.rules.rules_computing:version
job_fits → fsdp_trainer.apps.sweep.sweep:does_not_fit
check_job → fsdp_trainer.apps.sweep.sweep:Jobs._check
make_plan → fsdp_trainer.planning.plan.plan:make_plan
sweep_extra → fsdp_trainer.config.composing.sweep_overrides:find_spec
# the watchdog
rank_slots → fsdp_trainer.base.slots:read_slots
starved_for → fsdp_trainer.launch.watchdog:Watchdog.starved_for
ask_for_stacks → fsdp_trainer.launch.watchdog:Watchdog.ask_for_stacks
reads_disk → fsdp_trainer.launch.watchdog:reads_disk
suspended → fsdp_trainer.launch.watchdog:suspended
""")
)
"""Functions and methods that can be replaced, by a name for what they do."""

SETTINGS = {
    name: places.split()
    for name, places in rows("""
state_file_bytes → fsdp_trainer.optim.offload.parts:FILE_BYTES
state_part_bytes → fsdp_trainer.optim.offload.parts:PART_BYTES
state_sliced_bytes → fsdp_trainer.optim.offload.parts:SLICED_BYTES
state_quantum → fsdp_trainer.optim.offload.parts:QUANTUM
save_pauses → fsdp_trainer.training.after_step.saving:pauses
signal_echo_seconds → fsdp_trainer.training.stopping.signals:ECHO_SECONDS
  fsdp_trainer.launch.start:ECHO_SECONDS
shared_folder_lag_seconds → fsdp_trainer.run.run_lock:LAG_SECONDS
beat_seconds → fsdp_trainer.training.setup.run_inputs:BEAT_SECONDS
stream_round_seconds → fsdp_trainer.training.streamed_source:ROUND_SECONDS
stream_rounds_told → fsdp_trainer.training.streamed_source:ROUNDS_PER_MESSAGE
mixture_version → fsdp_trainer.data.order.mixture:VERSION
order_mapped_from → fsdp_trainer.data.order.row_order:MAPPED_FROM
  fsdp_trainer.data.store.token_store:MAPPED_FROM
remembered_steps → fsdp_trainer.rl.rounds.rollout_source:REMEMBERED_STEPS
attention_length_multiple → fsdp_trainer.models.document_calls:LENGTH_MULTIPLE
optimizer_chunk → fsdp_trainer.optim.compact:CHUNKS
template_seconds → fsdp_trainer.data.templates.chat_template:SECONDS
tokenizer_overlap → fsdp_trainer.data.tokens.tokenizer:OVERLAP
tokenizer_long_text → fsdp_trainer.data.tokens.tokenizer:LONG
tokenize_chunk → fsdp_trainer.data.store.tokenize_tasks:CHUNK
largest_document → fsdp_trainer.data.token_files.token_file:LARGEST_DOCUMENT
shard_tokens → fsdp_trainer.data.token_files.write_token_files:SHARD_TOKENS
smallest_part → fsdp_trainer.data.store.component_store:SMALLEST
fewest_parts → fsdp_trainer.data.store.component_store:FEWEST
worth_processes → fsdp_trainer.data.store.component_store:WORTH_PROCESSES
tokens_version → fsdp_trainer.data.store.fingerprint:TOKENS_VERSION
settled_seconds → fsdp_trainer.data.store.fingerprint:SETTLED_SECONDS
json_chunk → fsdp_trainer.data.files.json_values:CHUNK
longest_row → fsdp_trainer.data.files.json_values:LONGEST
  fsdp_trainer.data.files.csv_rows:LONGEST
  fsdp_trainer.data.files.tables:LONGEST
  fsdp_trainer.data.files.file_splits:LONGEST
most_values → fsdp_trainer.data.files.json_values:MOST_VALUES
  fsdp_trainer.data.files.csv_rows:MOST_VALUES
  fsdp_trainer.data.files.file_splits:MOST_VALUES
unpacked_freely → fsdp_trainer.base.unpacked:UNPACKED_FREELY
  fsdp_trainer.data.files.table_sizes:UNPACKED_FREELY
checkpoint_window_bytes → fsdp_trainer.checkpoint.shards:WINDOW_BYTES
tensor_piece_bytes → fsdp_trainer.checkpoint.formats.tensor_files:PIECE_BYTES
records_kept_bytes → fsdp_trainer.observe.records:KEPT_BYTES
slow_disk_seconds → fsdp_trainer.observe.records:SLOW_SECONDS
tracker_close_seconds → fsdp_trainer.observe.tracker_threads:CLOSE_SECONDS
tracker_waiting → fsdp_trainer.observe.tracker_threads:WAITING
report_read_bytes → fsdp_trainer.apps.report.read:READ_BYTES
report_rows → fsdp_trainer.apps.report.read:ROWS
logit_factors → fsdp_trainer.models.hf.probe:FACTORS
compile_backend → fsdp_trainer.parallel.compile:BACKEND
float8_emulated → fsdp_trainer.parallel.convert:EMULATED
collective_sizes → fsdp_trainer.apps.doctor.speed:SIZES
measure_seconds → fsdp_trainer.apps.doctor.speed:WINDOW_SECONDS
launch_grace_seconds → fsdp_trainer.launch.start:GRACE_SECONDS
node_answer_seconds → fsdp_trainer.launch.nodes:ANSWER_SECONDS
node_name_seconds → fsdp_trainer.launch.nodes:NAME_SECONDS
slurm_look_seconds → fsdp_trainer.apps.sweep.slurm:LOOK_SECONDS
slurm_requeue_seconds → fsdp_trainer.apps.sweep.slurm:REQUEUE_SECONDS
sweep_look_seconds → fsdp_trainer.apps.sweep.sweep:LOOK_SECONDS
sweep_read_seconds → fsdp_trainer.apps.sweep.sweep:READ_SECONDS
sweep_tell_seconds → fsdp_trainer.apps.sweep.jobs:TELL_EVERY_SECONDS
""")
}
"""Constants by a name for what they limit, each with every module that has a copy."""

trainer = None
"""The trainer of this rank, after it was built inside `with_trainer`."""


# --- faults -------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A context manager and its arguments. It is picklable, so every rank can enter its own."""

    choose: Callable
    args: tuple
    options: dict[str, Any]
    entered: list[contextlib.AbstractContextManager] = field(default_factory=list, repr=False)

    def __call__(self):
        return self.choose.context(*self.args, **self.options)

    def __enter__(self):
        self.entered.append(self())
        self.entered[-1].__enter__()

    def __exit__(self, *error):
        return self.entered.pop().__exit__(*error)

    def __str__(self):
        return " ".join([self.choose.__name__, *map(str, self.args)])


def fault(body):
    """Decorate a generator function so that a call returns a Fault, which is not entered yet."""

    @functools.wraps(body)
    def choose(*args, **options):
        return Fault(choose, args, options)

    choose.context = contextlib.contextmanager(body)
    return choose


@fault
def together(*faults):
    """Enter several faults at once."""
    with contextlib.ExitStack() as stack:
        for one in faults:
            stack.enter_context(one())
        yield


def this_rank(rank):
    """Return True if this process is `rank`: a number, "last", or None for every rank."""
    mine, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank is None or mine == (size - 1 if rank == "last" else rank)


# --- injection points ---------------------------------------------------------------------------


def replace(place, value):
    """Replace "module:attribute" by `value`; the context manager restores it at the end."""
    module, path = place.split(":")
    owner, _, name = path.rpartition(".")
    return patch.object(resolve_name(f"{module}:{owner}"), name, value)


@fault
def around(point, wrapper, rank=None):
    """Call `wrapper(real, *args)` instead of the function of POINTS, on `rank`."""
    real = resolve_name(POINTS[point])

    def replaced(*args, **options):
        return wrapper(real, *args, **options)

    with replace(POINTS[point], replaced) if this_rank(rank) else contextlib.nullcontext():
        yield


@fault
def fails(point, error, rank=None, nth=None):
    """Raise `error` instead of calling the function of POINTS; nth: only at the nth call."""
    calls = []

    def fail(real, *args, **options):
        calls.append(args)
        if nth in (None, len(calls)):
            raise error
        return real(*args, **options)

    with around(point, fail, rank):
        yield


@fault
def setting(name, value):
    """Set the constant of SETTINGS to `value`."""
    with contextlib.ExitStack() as stack:
        for place in SETTINGS[name]:
            stack.enter_context(replace(place, value))
        yield


def emulated_float8():
    """Compute products in float8 without a kernel, and those of small matrices too."""
    return together(setting("float8_emulated", True), around("float8_gains", _is_linear))


def _is_linear(_real, module, *_recipe_and_shares):
    return isinstance(module, torch.nn.Linear)


def no_kernels():
    """Compile without generating kernels, which takes most of the time, for tests of numbers."""
    return setting("compile_backend", "aot_eager_decomp_partition")


@fault
def listening(listener, rank=None):
    """Call `listener(thread, ended phase)` whenever `rank` enters a phase.

    It is called within the new phase, after all listeners of the product, including the profiler's.
    """
    real = phases.ThreadPhase.enter

    def enter(thread, phase, step=None):
        ended = thread.phase
        real(thread, phase, step)
        listener(thread, ended)

    with patch.object(phases.ThreadPhase, "enter", enter if this_rank(rank) else real):
        yield


@fault
def at(
    phase,
    act,
    rank=None,
    step=None,
    nth=None,
):
    """Call `act()` whenever `rank` enters a phase, only in `step` or only the nth time.

    phase: None means the beginning of a step, before any of its work.
    """
    entered, trained = [], [0]

    def listen(thread, _ended):
        begins = thread is phases.training and thread.step != trained[0]
        trained[0] = phases.training.step
        if (begins if phase is None else thread.phase == phase) and step in (None, thread.step):
            entered.append(thread.step)
            if nth in (None, len(entered)):
                act()

    with listening(listen, rank):
        yield


@fault
def after(phase, act, rank=None):
    """Call `act()` whenever `rank` leaves a phase and enters another."""

    def listen(thread, ended):
        if thread is phases.training and ended == phase != thread.phase:
            act()

    with listening(listen, rank):
        yield


@fault
def with_trainer(act=id):
    """Keep the trainer as `inject.trainer` when it is built, and call `act(trainer)`."""

    def build(real, *args, **options):
        global trainer
        trainer, start = real(*args, **options)
        act(trainer)
        return trainer, start

    with around("build", build):
        yield


# --- failures -----------------------------------------------------------------------------------


def kill():
    """Kill this process, as if its machine were lost."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(text="as good as killed"):
    """End the run with an error like those that the trainer raises itself."""
    raise RunFailed(text)


def send(signum):
    """Send this process a signal, and give the listening thread time to receive it."""
    os.kill(os.getpid(), signum)
    time.sleep(0.05)


def exhaust_memory():
    """Allocate more memory than the address space has, so that the system itself refuses it."""
    torch.empty(2**50, dtype=torch.uint8)


def signalled(phase, rank=1, nth=2, signum=signal.SIGTERM):
    """Send `rank` a signal when it enters a phase for the nth time."""
    return at(phase, functools.partial(send, signum), rank=rank, nth=nth)


@fault
def signalled_before(step, phase, rank=1, nth=2, signum=signal.SIGTERM):
    """Send `rank` a signal when it enters a phase for the nth time, before it begins `step`.

    The phase may be one of the checkpoint thread, which can be slower than all steps.
    """
    sent = threading.Event()

    def send_once():
        send(signum)
        sent.set()

    with (
        at(phase, send_once, rank=rank, nth=nth),
        at(None, functools.partial(sent.wait, 60), rank=rank, step=step),
    ):
        yield


def killed(rank=None, step=None):
    """Kill `rank` by SIGKILL when it begins a step."""
    return at(None, kill, rank=rank, step=step)


def killed_once(note, step, rank=None):
    """Kill the first process, or only `rank`, that begins a step. note: file that is made then."""
    return at(None, functools.partial(kill_first, note), rank=rank, step=step)


def kill_first(note):
    """Kill this process if no other one was killed before."""
    with contextlib.suppress(FileExistsError):
        note.touch(exist_ok=False)
        kill()


def failed(step, phase=None, nth=1):
    """End the run with an error when it begins a step, or enters a phase of it."""
    return at(phase, fail, step=step, nth=nth)


def at_phases(acts):
    """Call on rank 0 the act of each (step, phase) that it enters, also in repeated saves."""
    moments = [at(phase, act, rank=0, step=step) for (step, phase), act in acts.items()]
    return together(quick_retries(), *moments)


def quick_retries():
    """Shorten the pauses before a checkpoint that failed at the end of a run is tried again."""
    return setting("save_pauses", two_short_pauses)


def two_short_pauses(patience):
    """Replace `saving.pauses`."""
    return [0.1, 0.1]


# --- bad numbers --------------------------------------------------------------------------------


@fault
def bad_numbers(kind, steps):
    """Make the last rank's "loss", or only its "gradient", non-finite in the given steps."""

    def bad(wanted):
        return kind == wanted and phases.training.step in steps

    def objective(real, self, scores, tokens):
        if bad("gradient"):
            scores.log_probability.register_hook(lambda gradient: gradient * float("nan"))
        return real(self, scores, tokens) * (float("inf") if bad("loss") else 1)

    def loss(real, *args):
        return real(*args) * (float("inf") if bad("loss") else 1)

    with (
        around("objective", objective, rank="last"),
        around("reported_loss", loss, rank="last"),
    ):
        yield


def bad_gradient(*steps):
    """Make gradients of the last rank NaN in the given steps, by default the third."""
    return bad_numbers("gradient", steps or (3,))


def bad_loss(*steps):
    """Make losses of the last rank infinite in the given steps, by default the third."""
    return bad_numbers("loss", steps or (3,))


@fault
def infinite_gradient(step=3):
    """Make one element of one shard of the last rank's gradient infinite, before it is clipped."""

    def spoil():
        gradients = (p.grad.to_local() for p in trainer.runner.model.parameters())
        next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = float("inf")

    with with_trainer(), at("clip", spoil, rank="last", step=step):
        yield


@fault
def spiked_once(point, step, factor=1e4):
    """Multiply the result of the function of POINTS by a factor on the last rank in a step.

    It stops when the run has been rewound.
    """

    def spoilt(real, *args):
        is_spike = phases.training.step == step and not trainer.progress.rewinds
        return real(*args) * (factor if is_spike else 1)

    with with_trainer(), around(point, spoilt, rank="last"):
        yield


@fault
def flipped_bit(rank, after_step):
    """Flip one bit of one weight of a rank between two steps."""

    def flip():
        weight = (
            dict(trainer.runner.model.named_parameters())["model.norm.weight"].to_local().detach()
        )
        weight.view(torch.int32)[3] ^= 1

    with with_trainer(), at(None, flip, rank=rank, step=after_step + 1):
        yield


@fault
def garbage_rows(which, labels):
    """Replace the labels of rows for which `which(index)` is true by `labels(index, tokens)`."""

    def read(real, self, indices):
        rows = real(self, indices)
        for index, tokens, row in zip(indices, rows.tokens, rows.labels, strict=True):
            if which(index):
                row[:] = np.where(row == -100, -100, labels(index, tokens))
        return rows

    with around("row_read", read):
        yield


SPIKED = 20
"""The step whose rows `garbage` spoils, with 3 rows a step."""


def garbage():
    """Replace the labels of step SPIKED's rows by noise, in whatever step they are trained."""
    return garbage_rows(_is_spiked, _noise)


def always_garbage(times=math.inf):
    """Replace the labels of one step in three by noise, from row 57 on, at most so often."""
    return garbage_rows(functools.partial(_is_often_spiked, times), _other_noise)


def _is_spiked(index):
    return 3 * (SPIKED - 1) <= index < 3 * SPIKED


def _noise(index, tokens):
    return (tokens * 2654435761 + index * 40503) % 200


def _is_often_spiked(times, index):
    return index >= 57 and (index - 57) // 3 % 3 == 0 and (index - 57) // 9 < times


def _other_noise(_index, tokens):
    return 199 * np.arange(len(tokens)) % 256


# --- disks --------------------------------------------------------------------------------------


def no_space():
    return OSError(errno.ENOSPC, "No space left on device")


@fault
def when_writing(act):
    """Call `act(step, run's folder)` before a rank writes its shards of a checkpoint."""

    def write(real, path, windows):
        act(int(path.parent.name.split(".")[1].removeprefix("step-")), path.parents[2])
        return real(path, windows)

    with around("checkpoint_write", write):
        yield


@fault
def broken_writes(steps, error):
    """Make rank 0's writes in these steps fail: records after 25 bytes, shards at once."""
    write = os.write

    def writes(file, data):
        if phases.training.step not in steps:
            return write(file, data)
        if len(data) > 40:
            return write(file, bytes(data[:25]))  # a part is written first
        raise OSError(error, os.strerror(error))

    def writes_shards(real, *args):
        if phases.training.step in steps:
            raise OSError(error, os.strerror(error))
        return real(*args)

    with contextlib.ExitStack() as stack:
        if this_rank(0):
            stack.enter_context(patch.object(os, "write", writes))
            stack.enter_context(around("checkpoint_write", writes_shards))
        yield


@fault
def unseen(method, hides, rank=1, seconds=float("inf")):
    """Hide files for which `hides(path)` is true from Path's `method` on a rank, for `seconds`."""
    real, until = getattr(Path, method), time.monotonic() + seconds

    def see(self, **how):
        return not (time.monotonic() < until and hides(self)) and real(self, **how)

    with patch.object(Path, method, see) if this_rank(rank) else contextlib.nullcontext():
        yield


# --- packages and clocks ------------------------------------------------------------------------


@fault
def without_package(name):
    """Make `importlib.util.find_spec` return None for a package."""
    find = importlib.util.find_spec

    def find_others(other, *rest):
        return None if other == name else find(other, *rest)

    with patch("importlib.util.find_spec", find_others):
        yield


@fault
def as_on_macos():
    """Take away calls of Linux that macOS does not have."""
    lacks = {os: ["posix_fallocate", "posix_fadvise", "copy_file_range", "sched_getaffinity"],
             signal: ["sigtimedwait"]}  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module, names in lacks.items():
            for name in names:
                stack.enter_context(patch.object(module, name))
                delattr(module, name)
        yield


# --- processes that the product starts ----------------------------------------------------------


def seamed(folder, code):
    """Return an environment in which every Python process first runs `code`.

    For real processes that a test does not start itself, if the order of events must be certain.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
