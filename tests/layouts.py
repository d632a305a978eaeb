"""A few training steps of a model in one process or on several ranks, and their comparison."""

import pickle
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from world import pack

from fsdp_trainer.base.distributed import gather, local_part, local_slice
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Adapter,
    Optim,
    Precision,
    Sharding,
    Train,
    TrainConfig,
)
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel import parallelize as parallelize_module
from fsdp_trainer.parallel.compile import is_one_graph
from fsdp_trainer.training.gradients import GradientSync, clip_gradients
from fsdp_trainer.training.objective import CrossEntropy

STEPS = 2
VOCABULARY = 97
ROW = 32
DOCUMENTS = ([20, 9], [7, 9, 16], [32], [5, 5, 5, 5, 5, 5])
SUPERVISED = (range(21, 28), range(32), range(0), range(0, 32, 3))
"""Supervised positions of each row in four.

Those of the first row are all in one half, and the third row has none.
"""

LATENT = {
    "family": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 12,
    "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "first_k_dense_replace": 9,
}  # fmt: skip
"""A model with latent attention of 4 heads, and dense blocks."""
GROUPED = LATENT | {
    "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 12, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
"""The model of LATENT with experts in all blocks but the first."""


def layout_of(cfg):
    """Return the layout of the ranks of the process group."""
    return Layout(cfg.sharding, dist.get_world_size(), cfg.batch)


def configuration(settings, **groups):
    """Return a configuration for small steps.

    settings: the layout and other changes from the defaults, by group. groups: further groups.
    """
    precision = {"param_dtype": "float32", "master_dtype": "float32"}
    return TrainConfig(
        sharding=Sharding(**settings.get("sharding", {})),
        activation_checkpoint=ActivationCheckpoint(**settings.get("checkpoint", {})),
        # with the default eps, Adam would amplify gradients that are only rounding
        optim=Optim(**{"lr": 3e-3, "eps": 1e-3} | settings.get("optim", {})),
        precision=Precision(**precision | settings.get("precision", {})),
        adapter=Adapter(**settings.get("adapter", {})),
        train=Train(freeze=settings.get("freeze", [])),
        **groups,
    )


def packed_row(number, step):
    """Return a row of packed documents, [1, ROW]."""
    random = np.random.default_rng(10 * step + number)
    rows, kind = Rows.empty(1, ROW), number % len(DOCUMENTS)
    rows.documents = [DOCUMENTS[kind]]
    filled = sum(DOCUMENTS[kind])
    rows.tokens[0, :filled] = random.integers(0, VOCABULARY, filled)
    rows.positions[0, :filled] = np.concatenate([np.arange(n) for n in DOCUMENTS[kind]])
    places = [i for i in SUPERVISED[kind] if i < filled]
    rows.labels[0, places] = random.integers(0, VOCABULARY, len(places))
    rows.weights[0, places] = random.random(len(places)) + 0.5
    return rows


def take_steps_on_rows(model, cfg, dims, assembler, rows=4, pipeline=None):
    """Take steps on packed rows, see take_steps.

    rows: number of rows in a step, which are dealt to the assembler's ranks.
    """
    own = range(assembler.rank, rows, assembler.ranks)

    def weight(step):
        return sum(packed_row(number, step).weights.sum() for number in range(rows))

    def batch(number, step):
        return assembler.assemble(packed_row(number, step))

    return take_steps(model, cfg, dims, own, batch, weight, pipeline)


def take_steps(model, cfg, dims, own, batch_of, weight_of, pipeline=None, **loss_options):
    """Train STEPS steps; return losses, gradient norms, first gradients and last weights.

    Gradients and weights are complete tensors by name. dims: None in one process. own: indices of
    this rank's rows. batch_of(number, step): returns one of them as a micro-batch. weight_of(step):
    returns the weight of all rows. pipeline: the pipeline to use, or None.
    """
    if pipeline:
        return pipelined_steps(model, cfg, dims, own, batch_of, weight_of, pipeline)
    optimizer = build_optimizer(model, cfg.optim)
    sync = dims and GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        weight = weight_of(step)
        loss = torch.zeros(())
        for number in own:
            batch = batch_of(number, step)
            if sync:
                sync.before(last=number == own[-1])
            value = model(batch, CrossEntropy(batch.weights / weight, **loss_options)).value
            value.backward()
            loss = loss + value.detach()
        if dims:
            dims.sum_over_tokens(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = whole({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        if dims:
            norms.append(clip_gradients(model, dims, 0.5, None).item())
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.set_learning_rate(3e-3)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, whole(dict(model.named_parameters()))


def compiled_quickly():
    """Return a patch that compiles blocks by aot_eager, because inductor takes a minute."""
    return mock.patch.object(parallelize_module, "compile_blocks", compile_quickly)


def compile_quickly(model, cfg, **options):
    torch.compiler.reset()
    if model.lm_head is not None:
        model.lm_head.compile_chunks(backend="aot_eager")
    for block in model.blocks().values():
        block.compile(fullgraph=is_one_graph(block), backend="aot_eager")


def pipelined_steps(model, cfg, dims, own, batch_of, weight_of, pipeline):
    """Train STEPS steps by a pipeline, see take_steps."""
    optimizer = build_optimizer(model, cfg.optim, ranks=dims.stage_group)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        weight = weight_of(step)
        batches = [batch_of(number, step) for number in own]
        computed = pipeline.train(batches, [CrossEntropy(b.weights / weight) for b in batches])
        loss = sum((value for value, _ in computed), torch.zeros(()))
        dims.sum_over_tokens(loss)
        losses.append(loss.item())
        if step == 0:
            trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
            gradients = of_all_stages(trained)
        norms.append(clip_gradients(model, dims, 0.5, None).item())
        optimizer.set_learning_rate(3e-3)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, of_all_stages(dict(model.named_parameters()))


def of_all_stages(tensors):
    """Return complete tensors by name, gathered from all ranks' parts and stages, on every rank.

    Copies of a part must be equal. torch's own gathering is not used, because it caches process
    groups that have been destroyed.
    """
    own = {n: (t.shape, local_slice(t), local_part(t.detach())) for n, t in tensors.items()}
    together = {}
    for parts in map(pickle.loads, gather(pack(own))):
        for name, (shape, part, numbers) in parts.items():
            if name not in together:
                nothing = torch.empty(shape, dtype=numbers.dtype)
                together[name] = nothing, torch.zeros(shape, dtype=torch.bool)
            one, known = together[name]
            assert torch.equal(one[part][known[part]], numbers[known[part]]), f"copies of {name}"
            one[part], known[part] = numbers, True
    assert all(known.all() for _, known in together.values())
    return {name: one for name, (one, _) in together.items()}


def whole(tensors):
    """Return complete tensors by name, gathered from all ranks if there are several."""
    if dist.is_initialized():
        return of_all_stages(tensors)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def without_padding(tensors, expected):
    """Return tensors without the padding of a vocabulary, which must be zero.

    expected: tensors by name that have the right number of rows.
    """
    for name in tensors.keys() & expected.keys():
        assert not tensors[name][len(expected[name]) :].any(), f"padding of {name}"
    return {n: t[: len(expected[n])] if n in expected else t for n, t in tensors.items()}


def assert_same(got, expected, tolerance=1e-5):
    """Raise AssertionError if two results differ.

    got, expected: the initial weights, followed by the results of `take_steps`. tolerance: largest
    difference of weights after the steps.
    """
    got = [
        without_padding(g, e) if isinstance(e, dict) else g
        for g, e in zip(got, expected, strict=False)
    ]
    for name, weight in expected[0].items():
        assert torch.equal(got[0][name], weight), f"start of {name}"
    assert got[1][0] == pytest.approx(expected[1][0], rel=1e-6)
    assert got[2][0] == pytest.approx(expected[2][0], rel=1e-6)
    assert got[3].keys() == expected[3].keys()
    for name, gradient in expected[3].items():
        error = (got[3][name] - gradient).abs().max() / gradient.abs().max()
        assert error < 2e-5, f"gradient of {name}: {error:.1e}"
    for name, weight in expected[4].items():
        error = (got[4][name] - weight).abs().max()
        assert error < tolerance, f"{name} after {STEPS} steps: {error:.1e}"
