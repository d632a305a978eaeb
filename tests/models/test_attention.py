"""Attention: every layout computes the same, costs what it says, and is chosen for a reason."""

import random
import sys
from dataclasses import replace
from itertools import pairwise

import inject
import numpy as np
import pytest
import torch
import yaml
from largest import Largest
from refused import refusal
from tables import rows
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from fsdp_trainer.apps.doctor.checkup import attention
from fsdp_trainer.errors import UserError
from fsdp_trainer.models import attention_kernels
from fsdp_trainer.models.attention import LAYOUTS, DocumentAttention, OneDocument
from fsdp_trainer.models.attention_choice import FLASH, AttentionChoice, AttentionContext, choose
from fsdp_trainer.models.attention_kernels import describe_device, set_kernel_priority
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.document_calls import plan_calls
from fsdp_trainer.models.sdpa import SOFTCAP_QUERIES, Scoring, sdpa

CPU = torch.device("cpu")
ROWS = yaml.safe_load("""
many: [[[5, 1, 17, 9], [40], [3, 3]], 40]
whole: [[[40], [40]], 40]
one each: [[[40], [38]], 48]
with an empty row: [[[], [7]], 40]
""") | {"longer than a chunk": ([[SOFTCAP_QUERIES + 44, 100], [SOFTCAP_QUERIES * 2]], 600)}


def inputs(lengths, row, heads=4, kv_heads=2, head_dim=16, device=CPU, dtype=torch.float32):
    """q, k, v, and a gradient that is zero where padding is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(len(lengths), row, n, head_dim, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    for i, lens in enumerate(lengths):
        grad[i, sum(lens) :] = 0
    return *(x.to(device, dtype).requires_grad_(True) for x in (q, k, v)), grad.to(device, dtype)


def results(layout, q, k, v, grad, window=None, softcap=None):
    """The output where it means something, and the gradients."""
    out = layout.with_window(window).attend(q, k, v, Scoring(softcap=softcap))
    assert out.isfinite().all(), "padding too"
    return [out * (grad != 0), *torch.autograd.grad(out, (q, k, v), grad)]


def largest_difference(actual, wanted):
    return max(
        (a.float() - b.float()).abs().max().item() for a, b in zip(actual, wanted, strict=True)
    )


@pytest.mark.parametrize("multiple", [1, 128], ids=["cpu", "as on a GPU"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 16, 100])
@pytest.mark.parametrize("rows", ROWS)
def test_documents_are_as_under_a_mask(rows, window, softcap, multiple, enter):
    enter(inject.setting("attention_length_multiple", {"cpu": multiple}))
    lengths, row = ROWS[rows]
    given = inputs(lengths, row)
    actual, wanted = (
        results(LAYOUTS[name](lengths, row, CPU), *given, window, softcap)
        for name in ("documents", "mask")
    )
    assert largest_difference(actual, wanted) <= 1e-5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("window", [None, 64])
def test_documents_cost_by_their_squares_or_windows_and_not_by_the_row(seed, window):
    rng = np.random.default_rng(seed)
    sizes = [rng.integers(1, rng.choice([10, 100, 2000]), size=40) for _ in range(2)]
    plan = plan_calls([row.tolist() for row in sizes], max(map(sum, sizes)), window, CPU)
    computed = sum(call.queries.size * call.keys.shape[1] for call in plan.calls)
    every = np.concatenate(sizes)
    needed = (every * (every if window is None else np.minimum(every, 3 * window))).sum()
    # a quarter is padding at most, and a call is worth 64 x 64 scores
    assert computed <= 1.25 * needed + len(plan.calls) * 64 * 64
    assert len(plan.calls) <= 40, "not a call for every document"


@pytest.mark.parametrize("window, softcap", [(64, None), (None, 5.0), (64, 5.0)])
def test_a_long_document_never_has_all_its_scores_or_a_mask_of_them(window, softcap):
    length = 2048
    q, k, v, grad = inputs([[length]], length, heads=1, kv_heads=1)
    with Largest() as largest:
        layout = DocumentAttention([[length]], length, CPU).with_window(window)
        layout.attend(q, k, v, Scoring(softcap=softcap)).backward(grad)
    assert largest.numel <= max(SOFTCAP_QUERIES, 2 * (window or 0)) * length < length**2 / 4


# --- GPU layouts, as far as a CPU can tell ------------------------------------------------------


@torch.library.custom_op("tests::varlen_attn", mutates_args={})
def document_by_document(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float | None,
    past: int,
) -> torch.Tensor:
    """Return what torch's kernel does, computed one document after another."""
    places = ends.tolist()
    assert ends.dtype == torch.int32
    assert places[0] == 0
    assert places[-1] == len(q)
    assert all(0 < b - a <= longest for a, b in pairwise(places))
    parts = [
        OneDocument(b - a)
        .with_window(past + 1 or None)
        .attend(q[None, a:b], k[None, a:b], v[None, a:b], Scoring(scale))
        for a, b in pairwise(places)
    ]
    return torch.cat(parts, 1)[0]


