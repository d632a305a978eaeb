"""Weights of other tools are read where they lie, and are those of the same Hugging Face folder."""

import io
import pickle
import tracemalloc
from enum import Enum
from zipfile import ZIP_DEFLATED, ZipFile

import gguf
import inject
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from foreign import AS_LLAMA_CPP, Evil, export, make_other, of, require_equal, why_refused
from safetensors.torch import load_file, save_file
from stored import assert_byte_equal, stored, tensors
from tables import rows
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.fsdp import fully_shard
from world import read_json, write_json
from zoo import HF, LLAMA3, make_folder

from fsdp_trainer.base.torch_private import storage_info
from fsdp_trainer.checkpoint.exports.other_tools import _feed_forward
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.interop.folders.other_weights import described_by_meta

META = rows("""
model.embed_tokens → tok_embeddings
model.norm → norm
lm_head → output
input_layernorm → attention_norm
post_attention_layernorm → ffn_norm
self_attn.q_proj → attention.wq
self_attn.k_proj → attention.wk
self_attn.v_proj → attention.wv
self_attn.o_proj → attention.wo
mlp.gate_proj → feed_forward.w1
mlp.down_proj → feed_forward.w2
mlp.up_proj → feed_forward.w3
self_attn.q_norm → attention.q_norm
self_attn.k_norm → attention.k_norm
model.layers → layers
""")


def in_pairs(weight, heads):
    """Return rows of heads in Meta's order: the two halves of each head alternate."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def as_meta(model):
    """Return the weights of a model under Meta's names, in Meta's order."""
    config, named = model.config, {}
    for name, weight in model.state_dict().items():
        if config.model_type == "llama" and "q_proj" in name:
            weight = in_pairs(weight, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            weight = in_pairs(weight, config.num_key_value_heads)
        for old, new in META:
            name = name.replace(old, new)
        named[name] = weight.clone()
    return named


def newer_name(name):
    """Return the name that releases of torchtitan from 0.3 on have for a name of Meta's."""
    for old in ("wq", "wk", "wv"):
        name = name.replace(f"attention.{old}.", f"attention.qkv_linear.{old}.")
    return name.replace("output.", "lm_head.")


@pytest.mark.parametrize(
    "family, within", [("llama", None), ("qwen3_moe", "model"), ("phi3", "module")]
)
def test_files_of_torch_are_read_piece_by_piece(tmp_path, family, within):
    folder, other = make_other(tmp_path, family, dtype=torch.bfloat16)
    state = tensors(folder)
    state = {f"module.{name}": tensor for name, tensor in state.items()} if within else state
    torch.save({within: state, "step": 3} if within else state, other / "pytorch_model.bin")
    require_equal(folder, other)
    out = export(other, tmp_path / "out")
    assert_byte_equal(tensors(out), tensors(folder))
    assert not (out / "pytorch_model.bin").exists()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_experts_that_transformers_stacks_in_memory_are_read_from_files_of_torch(tmp_path, family):
    folder, other = make_other(tmp_path, family)
    state = of(folder).state_dict()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    torch.save({"model": state}, other / "model.pt")
    require_equal(folder, other)


def test_an_index_names_the_files_of_torch(tmp_path):
    folder, other = make_other(tmp_path)
    state = [*of(folder).state_dict().items()]
    parts = {"pytorch_model-1.bin": state[:5], "pytorch_model-2.bin": state[5:]}
    for name, part in parts.items():
        torch.save({key: tensor.clone() for key, tensor in part}, other / name)
    torch.save({"state": {}}, other / "optimizer.bin")
    names = {key: name for name, part in parts.items() for key, _ in part}
    write_json(other / "pytorch_model.bin.index.json", {"weight_map": names})
    require_equal(folder, other)
    (other / "pytorch_model-2.bin").unlink()
    assert "is not there, and pytorch_model" in why_refused(other)


