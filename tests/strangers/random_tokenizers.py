"""Folders with a random tokenizer and random files that describe it, held against transformers.

A folder is made from a seed. `differences` returns what is not as `AutoTokenizer` has it.
"""

import random

import transformers
from folders import table
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from world import write_json

from fsdp_trainer.data.tokens.encoding import GPT_4O, LLAMA_3, QWEN
from fsdp_trainer.data.tokens.text_stream import TextStream
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

PARTS = table("strangers/tokenizer_parts.yaml")
WORDS, SPACES, TOKENS, NAMES = (PARTS[name] for name in ("words", "spaces", "tokens", "names"))
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def byte_level(random):
    """Return a byte-level BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [*map(tuple, PARTS["byte_level_merges"])]
    texts = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, merges))
    prefix = random.random() < 0.2
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (LLAMA_3, QWEN, GPT_4O)]
    cuts += [pre_tokenizers.Digits(individual_digits=True), None, None]
    cut = random.choice(cuts)
    last = pre_tokenizers.ByteLevel(prefix, use_regex=cut is None or random.random() < 0.2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, last]) if cut else last
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = random.choice([None, None, normalizers.NFC()])
    return tokenizer


def with_spaces_as_signs(random):
    """Return a BPE or unigram model as of SentencePiece."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PARTS["signs"]]
    if random.random() < 0.5:
        model = models.BPE(
            {text: id for id, text in enumerate(texts)},
            [*map(tuple, PARTS["sign_merges"])],
            unk_token="<unk>",
            fuse_unk=random.random() < 0.5,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
    else:
        scored = [(text, -float(id) / 50) for id, text in enumerate(texts)]
        tokenizer = Tokenizer(models.Unigram(scored, 0, byte_fallback=random.random() < 0.5))
    scheme = random.choice(["always", "first", "never"])
    tokenizer.pre_tokenizer = random.choice(
        [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=random.random() < 0.5), None]
    )
    if tokenizer.pre_tokenizer is None:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps[random.random() < 0.3 :])
    elif random.random() < 0.4:
        tokenizer.normalizer = normalizers.NFKC()
    strip = [decoders.Strip(" ", 1, 0)] if random.random() < 0.6 else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def of_words(random):
    """Return a tokenizer of whole words or of their parts."""
    vocabulary = {text: id for id, text in enumerate(PARTS["word_parts"])}
    if random.random() < 0.5:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.decoder = decoders.WordPiece(cleanup=random.random() < 0.5)
    else:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = random.choice(
        [pre_tokenizers.Whitespace(), pre_tokenizers.BertPreTokenizer()]
    )
    steps = [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    tokenizer.normalizer = random.choice([None, normalizers.Sequence(steps), steps[1]])
    return tokenizer


KINDS = [byte_level, byte_level, with_spaces_as_signs, with_spaces_as_signs, of_words]


def random_flags(random, text):
    """Return a token as added_tokens_decoder has it; a flag in three is left out."""
    flags = {flag: random.random() < 0.3 for flag in FLAGS if random.random() < 0.8}
    return {"content": text, **flags}


def written_folder(folder, seed):
    """Write the files of a tokenizer; return whether ids in them are other than those they get."""
    chance = random.Random(seed)
    tokenizer = chance.choice(KINDS)(chance)
    texts = chance.sample(TOKENS, len(TOKENS))
    for text in texts[: chance.randrange(4)]:
        tokenizer.add_tokens([AddedToken(**random_flags(chance, text))])
    if chance.random() < 0.1:
        tokenizer.enable_padding(pad_token=chance.choice(texts), pad_id=0)
    tokenizer.save(f"{folder}/tokenizer.json")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    config = random_config(chance)
    by_id, is_wrong = with_ids(chance, tokenizer) if chance.random() < 0.6 else ({}, False)
    if by_id and chance.random() < 0.5:
        config["added_tokens_decoder"] = {
            str(id): random_flags(chance, text) for text, id in by_id.items()
        }
    elif by_id:
        write_json(folder / "added_tokens.json", by_id)
    if chance.random() < 0.3:
        words = named(chance, None)
        if chance.random() < 0.3:
            words["extra_special_tokens"] = extra(chance)
        write_json(folder / "special_tokens_map.json", words)
    if chance.random() < 0.9:
        write_json(folder / "tokenizer_config.json", config)
    return is_wrong


def random_config(chance):
    """Return the content of tokenizer_config.json, without added_tokens_decoder."""
    config = {}
    if chance.random() < 0.7:
        config["tokenizer_class"] = chance.choice(["PreTrainedTokenizerFast", "TokenizersBackend"])
    if chance.random() < 0.3:
        config["clean_up_tokenization_spaces"] = chance.random() < 0.7
    config |= named(chance, "__type")
    if chance.random() < 0.3:
        config["extra_special_tokens"] = extra(chance)
    if chance.random() < 0.3:
        config["additional_special_tokens"] = chance.sample(TOKENS, chance.randrange(4))
    return config


def named(chance, mark):
    """Return named tokens. mark: the key that makes an object a token in tokenizer_config.json."""
    words = {}
    for name in chance.sample(NAMES, chance.randrange(5)):
        text = chance.choice(TOKENS)
        form = chance.random()
        if form < 0.7:
            words[name] = text
        elif form < 0.9:
            words[name] = random_flags(chance, text) | ({mark: "AddedToken"} if mark else {})
        elif name in NAMES[:7]:
            words[name] = None
    return words


def extra(chance):
    """Return extra_special_tokens in one of its forms."""
    texts = chance.sample(TOKENS, chance.randrange(4))
    if chance.random() < 0.4:
        return {f"{name}_token": text for name, text in zip("pqr", texts, strict=False)}
    return texts


def with_ids(chance, tokenizer):
    """Return tokens with the ids that they get, or sometimes others, and whether so."""
    next_id = max(tokenizer.get_vocab().values()) + 1
    by_id = {}
    for text in chance.sample(TOKENS, chance.randrange(1, 5)):
        id = tokenizer.token_to_id(text)
        by_id[text] = next_id if id is None else id
        next_id += id is None
    is_wrong = chance.random() < 0.1
    if is_wrong:
        changed = chance.choice([*by_id])
        by_id[changed] += chance.choice([-1, 1, 7])
    if len({*by_id.values()}) < len(by_id):
        by_id = {text: id for id, text in {id: text for text, id in by_id.items()}.items()}
    return by_id, is_wrong


def random_text(chance):
    """Return a text of words, spaces and tokens."""
    pieces = [
        chance.choice(TOKENS if chance.random() < 0.3 else WORDS) + chance.choice(SPACES)
        for _ in range(chance.randrange(12))
    ]
    return "".join([chance.choice(SPACES), *pieces])


def differences(folder, seed, texts=6):
    """Write a folder into an empty one; return what differs from AutoTokenizer, as sentences."""
    is_wrong = written_folder(folder, seed)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        theirs = error
    is_refused = isinstance(theirs, Exception)
    try:
        ours = load_tokenizer(str(folder))
    except UserError as error:
        return [] if is_wrong or is_refused else [f"refused: {error}"]
    if is_refused:
        return [f"not refused, and transformers says {theirs!r}"]
    ours.save(folder / "saved")
    (folder / "saved/config.json").write_text('{"model_type": "llama"}')
    exported = transformers.AutoTokenizer.from_pretrained(folder / "saved")
    chance = random.Random(seed)
    lines = other_specials(ours, theirs)
    for text in (random_text(chance) for _ in range(texts)):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        if ours.encode(text) != ids or ours.encode_plain([text])[0].tolist() != ids:
            lines.append(f"{text!r} is {ours.encode(text)}, {ids} in transformers")
        if exported(text, add_special_tokens=False)["input_ids"] != ids:
            lines.append(f"{text!r} is other tokens after the export")
        lines += other_texts(ours, theirs, ids)
    return lines


def other_specials(ours, theirs):
    """Return what differs in the number of tokens and in special ones."""
    lines = []
    if ours.vocab_size != len(theirs):
        lines.append(f"{ours.vocab_size} tokens, {len(theirs)} in transformers")
    special = {name: text for name, text in theirs.special_tokens_map.items() if text}
    has_usual = special.keys() & {"bos_token", "eos_token", "pad_token", "unk_token"}
    if has_usual and special != ours.special:  # without any, ours takes the usual ones
        lines.append(f"special tokens {ours.special}, {special} in transformers")
    return lines


def other_texts(ours, theirs, ids):
    """Return how the text of tokens differs, with and without special ones, and streamed."""
    lines = []
    for skips in (True, False):
        back = theirs.decode(ids, skip_special_tokens=skips)
        if ours.decode(ids, skips) != back:
            lines.append(f"{ids} is {ours.decode(ids, skips)!r}, {back!r} in transformers")
    stream = TextStream(ours)
    streamed = "".join([*(stream.add([id]) for id in ids), stream.finish()])
    if streamed != theirs.decode(ids, skip_special_tokens=True):
        lines.append(f"{ids} streamed is {streamed!r}")
    return lines
