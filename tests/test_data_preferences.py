"""Preference pairs are read in their usual forms, checked, and shown; what trains says that it does
not learn from them."""

import json
import os

import pytest

from fsdp_trainer.data.conversations import make_reader
from fsdp_trainer.data.preferences import read_preference
from fsdp_trainer.data.sources import Row, RowError
from fsdp_trainer.errors import UserError

Q, A, B = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
HUMAN = {"from": "human", "value": "q"}
HH = "\n\nHuman: q\n\nAssistant: "


def read(columns):
    return read_preference(
        Row(columns, ("f", 1)), make_reader(columns, "auto", None, "f", pairs=True)
    )


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
    ("columns", "why"),
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
def test_a_pair_that_is_none_is_an_error_of_the_row(columns, why):
    with pytest.raises(RowError, match=why):
        read(columns)


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "good\x1b[2J", "rejected": "bad"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


def test_preview_shows_and_checks_pairs_and_train_says_what_to_use(world, pairs, tmp_path):
    given = [
        f"data.path={pairs}",
        "tokenizer.path=demo:bytes",
        f"run.root={tmp_path}",
        "run.name=r",
    ]
    (told,) = world.command("preview", *given, "preview.rows=1")
    assert "3 preference pairs" in told.out
    assert "chosen    assistant: good" in told.out
    assert "q1" not in told.out
    assert "\x1b" not in told.out
    assert (
        "pairs are shown in the terminal only"
        in world.command("preview", *given, f"preview.html={tmp_path}/p.html", code=2)[0].err
    )
    (refused,) = world.command("train", *given, "train.steps=1", code=2)
    assert "data.fields={prompt: prompt, completion: chosen}" in refused.err
    with open(pairs, "a") as file:
        file.write('{"prompt": "q", "chosen": "a", "rejected": "a"}\n')
    (broken,) = world.command("preview", *given, code=2)
    assert "pairs.jsonl:4" in broken.err
    assert "the same" in broken.err
    (skipped,) = world.command("preview", *given, "data.on_error=skip")
    assert "3 preference pairs" in skipped.out
    assert "skipped 1" in skipped.out


def test_the_better_answers_can_be_trained_on(train, pairs):
    assert train(
        "run",
        f"data.path={pairs}",
        "data.fields={prompt: prompt, completion: chosen}",
        "train.steps=1",
    ).metrics


def test_pairs_have_no_rows_of_training(world, pairs):
    given = [
        f"data.path={pairs}",
        "tokenizer.path=demo:bytes",
        f"data.cache={pairs.parent / 'cache'}",
        "preview.format=json",
    ]
    (told,) = world.command("preview", *given, code=2)
    assert "preference pairs" in told.err
    assert not told.out
    (told,) = world.command(
        "preview", *given[:-1], f"preview.html={pairs.parent / 'page.html'}", code=2
    )
    assert "in the terminal only" in told.err
    assert not (pairs.parent / "page.html").exists()


def test_a_file_for_another_objective_is_named(tmp_path):
    sides = {"chosen": "a", "rejected": "b"}
    for prompt, advised in (
        ({"prompt": "q"}, "prompt: prompt, c"),
        ({"conversations": [HUMAN]}, "prompt: conversations, c"),
        ({}, "messages: c"),
    ):
        with pytest.raises(UserError, match="preference pairs") as raised:
            make_reader(prompt | sides, "auto", None, os.fspath(tmp_path))
        assert f"'data.fields={{{advised}" in str(raised.value)
