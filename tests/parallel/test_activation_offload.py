"""Activations in host memory: `activation_checkpoint.offload=true` changes where they are, and
nothing that is computed."""

import gc
import re
import weakref
from dataclasses import replace
from unittest.mock import patch

import inject
import pytest
import torch
from recipe import planned
from small_decoder import small_decoder
from world import split

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.schema import ActivationCheckpoint, Compile
from fsdp_trainer.models.attention import MaskedAttention
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.parallel import activation_offload
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.parallel.activation_offload import (
    CopiesOnHost,
    Offloader,
    SavedByBlock,
    offload_activations,
)
from fsdp_trainer.parallel.compile import compile_blocks
from fsdp_trainer.planning.plan import block_memory
from fsdp_trainer.planning.plan.block_memory import moved_bytes, trace_blocks
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.plan_inputs import architecture, target
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.suggest import suggest
from fsdp_trainer.training.objective import CrossEntropy

LENGTH = 64
CPU = torch.device("cpu")


class CountedCopies(CopiesOnHost):
    """Remembers what was moved out, and how much of it is on the device for backward."""

    def __init__(self):
        self.moved, self.sizes, self.fetched = [], [], 0

    def to_host(self, storage):
        self.moved.append(storage.data_ptr())
        self.sizes.append(storage.nbytes())
        return super().to_host(storage)

    def to_device(self, data):
        self.fetched += 1
        return super().to_device(data)


def build(cfg, compiled=False, layers=4):
    """A small decoder under activation checkpointing `cfg`, and its copies."""
    model = small_decoder(0, family="qwen3", num_hidden_layers=layers)
    copies = CountedCopies()
    offloader = Offloader(copies) if cfg.offload else None
    checkpoint_activations(model, cfg, None if compiled else offloader)
    if compiled:
        compile_blocks(model, Compile(), forward_alone=cfg.offload)
    if offloader:
        offload_activations(model, offloader)
    return model, copies


def micro_batch():
    tokens = torch.arange(LENGTH)[None] % 60
    positions = torch.cat([torch.arange(40), torch.arange(24)])[None]
    index = torch.arange(LENGTH)
    targets = (torch.arange(LENGTH) * 7) % 60
    layout = MaskedAttention([[40, 24]], LENGTH, CPU)
    return MicroBatch(tokens, positions, layout, index, targets, torch.ones(LENGTH))


def gradients(model, batch, steps=2):
    """The gradients of some micro-batches together, by name."""
    for _ in range(steps):
        model(batch, CrossEntropy(batch.weights)).value.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_offloaded_without_a_difference(way, **how):
    plain, _ = build(way, **how)
    offloaded, copies = build(replace(way, offload=True), **how)
    expected = gradients(plain, micro_batch())
    for name, gradient in gradients(offloaded, micro_batch()).items():
        assert torch.equal(gradient, expected[name]), name
    assert copies.fetched == len(copies.moved) > 0


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(activation_offload, "SMALLEST", 1024)


WAYS = [
    ActivationCheckpoint(),
    ActivationCheckpoint("full"),
    ActivationCheckpoint("full", every=2),
    ActivationCheckpoint("selective"),
    ActivationCheckpoint("selective", every=2, save=["matmul"]),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.mode}-{way.every}")
def test_gradients_are_bitwise_those_without(small, way):
    assert_offloaded_without_a_difference(way)


def test_what_is_moved_leaves_no_storage_behind_on_the_device(small):
    """Weak references to the storages: only the last block's are alive when backward begins."""
    alive = set()
    model, copies = build(ActivationCheckpoint(offload=True))

    def to_host(storage):
        alive.add(len(copies.moved))
        weakref.finalize(storage, alive.discard, len(copies.moved))
        return CountedCopies.to_host(copies, storage)

    copies.to_host = to_host
    batch = micro_batch()
    value = model(batch, CrossEntropy(batch.weights)).value
    gc.collect()
    assert not alive, f"of {len(copies.moved)}"
    assert copies.fetched == 0
    value.backward()
    assert copies.fetched == len(copies.moved)


