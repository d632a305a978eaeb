"""Preference pairs are read in their usual forms, checked, stored as two documents of one group,
and shown; what learns from single answers refuses them."""

import json
import re
from functools import partial

import pytest
from folders import table
from refused import refusal
from texts import BYTES, read_row, samples_of, supervised_texts, turn

from fsdp_trainer.data.files.sources import RecordError

CASES = table("data/preference_rows.yaml")

Q, A, B = turn("user", "q"), turn("assistant", "a"), turn("assistant", "b")
TURNS = {"Q": Q, "A": A, "B": B, "OTHER": turn("user", "other")}


def columns_of(row):
    """Return the columns of a row of JSON, in which Q, A, B and OTHER are turns."""
    return json.loads(re.sub(r"\b(Q|A|B|OTHER)\b", lambda name: json.dumps(TURNS[name[0]]), row))


read = partial(read_row, kind="pairs")
PAIRS = CASES["pairs"]
"""Rows, and their prompts."""


@pytest.mark.parametrize("row", PAIRS)
def test_pairs_are_read_in_every_form(row):
    pair = read(columns_of(row))
    assert (pair.prompt, pair.chosen, pair.rejected) == (PAIRS[row], [A], [B])


WRONG = CASES["wrong"]


@pytest.mark.parametrize("row", WRONG)
def test_a_pair_that_is_none_is_an_error_of_the_row(row):
    with pytest.raises(RecordError, match=WRONG[row]):
        read(columns_of(row))


@pytest.fixture
def pairs():
    return [{"prompt": f"q{i}", "chosen": "good", "rejected": "bad"} for i in range(3)]


def test_preview_shows_what_is_learnt_of_pairs(jsonl, preview, pairs):
    path = f"data.path={jsonl(*pairs)}"
    shown = preview(path, "batch.seq_len=128", "preview.rows=1")
    assert "chosen 5.0 tokens on average, rejected 4.0" in shown
    for text in ("3 rows, preference", "filled", "(chosen)", "(rejected)"):
        assert text in shown
    row = json.loads(preview(path, "data.packing=none", "preview.rows=1", "preview.format=json"))
    assert len(row["documents"]) == 2
    assert sum(label != -100 for label in row["labels"]) == 9
    jsonl(*pairs, {"prompt": "q", "chosen": "a", "rejected": "a"})
    broken = preview(path, code=2)
    assert "a.jsonl:4" in broken
    assert "the same" in broken
    assert "1 row skipped" in preview(path, "data.on_error=skip")


def test_train_says_what_learns_from_pairs(jsonl, preview, pairs, program, tmp_path):
    words = [f"data.path={jsonl(*pairs)}", "batch.seq_len=128", f"data.cache={tmp_path}/cache"]
    run = ["tokenizer.path=demo:bytes", f"run.root={tmp_path}", "run.name=r", "train.steps=1"]
    for _ in range(2):  # also where the cache has the pairs
        refused = program("train", *words, *run, code=2)
        assert "data.fields={prompt: prompt, completion: chosen}" in refused
        assert "objective=dpo" in refused
        preview(*words, "preview.rows=1")


def test_a_pair_is_two_samples_of_one_group_whose_answers_alone_are_learnt():
    pair = read({"prompt": [Q, A, Q], "chosen": "yes", "rejected": "no, not at all"})
    (chosen, rejected), _ = samples_of(BYTES, pair)
    assert chosen.starts_group
    assert not rejected.starts_group
    assert supervised_texts(BYTES, chosen) == ["yes<|im_end|>"]
    assert supervised_texts(BYTES, rejected) == ["no, not at all<|im_end|>"]
    both = len(chosen.tokens) + len(rejected.tokens)
    assert len(samples_of(BYTES, pair, seq_len=both)[0]) == 2
    none, builder = samples_of(BYTES, pair, seq_len=both - 1)
    assert none == [], "a pair that no row holds is dropped whole"
    assert builder.counts["too_long"] == 1
    assert builder.counts["lost_tokens"] == both


def test_pairs_with_an_answer_in_common_are_no_duplicates(jsonl, prepared):
    rows = [{"prompt": "q", "chosen": "a", "rejected": other} for other in "bcb"]
    (store,) = prepared(jsonl(*rows)).train
    assert (len(store), store.groups, store.counts["duplicate"]) == (6, 3, 1)


def test_a_file_for_another_objective_is_named_and_its_better_answers_can_be_trained_on():
    single, answers = partial(read_row, kind="single"), {"chosen": "a", "rejected": "b"}
    for row, advised in {
        '{"prompt": "q"}': "{prompt: prompt, completion: chosen}",
        '{"conversations": [{"from": "human", "value": "q"}]}': "{prompt: conversations, c",
        "{}": "{messages: c",
    }.items():
        said = refusal(single, columns_of(row) | answers)
        assert "preference pairs" in said
        assert f"'data.fields={advised}" in said
    better = {"prompt": "prompt", "completion": "chosen"}
    assert single({"prompt": "q"} | answers, fields=better).messages == [Q, A]
