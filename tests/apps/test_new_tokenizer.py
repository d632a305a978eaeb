"""The verb `tokenizer`: a new tokenizer from any data, for training and for transformers."""

import gzip
import json
import random

import pytest
from texts import CHAT, samples_of, supervised_texts, turn
from world import read_lines, write_lines

from fsdp_trainer.apps.tokenizers.texts import LONGEST, Corpus, CorpusPart
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.sources import find_sources
from fsdp_trainer.data.records.conversations import Conversation
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.templates.chat_template import BUILT_IN
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template

WORDS = "the small fox saw seven red houses beside a river and 1984 boats, naïvely: Ωμέγα 東京 🙂"


def sentence(draw, count=12):
    """Words of two to four syllables, and some of WORDS."""
    syllables = ("ba", "lo", "nis", "tra", "mé", "quo", "rin", "de", "us")
    words = ["".join(draw.choices(syllables, k=draw.randrange(2, 5))) for _ in range(count)]
    return " ".join([*words, *draw.choices(WORDS.split(), k=2)]) + ".\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with texts and chats."""
    folder = tmp_path_factory.mktemp("data")
    words = random.Random(0)
    rows = [{"text": sentence(words)} for _ in range(200)]
    write_lines(folder / "texts.jsonl", rows)
    turns = [turn(role, sentence(words)) for role in ("user", "assistant")]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return folder


@pytest.fixture
def new(data, tmp_path, program):
    """`new("name", *overrides)`: the folder of a tokenizer from the texts, and what was printed."""

    def train(name, *overrides):
        folder = tmp_path / "new" / name
        usual = {"data.path": data, "run.root": tmp_path / "runs", "vocab_size": 400}
        given = dict(word.split("=", 1) for word in overrides)
        words = [f"{key}={value}" for key, value in (usual | given).items()]
        return folder, program("tokenizer", f"out={folder}", *words)

    return train


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_any_text_comes_back_and_the_masks_of_conversations_cover_the_answers(new, kind):
    size = {"bpe": 400, "sentencepiece": 450}[kind]
    folder, _ = new(kind, f"kind={kind}", f"vocab_size={size}")
    tokenizer = load_tokenizer(str(folder))
    draw = random.Random(1)
    for _ in range(50):
        text = draw.randbytes(draw.randrange(1, 60)).decode("utf-8", "replace")
        text += "".join(chr(draw.randrange(0x20, 0xD800)) for _ in range(9)).replace("\u2581", "")
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(tokenizer.backend.get_vocab()) == size
    template = load_template(None, tokenizer)
    [sample], _ = samples_of(tokenizer, Conversation(CHAT, None, ("f", 1)), template)
    assert supervised_texts(tokenizer, sample) == ["Hello!<|im_end|>", "4<|im_end|>"]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.special_tokens["<|im_end|>"] in tokenizer.stop_ids


def test_transformers_gives_the_same_tokens_for_every_template(new):
    transformers = pytest.importorskip("transformers")
    texts = [WORDS, " two  spaces\n\n\tand tabs ", "", "a<|im_end|>b", "12345 don't\r\n"]
    words = {name: [f"data.template={name}"] for name in BUILT_IN}
    words["sp"] = ["kind=sentencepiece", "vocab_size=450", "data.template=llama3"]
    for name, overrides in words.items():
        folder, _ = new(f"of-{name}", *overrides)
        ours = load_tokenizer(str(folder))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in texts:
            ids = ours.encode(text)
            assert theirs.encode(text, add_special_tokens=False) == ids, (name, text)
            assert theirs.decode(ids) == ours.decode(ids, skip_special=False)
            framed = [ours.bos_id, *ids] if ours.bos_id is not None else ids
            assert theirs.encode(text) == framed
        assert (theirs.eos_token, theirs.pad_token) == (ours.eos_token, ours.special["pad_token"])
        chat = CHAT[1:]  # some templates have no place for a system turn
        rendered = theirs.apply_chat_template(chat, tokenize=False)
        assert rendered == load_template(None, ours).render(chat)
        encoded = theirs.apply_chat_template(chat, return_dict=False)
        assert encoded == ours.encode(rendered)


