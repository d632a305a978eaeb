"""Our tokens are those of SentencePiece and of `transformers`, and what we save loads there."""

import base64
import io
import json
from itertools import pairwise

import inject
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import SHARED, make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.templates.chat_template import Template, load_template
from fsdp_trainer.data.tokens.byte_level_files import BYTE_TEXTS
from fsdp_trainer.data.tokens.token_bytes import token_bytes
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.word_cache import LLAMA_3, PATTERNS, encoding_of, separator_of
from fsdp_trainer.errors import UserError

TEXTS = [
    "Hello world",
    "two  spaces\n\nand\ttabs ",
    "细胞理论 é ü 🙂",
    "",
    "x" * 300,
    "for i in range(10):\n    print(i)",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_file(request, tmp_path_factory):
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    words = (
        f"the {a} {b} of {c}s\n"
        for a in ("small", "large", "Hello")
        for b in ("world", "range", "theory")
        for c in ("cell", "print", "number")
    )
    # As Llama 2's: no normalisation, byte fallback.
    options = (
        {
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_digits": True,
        }
        if request.param == "bpe"
        else {}
    )
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(list(words) * 5), model_writer=model, vocab_size=330,
        model_type=request.param, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, user_defined_symbols=["<|tool|>"], **options,
    )  # fmt: skip
    path = tmp_path_factory.mktemp(request.param) / "spm.model"
    path.write_bytes(model.getvalue())
    return path


def test_a_sentencepiece_model_gives_the_pieces_of_sentencepiece(sentencepiece_file):
    spm = pytest.importorskip("sentencepiece")
    theirs = spm.SentencePieceProcessor(model_file=str(sentencepiece_file))
    ours = load_tokenizer(str(sentencepiece_file))
    assert ours.vocab_size == theirs.get_piece_size()
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_id(), theirs.eos_id(), None)
    for text in [*TEXTS, "a<|tool|>b"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


@pytest.mark.slow
def test_llama_2_gives_the_pieces_of_sentencepiece_on_real_text():
    spm = pytest.importorskip("sentencepiece")
    if not SHARED.is_dir():
        pytest.skip("needs real data, which is not shipped")
    path = str(SHARED / "llama2_tokenizer.model")
    rows = (
        json.loads((SHARED / "alpaca_zh_demo.json").read_text())[:200]
        + json.loads((SHARED / "glaive_toolcall_en_demo.json").read_text())[:100]
    )
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    ours = [e.ids.tolist() for e in load_tokenizer(path).encode_batch(texts)]
    assert ours == spm.SentencePieceProcessor(model_file=path).encode(texts)


def test_after_a_special_token_no_space_is_put(sentencepiece_file):
    tokenizer = load_tokenizer(str(sentencepiece_file))
    assert (
        tokenizer.decode(tokenizer.encode("<s>Hello</s>world"), skip_special=False)
        == "<s>Hello</s>world"
    )
    assert tokenizer.encode("<s>Hello")[0] == tokenizer.bos_id


def test_what_is_saved_gives_the_same_tokens_in_transformers(sentencepiece_file, tmp_path):
    saved_and_compared(
        load_tokenizer(str(sentencepiece_file)), tmp_path, [*TEXTS, "<s>Hello</s>world"]
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama2_tokenizer.model", marks=pytest.mark.slow),
        "bpe4k",
        "demo:bytes",
    ],
)
def test_real_tokenizers_are_saved_for_transformers(name, tmp_path):
    if name != "demo:bytes" and not SHARED.is_dir():
        pytest.skip("needs real data, which is not shipped")
    tokenizer = load_tokenizer(name if name == "demo:bytes" else str(SHARED / name))
    special = list(tokenizer.special_tokens)
    theirs = saved_and_compared(
        tokenizer, tmp_path, [*TEXTS, f"a{special[0]} b{special[-1]}c {special[1]}"]
    )
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.chat_template == tokenizer.chat_template