def test_parameters_and_what_blocks_share_stay(small):
    model, copies = build(ActivationCheckpoint(offload=True))
    own = {p.data_ptr() for p in model.parameters()}
    batch = micro_batch()
    gradients(model, batch, steps=1)
    assert not own & {*copies.moved}
    full, copies = build(ActivationCheckpoint("full", offload=True))
    gradients(full, batch, steps=1)
    assert len(copies.moved) == 3, "the inputs of all blocks but the last"


def test_what_several_operators_save_is_moved_once(small):
    copies = CountedCopies()
    saved = SavedByBlock(set(), None, copies)
    x = torch.randn(32, 32)
    tensors = [x, x.t(), x[3:, 1:]]
    parts = [saved.pack(tensor) for tensor in tensors]
    assert len(copies.moved) == 1
    saved.end()
    for tensor, part in zip(tensors, parts, strict=True):
        assert torch.equal(saved.unpack(part), tensor)
    assert copies.fetched == 1


def test_small_tensors_stay():
    model, copies = build(ActivationCheckpoint(offload=True))
    gradients(model, micro_batch())
    assert copies.moved == []


def test_compiled_blocks_offload_too(small, enter):
    enter(inject.no_kernels())
    torch._dynamo.reset()
    way = ActivationCheckpoint("selective")
    assert_offloaded_without_a_difference(way, compiled=True, layers=2)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3]], ids=lambda way: way.mode)
def test_the_plan_counts_the_bytes_that_are_moved(small, way):
    words = f"plan.gpu=h100 precision=fp32 model.attention=mask batch.seq_len={LENGTH}"
    cfg = compose("plan", split(["model=tiny", words]), inputs=False)
    cfg.activation_checkpoint = replace(way, offload=True)
    model, copies = build(cfg.activation_checkpoint)
    traced, _ = trace_blocks(PlannedRun.of(cfg, model.config, 1).model, "cpu")
    batch = micro_batch()
    model(batch, CrossEntropy(batch.weights))
    with patch.object(block_memory, "SMALLEST", 1024):
        counted = moved_bytes(PlannedRun.of(cfg, model.config, 1).model, traced, "cuda")
    assert counted[-1] == 0
    assert sum(copies.sizes) == pytest.approx(sum(counted), rel=0.02)


def test_offloading_is_suggested_where_it_makes_a_run_fit():
    words = split(
        [
            "model=llama3_8b batch.seq_len=131072 batch.rows=8 plan.world_size=8 plan.gpu=h100"
            " plan.memory_gib=60 activation_checkpoint=full"
        ]
    )
    cfg = compose("plan", words, inputs=False)
    config, gpu = architecture(cfg)[0], target(cfg, 8)
    suggestions = {one.override: one for one in suggest(Candidate(cfg, config, 8, gpu))}
    suggestion = suggestions["activation_checkpoint.offload=true"]
    typed = planned(*words, "activation_checkpoint.offload=true")
    assert typed.fits
    assert typed.memory.peak.total == suggestion.peak_bytes
    assert re.search(r"\d+ GiB a rank, \d+ a node", suggestion.reason)
    before = planned(*words)
    inputs = 131072 * 4096 * 2
    saved = before.memory.peak.total - typed.memory.peak.total
    assert saved > 28 * inputs, "of 32 blocks the last one's stays, and one's is on its way"
    assert typed.memory.host == 31 * inputs
    assert typed.host_bytes_per_node == 8 * 31 * inputs


def test_crossing_to_the_host_takes_time_where_nothing_hides_it():
    words = split(["model=llama3_8b batch.seq_len=8192 plan.world_size=8 plan.gpu=l40s"])
    offload = "activation_checkpoint.offload=true"
    full = [*words, "activation_checkpoint=full"]
    assert planned(*words, offload).seconds > 1.2 * planned(*words).seconds
    assert planned(*full, offload).seconds == planned(*full).seconds


def test_on_a_cpu_nothing_is_saved():
    words = split(["model=tiny batch.seq_len=2048 launch.device=cpu plan.world_size=2"])
    offloaded = planned(*words, "activation_checkpoint.offload=true")
    assert offloaded.memory == planned(*words).memory
