"""Objectives on preference pairs: the papers' formulas on packed rows in chunks, the same on any
ranks; the base of adapters as reference; what cannot be done is refused with what to type."""

import copy
import math
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import inject
import numpy as np
import pytest
import torch
from pairs import textbook, write_pairs
from stored import tensors
from world import flip_bit
from zoo import HF, make_folder

from fsdp_trainer.cli import main
from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.data.store.stored_values import read_sums, write_sums
from fsdp_trainer.methods.preferences import ChosenWatch, PairObjective, Pairs, orpo
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.training.batches import Assembler, StepPlan

VOCABULARY, LENGTH = 500, 64
PAIRS = [[9, 14, 12, 8], [20, 17], [5, 6, 30, 12, 4, 5]]
"""Tokens of the documents of each row: two of each pair, one behind the other."""
LEARNT_FROM = 3
"""Tokens of the prompt in front of each answer."""
OBJECTIVES = [
    {"name": "dpo", "beta": 0.3},
    {"name": "dpo", "beta": 0.3, "label_smoothing": 0.1, "sft_weight": 0.5},
    {"name": "ipo", "beta": 0.1},
    {"name": "simpo", "beta": 2.0, "gamma": 1.0},
    {"name": "orpo", "beta": 0.1, "sft_weight": 1.0},
]


def packed():
    random = np.random.default_rng(0)
    rows = Rows.empty(len(PAIRS), LENGTH)
    rows.documents = [*PAIRS]
    rows.group_starts = [[i % 2 == 0 for i in range(len(row))] for row in PAIRS]
    for row, lengths in enumerate(PAIRS):
        starts = np.cumsum([0, *lengths])
        for start, end in pairwise(starts):
            tokens = random.integers(0, VOCABULARY, end - start)
            rows.tokens[row, start:end] = tokens
            rows.positions[row, start:end] = np.arange(end - start)
            answer = slice(start + LEARNT_FROM - 1, end - 1)
            rows.labels[row, answer] = tokens[LEARNT_FROM:]
            rows.weights[row, answer] = 1.0
    return rows


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    )
    model = Decoder(config)
    initialize_weights(model, 0)
    return model


@pytest.fixture(scope="module")
def batch():
    return Assembler(
        LENGTH, 1, len(PAIRS), 0, 1, torch.device("cpu"), number_documents=True
    ).assemble(packed())


def exact(model, options):
    """Return the loss and the gradients, in float64, each document by itself, from all logits."""
    model = copy.deepcopy(model).double()
    sums, tokens = [], []
    rows = packed()
    for row, lengths in enumerate(PAIRS):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            alone = Rows.empty(1, length)
            alone.documents, alone.group_starts = [[length]], [[True]]
            alone.tokens[0] = rows.tokens[row, end - length : end]
            alone.positions[0] = np.arange(length)
            alone.labels[0, LEARNT_FROM - 1 : -1] = alone.tokens[0, LEARNT_FROM:]
            alone.weights[0, LEARNT_FROM - 1 : -1] = 1.0
            micro_batch = Assembler(length, 1, 1, 0, 1, torch.device("cpu")).assemble(alone)
            hidden, _ = model.hidden(micro_batch.tokens, micro_batch.positions, micro_batch.layout)
            logits = model.lm_head(model.model.norm(hidden))[0]
            chosen = logits[LEARNT_FROM - 1 : -1].log_softmax(-1)
            answer = micro_batch.tokens[0, LEARNT_FROM:]
            sums.append(chosen.gather(-1, answer[:, None]).sum())
            tokens.append(length - LEARNT_FROM)
    options = {key: value for key, value in options.items() if key != "label_smoothing"} | {
        "smoothing": options.get("label_smoothing", 0.0)
    }
    losses = [
        textbook(
            policy=sums[i : i + 2], reference=REFERENCE[i : i + 2], tokens=tokens[i : i + 2],
            **options,
        )
        for i in range(0, len(sums), 2)
    ]  # fmt: skip
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


REFERENCE = -20 - 5 * torch.arange(12, dtype=torch.float64).sin()


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda o: f"{o['name']}-{len(o)}")
def test_losses_and_gradients_are_the_papers_on_packed_rows_in_chunks(decoder, batch, options):
    count = sum(map(len, PAIRS)) // 2
    decoder.lm_head.chunk_mib = 1 / 64  # 8 tokens
    choice = ObjectiveChoice(**options)
    with_reference = replace(batch, reference=REFERENCE)
    decoder.zero_grad()
    value = decoder(with_reference, PairObjective(with_reference, choice, count)).value
    value.backward()
    loss, gradients = exact(decoder, options)
    assert value.item() == pytest.approx(
        loss.item(), rel=2e-6 if options["name"] == "ipo" else 5e-7
    )
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in decoder.named_parameters():
        error = (parameter.grad.double() - gradients[name]).abs().max()
        assert error < 2e-6 * largest, name


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return [
        f"data.path={write_pairs(folder / 'pairs.jsonl')}",
        "tokenizer.path=demo:bytes",
        f"data.cache={folder / 'cache'}",
        "batch.seq_len=128",
        "train.steps=3",
    ]