@document_by_document.register_fake
def _(q, k, v, ends, longest, scale, past):
    return torch.empty_like(q)


@pytest.fixture
def varlen():
    def call(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size):
        assert ends_q is ends_k
        assert longest_q == longest_k
        assert window_size[1] == 0
        return document_by_document(q, k, v, ends_q, longest_q, scale, window_size[0])

    with inject.around("varlen_kernel", lambda _: call):
        yield


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("rows", ROWS)
def test_varlen_is_told_where_documents_lie(varlen, rows, window):
    lengths, row = ROWS[rows]
    with torch.no_grad():
        q, k, v, grad = inputs(lengths, row)
        actual, wanted = (
            LAYOUTS[name](lengths, row, CPU).with_window(window).attend(q, k, v) * (grad != 0)
            for name in ("varlen", "documents")
        )
    assert (actual - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_compiled_varlen_is_one_graph_for_any_documents_and_one_for_whole_rows(varlen, kernel):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, layout: layout.attend(q, k, v), backend=backend, fullgraph=True
    )
    before = prefer(kernel, False, "varlen")
    assert SDPBackend.CUDNN_ATTENTION not in before, "it would plan each shape of a generation"
    draw = random.Random(0)
    for longest in (20, 3, 256, 24, 7, 12, 200, 255):
        packed = [draw.randint(2, 20) for _ in range(draw.randint(1, 10))]
        is_whole = kernel == "cudnn" and longest > 200
        lengths = [[longest], [256] if longest > 200 else packed]
        *given, grad = inputs(lengths, 256)
        layout = LAYOUTS["varlen"](lengths, 256, CPU)
        documents = DocumentAttention(lengths, 256, CPU)
        with torch.set_grad_enabled(is_whole):
            out, right = compiled(*given, layout), documents.attend(*given)
            assert ((out - right) * (grad != 0)).abs().max() <= 1e-6
        if is_whole:
            both = (results(one, *given, grad) for one in (layout, documents))
            assert largest_difference(*both) <= 1e-6
            mine = torch.autograd.grad(out, given, grad)
            assert largest_difference(mine, torch.autograd.grad(right, given, grad)) <= 1e-6
    calls = [str(graph.code).count("scaled_dot_product_attention(") for graph in graphs]
    assert calls == ([0, 1] if kernel == "cudnn" else [0])
    assert _cur_sdpa_kernel_backends(with_priority=True) == before
    prefer(None, False)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "window, scoring",
    [
        (16, Scoring()),
        (None, Scoring(softcap=5.0)),
        (16, Scoring(sinks=torch.tensor([0.0, 3, -2, 1]))),
    ],
)
def test_flex_sees_what_a_mask_shows(window, scoring):
    lengths, row = [[100, 156, 30], [5] * 50], 384
    q, k, v, grad = (x.detach() for x in inputs(lengths, row))
    actual, wanted = (
        LAYOUTS[name](lengths, row, CPU).with_window(window).attend(q, k, v, scoring)
        for name in ("flex", "mask")
    )
    assert ((actual - wanted) * (grad != 0)).abs().max() <= 1e-5


# --- the choice ---------------------------------------------------------------------------------

CUDA = AttentionContext("cuda", (9, 0), "bfloat16", 128)
FLAGS = ("softcap", "sinks", "compiled", "deterministic", "selective")
CHANGES = {
    "cpu": {"device": "cpu", "capability": None},
    "fa3": {"installed": frozenset({"fa3"})},
    "fa4": {"installed": frozenset({"fa4"})},
    "float32": {"dtype": "float32"},
    **{name: {name: True} for name in FLAGS},
}


