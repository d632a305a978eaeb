"""Distillation: loss and gradients are those of whole logits, the same on any ranks; a teacher that
knows other tokens, or cannot be shared as the student is, is refused with what to type."""

import errno
import json
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import inject
import pytest
import torch
import torch.distributed as dist
from layouts import ROW, compiled_quickly, layout_of, packed_row, whole, without_padding
from layouts import VOCABULARY as LAYOUT_VOCABULARY
from memory_of_a_step import LiveBytes, whole_batch
from stored import newest
from textbook import TOKENS, VOCABULARY, make
from torch.distributed.tensor import DTensor
from world import SMALL, flip_bit, write_chats

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.cli import main
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Adapter,
    ObjectiveChoice,
    Precision,
    Sharding,
    TrainConfig,
)
from fsdp_trainer.data.store.stored_values import read_top_k
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.methods.distillation import DistilForwardBackward, Distillation, TeacherMetrics
from fsdp_trainer.methods.teacher import shard_teacher
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.head import Head
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.models.soft_targets import ListedTargets, TeacherLogits, likeliest
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.plan.memory import memory
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.second_model import list_bytes
from fsdp_trainer.training.batches import Assembler, StepPlan
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import EmbeddingGradProbe
from fsdp_trainer.training.metrics import Metrics, StepTotal

TEACHER_WIDTH = 24


def teacher_head(vocabulary=VOCABULARY, **options):
    torch.manual_seed(1)
    head = Head(ModelConfig(vocab_size=vocabulary, hidden_size=TEACHER_WIDTH, **options))
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape))
    return head, torch.randn(TOKENS, TEACHER_WIDTH)


def whole_logits(head, hidden, weight):
    logits = hidden @ weight[: head.vocab_size].T
    return torch.tanh(logits / head.softcap) * head.softcap if head.softcap else logits


def dense(head, hidden, targets, weights, teacher, soft, share, count=None):
    """Return value, divergences, and gradients of hidden and weight, in float64 by autograd on all
    logits."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    logits = whole_logits(head, hidden, weight)
    of_teacher = whole_logits(teacher, soft.hidden.double(), teacher.weight.detach().double())
    known, heat = soft.vocabulary, soft.temperature
    q, p = ((each[:, :known] / heat).log_softmax(-1) for each in (logits, of_teacher))
    q, p = completed(q, p, count) if count else (q, p)
    p, q = (p, q) if soft.kl == "forward" else (q, p)
    divergence = (p.exp() * (p - q)).sum(-1)
    nll = -logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    value = (weights * ((1 - share) * nll + share * heat**2 * divergence)).sum()
    return value, divergence, *torch.autograd.grad(value, (hidden, weight))


def completed(q, p, count):
    """Log-probabilities of a list of p's likeliest tokens, and of one more for all others together:
    q's, p's. q, p: all of them, [tokens, vocabulary]."""
    listed = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, p.topk(count).indices, True)
    if listed.all():
        return q, p
    parts = []
    for each in (q, p):
        rest = each.masked_fill(listed, -torch.inf).logsumexp(-1, keepdim=True)
        own = each.gather(-1, p.topk(count).indices)
        parts.append(torch.cat([own, rest], -1))
    return parts


def relative(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("kl", "share", "heat", "student", "other"),
    [
        ("forward", 0.5, 1.0, {}, {}),
        ("forward", 0.3, 2.0, {"vocab_multiple": 1000}, {"final_logit_softcapping": 8.0}),
        ("forward", 1.0, 0.5, {"final_logit_softcapping": 5.0}, {"vocabulary": VOCABULARY - 100}),
        ("reverse", 1.0, 1.0, {"final_logit_softcapping": 5.0}, {}),
        ("reverse", 0.5, 3.0, {}, {"vocabulary": VOCABULARY + 100}),
    ],
    ids=["plain", "padded", "smaller", "softcap", "larger"],
)
def test_loss_and_gradients_are_those_of_whole_logits(kl, share, heat, student, other):
    head, hidden, targets, weights = make(**student)
    teacher, teacher_hidden = teacher_head(**other)
    known = min(head.vocab_size, teacher.vocab_size)
    targets %= known
    soft = TeacherLogits(teacher_hidden, teacher, known, heat, kl)
    value, scores = head(hidden, targets, Distillation(weights, share, heat), soft)
    (3 * value).backward()
    exact, divergence, *gradients = dense(head, hidden, targets, weights, teacher, soft, share)
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)
    assert relative(scores.divergence, divergence) < 2e-6
    for ours, gradient in zip((hidden.grad, head.weight.grad), gradients, strict=True):
        assert relative(ours, 3 * gradient) < (2e-6 if kl == "forward" else 2e-5)
    _, alone = head(hidden, targets, None, soft)
    assert torch.equal(alone.divergence, scores.divergence)
    assert torch.equal(alone.log_probability, scores.log_probability)


def listed(soft, count, targets):
    """Soft targets of the teacher's likeliest tokens alone, in float32."""
    with torch.no_grad():
        top = likeliest(soft, count, targets)
    return ListedTargets(top, soft.vocabulary, soft.temperature, soft.kl)


