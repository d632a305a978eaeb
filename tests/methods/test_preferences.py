"""Objectives on preference pairs: the papers' formulas on packed rows in chunks, and which model is
the reference."""

import copy
import itertools
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import inject
import numpy as np
import pytest
import torch
import yaml
from named_runs import PAIRS
from pairs import textbook, write_pairs
from small_decoder import small_decoder
from stored import assert_columns, assert_near, tensors
from world import flip_bit
from zoo import HF, make_folder

from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.data.store.stored_values import read_sums, write_sums
from fsdp_trainer.methods.preferences import ChosenWatch, PairObjective, Pairs, orpo
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.training.batches import Assembler, BatchOptions, StepPlan

VOCABULARY, LENGTH = 500, 64
RANDOM = torch.Generator().manual_seed(0)
DOCUMENTS = [
    [torch.randint(VOCABULARY, (length,), generator=RANDOM) for length in lengths]
    for lengths in ([9, 14, 12, 8], [20, 17], [5, 6, 30, 12, 4, 5])
]
"""Of each row, each with its tokens: two of each pair, one behind the other."""
LEARNT_FROM = 3
"""Tokens of the prompt in front of each answer."""
OBJECTIVES = yaml.safe_load("""
- {name: dpo, beta: 0.3}
- {name: dpo, beta: 0.3, label_smoothing: 0.1, sft_weight: 0.5}
- {name: ipo, beta: 0.1}
- {name: simpo, beta: 2.0, gamma: 1.0}
- {name: orpo, beta: 0.1, sft_weight: 1.0}
""")


def packed():
    rows = Rows.empty(len(DOCUMENTS), LENGTH)
    rows.documents = [[len(document) for document in row] for row in DOCUMENTS]
    rows.group_starts = [[i % 2 == 0 for i in range(len(row))] for row in DOCUMENTS]
    for row, documents in enumerate(DOCUMENTS):
        start = 0
        for document in documents:
            end = start + len(document)
            rows.tokens[row, start:end] = document
            rows.positions[row, start:end] = np.arange(len(document))
            answer = slice(start + LEARNT_FROM - 1, end - 1)
            rows.labels[row, answer] = document[LEARNT_FROM:]
            rows.weights[row, answer] = 1.0
            start = end
    return rows


