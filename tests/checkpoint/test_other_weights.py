"""Weights of other tools are read where they lie, and are those of the same Hugging Face folder."""

import json
import pickle
from enum import Enum

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign import AS_LLAMA_CPP, make_other, of, require_equal
from safetensors.torch import load_file
from stored import assert_byte_equal, stored, tensors
from torch.distributed.fsdp import fully_shard
from zoo import LLAMA3, make_folder

from fsdp_trainer.checkpoint.export_other import _feed_forward
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.checkpoint.other_tools.foreign_tensors import HalvedHeads
from fsdp_trainer.config.other_tools.other_weights import described_by_meta
from fsdp_trainer.errors import UserError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

META = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "model.layers": "layers",
}  # fmt: skip


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
        for old, new in META.items():
            name = name.replace(old, new)
        named[name] = weight.clone()
    return named


def newer_name(name):
    """Return the name that releases of torchtitan from 0.3 on have for a name of Meta's."""
    for old in ("wq", "wk", "wv"):
        name = name.replace(f"attention.{old}.", f"attention.qkv_linear.{old}.")
    return name.replace("output.", "lm_head.")


@pytest.mark.parametrize("within", [None, "model", "module"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3"])
def test_files_of_torch_are_read_piece_by_piece(tmp_path, family, within):
    folder, other = make_other(tmp_path, family, dtype=torch.bfloat16)
    state = load_file(folder / "model.safetensors")
    state = {f"module.{name}": tensor for name, tensor in state.items()} if within else state
    torch.save({within: state, "step": 3} if within else state, other / "pytorch_model.bin")
    require_equal(folder, other)


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss"]
)
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
    (other / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    require_equal(folder, other)
    (other / "pytorch_model-2.bin").unlink()
    with pytest.raises(UserError, match="is not there, and pytorch_model"):
        load_model(other)


def meta_params(folder, **others):
    config = json.loads((folder / "config.json").read_text())
    return {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"], "norm_eps": config["rms_norm_eps"],
        "multiple_of": config["intermediate_size"], "rope_theta": 500000.0, **others,
    }  # fmt: skip


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("embedding", ["rows", "columns"])
def test_a_folder_of_metas_is_a_model_of_its_own(tmp_path, files, embedding):
    folder, other = make_other(tmp_path, rope_theta=500000.0, intermediate_size=128)
    (other / "config.json").unlink()
    (other / "params.json").write_text(json.dumps(meta_params(folder)))
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
    require_equal(folder, other)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(load_model(other).logits(ids), of(folder)(ids).logits, atol=1e-5)


def test_heads_of_metas_give_the_scores_that_metas_rotation_gives():
    """Meta rotates pairs of neighbouring channels as complex numbers, Hugging Face halves."""
    torch.manual_seed(0)
    heads, width, length = 3, 8, 5
    x = torch.randn(length, 12)
    query, key = torch.randn(2, heads * width, 12)
    angles = torch.outer(torch.arange(length), 100.0 ** -(torch.arange(0, width, 2) / width))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def by_meta(weight):
        states = (x @ weight.T).view(length, heads, width // 2, 2)
        return torch.view_as_real(torch.view_as_complex(states) * turns).flatten(2)

    def by_halves(weight):
        one, two = (x @ weight.T).view(length, heads, width).chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def scores(rotate, *weights):
        return torch.einsum("qhd,khd->hqk", *(rotate(weight) for weight in weights))

    theirs = scores(by_meta, query, key)
    halved = [halves(weight, width) for weight in (query, key)]
    assert torch.allclose(scores(by_halves, *halved), theirs, atol=1e-5)


class InMemory(TensorOnDisk):
    def read_rows(self, first, last, buffer):
        return self.matrix[first:last].clone()


def halves(weight, head_rows):
    source = InMemory(weight.dtype, tuple(weight.shape), [])
    source.matrix = weight
    tensor = HalvedHeads(weight.dtype, tuple(weight.shape), [], source, head_rows)
    rows = [
        tensor.read_rows(first, last, torch.empty(4 * weight.numel(), dtype=torch.uint8)).clone()
        for first, last in ((0, 3), (3, 17), (17, len(weight)))
    ]
    return torch.cat(rows)


def test_rows_of_any_part_of_a_head_are_put_back():
    weight = torch.arange(24.0)[:, None]
    assert torch.equal(halves(in_pairs(weight, 3), 8), weight)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("place", "is_newer"), [("", False), ("step-10", True)])
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

    model = of(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=checkpoint)


def as_rank(function, *args):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        function(*args)
    finally:
        dist.destroy_process_group()


def test_a_sharded_checkpoint_of_accelerates_trains_as_the_folder_does(world, tmp_path, inputs):
    folder, other = make_other(tmp_path, tie_word_embeddings=True)
    world.call(2, as_rank, save_sharded, folder, other / "pytorch_model_fsdp_0")
    require_equal(folder, other)
    keys = ["precision=fp32", "train.steps=2", "batch.seq_len=64", "batch.rows=4", "optim.lr=1e-3",
            *(f"{key}={value}" for key, value in inputs.items())]  # fmt: skip
    runs = [
        world.train(tmp_path / name, f"model.init_from={path}", *keys, base=[], ranks=2)
        for name, path in (("a", folder), ("b", other))
    ]
    ours, theirs = (tensors(run.folder / "checkpoints" / "step-00000002") for run in runs)
    assert_byte_equal(ours, theirs)


class Evil:
    def __reduce__(self):
        return print, ("code of others runs",)


class Attribute:
    def __reduce__(self):
        return getattr, (torch.Size, "numel")


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda p: torch.save(Evil(), p / "pytorch_model.bin"), "holds more than tensors"),
        (lambda p: (p / "pytorch_model.bin").write_bytes(b"no"), "is no file of torch.save"),
        (lambda p: torch.save({"epoch": 3}, p / "model.pt"), "holds no weights"),
        (
            lambda p: torch.save({"w": torch.ones(2, 3).T}, p / "model.pt"),
            "w is a view that is not contiguous",
        ),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps(Evil())), "holds more than that"),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps(Attribute())), "it reads numel of"),
        (
            lambda p: torch.save({"model.embed_tokens.weight": torch.ones(9, 9)}, p / "a.pt"),
            "is missing; the model has it with shape",
        ),
    ],
)
def test_what_is_not_weights_alone_is_refused_with_the_reason(tmp_path, capsys, write, reason):
    _, other = make_other(tmp_path)
    write(other)
    with pytest.raises(UserError) as caught:
        load_model(other)
    assert reason in str(caught.value)
    assert "code of others" not in capsys.readouterr().out