def saved_and_compared(tokenizer, folder, texts):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert [theirs(t, add_special_tokens=False)["input_ids"] for t in texts] == [
        e.ids.tolist() for e in tokenizer.encode_batch(texts)
    ]
    again = load_tokenizer(str(folder))
    assert [again.encode(t) for t in texts] == [tokenizer.encode(t) for t in texts]
    assert (again.bos_id, again.eos_id, again.vocab_size, again.stop_ids) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.vocab_size,
        tokenizer.stop_ids,
    )
    return theirs


def test_another_template_is_saved_with_the_tokenizer(tmp_path):
    load_tokenizer("demo:bytes").save(tmp_path, chat_template="{{ messages }}")
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_offsets_cover_the_text():
    tokenizer = load_tokenizer("demo:bytes")
    (encoding,) = tokenizer.encode_batch(["é<|im_end|>x"])
    assert encoding.starts.tolist() == [0, 0, 1, 11]
    assert encoding.ends.tolist() == [1, 1, 11, 12]


def test_stored_truncation_and_offset_trimming_are_undone(tmp_path):
    load_tokenizer("demo:bytes").save(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    stored["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (encoding,) = load_tokenizer(str(tmp_path)).encode_batch(["a b c"])
    assert encoding.starts.tolist() == [0, 1, 2, 3, 4]


def test_special_tokens_and_templates_are_read_in_every_spelling(tmp_path):
    load_tokenizer("demo:bytes").save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    template = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7]}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_id) == (
        "<|im_start|>",
        "<|im_end|>",
        None,
    )
    assert tokenizer.chat_template == "D"
    assert tokenizer.stop_ids == {256, 258, 7}


def test_tokens_added_to_a_sentencepiece_model_later_have_their_ids(sentencepiece_file, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    size = load_tokenizer(str(sentencepiece_file)).vocab_size
    for id in (size, size + 1):
        added = {
            "1": {"content": "<s>", "special": True},
            str(id): {"content": "<|im_end|>", "special": True},
        }
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|im_end|>", "added_tokens_decoder": added})
        )
        if id == size:
            tokenizer = load_tokenizer(str(tmp_path))
            assert (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.encode("<|im_end|>")) == (
                size,
                size + 1,
                [size],
            )
        else:
            with pytest.raises(UserError, match="im_end"):
                load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x0a\xff\xff", bytes(100)])
def test_a_bad_model_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.model"):
        load_tokenizer(str(tmp_path / "bad.model"))


def test_a_model_file_that_is_cut_short_is_refused(sentencepiece_file, tmp_path):
    whole = sentencepiece_file.read_bytes()
    for size in range(0, len(whole) - 40, 997):
        (tmp_path / "cut.model").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.model"):
            load_tokenizer(str(tmp_path / "cut.model"))


@pytest.mark.parametrize(
    "config", ['{"eos_token": 5, "bos_token": {"a": 1}, "chat_template": [{"a": 5}]}', "[]"]
)
def test_values_of_the_wrong_type_in_a_description_are_as_if_they_were_not_there(tmp_path, config):
    load_tokenizer("demo:bytes").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template) == (
        "<|endoftext|>",
        None,
        None,
    )  # the usual ones


@pytest.mark.parametrize("name", ["missing", ".", "notes.txt", "tokenizer.json"])
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path, name):
    (tmp_path / "notes.txt").write_text("x")
    if name == "tokenizer.json":
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.path="):
        load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize(
    "odd",
    [
        {"tokenizer_config.json": '{"chat_template": 5}'},
        {"tokenizer_config.json": "[" * 10**5},
        {"generation_config.json": "[" * 10**5},
        {
            "tokenizer.json": json.dumps(
                {"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 4e9}}}
            )
        },
        {
            "tokenizer.json": '{"model": {"type": "WordLevel", "unk_token": "a",'
            ' "vocab": {"a": 2147483647}}}'
        },
    ],
)
def test_an_untrusted_tokenizer_is_refused_by_name_whatever_it_contains(tmp_path, odd):
    load_tokenizer("demo:bytes").save(tmp_path)
    for name, content in odd.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.path="):
        load_tokenizer(str(tmp_path))


def test_a_template_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"data\.template=.*a\.jinja"):
        load_template(str(tmp_path / "a.jinja"), load_tokenizer("demo:bytes"))