@pytest.mark.parametrize(
    ("kl", "count", "heat", "student", "other"),
    [
        ("forward", 1, 1.0, {}, {}),
        ("forward", 20, 2.0, {"vocab_multiple": 1000}, {"final_logit_softcapping": 8.0}),
        ("forward", 7, 0.5, {"final_logit_softcapping": 5.0}, {"vocabulary": VOCABULARY - 100}),
        ("reverse", 20, 2.0, {}, {"vocabulary": VOCABULARY + 100}),
    ],
    ids=["one", "padded", "smaller", "reverse"],
)
def test_lists_of_likely_tokens_are_compared_as_if_all_others_were_one(
    kl, count, heat, student, other
):
    head, hidden, targets, weights = make(**student)
    teacher, teacher_hidden = teacher_head(**other)
    known = min(head.vocab_size, teacher.vocab_size)
    targets %= known
    whole = TeacherLogits(teacher_hidden, teacher, known, heat, kl)
    soft = listed(whole, count, targets)
    value, scores = head(hidden, targets, Distillation(weights, 0.7, heat), soft)
    value.backward()
    exact = dense(head, hidden, targets, weights, teacher, whole, 0.7, count)
    assert value.item() == pytest.approx(exact[0].item(), rel=1e-6)
    # a small difference of large logarithms
    assert relative(scores.divergence, exact[1]) < 5e-5
    for ours, gradient in zip((hidden.grad, head.weight.grad), exact[2:], strict=True):
        assert relative(ours, gradient) < (2e-6 if kl == "forward" else 2e-5)
    _, of_whole = head(hidden, targets, None, whole)
    assert torch.equal(scores.teacher_log_probability, of_whole.teacher_log_probability)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_a_list_of_the_whole_vocabulary_is_the_teacher_itself(kl):
    head, hidden, targets, weights = make()
    whole = TeacherLogits(*reversed(teacher_head()), VOCABULARY, 2.0, kl)
    losses, gradients = [], []
    for soft in (whole, listed(whole, VOCABULARY, targets)):
        value, _ = head(hidden, targets, Distillation(weights, 0.7, 2.0), soft)
        gradients.append(torch.autograd.grad(value, (hidden, head.weight)))
        losses.append(value.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for one, other in zip(*gradients, strict=True):
        assert relative(other, one) < 2e-6


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(kl):
    head, hidden, targets, weights = make()
    soft = TeacherLogits(hidden.detach().clone(), head, VOCABULARY, 2.0, kl)
    value, scores = head(hidden, targets, Distillation(weights, 1.0, 2.0), soft)
    value.backward()
    assert not scores.divergence.any()
    assert torch.equal(scores.log_probability, scores.teacher_log_probability)
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


REFUSED = [
    {
        "objective=distil": "is required: name the model to learn from",
        "sharding.pipeline=2": "sharding.pipeline=1",
        "sharding.expert=2": "sharding.expert=1",
        "loss.z_loss=0.1": "objective=sft",
    },
    {
        "objective=distil": "",
        "objective.top_k=8": "",
        "data.streaming=true": "data.streaming=false",
        "data.packing=stream": "data.packing=best_fit",
    },
    {
        "objective=distil": "",
        "objective.teacher=nowhere": "there is no such folder",
        "objective.beta=1": "objective=dpo",
    },
]
"""Keys that are typed together → what the message of each has one type instead."""


@pytest.mark.parametrize("typed", REFUSED, ids=lambda typed: next(iter(typed)))
def test_what_a_teacher_cannot_do_is_refused_before_anything_starts(capsys, typed):
    assert main(["data.path=demo:backwards", "tokenizer.path=demo:bytes", *typed]) == 2
    said = capsys.readouterr().err
    for named in typed.values():
        assert named in said


# --- on ranks -------------------------------------------------------------------------------------

STUDENT = {
    "vocab_size": LAYOUT_VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
OTHER = STUDENT | {"hidden_size": 48, "head_dim": 16, "num_hidden_layers": 3, "family": "qwen3"}
TEACHERS = {
    "another family": OTHER,
    "tied, more tokens": STUDENT | {"tie_word_embeddings": True, "vocab_size": 110},
}
CPU = torch.device("cpu")
ROWS = 4


def configuration(settings):
    return TrainConfig(
        sharding=Sharding(**settings.get("sharding", {})),
        activation_checkpoint=ActivationCheckpoint(mode=settings.get("checkpoint", "none")),
        precision=Precision(param_dtype="float32", master_dtype="float32"),
        adapter=Adapter(**settings.get("adapter", {})),
        objective=ObjectiveChoice("distil", share=0.7, temperature=2.0),
    )


def start(model, seed):
    initialize_weights(model, seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # of zeros the gradient of A would be none
            torch.nn.init.constant_(local_part(parameter), 0.1)


def student_and_teacher(kind, ranks):
    configs = ModelConfig(**STUDENT), ModelConfig(**TEACHERS[kind])
    if ranks == 1:
        return configs
    rows = max(one.with_equal_rows(ranks).embedding_rows for one in configs)
    return [replace(one, vocab_multiple=rows) for one in configs]


def weight():
    return sum(packed_row(number, 0).weights.sum() for number in range(ROWS))


def by_autograd(kind, settings):
    """Return loss, divergence and every gradient, in one process from whole logits."""
    cfg = configuration(settings)
    config, teacher_config = student_and_teacher(kind, 1)
    model, teacher = Decoder(config), Decoder(teacher_config)
    choose_trained(model, resolve_adapters(cfg.adapter, config), settings.get("freeze", []))
    start(model, 1)
    start(teacher, 2)
    known = min(config.vocab_size, teacher_config.vocab_size)
    heat, total, divergences = cfg.objective.temperature, torch.zeros(()), torch.zeros(())
    for number in range(ROWS):
        batch = Assembler(ROW, 1, 1, 0, 1, CPU).assemble(packed_row(number, 0))

        def logits(model, batch=batch):
            hidden, _ = model.hidden(batch.tokens, batch.positions, batch.layout)
            return model.lm_head(model.model.norm(hidden))[0][batch.index]

        own = logits(model)
        p, q = (each[:, :known].div(heat).log_softmax(-1) for each in (logits(teacher), own))
        if settings.get("top_k"):
            q, p = completed(q, p, settings["top_k"])
        divergence = (p.exp() * (p - q)).sum(-1)
        nll = -own.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
        total = total + (batch.weights * (0.3 * nll + 0.7 * heat**2 * divergence)).sum()
        divergences = divergences + (batch.weights * divergence).sum()
    (total / weight()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return (total / weight()).item(), (divergences / weight()).item(), gradients


def distilled(cases):
    """Return the same on this rank as a run does it, for each case: a pair of a teacher and
    settings."""
    dist.init_process_group("gloo")
    return [distil_once(*case) for case in cases]


def distil_once(kind, settings):
    cfg = configuration(settings)
    dims = Dims(layout_of(cfg), "cpu", 60)
    config, teacher_config = student_and_teacher(kind, cfg.sharding.tensor)
    compiled = bool(settings.get("compiled"))
    with compiled_quickly() if compiled else nullcontext():
        teacher = shard_teacher(cfg, Path(), teacher_config, config, dims, compiled)
        model = meta_decoder(config)
        model.lm_head.chunk_mib = 1 / 128
        adapters = resolve_adapters(cfg.adapter, config)
        cfg.train.freeze = settings.get("freeze", [])
        model = parallelize(model, dims, Computation.of(cfg, compiled), adapters, cfg.train.freeze)
    for one, seed in ((teacher.model, 2), (model, 1)):
        allocate(one, CPU)
        start(one, seed)
    soft = Listing(teacher, settings["top_k"]) if "top_k" in settings else teacher
    context = context_ranks(dims, "ulysses")
    layout = "mask" if compiled else "documents"
    rank, ranks = dims.batch_rank, dims.batch_ranks
    assembler = Assembler(ROW, 1, 1, rank, ranks, CPU, context=context, attention=layout)
    metric = TeacherMetrics()
    choice = cfg.objective
    sync = GradientSync(model, cfg.sharding.accumulate, dims.sizes["replicate"] > 1)
    step = DistilForwardBackward(
        model,
        partial(Distillation, share=choice.share, temperature=choice.temperature),
        Metrics({"loss": StepTotal("loss"), "objective": StepTotal("objective"), "t": metric}, CPU),
        dims,
        EmbeddingGradProbe(model),
        sync,
        teacher=soft,
    )
    own = range(rank, ROWS, ranks)
    plan = StepPlan(1, 0, ROWS, weight=weight())
    sums = step.metrics.zeros()
    for number in own:
        sync.before(last=number == own[-1])
        step.metrics.add(sums, step.compute(plan, assembler.assemble(packed_row(number, 0))))
    dims.sum_over_tokens(sums)
    written = step.metrics.written(sums.tolist())
    gathered = [p.numel() for m in (teacher.model,) for p in m.parameters() if not is_shard(p)]
    assert teacher.stays_gathered or dims.sizes["shard"] == 1 or not gathered
    assert all(p.grad is None for p in teacher.model.parameters())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return written["objective"], written["kl"], whole(gradients)


class Listing:
    """Reads with a teacher in memory, and keeps its likeliest tokens alone."""

    def __init__(self, teacher, count):
        self.teacher, self.count = teacher, count

    @contextmanager
    def reading(self, batch):
        with self.teacher.reading(batch) as read:
            soft = listed(read.soft, self.count, batch.targets)
        yield replace(batch, soft=soft)


def is_shard(parameter):
    return isinstance(parameter, DTensor)


LORA = {"adapter": {"name": "lora", "rank": 2}}
CASES = {
    # blocks are compiled alike on any ranks; tracing them is what takes time
    1: [("another family", {"compiled": True}), ("tied, more tokens", {"top_k": 5})],
    2: [
        ("another family", {"checkpoint": "full", "sharding": {"accumulate": "unsharded"}} | LORA),
        ("tied, more tokens", {"sharding": {"strategy": "ddp"}, "freeze": ["lm_head*"]}),
        ("tied, more tokens", {"sharding": {"tensor": 2}}),
        ("another family", {"top_k": 5}),
    ],
    4: [
        ("another family", {"sharding": {"strategy": "hsdp", "replicas": 2}}),
        ("another family", {"sharding": {"tensor": 2, "context": 2}}),
        ("tied, more tokens", {"sharding": {"tensor": 2, "context": 2}, "top_k": 60}),
    ],
}
"""Teacher and settings, by the number of ranks."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    return [
        f"data.path={write_chats(folder / 'chats.jsonl', 40)}",
        f"data.cache={folder / 'cache'}",
        "train.steps=4",
        "schedule=constant",
    ]


WIDER = ["model.hidden_size=48", "model.num_hidden_layers=3", "model.family=qwen3"]


@pytest.fixture(scope="module")
def trained(world, keys, tmp_path_factory):
    """A run: a teacher of another size and family."""
    folder = tmp_path_factory.mktemp("teacher")
    keys = [*keys, "tokenizer.path=demo:bytes", "optim.lr=1e-2"]
    return world.train(folder / "run", *keys, *WIDER)


@pytest.mark.slow
def test_a_student_learns_alike_on_any_ranks_and_goes_on_with_the_same_teacher_alone(
    world, keys, trained, tmp_path
):
    keys = [
        *keys, "tokenizer.path=demo:bytes", "objective=distil", "objective.temperature=2",
        f"objective.teacher={trained.folder}", "data.validation=0.2", "train.validate_every=2",
    ]  # fmt: skip
    one = world.train(tmp_path / "one", *keys)
    assert f"from {trained.folder}; share 0.5 of the loss, temperature 2" in one.out
    assert one.column("kl")[-1] < one.column("kl")[0]
    assert one.column("objective")[0] == pytest.approx(
        0.5 * one.column("loss")[0] + 0.5 * 4 * one.column("kl")[0], rel=1e-6
    )
    others = [
        world.train(
            tmp_path / f"{ranks}-{len(more)}", *keys, "batch.micro_rows=1", *more, ranks=ranks
        )
        for ranks, more in ((2, []), (4, ["sharding.tensor=2"]))
    ]
    for run in others:
        for name in ("loss", "kl", "teacher_loss", "objective"):
            assert run.column(name) == pytest.approx(one.column(name), rel=2e-5), name
        for name in ("validation_loss", "validation_kl", "validation_teacher_loss"):
            assert run.metrics[-1][name] == pytest.approx(one.metrics[-1][name], rel=2e-5)
    weights = [path.name for path in (one.folder / "checkpoints").rglob("*") if path.is_file()]
    assert not any("teacher" in name for name in weights)

    again = world.train(tmp_path / "again", *keys, "train.steps=2")
    again = world.train(tmp_path / "again", *keys)
    assert again.column("objective") == one.column("objective")
    another = [f"objective.teacher={one.folder}" if "teacher=" in k else k for k in keys]
    said = world.train(tmp_path / "again", *another, "train.steps=6", code=2).err
    assert "the teacher is another one" in said


@pytest.mark.slow
@pytest.mark.further
def test_stored_lists_stand_in_for_the_teacher_in_any_order_and_on_any_ranks(
    world, keys, trained, tmp_path
):
    """Both halves of the data, twice, in other rows and on other ranks than they were listed in."""
    lines = Path(keys[0].partition("=")[2]).read_text().splitlines(keepends=True)
    for i in range(2):
        (tmp_path / f"{i}.jsonl").write_text("".join(lines[i::2]))
    keys = [
        f"data.path=[{tmp_path}/0.jsonl,{tmp_path}/1.jsonl]", "data.validation=0.2",
        f"data.cache={tmp_path}/cache", "tokenizer.path=demo:bytes", "objective=distil",
        f"objective.teacher={trained.folder}", "schedule=constant",
    ]  # fmt: skip
    place = [f"run.root={tmp_path}", "run.name=ahead"]
    world.command(
        "prepare", *SMALL, *keys, "objective.top_k=7", *place, "data.packing=none", ranks=2
    )
    stored = {path: path.stat() for path in tmp_path.rglob("top_tokens.npy")}
    assert len(stored) == 2
    keys += ["train.epochs=2", "train.steps=null", "train.validate_every=3"]
    one = world.train(tmp_path / "one", *keys, "objective.top_k=7", seam=without_teacher)
    assert "not in memory, its 7 likeliest tokens are stored" in one.out
    more = ["sharding.tensor=2", "batch.micro_rows=2"]
    other = world.train(tmp_path / "other", *keys, "objective.top_k=7", *more, ranks=2)
    online = world.train(tmp_path / "online", *keys)
    for name in ("loss", "kl", "teacher_loss", "objective"):
        assert other.column(name) == pytest.approx(one.column(name), rel=2e-5), name
    assert one.column("teacher_loss") == pytest.approx(online.column("teacher_loss"), rel=1e-5)
    assert one.metrics[-1]["validation_teacher_loss"] == pytest.approx(
        online.metrics[-1]["validation_teacher_loss"], rel=1e-5
    )
    assert {path: path.stat() for path in tmp_path.rglob("top_tokens.npy")} == stored

    whole = world.train(tmp_path / "whole", *keys, "objective.top_k=260")
    assert "the teacher reads 228 supervised tokens once" in whole.out
    for name in ("loss", "kl"):
        assert whole.column(name) == pytest.approx(online.column(name), rel=1e-3), name
    another = [f"objective.teacher={one.folder}" if "teacher=" in k else k for k in keys]
    said = world.train(
        tmp_path / "one", *another, "objective.top_k=7", "train.epochs=3", code=2
    ).err
    assert "the teacher is another one" in said
    said = world.train(tmp_path / "new", *keys, "objective.top_k=261", code=2).err
    assert "is more than the 260 tokens of the vocabulary" in said
    place = next(iter(stored)).parent
    store = TokenStore(place.parents[1], "")
    assert read_top_k(place, store)
    flip_bit(place / "top_logs.npy")
    assert read_top_k(place, store) is None, "it is read from the teacher again"


@contextmanager
def full_disk():
    """Within it no file gets room."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.posix_fallocate", side_effect=full):
        yield


@pytest.mark.slow
def test_lists_that_the_disk_has_no_room_for_end_the_run_before_the_teacher_reads(
    world, keys, trained, tmp_path
):
    keys = [key for key in keys if not key.startswith("data.cache")]
    keys += [f"data.cache={tmp_path}/cache", "tokenizer.path=demo:bytes", "objective=distil"]
    keys += [f"objective.teacher={trained.folder}", "objective.top_k=3"]
    said = world.train(tmp_path / "run", *keys, seam=full_disk, code=1).err
    assert "cannot store the teacher's lists next to the data (data.cache)" in said
    assert "No space left on device" in said
    (folder,) = tmp_path.rglob("teacher")
    assert not [*folder.iterdir()]


@contextmanager
def without_teacher():
    """Within it no teacher is built."""

    def refuse(*_):
        raise AssertionError("a teacher was built")

    with mock.patch("fsdp_trainer.methods.stored_teacher.shard_teacher", refuse):
        yield


@pytest.mark.slow
def test_a_teacher_that_does_not_fit_is_refused_with_what_differs(world, keys, trained, tmp_path):
    folder = newest(trained) / "hf"
    other = shutil.copytree(folder, tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    a, b = (next(text for text, id in vocabulary.items() if id == n) for n in (70, 71))
    vocabulary[a], vocabulary[b] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(words))
    (other / "model.safetensors").touch()
    keys = [*keys, "tokenizer.path=demo:bytes", "objective=distil"]

    def refused(*more):
        text = world.train(tmp_path / "run", *keys, *more, code=2).err
        return " ".join(text.split())

    said = refused(f"objective.teacher={other}")
    assert f"The first that differs is 70: {a!r} here, {b!r} there" in said
    said = refused(f"objective.teacher={other}", "tokenizer.add_tokens=[brandnew]")
    assert "'brandnew' here, no token there" in said
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    assert "batch.seq_len=32" in refused(f"objective.teacher={other}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
@pytest.mark.further
def test_every_gradient_is_that_of_whole_logits_on_any_ranks(world, ranks):
    expected = [by_autograd(*case) for case in CASES[ranks]]
    for results in world.call(ranks, distilled, CASES[ranks]):
        for case, got, (objective, kl, gradients) in zip(
            CASES[ranks], results, expected, strict=True
        ):
            assert got[0] == pytest.approx(objective, rel=1e-6), case
            assert got[1] == pytest.approx(kl, rel=2e-6), case
            ours = without_padding(got[2], gradients)
            assert ours.keys() == gradients.keys()
            for name, gradient in gradients.items():
                error = (ours[name] - gradient).abs().max() / gradient.abs().max()
                assert error < 1e-5, (case, name, error)


# --- the plan -------------------------------------------------------------------------------------

PLANNED = ModelConfig(
    vocab_size=8000,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
)


def held(cfg, config, teacher_config):
    """The most bytes of this rank's live storages in a micro-batch with a teacher."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dims = Dims(layout_of(cfg), "cpu", 60)
    teacher = shard_teacher(cfg, Path(), teacher_config, config, dims, False)
    model = parallelize(meta_decoder(config), dims, Computation.of(cfg))
    optimizer = build_optimizer(model, cfg.optim)
    for one in (teacher.model, model):
        allocate(one, CPU)
        initialize_weights(one, 0)
    batch = whole_batch(cfg)
    for measure in (nullcontext(), LiveBytes()):
        with measure:
            for parameter in [*teacher.model.parameters(), *model.parameters()]:
                for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
                    getattr(measure, "add", id)(tensor)
            with teacher.reading(batch) as read:
                value = model(read, Distillation(batch.weights, 0.5, 1.0)).value
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return measure.most


@pytest.mark.slow
@pytest.mark.parametrize("size", [{"num_hidden_layers": 6, "hidden_size": 512, "head_dim": 64}, {}])
@pytest.mark.further
def test_the_plan_of_a_teacher_is_what_a_rank_holds(world, tmp_path, size):
    teacher = replace(PLANNED, **size)
    (tmp_path / "config.json").write_text(json.dumps(teacher.to_hf("float32")))
    cfg = configuration({"checkpoint": "full"})
    cfg.batch.seq_len, cfg.batch.rows = 512, 2
    cfg.objective.teacher = str(tmp_path)
    measured = max(world.call(2, held, cfg, PLANNED, teacher))
    with inject.around("allocator_copy", lambda *_: 0.0):  # gloo's copies are its own
        peak = memory(PlannedRun.of(cfg, PLANNED, 2), "cpu").peak
    assert peak.total - peak.bytes["allowance"] == pytest.approx(measured, rel=0.02)


@pytest.mark.slow
def test_a_plan_of_stored_lists_has_their_disk_and_no_teacher(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLANNED.to_hf("float32")))
    cfg = configuration({"checkpoint": "full"})
    peaks = {}
    for name, choice in {
        "alone": ObjectiveChoice("sft"),
        "listed": ObjectiveChoice("distil", teacher=str(tmp_path), top_k=64),
        "in memory": ObjectiveChoice("distil", teacher=str(tmp_path)),
    }.items():
        cfg.objective = choice
        peaks[name] = memory(PlannedRun.of(cfg, PLANNED, 2), "cpu").peak.bytes
        assert list_bytes(cfg.objective) == (64 * (2 + 2) + 4 + 4 if name == "listed" else 0)
    assert peaks["listed"]["parameters"] == peaks["alone"]["parameters"]
    assert peaks["listed"]["parameters"] < peaks["in memory"]["parameters"]
    assert peaks["listed"]["logits"] > peaks["alone"]["logits"]
