"""The head: its scores and gradients are the textbook's, in chunks, in bfloat16, sharded and
compiled; it is gathered once; its memory is bounded."""

import contextlib
import math
import re
import shutil
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import yaml
from largest import Largest, Moved
from stored import assert_near
from textbook import TOKENS, VOCABULARY, make, relative, textbook
from torch._inductor.utils import run_and_get_code

from fsdp_trainer.models.head import Scores
from fsdp_trainer.training.loss import negative_log_likelihood
from fsdp_trainer.training.objective import CrossEntropy

SOFT = {"label_smoothing": 0.1, "z_loss": 1e-2}


def assert_textbook(head, hidden, targets, weights, tolerance=1e-6, **soft):
    value, scores = head(hidden, targets, CrossEntropy(weights, **soft))
    (3 * value).backward()  # whatever is done to it afterwards counts
    exact, nll, grad_hidden, grad_weight = textbook(head, hidden, targets, weights, **soft)
    assert value.item() == pytest.approx(exact.item(), rel=max(tolerance, 1e-6))
    assert torch.allclose(-scores.log_probability.double(), nll, rtol=0, atol=50 * tolerance)
    assert relative(hidden.grad, 3 * grad_hidden) < tolerance
    assert relative(head.weight.grad, 3 * grad_weight) < tolerance
    assert hidden.grad.dtype == hidden.dtype
    assert head.weight.grad.dtype == head.weight.dtype
    assert not head.weight.grad[VOCABULARY:].any(), "rows that only pad"


@pytest.mark.parametrize(
    "soft",
    [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, SOFT],
    ids=lambda s: "+".join(s) or "plain",
)
@pytest.mark.parametrize(
    "model",
    [{}, {"final_logit_softcapping": 5.0}, {"vocab_multiple": 1000}],
    ids=["plain", "softcap", "padded"],
)
def test_value_scores_and_gradients_are_the_textbooks(model, soft):
    assert_textbook(*make(**model), **soft)


@pytest.mark.parametrize("model", [{}, {"final_logit_softcapping": 5.0}], ids=["plain", "softcap"])
def test_logits_are_divided_by_the_temperature_after_the_softcap_as_in_sampling(model):
    head, *inputs = make(**model)
    head.temperature = 0.7
    assert_textbook(head, *inputs)


@pytest.mark.parametrize("chunk_mib", [1, 2, 64])
def test_bfloat16_is_rounded_only_where_it_must_be(chunk_mib):
    """Logits are rounded, as any matrix product's: the textbook is given the rounded ones' error,
    not more."""
    assert_textbook(*make(chunk_mib, torch.bfloat16), tolerance=0.02, **SOFT)


def test_the_gradient_of_what_is_known_does_not_vanish_in_bfloat16():
    """1 − p is 0 as a difference of bfloat16 numbers: the derivative must be rounded after the
    subtraction."""
    head, hidden, targets, weights = make(dtype=torch.bfloat16)
    with torch.no_grad():
        targets %= 4
        hidden.copy_(head.weight[targets] * 0.6)
        head.weight[:4] *= 2  # their logits lead by far
    head(hidden, targets, CrossEntropy(weights))[0].backward()
    _, nll, grad_hidden, _ = textbook(head, hidden, targets, weights)
    assert (nll < 2e-3).sum() > 10
    assert relative(hidden.grad, grad_hidden) < 0.1


def test_scores_alone_are_those_beside_an_objective_and_have_no_gradient():
    head, hidden, targets, weights = make()
    _, scores = head(hidden, targets, CrossEntropy(weights, **SOFT))
    value, alone = head(hidden, targets)
    assert value is None
    assert torch.equal(alone.log_probability, scores.log_probability)
    assert torch.equal(alone.logsumexp, scores.logsumexp)
    assert not negative_log_likelihood(alone, weights).requires_grad
    assert not scores.log_probability.requires_grad


class Preference:
    """The objective of DPO: -log sigmoid of the difference between two halves' sums, and terms of
    the others."""

    needs_all_tokens = True

    def __init__(self, weights, z_loss=0.0, smoothing=0.0):
        self.weights, self.z_loss, self.smoothing = weights, z_loss, smoothing
        self.needs_mean = smoothing > 0

    def __call__(self, scores, tokens):
        assert tokens == slice(0, len(self.weights)), "all tokens in one call"
        sums = (scores.log_probability * self.weights).view(2, -1).sum(1)
        value = -F.logsigmoid(0.01 * (sums[0] - sums[1]))
        value = value + self.z_loss * (scores.logsumexp * self.weights).sum().square()
        if self.needs_mean:
            value = value - self.smoothing * (scores.mean_log_probability * self.weights).sum()
        return value


