"""A Hugging Face folder as a GGUF file, with the names and metadata of llama.cpp's own converter.

The package gguf, of llama.cpp's authors, writes the file and knows the names. Tensors are read,
converted and written one after another.
"""

import json
import logging
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors import safe_open

from fsdp_trainer.data.tokens.encoding import LLAMA_3, QWEN, QWEN_3_5
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.weights.foreign_tensors import in_pairs
from fsdp_trainer.interop.weights.gguf_hybrids import (
    HYBRIDS,
    Change,
    architecture_of,
    changed_names,
    described,
    same,
)
from fsdp_trainer.interop.weights.gguf_models import MODELS, GgufModel
from fsdp_trainer.interop.weights.tensor_names import GGUF, is_norm
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.further_blocks import is_unread
from fsdp_trainer.models.hf.read_architecture import read_architecture

BY_LLAMA_CPP = "Use  form=merged , whose folder llama.cpp's convert_hf_to_gguf.py reads"
NUMBERS = {
    "f32": (Type.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
"""Number formats of matrices, and the type of a file with them. All vectors are float32."""
FACTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "rope_dimension_count": "rotary_dim",
    "rope_freq_base": "rope_theta",
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""By gguf's names of what a file says of every model, ours."""
REGEXES = {QWEN: "qwen2", QWEN_3_5: "qwen35", LLAMA_3: "llama-bpe"}
"""llama.cpp's names of how a text is cut before its pieces are encoded, by the expression."""
# it warns of each token that a pair of texts begins with, as Llama 3's
logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
BPE = 2
"""SentencePiece's number of a model that merges pairs."""
KNOWN: dict[str, GgufModel] = {**MODELS, **HYBRIDS}
"""Types of models by model_type."""
EXPERT = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
"""An expert's matrix in a folder: numbers of block and expert, and which matrix it is."""
PARTS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w2": "down",
    "w3": "up",
}
TOWER = "model.visual."
"""How the names of a tower for images begin, of which llama.cpp has a file of its own."""
ENDS = (".weight", ".bias")
names_known = lru_cache(gguf.get_tensor_name_map)
GATE = "shared_expert_gate.weight"
WHOLE = ("ssm_conv1d.weight", "shortconv.conv.weight", "norm.weight", "ssm_a", "ssm_d")
"""Ends of the names of matrices that are float32."""
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"
"""llama.cpp's names of tokenizers."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = (
    gguf.TokenType.NORMAL,
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
    gguf.TokenType.UNUSED,
)


class Writer(GGUFWriter):
    """Writes lists without entries too: gguf refuses them, llama.cpp and transformers read them."""

    def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
        if sub_type is not None and not len(val):
            return struct.pack("<IIQ", vtype, sub_type, 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as GGUF keeps them. scores: None for a byte-level tokenizer."""

    kind: str
    cut: str
    tokens: list[bytes]
    types: list[int]
    scores: list[float] | None = None


def write_gguf(folder: Path, file: Path, numbers: str) -> list[str]:
    """Write a folder with a model and a tokenizer as a GGUF file.

    Returns the names of the tensors that it does not have, as no module reads them.
    numbers: a key of NUMBERS. The file is complete or not there. Raises UserError for what cannot
    be written, and OSError.
    """
    config = read_architecture(folder)
    require_family(config, KNOWN)
    if config.family in HYBRIDS:
        config = described(config, folder)
    require_same(config, folder)
    vocabulary = vocabulary_of(folder, config.vocab_size)
    with new_file(file, architecture_named(config)) as (writer, unfinished):
        add_facts(writer, config, folder, numbers)
        add_vocabulary(writer, vocabulary, folder, KNOWN[config.family].space)
        tensors, left_out = names_of(config, folder)
        for name, source in tensors.items():
            add_shape(writer, name, source, numbers)
        add_rope_factors(writer, config)
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, source in tensors.items():
            number = number_of(name, source.shape, numbers)
            writer.write_tensor_data(gguf.quants.quantize(source.read(), number))
        for factors in rope_factors(config):
            writer.write_tensor_data(factors)
    return left_out


@contextmanager
def new_file(file: Path, architecture: gguf.MODEL_ARCH) -> Iterator[tuple[Writer, Path]]:
    """Yield a writer and the file that it writes, which is `file` when the block succeeds."""
    unfinished = file.with_name(f".{file.name}.partial")
    writer = Writer(None, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        yield writer, unfinished
        writer.close()
        unfinished.replace(file)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)


def architecture_named(config: ModelConfig) -> gguf.MODEL_ARCH:
    is_hybrid = config.family in HYBRIDS
    return architecture_of(config) if is_hybrid else MODELS[config.family].architecture


def require_family(config: ModelConfig, known: Collection[str]) -> None:
    """Raise UserError for a model of a type that is not among these."""
    is_known = config.family in known and config.by_transformers == (config.family in HYBRIDS)
    if not is_known or not config.predicts:
        kind = f"model_type={config.family}" + (
            "" if config.predicts else " without a head of tokens"
        )
        reason = f"is not written as GGUF: only {' '.join(known)} are.\n{BY_LLAMA_CPP}"
        raise UserError("there is no GGUF of it", kind, reason)


def require_same(config: ModelConfig, folder: Path) -> None:
    for difference in KNOWN[config.family].differences(config):
        reason = "is not what llama.cpp assumes of these models: it would compute something else"
        raise UserError("there is no GGUF of it", f"{folder}: {difference}", reason)
    kind = (config.rope_scaling or {}).get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        reason = f"is a scaling of positions that is not written as GGUF.\n{BY_LLAMA_CPP}"
        raise UserError("there is no GGUF of it", f"{folder}: rope_type={kind}", reason)


# --- facts


def add_facts(writer: GGUFWriter, config: ModelConfig, folder: Path, numbers: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(folder.resolve().name)
    writer.add_file_type(NUMBERS[numbers][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for fact, name in FACTS.items():
        getattr(writer, f"add_{fact}")(getattr(config, name))
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    if scaling.get("rope_type") == "yarn":
        original = scaling.get("original_max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(int(original or config.max_position_embeddings))
    KNOWN[config.family].add(writer, config)


def rope_factors(config: ModelConfig) -> Iterator[np.ndarray]:
    """Yield the divisors of Llama 3.1's frequencies, [head_dim / 2]; none for other models."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") != "llama3":
        return
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    longest = scaling["original_max_position_embeddings"]
    steps = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    waves = 2 * np.pi * config.rope_theta**steps
    smooth = np.clip((longest / waves - low) / (high - low), 0, 1)
    yield (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def add_rope_factors(writer: GGUFWriter, config: ModelConfig) -> None:
    for factors in rope_factors(config):
        writer.add_tensor_info(
            "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes, Type.F32
        )


# --- tensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file. change: makes of it what the GGUF file has, of this shape."""

    file: Path
    name: str
    shape: tuple[int, ...]
    change: Change = same

    def read(self) -> np.ndarray:
        with safe_open(self.file, framework="pt") as opened:
            tensor = self.change(opened.get_tensor(self.name).to(torch.float32))
        return tensor.contiguous().numpy().reshape(self.shape)


@dataclass(frozen=True)
class StackedExperts:
    """The matrices of all experts of a block, in the order of the experts."""

    experts: dict[int, StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.experts), *self.experts[0].shape)

    def read(self) -> np.ndarray:
        return np.stack([self.experts[number].read() for number in range(len(self.experts))])


Source = StoredTensor | StackedExperts


def names_of(config: ModelConfig, folder: Path) -> tuple[dict[str, Source], list[str]]:
    """Return the tensors by their names in GGUF, and the names of those that no module reads.

    Raises UserError for one without a name.
    """
    tensors: dict[str, Source] = {}
    left_out = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if is_unread(name, config) or name.startswith(TOWER):
                left_out.append(name)
                continue
            if expert := EXPERT.fullmatch(name):
                whole = f"blk.{expert[1]}.ffn_{PARTS[expert[3]]}_exps.weight"
                stack = tensors.setdefault(whole, StackedExperts({}))
                assert isinstance(stack, StackedExperts)
                stack.experts[int(expert[2])] = StoredTensor(file, name, shape)
                continue
            tensors |= tensors_from(config, file, name, shape)
    return tensors, left_out


def tensors_from(
    config: ModelConfig, file: Path, name: str, shape: tuple[int, ...]
) -> dict[str, Source]:
    """Return what a GGUF file has of a tensor in a folder. Raises UserError if it has no name."""
    known = names_known(architecture_named(config), config.num_hidden_layers)
    tensors: dict[str, Source] = {}
    for other, change in changes_of(config, name):
        new = other if other.startswith("blk.") else known.get_name(other, ENDS)
        if new is None:
            raise UserError("there is no GGUF of it", f"{file}: {name}", "has no name in GGUF")
        own = tuple(change(torch.empty(shape, device="meta")).shape)
        # llama.cpp keeps a gate of one row as a vector
        own = own[1:] if len(own) == 2 and name.endswith(GATE) else own
        tensors[new] = StoredTensor(file, name, own, change)
    return tensors


def changes_of(config: ModelConfig, name: str) -> list[tuple[str, Change]]:
    if config.family in HYBRIDS:
        return changed_names(config, name.replace("model.language_model.", "model."))
    offset = config.family_spec.norm_offset if is_norm(name) else 0.0
    if heads := rotated_heads(config, name):
        return [(name, partial(in_pairs, heads=heads))]
    return [(name, partial(torch.add, other=offset) if offset else same)]


def rotated_heads(config: ModelConfig, name: str) -> int:
    """Return the number of heads in a projection whose channels llama.cpp pairs otherwise."""
    if config.family not in GGUF.pairs:
        return 0
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def number_of(name: str, shape: tuple[int, ...], numbers: str) -> Type:
    """Return the number format of a tensor, by its name in GGUF.

    Vectors are float32; rows that are no whole number of blocks are float16.
    """
    number = NUMBERS[numbers][0]
    if len(shape) < 2 or name.endswith(WHOLE):
        return Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[number]
    return number if shape[-1] % block == 0 else Type.F16


def add_shape(writer: GGUFWriter, name: str, source: Source, numbers: str) -> None:
    number = number_of(name, source.shape, numbers)
    example = gguf.quants.quantize(np.zeros((1, source.shape[-1]), np.float32), number)
    shape = (*source.shape[:-1], example.shape[-1])
    size = int(np.prod(shape)) * example.itemsize
    writer.add_tensor_info(name, shape, example.dtype, size, number)


# --- tokens


def vocabulary_of(folder: Path, size: int) -> Vocabulary:
    """Return the tokens of a folder's tokenizer. Raises UserError for one without a GGUF form.

    size: number of rows of the embedding; those without a token are named [PADi].
    """
    if (folder / "tokenizer.model").is_file():
        return sentencepiece_vocabulary(folder, size)
    if not (folder / "tokenizer.json").is_file():
        reason = "has no tokenizer, which a GGUF file includes. Copy the model's tokenizer.json"
        raise UserError("there is no GGUF of it", str(folder), reason)
    stored = json.loads((folder / "tokenizer.json").read_text())
    cut = name_of_cut(stored)
    if stored["model"]["type"] != "BPE" or cut is None:
        reason = (
            "has a tokenizer for which llama.cpp has no name.\nThere are SentencePiece's, GPT-2's,"
            " Llama 3's and Qwen's"
        )
        raise UserError("there is no GGUF of it", str(folder), reason)
    texts = {number: text for text, number in stored["model"]["vocab"].items()}
    types = dict.fromkeys(texts, NORMAL)
    for added in stored.get("added_tokens", []):
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    tokens = [texts.get(i, f"[PAD{i}]").encode() for i in range(size)]
    return Vocabulary(BYTE_LEVEL, cut, tokens, [int(types.get(i, UNUSED)) for i in range(size)])


def name_of_cut(stored: dict[str, Any]) -> str | None:
    if not stored["model"].get("merges"):
        return "default"  # each byte is a token, however the text is cut
    outer = stored.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    expressions = [(step.get("pattern") or {}).get("Regex") for step in steps]
    named = [REGEXES[text] for text in expressions if text in REGEXES]
    if named:
        return named[0]
    has_own = any(step.get("type") == "ByteLevel" and step.get("use_regex") for step in steps)
    return "gpt-2" if has_own and len(steps) == 1 else None


def sentencepiece_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Return the tokens of a SentencePiece model, and those that tokenizer.json adds to it.

    Raises UserError for one that llama.cpp would read as another: it merges pairs by their scores,
    and changes nothing in a text before.
    """
    from sentencepiece import sentencepiece_model_pb2 as messages

    file = folder / "tokenizer.model"
    model = messages.ModelProto.FromString(file.read_bytes())  # type: ignore[attr-defined]
    spec = model.normalizer_spec
    differences = {
        "is not of pairs (model_type=bpe)": model.trainer_spec.model_type != BPE,
        "takes several spaces as one (remove_extra_whitespaces)": spec.remove_extra_whitespaces,
        f"replaces characters ({spec.name})": bool(spec.precompiled_charsmap),
    }
    if reasons := [what for what, differs in differences.items() if differs]:
        reason = f"{' and '.join(reasons)}, which llama.cpp does not follow: answers would differ"
        raise UserError("there is no GGUF of it", str(file), reason)
    vocab = gguf.vocab.SentencePieceVocab(folder)
    rows = list(vocab.all_tokens())[:size]
    rows += [(f"[PAD{i}]".encode(), -10000.0, UNUSED) for i in range(len(rows), size)]
    tokens, scores, types = zip(*rows, strict=True)
    return Vocabulary(SENTENCEPIECE, "default", [*tokens], [*map(int, types)], [*scores])


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary, folder: Path, space: bool) -> None:
    """Add the tokens, the special ones among them, and the chat template. space: see GgufModel."""
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.cut)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.kind == SENTENCEPIECE and not space:
        writer.add_add_space_prefix(False)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    is_bytewise = vocabulary.kind == BYTE_LEVEL
    special = gguf.SpecialVocab(folder, load_merges=is_bytewise, n_vocab=len(vocabulary.tokens))
    if is_bytewise and not special.merges:  # llama.cpp refuses a file without the list
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
        writer.add_key_value(gguf.Keys.Tokenizer.MERGES, [], *kinds)
    special.add_to_gguf(writer, quiet=True)
