"""Classes of transformers 5 that cut texts in their own way, whatever a tokenizer.json says."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from fsdp_trainer.data.tokens.byte_level_files import CLASSES
from fsdp_trainer.data.tokens.encoding import GPT_4O, QWEN, QWEN_3_5, SUFFIXES
from fsdp_trainer.data.tokens.sentencepiece_model import PROBES

MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
MISTRAL_CUT = GPT_4O.replace(SUFFIXES + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
MORE = ("a 12345 e\u0301", "don't\u00a0we'll 's", "नमस्ते दुनिया", "\n\n  x ...!?\n")
Steps = tuple[Any, Any]
"""A normalizer and a pre-tokenizer."""
PLAIN = "PreTrainedTokenizerFast"
"""The class that uses a tokenizer.json as it is."""
REMEDY = f'"tokenizer_class": "{PLAIN}" in tokenizer_config.json'
ALWAYS: dict[str, str] = CLASSES["always"]
CLASS_TOKENS: dict[str, dict[str, str]] = CLASSES["special tokens"]


def _split(pattern: str, prefix: bool) -> Steps:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return normalizers.NFC(), pre_tokenizers.Sequence([cut, to_bytes])


def _cohere(prefix: bool) -> Steps:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return normalizers.NFC(), pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(prefix)])


def _gemma(prefix: bool) -> Steps:
    return normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")


STEPS: dict[str, Callable[[bool], Steps]] = {
    "Qwen2Tokenizer": lambda prefix: _split(QWEN, prefix),
    "Qwen3_5Tokenizer": lambda prefix: _split(QWEN_3_5, prefix),
    "GPT2Tokenizer": lambda prefix: (None, pre_tokenizers.ByteLevel(prefix)),
    "GPTNeoXTokenizer": lambda prefix: (normalizers.NFC(), pre_tokenizers.ByteLevel(prefix)),
    "CohereTokenizer": _cohere,
    "GemmaTokenizer": _gemma,
}


def class_of(backend: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any] | None) -> str:
    """Return the class of transformers for a tokenizer.json; "" for those that change nothing.

    config, model: content of tokenizer_config.json and config.json; None without one.
    """
    given = model or {}
    type = str(given.get("model_type") or "")
    named = str(config.get("tokenizer_class") or given.get("tokenizer_class") or "")
    name = ALWAYS.get(type) or named.removesuffix("Fast") or CLASSES["unnamed"].get(type, "")
    is_as_llama_3 = name == "LlamaTokenizer" and "ByteLevel" in str(backend.pre_tokenizer)
    is_one = name in CLASS_TOKENS and type not in CLASSES["of any class"]
    return name if is_one and not is_as_llama_3 else ""


def class_notes(backend: Tokenizer, name: str, config: Mapping[str, Any]) -> list[str]:
    """Return a note if transformers would cut a text in another way than the tokenizer.

    name: from `class_of`. config: content of tokenizer_config.json.
    """
    if not name:
        return []
    is_llama = name == "LlamaTokenizer"
    prefix = config.get("add_prefix_space") is True
    steps: Steps = (None, _llama(config)) if is_llama else STEPS[name](prefix)
    special = [token.content for token in backend.get_added_tokens_decoder().values()][:1]
    texts = [*PROBES, *MORE, *(f"{text}one{text} two" for text in special)]
    own = (backend.normalizer, backend.pre_tokenizer)
    try:
        ours = _tokens(backend, texts)
        _set_steps(backend, steps)
        theirs = _tokens(backend, texts)
    except Exception:  # of tokenizers, for a text that is no token and without an unknown one
        return []
    finally:
        _set_steps(backend, own)
    for text, here, there in zip(texts, ours, theirs, strict=True):
        if here != there:
            return [
                f"the class {name} makes transformers 5 cut texts in another way than "
                f"tokenizer.json, which is used here: {text!r} is {here} here and {there} there"
                + ("" if name in ALWAYS.values() else f". With  {REMEDY}  they are the same")
            ]
    return []


def fix_mistral(
    backend: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any] | None
) -> bool:
    """Cut texts as Mistral's own tokenizers do, if the folder asks for it; return whether it does.

    transformers does so for large vocabularies of Mistral's models that it saved before version 5.
    model: content of config.json; None without one.
    """
    if model is None:
        return False
    is_asked = config.get("fix_mistral_regex") is True and backend.pre_tokenizer is not None
    is_new = str(model.get("transformers_version") or "0").split(".")[0] not in "01234"
    is_other = model.get("model_type") not in (None, *MISTRAL)
    if not is_asked or is_new or is_other or backend.get_vocab_size() <= 100_000:
        return False
    cut = pre_tokenizers.Split(Regex(MISTRAL_CUT), "isolated")
    steps = json.loads(backend.pre_tokenizer.__getstate__())
    if steps["type"] == "Sequence":
        sequence = backend.pre_tokenizer
        sequence[0] = cut
    elif steps["type"] == "Metaspace":
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        sequence = pre_tokenizers.Sequence([cut, to_bytes])
    else:
        sequence = pre_tokenizers.Sequence([cut, backend.pre_tokenizer])
    _set_steps(backend, (backend.normalizer, sequence))
    return True


def _llama(config: Mapping[str, Any]) -> Any:
    after_specials = "always" if config.get("legacy") else "first"
    scheme = "never" if config.get("add_prefix_space") is False else after_specials
    return pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)


def _set_steps(backend: Tokenizer, steps: Steps) -> None:
    backend.normalizer, backend.pre_tokenizer = steps


def _tokens(backend: Tokenizer, texts: list[str]) -> list[list[str]]:
    return [backend.encode(text, add_special_tokens=False).tokens for text in texts]