def test_a_template_whose_markers_the_tokenizer_lacks_is_refused():
    with pytest.raises(UserError, match=r"<\|eot_id\|>"):
        load_template("llama3", load_tokenizer("demo:bytes"))
    with pytest.raises(UserError, match="no template of this name"):
        load_template("lama3", load_tokenizer("demo:bytes"))


def test_templates_do_not_know_the_day_and_cannot_reach_python():
    tokenizer = load_tokenizer("demo:bytes")
    assert (
        Template(
            "t", "{{ strftime_now('%d %b %Y') }}{{ {'a': '<'} | tojson }}", tokenizer.special
        ).render([])
        == '26 Jul 2024{"a": "<"}'
    )
    with pytest.raises(RecordError):
        Template("t", "{{ ''.__class__.__mro__ }}", {}).render([])


@pytest.mark.parametrize(
    "text",
    [
        "the small world\n" * 200,
        "a" * 3000,
        " " * 3000,
        "é日👩‍👩‍👧 " * 300,
        "\n<s> x" * 300,
        "x12345678" * 400,
    ],
)
def test_a_long_text_is_encoded_in_pieces_to_the_same_tokens(sentencepiece_file, enter, text):
    """Memory is bounded; tokens and their places are those of the whole."""
    enter(inject.setting("tokenizer_overlap", 200))
    enter(inject.setting("tokenizer_long_text", 500))
    for tokenizer in (
        load_tokenizer("demo:bytes"),
        load_tokenizer(str(sentencepiece_file)),
        byte_level(),
        byte_level(LLAMA_3),
    ):
        whole = tokenizer.backend.encode(text, add_special_tokens=False)
        (pieces,) = tokenizer.encode_batch([text])
        assert pieces.ids.tolist() == tokenizer.encode_plain([text])[0].tolist() == whole.ids
        assert np.stack([pieces.starts, pieces.ends], axis=1).tolist() == [
            list(place) for place in whole.offsets
        ]


def test_a_text_is_joined_only_where_that_gives_the_tokens_of_the_whole(enter):
    """A run of digits is cut by threes from its beginning, wherever a piece begins: both may go on
    alike for a while, and differ then."""
    enter(inject.setting("tokenizer_overlap", 200))
    enter(inject.setting("tokenizer_long_text", 500))
    tokenizer = byte_level(LLAMA_3)  # it knows 123 as one token, and 9 as one only
    text = "9" * 801 + "123" * 60
    assert tokenizer.encode_batch([text])[0].ids.tolist() == tokenizer.encode(text)


# --- word by word -------------------------------------------------------------------------------


def byte_level(pattern=None, normalizer=None, added=("<|end|>",), **how):
    """A trained tokenizer that cuts texts as `pattern` says; None: as GPT-2."""
    backend = Tokenizer(models.BPE())
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, of_bytes]) if split else of_bytes
    backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(
        TEXTS * 3 + ["it's we'll WE'LL ... !?\n\n  x = 12345\n"] * 3, trainer
    )
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, **how) for text in added]
    )
    backend.add_tokens([AddedToken("foo", normalized=True)])
    return TextTokenizer(backend, {}, set(), None)


BY_WORDS = [
    byte_level(),
    byte_level(added=("<|end", "end|>", "<|end|>", "|")),
    byte_level(normalizer=normalizers.NFC()),
    *map(byte_level, sorted(PATTERNS)),
]
PIECES = [*"ax'19é²_-.!/\n\t\r\x00\x0b\x1c\x85\u0301\u00a0\u2003\u3000\u200b你。🙂", " ", " ", "  ",
"\n\n", "\r\n", "'s", "'LL", "Hello", "foo", "123456", "...", "<|end|>", "<|"]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=16).map("".join), max_size=3),
    st.sampled_from(BY_WORDS),
)
def test_word_by_word_gives_the_tokens_and_places_of_the_whole_text(texts, tokenizer):
    assert tokenizer._words
    expected = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    for got, plain, whole in zip(
        tokenizer._words.encode(texts), tokenizer._words.plain(texts), expected, strict=True
    ):
        assert got.ids.tolist() == plain.tolist() == whole.ids
        assert np.stack([got.starts, got.ends], axis=1).tolist() == [
            list(place) for place in whole.offsets
        ]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    st.data(),
    st.sampled_from(BY_WORDS),
)
def test_word_by_word_gives_the_weights_of_the_whole_text(text, data, tokenizer):
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    values = np.zeros(len(text) + 1, np.float32)
    for start, stop in pairwise(edges):
        values[start:stop] = data.draw(st.sampled_from([0, 0.5, 1]))
    words, whole = tokenizer._words.encode([text])[0], tokenizer.backend.encode(text)
    by_word, at_once = words.lower_of_ends(values), encoding_of(whole).lower_of_ends(values)
    assert by_word.tolist() == at_once.tolist()
    for edge in edges:
        assert words.first_reaching(edge) == encoding_of(whole).first_reaching(edge)