@pytest.fixture(scope="module")
def decoder():
    return small_decoder(0, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def batch():
    return Assembler(
        LENGTH, 1, BatchOptions(len(DOCUMENTS), 0, 1, torch.device("cpu"), number_documents=True)
    ).assemble(packed())


def exact(model, options):
    """Return the loss and the gradients, in float64, each document by itself, from all logits."""
    model = copy.deepcopy(model).double()
    sums, tokens = [], []
    for document in itertools.chain(*DOCUMENTS):
        scores = model.logits(document[None])[0, LEARNT_FROM - 1 : -1].log_softmax(-1)
        answer = document[LEARNT_FROM:]
        sums.append(scores.gather(-1, answer[:, None]).sum())
        tokens.append(len(answer))
    options = {key.replace("label_smoothing", "smoothing"): each for key, each in options.items()}
    losses = []
    for i in range(0, len(sums), 2):
        pair = slice(i, i + 2)
        losses.append(
            textbook(policy=sums[pair], reference=REFERENCE[pair], tokens=tokens[pair], **options)
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


REFERENCE = -20 - 5 * torch.arange(12, dtype=torch.float64).sin()


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda o: f"{o['name']}-{len(o)}")
def test_losses_and_gradients_are_the_papers_on_packed_rows_in_chunks(decoder, batch, options):
    count = sum(map(len, DOCUMENTS)) // 2
    decoder.lm_head.chunk_mib = 1 / 64  # 8 tokens
    choice = ObjectiveChoice(**options)
    with_reference = replace(batch, document_targets=replace(batch.documents, reference=REFERENCE))
    decoder.zero_grad()
    value = decoder(with_reference, PairObjective(with_reference, count, None, choice)).value
    value.backward()
    loss, gradients = exact(decoder, options)
    assert value.item() == pytest.approx(
        loss.item(), rel=2e-6 if options["name"] == "ipo" else 5e-7
    )
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in decoder.named_parameters():
        error = (parameter.grad.double() - gradients[name]).abs().max()
        assert error < 2e-6 * largest, name


def test_a_loss_scale_does_not_change_what_pairs_teach(ledger):
    words = [*PAIRS, "objective=simpo batch.micro_rows=2"]
    fp16 = "precision.param_dtype=float16 precision.loss_scale=1024"
    exact, run = ledger.run(words=words), ledger.run(words=[*words, fp16])
    assert run["loss_scale"] == [1024.0] * 3
    assert_near(run, exact, "loss", "reward_margin", "log_probability_chosen", rel=5e-3, abs=2e-3)
    assert_near(run, exact, grad_norm=2e-2)


COMPUTED = "the reference reads"


@pytest.fixture
def keys(tmp_path):
    """Words of runs with data and a cache of their own."""
    own = f"data.path={write_pairs(tmp_path / 'pairs.jsonl')} data.cache={tmp_path / 'cache'}"
    return [*PAIRS, own, "checkpoint.keep=9"]


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


def test_the_first_model_is_the_reference_of_whole_weights_also_after_a_resume(
    train, keys, tmp_path
):
    keys = [*keys, "objective=ipo checkpoint.every=2"]
    run = train("whole", *keys)
    assert run["loss"][0] == 25.0, "1 / (2 · beta), squared: both models are equal"
    assert run["reward_chosen"][0] == 0
    assert COMPUTED in run.out
    again = train("again", *keys, "train.steps=2")
    assert COMPUTED not in again.out, "it is stored"
    for file in numbers(tmp_path / "cache"):
        flip_bit(file)
    again = train("again", *keys)
    assert COMPUTED in again.out
    assert_columns(again, run, "loss", "reward_margin")


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


def test_a_new_run_reads_its_first_weights_once(train, tmp_path):
    folder, file = make_folder(tmp_path / "hf"), tmp_path / "read"
    pairs = f"data.path={write_pairs(tmp_path / 'pairs.jsonl')}"
    how = [*HF, *PAIRS, pairs, f"model.init_from={folder} objective=dpo train.steps=1"]
    run = train("run", *how, base=[], seam=bytes_read(), env={"READ": str(file)})
    assert COMPUTED in run.out
    assert int(file.read_text()) == sum(t.nbytes for t in tensors(folder).values())
    assert run["loss"] == pytest.approx([math.log(2)], abs=1e-6)


def test_another_run_can_be_the_reference_and_may_not_change(ledger, train, keys, tmp_path):
    folder = ledger.copy("plain", tmp_path / "first").folder

    def words(place):
        starts = f"objective.reference={place} model.init_from={place}"
        return [*keys, "objective=ipo adapter=dora", starts]

    run = train("run", *words(folder), "train.steps=1")
    assert run["loss"][0] == 25.0
    moved = shutil.copytree(folder, tmp_path / "moved")
    newer = ledger.run("long").folder / "checkpoints"
    shutil.copytree(newer, folder / "checkpoints", dirs_exist_ok=True)
    train("run", *words(folder), "train.steps=2")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    train("other", *words(moved), "train.steps=3")
    said = train("other", *words(folder), "train.steps=4", code=2).err
    assert "the reference is another one" in said, "although its values are stored"
    for file in numbers(tmp_path / "cache"):
        file.unlink()
    said = train("run", *words(folder), "train.steps=3", code=2).err
    assert "the reference is another one" in said


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
    watch, observer = ChosenWatch(has_reference), Mock()
    for step in range(1, 60):
        up = step if step < 25 else -20 * step
        figures = {
            "reward_chosen": up,
            "log_probability_chosen": up - 100.0,
            "answer_tokens_chosen": 10.0,
        }
        watch.review([report(step)], [figures], observer)
    [event], [line] = observer.event.call_args_list, observer.say.call_args_list
    assert event.args == ("chosen_less_likely",)
    assert "objective.sft_weight=0.1" in line.args[0]