def context_of(words):
    """Return CUDA with changes: names in CHANGES, a width of heads, or a compute capability."""
    context = CUDA
    for word in words:
        change = CHANGES.get(word)
        if change is None and "." in word:
            change = {"capability": tuple(map(int, word.split(".")))}
        context = replace(context, **(change or {"head_dim": int(word)}))
    return context


CHOICES = """
documents -          cpu float32 64
mask      -          cpu float32 64 compiled
documents -          cpu float32 64 softcap
varlen    cudnn
varlen    cudnn      compiled
varlen    flash      deterministic
varlen    fa3        fa3
varlen    flash      8.0
varlen    flash      8.0 fa3
varlen    fa4        fa4 10.0
varlen    flash      10.0 fa3
documents flash      7.5
documents cudnn      512
documents flash      512 deterministic
mask      efficient  100 compiled
mask      efficient  8.0 100 compiled
documents cudnn      float32
flex      -          softcap
documents -          softcap selective
flex      -          softcap selective compiled
mask      -          softcap 8 compiled
flex      -          sinks
documents -          sinks selective
"""


@pytest.mark.parametrize("line", CHOICES.strip().splitlines())
def test_the_choice_by_device_model_and_rows(line):
    layout, kernel, *words = line.split()
    kernel, context = None if kernel == "-" else kernel, context_of(words)
    choice = choose("auto", "auto", context)
    assert (choice.layout, choice.kernel) == (layout, kernel)
    assert choice.reason
    assert choose(layout, "auto", context).kernel == kernel, "asked for by name it is as good"


REFUSALS = """
varlen auto cpu: GPUs only
flex auto cpu: no gradient on a CPU
flex auto selective: activation_checkpoint=full
flex auto 8: head_dim=8
varlen auto float32: param_dtype=bfloat16
varlen auto softcap: model.attention=flex
varlen auto sinks: model.attention=flex
mask cudnn sinks: attention sinks
varlen auto 7.0: this GPU has 7.0
varlen auto 100: head_dim=100
varlen efficient: model.attention=documents
documents auto compiled: model.attention=auto
flex flash: a kernel of its own
mask fa3: takes no mask
auto fa3: is not installed
auto fa3 8.0: compute capability 9.0, this GPU has 8.0
auto fa4 float32: 16-bit
auto cudnn softcap: soft limit
auto math cpu: one kernel only
"""


@pytest.mark.parametrize("line", REFUSALS.strip().splitlines())
def test_what_cannot_be_is_refused_with_what_to_type(line):
    words, says = line.split(": ")
    layout, kernel, *words = words.split()
    said = refusal(choose, layout, kernel, context_of(words))
    assert says in said
    assert "Use  " in said


def test_a_kernel_that_is_asked_for_is_taken():
    for kernel in ("cudnn", "efficient", "math"):
        by_name = choose("documents", kernel, CUDA)
        assert choose("auto", kernel, CUDA) == replace(by_name, reason=f"{kernel} is requested")
    assert choose("auto", "fa3", context_of(["fa3"])).kernel == "fa3"
    for kernel in ("cudnn", "flash"):
        named = choose("auto", kernel, context_of(["compiled"]))
        assert (named.layout, named.kernel) == ("varlen", kernel), "cuDNN would get a mask"


def prefer(kernel, required, layout="documents", device=CPU, dtype=torch.float32, **sizes):
    """Set the kernel for a model; None: those that torch prefers."""
    config = ModelConfig(vocab_size=8, **sizes)
    choice = AttentionChoice(layout, kernel, "")
    set_kernel_priority(choice, config, dtype, device, required=required)
    return _cur_sdpa_kernel_backends(with_priority=True)


