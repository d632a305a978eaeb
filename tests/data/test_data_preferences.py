"""Preference pairs are read in their usual forms, checked, stored as two documents of one group,
and shown; what learns from single answers refuses them."""

import json
import os

import pytest
from texts import supervised_texts

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.store.token_cache import prepare
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.records_to_samples import choose_reader
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

BYTES = load_tokenizer("demo:bytes")
CHATML = load_template("chatml", BYTES)
Q, A, B = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
HUMAN = {"from": "human", "value": "q"}
HH = "\n\nHuman: q\n\nAssistant: "


def read(columns):
    return make_reader(columns, "auto", None, "f", kind="pairs").read(Record(columns, ("f", 1)))


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"question": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [Q], "chosen": [A], "rejected": [B]},
        {"prompt": [Q], "chosen": A, "rejected": B},
        {"chosen": [Q, A], "rejected": [Q, B]},
        {"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]},
        {
            "conversations": [HUMAN],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"chosen": HH + "a", "rejected": HH + "b"},
    ],
)
def test_pairs_are_read_in_every_form(columns):
    pair = read(columns)
    assert (pair.prompt, pair.chosen, pair.rejected) == ([Q], [A], [B])


def test_an_input_and_a_system_text_belong_to_the_prompt():
    pair = read({"instruction": "q", "input": "i", "system": "s", "chosen": "a", "rejected": "b"})
    assert pair.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q\ni"}]


def test_answers_may_part_after_several_turns():
    pair = read({"prompt": [Q], "chosen": [A, Q, A], "rejected": [A, Q, B]})
    assert (pair.prompt, pair.chosen, pair.rejected) == ([Q, A, Q], [A], [B])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "the same"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": 5}, "rejected' should be text"),
        ({"chosen": "a", "rejected": "b"}, "share no prompt"),
        (
            {"chosen": [Q, A], "rejected": [{"role": "user", "content": "other"}, B]},
            "share no prompt",
        ),
        ({"prompt": "other", "chosen": [Q, A], "rejected": [Q, B]}, "the row's own prompt"),
        (
            {"chosen": [Q, A], "rejected": [Q, B, Q]},
            "rejected does not end with a turn of the assistant",
        ),
        ({"chosen": [Q, A], "rejected": [Q, A, Q, B]}, "chosen is the beginning"),
        (
            {
                "prompt": [Q],
                "chosen": [Q, A, Q, A],
                "rejected": [Q, A, {"role": "user", "content": "z"}, B],
            },
            "user's turn",
        ),
    ],
)
def test_a_pair_that_is_none_is_an_error_of_the_row(columns, reason):
    with pytest.raises(RecordError, match=reason):
        read(columns)


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": "bad"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


@pytest.mark.slow
def test_preview_shows_what_is_learnt_of_pairs(world, pairs, tmp_path):
    given = [f"data.path={pairs}", "tokenizer.path=demo:bytes", f"run.root={tmp_path}"]
    (shown,) = world.command("preview", *given, "batch.seq_len=128", "preview.rows=1")
    assert "chosen 5.0 tokens on average, rejected 4.0" in shown.out
    assert "(chosen)" in shown.out
    assert "(rejected)" in shown.out
    (rows,) = world.command(
        "preview", *given, "data.packing=none", "preview.rows=1", "preview.format=json"
    )
    row = json.loads(rows.out)
    assert len(row["documents"]) == 2
    learnt = [label for label in row["labels"] if label != -100]
    assert len(learnt) == 9
    with open(pairs, "a") as file:
        file.write('{"prompt": "q", "chosen": "a", "rejected": "a"}\n')
    (broken,) = world.command("preview", *given, code=2)
    assert "pairs.jsonl:4" in broken.err
    assert "the same" in broken.err
    (skipped,) = world.command("preview", *given, "data.on_error=skip")
    assert "1 row skipped" in skipped.out


@pytest.mark.slow
def test_train_says_what_learns_from_pairs(world, pairs, tmp_path):
    given = [f"data.path={pairs}", "tokenizer.path=demo:bytes", f"run.root={tmp_path}"]
    cached = [*given, "run.name=r", "train.steps=1", "batch.seq_len=128"]
    for _ in range(2):  # also where the cache has the pairs
        (refused,) = world.command("train", *cached, code=2)
        assert "data.fields={prompt: prompt, completion: chosen}" in refused.err
        assert "objective=dpo" in refused.err
        world.command("preview", *given, "batch.seq_len=128", "preview.rows=1")


def pair_samples(**options):
    pair = read({"prompt": [Q, A, Q], "chosen": "yes", "rejected": "no, not at all"})
    builder = SampleBuilder(
        Data(path="", **options.pop("data", {})), options.get("seq_len", 200), BYTES, CHATML
    )
    (samples,) = builder.tokenize(builder.render(pair))
    return samples, builder


def test_a_pair_is_two_samples_of_one_group_whose_answers_alone_are_learnt():
    (chosen, rejected), _ = pair_samples()
    assert chosen.starts_group
    assert not rejected.starts_group
    assert supervised_texts(BYTES, chosen) == ["yes<|im_end|>"]
    assert supervised_texts(BYTES, rejected) == ["no, not at all<|im_end|>"]


def test_a_pair_that_no_row_holds_is_dropped_whole():
    (chosen, rejected), _ = pair_samples()
    both = len(chosen.tokens) + len(rejected.tokens)
    assert len(pair_samples(seq_len=both)[0]) == 2
    none, builder = pair_samples(seq_len=both - 1)
    assert none == []
    assert builder.counts["too_long"] == 1
    assert builder.counts["lost_tokens"] == both


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ({"loss_on": "all"}, "data.loss_on=assistant"),
        ({"too_long": "truncate"}, "data.too_long=drop"),
        ({"too_long": "split"}, "data.too_long=drop"),
    ],
)
def test_answers_of_pairs_are_not_cut(key, use):
    columns = {"prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(UserError, match=use):
        choose_reader(Data(path="", **key), columns, "f", "auto", None, kind="pairs")


def test_pairs_with_an_answer_in_common_are_no_duplicates(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": other} for other in "bcb"]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(Data(path=str(path)), Batch(seq_len=200), BYTES, CHATML, tmp_path / "c")
    (store,) = prepared.train
    assert (len(store), store.groups, store.counts["duplicate"]) == (6, 3, 1)


@pytest.mark.slow
def test_the_better_answers_can_be_trained_on(train, pairs):
    assert train(
        "run",
        f"data.path={pairs}",
        "data.fields={prompt: prompt, completion: chosen}",
        "train.steps=1",
    ).metrics


def test_a_file_for_another_objective_is_named(tmp_path):
    sides = {"chosen": "a", "rejected": "b"}
    for prompt, advised in (
        ({"prompt": "q"}, "prompt: prompt, c"),
        ({"conversations": [HUMAN]}, "prompt: conversations, c"),
        ({}, "messages: c"),
    ):
        with pytest.raises(UserError, match="preference pairs") as raised:
            make_reader(prompt | sides, "auto", None, os.fspath(tmp_path), kind="single")
        assert f"'data.fields={{{advised}" in str(raised.value)
