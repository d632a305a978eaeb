"""Tokenized once, whole or not at all, and again when anything that matters has changed."""

import inject
import numpy as np
import pytest
import yaml
from folders import table
from refused import refusal, refused
from texts import BYTES

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.data_statistics import all_findings
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.prepared_data import tokenizer_path
from fsdp_trainer.data.records.preference_records import PAIRS, UNPAIRED


def texts(part):
    return [BYTES.decode(part.read(i)[0].tolist()) for i in range(len(part))]


@pytest.fixture
def chats(jsonl):
    """Return `chats("a.jsonl", 5, start=3)`, which writes chats 3 to 7."""
    return lambda name, n, start=0: jsonl(
        *({"prompt": f"q{i}", "completion": f"a{i}"} for i in range(start, start + n)), name=name
    )


def test_the_same_data_is_tokenized_once_and_a_change_is_noticed(tmp_path, prepared, chats):
    a = chats("a.jsonl", 30)
    held_out = {"validation": str(chats("b.jsonl", 10, start=30))}
    first, both = prepared(a), prepared(a, **held_out)
    with inject.fails("prepare", AssertionError("made again")):
        for same in (
            prepared(a),
            prepared(chats("copy.jsonl", 30)),
            prepared(a, shuffle=False, packing="none"),
        ):
            assert same.fingerprint == first.fingerprint
        again = prepared(a, **held_out)
    assert (again.fingerprint, again.report) == (both.fingerprint, both.report)
    assert again.train[0].fingerprint == first.train[0].fingerprint != again.validation.fingerprint
    assert np.array_equal(again.train[0].tokens, both.train[0].tokens)
    assert len(again.validation) == 10
    assert not [p for p in (tmp_path / "c").iterdir() if p.name.startswith(".")]
    changed = [
        prepared(a, seq_len=32),
        prepared(a, template="chatml", loss_on="last"),
        prepared(a, template="plain"),
        prepared(a, validation=0.5),
    ]
    chats("a.jsonl", 31)
    changed.append(prepared(a))
    assert len({p.train[0].folder for p in [first, *changed]}) == 6


def test_a_validation_share_depends_on_content_and_not_on_order(chats, prepared):
    path = chats("a.jsonl", 200)
    part = prepared(path, validation=0.2)
    assert 20 < len(part.validation) < 60
    assert len(part.train[0]) + len(part.validation) == 200
    path.write_text("\n".join(reversed(path.read_text().splitlines())))
    turned = prepared(path, validation=0.2)
    assert sorted(texts(turned.validation)) == sorted(texts(part.validation))
    larger = "none of 200 samples is in it. Use a larger one:  data.validation=0.05"
    assert larger in refusal(lambda: prepared(path, validation=1e-9))


def test_samples_keep_their_order_over_files_and_chunks(chats, prepared, enter):
    enter(inject.setting("tokenize_chunk", 7))
    files = [chats("b.jsonl", 10), chats("a.jsonl", 10, start=10)]
    answers = [text.split("a")[-1].strip() for text in texts(prepared(*files).train[0])]
    assert answers == [str(i) for i in range(20)]


@pytest.mark.parametrize(
    "content, options, named",
    yaml.safe_load("""
- [[{messages: [{role: user, content: q}]}], {}, data.path=]
- [[{text: a}], {validation: 1.0e-09}, data.validation=]
- [[], {on_error: skip}, data.path=]
"""),
)
def test_data_that_cannot_be_learnt_is_refused_by_name(
    tmp_path, jsonl, prepared, content, options, named
):
    assert named in refused(prepared, jsonl(*content), **options).problems[0].what
    assert not list((tmp_path / "c").glob(".*"))


def test_the_tokenizer_is_found_with_the_weights(tmp_path):
    cfg = TrainConfig()
    assert "tokenizer.path" in refusal(tokenizer_path, cfg.tokenizer, cfg.model.init_from)
    for step in ("step-00000009", "step-00000010", "step-00000011"):
        (tmp_path / "run/checkpoints" / step / "hf").mkdir(parents=True)
        if step != "step-00000011":  # that one was never committed
            (tmp_path / "run/checkpoints" / step / "MANIFEST.json").touch()
    for source, expected in {
        "run": "run/checkpoints/step-00000010/hf",
        "run/checkpoints/step-00000009": "run/checkpoints/step-00000009/hf",
        "": "",
    }.items():
        cfg.model.init_from = str(tmp_path / source)
        assert tokenizer_path(cfg.tokenizer, cfg.model.init_from) == str(tmp_path / expected)


def test_the_demo_is_held_out():
    train, heldout = (
        {row["messages"][0]["content"] for row in quickstart_data.rows(name)}
        for name in quickstart_data.BACKWARDS
    )
    assert (len(train), len(heldout), len(train & heldout)) == (4000, 200, 0)
    first = quickstart_data.rows("demo:backwards")[0]["messages"][0]
    assert first["content"] == f"Spell {quickstart_data.words()[0]} backwards."


OVERLAPS = table("data/overlaps.yaml")


@pytest.fixture
def overlapping(tmp_path, jsonl, monkeypatch):
    """Write a folder with a.jsonl and b.jsonl, beside it a copy of b and a file with a row of b."""
    (tmp_path / "d").mkdir()
    rows = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(12)]
    for name, some in (
        ("d/a.jsonl", rows[:4]), ("d/b.jsonl", rows[4:8]), ("copy.jsonl", rows[4:8]),
        ("c.jsonl", rows[7:]),
    ):  # fmt: skip
        jsonl(*some, name=name)
    (tmp_path / "link.jsonl").symlink_to("d/a.jsonl")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("kind", [PAIRS, UNPAIRED])
def test_validation_data_that_is_trained_on_is_counted(overlapping, how, name, kind, tmp_path):
    paths, validation, count = OVERLAPS[name]
    data = prepare(*how(tmp_path / "c", *paths, validation=validation), kind)
    texts = [one.text for one in all_findings(data, 512) if "data.validation" in one.text]
    count *= 1 if kind == PAIRS else 2
    expected = f"{count} sample{'s' * (count != 1)} of data.validation"
    assert [text.startswith(expected) for text in texts] == [True] * bool(count)


@pytest.mark.parametrize("validation, count", [("copy", 4), ("c", 1), ("other", 0)])
def test_validation_data_that_is_streamed_is_counted(
    overlapping, preview, jsonl, validation, count
):
    jsonl({"prompt": "q", "chosen": "n"}, name="other.jsonl")
    words = ["data.path=d", "data.streaming=true", "batch.rows=4", "batch.seq_len=64"]
    words += ["data.fields={prompt: prompt, completion: chosen}"]
    shown = preview(*words, f"data.validation={validation}.jsonl")
    text = f"{count} sample{'s' * (count != 1)} of data.validation"
    assert (text in shown) == bool(count)