@pytest.mark.parametrize(
    "capability, module, kernel, says",
    yaml.safe_load("""
- [[9, 0], flash_attn_interface, fa3, 'with FlashAttention 3: ']
- [[10, 0], flash_attn.cute.interface, fa4, 'with FlashAttention 4: ']
- [[8, 0], flash_attn_interface, flash, 'with FlashAttention 2: ']
- [[9, 0], nothing, cudnn, 'FlashAttention 3 is made for this GPU, and is not installed']
"""),
)
def test_an_installed_flash_attention_is_taken_where_it_is_best(
    capability, module, kernel, says, monkeypatch
):
    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setitem(sys.modules, module, sys)
    device = torch.device("cuda")
    linear, check = attention(device)
    assert "fsdp_trainer[fla]" in linear.advice
    assert says in check.text + check.advice
    choice = choose("auto", "auto", replace(describe_device(device), dtype="bfloat16"))
    prefer(choice.kernel, False, choice.layout)
    prefer(None, False)
    assert (choice.kernel, activated) == (kernel, [kernel.upper()] * (kernel in FLASH))


RING = rows("""
cudnn →
cudnn → sinks
flash → deterministic
flash → 8.0
flash → 256
fa3 → fa3
efficient → float32
efficient → 7.5
""")


def test_a_ring_has_kernels_that_return_their_sums():
    for layout in ("documents", "mask"):
        for kernel, words in RING:
            context = replace(context_of(words.split()), ring=True)
            assert choose(layout, "auto", context).kernel == kernel
        assert choose(layout, "flash", replace(CUDA, ring=True)).kernel == "flash"


def test_a_kernel_stays_preferred_until_the_next_run():
    before = _cur_sdpa_kernel_backends(with_priority=True)
    order = prefer("math", True)
    assert order[0] == SDPBackend.MATH
    assert SDPBackend.CUDNN_ATTENTION not in order, "it may be wrong under a mask"
    with pytest.raises(UserError, match=r"(?s)cudnn.*does not compute.*attention_kernel=auto"):
        prefer("cudnn", True)
    assert prefer(None, False) == before


def test_a_kernel_is_preferred_although_the_first_call_on_hopper_sets_another_order(monkeypatch):
    before = [*map(int, _cur_sdpa_kernel_backends(with_priority=True))]
    cudnn_first = [*dict.fromkeys([int(SDPBackend.CUDNN_ATTENTION), *before])]

    def first_call(*arguments):
        torch._C._set_sdp_priority_order(cudnn_first)
        return sdpa(*arguments)

    monkeypatch.setattr(attention_kernels, "sdpa", first_call)
    order = prefer("math", True)
    prefer(None, False)
    torch._C._set_sdp_priority_order(before)
    assert order[0] == SDPBackend.MATH


def test_the_start_tells_how_attention_is_computed_and_why(ledger):
    assert "attend by documents: cost by Σ length²" in ledger.run("plain").out
    masked = ledger.run(words=["model.attention=mask train.steps=1"])
    assert "attend by mask: as requested" in masked.out


# --- on a GPU -----------------------------------------------------------------------------------

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "layout, kernel, softcap",
    [
        pytest.param(*case, marks=gpu, id="-".join(map(str, case)))
        for case in [
            *(("documents", kernel, None) for kernel in ("cudnn", "flash", "efficient")),
            *(("varlen", kernel, None) for kernel in ("flash", "auto")),
            *((layout, "auto", softcap) for layout in ("mask", "flex") for softcap in (None, 20.0)),
            ("documents", "auto", 20.0),
        ]
    ],
)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "rows",
    [([[300, 1, 17, 600], [1000]], 1024), ([[1024], [1024]], 1024), ([[], [8] * 20], 256)],
    ids=["packed", "whole", "short"],
)
def test_every_layout_and_kernel_is_near_float32_on_the_cpu(rows, window, layout, kernel, softcap):
    (lengths, row), device = rows, torch.device("cuda")
    on_gpu = {"layout": layout, "device": device, "dtype": torch.bfloat16, "head_dim": 64}
    prefer(None if kernel == "auto" else kernel, False, **on_gpu)
    given = inputs(lengths, row, head_dim=64)
    there = [x.detach().to(device, torch.bfloat16).requires_grad_(x.requires_grad) for x in given]
    actual = results(LAYOUTS[layout](lengths, row, device), *there, window, softcap)
    wanted = results(DocumentAttention(lengths, row, CPU), *given, window, softcap)
    prefer(None, False, **on_gpu)
    for mine, right in zip(actual, wanted, strict=True):
        assert (mine.float().cpu() - right).norm() <= 0.02 * right.norm()
