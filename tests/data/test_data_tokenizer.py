"""Our tokens are those of SentencePiece and of `transformers`, and what we save loads there."""

import base64
import json
import re

import inject
import numpy as np
import pytest
import transformers
from folders import table
from refused import refusal
from texts import BYTES, SHARED, make_tokenizer, write_sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors
from world import read_json, write_json

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.tokens import byte_level_files
from fsdp_trainer.data.tokens.byte_level_files import BYTE_TEXTS
from fsdp_trainer.data.tokens.encoding import LLAMA_3
from fsdp_trainer.data.tokens.records_to_samples import TokenizeOptions
from fsdp_trainer.data.tokens.token_bytes import token_bytes
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.errors import UserError

TEXTS = [
    "Hello world",
    "two  spaces\n\nand\ttabs ",
    "细胞理论 é ü 🙂",
    "",
    "x" * 300,
    "for i in range(10):\n    print(i)",
]
SPACED = [
    *TEXTS,
    *(" one", "  two", "   three\n  x", " ", "   ", "\n a"),
    *("it's WE'LL 12345 e\u0301", "a <|im_end|> b"),
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_file(request, tmp_path_factory):
    """A model without normalisation as Llama 2's, and one with the usual one."""
    as_llama = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
    }
    path = tmp_path_factory.mktemp(request.param) / "spm.model"
    return write_sentencepiece(path, request.param, **as_llama if request.param == "bpe" else {})


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of a tokenizer, which a test changes."""
    BYTES.save(tmp_path)
    return tmp_path


def described(folder, **config):
    write_json(folder / "tokenizer_config.json", config)
    return load_tokenizer(folder)


def saved_and_compared(tokenizer, folder, texts):
    """Save a tokenizer; return it as transformers loads it, which gives the same tokens."""
    tokenizer.save(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    again = load_tokenizer(folder)
    for text, encoded in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert theirs(text, add_special_tokens=False)["input_ids"] == encoded.ids.tolist()
        assert again.encode(text) == encoded.ids.tolist()
    for name in ("bos_id", "eos_id", "vocab_size", "stop_ids"):
        assert getattr(again, name) == getattr(tokenizer, name)
    return theirs


def test_a_sentencepiece_model_gives_the_pieces_of_sentencepiece(sentencepiece_file, tmp_path):
    """A legacy tokenizer puts a space behind special tokens too."""
    spm = pytest.importorskip("sentencepiece")
    theirs = spm.SentencePieceProcessor(model_file=str(sentencepiece_file))
    bos, behind = theirs.bos_id(), theirs.encode("small  world")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    alone = load_tokenizer(sentencepiece_file)
    for legacy in (None, False, True):
        ours = alone if legacy is None else described(tmp_path, legacy=legacy)
        assert ours.vocab_size == theirs.get_piece_size()
        assert (ours.bos_id, ours.eos_id, ours.pad_id) == (bos, theirs.eos_id(), None)
        for text in [*SPACED, "   the small\n  cell"]:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert (ours.encode("<s>small  world") == [bos, *behind]) == bool(legacy)
        saved_and_compared(ours, tmp_path / str(legacy), [*TEXTS, "<s>Hello</s>world"])
    assert ours.fingerprint != alone.fingerprint  # a cache of one is none of the other
    for text in ("a<|tool|>b", "<s>Hello</s>world"):
        assert alone.decode(alone.encode(text), skip_special=False) == text
    assert alone.encode("a<|tool|>b") == theirs.encode("a<|tool|>b")


@pytest.mark.parametrize(
    "name", [pytest.param("llama2_tokenizer.model", marks=pytest.mark.slow), "bpe4k", "demo:bytes"]
)
def test_real_tokenizers_are_saved_for_transformers(name, tmp_path):
    """Llama 2 on real text, of which it gives the pieces of SentencePiece."""
    spm = pytest.importorskip("sentencepiece")
    if name != "demo:bytes" and not SHARED.is_dir():
        pytest.skip("needs real data, which is not shipped")
    path = name if name == "demo:bytes" else f"{SHARED}/{name}"
    tokenizer = load_tokenizer(path)
    first, second, *_, last = tokenizer.special_tokens
    texts = [*TEXTS, f"a{first} b{last}c {second}"]
    if path.endswith(".model"):
        for file, count in (("alpaca_zh_demo", 60), ("glaive_toolcall_en_demo", 40)):
            rows = read_json(SHARED / f"{file}.json")[:count]
            texts += [json.dumps(row, ensure_ascii=False) for row in rows]
        real = [encoding.ids.tolist() for encoding in tokenizer.encode_batch(texts[-100:])]
        assert real == spm.SentencePieceProcessor(model_file=path).encode(texts[-100:])
    theirs = saved_and_compared(tokenizer, tmp_path, texts)
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.chat_template == tokenizer.chat_template


def test_stored_truncation_and_offset_trimming_are_undone(folder):
    stored = Tokenizer.from_file(f"{folder}/tokenizer.json")
    stored.enable_truncation(2)
    stored.post_processor = processors.ByteLevel(trim_offsets=True)
    stored.save(f"{folder}/tokenizer.json")
    (encoding,) = load_tokenizer(folder).encode_batch(["é b<|im_end|>x"])
    assert encoding.starts.tolist() == [0, 0, 1, 2, 3, 13]
    assert encoding.ends.tolist() == [1, 1, 2, 3, 13, 14]


def test_special_tokens_and_templates_are_read_in_every_spelling(folder):
    (folder / "chat_template.jinja").unlink()
    write_json(folder / "special_tokens_map.json", {"bos_token": "<|im_start|>"})
    write_json(folder / "generation_config.json", {"eos_token_id": [256, 7]})
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    end = {"content": "<|im_end|>"}
    tokenizer = described(folder, eos_token=end, bos_token=None, chat_template=listed)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_id is None
    assert tokenizer.chat_template == "D"
    assert tokenizer.stop_ids == {256, 258, 7}


def token(text, **flags):
    return {"content": text, "special": True} | flags


WRONG = table("data/tokenizer_files.yaml")


@pytest.mark.parametrize(
    "name, content, says", [(name, *case) for name in WRONG for case in WRONG[name]]
)
def test_a_description_that_cannot_be_followed_is_refused(folder, name, content, says):
    write_json(folder / name, content)
    with pytest.raises(UserError, match=re.escape(says)):
        load_tokenizer(folder)


def test_new_tokens_in_a_vocabulary_with_gaps_take_no_others_id(tmp_path):
    gaps = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 2}}
    write_json(tmp_path / "tokenizer.json", {"model": gaps})
    for config, added in (({"eos_token": "<e>"}, []), ({}, ["<e>"])):
        write_json(tmp_path / "tokenizer_config.json", config)
        assert "'<e>' would get the id 2, which is that of 'b'" in refusal(
            load_tokenizer, str(tmp_path), added
        )


def test_what_a_description_says_and_is_not_used_is_noted(folder):
    end = token("<|im_end|>")
    write_json(folder / "special_tokens_map.json", {"sep_token": "<|im_end|>"})
    notes = described(folder, added_tokens_decoder={"259": end}, eos_token="<|im_end|>").notes
    assert "added_tokens_decoder gives '<|im_end|>' the id 259, tokenizer.json 258" in notes[1]
    assert "so that its sep_token is not used" in notes[0]
    assert not described(folder, added_tokens_decoder={"258": end}, sep_token="<|im_end|>").notes


def test_a_class_that_cuts_texts_in_another_way_than_the_file_is_noted(tmp_path):
    byte_level(r"\p{L}|[^\p{L}]+").backend.save(f"{tmp_path}/tokenizer.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for kind in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
        ours = described(tmp_path, tokenizer_class=kind, eos_token="<|end|>")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        same = theirs("a  b\n\nc")["input_ids"] == ours.encode("a  b\n\nc")
        assert same == (not ours.notes)
        assert same == (kind != "GPT2Tokenizer")
        # the export's class is one that cuts them as in training
        saved_and_compared(ours, tmp_path / kind, ["a  b\n\nc"])
    assert not ours.notes_with("llama")
    assert "Qwen2Tokenizer" in ours.notes_with("qwen2")[0]  # a model of this type has no other
    # whose <|endoftext|> is none of this tokenizer: a model would get a row that its folder lacks
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert described(tmp_path, eos_token="<|end|>").vocab_size == ours.vocab_size


def test_texts_are_cut_as_mistrals_if_the_description_asks_for_it(tmp_path):
    saved = json.loads(byte_level(LLAMA_3).backend.to_str())
    ids = saved["model"]["vocab"]
    ids |= {f"<{id}>": id for id in range(len(ids) + 10, 100_100)}
    write_json(tmp_path / "tokenizer.json", saved)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    plain, fixed = (described(tmp_path, fix_mistral_regex=fix) for fix in (False, True))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert fixed.encode("x = 12345") != plain.encode("x = 12345")
    for text in SPACED:
        assert fixed.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_number_that_is_no_token_is_the_number_of_the_end_of_text(folder):
    tokenizer = load_tokenizer(folder)
    for named, number in {
        "200": 200,
        200: 200,
        "<|im_end|>": 258,
        "7": tokenizer.encode("7")[0],
    }.items():
        options = TokenizeOptions(Data(end_of_text=named), 32, 0.0, tokenizer, None)
        assert options.separator == number


def test_tokens_added_to_a_sentencepiece_model_later_have_their_ids(sentencepiece_file, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    size = load_tokenizer(sentencepiece_file).vocab_size
    tokens, end = {"1": token("<s>")}, token("<|im_end|>")
    tokenizer = described(
        tmp_path, eos_token="<|im_end|>", added_tokens_decoder=tokens | {f"{size}": end}
    )
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (size, size + 1)
    assert tokenizer.encode("<|im_end|>") == [size]
    assert "im_end" in refusal(
        described, tmp_path, added_tokens_decoder=tokens | {f"{size + 1}": end}
    )


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", "[" * 10**5),
        ("generation_config.json", "[" * 10**5),
    ],
)
def test_an_untrusted_description_is_refused_by_name_whatever_it_contains(folder, name, content):
    (folder / name).write_text(content)
    assert "tokenizer.path=" in refusal(load_tokenizer, str(folder))


def test_a_model_file_that_is_cut_short_is_refused(sentencepiece_file, tmp_path):
    whole = sentencepiece_file.read_bytes()
    for size in range(0, len(whole) - 40, len(whole) // 20):
        (tmp_path / "cut.model").write_bytes(whole[:size])
        assert "cut.model" in refusal(load_tokenizer, f"{tmp_path}/cut.model")


@pytest.mark.parametrize(
    "text",
    [
        "the small world\n" * 200,
        "a" * 3000,
        " " * 3000,
        "é日👩‍👩‍👧 " * 300,
        "\n<s> x" * 300,
        "x12345678" * 400,
        # digits are cut by threes from where a piece begins: 123 is one token, 9 only alone, so
        # two pieces go on alike for a while, and differ then
        "9" * 801 + "123" * 60,
    ],
)
def test_a_long_text_is_encoded_in_pieces_to_the_same_tokens(sentencepiece_file, enter, text):
    """Memory is bounded; tokens and their places are those of the whole."""
    enter(inject.setting("tokenizer_overlap", 200))
    enter(inject.setting("tokenizer_long_text", 500))
    others = BYTES, load_tokenizer(sentencepiece_file)
    for tokenizer in (byte_level(), byte_level(LLAMA_3), *others):
        whole = tokenizer.backend.encode(text, add_special_tokens=False)
        (pieces,) = tokenizer.encode_batch([text])
        assert tokenizer.encode_plain([text])[0].tolist() == whole.ids
        assert_same(pieces, whole)


def assert_same(encoded, whole):
    """Compare tokens and places with those of the backend."""
    assert encoded.ids.tolist() == whole.ids
    places = np.stack([encoded.starts, encoded.ends], axis=1)
    assert places.tolist() == [list(place) for place in whole.offsets]


def byte_level(pattern=None, normalizer=None, added=("<|end|>",), **how):
    """A trained tokenizer that cuts texts as `pattern` says; None: as GPT-2."""
    cut = pattern and pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = [*TEXTS, "it's we'll WE'LL ... !?\n\n  x = 12345\n"]
    backend = make_tokenizer(added, texts, 400, cut, **how)
    backend.normalizer = normalizer
    backend.add_tokens([AddedToken("foo", normalized=True)])
    return TextTokenizer(backend, {}, set(), None)


# --- other files --------------------------------------------------------------------------------


def write_tiktoken(path, backend):
    """Write the vocabulary of a byte-level BPE as tiktoken keeps it; return its size.

    What was added is not in it.
    """
    ids = backend.get_vocab(with_added_tokens=False)
    byte_of = {text: byte for byte, text in enumerate(BYTE_TEXTS)}
    lines = [
        base64.b64encode(bytes(byte_of[c] for c in text)).decode() + f" {id}\n"
        for text, id in sorted(ids.items(), key=lambda item: item[1])
    ]
    path.write_text("".join(lines))
    return len(lines)


def test_a_model_of_tiktoken_gives_the_tokens_of_its_vocabulary(tmp_path, monkeypatch):
    original = byte_level(LLAMA_3, added=("<|im_end|>",))
    size = write_tiktoken(tmp_path / "tokenizer.model", original.backend)
    added = {f"{size}": token("<|im_end|>")}
    ours = described(tmp_path, eos_token="<|im_end|>", added_tokens_decoder=added)
    assert (ours.eos_id, ours.vocab_size) == (size, size + 1)
    for text in SPACED:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text), skip_special=False) == text
    saved_and_compared(ours, tmp_path / "saved", SPACED)

    # gaps among the ids are filled as in transformers
    added = {f"{size + 2}": token("<|im_end|>")}
    gaps = described(tmp_path, eos_token="<|im_end|>", added_tokens_decoder=added)
    assert gaps.encode(f"<|im_end|><|reserved_token_{size}|>") == [size + 2, size]
    assert (gaps.eos_id, gaps.vocab_size) == (size + 2, size + 3)

    # Llama 3 is known by its number of ranks, and has special tokens that the file does not name
    assert byte_level_files.LLAMA_3_RANKS == 128_000
    monkeypatch.setattr(byte_level_files, "LLAMA_3_RANKS", size)
    (tmp_path / "tokenizer_config.json").unlink()
    llama = load_tokenizer(tmp_path / "tokenizer.model")
    assert llama.vocab_size == size + 256
    assert llama.encode("<|begin_of_text|>")[0] == llama.bos_id == size
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
    assert [llama.special_tokens[name] - size for name in names] == [6, 7, 8, 9]


def write_vocabulary(folder, backend):
    """Write vocab.json and merges.txt of a byte-level BPE; return what its description adds."""
    backend.model.save(str(folder))
    vocabulary = read_json(folder / "vocab.json")
    size = len(vocabulary)
    write_json(folder / "vocab.json", vocabulary | {"<|endoftext|>": size})
    flags = dict.fromkeys(("lstrip", "normalized", "single_word"), False)
    return {"added_tokens_decoder": {f"{size + 1}": token("<|im_end|>", rstrip=True, **flags)}}


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", None])
def test_a_vocabulary_with_merges_gives_the_tokens_of_transformers(tmp_path, kind, prefix):
    config = write_vocabulary(tmp_path, byte_level(added=()).backend)
    config |= {"add_prefix_space": prefix} | ({"tokenizer_class": kind} if kind else {})
    if not kind:
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ours = described(tmp_path, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*SPACED, "<|endoftext|>a <|im_end|>  b"]:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == len(theirs)
    saved_and_compared(ours, tmp_path / "saved", SPACED)
    assert load_tokenizer(tmp_path / "vocab.json").fingerprint == ours.fingerprint


def test_a_vocabulary_that_is_no_byte_level_bpe_is_refused(tmp_path):
    write_vocabulary(tmp_path, byte_level().backend)
    assert "class CLIPTokenizer" in refusal(described, tmp_path, tokenizer_class="CLIPTokenizer")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    assert "no byte-level BPE" in refusal(described, tmp_path)


def test_the_bytes_of_tokens_add_up_to_those_of_the_text(sentencepiece_file):
    text = "Grüße, 世界 — an emoji 🎈, a tab\tand the small cells"
    for tokenizer in (byte_level(), BYTES):
        sizes = token_bytes(tokenizer, tokenizer.vocab_size + 3)
        assert len(sizes) == tokenizer.vocab_size + 3
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
        assert not sizes[list(tokenizer.special_tokens.values())].any()
        assert not sizes[tokenizer.vocab_size :].any()
    tokenizer = load_tokenizer(sentencepiece_file)
    plain = "the small cells é"
    sizes = token_bytes(tokenizer, tokenizer.vocab_size)
    # SentencePiece puts a space in front
    assert sizes[tokenizer.encode(plain)].sum() == len(f" {plain}".encode())
