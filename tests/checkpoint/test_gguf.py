"""GGUF files: read back by the packages that own the format, and compared with their source."""

import struct

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import yaml
from folders import table
from foreign import AS_LLAMA_CPP, export
from other_models import make_other_folder
from refused import refusal
from sentencepiece import sentencepiece_model_pb2
from stored import assert_byte_equal, tensors
from tables import rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from world import read_json, write_json
from zoo import make_folder

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.data.tokens.encoding import QWEN
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders import gguf_header
from fsdp_trainer.interop.folders.gguf_description import described_by_gguf
from fsdp_trainer.interop.weights.gguf_file import REGEXES

TEXTS = ["Hello there, 12345 world!", "  two  spaces\n\nand lines", "naïve café 東京 ½"]
SAMPLE = [" ".join(["the cat sat on the mat and it's 123 times there"] * 5), *TEXTS] * 3


def exported(folder, file, *words):
    return gguf.GGUFReader(export(folder, file, "form=gguf", *words))


def facts(reader):
    """Return {key: value} of a file's metadata."""
    return {name: field.contents() for name, field in reader.fields.items()}


def numbers(reader):
    """Return {name: float32 array} of a file's tensors."""
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def logits(folder, **options):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, **options
    )
    return model.eval()(IDS).logits


IDS = torch.arange(24)[None]
TIED = ["llama biases", "qwen2", "gemma2", "gemma3"]
UNTIED = ["llama", "olmo2", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "olmoe", "phi3"]
NOT_READ = ["llama biases", "mixtral", "olmo2", "olmoe"]
"""Families of which transformers reads no GGUF file, or not as llama.cpp does."""


@pytest.mark.parametrize("family", [*TIED, *UNTIED])
@torch.no_grad()
def test_a_gguf_file_is_a_model_of_its_own_and_transformers_computes_the_same_of_it(
    tmp_path, family
):
    options = AS_LLAMA_CPP.get(family, {}) | {"tie_word_embeddings": family in TIED}
    folder = make_folder(tmp_path / "hf", family, **options)
    file = export(folder, folder / "a.gguf", "form=gguf", "dtype=f32")
    original, read = load_model(folder), load_model(file)
    # 1 is added to norms of Gemma in the file, and taken away as it is read
    limit = 2.5e-7 if original.config.family_spec.norm_offset else 0
    expected, weights = (dict(model.named_weights()) for model in (original, read))
    assert expected.keys() == weights.keys()
    for name, weight in expected.items():
        assert (weights[name] - weight).abs().max() <= limit, name
    assert read.config.windows == original.config.windows
    assert read.config.feed_forwards == original.config.feed_forwards
    assert torch.allclose(read.logits(IDS), original.logits(IDS), atol=2e-5 if limit else 0)
    if family not in NOT_READ:
        assert torch.equal(logits(folder, gguf_file=file.name), logits(folder))


HYBRIDS = table("checkpoint/gguf_hybrids.yaml")
"""Options of small models by model_type, and which."""


def hybrid_folder(folder, which):
    return make_other_folder(folder, which.split()[0], **HYBRIDS[which])


@pytest.mark.parametrize("which", HYBRIDS)
def test_a_hybrid_has_all_its_numbers_under_llama_cpps_names(tmp_path, which):
    """transformers reads two of them itself; llama.cpp all of them: tools/own_readers.py."""
    folder = hybrid_folder(tmp_path / "hf", which)
    file = export(folder, folder / "a.gguf", "form=gguf", "dtype=f32")
    read = gguf.GGUFReader(file)
    kind = facts(read)["general.architecture"]
    (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    patterns = [gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[arch]]
    known = {pattern.format(bid=i) for pattern in patterns for i in range(4)}
    values = numbers(read)
    for name in values:
        assert name.removesuffix(".weight").removesuffix(".bias") in known, name
    stored = sum(each.numel() for each in tensors(folder).values())
    assert sum(each.size for each in values.values()) == stored
    if kind in ("lfm2", "mamba"):
        assert torch.equal(logits(folder, gguf_file=file.name), logits(folder))
    if which == "qwen3_5_text":  # file: first the first value head of each key head
        own = tensors(folder)["model.layers.0.linear_attn.in_proj_z.weight"].view(2, 2, 8, -1)
        heads = torch.tensor(values["blk.0.attn_gate.weight"]).view(4, 8, -1)
        for i, (group, place) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
            assert torch.equal(heads[i], own[group, place])


@pytest.mark.parametrize(
    "kind, options, reason",
    yaml.safe_load("""
- [lfm2, {conv_bias: true}, conv_bias=true]
- [qwen3_5_text, {layer_types: [full_attention, linear_attention]}, layer_types=]
- [falcon_h1, {mamba_rms_norm: true}, mamba_norm_before_gate=true]
- [kimi_linear, {}, model_type=kimi_linear]
- [nemotron_h, {}, dense feed-forwards beside experts]
"""),
)
def test_a_hybrid_that_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path, kind, options, reason, capsys
):
    folder = make_other_folder(tmp_path / "hf", kind, **options)
    export(folder, tmp_path / "a.gguf", "form=gguf", code=2)
    assert reason in capsys.readouterr().err


