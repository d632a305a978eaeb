"""Hugging Face folders in and out: nothing lost, nothing half-read, nothing half-written."""

import os
import shutil
from unittest.mock import patch

import inject
import pytest
import torch
import transformers
from foreign import export, of, why_refused
from image_models import make_image_folder
from other_models import make_other_folder
from refused import refusal
from safetensors.torch import load_file, save_file
from stored import assert_byte_equal, newest, save_tensors, tensors
from tables import rows
from texts import turn
from world import command, edit_json, read_json, verify, write_json
from zoo import HF, ZOO, make_folder, store_in_mxfp4

from fsdp_trainer import load_model
from fsdp_trainer.checkpoint.formats import tensor_files
from fsdp_trainer.checkpoint.formats.headers import read_headers
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template

FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
BFLOAT16 = {"dtype": torch.bfloat16}
FORMATS = {
    "fp16 tied sharded": {"dtype": torch.float16, "tie_word_embeddings": True, "shard": "20KB"},
    "bf16 untied sharded": {**BFLOAT16, "shard": "20KB"},
    "fp32": {"family": "gemma3 long"},
    **{
        family: {"family": family, **BFLOAT16}
        for family in ("mixtral", "deepseek_v3", "gpt_oss", "phi3")
    },
}
SMALL_PIECES = inject.setting("tensor_piece_bytes", 72)
"""Not a divisor of anything, and less than a row of some tensors."""


@pytest.fixture
def imported(train):
    """Return `imported(folder)`: a run that reads a folder and trains no step."""

    def run(folder, *words, **options):
        return train("run", f"model.init_from={folder} train.steps=0", *words, base=HF, **options)

    return run


def edit_config(folder, **changes):
    edit_json(folder / "config.json", **changes)


def config_of(folder):
    config = read_json(folder / "config.json")
    return {key: value for key, value in config.items() if key != "transformers_version"}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_import_then_export_without_a_step_is_byte_equal(imported, tmp_path, options):
    folder = make_folder(tmp_path / "in", **options)
    assert ("shard" in options) == (folder / "model.safetensors.index.json").exists()
    out = export(imported(folder, ranks=2).folder, tmp_path / "out")
    assert_byte_equal(tensors(folder), tensors(out))
    assert config_of(out).items() >= config_of(folder).items()
    # what we export, transformers reads, saves, and we read again
    again = make_folder(tmp_path / "again", **options)
    of(out).save_pretrained(again)
    assert_byte_equal(tensors(folder), tensors(again))