def test_the_same_text_gives_the_same_tokenizer_whatever_holds_it(new, data, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = read_lines(data / "texts.jsonl")
    first, _ = new("first", "data.validation=0.02", f"data.path={data}/texts.jsonl")
    (tmp_path / "texts.jsonl.gz").write_bytes(gzip.compress((data / "texts.jsonl").read_bytes()))
    table = pyarrow.Table.from_pylist([{"body": line["text"]} for line in lines[::-1]])
    parquet.write_table(table, tmp_path / "texts.parquet", row_group_size=50)
    for name, (place, *words) in {
        "gz": ["texts.jsonl.gz"],
        "parquet": ["texts.parquet", "data.fields={text: body}"],
        "stream": ["texts.jsonl.gz", "data.streaming=true"],
    }.items():
        scheme = "file://" if name == "stream" else ""
        words += ["data.validation=0.02", f"data.path={scheme}{tmp_path}/{place}"]
        folder, _ = new(name, *words)
        assert (folder / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_bytes_per_token_are_those_of_held_out_text(new, tmp_path):
    text = sentence(random.Random(5), 300)
    (tmp_path / "held.txt").write_text(text)
    other, _ = new("other")
    compared = [f"compare=[{other},demo:bytes]", f"data.validation={tmp_path}/held.txt"]
    folder, printed = new("measured", "vocab_size=500", "format=json", *compared)
    said = json.loads(printed)
    names = [one["tokenizer"] for one in said["tokenizers"]]
    assert names == [str(folder), str(other), "demo:bytes"]
    size = len(text.rstrip("\n").encode())
    assert said["text"]["held_out"] == size
    for one in said["tokenizers"]:
        tokens = len(load_tokenizer(one["tokenizer"]).encode(text.rstrip("\n")))
        assert one["tokens"] == tokens
        assert one["bytes_per_token"] == pytest.approx(size / tokens, abs=1e-4)
        assert one["lossless"]
    assert said["tokenizers"][2]["bytes_per_token"] == 1
    _, printed = new("table", *compared)
    assert printed.splitlines()[-1].split() == ["demo:bytes", "260", f"{size:,}", "1.000", "yes"]


def test_rows_are_held_out_as_in_training_and_those_that_cannot_be_read_left_out(
    new, data, tmp_path, program
):
    (tmp_path / "bad.jsonl").write_text('{"text": 7}\n' * 30)
    words = [
        f"data.path=[{data}/texts.jsonl,{tmp_path}/bad.jsonl]", "data.validation=0.1",
        "data.on_error=skip",
    ]  # fmt: skip
    folder, printed = new("share", "format=json", *words)
    held_out = json.loads(printed)["text"]["held_out"]
    more = [f"tokenizer.path={folder}", "model=tiny", f"data.cache={tmp_path}", "data=pretrain"]
    program("prepare", *words, *more)
    [store] = tmp_path.glob("*/validation")
    text = load_tokenizer(str(folder)).decode(TokenStore(store, "").tokens.tolist())
    assert len(text.encode()) == held_out
    assert "skipped  30 rows" in new("skipping", *words)[1]


def test_a_limit_takes_text_from_all_files(tmp_path, new):
    for letter in "ab":
        line = json.dumps({"text": (letter * 7 + " ") * 40_000})
        (tmp_path / f"{letter}.jsonl").write_text(f"{line}\n" * 10)
    words = ["max_gib=0.004", "format=json", f"data.path={tmp_path}/*.jsonl"]
    folder, printed = new("limited", *words)
    read = json.loads(printed)["text"]["bytes"]
    assert 0 <= read - int(0.004 * 2**30) <= LONGEST
    assert len(load_tokenizer(str(folder)).encode("aaaaaaa bbbbbbb")) < 5


def shares(path):
    """Bytes that a corpus gives of letters a, b and c."""
    corpus = Corpus(Data(path=path), 0.0, 0)
    parts = [
        CorpusPart([source], entry.get("weight"), entry.get("repeat", 1.0))
        for source, entry in zip(find_sources(path, "data.path"), path, strict=True)
    ]
    text = "".join(corpus.pieces(parts, 10**9))
    return [text.count(letter) for letter in "abc"]


def test_a_mixture_is_read_by_its_weights_or_repeats(tmp_path):
    sizes = {"a": 400_000, "b": 100_000, "c": 50_000}
    for letter, size in sizes.items():
        (tmp_path / f"{letter}.txt").write_text(f"{letter * 99}\n" * (size // 100))
    paths = [{"path": str(tmp_path / f"{letter}.txt")} for letter in sizes]
    weighted = [path | {"weight": weight} for path, weight in zip(paths, (5, 3, 2), strict=True)]
    a, b, c = shares(weighted)
    assert a >= 0.99 * sizes["a"]
    assert b / a == pytest.approx(0.6, rel=0.02)
    assert c / a == pytest.approx(0.4, rel=0.02)
    repeated = [path | {"repeat": times} for path, times in zip(paths, (0.5, 2, 0), strict=True)]
    a, b, c = shares(repeated)
    assert (b, c) == (2 * 99 * 1000, 0)
    assert a in (0, 99 * 4000)  # all of its rows are alike, and chosen by their content
