"""The text of tokens that arrive one by one is the text of all of them, at a fixed cost a token."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from fsdp_trainer.data.tokens.byte_level_files import BYTE_TEXTS
from fsdp_trainer.data.tokens.text_stream import TextStream
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer

PIECES = ["▁", "▁▁", "▁a", "b", " c", "##d", "é", "▁世", "\ufffd", "n't", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_decoder(pieces, decoder):
    """A tokenizer of these pieces, with a special token and one that is added but not special."""
    backend = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="b"))
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("▁fooé ", normalized=False)])
    if decoder:
        backend.decoder = decoder
    return TextTokenizer(backend, {}, set(), None)


def fallback(*more):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    return decoders.Sequence(steps)


WITH_BYTES = [*PIECES, *BYTES]
DECODERS = {
    "byte_level": ([*BYTE_TEXTS, BYTE_TEXTS[0xE4] + BYTE_TEXTS[0xB8], " "], decoders.ByteLevel()),
    "llama_2": (WITH_BYTES, fallback(decoders.Strip(" ", 1, 0))),
    "gemma": (WITH_BYTES, fallback()),
    "metaspace": (PIECES, decoders.Metaspace()),
    "wordpiece": (PIECES, decoders.WordPiece()),
    "suffix": (PIECES, decoders.BPEDecoder("b")),
    "suffix within": (PIECES, decoders.BPEDecoder("'")),
    "bytes in a sequence": (BYTE_TEXTS, decoders.Sequence([decoders.ByteLevel()])),
    "no decoder": (PIECES, None),
    "replaced at the end": (WITH_BYTES, fallback(decoders.Replace("bb", "x"))),
}
MADE = {name: with_decoder(*given) for name, given in DECODERS.items()}


def pieces_of(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*(stream.add([id]) for id in ids), stream.finish()]


def characters(tokenizer):
    """Ids of complete characters of several bytes, which random ids rarely are."""
    id_of = tokenizer.backend.token_to_id
    in_bytes = [[*character.encode()] for character in "é世🙂"]
    names = BYTES if id_of(BYTES[0]) is not None else BYTE_TEXTS
    spelled = [[id_of(names[byte]) for byte in some] for some in in_bytes]
    return [ids for ids in spelled if None not in ids]


@pytest.mark.parametrize("name", MADE)
def test_pieces_of_any_tokens_are_the_text_of_all(name):
    tokenizer = MADE[name]
    one = st.integers(0, tokenizer.vocab_size + 1).map(lambda id: [id])
    some = st.lists(st.one_of([one, *map(st.just, characters(tokenizer))]), max_size=30)

    @settings(max_examples=40)
    @given(some)
    @example([[0xE4 % tokenizer.vocab_size]] * 9)
    @example([[PIECES.index(piece)] for piece in ("n't", "b", "b")])
    def check(drawn):
        ids = [id for ids in drawn for id in ids]
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)

    check()


def test_a_character_is_returned_with_its_last_byte():
    tokenizer = MADE["byte_level"]
    ids = characters(tokenizer)[1]
    assert pieces_of(tokenizer, [*ids, ids[0]]) == ["", "", "世", "", "\ufffd"]


@pytest.mark.parametrize(
    "name", ["byte_level", "llama_2", "gemma", "metaspace", "wordpiece", "demo:bytes"]
)
def test_a_token_costs_the_same_wherever_it_is(name, monkeypatch):
    tokenizer = MADE.get(name) or load_tokenizer(name)
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    ids = [id % tokenizer.vocab_size for id in range(7, 4007)]
    pieces_of(tokenizer, ids)
    assert sum(decoded) < 10 * len(ids)


@pytest.mark.parametrize("name", MADE)
def test_a_text_that_goes_on_keeps_its_first_space(name):
    tokenizer = MADE[name]
    before, ids = [2, 3], [2, 2, 3]
    whole = tokenizer.decode(before + ids)
    stream = TextStream(tokenizer)
    stream.follow(before)
    assert stream.add(ids) + stream.finish() == whole.removeprefix(tokenizer.decode(before))