def test_each_number_is_as_near_as_its_format_allows(tmp_path):
    folder = make_folder(tmp_path / "hf", "llama")
    whole = numbers(exported(folder, tmp_path / "a.gguf", "dtype=f32"))
    assert_byte_equal(tensors(export(tmp_path / "a.gguf", tmp_path / "again")), tensors(folder))
    for dtype, digits in (("f16", 11), ("bf16", 8)):
        read = exported(folder, tmp_path / f"{dtype}.gguf", f"dtype={dtype}")
        for name, values in numbers(read).items():
            limit = 2.0**-digits * np.abs(whole[name]) + 1e-7
            assert (np.abs(values - whole[name]) <= (limit if values.ndim > 1 else 0)).all(), name
    for name, values in numbers(exported(folder, tmp_path / "q.gguf", "dtype=q8_0")).items():
        blocks = whole[name].reshape(-1, min(32, whole[name].shape[-1]))
        # half a step of 127, and the rounding of the step to float16
        limit = np.abs(blocks).max(1, keepdims=True) * (0.5 / 127 + 2.0**-11) + 1e-7
        assert (np.abs(values.reshape(blocks.shape) - blocks) <= limit).all(), name


def test_the_metadata_are_those_of_llama_cpps_converter(tmp_path):
    folder = make_folder(tmp_path / "hf", "llama")
    config = read_json(folder / "config.json")
    read = facts(exported(folder, tmp_path / "model.gguf"))
    assert read["general.architecture"] == "llama"
    assert read["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    of_config = rows("""
block_count → num_hidden_layers
context_length → max_position_embeddings
embedding_length → hidden_size
feed_forward_length → intermediate_size
attention.head_count → num_attention_heads
attention.head_count_kv → num_key_value_heads
vocab_size → vocab_size
""")
    for name, key in of_config:
        assert read[f"llama.{name}"] == config[key], name
    assert read["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
    assert read["llama.rope.dimension_count"] == config["head_dim"]
    tokenizer = read_json(folder / "tokenizer_config.json")
    tokens = read["tokenizer.ggml.tokens"]
    assert len(tokens) == len(read["tokenizer.ggml.token_type"]) == config["vocab_size"]
    assert tokens[read["tokenizer.ggml.eos_token_id"]] == tokenizer["eos_token"]
    assert read["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text()


def test_positions_beyond_the_training_length_are_scaled_as_llama_3_1s(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = make_folder(tmp_path / "hf", "llama")
    file = folder / "config.json"
    config = read_json(file)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config.pop("rope_theta", None)
    config["rope_parameters"] = {**scaling, "rope_theta": 10000.0}
    write_json(file, config)
    factors = numbers(exported(folder, tmp_path / "a.gguf"))["rope_freqs.weight"]
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    width = config["head_dim"]
    plain = 10000.0 ** -(np.arange(0, width, 2) / width)
    np.testing.assert_allclose(plain / factors, theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize("expression", REGEXES)
def test_a_byte_level_tokenizer_encodes_the_same_from_the_file(tmp_path, expression):
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path / "hf", "qwen2")
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(expression), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=262, initial_alphabet=alphabet, special_tokens=["<|im_end|>"]
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}'
    )
    read = facts(exported(folder, folder / "a.gguf"))
    assert read["tokenizer.ggml.pre"] == REGEXES[expression]
    assert read["tokenizer.ggml.tokens"][262:] == ["[PAD262]", "[PAD263]"]
    merges = read_json(folder / "tokenizer.json")["model"]["merges"]
    assert read["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    ours = load_tokenizer(folder / "a.gguf")
    assert [ours.encode(text) for text in TEXTS] == [tokenizer.encode(t).ids for t in TEXTS]
    assert (ours.special["eos_token"], ours.first_added()) == ("<|im_end|>", [])
    if expression == QWEN:  # transformers cuts every Qwen 2 tokenizer like this
        from_file = AutoTokenizer.from_pretrained(folder, gguf_file="a.gguf")
        for text in TEXTS:
            ids = from_file(text, add_special_tokens=False)["input_ids"]
            assert ids == tokenizer.encode(text).ids, text


def test_transformers_reads_a_tokenizer_of_bytes_alone_from_the_file(tmp_path):
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path / "hf", "llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    merges = exported(folder, folder / "a.gguf").fields["tokenizer.ggml.merges"]
    assert len(merges.data) == 0  # llama.cpp asks for the list
    from_file = AutoTokenizer.from_pretrained(folder, gguf_file="a.gguf")
    ours = load_tokenizer(folder / "a.gguf")
    for text in TEXTS:
        ids = from_file(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text) == tokenizer.encode(text).ids, text


def test_a_sentencepiece_tokenizer_is_kept_with_its_scores_and_types(tmp_path, capsys):
    folder = make_folder(tmp_path / "hf", "llama", vocab_size=304)
    (tmp_path / "text").write_text("\n".join(SAMPLE * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=300,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    known = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    config = read_json(folder / "config.json")
    count = min(known.vocab_size(), config["vocab_size"])
    (folder / "tokenizer.json").unlink()
    read = facts(exported(folder, tmp_path / "a.gguf"))
    assert read["tokenizer.ggml.model"] == "llama"
    tokens = read["tokenizer.ggml.tokens"][:count]
    assert tokens == [known.id_to_piece(i) for i in range(count)]
    assert read["tokenizer.ggml.scores"][:count] == [known.get_score(i) for i in range(count)]
    types = read["tokenizer.ggml.token_type"]
    assert types[0] == gguf.TokenType.UNKNOWN
    assert types[1] == gguf.TokenType.CONTROL
    assert types[tokens.index("<0x41>")] == gguf.TokenType.BYTE
    original, ours = map(load_tokenizer, map(str, (folder, tmp_path / "a.gguf")))
    assert [ours.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]
    assert ours.first_added() == [known.bos_id()]
    model = sentencepiece_model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    model.normalizer_spec.remove_extra_whitespaces = True
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    export(folder, tmp_path / "b.gguf", "form=gguf", code=2)
    assert "takes several spaces as one" in capsys.readouterr().err


def test_a_file_that_exists_or_a_tokenizer_without_a_name_there_is_refused(tmp_path, capsys):
    folder, there = make_folder(tmp_path / "hf", "llama"), tmp_path / "there.gguf"
    there.touch()
    for out, said in ((folder, "out=model.gguf"), (there, "exists; choose another file")):
        export(folder, out, "form=gguf", code=2)
        assert said in capsys.readouterr().err
    file = folder / "tokenizer.json"
    stored = read_json(file)
    stored["model"]["merges"] = [["a", "b"]]
    write_json(file, stored)
    out = export(folder, tmp_path / "a.gguf", "form=gguf", code=2)
    assert "llama.cpp has no name" in capsys.readouterr().err
    assert not out.exists()


def adapter_of(world, folder, run, *words):
    """Return the folder of a run that trains an adapter for a model."""
    keys = [f"model.init_from={folder} data.path=demo:sums optim.lr=1e-2", *words]
    world.train(run, *keys, "batch.seq_len=64 batch.rows=4", base=[])
    return run


@pytest.mark.parametrize("family, scaling", [("llama", "rslora"), ("qwen3", "standard")])
def test_an_adapter_added_to_the_base_models_file_is_the_merged_models_file(
    world, tmp_path, family, scaling
):
    words = f"adapter=lora adapter.rank=4 adapter.scaling={scaling} train.steps=2"
    folder = make_folder(tmp_path / "hf", family)
    run = adapter_of(world, folder, tmp_path / "run", words)
    base = exported(folder, tmp_path / "base.gguf", "dtype=f32")
    merged = numbers(exported(run, tmp_path / "merged.gguf", "dtype=f32"))
    adapter = gguf.GGUFReader(export(run, tmp_path / "adapter.gguf", "form=gguf_adapter"))
    about, parts = facts(adapter), numbers(adapter)
    assert (about["general.type"], about["adapter.type"]) == ("adapter", "lora")
    assert about["general.architecture"] == facts(base)["general.architecture"]
    scale = about["adapter.lora.alpha"] / 4
    changed = 0
    for name, whole in numbers(base).items():
        a, b = (parts.pop(f"{name}.lora_{part}", None) for part in "ab")
        expected = whole if a is None else whole + scale * b @ a
        changed += a is not None and not np.array_equal(expected, whole)
        assert np.allclose(merged[name], expected, atol=1e-5), name
    assert changed > 0
    assert parts == {}


def test_an_adapter_that_llama_cpp_does_not_load_is_refused(world, ledger, tmp_path, capsys):
    folder, out = make_folder(tmp_path / "hf"), tmp_path / "adapter.gguf"

    def adapter(name, *words):
        return adapter_of(world, folder, tmp_path / name, "train.steps=0", *words)

    for source, dtype, reason in (
        (ledger.run("plain").folder, "f32", "has no adapter"),
        (ledger.run("adapter").folder, "q8_0", "use f32, f16 or bf16"),
        (adapter("dora", "adapter=dora"), "f32", "DoRA's magnitudes have no place"),
        (
            adapter("ranks", "adapter=lora adapter.rank_pattern={q_proj: 2}"),
            "f32",
            "has one scale for all layers",
        ),
    ):
        export(source, out, "form=gguf_adapter", f"dtype={dtype}", code=2)
        assert reason in capsys.readouterr().err
        assert not out.exists()


# --- files that anyone may have written

U32, F32, TEXT, LIST = 4, 6, 8, 9
CASES = table("checkpoint/broken_gguf.yaml")


def as_text(text):
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content)) + content


def fact(name, value):
    """Return a value and its name as a file has them. See CASES."""
    if isinstance(value, list):
        return as_text(name) + struct.pack("<IIQ", LIST, *value)
    if isinstance(value, str | bytes):
        return as_text(name) + struct.pack("<I", TEXT) + as_text(value)
    kind, form = (F32, "<If") if isinstance(value, float) else (U32, "<II")
    return as_text(name) + struct.pack(form, kind, value)


def matrix(name="token_embd.weight", shape=(64, 256), kind=1, place=0):
    """Return what a file says of a tensor."""
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return as_text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, place)


def gguf_bytes(facts, tensors=(), version=3, counts=None):
    """Return a file. counts: what it says of the number of tensors and facts."""
    head = struct.pack("<IQQ", version, *(counts or (len(tensors), len(facts))))
    content = b"GGUF" + head + b"".join([*facts, *tensors])
    return content + bytes(-len(content) % 32) + bytes(2**16)


def file_of(facts=None, tensors=({},), only=False, times=1, **options):
    """Return a file of the model in CASES with other facts and tensors."""
    values = (facts or {}) if only else CASES["llama"] | (facts or {})
    matrices = [] if only else [matrix(**each) for each in tensors]
    return gguf_bytes([fact(*each) for each in values.items()] * times, matrices, **options)


LISTS = struct.pack("<I", LIST) + struct.pack("<IQ", LIST, 1) * 3000
BROKEN = {name: (file_of(**case), reason) for name, (case, reason) in CASES["broken"].items()} | {
    "empty": (b"", "its first bytes are others"),
    "text": (gguf_bytes([as_text("a") + struct.pack("<IQ", TEXT, 2**63)]), "ends before"),
    "lists": (gguf_bytes([as_text("a") + LISTS]), "unknown kind 9"),
    "kind": (gguf_bytes([as_text("a") + struct.pack("<I", 77)]), "unknown kind 77"),
    "twice": (file_of(times=2), "twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_lies_is_refused_before_its_counts_are_believed(tmp_path, case):
    content, reason = BROKEN[case]
    (tmp_path / "model.gguf").write_bytes(content)
    said = refusal(described_by_gguf, tmp_path / "model.gguf")
    assert "cannot read the model" in said
    assert reason in said


@pytest.mark.parametrize("shape, kind", [((64,), 8), ((64, 256), 24)])
def test_a_tensor_that_the_package_gguf_does_not_decode_is_refused(tmp_path, shape, kind):
    norm = {"name": "output_norm.weight", "shape": shape, "kind": kind}
    (tmp_path / "model.gguf").write_bytes(file_of(tensors=[{}, norm]))
    with pytest.raises(UserError, match=r"output_norm\.weight with .* which is not read"):
        load_model(tmp_path / "model.gguf")


def test_facts_and_places_are_those_that_the_package_gguf_reads(tmp_path):
    file = export(make_folder(tmp_path / "in", "qwen3"), tmp_path / "model.gguf", "form=gguf")
    reader, header = gguf.GGUFReader(file), gguf_header.read_header(file)
    for name, value in facts(reader).items():
        own = header.facts.get(name)
        assert name.startswith("GGUF.") or own == (None if isinstance(value, list) else value)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        own = header.tensors[tensor.name]
        assert (own.offset, own.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert own.shape == tuple(tensor.shape)
