"""Memory of a rank: activations by the mode of recomputation, and a refusal, with the arithmetic,
of states that cannot fit."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial

import inject
import pytest
import torch
import torch.distributed as dist
import yaml
from refused import refusal
from small_decoder import small_decoder

from fsdp_trainer.base.live_bytes import LiveBytes
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Adapter,
    Batch,
    Optim,
    Precision,
    Sharding,
    TrainConfig,
)
from fsdp_trainer.models.attention import DocumentAttention, MaskedAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.memory_check import (
    Alternative,
    StateSetup,
    check_memory,
    host_bytes,
    least_memory,
)
from fsdp_trainer.parallel.parallelize import Computation, parallelize, stay_gathered
from fsdp_trainer.training.objective import CrossEntropy
from fsdp_trainer.training.weights import draw_weights

GIB = 2**30
CPU = torch.device("cpu")


LENGTH = 128


def small(**settings):
    model = small_decoder(0, num_hidden_layers=4, intermediate_size=88, vocab_size=50)
    checkpoint_activations(model, ActivationCheckpoint(**settings))
    return model


def two_documents():
    """A row of two documents."""
    places = torch.arange(LENGTH)
    return MicroBatch(
        places[None] % 50,
        places[None],
        DocumentAttention([[LENGTH // 2, LENGTH // 2]], LENGTH, CPU),
        places,
        places % 50,
        torch.ones(LENGTH),
    )


def kept_for_backward(**settings):
    """Bytes that live between forward and backward, the loss, and the gradients."""
    model, batch = small(**settings), two_documents()
    with LiveBytes() as memory:
        for parameter in model.parameters():
            memory.add(parameter.detach())
        weights = memory.total
        loss = model(batch, CrossEntropy(batch.weights)).value
        saved = memory.total - weights
    loss.backward()
    return saved, loss.item(), [p.grad for p in model.parameters()]


def test_every_mode_keeps_less_than_the_one_before_and_gives_the_same_gradients():
    ladder = yaml.safe_load("""
- {}
- {mode: selective, every: 2}
- {mode: selective, save: [attention, matmul]}
- {mode: selective}
- {mode: selective, save: [second_matmul]}
- {mode: selective, save: [attention]}
- {mode: full}
""")
    sizes = [kept_for_backward(**settings) for settings in ladder]
    saved, losses, gradients = zip(*sizes, strict=True)
    assert all(more > less for more, less in itertools.pairwise(saved)), saved
    assert saved[-1] < saved[0] / 8
    assert saved[-1] < kept_for_backward(mode="full", every=2)[0] < saved[0]
    assert len(set(losses)) == 1
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def saved_by_compiled_blocks(**settings):
    """Bytes that compiled blocks keep for backward, weights and what all blocks share left out;
    and the gradient of the embedding."""
    model, saved = small(**settings), {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    for block in model.model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    places = torch.arange(LENGTH)[None]
    attention = MaskedAttention([[LENGTH]], LENGTH, CPU)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden, _ = model.hidden(places % 50, places, attention)
        total = sum(saved.values())
    hidden.square().sum().backward()
    return total, model.model.embed_tokens.weight.grad


def test_a_larger_budget_keeps_more_and_gives_the_same_gradients():
    saved, gradients = [], []
    for settings in ({"mode": "budget", "budget": 0.0}, {"mode": "budget", "budget": 0.5}, {}):
        torch._dynamo.reset()
        sizes, gradient = saved_by_compiled_blocks(**settings)
        saved.append(sizes)
        gradients.append(gradient)
    assert saved[0] < saved[1] < saved[2]
    assert saved[0] < saved[2] / 3
    for gradient in gradients[:2]:
        torch.testing.assert_close(gradient, gradients[2], rtol=1e-4, atol=1e-5)


def meta(**sizes):
    sizes |= {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 8}
    with torch.device("meta"):
        return Decoder(ModelConfig(**sizes, tie_word_embeddings=False))


def setup(ranks, dtype="float32", **sharding):
    layout = Layout(Sharding(**{"reshard_after_forward": True} | sharding), ranks, Batch())
    return StateSetup(layout, Precision(master_dtype=dtype), Optim())


LEAST = yaml.safe_load("""
fsdp: [{ranks: 4}, 4, 2]
pure, 3 blocks: [{ranks: 4, dtype: bfloat16, blocks_per_unit: 3}, 2, 6]
hsdp: [{ranks: 8, strategy: hsdp, replicas: 2}, 4, 2]
ddp: [{ranks: 8, strategy: ddp}, 16, 2]
ddp pure: [{ranks: 8, dtype: bfloat16, strategy: ddp}, 8, 0]
kept gathered: [{ranks: 64, reshard_after_forward: auto}, 2.1875, 0]
""")
"""Layouts, bytes for each parameter (the last one: 12 / 64, and 2 gathered), and for a block's."""


@pytest.mark.parametrize("name", LEAST)
def test_the_least_that_a_rank_holds_is_sixteen_bytes_a_parameter_over_the_ranks(name):
    layout, each, of_block = LEAST[name]
    model = meta()
    block = sum(p.numel() for p in model.model.layers["0"].parameters())
    held = sum(item.size for item in least_memory(model, setup(**layout)))
    assert held == pytest.approx(each * model.config.parameters() + of_block * block)


def test_the_fewest_ranks_that_fit_are_named_and_do_fit():
    model = meta()
    with inject.around("device_memory", lambda *_: 40e6):
        said = refusal(check_memory, model, setup(2, strategy="ddp"), CPU)
        ranks = int(re.search(r"(\d+) ranks with the same", said)[1])
        check_memory(model, setup(ranks), CPU)
        assert refusal(check_memory, model, setup(ranks - 1), CPU)


