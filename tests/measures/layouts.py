"""A few training steps of a model in one process or on several ranks, and their comparison."""

import contextlib
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from folders import table
from world import pack

from fsdp_trainer.base.distributed import gather, local_part, local_slice
from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Adapter,
    Batch,
    Optim,
    Precision,
    Sharding,
    Train,
    TrainConfig,
)
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.models import attention_kernels
from fsdp_trainer.models.adapters.adapter_targets import four_bit_weights, resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import quantize_linears
from fsdp_trainer.models.from_config.freeze import choose_trained
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel import activation_offload, convert
from fsdp_trainer.parallel import parallelize as parallelize_module
from fsdp_trainer.parallel.compile import is_one_graph
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate, initialize_magnitudes
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.training.batches import Assembler, BatchOptions
from fsdp_trainer.training.gradients import GradientSync, clip_gradients
from fsdp_trainer.training.objective import CrossEntropy
from fsdp_trainer.training.weights import draw_weights

STEPS = 2
VOCABULARY = 97
ROW = 32
DOCUMENTS = ([20, 9], [7, 9, 16], [32], [5, 5, 5, 5, 5, 5])
SUPERVISED = (range(21, 28), range(32), range(0), range(0, 32, 3))
"""Supervised positions of each row in four.

Those of the first row are all in one half, and the third row has none.
"""

MODELS = table("measures/layout_models.yaml")
SIZES, LATENT, GROUPED = (MODELS[name] for name in ("sizes", "latent", "grouped"))
CPU = torch.device("cpu")


def plain(sizes, settings, rows):
    """Return the weights at the start and the results of `take_steps`, of one process.

    sizes: of the model, changes of SIZES. settings: see `configuration`; and `loss`, options of the
    objective; `attention`; `compiled`; `one_rank`, see `start`. rows: of a step.
    """
    cfg, config = configuration(settings, batch=batch_of(rows)), ModelConfig(**SIZES | sizes)
    model = Decoder(config)
    adapters = resolve_adapters(cfg.adapter, config)
    quantize_linears(model, four_bit_weights(model, adapters), torch.float32)
    choose_trained(model, adapters, cfg.train.freeze)
    start(model, settings.get("one_rank"))
    first = whole(dict(model.named_parameters()))
    assembler = Assembler(ROW, 1, BatchOptions(1, 0, 1, CPU))
    return first, *take_steps(model, cfg, None, assembler, **settings.get("loss", {}))


def on_ranks(sizes, settings, rows):
    """Return what `plain` does, computed by all ranks together."""
    cfg, config = configuration(settings, batch=batch_of(rows)), ModelConfig(**SIZES | sizes)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(activation_offload, "SMALLEST", 256))
        patches.enter_context(mock.patch.object(convert, "EMULATED", True))
        patches.enter_context(mock.patch.object(convert, "worth_float8", is_linear))
        model, dims = built(config, cfg, settings.get("compiled", False))
        start(model, settings.get("one_rank"))
        first = whole(dict(model.named_parameters()))
        if "kernel" in settings:
            patches.enter_context(with_kernel(settings["kernel"]))
        choice = context_method(cfg.sharding, ROW, config.on_tensor_rank(cfg.sharding.tensor))
        options = BatchOptions(
            1, dims.batch_rank, dims.batch_ranks, CPU,
            attention=settings.get("attention", "documents"),
            same_rows=dims.same_rows, context=context_ranks(dims, choice.method, config.windows),
        )  # fmt: skip
        assembler = Assembler(ROW, 1, options)
        pipeline = None
        if cfg.sharding.pipeline > 1:
            pipeline = Pipeline(model, dims, getattr(torch, cfg.precision.param_dtype), CPU)
        loss = settings.get("loss", {})
        return first, *take_steps(model, cfg, dims, assembler, pipeline, **loss)


@contextlib.contextmanager
def with_kernel(kernel):
    """Choose a GPU's kernel for attention, and let a CPU compute what its operators do."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in OPERATORS.items():
        library.impl(name, function, "CPU")
    with mock.patch.object(attention_kernels, "_chosen", [kernel]):
        yield
    library._destroy()


def scores(q, k, ends, key_ends, causal, scale):
    """Return the scores of visible keys, [..., heads, queries, keys], and the repeated keys."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
    visible = torch.ones(q.shape[-3], k.shape[-3], dtype=torch.bool)
    if ends is not None:
        visible = torch.block_diag(*map(torch.ones, ends.diff().tolist(), key_ends.diff().tolist()))
    hidden = ~(visible.tril() if causal else visible).bool()
    return torch.einsum("...qhd,...khd->...hqk", q, k).mul(scale).masked_fill(hidden, -torch.inf), k