def test_a_file_that_was_copied_in_part_is_refused(tmp_path):
    folder, other = make_other(tmp_path)
    torch.save(of(folder).state_dict(), other / "pytorch_model.bin")
    content = (other / "pytorch_model.bin").read_bytes()
    (other / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        load_model(other)


def test_weights_without_an_architecture_are_refused_with_what_to_do(world, tmp_path, inputs):
    folder, other = make_other(tmp_path)
    (other / "config.json").unlink()
    torch.save(of(folder).state_dict(), other / "pytorch_model.bin")
    keys = [f"{key}={value}" for key, value in inputs.items()]
    (result,) = world.command("train", f"model.init_from={other}", *keys, code=2)
    assert "config.json" in result.err


def export_gguf(world, folder, out, dtype):
    world.command("export", f"source={folder}", f"out={out}", "form=gguf", f"dtype={dtype}")
    return out


@pytest.mark.parametrize(
    "family",
    [
        "llama", "llama biases", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "gemma2", "gemma3", "olmo2", "olmoe", "phi3",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.grid(12)
def test_a_gguf_file_is_a_model_of_its_own(world, tmp_path, family, is_tied):
    if family.startswith("gemma") and not is_tied:
        pytest.skip("Gemma's head is tied")
    options = AS_LLAMA_CPP.get(family, {}) | {"tie_word_embeddings": is_tied}
    folder = make_folder(tmp_path / "hf", family, **options)
    file = export_gguf(world, folder, tmp_path / "model.gguf", "f32")
    original, read = load_model(folder), load_model(file)
    # 1 is added to norms of Gemma in the file, and taken away as it is read
    limit = 2.5e-7 if original.config.family_spec.norm_offset else 0
    expected, weights = (dict(model.named_weights()) for model in (original, read))
    assert expected.keys() == weights.keys()
    for name, weight in expected.items():
        assert (weights[name] - weight).abs().max() <= limit, name
    assert read.config.windows == original.config.windows
    assert read.config.feed_forwards == original.config.feed_forwards
    ids = torch.arange(30)[None]
    with torch.no_grad():
        ours, theirs = read.logits(ids), original.logits(ids)
    assert torch.allclose(ours, theirs, atol=2e-5 if limit else 0)


def test_experts_in_blocks_of_few_bits_are_decoded_as_their_authors_decode_them(world, tmp_path):
    gguf = pytest.importorskip("gguf")
    sizes = {"moe_intermediate_size": 64, **AS_LLAMA_CPP["qwen3_moe"]}
    folder = make_folder(tmp_path / "hf", "qwen3_moe", **sizes)
    file = export_gguf(world, folder, tmp_path / "model.gguf", "q8_0")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    weights = load_model(file).named_weights()
    for part in ("gate", "up", "down"):
        tensor = stored[f"blk.0.ffn_{part}_exps.weight"]
        assert tensor.tensor_type.name == "Q8_0"
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        read = weights[f"model.layers.0.mlp.experts.{part}_proj"]
        assert torch.equal(read, torch.from_numpy(decoded.copy()))


def test_a_gate_of_one_row_is_read_as_a_vector_and_as_a_matrix(world, tmp_path):
    """Releases of llama.cpp's converter differ in it."""
    gguf = pytest.importorskip("gguf")
    folder = make_folder(tmp_path / "hf", "qwen2_moe", **AS_LLAMA_CPP["qwen2_moe"])
    file = export_gguf(world, folder, tmp_path / "vector.gguf", "f32")
    reader, other = gguf.GGUFReader(file), tmp_path / "matrix.gguf"
    writer = gguf.GGUFWriter(other, "qwen2moe")
    for name, field in reader.fields.items():
        if name.startswith("qwen2moe."):
            writer.add_key_value(name, field.contents(), field.types[-1])
    gates = 0
    for tensor in reader.tensors:
        is_gate = tensor.name.endswith("ffn_gate_inp_shexp.weight")
        gates += is_gate and tensor.data.ndim == 1
        writer.add_tensor(tensor.name, tensor.data[None] if is_gate else tensor.data)
    assert gates == 3
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    require_equal(folder, file)
    require_equal(folder, other)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma2", {}, "query_pre_attn_scalar=24"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "dense feed-forwards in some blocks"),
        ("deepseek_v3", {}, "is not written as GGUF in this version"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_not_written(
    world, tmp_path, family, options, reason
):
    options = options and {**AS_LLAMA_CPP[family], **options}
    folder = make_folder(tmp_path / "hf", family, **options)
    words = f"source={folder}", f"out={tmp_path / 'a.gguf'}", "form=gguf"
    (result,) = world.command("export", *words, code=2)
    assert reason in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"])
def test_blocks_of_a_gguf_file_are_decoded_as_their_authors_decode_them(tmp_path, kind):
    gguf = pytest.importorskip("gguf")
    folder = make_folder(tmp_path / "hf", "llama", hidden_size=256, intermediate_size=256)
    number, file = gguf.GGMLQuantizationType[kind], tmp_path / "model.gguf"
    expected = write_blocks(gguf, folder, file, number)
    read = load_model(file).named_weights()
    for name, weight in expected.items():
        assert torch.equal(read[name], weight), name


def write_blocks(gguf, folder, file, number):
    """Write a folder's model with random blocks as its down projections, which are returned."""
    state, config = load_file(folder / "model.safetensors"), of(folder).config
    writer, expected = gguf.GGUFWriter(file, "llama"), {}
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in state.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if "down_proj" not in name:
            writer.add_tensor(new, weight.numpy())
            continue
        block, size = gguf.GGML_QUANT_SIZES[number]
        columns = weight.shape[1] // block * size
        blocks = np.random.default_rng(0).integers(0, 60, (len(weight), columns)).astype(np.uint8)
        writer.add_tensor(new, blocks, raw_dtype=number)
        numbers = gguf.quants.dequantize(blocks, number)
        expected[name] = torch.from_numpy(numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_a_gguf_file_that_was_copied_in_part_is_refused(world, tmp_path):
    folder = make_folder(tmp_path / "hf")
    file = export_gguf(world, folder, tmp_path / "model.gguf", "f32")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="not the whole of it"):
        load_model(file)


@pytest.mark.parametrize(
    ("form", "family"), [("torchtitan", "llama"), ("torchtitan", "qwen3"), ("meta", "llama")]
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_exported_for_another_tool_is_read_back_to_the_bit(
    world, tmp_path, form, family, is_tied
):
    folder = make_folder(tmp_path / "hf", family, tie_word_embeddings=is_tied)
    out = tmp_path / "out"
    world.command("export", f"source={folder}", f"out={out}", f"form={form}")
    expected = as_meta(of(folder))
    if form == "meta":
        written = torch.load(out / "consolidated.00.pth", weights_only=True)
    else:
        expected |= {newer_name(name): weight for name, weight in expected.items()}
        written = stored(out)
        assert sum(file.stat().st_size for file in out.glob("*.distcp")) < 1.5 * sum(
            weight.nbytes for weight in as_meta(of(folder)).values()
        )
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(written[name], weight), name
    if is_tied and form == "meta":  # params.json cannot say it
        return
    require_equal(folder, out)


def test_meta_computes_the_same_width_from_what_is_exported():
    for width, wanted in ((4096, 11008), (4096, 14336), (8192, 28672), (2048, 8192), (48, 80)):
        params = _feed_forward(width, wanted)
        hidden = int(params["ffn_dim_multiplier"] * int(2 * 4 * width / 3))
        multiple = params["multiple_of"]
        assert multiple * ((hidden + multiple - 1) // multiple) == wanted


def test_scaled_positions_of_llama_3_are_written_for_meta_and_others_are_refused(world, tmp_path):
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    folder = make_folder(tmp_path / "a", rope_parameters=scaling, max_position_embeddings=16384)
    world.command("export", f"source={folder}", f"out={tmp_path / 'out'}", "form=meta")
    read = load_model(tmp_path / "out").config
    assert read.rope_scaling == load_model(folder).config.rope_scaling
    folder = make_folder(tmp_path / "b", "llama yarn")
    words = f"source={folder}", f"out={tmp_path / 'none'}", "form=meta"
    (result,) = world.command("export", *words, code=2)
    assert "has no place in Meta's params.json" in result.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", ["torch", "gguf", "meta"])
def test_weights_of_another_tool_are_exported_as_a_hugging_face_folder(world, tmp_path, kind):
    folder, other = make_other(tmp_path, intermediate_size=128)
    source = other
    if kind == "torch":
        torch.save(of(folder).state_dict(), other / "pytorch_model.bin")
    elif kind == "gguf":
        source = export_gguf(world, folder, other / "model.gguf", "f32")
    else:
        (other / "config.json").unlink()
        (other / "params.json").write_text(json.dumps(meta_params(folder, rope_theta=10000.0)))
        torch.save(as_meta(of(folder)), other / "consolidated.00.pth")
    world.command("export", f"source={source}", f"out={tmp_path / 'out'}")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(of(tmp_path / "out")(ids).logits, of(folder)(ids).logits, atol=1e-6)


def test_a_run_with_an_adapter_is_exported_merged_for_torchtitan(world, tmp_path, inputs):
    keys = [f"{key}={value}" for key, value in inputs.items()]
    run = world.train(tmp_path / "run", *keys, "adapter=lora", "train.steps=2")
    world.command("export", f"source={run.folder}", f"out={tmp_path / 'hf'}")
    world.command("export", f"source={run.folder}", f"out={tmp_path / 'titan'}", "form=torchtitan")
    require_equal(tmp_path / "hf", tmp_path / "titan")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["form=torchtitan"], "model_type=gemma2"),
        (["form=meta", "dtype=q8_0"], "only counts with  form=gguf"),
        (["form=meta", "merge_into=trained"], "only counts with  form=merged"),
    ],
)
def test_what_has_no_form_is_refused_and_nothing_is_left(world, tmp_path, words, reason):
    folder = make_folder(tmp_path / "hf", "gemma2")
    words = f"source={folder}", f"out={tmp_path / 'out'}", *words
    (result,) = world.command("export", *words, code=2)
    assert reason in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


LLAMA_3_1 = {
    "n_kv_heads": 8, "vocab_size": 128256, "norm_eps": 1e-5, "rope_theta": 500000.0,
    "use_scaled_rope": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("params", "published"),
    [
        (
            {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-5,
             "vocab_size": -1},
            {"intermediate_size": 11008, "vocab_size": 32000, "num_key_value_heads": 32,
             "max_position_embeddings": 4096, "tie_word_embeddings": False},
        ),
        (
            {"dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 4096,
             "ffn_dim_multiplier": 1.3, **LLAMA_3_1},
            {"intermediate_size": 28672, "factor": 8.0, "max_position_embeddings": 131072,
             "tie_word_embeddings": False},
        ),
        (
            {"dim": 2048, "n_layers": 16, "n_heads": 32, "multiple_of": 256,
             "ffn_dim_multiplier": 1.5, **LLAMA_3_1},
            {"intermediate_size": 8192, "factor": 32.0, "tie_word_embeddings": True,
             "num_key_value_heads": 8},
        ),
    ],
    ids=["Llama-2-7b", "Llama-3.1-70B", "Llama-3.2-1B"],
)  # fmt: skip
def test_params_of_metas_models_are_the_published_configurations(tmp_path, params, published):
    (tmp_path / "params.json").write_text(json.dumps(params))
    config = described_by_meta(tmp_path)
    config |= config.get("rope_scaling", {})
    assert {name: config[name] for name in published} == published