def test_a_token_that_others_may_overlap_does_not_separate_words():
    assert not byte_level(added=("<|><", "><|"))._words
    assert separator_of(byte_level(added=("x<|", "<|end|>")).backend) == "x<|"


def test_a_tokenizer_that_may_look_across_a_space_gets_whole_texts():
    across = [
        byte_level(pattern=r"\p{L}+ \p{L}+|."),
        byte_level(normalizer=normalizers.Lowercase()),
    ]
    across += [
        byte_level(rstrip=True),
        byte_level(lstrip=True),
        byte_level(added=("<| end |>",)),
        load_tokenizer("demo:bytes"),
    ]
    assert not any(tokenizer._words for tokenizer in across)
    for tokenizer in across:
        assert tokenizer.encode_batch(["a b<|end|> c"])[0].ids.tolist() == tokenizer.encode(
            "a b<|end|> c"
        )


def test_words_are_forgotten_before_they_fill_the_memory(enter):
    enter(inject.setting("words_kept_characters", 100))
    tokenizer = byte_level()
    for i in range(50):
        text = " ".join(f"word{i}{k}" for k in range(20))
        assert tokenizer.encode_plain([text])[0].tolist() == tokenizer.encode(text)
        assert len(tokenizer._words._ids) <= 40


# --- other files --------------------------------------------------------------------------------

SPACED = [
    *TEXTS,
    *(" one", "  two", "   three\n  x", " ", "\n a"),
    *("it's WE'LL 12345 e\u0301", "a <|im_end|> b"),
]