def flash(q, k, v, ends, key_ends, _longest, _most, _dropout, causal, *_, scale):
    of_keys, _ = scores(q, k, ends, key_ends, causal, scale)
    v = v.repeat_interleave(q.shape[-2] // v.shape[-2], -2)
    out = torch.einsum("...hqk,...khd->...qhd", of_keys.softmax(-1), v).contiguous()
    return out, of_keys.logsumexp(-1), *[q.new_empty(0)] * 3


def flash_gradients(
    grad, q, k, v, out, sums, ends, key_ends, _longest, _most, _dropout, causal, *_, scale
):
    of_keys, k_repeated = scores(q, k, ends, key_ends, causal, scale)
    shares = (of_keys - sums[..., None]).exp()
    mean = (grad * out).sum(-1).mT[..., None]
    slopes = shares * (scores(grad, v, ends, key_ends, causal, 1)[0].nan_to_num(neginf=0) - mean)
    of_q = torch.einsum("...hqk,...khd->...qhd", slopes * scale, k_repeated)
    of_k = torch.einsum("...hqk,...qhd->...khd", slopes * scale, q)
    of_v = torch.einsum("...hqk,...qhd->...khd", shares, grad)
    groups = (k.shape[-2], -1)
    return of_q.contiguous(), *(x.unflatten(-2, groups).sum(-2) for x in (of_k, of_v))


def by_token(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def cudnn(q, k, v, _bias, _sums, _dropout=0.0, causal=False, *_, scale):
    out, sums, *empty = flash(*by_token(q, k, v), None, None, 0, 0, 0.0, causal, scale=scale)
    return *by_token(out), sums[..., None], None, None, 0, 0, *empty


def cudnn_gradients(grad, q, k, v, out, sums, *options, scale):
    ends = (sums[..., 0], None, None, 0, 0, 0.0, options[-1])
    return tuple(by_token(*flash_gradients(*by_token(grad, q, k, v, out), *ends, scale=scale)))


OPERATORS = {
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_gradients,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_gradients,
}


def built(config, cfg, compiled=False):
    """Return this rank's part of a model without weights, and the dimensions."""
    dist.init_process_group("gloo")
    dims = Dims(layout_of(cfg), "cpu", 60)
    config = config.with_equal_rows(cfg.sharding.tensor)
    adapters = resolve_adapters(cfg.adapter, config)
    with compiled_quickly():
        model = parallelize(
            meta_decoder(config), dims, Computation.of(cfg, compiled), adapters, cfg.train.freeze
        )
    allocate(model, CPU)
    return model, dims


def batch_of(rows):
    return Batch(seq_len=ROW, rows=rows, micro_rows=1)


def is_linear(module, *_):
    return isinstance(module, torch.nn.Linear)


@torch.no_grad()
def start(model, one_rank=False):
    """Set weights as at a run's start, but no biases, norms or adapters that would not show.

    one_rank: all tokens go to the first two experts, and so to one rank.
    """
    draw_weights(model, 1)
    for name, parameter in model.named_parameters():
        local = local_part(parameter)
        if name.endswith(("norm.weight", "bias")) or "lora_B" in name:
            local += 0.1
        if one_rank and name.endswith("mlp.gate.weight"):
            first = local_slice(parameter)[0].start
            line = torch.linspace(-1, 1, parameter.shape[1])
            for i, values in enumerate(local, first):
                values.copy_(line * (1, -1, *[0] * 6)[i])
    initialize_magnitudes(model)


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


def take_steps(model, cfg, dims, assembler, pipeline=None, **loss_options):
    """Train STEPS steps of cfg.batch.rows packed rows, which are dealt to the assembler's ranks.

    Returns losses, gradient norms, first gradients and last weights. Gradients and weights are
    complete tensors by name. dims: None in one process. pipeline: the pipeline to use, or None.
    """
    optimizer = build_optimizer(model, cfg.optim, ranks=dims.stage_group if pipeline else None)
    sync = None
    if dims and not pipeline:
        sync = GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        rows = [packed_row(number, step) for number in range(cfg.batch.rows)]
        weight = sum(row.weights.sum() for row in rows)
        own = rows[assembler.options.rank :: assembler.options.ranks]
        batches = [assembler.assemble(row) for row in own]
        objectives = [CrossEntropy(b.weights / weight, **loss_options) for b in batches]
        if pipeline:
            values = [value for value, _ in pipeline.train(batches, objectives)]
        else:
            values = computed(model, batches, objectives, sync)
        loss = sum(values, torch.zeros(()))
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


def computed(model, batches, objectives, sync):
    """Yield the loss of each micro-batch, whose gradients are computed."""
    for batch, objective in zip(batches, objectives, strict=True):
        if sync:
            sync.before(last=batch is batches[-1])
        value = model(batch, objective).value
        value.backward()
        yield value.detach()


def compiled_quickly():
    """Return a patch that compiles blocks by aot_eager, because inductor takes a minute."""
    return mock.patch.object(parallelize_module, "compile_blocks", compile_quickly)


def compile_quickly(model, cfg, **options):
    torch.compiler.reset()
    if model.lm_head is not None:
        model.lm_head.compile_chunks(backend="aot_eager")
    for block in model.blocks().values():
        block.compile(fullgraph=is_one_graph(block), backend="aot_eager")


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
    assert got[2][0] == pytest.approx(expected[2][0], rel=5e-6)  # the norm of all gradients
    assert got[3].keys() == expected[3].keys()
    for name, gradient in expected[3].items():
        error = (got[3][name] - gradient).abs().max() / gradient.abs().max()
        assert error < 2e-5, f"gradient of {name}: {error:.1e}"
    for name, weight in expected[4].items():
        error = (got[4][name] - weight).abs().max()
        assert error < tolerance, f"{name} after {STEPS} steps: {error:.1e}"
