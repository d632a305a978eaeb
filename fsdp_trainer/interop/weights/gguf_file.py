"""A Hugging Face folder as a GGUF file, with the names and metadata of llama.cpp's own converter.

The package gguf, of llama.cpp's authors, writes the file and knows the names. Tensors are read,
converted and written one after another.
"""

import json
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors import safe_open

from fsdp_trainer.data.tokens.word_cache import LLAMA_3, QWEN
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.weights.foreign_tensors import in_pairs
from fsdp_trainer.interop.weights.gguf_models import MODELS
from fsdp_trainer.interop.weights.tensor_names import GGUF, is_norm
from fsdp_trainer.models.config import EXPERTS, ModelConfig
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
REGEXES = {QWEN: "qwen2", LLAMA_3: "llama-bpe"}
"""llama.cpp's names of how a text is cut before its pieces are encoded, by the expression."""
# it warns of each token that a pair of texts begins with, as Llama 3's
logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
BPE = 2
"""SentencePiece's number of a model that merges pairs."""
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
    require_known(config, folder)
    vocabulary = vocabulary_of(folder, config.vocab_size)
    partial = file.with_name(f".{file.name}.partial")
    writer = Writer(None, gguf.MODEL_ARCH_NAMES[MODELS[config.family].architecture])
    try:
        add_facts(writer, config, folder, numbers)
        add_vocabulary(writer, vocabulary, folder, MODELS[config.family].space)
        tensors, left_out = names_of(config, folder)
        for name, source in tensors.items():
            add_shape(writer, name, source, numbers)
        add_rope_factors(writer, config)
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for source in tensors.values():
            number = number_of(source.shape, numbers)
            writer.write_tensor_data(gguf.quants.quantize(source.read(), number))
        for factors in rope_factors(config):
            writer.write_tensor_data(factors)
        writer.close()
        partial.replace(file)
        return left_out
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def require_known(config: ModelConfig, folder: Path) -> None:
    if config.family not in MODELS or config.by_transformers:
        reason = f"is not written as GGUF: only {' '.join(MODELS)} are.\n{BY_LLAMA_CPP}"
        raise UserError("there is no GGUF of it", [Problem(f"model_type={config.family}", reason)])
    for difference in MODELS[config.family].differences(config):
        reason = "is not what llama.cpp assumes of these models: it would compute something else"
        raise UserError("there is no GGUF of it", [Problem(f"{folder}: {difference}", reason)])
    kind = (config.rope_scaling or {}).get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        reason = f"is a scaling of positions that is not written as GGUF.\n{BY_LLAMA_CPP}"
        raise UserError("there is no GGUF of it", [Problem(f"{folder}: rope_type={kind}", reason)])


# --- facts


def add_facts(writer: GGUFWriter, config: ModelConfig, folder: Path, numbers: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(folder.resolve().name)
    writer.add_file_type(NUMBERS[numbers][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    if scaling.get("rope_type") == "yarn":
        original = scaling.get("original_max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(int(original or config.max_position_embeddings))
    MODELS[config.family].add(writer, config)


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
    """Announce the tensor of `rope_factors`."""
    for factors in rope_factors(config):
        writer.add_tensor_info(
            "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes, Type.F32
        )


# --- tensors


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file.

    heads: rotated ones in it, 0: none. offset: is added to all numbers.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    offset: float = 0.0

    def read(self) -> np.ndarray:
        """Return the numbers as float32, in the order of llama.cpp."""
        with safe_open(self.file, framework="pt") as opened:
            tensor = opened.get_tensor(self.name).to(torch.float32)
        if self.offset:
            tensor += self.offset
        if self.heads:
            tensor = in_pairs(tensor, self.heads)
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
    architecture = MODELS[config.family].architecture
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    experts = expert_places(config)
    tensors: dict[str, Source] = {}
    left_out = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if is_unread(name, config):
                left_out.append(name)
                continue
            if name in experts:
                whole, number = experts[name]
                stack = tensors.setdefault(whole, StackedExperts({}))
                assert isinstance(stack, StackedExperts)
                stack.experts[number] = StoredTensor(file, name, shape)
                continue
            new = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is None:
                problem = Problem(f"{file}: {name}", "has no name in GGUF")
                raise UserError("there is no GGUF of it", [problem])
            # llama.cpp keeps a gate of one row as a vector
            shape = shape[1:] if shape[:1] == (1,) and len(shape) == 2 else shape
            offset = config.family_spec.norm_offset if is_norm(name) else 0.0
            tensors[new] = StoredTensor(file, name, shape, rotated_heads(config, name), offset)
    return tensors, left_out


def expert_places(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return, by the name of an expert's matrix in a folder, its stack in GGUF and its number."""
    family = config.family_spec
    if EXPERTS not in config.feed_forwards:
        return {}
    return {
        family.stored_expert(f"model.layers.{block}.mlp.experts.{part}_proj", expert): (
            f"blk.{block}.ffn_{part}_exps.weight",
            expert,
        )
        for block in range(config.num_hidden_layers)
        for part in ("gate", "up", "down")
        for expert in range(config.num_experts)
    }


def rotated_heads(config: ModelConfig, name: str) -> int:
    """Return the number of heads in a projection whose channels llama.cpp pairs otherwise."""
    if config.family not in GGUF.pairs:
        return 0
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def number_of(shape: tuple[int, ...], numbers: str) -> Type:
    """Return the number format of a tensor.

    Vectors are float32; rows that are no whole number of blocks are float16.
    """
    number = NUMBERS[numbers][0]
    if len(shape) < 2:
        return Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[number]
    return number if shape[-1] % block == 0 else Type.F16


def add_shape(writer: GGUFWriter, name: str, source: Source, numbers: str) -> None:
    number = number_of(source.shape, numbers)
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
        raise UserError("there is no GGUF of it", [Problem(str(folder), reason)])
    stored = json.loads((folder / "tokenizer.json").read_text())
    cut = name_of_cut(stored)
    if stored["model"]["type"] != "BPE" or cut is None:
        reason = (
            "has a tokenizer for which llama.cpp has no name.\nThere are SentencePiece's, GPT-2's,"
            " Llama 3's and Qwen's"
        )
        raise UserError("there is no GGUF of it", [Problem(str(folder), reason)])
    texts = {number: text for text, number in stored["model"]["vocab"].items()}
    types = dict.fromkeys(texts, NORMAL)
    for added in stored.get("added_tokens", []):
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    tokens = [texts.get(i, f"[PAD{i}]").encode() for i in range(size)]
    return Vocabulary(BYTE_LEVEL, cut, tokens, [int(types.get(i, UNUSED)) for i in range(size)])


def name_of_cut(stored: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of how a byte-level tokenizer cuts a text; None if it has none."""
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
        raise UserError("there is no GGUF of it", [Problem(str(file), reason)])
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