def test_spaces_at_the_beginning_are_those_of_sentencepiece(sentencepiece_file):
    spm = pytest.importorskip("sentencepiece")
    theirs = spm.SentencePieceProcessor(model_file=str(sentencepiece_file))
    ours = load_tokenizer(str(sentencepiece_file))
    for text in (" one", "  two", "   the small\n  cell", " ", "   "):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_legacy_tokenizer_puts_a_space_behind_special_tokens_too(sentencepiece_file, tmp_path):
    spm = pytest.importorskip("sentencepiece")
    theirs = spm.SentencePieceProcessor(model_file=str(sentencepiece_file))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    prints = set()
    for legacy in (True, False):
        config = {"legacy": legacy, "bos_token": "<s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours = load_tokenizer(str(tmp_path))
        prints.add(ours.fingerprint)
        for text in SPACED:
            assert ours.encode(text) == theirs.encode(text)
        bos = [theirs.bos_id()]
        behind = theirs.encode("small  world")
        assert (ours.encode("<s>small  world") == bos + behind) == legacy
        saved_and_compared(ours, tmp_path / str(legacy), [*TEXTS, "<s>Hello</s>world"])
    assert len(prints) == 2  # a cache of one is none of the other


def write_tiktoken(path, backend):
    """The vocabulary of a byte-level BPE as tiktoken keeps it, without what was added."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = backend.get_vocab(with_added_tokens=False)
    byte_of = {text: byte for byte, text in enumerate(BYTE_TEXTS)}
    lines = [
        base64.b64encode(bytes(byte_of[c] for c in text)).decode() + f" {id}\n"
        for text, id in sorted(ids.items(), key=lambda item: item[1])
        if text not in added
    ]
    path.write_text("".join(lines))
    return len(lines)


def test_a_model_of_tiktoken_gives_the_tokens_of_its_vocabulary(tmp_path):
    original = byte_level(LLAMA_3, added=("<|im_end|>",))
    size = write_tiktoken(tmp_path / "tokenizer.model", original.backend)
    added = {str(size): {"content": "<|im_end|>", "special": True}}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(str(tmp_path))
    assert (ours.eos_id, ours.vocab_size) == (size, size + 1)
    for text in SPACED:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text), skip_special=False) == text
    assert ours._words  # as fast as its tokenizer.json
    saved_and_compared(ours, tmp_path / "saved", SPACED)


@pytest.mark.slow
@pytest.mark.further
def test_the_special_tokens_of_llama_3_are_known_by_its_number_of_ranks(tmp_path):
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"%c%c" % divmod(i, 256) for i in range(1 << 16)]
    tokens += [b"\x00%c%c" % divmod(i, 256) for i in range(128_000 - len(tokens))]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    ours = load_tokenizer(str(tmp_path / "tokenizer.model"))
    assert ours.vocab_size == 128_256
    assert ours.encode("<|begin_of_text|>")[0] == ours.bos_id == 128_000
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
    assert [ours.special_tokens[name] for name in names] == [128_006, 128_007, 128_008, 128_009]


@pytest.mark.parametrize("cut", [b"!!!! 3\n", b"YWI= 9\n"])
def test_a_broken_model_of_tiktoken_is_called_that(tmp_path, cut):
    (tmp_path / "a.model").write_bytes(b"YQ== 0\nYg== 1\n" + cut)
    with pytest.raises(UserError, match=r"tiktoken|cut short"):
        load_tokenizer(str(tmp_path / "a.model"))


def write_vocabulary(folder, backend, **config):
    """vocab.json, merges.txt and tokenizer_config.json of a byte-level BPE."""
    model = json.loads(backend.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    size = len(model["vocab"])
    vocabulary = model["vocab"] | {"<|endoftext|>": size}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    token = {"content": "<|im_end|>", "special": True, "rstrip": True, "lstrip": False}
    token |= {"normalized": False, "single_word": False}
    added = {str(size + 1): token}
    config = config | {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", None])
def test_a_vocabulary_with_merges_gives_the_tokens_of_transformers(tmp_path, kind, prefix):
    transformers = pytest.importorskip("transformers")
    named = {"tokenizer_class": kind} if kind else {}
    if not kind:
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    original = byte_level(added=()).backend
    write_vocabulary(tmp_path, original, add_prefix_space=prefix, **named)
    ours = load_tokenizer(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*SPACED, "<|endoftext|>a <|im_end|>  b"]:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == len(theirs)
    saved_and_compared(ours, tmp_path / "saved", SPACED)
    assert load_tokenizer(str(tmp_path / "vocab.json")).fingerprint == ours.fingerprint


def test_a_vocabulary_that_is_no_byte_level_bpe_is_refused(tmp_path):
    write_vocabulary(tmp_path, byte_level().backend, tokenizer_class="CLIPTokenizer")
    with pytest.raises(UserError, match="class CLIPTokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no byte-level BPE"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"merges\.txt"):
        load_tokenizer(str(tmp_path / "vocab.json"))


def test_the_bytes_of_tokens_add_up_to_those_of_the_text(sentencepiece_file):
    text = "Grüße, 世界 — an emoji 🎈, a tab\tand the small cells"
    byte_level = TextTokenizer(make_tokenizer(), {}, set(), None)
    for tokenizer in (byte_level, load_tokenizer("demo:bytes")):
        sizes = token_bytes(tokenizer, tokenizer.vocab_size + 3)
        assert len(sizes) == tokenizer.vocab_size + 3
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
        assert not sizes[list(tokenizer.special_tokens.values())].any()
        assert not sizes[tokenizer.vocab_size :].any()
    tokenizer = load_tokenizer(str(sentencepiece_file))
    plain = "the small cells é"
    sizes = token_bytes(tokenizer, tokenizer.vocab_size)
    # SentencePiece puts a space in front
    assert sizes[tokenizer.encode(plain)].sum() == len(f" {plain}".encode())