@pytest.mark.slow
def test_pairs_are_learnt_alike_on_any_ranks(world, keys, tmp_path):
    layouts = (
        (1, ["batch.micro_rows=6"]),
        (2, ["sharding.tensor=2", "batch.micro_rows=2"]),
        (4, ["sharding.context=2", "batch.micro_rows=1"]),
    )
    runs = [
        world.train(
            tmp_path / f"run{number}",
            *keys,
            "objective=dpo",
            "adapter=lora",
            "data.validation=0.2",
            "train.validate_every=3",
            *more,
            ranks=ranks,
        )
        for number, (ranks, more) in enumerate(layouts)
    ]
    first, *others = runs
    assert first.column("loss")[0] == pytest.approx(math.log(2), abs=1e-7)
    assert first.column("loss")[-1] < 0.69
    names = ["loss", "reward_margin", "reward_chosen", "log_probability_rejected"]
    for run in others:
        for name in [*names, "answer_tokens_chosen", "reward_accuracy"]:
            assert run.column(name) == pytest.approx(first.column(name), rel=2e-5, abs=1e-6), name
        last, expected = run.metrics[-1], first.metrics[-1]
        for name in ("validation_loss", "validation_reward_accuracy"):
            assert last[name] == pytest.approx(expected[name], rel=2e-5)


@pytest.mark.slow
def test_a_loss_scale_does_not_change_what_pairs_teach(world, keys, tmp_path):
    ours = ["objective=simpo", "batch.micro_rows=2", "schedule=constant"]
    exact = world.train(tmp_path / "exact", *keys, *ours)
    run = world.train(
        tmp_path / "fp16",
        *keys,
        *ours,
        "precision.param_dtype=float16",
        "precision.loss_scale=1024",
    )
    assert run.column("loss_scale") == [1024.0] * 3
    for name in ("loss", "reward_margin", "log_probability_chosen"):
        assert run.column(name) == pytest.approx(exact.column(name), rel=5e-3, abs=2e-3), name
    assert run.column("grad_norm") == pytest.approx(exact.column("grad_norm"), rel=2e-2)


WHOLE = ["objective=ipo", "schedule=constant", "checkpoint.every=2", "checkpoint.keep=9"]
COMPUTED = "the reference reads"


def numbers(folder):
    return [path for path in folder.rglob("*.npy") if path.parent.name == "reference"]


def test_a_references_sums_are_checked_but_for_those_of_versions_without_checksums(tmp_path):
    new, old, samples = tmp_path / "new.npy", tmp_path / "old.npy", [0] * 3
    write_sums(new, np.arange(3.0))
    np.save(old, np.arange(3.0))
    for file in (new, old):
        read = read_sums(file, samples)
        assert read.reference.tolist() == [0, 1, 2]
    flip_bit(new)
    assert read_sums(new, samples) is None
    new.write_bytes(old.read_bytes()[:-4])
    assert read_sums(new, samples) is None


@pytest.mark.slow
@pytest.mark.further
def test_the_first_model_is_the_reference_of_whole_weights_also_after_a_resume(
    world, keys, tmp_path
):
    keys = [*keys, *WHOLE, f"data.cache={tmp_path / 'cache'}", "train.steps=4"]
    run = world.train(tmp_path / "whole", *keys, "batch.micro_rows=3")
    assert run.column("loss")[0] == 25.0, "1 / (2 · beta), squared: both models are equal"
    assert run.column("reward_chosen")[0] == 0
    assert COMPUTED in run.out
    # 6 rows a step: of the second micro-batches two only pad
    dealt = world.train(tmp_path / "dealt", *keys, "batch.micro_rows=1", ranks=4)
    assert dealt.column("loss") == pytest.approx(run.column("loss"), rel=2e-5)

    again = world.train(tmp_path / "again", *keys, "batch.micro_rows=3", "train.steps=2")
    assert COMPUTED not in again.out, "it is stored"
    for file in numbers(tmp_path / "cache"):
        flip_bit(file)
    again = world.train(tmp_path / "again", *keys, "batch.micro_rows=3")
    assert COMPUTED in again.out
    assert again.column("loss") == run.column("loss")
    assert again.column("reward_margin") == run.column("reward_margin")


@inject.fault
def bytes_read():
    """Write down how many bytes of tensors this rank reads."""
    read = []

    def reading(real, path, offset, into):
        read.append(into.nbytes)
        return real(path, offset, into)

    with inject.around("tensor_read", reading):
        yield
    Path(os.environ["READ"]).write_text(str(sum(read)))