def test_the_least_with_adapters_has_frozen_weights_as_they_are_kept():
    cfg, config = TrainConfig(), meta().config
    cfg.adapter = Adapter(name="lora", base="nf4", rank=4)
    resolved = ModelSetup.resolve(config, cfg.adapter, [])
    model = resolved.model
    states = setup(2)._replace(adapters=resolved.adapters)
    sizes = {item.name: item.size for item in least_memory(model, states)}
    blocks = [p for name, p in meta().named_parameters() if "proj" in name]
    four_bits = sum(4.25 / 8 * p.numel() for p in blocks) / 2
    ends = (config.parameters() - sum(p.numel() for p in blocks)) / 2
    assert sizes["in 4 bits"] == pytest.approx(four_bits, rel=0.01)
    assert sizes["frozen"] == pytest.approx(2 * ends)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 2
    assert (sizes["weights"], sizes["moments"]) == (4 * trained, 8 * trained)


OF_EXPERTS = {
    "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def are_gathered(sharding, sizes, free):
    """Return, for amounts of free memory, whether a model's blocks are still gathered after a
    forward without backward."""
    dist.init_process_group("gloo")
    sharding = replace(sharding, reshard_after_forward=True)
    cfg = TrainConfig(sharding=sharding)
    dims = Dims(Layout(sharding, dist.get_world_size(), Batch()), "cpu", 60)
    model = parallelize(meta(**sizes), dims, Computation.of(cfg))
    allocate(model, CPU)
    draw_weights(model, 0)
    block = model.model.layers["0"]
    sharded = set(block.parameters())  # FSDP2 replaces them by others while they are gathered
    results = []
    for number in free:
        free_memory = inject.around("free_memory", lambda *_, number=number: number)
        with free_memory, torch.no_grad(), stay_gathered(model, sharding, cfg.precision, CPU):
            model(two_documents(), CrossEntropy(torch.ones(LENGTH)))
            results.append(sharded.isdisjoint(block.parameters()))
    return results


@pytest.mark.parametrize("groups", [{}, {"tensor": 2, "expert": 2}], ids=str)
def test_generation_gathers_once_where_half_of_the_free_memory_holds_the_gathered_model(
    world, groups
):
    """Gathered weights are in param_dtype, and a tensor or expert group divides them."""
    sizes = OF_EXPERTS if groups else {}
    numbers = sum(p.numel() for p in meta(**sizes).parameters())
    needed = 2 * numbers / (2 if groups else 1)
    free = [2.05 * needed, 1.95 * needed]
    assert world.call(2, are_gathered, Sharding(**groups), sizes, free) == [[True, False]] * 2


def test_adapters_are_suggested_where_they_would_fit():
    cfg, config = TrainConfig(), meta().config
    cfg.adapter = Adapter(name="lora", rank=1)
    lora = Alternative("adapter=lora", ModelSetup.resolve(config, cfg.adapter, []).model, None)
    full, smallest = (
        sum(item.size for item in least_memory(model, setup(1))) for model in (meta(), lora.model)
    )
    with inject.around("device_memory", lambda *_: (full + smallest) / 2):
        said = refusal(check_memory, meta(), setup(1), CPU, lambda: [lora])
    assert said.endswith("precision=pure_bf16  or  adapter=lora")


def test_offloaded_states_are_the_hosts(enter):
    model, cuda = meta(), torch.device("cuda")
    enter(inject.around("device_memory", lambda *_: 40e6))
    with inject.around("host_memory", lambda *_: 1e9):
        check_memory(model, setup(1, cpu_offload=True), cuda)
        assert "sharding.cpu_offload=true" in refusal(check_memory, model, setup(1), cuda)
    enter(inject.around("host_memory", lambda *_: 1e6))
    assert refusal(check_memory, model, setup(1, cpu_offload=True), cuda)


def test_host_memory_is_shared_by_the_ranks_of_a_node_and_bounded_by_the_control_group(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       20971520 kB\nMemAvailable:   10485760 kB\n")
    bytes_of = partial(host_bytes, meminfo=meminfo, cgroup=tmp_path)
    assert bytes_of({}) == 10 * GIB
    assert bytes_of({"LOCAL_WORLD_SIZE": "4"}) == 2.5 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nfile {GIB}\n")
    assert bytes_of({"LOCAL_WORLD_SIZE": "2"}) == 1.5 * GIB
    assert host_bytes({}, tmp_path / "none", tmp_path) == math.inf


def sixteen_gib(*_):
    return 16 * GIB


def test_a_model_that_cannot_fit_is_refused_with_the_arithmetic_before_data_or_weights_are_read(
    train, tmp_path
):
    options = {"ranks": 2, "seam": inject.around("host_memory", sixteen_gib)}
    how = f"model=llama3_70b data.cache={tmp_path / 'cache'}"
    run = train("big", how, base=["checkpoint.every=null"], code=2, **options)
    assert "68.5 G × 8 B ÷ 2 ranks" in run.err
    assert "255.0 GiB" in run.err
    assert "16.0 GiB for each rank" in run.err
    assert "ranks with the same memory each" in run.err
    assert not run.folder.exists(), "a refused start leaves no folder"
    assert not (tmp_path / "cache").exists(), "nothing was tokenized"
    assert "÷" not in train("small", "train.steps=1", **options).err