def meta_params(folder):
    config = read_json(folder / "config.json")
    return {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"], "norm_eps": config["rms_norm_eps"],
        "multiple_of": config["intermediate_size"], "rope_theta": 500000.0,
    }  # fmt: skip


@pytest.mark.parametrize("files, embedding", [(1, "rows"), (2, "rows"), (2, "columns")])
@torch.no_grad()
def test_a_folder_of_metas_is_a_model_of_its_own(tmp_path, files, embedding):
    folder, other = make_other(tmp_path, rope_theta=500000.0, intermediate_size=128)
    (other / "config.json").unlink()
    write_json(other / "params.json", meta_params(folder))
    weights = as_meta(of(folder)) | {"rope.freqs": torch.ones(4)}
    for number in range(files):
        part = {}
        for name, weight in weights.items():
            by_columns = name.endswith(("attention.wo.weight", "feed_forward.w2.weight")) or (
                embedding == "columns" and name == "tok_embeddings.weight"
            )
            whole = weight.ndim < 2
            part[name] = weight if whole else weight.chunk(files, int(by_columns))[number].clone()
        torch.save(part, other / f"consolidated.{number:02}.pth")
    with inject.setting("tensor_piece_bytes", 72):  # parts of heads
        require_equal(folder, other)
    ids = torch.arange(20)[None]
    expected = of(folder)(ids).logits
    assert torch.allclose(load_model(other).logits(ids), expected, atol=1e-5)
    assert torch.allclose(of(export(other, tmp_path / "out"))(ids).logits, expected, atol=1e-6)


@pytest.mark.parametrize(
    "family, place, is_newer", [("llama", "", False), ("qwen3", "step-10", True)]
)
def test_a_checkpoint_of_torchtitans_is_read(tmp_path, family, place, is_newer):
    folder, other = make_other(tmp_path, family)
    state = as_meta(of(folder))
    if is_newer:
        state = {newer_name(name): weight for name, weight in state.items()}
    state |= {"optimizer.state.tok_embeddings.weight.exp_avg": torch.ones(3, 3)}
    state |= {"train_state": {"step": 10}, "freqs_cis": torch.ones(3)}
    dcp.save(state, checkpoint_id=other / place)
    require_equal(folder, other / place)


class EarlyPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_description_that_an_early_python_3_11_has_written_is_read(tmp_path):
    folder, other = make_other(tmp_path)
    dcp.save(as_meta(of(folder)), checkpoint_id=other)
    description = pickle.loads((other / ".metadata").read_bytes())
    with (other / ".metadata").open("wb") as file:
        EarlyPickler(file).dump(description)
    assert b"getattr" in (other / ".metadata").read_bytes()
    require_equal(folder, other)


def save_sharded(folder, checkpoint):
    """Save a model that FSDP2 has sharded over all ranks, as accelerate does."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    torch.distributed.init_process_group("gloo")
    model = of(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=checkpoint)


def test_a_run_begins_from_a_sharded_checkpoint_of_accelerates(world, train, tmp_path):
    folder, other = make_other(tmp_path, tie_word_embeddings=True)
    world.call(2, save_sharded, folder, other / "pytorch_model_fsdp_0")
    require_equal(folder, other)
    words = f"model.init_from={other} train.steps=0"
    require_equal(folder, train("run", words, base=HF, ranks=2).folder)


class Attribute:
    def __reduce__(self):
        return getattr, (torch.Size, "numel")


@pytest.mark.parametrize(
    "write, reason",
    [
        (lambda p: torch.save(Evil(), p / "pytorch_model.bin"), "holds more than tensors"),
        (lambda p: (p / "pytorch_model.bin").write_bytes(b"no"), "is no file of torch.save"),
        (lambda p: torch.save({"epoch": 3}, p / "model.pt"), "holds no weights"),
        (
            lambda p: torch.save({"w": torch.ones(2, 3).T}, p / "model.pt"),
            "w is a view that is not contiguous",
        ),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps(Evil())), "holds more than that"),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps(Attribute())), "it reads something"),
        (
            lambda p: torch.save({"model.embed_tokens.weight": torch.ones(9, 9)}, p / "a.pt"),
            "is missing; the model has it with shape",
        ),
    ],
)
def test_what_is_not_weights_alone_is_refused_with_the_reason(tmp_path, capsys, write, reason):
    _, other = make_other(tmp_path)
    write(other)
    assert reason in why_refused(other)
    assert "code of others" not in capsys.readouterr().out


def calling(module, name, *texts):
    """Return a pickle that calls what a name, with dots or not, is below a module."""

    def as_text(text):
        return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()

    parts = pickle.MARK, *map(as_text, texts), pickle.TUPLE
    named = as_text(module), as_text(name), pickle.STACK_GLOBAL
    return b"".join((pickle.PROTO, b"\x04", *named, *parts, pickle.REDUCE, pickle.STOP))


@pytest.mark.parametrize(
    "module, name",
    rows("""