def in_blocks(matrix):
    """Codes in float8 and a scale for each block of 128 × 128, and the matrix that they stand for,
    computed block by block."""
    rows, columns = (-(-size // 128) for size in matrix.shape)
    scales = torch.zeros(rows, columns)
    codes = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    decoded = torch.empty_like(matrix)
    for i in range(rows):
        for j in range(columns):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = matrix[part].float().abs().max() / 448
            codes[part] = (matrix[part].float() / scales[i, j]).to(codes.dtype)
            decoded[part] = (codes[part].float() * scales[i, j]).to(matrix.dtype)
    return codes, scales, decoded


def test_matrices_in_float8_are_decoded_and_blocks_for_further_tokens_passed_over(tmp_path):
    sizes = {"hidden_size": 144, "intermediate_size": 264, "num_hidden_layers": 2}
    folder = make_folder(tmp_path / "in", "deepseek_v3", torch.bfloat16, **sizes)
    plain, stored = {}, {"model.layers.2.enorm.weight": torch.ones(144)}
    for name, tensor in tensors(folder).items():
        plain[name] = stored[name] = tensor
        if tensor.ndim == 2 and name.startswith("model.layers") and "mlp.gate." not in name:
            stored[name], stored[f"{name}_scale_inv"], plain[name] = in_blocks(tensor)
    more = {"quantization_config": FLOAT8, "num_nextn_predict_layers": 1}
    loaded = []
    for held, changes in ((plain, {}), (stored, more)):
        save_tensors(folder, held)
        edit_config(folder, **changes)
        with inject.setting("tensor_piece_bytes", 5000):
            loaded.append(load_model(folder))
    exported = loaded[1].config.to_hf("bfloat16")
    assert "quantization_config" not in exported
    assert exported["num_nextn_predict_layers"] == 0
    assert_byte_equal(*(model.named_weights() for model in loaded))


UNREAD = {
    "deepseek_v3": ("model.layers.2.", "num_nextn_predict_layers"),
    "glm4_moe": ("model.layers.2.", "num_nextn_predict_layers"),
    "qwen3_next": ("mtp.", "mtp_num_hidden_layers"),
}
"""By model type: how the names of tensors begin that no module reads, and the key that counts the
blocks with them."""


def with_unread(folder, kind):
    """Write a folder with tensors that no module reads; return the folder."""
    if kind in ZOO:
        make_folder(folder, kind, torch.bfloat16, num_hidden_layers=2)
    else:
        make_other_folder(folder, kind)
    prefix, count = UNREAD[kind]
    more = {
        f"{prefix}fc.weight": torch.randn(3, 5),
        f"{prefix}norm.weight": torch.randn(5).bfloat16(),
        f"{prefix}number": torch.tensor(7),
        f"{prefix}rotary_emb.inv_freq": torch.randn(3),
    }
    save_tensors(folder, tensors(folder) | more)
    edit_config(folder, **{count: 1})
    return folder


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_tensors_that_no_module_reads_are_exported_byte_for_byte_or_named(
    train, tmp_path, capsys, kind
):
    prefix, count = UNREAD[kind]
    folder = with_unread(tmp_path / "in", kind)
    expected = tensors(folder)
    if kind in ZOO:  # float8 is decoded in these blocks, too
        name = f"{prefix}fc.weight"
        codes, scales, decoded = in_blocks(torch.randn(3, 5).bfloat16())
        save_tensors(folder, expected | {name: codes, f"{name}_scale_inv": scales})
        edit_config(folder, quantization_config=FLOAT8)
        expected[name] = decoded
    words = "train.steps=0 checkpoint.export_hf=true"
    run = train("first", f"model.init_from={folder}", words, base=HF)
    assert f"not trained: 4 tensors such as {prefix}fc.weight" in run.out
    assert_byte_equal(expected, tensors(run.folder / "hf"))
    assert config_of(run.folder / "hf")[count] == 1
    # checkpoints name the folder, also those of a run that begins with one of them
    if kind in ZOO:
        run = train("second", f"model.init_from={run.folder}", words, base=HF)
        assert_byte_equal(expected, tensors(run.folder / "hf"))
    half = tensors(export(run.folder, tmp_path / "half", "dtype=float16"))
    assert half.keys() == expected.keys()
    names = ("fc.weight", "norm.weight", "number", "rotary_emb.inv_freq")
    formats = [half[prefix + name].dtype for name in names]
    assert formats == [torch.float16, torch.float16, torch.int64, torch.float32]
    folder.rename(tmp_path / "away")
    capsys.readouterr()
    out = export(run.folder, tmp_path / "out")
    said = capsys.readouterr().out
    assert f"not in the export: 4 tensors such as {prefix}fc.weight" in said
    assert f"config.json of the export says {count}=0" in said
    assert config_of(out)[count] == 0
    assert len(tensors(out)) == len(half) - 4


def test_blocks_after_the_last_one_are_passed_over_if_config_json_counts_them(tmp_path):
    folder = with_unread(tmp_path / "in", "glm4_moe")
    assert load_model(folder).config.num_hidden_layers == 2
    edit_config(folder, num_nextn_predict_layers=0)
    assert "model.layers.2.number  " in why_refused(folder)


def test_tensors_for_another_vocabulary_are_left_out(train, tmp_path):
    folder = with_unread(tmp_path / "in", "deepseek_v3")
    rows = {"model.layers.2.embed_tokens.weight": torch.zeros(264, 3)}
    save_tensors(folder, tensors(folder) | rows)
    added = ",".join(f"new{i}" for i in range(9))
    words = f"tokenizer.add_tokens=[{added}] train.steps=0 checkpoint.export_hf=true"
    run = train("run", f"model.init_from={folder}", words, base=HF)
    assert "no export has them, made for 264 tokens" in run.out
    assert "made for a vocabulary of 264 tokens; the model has" in run.out
    assert config_of(run.folder / "hf")["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("model.layers.2.") for name in tensors(run.folder / "hf"))


def test_the_parts_for_images_of_a_language_model_trained_alone_are_named(
    imported, tmp_path, capsys
):
    folder = make_image_folder(tmp_path / "in", "gemma3")
    count = sum("vision" in name or "projector" in name for name in tensors(folder))
    run = imported(folder)
    assert f"{count} tensors for images are not read" in run.out
    folder.rename(tmp_path / "away")
    export(run.folder, tmp_path / "out")
    assert f"not in the export: {count} tensors for images" in capsys.readouterr().out


def test_mxfp4_is_read_as_transformers_decodes_it_and_exported_in_bfloat16(imported, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "shard": "1GB"}
    folder = make_folder(tmp_path / "in", family="gpt_oss", dtype=torch.bfloat16, **sizes)
    expected = store_in_mxfp4(folder)
    pieces = inject.setting("tensor_piece_bytes", 1100)
    run = imported(folder, "sharding.expert=2", ranks=2, seam=pieces)
    with pieces:
        out = export(run.folder, tmp_path / "out")
    assert_byte_equal(expected, tensors(out))
    assert "quantization_config" not in config_of(out)


def test_an_expert_in_mxfp4_is_read_once_and_not_for_each_piece(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    folder = make_folder(tmp_path, family="gpt_oss", dtype=torch.bfloat16, **sizes)
    store_in_mxfp4(folder)
    sizes_read = []

    def counting(real, path, offset, into):
        sizes_read.append(into.nbytes)
        real(path, offset, into)

    # 13 pieces for the smaller of an expert's matrices
    with inject.setting("tensor_piece_bytes", 2000), inject.around("tensor_read", counting):
        load_model(folder)
    # a thread that lags behind may read an expert again
    assert sum(sizes_read) < 2 * (folder / "model.safetensors").stat().st_size


def test_what_was_trained_computes_the_same_everywhere(train, tmp_path):
    sizes = {"head_dim": 16, "tie_word_embeddings": True}
    folder = make_folder(tmp_path / "in", "qwen3", **sizes)
    words = "train.steps=3 optim.lr=1e-2 checkpoint.export_hf=true"
    run = train("run", f"model.init_from={folder}", words, base=HF, ranks=2)
    out = export(run.folder, tmp_path / "out")
    ids = torch.randint(264, (2, 50), generator=torch.Generator().manual_seed(0))
    ours = load_model(run.folder).logits(ids)
    for path in (newest(run), out, run.folder / "hf"):
        assert torch.equal(load_model(path).logits(ids), ours), path
    assert load_model(out, dtype=torch.bfloat16).logits(ids).dtype == torch.bfloat16
    theirs, before = (of(path).eval() for path in (out, folder))
    with torch.no_grad():
        assert (theirs(ids).logits - ours).abs().max() < 1e-4
        assert (before(ids).logits - ours).abs().max() > 1e-2, "it was trained"
    assert "is complete" in verify(f"source={run.folder} hf={out}")
    assert "DIFFER" in verify(f"source={run.folder} hf={folder}", code=3)
    other = make_folder(tmp_path / "other", "qwen3", vocab_size=300, **sizes)
    assert "another model" in verify(f"source={run.folder} hf={other}", code=3)


CHOSEN = (
    "data.path=DATA/chats.jsonl",
    "data.template=plain",
    "train.steps=0",
    "checkpoint.export_hf=true",
)


@pytest.mark.parametrize("template", [None, "plain"])
def test_the_exported_tokenizer_and_template_are_those_of_training(ledger, template):
    out = (ledger.run(words=CHOSEN) if template else ledger.run("plain")).folder / "hf"
    ours, theirs = load_tokenizer("demo:bytes"), transformers.AutoTokenizer.from_pretrained(out)
    for text in ("Hello wörld", "<|im_start|>user\nhi<|im_end|>\n"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    messages = [turn("user", "hi")]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == load_template(template, ours).render(messages, add_generation_prompt=True)
    generation = read_json(out / "generation_config.json")
    assert ours.special_tokens["<|im_end|>"] in generation["eos_token_id"]
    assert config_of(out)["vocab_size"] == ours.vocab_size, (
        "with random weights the vocabulary follows the tokenizer"
    )


def test_the_export_is_split_with_a_right_index(ledger, tmp_path):
    run = ledger.run("plain").folder
    out = export(run, tmp_path / "out", "shard_gib=2e-5")
    index = read_json(out / "model.safetensors.index.json")
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    whole = tensors(run / "hf")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, held in files.items():
        assert (out / name).stat().st_size < 2e-5 * 2**30 + 4000 or len(held) == 1
    assert_byte_equal(tensors(out), whole)
    of(out)


def test_each_tensor_keeps_its_own_number_format_however_small_the_pieces(imported, tmp_path):
    """A tied head may be stored all the same."""
    folder = make_folder(tmp_path / "in", dtype=torch.bfloat16, tie_word_embeddings=True)
    state = {
        name: tensor.float() + 1e-5 if "norm" in name else tensor
        for name, tensor in tensors(folder).items()
    }
    save_tensors(folder, {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    run = imported(folder, ranks=2, seam=SMALL_PIECES).folder
    with SMALL_PIECES:
        assert_byte_equal(state, tensors(export(run, tmp_path / "out")))
        wide = tensors(export(run, tmp_path / "wide", "dtype=float32"))
    assert_byte_equal({name: tensor.float() for name, tensor in state.items()}, wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_import_onto_a_gpu_is_byte_equal(imported, tmp_path):
    folder = make_folder(tmp_path / "in", dtype=torch.bfloat16)
    run = imported(folder, "launch.device=cuda", seam=SMALL_PIECES)
    assert_byte_equal(tensors(folder), tensors(export(run.folder, tmp_path / "out")))


# --- what is refused ------------------------------------------------------------------------------


def test_all_that_is_wrong_with_weights_is_told_at_once(imported, tmp_path):
    folder = make_folder(tmp_path / "in")
    state = tensors(folder)
    del state["model.layers.0.mlp.up_proj.weight"], state["lm_head.weight"]
    wrong = {
        "model.layers.1.self_attn.q_proj.bias": torch.zeros(32),
        "model.norm.weight": torch.zeros(31),
        "model.layers.0.input_layernorm.weight": torch.zeros(32, dtype=torch.int64),
    }
    save_tensors(folder, state | wrong)
    refused = imported(folder, ranks=2, code=2)
    texts = [
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        *wrong,
        "[31]",
        "[32]",
        "I64",
    ]
    for text in texts:
        assert text in refused.err
    assert refused.ranks[1].err == "", "only rank 0 speaks"
    assert not refused.folder.exists()


@pytest.mark.parametrize(
    "text",
    ['{"a": {"dtype": "F32", "shape": [2.0, 3], "data_offsets": [0, 24]}}',
    '{"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24.0]}}',
    '{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 24]}}',
             "[" * 100_000, "[1]", "NaN", '{"a": "b"}'],
    ids=["half a row", "half a byte", "too few", "deep", "list", "number", "text"],
)  # fmt: skip
def test_a_header_of_nonsense_is_told(tmp_path, text):
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text.encode() + bytes(24)
    )
    headers, problems = read_headers(tmp_path)
    assert not headers
    assert len(problems) == 1
    assert "model.safetensors" in problems[0].what


def disk_of_one_rank_fails():
    """Let the second read of one rank fail."""
    real, reads = os.preadv, []

    def preadv(*what):
        reads.append(what)
        if os.environ["RANK"] == "1" and len(reads) == 2:
            raise OSError(5, "Input/output error")
        return real(*what)

    return patch.object(tensor_files.os, "preadv", preadv)


def test_weights_that_one_rank_cannot_read_end_the_run_with_that_message(imported, tmp_path):
    folder = make_folder(tmp_path / "in")
    refused = imported(folder, ranks=2, code=1, seam=disk_of_one_rank_fails)
    assert "rank 1 cannot read the weights" in refused.err
    assert "Input/output error" in refused.err


def test_broken_files_and_unexpected_tensors_are_listed_together(imported, tmp_path):
    folder = make_folder(tmp_path / "in", shard="20KB")
    first, second, third, fourth, *_ = sorted(folder.glob("*.safetensors"))
    save_file(load_file(first) | {"stranger": torch.zeros(2)}, first, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = read_json(index)
    listed["weight_map"]["stranger"] = first.name
    write_json(index, listed)
    os.truncate(second, second.stat().st_size - 5)
    third.unlink()
    fourth.write_bytes(b"<html>not found</html>")
    refused = imported(folder, ranks=2, code=2)
    for text in ("stranger", second.name, third.name, fourth.name):
        assert text in refused.err
    assert "the model has it" not in refused.err, "no tensor of a broken file is missing"


@pytest.mark.parametrize(
    "broken, named",
    rows("""
index → safetensors
nothing → safetensors
bin → pytorch_model.bin
"""),
)
def test_folders_without_readable_weights_are_refused(tmp_path, broken, named):
    folder = make_folder(tmp_path / "in", shard="20KB")
    index = folder / "model.safetensors.index.json"
    index.write_text("{}") if broken == "index" else index.unlink()
    if broken == "bin":
        (folder / "pytorch_model.bin").write_bytes(b"")
    assert named in why_refused(folder)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
def test_what_wrappers_put_before_all_names_is_no_part_of_them(tmp_path, wrapper):
    folder = make_folder(tmp_path / "in")
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({wrapper + name: tensor for name, tensor in weights.items()}, file, {"format": "pt"})
    assert_byte_equal(dict(load_model(folder).named_weights()), weights)
    twice = {p + name: weights[name].clone() for p in (wrapper, wrapper * 2) for name in weights}
    save_file(twice, file, {"format": "pt"})
    assert "has a tensor twice" in why_refused(folder)
    one = {(wrapper if i else "") + name: weights[name] for i, name in enumerate(weights)}
    save_file(one, file, {"format": "pt"})
    assert wrapper in why_refused(folder)


def test_names_that_end_like_a_wrapper_keep_that_and_compiled_parts_lose_theirs(tmp_path):
    names = ["model.vision_module.w", "model._orig_mod.layers.w", "model.module.w"]
    stored = {f"_orig_mod.{name}": torch.ones(1) for name in names}
    save_tensors(tmp_path, stored)
    read, _ = read_headers(tmp_path)
    assert list(read) == ["model.layers.w", "model.module.w", "model.vision_module.w"]


def test_one_file_counts_before_an_index_that_does_not_name_it_as_in_transformers(tmp_path):
    folder = make_folder(tmp_path / "in")
    weights = tensors(folder)
    negated = {name: -tensor for name, tensor in weights.items()}
    save_file(negated, folder / "other.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "other.safetensors")}
    write_json(folder / "model.safetensors.index.json", index)
    read = dict(load_model(folder).named_weights())
    assert_byte_equal(read, weights)
    assert_byte_equal({name: of(folder).state_dict()[name] for name in read}, weights)


NO_INDEX = r"""
5
null
[]
{}
{"weight_map": null}
{"weight_map": {"a": null}}
{"weight_map": {"a": 5}}
{"weight_map": {"a": ["b"]}}
{"weight_map": {"a": "../b"}}
{"weight_map": {"a": "/etc/passwd"}}
{"weight_map": {"a": "."}}
{"weight_map": {"a": "\ud800"}}
{"weight_map": {"a": "b\u0000"}}
"""
LONG = f'{{"weight_map": {{"a": "{"x" * 300}"}}}}'


@pytest.mark.parametrize("content", [*NO_INDEX.strip().splitlines(), LONG, "[" * 10**5])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "cannot read the index of the weights" in refusal(read_headers, tmp_path)


@pytest.mark.parametrize(
    "words, named",
    [
        (["model=tiny"], ["model=tiny", "hidden_size", "128", "32"]),
        (["model=auto model.num_hidden_layers=3"], ["model.num_hidden_layers=3"]),
    ],
)
def test_a_named_model_that_differs_from_the_folder_is_refused(train, tmp_path, words, named):
    folder = make_folder(tmp_path / "in")
    refused = train("run", *words, f"model.init_from={folder}", base=[], code=2)
    assert all(text in refused.err for text in named)


def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(imported, tmp_path):
    folder = make_folder(tmp_path / "in", tie_word_embeddings=True)
    state = tensors(folder)
    other = {"lm_head.weight": torch.randn_like(state["model.embed_tokens.weight"])}
    save_tensors(folder, state | other)
    refused = imported(folder, ranks=2, code=2)
    assert "lm_head.weight" in refused.err
    assert "tie_word_embeddings" in refused.err


@pytest.mark.parametrize(
    "wrong",
    [{"rope_scaling": "linear"}, {"max_position_embeddings": None}, {"rms_norm_eps": "1e-5"}],
)
def test_a_config_with_the_wrong_types_is_refused_by_name(tmp_path, wrong):
    folder = make_folder(tmp_path / "in")
    edit_config(folder, **wrong)
    assert next(iter(wrong)) in why_refused(folder)


# --- exports that fail ----------------------------------------------------------------------------


@inject.fault
def failing_write():
    """Fill the disk when the second file is begun."""
    begun = set()

    def write(real, file, *args):
        begun.add(file)
        if len(begun) == 2:
            raise inject.no_space()
        return real(file, *args)

    with inject.around("export_write", write):
        yield


def exit_at_once(*_):
    os._exit(9)


def test_an_export_that_fails_or_is_killed_leaves_nothing_that_looks_like_one(
    world, ledger, tmp_path, capsys
):
    source, out = ledger.run("plain").folder, tmp_path / "out"
    with failing_write():
        export(source, out, "shard_gib=2e-5", code=1)
    assert "No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    with pytest.raises(AssertionError, match="died"):
        dies = inject.around("commit", exit_at_once)
        world.command("export", f"source={source} out={out}", seam=dies)
    assert not out.exists()
    export(source, out)
    assert os.listdir(tmp_path) == ["out"]


def test_an_export_overwrites_nothing(ledger, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    export(ledger.run("plain").folder, tmp_path, code=2)
    assert "exists" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_nothing_damaged_is_read_and_what_is_whole_is_named(ledger, tmp_path):
    assert verify(f"source={ledger.run('plain').folder}").count("checksums correct") == 1
    run = ledger.copy("plain", tmp_path / "run")
    whole, damaged = run.folder / "checkpoints/step-00000002", newest(run)
    data = damaged / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"\x55")

    def said(verb, code, *words):
        result = command([verb, f"source={damaged}", *words], None)
        assert result.code == code
        return result.out + result.err

    verbs = [
        ("verify", 3),
        ("generate", 2, "prompt=hi"),
        ("export", 2, f"out={tmp_path / 'out'}"),
    ]
    for verb in verbs:
        text = said(*verb)
        assert "damaged" in text
        assert "checksum" in text
        assert f"The newest whole one is  source={whole}" in text, verb
    shutil.rmtree(whole)
    assert "No other checkpoint of this run is intact" in said("generate", 2, "prompt=hi")
    assert not (tmp_path / "out").exists()
