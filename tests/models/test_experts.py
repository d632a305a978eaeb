"""Mixtures of experts: every layout, recomputed, compiled and continued, computes what one process
does with a plain loop over the experts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import inject
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import GROUPED, assert_same, compiled_quickly, layout_of, take_steps, whole
from stored import assert_bitwise_equal, newest, stored, tensors

from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Adapter,
    Optim,
    Precision,
    Sharding,
    TrainConfig,
)
from fsdp_trainer.models import moe
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.grouped import grouped_linear
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.models.moe import Experts, MixtureOfExperts, SigmoidRouter
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.training.metrics import ExpertLoad
from fsdp_trainer.training.objective import CrossEntropy

CPU = torch.device("cpu")
QWEN = {
    "family": "qwen3_moe", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "initializer_range": 0.2, "tie_word_embeddings": False, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip
ROW = 24
DOCUMENTS = ([9, 7], [24], [5, 5, 5, 5], [1, 20])


# --- the parts ------------------------------------------------------------------------------------


def by_loop(rows, weights, ends):
    """Return what `grouped_linear` computes, one group after another."""
    starts = [0, *ends.tolist()[:-1]]
    parts = [
        F.linear(rows[start:end], weight)
        for start, end, weight in zip(starts, ends.tolist(), weights, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]], ids=str)
def test_groups_of_any_size_are_multiplied_as_by_a_loop(sizes, dtype):
    torch.manual_seed(0)
    rows = torch.randn(sum(sizes), 8, dtype=dtype)
    weights = torch.randn(len(sizes), 16, 8, dtype=dtype)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    actual = []
    for way in (grouped_linear, by_loop):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, weights)]
        out = way(*leaves, ends)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(0))
        actual.append((out, *gradients))
    for ours, loop in zip(*actual, strict=True):
        torch.testing.assert_close(ours, loop)


def mixture(**sizes):
    torch.manual_seed(0)
    module = MixtureOfExperts(ModelConfig(**{**QWEN, **sizes}))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def each_token_by_itself(module, x):
    """Σ weight · expert(token) over the chosen experts, token by token."""
    experts = module.experts
    out = torch.zeros_like(x)
    for i, token in enumerate(x):
        chosen, weights, _ = (part[0] for part in module.gate(token[None]))
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate = F.silu(experts.gate_proj[expert] @ token)
            inside = gate * (experts.up_proj[expert] @ token)
            out[i] = out[i] + weight * (experts.down_proj[expert] @ inside)
    return out


def test_the_clamped_activation_is_that_of_transformers_beyond_its_limits_too():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate
    limits = SimpleNamespace(alpha=1.702, limit=7.0)
    leaves = [torch.linspace(-20, 20, 64).view(4, 16).requires_grad_() for _ in range(2)]
    outs = [moe.clamped_gate(leaves[0]), theirs(limits, leaves[1])]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_no_token_is_dropped_whichever_experts_it_goes_to(chosen):
    module = mixture(num_experts_per_tok=chosen)
    x = torch.randn(13, 32)
    with torch.no_grad():
        module.gate.weight[0] = 0.3 * x.sum(0)  # most go to one expert
    results = []
    for way in (lambda x: module(x[None])[0], lambda x: each_token_by_itself(module, x)):
        leaf = x.clone().requires_grad_()
        out = way(leaf)
        gradients = torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
        results.append((out, *gradients))
    for ours, alone in zip(*results, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_same_bits_each_time():
    module = mixture()
    x = torch.randn(1, 50, 32)
    actual = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        actual.append(torch.autograd.grad(module(leaf).sum(), [leaf, *module.parameters()]))
    assert all(map(torch.equal, *actual))


# --- layouts --------------------------------------------------------------------------------------


def batch_of(number, step):
    """A row of packed documents, with targets for some of its tokens."""
    random = torch.Generator().manual_seed(10 * step + number)
    lengths = DOCUMENTS[number]
    filled = sum(lengths)
    tokens = torch.zeros(1, ROW, dtype=torch.int64)
    tokens[0, :filled] = torch.randint(97, (filled,), generator=random)
    positions = torch.zeros_like(tokens)
    positions[0, :filled] = torch.cat([torch.arange(n) for n in lengths])
    index = torch.arange(number, filled, 2)
    targets = torch.randint(97, index.shape, generator=random)
    layout = LAYOUTS["mask"]([lengths], ROW, CPU)
    return MicroBatch(tokens, positions, layout, index, targets, torch.ones(len(index)))


def weight_of(step):
    return float(sum(len(batch_of(number, step).index) for number in range(len(DOCUMENTS))))


def configuration(settings):
    return TrainConfig(
        sharding=Sharding(**settings.get("sharding", {})),
        activation_checkpoint=ActivationCheckpoint(**settings.get("checkpoint", {})),
        # with the usual eps the sign of a gradient that is only rounding would count
        optim=Optim(lr=3e-3, eps=1e-3, **settings.get("optim", {})),
        precision=Precision(param_dtype="float32", master_dtype="float32"),
        adapter=Adapter(**settings.get("adapter", {})),
    )


def start(model):
    """Weights as at a run's start, and adapters that add something."""
    initialize_weights(model, 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            torch.nn.init.constant_(local, 0.1)


def alone(sizes, settings):
    """One process; products of experts by a loop."""
    cfg, config = configuration(settings), ModelConfig(**{**QWEN, **sizes})
    model = Decoder(config)
    choose_trained(model, resolve_adapters(cfg.adapter, config), [])
    start(model)
    first = whole(dict(model.named_parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "grouped_linear", by_loop)
        rows = range(len(DOCUMENTS))
        return first, *take_steps(model, cfg, None, rows, batch_of, weight_of)


def split(sizes, settings):
    """This rank's part."""
    dist.init_process_group("gloo")
    cfg, config = configuration(settings), ModelConfig(**{**QWEN, **sizes})
    dims = Dims(layout_of(cfg), "cpu", 60)
    with torch.device("meta"):
        model = Decoder(config)
    adapters = resolve_adapters(cfg.adapter, config)
    with compiled_quickly():
        model = parallelize(
            model,
            dims,
            Computation.of(cfg, settings.get("compiled", False)),
            adapters,
            cfg.train.freeze,
        )
    allocate(model, CPU)
    start(model)
    first = whole(dict(model.named_parameters()))
    own = range(dims.batch_rank, len(DOCUMENTS), dims.batch_ranks)
    return first, *take_steps(model, cfg, dims, own, batch_of, weight_of)


CASES = {
    "fsdp": (2, {}, {}),
    "fewer experts than ranks": (4, {"num_experts": 3}, {}),
    "some blocks dense": (2, {"mlp_only_layers": (0,), "num_hidden_layers": 3}, {}),
    "hsdp": (4, {}, {"sharding": {"strategy": "hsdp", "replicas": 2}}),
    "ddp": (2, {}, {"sharding": {"strategy": "ddp"}}),
    "recomputed": (2, {}, {"checkpoint": {"mode": "full"}}),
    "some recomputed": (2, {}, {"checkpoint": {"mode": "selective"}}),
    "lora on attention": (2, {}, {"adapter": {"name": "lora", "rank": 2}}),
    "compiled": (1, {"num_hidden_layers": 1}, {"compiled": True}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.slow) if i else name for i, name in enumerate(CASES)],
)
@pytest.mark.grid(2)
def test_every_layout_computes_what_one_process_does(world, case):
    ranks, sizes, settings = CASES[case]
    expected = alone(sizes, settings)
    for got in world.call(ranks, split, sizes, settings):
        assert_same(got, expected)


# --- runs -----------------------------------------------------------------------------------------

SMALL = ["model.family=qwen3_moe", "model.num_experts=5", "model.num_hidden_layers=2"]


@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks_and_exports_what_it_holds(train, world, tmp_path):
    how = [*SMALL, "schedule=constant"]
    whole_run = train("whole", *how, "train.steps=4")
    train("run", *how, "train.steps=2", ranks=2)
    run = train("run", *how, "train.steps=4", "checkpoint.export_hf=true", ranks=1)
    assert run.column("loss") == pytest.approx(whole_run.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(whole_run.column("grad_norm"), rel=1e-4)
    assert (
        "is complete"
        in world.command("verify", f"source={run.folder}", f"hf={run.folder}/hf")[0].out
    )
    described = json.loads((run.folder / "hf" / "config.json").read_text())
    assert described["num_experts"] == 5
    assert described["architectures"] == ["Qwen3MoeForCausalLM"]
    output = world.command("generate", f"source={run.folder}", "prompt=aa", "max_tokens=4")[0]
    assert output.out


def test_a_token_counts_for_the_experts_that_it_meets():
    config = ModelConfig(**QWEN)
    idle = 2 * 3 * 3 * 32 * 12  # in each block three of five experts, three matrices each
    assert config.parameters() - config.parameters(active=True) == idle
    experts = Experts(config)
    assert experts.active_share == 2 / 5


# --- balance --------------------------------------------------------------------------------------


def watched(**weights):
    """A model of one block whose losses have these weights, and a micro-batch."""
    config = ModelConfig(**{**QWEN, "num_hidden_layers": 1})
    model = Decoder(config)
    initialize_weights(model, 1)
    model.balance = Balance(config, **{"load_balancing": 0.0, "z_loss": 0.0, **weights})
    batch = batch_of(1, 0)  # a row without padding
    return model, replace(batch, token_share=torch.full((1, ROW), 1 / ROW))


def objective(batch):
    return CrossEntropy(batch.weights)


def test_the_load_balancing_loss_is_that_of_transformers_of_one_block_and_micro_batch():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func
    model, batch = watched(load_balancing=1.0)
    logits = []
    router = model.model.layers["0"].mlp.gate
    router.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    counts = model(batch, objective(batch)).auxiliary["expert_load"]
    assert counts.sum() == 2 * ROW
    model.balance.update(counts.double().flatten(), ROW)  # the load of this very batch
    plain = model(batch, objective(batch))
    expected = theirs((logits[-1],), 5, 2)
    assert plain.auxiliary["load_balancing_loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    weight = router.weight
    ours = torch.autograd.grad(plain.value, weight, retain_graph=True)[0]
    nll = -(plain.scores.log_probability * batch.weights).sum()
    assert plain.value.item() == pytest.approx((nll + expected).item(), rel=1e-6)
    model.balance.load_balancing = 0.0
    without = torch.autograd.grad(model(batch, objective(batch)).value, weight)[0]
    of_loss = torch.autograd.grad(expected, weight)[0]
    torch.testing.assert_close(ours - without, of_loss, rtol=1e-3, atol=1e-5)


def test_the_routers_z_loss_is_the_mean_square_of_their_normalizers():
    model, batch = watched(z_loss=0.1)
    logits = []
    router = model.model.layers["0"].mlp.gate
    router.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    value = model(batch, objective(batch)).auxiliary["router_z_loss"]
    expected = 0.1 * logits[0].logsumexp(-1).square().mean()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_step_of_which_tokens_are_missing_does_not_change_the_load():
    model, _ = watched(load_balancing=1.0)
    before = model.balance.load.clone()
    model.balance.update(torch.tensor([3.0, 1, 0, 0, 0]).double(), ROW)
    model.balance.update(torch.zeros(5).double(), 0)
    assert torch.equal(model.balance.load, before)


def test_the_load_of_every_expert_is_written_in_quarters_of_the_even_one_at_some_steps():
    load = ExpertLoad(2, 4)
    counts = [4, 4, 4, 4, 16, 0, 0, 0]
    assert load.written(counts)["expert_load"] == ["4444", "g000"]
    has_all = [i for i in range(2, 131) if "expert_load" in load.written(counts)]
    assert has_all == [*range(2, 101), 110, 120, 130]


def test_padding_goes_to_no_expert_that_is_counted():
    model, batch = watched(load_balancing=1.0)
    share = batch.token_share.clone()
    share[:, 10:] = 0
    batch = replace(batch, token_share=share)
    assert model(batch, objective(batch)).auxiliary["expert_load"].sum() == 20


@pytest.mark.slow
@pytest.mark.further
def test_balancing_does_not_depend_on_ranks_micro_batches_recomputation_or_a_restart(train):
    how = [
        *SMALL, "schedule=constant", "loss.load_balancing=0.1", "loss.router_z_loss=0.01",
        "batch.rows=4", "checkpoint.every=2", "optim.lr=1e-2",
    ]  # fmt: skip
    selective = "activation_checkpoint=selective"
    runs = [
        train("one", *how, "train.steps=4", "batch.micro_rows=4"),
        train("two", *how, "train.steps=4", "batch.micro_rows=1", selective, ranks=2),
    ]
    train("parted", *how, "train.steps=2", "batch.micro_rows=2")
    full = "activation_checkpoint=full"
    runs.append(train("parted", *how, "train.steps=4", "batch.micro_rows=2", full, ranks=2))
    losses = ("loss", "objective", "grad_norm", "load_balancing_loss", "router_z_loss")
    for run in runs[1:]:
        for name in (*losses, "expert_load_max", "expert_load_entropy"):
            expected = runs[0].column(name)
            assert run.column(name) == pytest.approx(expected, rel=1e-4), name
        assert run.column("experts_unused") == runs[0].column("experts_unused")
    added = [sum(run) for run in zip(*(runs[0].column(name) for name in losses[3:]), strict=True)]
    objectives = [a - b for a, b in zip(*(runs[0].column(n) for n in losses[1::-1]), strict=True)]
    assert objectives == pytest.approx(added, rel=1e-4)
    assert runs[0].column("load_balancing_loss")[0] == pytest.approx(0.2), "even before the first"


def test_biases_of_routers_move_against_the_load_and_stay_in_a_skipped_step():
    router = SigmoidRouter(ModelConfig(**QWEN | GROUPED))
    counts = torch.tensor([4.0, 4, 0, 9, 3, 4, 4, 4]).double()
    router.move_bias(counts, 0.01, torch.tensor(False))
    moved = torch.tensor([0.0, 0, 0.01, -0.01, 0.01, 0, 0, 0])
    assert torch.equal(router.e_score_correction_bias, moved)
    router.move_bias(counts, 0.01, torch.tensor(True))
    assert torch.equal(router.to(torch.bfloat16).e_score_correction_bias, moved)
    assert router.weight.dtype == torch.bfloat16


MOVING = [
    "model.family=deepseek_v3", "model.num_hidden_layers=2", "model.num_experts=4",
    "model.num_key_value_heads=4", "model.head_dim=48",
    "loss.bias_update_speed=0.01", "schedule=constant", "batch.rows=4", "optim.lr=1e-2",
    "checkpoint.every=2",
]  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.slow
@pytest.mark.further
def test_biases_of_routers_do_not_depend_on_ranks_micro_batches_recomputation_or_a_restart(train):
    how = [*MOVING, "train.steps=4", "checkpoint.export_hf=true"]
    runs = [
        train("one", *how, "batch.micro_rows=4"),
        train(
            "two", *how, "batch.micro_rows=1", "sharding.expert=2", "activation_checkpoint=full",
            ranks=2,
        ),
        train("stages", *how, "batch.micro_rows=1", "sharding.pipeline=2", ranks=2),
    ]  # fmt: skip
    parts = [*MOVING, "batch.micro_rows=4", "checkpoint.export_hf=true"]
    train("parted", *parts, "train.steps=2")
    runs.append(train("parted", *parts, "train.steps=4"))
    assert_bitwise_equal(stored(newest(runs[-1])), stored(newest(runs[0])))
    bias = stored(newest(runs[0]))[f"weights/{BIAS}"]
    assert bias.dtype == torch.float32
    assert bias.any()
    assert (bias / 0.01).round().mul(0.01).sub(bias).abs().max() < 1e-8, "whole steps of the speed"
    for run in runs:
        assert torch.equal(stored(newest(run))[f"weights/{BIAS}"], bias)
        assert torch.equal(tensors(run.folder / "hf")[BIAS], bias)
        assert run.column("expert_load_max") == runs[0].column("expert_load_max")
        assert run.column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)


def test_losses_of_experts_are_refused_where_there_are_none(train):
    message = train("run", "loss.load_balancing=0.1", code=2).err
    assert "loss.load_balancing=0.1" in message
    assert "has no experts" in message


def test_a_bias_is_refused_where_routers_have_none(train):
    said = train("run", *SMALL, "loss.bias_update_speed=0.1", code=2).err
    assert "qwen3_moe's routers have no bias; deepseek_v3 has" in said
    assert "loss.load_balancing=0.001" in said


@pytest.mark.slow
@pytest.mark.further
def test_balancing_is_the_same_compiled(train, compiled):
    how = [*SMALL, "loss.load_balancing=0.1", "train.steps=3", "batch.micro_rows=2"]
    how += ["model.num_hidden_layers=1"]
    plain = train("plain", *how)
    other = train("compiled", *compiled, *how, seam=inject.no_kernels())
    for name in ("objective", "grad_norm", "load_balancing_loss", "expert_load_max"):
        assert other.column(name) == pytest.approx(plain.column(name), rel=1e-4), name