def preferred(head, hidden, targets, objective):
    """Return the value and the gradients of hidden and weight, in float64 by autograd."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    logits = hidden @ weight[:VOCABULARY].T
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    every = logits.log_softmax(-1)
    chosen = every.gather(-1, targets[:, None])[:, 0]
    scores = Scores(chosen, logits.logsumexp(-1), every.mean(-1))
    value = objective(scores, slice(0, len(targets)))
    return value, *torch.autograd.grad(value, (hidden, weight))


@pytest.mark.parametrize("chunk_mib", [1, 2, 64])
@pytest.mark.parametrize("terms", [{}, {"z_loss": 1e-4, "smoothing": 0.1}], ids=["plain", "more"])
@pytest.mark.parametrize("model", [{}, {"final_logit_softcapping": 5.0}], ids=["plain", "softcap"])
def test_an_objective_of_all_tokens_has_the_textbooks_gradients_for_every_chunk_size(
    chunk_mib, terms, model
):
    head, hidden, targets, weights = make(chunk_mib, **model)
    objective = Preference(weights, **terms)
    value, scores = head(hidden, targets, objective)
    (3 * value).backward()
    exact, grad_hidden, grad_weight = preferred(head, hidden, targets, objective)
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)
    assert relative(hidden.grad, 3 * grad_hidden) < 1e-5
    assert relative(head.weight.grad, 3 * grad_weight) < 1e-5
    assert not scores.log_probability.requires_grad


@pytest.mark.parametrize("chunk_mib, times", [(64, 1), (1, 2)])
def test_an_objective_of_all_tokens_makes_logits_once_where_all_are_one_chunk(chunk_mib, times):
    head, hidden, targets, weights = make(chunk_mib)
    scored, score = [], head.score

    def counted(product, *args):
        scored.append(len(product))
        return score(product, *args)

    head.score = counted
    head(hidden, targets, Preference(weights))
    assert sum(scored) == times * len(targets)


@pytest.mark.parametrize("objective", [CrossEntropy, Preference])
def test_without_supervised_tokens_value_and_gradients_are_those_of_weight_zero(objective):
    head, hidden, targets, weights = make()
    value, _ = head(hidden, targets, objective(weights * 0))
    value.backward()
    assert value.item() == pytest.approx(0 if objective is CrossEntropy else math.log(2))
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


@pytest.mark.parametrize("objective", [CrossEntropy, Preference])
@pytest.mark.parametrize("frozen", ["weight", "hidden", "both"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(objective, frozen):
    head, hidden, targets, weights = make()
    value, _ = head(hidden, targets, objective(weights))
    gradients = torch.autograd.grad(value, (hidden, head.weight))
    hidden.requires_grad_(frozen == "weight")
    head.weight.requires_grad_(frozen == "hidden")
    with Largest() as largest:
        again, _ = head(hidden, targets, objective(weights))
        if frozen != "both":
            again.backward()
    assert torch.equal(again, value)
    assert again.requires_grad == (frozen != "both")
    both = {"hidden": hidden, "weight": head.weight}
    for (name, tensor), gradient in zip(both.items(), gradients, strict=True):
        if frozen in (name, "both"):
            assert tensor.grad is None
        else:
            assert torch.equal(tensor.grad, gradient)
    if frozen != "hidden":
        assert head.weight.numel() not in largest.sizes, "a gradient of the weight was allocated"


def test_a_backward_that_is_split_gives_each_gradient_whole():
    head, hidden, targets, weights = make()
    value = 3 * head(hidden, targets, CrossEntropy(weights))[0]
    both = torch.autograd.grad(value, (hidden, head.weight), retain_graph=True)
    (of_hidden,) = torch.autograd.grad(value, hidden, retain_graph=True)
    (of_weight,) = torch.autograd.grad(value, head.weight)
    assert torch.equal(of_hidden, both[0])
    assert torch.equal(of_weight, both[1])


@pytest.mark.parametrize(
    "tokens, rows, in_16_bits",
    yaml.safe_load("""
