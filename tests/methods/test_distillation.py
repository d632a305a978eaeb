"""Distillation: loss and gradients are those of whole logits, stored lists stand in for a teacher,
and a teacher that knows other tokens is refused with what differs."""

import errno
import shutil
from contextlib import contextmanager
from functools import partial
from unittest import mock

import inject
import pytest
import torch
import yaml
from layouts import ROW, packed_row
from layouts import VOCABULARY as ROW_VOCABULARY
from named_runs import RUNS
from small_decoder import SIZES, small_decoder
from stored import assert_near, newest
from textbook import TOKENS, VOCABULARY, make, relative
from texts import exchange_tokens
from world import SMALL, flip_bit, read_json, write_chats, write_json

from fsdp_trainer.config.schema import ObjectiveChoice, TrainConfig
from fsdp_trainer.data.store.stored_values import read_top_k
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.methods.distillation import DistilForwardBackward, Distillation, TeacherMetrics
from fsdp_trainer.methods.teacher import Teacher
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head
from fsdp_trainer.models.soft_targets import ListedTargets, TeacherLogits, likeliest
from fsdp_trainer.planning.plan.memory import memory
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.second_model import list_bytes
from fsdp_trainer.training.batches import Assembler, BatchOptions, StepPlan

TEACHER_WIDTH = 24


def teacher_head(vocabulary=0, **options):
    torch.manual_seed(1)
    head = Head(
        ModelConfig(vocab_size=VOCABULARY + vocabulary, hidden_size=TEACHER_WIDTH, **options)
    )
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape))
    return head, torch.randn(TOKENS, TEACHER_WIDTH)


def textbook(own, of_teacher, targets, soft, share, count=None):
    """Return the loss and the divergence of each token, from all logits.

    soft: says how they are compared. count: length of the list that stands for the teacher.
    """
    heat = soft.temperature
    q, p = ((each[:, : soft.vocabulary] / heat).log_softmax(-1) for each in (own, of_teacher))
    q, p = completed(q, p, count) if count else (q, p)
    p, q = (p, q) if soft.kl == "forward" else (q, p)
    divergence = (p.exp() * (p - q)).sum(-1)
    nll = -own.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return (1 - share) * nll + share * heat**2 * divergence, divergence


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


def listed(soft, count, targets):
    """Soft targets of the teacher's likeliest tokens alone, in float32."""
    with torch.no_grad():
        top = likeliest(soft, count, targets)
    return ListedTargets(top, soft.vocabulary, soft.temperature, soft.kl)


def whole_logits(head, hidden, weight):
    logits = hidden @ weight[: head.vocab_size].T
    return torch.tanh(logits / head.softcap) * head.softcap if head.softcap else logits


CASES = yaml.safe_load("""
# direction, share, temperature, length of the list or null, what student and teacher have
- [forward, 0.5, 1.0, null, {}, {}]
- [forward, 0.3, 2.0, null, {vocab_multiple: 1000}, {final_logit_softcapping: 8.0}]
- [forward, 1.0, 0.5, null, {final_logit_softcapping: 5.0}, {vocabulary: -100}]
- [reverse, 1.0, 1.0, null, {final_logit_softcapping: 5.0}, {}]
- [reverse, 0.5, 3.0, null, {}, {vocabulary: 100}]
- [forward, 0.7, 1.0, 1, {}, {}]
- [forward, 0.7, 2.0, 20, {vocab_multiple: 1000}, {final_logit_softcapping: 8.0}]
- [forward, 0.7, 0.5, 7, {final_logit_softcapping: 5.0}, {vocabulary: -100}]
- [reverse, 0.7, 2.0, 20, {}, {vocabulary: 100}]
- [forward, 0.7, 2.0, 0, {}, {}]
- [reverse, 0.7, 2.0, 0, {}, {}]
""")
"""A list of 0 has all tokens; vocabulary: how many tokens more a teacher has."""


