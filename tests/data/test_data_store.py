"""Tokenized once, whole or not at all, and again when anything that matters has changed."""

import json

import inject
import numpy as np
import pytest

from fsdp_trainer.config.schema import Batch, Data, TrainConfig
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.prepared_data import build_data, tokenizer_path
from fsdp_trainer.data.store import token_cache as preparing
from fsdp_trainer.data.store.token_cache import prepare
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError


def chats(path, n, start=0):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": f"a{i}"},
            ]
        }
        for i in range(start, start + n)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def prepared(root, seq_len=64, template=None, **data):
    tokenizer = load_tokenizer("demo:bytes")
    return prepare(
        Data(**data), Batch(seq_len=seq_len), tokenizer, load_template(template, tokenizer), root
    )


def texts(part):
    tokenizer = load_tokenizer("demo:bytes")
    return [tokenizer.decode(part.read(i)[0].tolist()) for i in range(len(part))]


@pytest.mark.slow
def test_another_rank_opens_what_one_has_prepared(tmp_path):
    one = prepared(tmp_path, path="demo:backwards", validation="demo:backwards/heldout")
    other = prepared(tmp_path, path="demo:backwards", validation="demo:backwards/heldout")
    assert (other.fingerprint, other.train[0].fingerprint, other.report) == (
        one.fingerprint,
        one.train[0].fingerprint,
        one.report,
    )
    assert len(other.train[0]) == 4000
    assert len(other.validation) == 200
    assert np.array_equal(other.train[0].tokens, one.train[0].tokens)
    assert other.train[0].fingerprint != other.validation.fingerprint
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.slow
def test_the_same_data_is_tokenized_once_and_a_change_is_noticed(tmp_path, monkeypatch):
    a = chats(tmp_path / "a.jsonl", 30)
    base = {"path": a}
    first = prepared(tmp_path / "c", **base)
    chats(tmp_path / "copy.jsonl", 30)
    with monkeypatch.context() as m:
        m.setattr(preparing.ComponentStores, "_make", None)
        assert prepared(tmp_path / "c", **base).fingerprint == first.fingerprint
        assert (
            prepared(tmp_path / "c", path=str(tmp_path / "copy.jsonl")).fingerprint
            == first.fingerprint
        )
        assert (
            prepared(tmp_path / "c", **base, shuffle=False, packing="none").fingerprint
            == first.fingerprint
        )
    changed = [
        prepared(tmp_path / "c", seq_len=32, **base),
        prepared(tmp_path / "c", template="chatml", loss_on="last", **base),
        prepared(tmp_path / "c", template="plain", **base),
        prepared(tmp_path / "c", validation=0.5, **base),
    ]  # fmt: skip
    chats(tmp_path / "a.jsonl", 31)
    changed.append(prepared(tmp_path / "c", **base))
    assert len({p.train[0].folder for p in [first, *changed]}) == 6


@pytest.mark.slow
def test_a_validation_share_depends_on_content_and_not_on_order(tmp_path):
    path = tmp_path / "a.jsonl"
    chats(path, 200)
    part = prepared(tmp_path / "c", path=str(path), validation=0.2)
    assert 20 < len(part.validation) < 60
    assert len(part.train[0]) + len(part.validation) == 200
    path.write_text("\n".join(reversed(path.read_text().splitlines())))
    turned = prepared(tmp_path / "c", path=str(path), validation=0.2)
    assert sorted(texts(turned.validation)) == sorted(texts(part.validation))


def test_samples_keep_their_order_over_files_and_chunks(tmp_path, enter):
    enter(inject.setting("tokenize_chunk", 7))
    paths = [chats(tmp_path / "b.jsonl", 10), chats(tmp_path / "a.jsonl", 10, start=10)]
    part = prepared(tmp_path / "c", path=paths)
    assert [t.split("a")[-1].strip() for t in texts(part.train[0])] == [str(i) for i in range(20)]


def test_what_is_left_out_is_reported(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": "x" * n}) for n in (3, 100, 0, 5))
    )
    part = prepared(tmp_path / "c", path=str(tmp_path / "a.jsonl"))
    assert "4 rows, text" in part.report[0]
    assert part.train[0].counts == {"too_long": 1, "empty": 1, "fits_112": 1, "lost_tokens": 101}
    assert part.train[0].examples == {
        "too_long": [f"{tmp_path}/a.jsonl:2"],
        "empty": [f"{tmp_path}/a.jsonl:3"],
    }


@pytest.mark.parametrize(
    ("content", "options", "named"),
    [
        ('{"messages": [{"role": "user", "content": "q"}]}', {}, "data.path="),
        ('{"text": "a"}', {"validation": 1e-9}, "data.validation="),
        ('{"question": "q", "answer": "a"}', {"too_long": "split"}, "data.too_long=split"),
        ("", {}, "a.jsonl:1"),
        ('{"text": "fine"}\n{"text": "half \\ud83d"}', {}, "a.jsonl:2"),
        ("", {"on_error": "skip"}, "data.path="),
    ],
)
def test_data_that_cannot_be_learnt_is_refused_by_name(tmp_path, content, options, named):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError) as raised:
        prepared(tmp_path / "c", path=str(tmp_path / "a.jsonl"), **options)
    assert named in raised.value.problems[0].what
    assert not list((tmp_path / "c").glob(".*"))


def test_the_tokenizer_is_found_with_the_weights(tmp_path):
    cfg = TrainConfig()
    with pytest.raises(UserError, match=r"tokenizer\.path"):
        tokenizer_path(cfg.tokenizer, cfg.model.init_from)
    for step in ("step-00000009", "step-00000010", "step-00000011"):
        (tmp_path / "run" / "checkpoints" / step / "hf").mkdir(parents=True)
        if step != "step-00000011":  # that one was never committed
            (tmp_path / "run" / "checkpoints" / step / "MANIFEST.json").touch()
    for source, expected in {
        "run": "run/checkpoints/step-00000010/hf",
        "run/checkpoints/step-00000009": "run/checkpoints/step-00000009/hf",
        "": "",
    }.items():
        cfg.model.init_from = str(tmp_path / source)
        assert tokenizer_path(cfg.tokenizer, cfg.model.init_from) == str(tmp_path / expected)


@pytest.mark.slow
def test_the_demo_is_learnable_and_held_out(tmp_path):
    train, heldout = (
        {row["messages"][0]["content"] for row in quickstart_data.rows(name)}
        for name in quickstart_data.BACKWARDS
    )
    assert (len(train), len(heldout), len(train & heldout)) == (4000, 200, 0)
    cfg = TrainConfig()
    cfg.data.path, cfg.tokenizer.path, cfg.run.root = "demo:backwards", "demo:bytes", str(tmp_path)
    tokenizer, _, data = build_data(cfg)
    assert data.train[0].folder.parents[1] == tmp_path / ".data"
    assert tokenizer.vocab_size == 260
    assert (
        quickstart_data.rows("demo:backwards")[0]["messages"][0]["content"]
        == f"Spell {quickstart_data.words()[0]} backwards."
    )
