"""Mixtures of experts: their parts, the losses that balance them, and runs."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from layouts import GROUPED
from small_decoder import SIZES, small_decoder

from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.models import moe
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.grouped import grouped_linear
from fsdp_trainer.models.moe import Experts, MixtureOfExperts, SigmoidRouter
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.parallel.compile import is_one_graph
from fsdp_trainer.training.metrics import ExpertLoad
from fsdp_trainer.training.objective import CrossEntropy

QWEN = SIZES | {
    "family": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip
ROW = 24


# --- the parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]], ids=str)
def test_groups_of_any_size_are_multiplied_as_by_a_loop(sizes, dtype):
    torch.manual_seed(0)
    rows = torch.randn(sum(sizes), 8, dtype=dtype).requires_grad_()
    weights = torch.randn(len(sizes), 16, 8, dtype=dtype).requires_grad_()
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    loop = torch.cat(list(map(F.linear, rows.split(sizes), weights)))
    actual = [
        (out, *torch.autograd.grad(out, (rows, weights), torch.ones_like(out).cumsum(0)))
        for out in (grouped_linear(rows, weights, ends), loop)
    ]
    for ours, expected in zip(*actual, strict=True):
        torch.testing.assert_close(ours, expected)


def mixture(**sizes):
    torch.manual_seed(0)
    module = MixtureOfExperts(ModelConfig(**{**QWEN, **sizes}))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def test_the_clamped_activation_is_that_of_transformers_beyond_its_limits_too():
    theirs = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate
    limits = SimpleNamespace(alpha=1.702, limit=7.0)
    leaves = [torch.linspace(-20, 20, 64).view(4, 16).requires_grad_() for _ in range(2)]
    outs = [moe.clamped_gate(leaves[0]), theirs(limits, leaves[1])]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


# --- runs -----------------------------------------------------------------------------------------

SMALL = ["model.family=qwen3_moe model.num_experts=5 model.num_hidden_layers=2"]


def test_a_token_counts_for_the_experts_that_it_meets():
    config = ModelConfig(**QWEN)
    idle = 2 * 3 * 3 * 32 * 12  # in each block three of five experts, three matrices each
    assert config.parameters() - config.parameters(active=True) == idle
    experts = Experts(config)
    assert experts.active_share == 2 / 5


# --- balance --------------------------------------------------------------------------------------


def balanced(blocks=1, **weights):
    """A model whose losses have these weights, and a micro-batch without padding."""
    model = small_decoder(1, **QWEN | {"num_hidden_layers": blocks})
    model.balance = Balance(model.config, **{"load_balancing": 0.0, "z_loss": 0.0, **weights})
    tokens, index = torch.arange(ROW)[None] * 7, torch.arange(0, ROW, 2)
    share = torch.full((1, ROW), 1 / ROW)
    layout = LAYOUTS["mask"]([[ROW]], ROW, torch.device("cpu"))
    batch = MicroBatch(
        tokens, torch.arange(ROW)[None], layout, index, tokens[0, index], torch.ones(len(index)),
        token_share=share,
    )  # fmt: skip
    return model, batch


def logits_of(model):
    """Return a list that gets the logits of all routers of a model."""
    logits = []
    for block in model.blocks().values():
        router = block.mlp.gate
        router.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    return logits


def outputs(model, batch):
    return model(batch, CrossEntropy(batch.weights))


def test_the_load_balancing_loss_is_that_of_transformers_of_one_block_and_micro_batch():
    theirs = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func
    model, batch = balanced(load_balancing=1.0)
    logits = logits_of(model)
    counts = outputs(model, batch).auxiliary["expert_load"]
    assert counts.sum() == 2 * ROW
    model.balance.update(counts.double().flatten(), ROW)  # the load of this very batch
    plain = outputs(model, batch)
    expected = theirs((logits[-1],), 5, 2)
    assert plain.auxiliary["load_balancing_loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    weight = model.model.layers["0"].mlp.gate.weight
    ours = torch.autograd.grad(plain.value, weight, retain_graph=True)[0]
    nll = -(plain.scores.log_probability * batch.weights).sum()
    assert plain.value.item() == pytest.approx((nll + expected).item(), rel=1e-6)
    model.balance.load_balancing = 0.0
    without = torch.autograd.grad(outputs(model, batch).value, weight)[0]
    of_loss = torch.autograd.grad(expected, weight)[0]
    torch.testing.assert_close(ours - without, of_loss, rtol=1e-3, atol=1e-5)


def test_the_routers_z_loss_is_the_mean_square_of_their_normalizers_over_all_blocks():
    model, batch = balanced(2, z_loss=0.1)
    logits = logits_of(model)
    output = outputs(model, batch)
    expected = 0.1 * torch.stack(logits).logsumexp(-1).square().mean()
    value = output.auxiliary["router_z_loss"]
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not value.requires_grad
    nll = -(output.scores.log_probability * batch.weights).sum()
    assert output.value.item() == pytest.approx((nll + expected).item(), rel=1e-6)


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_losses_of_routers_are_the_same_recomputed_and_compiled(how):
    (plain, batch), (other, _) = (balanced(2, load_balancing=0.1, z_loss=0.1) for _ in range(2))
    if how == "recomputed":
        checkpoint_activations(other, ActivationCheckpoint(mode="full"))
    else:
        torch._dynamo.reset()
        for block in other.blocks().values():
            block.compile(fullgraph=is_one_graph(block), backend="aot_eager")
    gradients, values = [], []
    for model in (plain, other):
        output = outputs(model, batch)
        output.value.backward()
        values.append({name: value.sum().item() for name, value in output.auxiliary.items()})
        gradients.append([p.grad for p in model.parameters()])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_a_step_of_which_tokens_are_missing_does_not_change_the_load():
    model, _ = balanced(load_balancing=1.0)
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
    model, batch = balanced(load_balancing=1.0)
    batch.token_share[:, 10:] = 0
    assert outputs(model, batch).auxiliary["expert_load"].sum() == 20


def test_the_losses_of_routers_are_told_beside_the_loss_and_added_to_the_objective(ledger):
    """The covering array compares them on any ranks."""
    losses = "loss.load_balancing=0.1 loss.router_z_loss=0.01"
    run = ledger.run(words=[*SMALL, losses, "train.steps=3"])
    for step in run.metrics:
        added = step["load_balancing_loss"] + step["router_z_loss"]
        assert step["objective"] - step["loss"] == pytest.approx(added, rel=1e-4)
    assert run["load_balancing_loss"][0] == pytest.approx(0.2), "even before the first"


def test_biases_of_routers_move_against_the_load_and_stay_in_a_skipped_step():
    router = SigmoidRouter(ModelConfig(**QWEN | GROUPED))
    counts = torch.tensor([4.0, 4, 0, 9, 3, 4, 4, 4]).double()
    router.move_bias(counts, 0.01, torch.tensor(False))
    moved = torch.tensor([0.0, 0, 0.01, -0.01, 0.01, 0, 0, 0])
    assert torch.equal(router.e_score_correction_bias, moved)
    router.move_bias(counts, 0.01, torch.tensor(True))
    assert torch.equal(router.to(torch.bfloat16).e_score_correction_bias, moved)
    assert router.weight.dtype == torch.bfloat16