@pytest.mark.parametrize("kl, share, heat, count, student, other", CASES)
def test_loss_and_gradients_are_those_of_whole_logits(kl, share, heat, count, student, other):
    """The teacher is whole, or a list of its likeliest tokens as if all others were one."""
    head, hidden, targets, weights = make(**student)
    teacher, teacher_hidden = teacher_head(**other)
    count = VOCABULARY if count == 0 else count
    known = min(head.vocab_size, teacher.vocab_size)
    targets %= known
    whole = TeacherLogits(teacher_hidden, teacher, known, heat, kl)
    soft = listed(whole, count, targets) if count else whole
    value, scores = head(hidden, targets, Distillation(weights, share, heat), soft)
    (3 * value).backward()

    given = [t.detach().double().requires_grad_() for t in (hidden, head.weight)]
    of_teacher = whole_logits(teacher, teacher_hidden.double(), teacher.weight.detach().double())
    own = whole_logits(head, *given)
    losses, divergence = textbook(own, of_teacher, targets, whole, share, count)
    exact = (weights * losses).sum()
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)
    # with a list it is a small difference of large logarithms
    assert relative(scores.divergence, divergence) < (5e-5 if count else 2e-6)
    gradients = torch.autograd.grad(exact, given)
    for ours, gradient in zip((hidden.grad, head.weight.grad), gradients, strict=True):
        assert relative(ours, 3 * gradient) < (2e-6 if kl == "forward" else 2e-5)
    _, alone = head(hidden, targets, None, soft)
    assert torch.equal(alone.divergence, scores.divergence)
    assert torch.equal(alone.log_probability, scores.log_probability)
    _, of_whole = head(hidden, targets, None, whole)
    assert torch.equal(scores.teacher_log_probability, of_whole.teacher_log_probability)


STUDENT = {"vocab_size": ROW_VOCABULARY, "tie_word_embeddings": False}
TEACHERS = yaml.safe_load("""
another family: {hidden_size: 48, num_hidden_layers: 3, family: qwen3}
tied, more tokens: {tie_word_embeddings: true, vocab_size: 110}
""")