- [100, 32, 56]
- [32, 32, 32]
- [33, 24, 40]
- [8, 8, 8]
- [3, 8, 8]
- [0, 8, 8]
"""),
)
def test_chunks_are_as_few_as_the_budget_allows_and_of_equal_size(tokens, rows, in_16_bits):
    head = make()[0]
    assert head.rows_at_once(tokens, "cpu") == rows
    assert head.rows_at_once(tokens, "cpu", 2) == in_16_bits


@pytest.mark.parametrize(
    "dtype, limits",
    [
        (torch.bfloat16, {torch.bfloat16: 8, torch.float32: 60}),
        (torch.float32, {torch.float32: 36}),
    ],
    ids=["bfloat16", "float32"],
)
def test_a_logit_moves_no_more_bytes(dtype, limits):
    """16 bits are written, read for the scores, read and replaced by a slope. What is in float32
    beside it is a few rows, which stay in the cache."""
    head, hidden, targets, weights = make(dtype=dtype)
    with Moved(VOCABULARY) as moved:
        head(hidden, targets, CrossEntropy(weights))[0].backward()
    each = {kind: count / VOCABULARY / TOKENS for kind, count in moved.bytes.items()}
    assert each.keys() == limits.keys()
    assert all(each[kind] <= limit for kind, limit in limits.items()), each


def test_no_tensor_grows_with_tokens_times_vocabulary():
    head, hidden, targets, weights = make()
    with Largest() as largest:
        for count in (1, 4):
            head(
                hidden.repeat(count, 1),
                targets.repeat(count),
                CrossEntropy(weights.repeat(count), **SOFT),
            )[0].backward()
            both = weights.repeat(count)
            head(hidden.repeat(count, 1), targets.repeat(count), Preference(both))[0].backward()
        head(hidden.repeat(4, 1), targets.repeat(4))
    assert largest.numel == 2**20 // 4, "one chunk"


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)], ids=str
)
def test_compiled_chunks_are_the_textbooks_and_are_not_compiled_again_for_other_numbers_of_tokens(
    dtype, tolerance
):
    torch._dynamo.reset()
    head, hidden, targets, weights = make(dtype=dtype, final_logit_softcapping=20.0)
    head.compile_chunks(backend="aot_eager")
    assert_textbook(head, hidden, targets, weights, tolerance, **SOFT)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (100, 72, 31, 8):
            head.weight.grad = None
            part = hidden.detach()[:count].requires_grad_()
            assert_textbook(head, part, targets[:count], weights[:count], tolerance, **SOFT)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_a_compiled_chunk_has_no_second_copy_of_its_logits_and_writes_nothing_but_its_slopes():
    torch._dynamo.reset()
    head, hidden, targets, weights = make(dtype=torch.bfloat16)
    score = torch.compile(head.score, backend="eager")  # no kernel, which takes seconds
    head.compile_chunks()
    head.score = score
    differentiate, sources, allocated, sizes = head.differentiate, [], [], []

    def watched(*args):
        if not sources:  # compiles it
            sources.extend(run_and_get_code(differentiate, *args)[1])
            return
        with torch.profiler.profile(profile_memory=True) as profile:
            differentiate(*args)
        events = profile.profiler.kineto_results.events()
        allocated.extend(e.nbytes() for e in events if e.name() == "[memory]")
        sizes.append(args[0].nbytes)

    head.differentiate = watched
    quick = {"force_disable_caches": True, "cpp.vec_isa_ok": True}  # trusts /proc/cpuinfo
    with torch._inductor.config.patch(quick):
        head(hidden, targets, CrossEntropy(weights, **SOFT))[0].backward()
    assert max(allocated, default=0) < max(sizes) / 8
    kernels = re.findall(r"async_compile.cpp_pybinding\(\[(.*?)\]", "".join(sources))
    arguments = ", ".join(kernels).split(", ")
    assert [kind for kind in arguments if "const" not in kind] == ["'at::BFloat16*'"]


# --- in training --------------------------------------------------------------------------------

MANY = "model.vocab_size=16384 batch.micro_rows=1 batch.rows=4 train.steps=2"
"""A MiB holds the logits of 16 tokens."""


@contextlib.contextmanager
def gathers_told():
    """A line is printed whenever a unit's parameters are gathered."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    real = group.foreach_all_gather

    def gather(*args, **kwargs):
        print("gathered")
        return real(*args, **kwargs)

    with patch.object(group, "foreach_all_gather", gather):
        yield


def test_in_many_chunks_it_gives_the_same_and_is_gathered_as_often_as_in_one(train):
    """Sharded as on one rank: the covering array."""
    how = [MANY, "schedule=constant model.tie_word_embeddings=true"]
    how += ["loss.z_loss=1e-2 loss.label_smoothing=0.1"]
    one, several = (
        train(f"{mib}", *how, f"loss.chunk_mib={mib}", ranks=2, seam=gathers_told)
        for mib in (64, 1)
    )
    assert_near(several, one, loss=1e-5, objective=1e-5, grad_norm=1e-4)
    assert "at most 16 tokens at once" in several.out
    assert "at most 64 tokens at once" in one.out
    assert several.out.count("gathered") == one.out.count("gathered") > 0


def test_the_loss_that_is_told_stays_the_plain_one(ledger):
    how = "data.path=DATA/chats.jsonl train.steps=1 data.validation=0.2 optim.lr=0"
    [plain], [z], [smooth] = (
        ledger.run(words=[how, f"loss.{term}"]).metrics
        for term in ("z_loss=0", "z_loss=1e-2", "label_smoothing=0.5")
    )
    for step in (z, smooth):
        for name in ("loss", "validation_loss"):
            assert step[name] == pytest.approx(plain[name], rel=1e-6)
        assert step["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    assert z["objective"] - z["loss"] > 0.1
    assert smooth["objective"] != pytest.approx(smooth["loss"], rel=1e-3)
    assert "objective" not in plain


def test_weights_of_tokens_are_not_rounded_in_bfloat16(train):
    """fully_shard can round what it finds in the arguments of a forward: 1 / Σ weight would be off
    by up to 1/256, and all gradients with it."""
    run = train("run", "train.steps=2 precision.param_dtype=bfloat16 loss.z_loss=1e-30")
    assert run["objective"] == pytest.approx(run["loss"], rel=1e-6)