@pytest.mark.slow
def test_a_new_run_reads_its_first_weights_once(train, keys, tmp_path):
    folder, file = make_folder(tmp_path / "hf"), tmp_path / "read"
    how = [*keys, f"model.init_from={folder}", "objective=dpo", "train.steps=1"]
    run = train("run", *how, base=HF, seam=bytes_read(), env={"READ": str(file)})
    assert "the reference reads" in run.out
    assert int(file.read_text()) == sum(t.nbytes for t in tensors(folder).values())
    assert run.column("loss") == pytest.approx([math.log(2)], abs=1e-6)


@pytest.mark.slow
@pytest.mark.further
def test_another_run_can_be_the_reference_and_may_not_change(world, keys, tmp_path):
    ours = [*keys, *WHOLE, f"data.cache={tmp_path / 'cache'}"]
    first = [*keys, "objective=simpo", "schedule=constant", "checkpoint.keep=9"]
    folder = world.train(tmp_path / "first", *first, "train.steps=1").folder
    ours = [key for key in ours if not key.startswith("tokenizer")]
    ours += [f"objective.reference={folder}", f"model.init_from={folder}", "adapter=dora"]
    run = world.train(tmp_path / "run", *ours, "train.steps=1")
    assert run.column("loss")[0] == 25.0
    moved = shutil.copytree(folder, tmp_path / "moved")
    world.train(folder, *first, "train.steps=2")
    world.train(tmp_path / "run", *ours, "train.steps=2")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    elsewhere = [f"objective.reference={moved}", f"model.init_from={moved}"]
    world.train(tmp_path / "other", *ours, *elsewhere, "train.steps=3")
    said = world.train(tmp_path / "other", *ours, "train.steps=4", code=2).err
    assert "the reference is another one" in said, "although its values are stored"
    for file in numbers(tmp_path / "cache"):
        file.unlink()
    said = world.train(tmp_path / "run", *ours, "train.steps=3", code=2).err
    assert "the reference is another one" in said


REFUSED = [
    {
        "objective=simpo": "",
        "sharding.pipeline=2": "sharding.pipeline=1",
        "data.streaming=true": "data.streaming=false",
        "data.packing=stream": "data.packing=best_fit",
        "loss.label_smoothing=0.1": "objective.label_smoothing",
        "loss.z_loss=0.1": "objective=sft",
    },
    {
        "objective=dpo": "",
        "objective.reference=nowhere": "a run nor a Hugging Face folder",
        "objective.gamma=1": "objective=simpo",
    },
    {
        "objective.beta=1": "objective=dpo",
        "objective.reference=none": "objective=dpo  or  objective=ipo",
    },
]
"""Keys that are typed together → what the message of each has one type instead."""


@pytest.mark.parametrize("typed", REFUSED, ids=lambda typed: next(iter(typed)))
def test_what_pairs_cannot_do_is_refused_before_anything_starts(capsys, typed):
    assert main(["data.path=demo:backwards", "tokenizer.path=demo:bytes", *typed]) == 2
    said = capsys.readouterr().err
    for named in typed.values():
        assert named in said


def test_answers_without_a_pair_are_refused(train):
    said = train("run", "objective=simpo", "train.steps=1", code=2).err
    assert "data.fields={prompt: …, chosen: …, rejected: …}" in said


class Observer:
    def __init__(self):
        self.lines, self.events = [], []

    def say(self, line):
        self.lines.append(line)

    def event(self, name, **details):
        self.events.append((name, details["step"]))


def report(step):
    return StepReport(StepPlan(step, 0, 1), 0.0, 0, 0, 0.0)


@pytest.mark.parametrize("certain", [[0.0, -3.0], [-3.0, 0.0], [0.0, 0.0]])
def test_an_answer_that_is_certain_has_finite_odds(certain):
    """float32 rounds its log-probability to 0."""
    policy = torch.tensor([certain], dtype=torch.float64, requires_grad=True)
    pairs = Pairs(policy, torch.zeros(1, 2).double(), torch.ones(1, 2).double())
    losses = orpo(pairs, ObjectiveChoice(name="orpo", beta=0.1))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize("has_reference", [True, False])
def test_chosen_answers_that_become_less_likely_are_told_of_once(has_reference):
    watch, observer = ChosenWatch(has_reference), Observer()
    for step in range(1, 60):
        up = step if step < 25 else -20 * step
        figures = {
            "reward_chosen": up,
            "log_probability_chosen": up - 100.0,
            "answer_tokens_chosen": 10.0,
        }
        watch.review([report(step)], [figures], observer)
    assert [name for name, _ in observer.events] == ["chosen_less_likely"]
    assert "objective.sft_weight=0.1" in observer.lines[0]
    assert len(observer.lines) == 1