@pytest.mark.parametrize("kind", TEACHERS)
def test_every_gradient_of_a_model_is_that_of_whole_logits(kind):
    choice = ObjectiveChoice("distil", share=0.7, temperature=2.0)
    models = STUDENT, STUDENT | TEACHERS[kind]
    model, reads = (small_decoder(i, **each) for i, each in enumerate(models))
    exact, of_teacher = (small_decoder(i, **each).double() for i, each in enumerate(models))
    reads.lm_head.forward = lambda hidden: hidden  # the student's head makes the logits
    model.lm_head.chunk_mib = 1 / 128
    teacher = Teacher(reads, None, True, ROW_VOCABULARY, choice)
    objective = partial(Distillation, share=0.7, temperature=2.0)
    step = DistilForwardBackward(model, objective, *[None] * 3, teacher=teacher)

    batch = Assembler(ROW, 1, BatchOptions(1, 0, 1, torch.device("cpu"))).assemble(packed_row(1, 0))
    weight = batch.weights.sum().item()
    result = step.compute(StepPlan(1, 0, 1, weight=weight), batch)
    own, other = (
        one.lm_head(one.model.norm(one.hidden(batch.tokens, batch.positions, batch.layout)[0]))
        for one in (exact, of_teacher)
    )
    with teacher.reading(batch) as read:
        losses, divergence = textbook(
            own[0][batch.index], other[0][batch.index], batch.targets, read.soft, 0.7
        )
    (batch.weights * losses / weight).sum().backward()
    metric = TeacherMetrics()
    kl = (batch.weights * divergence / weight).sum().item()
    assert metric.written(metric.part(result).tolist())["kl"] == pytest.approx(kl, rel=2e-6)
    wanted = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = wanted[name].grad
        assert (parameter.grad - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def keys(ledger, tmp_path):
    """Words of a run with its own data and cache, and the ledger's teacher."""
    return [
        f"data.path={write_chats(tmp_path / 'chats.jsonl', 40)}",
        f"data.cache={tmp_path}/cache tokenizer.path=demo:bytes schedule=constant",
        f"objective=distil objective.teacher={ledger.run('teacher').folder}",
    ]


def test_a_run_learns_from_data_and_teacher_and_goes_on_with_that_teacher_alone(
    ledger, world, tmp_path
):
    run, teacher = ledger.run("distil"), ledger.run("teacher").folder
    assert f"from {teacher}; share 0.5 of the loss, temperature 2" in run.out
    assert run["kl"][-1] < run["kl"][0]
    for line in run.metrics:
        expected = 0.5 * line["loss"] + 0.5 * 4 * line["kl"]
        assert line["objective"] == pytest.approx(expected, rel=1e-6)
    assert run.metrics[-1]["validation_kl"] > 0 < run.metrics[-1]["validation_teacher_loss"]
    shared = ledger.run(words=[*RUNS["distil"].words, "sharding.tensor=2"], ranks=2)
    assert_near(shared, run, "loss", "kl", "teacher_loss", rel=2e-5)
    weights = [path.name for path in (run.folder / "checkpoints").rglob("*") if path.is_file()]
    assert not any("teacher" in name for name in weights)

    folder = ledger.copy("distil", tmp_path / "run").folder
    words = [*ledger.words_of(RUNS["distil"]), "train.steps=6"]
    other = f"objective.teacher={ledger.run('plain').folder}"
    said = world.train(folder, *words, other, base=[], code=2).err
    assert "the teacher is another one" in said


def test_teacher_and_student_are_compiled_once_each(ledger, world, compiled, tmp_path):
    words = [*ledger.words_of(RUNS["distil"]), *compiled]
    run = world.train(tmp_path / "run", *words, base=[], seam=inject.no_kernels())
    assert_near(run, ledger.run("distil"), "loss", "kl", rel=1e-5)
    assert "compiled again" not in run.out


@contextmanager
def without_teacher():
    """Within it no teacher is built."""

    def refuse(*_):
        raise AssertionError("a teacher was built")

    with mock.patch("fsdp_trainer.methods.stored_teacher.shard_teacher", refuse):
        yield


def test_stored_lists_stand_in_for_the_teacher_in_any_order(ledger, world, keys, tmp_path):
    """Two files, twice, in other rows and on other ranks than they were listed in."""
    files = [write_chats(tmp_path / f"{i}.jsonl", 20, start=20 * i) for i in range(2)]
    keys = [*keys, f"data.path=[{files[0]},{files[1]}] data.validation=0.2"]
    place = [f"run.root={tmp_path} run.name=ahead"]
    world.command(
        "prepare", *SMALL, *keys, "objective.top_k=7", *place, "data.packing=none", ranks=2
    )
    stored = {path: path.stat() for path in tmp_path.rglob("top_tokens.npy")}
    assert len(stored) == 2
    keys += ["train.epochs=2 train.steps=null train.validate_every=3"]
    one = world.train(tmp_path / "one", *keys, "objective.top_k=7", seam=without_teacher)
    assert "not in memory, its 7 likeliest tokens are stored" in one.out
    assert {path: path.stat() for path in stored} == stored
    online = world.train(tmp_path / "online", *keys)
    assert_near(one, online, teacher_loss=1e-5)
    held_out = [run.metrics[-1]["validation_teacher_loss"] for run in (one, online)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    whole = world.train(tmp_path / "whole", *keys, "objective.top_k=260")
    assert "supervised tokens once" in whole.out
    assert_near(whole, online, "loss", "kl", rel=1e-3)

    another = f"objective.teacher={ledger.run('plain').folder}"
    for more, message in (
        ([another, "objective.top_k=7 train.epochs=3"], "the teacher is another one"),
        (["run.name=new objective.top_k=261"], "is more than the 260 tokens of the vocabulary"),
    ):
        assert message in world.train(tmp_path / "one", *keys, *more, code=2).err
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


def test_lists_that_the_disk_has_no_room_for_end_the_run_before_the_teacher_reads(
    world, keys, tmp_path
):
    keys = [*keys, "objective.top_k=3 train.steps=4"]
    said = world.train(tmp_path / "run", *keys, seam=full_disk, code=1).err
    assert "cannot store the teacher's lists next to the data (data.cache)" in said
    assert "No space left on device" in said
    (folder,) = tmp_path.rglob("teacher")
    assert not [*folder.iterdir()]


def test_a_teacher_that_does_not_fit_is_refused_with_what_differs(ledger, world, keys, tmp_path):
    other = shutil.copytree(newest(ledger.run("plain")) / "hf", tmp_path / "other")
    a, b = exchange_tokens(other / "tokenizer.json")
    (other / "model.safetensors").touch()

    def refused(*more):
        how = [*keys, f"objective.teacher={other} train.steps=4", *more]
        return " ".join(world.train(tmp_path / "run", *how, code=2).err.split())

    assert f"The first that differs is 70: {a!r} here, {b!r} there" in refused()
    assert "'brandnew' here, no token there" in refused("tokenizer.add_tokens=[brandnew]")
    config = read_json(other / "config.json")
    write_json(other / "config.json", config | {"max_position_embeddings": 32})
    assert "batch.seq_len=32" in refused()


def test_a_plan_of_stored_lists_has_their_disk_and_no_teacher(tmp_path):
    config = ModelConfig(**SIZES | {"vocab_size": 8000, "hidden_size": 256, "head_dim": 64})
    write_json(tmp_path / "config.json", config.to_hf("float32"))
    cfg, peaks = TrainConfig(), {}
    for name, choice in {
        "alone": ObjectiveChoice("sft"),
        "listed": ObjectiveChoice("distil", teacher=str(tmp_path), top_k=64),
        "in memory": ObjectiveChoice("distil", teacher=str(tmp_path)),
    }.items():
        cfg.objective = choice
        peaks[name] = memory(PlannedRun.of(cfg, config, 2), "cpu").peak.bytes
        assert list_bytes(cfg.objective) == (64 * (2 + 2) + 4 + 4 if name == "listed" else 0)
    assert peaks["listed"]["parameters"] == peaks["alone"]["parameters"]
    assert peaks["listed"]["parameters"] < peaks["in memory"]["parameters"]
    assert peaks["listed"]["logits"] > peaks["alone"]["logits"]