torch.distributed.checkpoint.filesystem → os.system
torch.distributed.checkpoint.format_utils → torch_save_to_dcp
torch.distributed.checkpoint.metadata → os
torch → serialization.os.system
torch → load
builtins → eval
os → system
"""),
)
def test_nothing_that_a_description_names_is_imported_or_run(tmp_path, module, name):
    _, other = make_other(tmp_path)
    (other / ".metadata").write_bytes(calling(module, name, f"touch {tmp_path}/ran"))
    assert f"it names {module}.{name}" in why_refused(other)
    assert not (tmp_path / "ran").exists()


def with_a_key_that_is_hashed_for_ever():
    """Return a pickle of a dict whose key is a pair of pairs of pairs … of the same pair."""
    doubled = (pickle.BINGET + bytes([n]) for n in range(60))
    pairs = b"".join(each + each + pickle.TUPLE2 + pickle.MEMOIZE for each in doubled)
    start = pickle.PROTO + b"\x04" + pickle.EMPTY_TUPLE + pickle.MEMOIZE
    key = pickle.BINGET + bytes([60])
    return start + pairs + pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM + pickle.STOP


def doubled_lists():
    """Return a list that as a text would have 2^60 brackets."""
    doubled = []
    for _ in range(60):
        doubled = [doubled, doubled]
    return doubled


def described_with(size):
    entry = TensorStorageMetadata(TensorProperties(), size, [])
    return pickle.dumps(Metadata({"w": entry}, storage_data={}))


@pytest.mark.parametrize(
    "description",
    [
        pickle.PROTO + b"\x04" + pickle.NONE + pickle.LONG_BINPUT + b"\0\0\0\2" + pickle.STOP,
        pickle.PROTO + b"\x04" + pickle.BINBYTES8 + b"\0\0\0\x20" + bytes(4) + pickle.STOP,
        pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + b"\0\0\0\x20" + bytes(4) + pickle.STOP,
        with_a_key_that_is_hashed_for_ever(),
        described_with(doubled_lists()),
        described_with([2**70]),
        described_with([-1]),
        described_with(list(range(100_000))),
        b"",
    ],
    ids=lambda content: content[:9].hex(),
)
def test_a_small_description_takes_neither_memory_nor_time(tmp_path, description):
    _, other = make_other(tmp_path)
    (other / ".metadata").write_bytes(description)
    tracemalloc.start()
    try:
        assert "is no description of a checkpoint" in why_refused(other)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


NAME = "output.weight"


def placed_in(file, tensor, **options):
    """Return a change of a checkpoint: the description names a file with a tensor for NAME."""

    def change(checkpoint, described):
        written = io.BytesIO()
        torch.save(tensor(described.state_dict_metadata[NAME].size), written)
        written.seek(0)
        with ZipFile(written) as source, ZipFile(checkpoint / file, "w", **options) as target:
            for member in source.infolist():
                target.writestr(member.filename, source.read(member))
        (index,) = (index for index in described.storage_data if index.fqn == NAME)
        length = (checkpoint / file).stat().st_size
        described.storage_data[index] = storage_info(file, 0, length)

    return change


def without_order(size):
    """Return numbers that take more room compressed."""
    return torch.randint(-(2**31), 2**31, size, dtype=torch.int32).view(torch.float32)


def with_rows_twice(_checkpoint, described):
    """The second part begins before the first one ends, and no part has the last row."""
    entry = described.state_dict_metadata[NAME]
    (first,) = entry.chunks
    rows, columns = entry.size
    second = ChunkStorageMetadata(torch.Size([rows - 1, 0]), first.sizes)
    entry.chunks.append(second)
    entry.size = torch.Size([2 * rows, columns])
    (place,) = (p for index, p in described.storage_data.items() if index.fqn == NAME)
    described.storage_data[MetadataIndex(NAME, second.offsets)] = place


def with_too_few_rows(_checkpoint, described):
    entry = described.state_dict_metadata[NAME]
    entry.size = torch.Size([entry.size[0] + 1, entry.size[1]])


@pytest.mark.parametrize(
    "change, reason",
    [
        (placed_in("a", without_order, compression=ZIP_DEFLATED), "compressed numbers"),
        (placed_in("a", lambda size: torch.ones(size).half()), "fewer"),
        (placed_in("a", lambda size: torch.ones(size).int()), "another tensor"),
        (placed_in("a", lambda size: torch.ones(size[::-1]).T), "not contiguous"),
        (placed_in("../a", torch.ones), "is no file of the checkpoint"),
        (with_rows_twice, "some of them twice"),
        (with_too_few_rows, "264 of 265 rows"),
    ],
)
def test_numbers_that_are_not_those_of_the_description_are_refused(tmp_path, change, reason):
    folder, other = make_other(tmp_path, tie_word_embeddings=False)
    dcp.save(as_meta(of(folder)), checkpoint_id=other)
    described = pickle.loads((other / ".metadata").read_bytes())
    change(other, described)
    (other / ".metadata").write_bytes(pickle.dumps(described))
    assert reason in why_refused(other)


def test_a_file_that_was_copied_in_part_is_refused(tmp_path):
    folder, other = make_other(tmp_path)
    torch.save(of(folder).state_dict(), other / "pytorch_model.bin")
    content = (other / "pytorch_model.bin").read_bytes()
    (other / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    assert "pytorch_model.bin" in why_refused(other)


def test_weights_without_an_architecture_are_refused_with_what_to_do(train, tmp_path):
    folder, other = make_other(tmp_path)
    (other / "config.json").unlink()
    torch.save(of(folder).state_dict(), other / "pytorch_model.bin")
    assert "config.json" in train("run", f"model.init_from={other}", base=[], code=2).err


def rewritten(file, out, change):
    """Copy a GGUF file. change: returns a tensor's numbers, and their format or None."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}."):
            writer.add_key_value(name, field.contents(), field.types[-1])
    for tensor in reader.tensors:
        numbers, number_format = change(tensor)
        writer.add_tensor(tensor.name, numbers, raw_dtype=number_format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_a_gate_of_one_row_is_read_as_a_vector_and_as_a_matrix(tmp_path):
    """Releases of llama.cpp's converter differ in it."""
    folder = make_folder(tmp_path / "hf", "qwen2_moe", **AS_LLAMA_CPP["qwen2_moe"])
    file = export(folder, tmp_path / "vector.gguf", "form=gguf", "dtype=f32")
    vectors = []

    def as_matrix(tensor):
        if not tensor.name.endswith("ffn_gate_inp_shexp.weight"):
            return tensor.data, None
        vectors.append(tensor.data)
        return tensor.data[None], None

    other = rewritten(file, tmp_path / "matrix.gguf", as_matrix)
    assert [vector.ndim for vector in vectors] == [1, 1, 1]
    require_equal(folder, file)
    require_equal(folder, other)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"])
def test_blocks_of_a_gguf_file_are_decoded_as_their_authors_decode_them(tmp_path, kind):
    sizes = {"moe_intermediate_size": 256, **AS_LLAMA_CPP["qwen3_moe"]}
    folder = make_folder(tmp_path / "hf", "qwen3_moe", **sizes)
    file = export(folder, tmp_path / "whole.gguf", "form=gguf", "dtype=f32")
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    expected = {}

    def in_blocks(tensor):
        if "ffn_down_exps" not in tensor.name:
            return tensor.data, None
        *rows, columns = tensor.data.shape
        shape = *rows, columns // block * size
        blocks = np.random.default_rng(0).integers(0, 60, shape).astype(np.uint8)
        expected[tensor.name.split(".")[1]] = gguf.quants.dequantize(blocks, number)
        return blocks, number

    read = load_model(rewritten(file, tmp_path / "blocks.gguf", in_blocks)).named_weights()
    assert len(expected) == 3
    for layer, numbers in expected.items():
        weight = read[f"model.layers.{layer}.mlp.experts.down_proj"]
        assert torch.equal(weight, torch.from_numpy(numbers))


def test_a_gguf_file_that_was_copied_in_part_is_refused(tmp_path):
    file = export(make_folder(tmp_path / "hf"), tmp_path / "model.gguf", "form=gguf", "dtype=f32")
    file.write_bytes(file.read_bytes()[:-1000])
    assert "not the whole of it" in why_refused(file)


@pytest.mark.parametrize(
    "form, family, is_tied",
    yaml.safe_load("""
- [torchtitan, llama, true]
- [torchtitan, qwen3, false]
- [meta, llama, false]
- [meta, llama, true]
"""),
)
def test_what_is_exported_for_another_tool_is_read_back_to_the_bit(tmp_path, form, family, is_tied):
    folder = make_folder(tmp_path / "hf", family, tie_word_embeddings=is_tied)
    out = export(folder, tmp_path / "out", f"form={form}")
    expected = as_meta(of(folder))
    if form == "meta":
        written = torch.load(out / "consolidated.00.pth", weights_only=True)
    else:
        expected |= {newer_name(name): weight for name, weight in expected.items()}
        written = stored(out)
        stored_once = sum(weight.nbytes for weight in as_meta(of(folder)).values())
        assert sum(file.stat().st_size for file in out.glob("*.distcp")) < 1.5 * stored_once
    assert_byte_equal(written, expected)
    if is_tied and form == "meta":  # params.json cannot say it
        return
    require_equal(folder, out)


def test_meta_computes_the_same_width_from_what_is_exported():
    for width, wanted in ((4096, 11008), (4096, 14336), (8192, 28672), (2048, 8192), (48, 80)):
        params = _feed_forward(width, wanted)
        hidden = int(params["ffn_dim_multiplier"] * int(2 * 4 * width / 3))
        multiple = params["multiple_of"]
        assert multiple * ((hidden + multiple - 1) // multiple) == wanted


def test_scaled_positions_of_llama_3_are_written_for_meta(tmp_path):
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    folder = make_folder(tmp_path / "a", rope_parameters=scaling, max_position_embeddings=16384)
    read = load_model(export(folder, tmp_path / "out", "form=meta")).config
    assert read.rope_scaling == load_model(folder).config.rope_scaling


def test_a_run_with_an_adapter_is_exported_merged_for_torchtitan(ledger, tmp_path):
    run = ledger.run("adapter").folder
    titan = export(run, tmp_path / "titan", "form=torchtitan")
    require_equal(export(run, tmp_path / "hf"), titan)


@pytest.mark.parametrize("form", ["torchtitan", "meta", "gguf"])
def test_constants_of_old_folders_are_left_out_for_other_tools_and_named(tmp_path, capsys, form):
    folder = make_folder(tmp_path / "hf")
    file = folder / "model.safetensors"
    old = {"\x1b[2J.rotary_emb.inv_freq": torch.ones(3)}
    save_file(load_file(file) | old, file, {"format": "pt"})
    out = export(folder, tmp_path / "out.gguf", f"form={form}")
    said = "not in the export: 1 tensor such as \\u001b[2J.rotary_emb.inv_freq\n"
    assert said in capsys.readouterr().out
    if form != "gguf":
        require_equal(folder, out)


CHANGED = yaml.safe_load("""
olmoe: {num_key_value_heads: 2}
qwen3_moe: {norm_topk_prob: false}
qwen2_moe: {decoder_sparse_step: 2}
llama: {intermediate_size: 72}
""")
WITHOUT_FORM = rows("""
gemma2 → form=gguf → query_pre_attn_scalar=24
olmoe → form=gguf → num_key_value_heads=2
qwen3_moe → form=gguf → norm_topk_prob=false
qwen2_moe → form=gguf → dense feed-forwards in some blocks
deepseek_v3 → form=gguf → only llama mistral mixtral qwen2
llama → form=gguf dtype=q4_k → q8_0
llama yarn → form=meta → has no place in Meta's params.json
gemma2 → form=torchtitan → model_type=gemma2
llama → form=meta dtype=q8_0 → only counts with  form=gguf
llama → form=meta merge_into=trained → only counts with  form=merged
llama → form=compressed → needs  quantization=fp8|int8|int4
llama → quantization=fp8 → only counts with  form=compressed
gpt_oss → form=compressed quantization=fp8 → has all experts in one tensor
llama → form=compressed quantization=int4 → no multiple of 32: use int8
""")


@pytest.mark.parametrize("family, words, reason", WITHOUT_FORM)
def test_what_has_no_form_in_another_tool_is_refused_and_nothing_is_left(
    tmp_path, capsys, family, words, reason
):
    options = AS_LLAMA_CPP.get(family, {}) if family != "gemma2" else {}
    folder = make_folder(tmp_path / "hf", family, **options | CHANGED.get(family, {}))
    export(folder, tmp_path / "out.gguf", *words.split(), code=2)
    assert reason in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


PUBLISHED = yaml.safe_load("""
Llama-2-7b:
  params: {dim: 4096, multiple_of: 256, n_heads: 32, n_layers: 32, norm_eps: 1.0e-5, vocab_size: -1}
  config: {intermediate_size: 11008, vocab_size: 32000, num_key_value_heads: 32,
    max_position_embeddings: 4096, tie_word_embeddings: false}
Llama-3.1-70B:
  params: {dim: 8192, n_layers: 80, n_heads: 64, multiple_of: 4096, ffn_dim_multiplier: 1.3,
    n_kv_heads: 8, vocab_size: 128256, norm_eps: 1.0e-5, rope_theta: 500000.0,
    use_scaled_rope: true}
  config: {intermediate_size: 28672, factor: 8.0, max_position_embeddings: 131072,
    tie_word_embeddings: false}
Llama-3.2-1B:
  params: {dim: 2048, n_layers: 16, n_heads: 32, multiple_of: 256, ffn_dim_multiplier: 1.5,
    n_kv_heads: 8, vocab_size: 128256, norm_eps: 1.0e-5, rope_theta: 500000.0,
    use_scaled_rope: true}
  config: {intermediate_size: 8192, factor: 32.0, tie_word_embeddings: true,
    num_key_value_heads: 8}
""")


@pytest.mark.parametrize("model", PUBLISHED)
def test_params_of_metas_models_are_the_published_configurations(tmp_path, model):
    write_json(tmp_path / "params.json", PUBLISHED[model]["params"])
    config, published = described_by_meta(tmp_path), PUBLISHED[model]["config"]
    config |= config.get("rope_scaling", {})
    assert {name: config[name] for name in published} == published
