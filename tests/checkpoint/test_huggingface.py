"""Hugging Face folders in and out: nothing lost, nothing half-read, nothing half-written."""

import json
import os
import shutil

import inject
import pytest
import torch
from safetensors.torch import load_file, save_file
from stored import assert_byte_equal, tensors
from world import verify
from zoo import HF, make_folder, store_in_mxfp4

import fsdp_trainer
from fsdp_trainer.checkpoint.formats import tensor_files
from fsdp_trainer.checkpoint.formats.huggingface import read_headers
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

transformers = pytest.importorskip("transformers")


@pytest.fixture
def export(world, tmp_path):
    def run(source, *overrides, name="out", **options):
        world.command("export", f"source={source}", f"out={tmp_path / name}", *overrides, **options)
        return tmp_path / name

    return run


FORMATS = {
    "fp32 tied": (1, {"tie_word_embeddings": True}),
    "bf16 untied sharded": (2, {"dtype": torch.bfloat16, "shard": "20KB"}),
    "fp16 tied sharded": (
        1,
        {"dtype": torch.float16, "tie_word_embeddings": True, "shard": "20KB"},
    ),
}
FAMILIES = (
    "llama biases",
    "mistral window",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "gemma2",
    "gemma3 long",
    "olmo2",
    "phi3",
    "phi4 mini",
)
FORMATS |= {name: (2, {"family": name, "dtype": torch.bfloat16}) for name in FAMILIES}
SMALL_PIECES = inject.setting("tensor_piece_bytes", 72)
"""Not a divisor of anything, and less than a row of some tensors."""
QUICK = ("phi3",)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in FORMATS.items()
    ],
)
@pytest.mark.grid(3)
def test_import_then_export_without_a_step_is_byte_equal(train, export, tmp_path, ranks, options):
    folder = make_folder(tmp_path / "in", **options)
    assert ("shard" in options) == (folder / "model.safetensors.index.json").exists()
    run = train("run", f"model.init_from={folder}", "train.steps=0", base=HF, ranks=ranks)
    out = export(run.folder)
    assert_byte_equal(tensors(folder), tensors(out))
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    assert {k: after.get(k) for k in before if k not in ("transformers_version",)} == {
        k: v for k, v in before.items() if k != "transformers_version"
    }
    again = make_folder(
        tmp_path / "again", **options
    )  # what we export, transformers reads, saves, and we read again
    transformers.AutoModelForCausalLM.from_pretrained(out).save_pretrained(again)
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


def test_matrices_in_float8_are_decoded_and_blocks_for_further_tokens_passed_over(
    tmp_path, monkeypatch
):
    sizes = {"hidden_size": 144, "intermediate_size": 264, "num_hidden_layers": 2}
    folder = make_folder(tmp_path / "in", "deepseek_v3", torch.bfloat16, **sizes)
    plain, stored = {}, {"model.layers.2.enorm.weight": torch.ones(144)}
    for name, tensor in tensors(folder).items():
        plain[name] = stored[name] = tensor
        if tensor.ndim == 2 and name.startswith("model.layers") and "mlp.gate." not in name:
            stored[name], stored[f"{name}_scale_inv"], plain[name] = in_blocks(tensor)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    more = {"quantization_config": quantization, "num_nextn_predict_layers": 1}
    monkeypatch.setattr("fsdp_trainer.checkpoint.formats.tensor_files.PIECE_BYTES", 5000)
    loaded = []
    for held, described in ((plain, config), (stored, config | more)):
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(described))
        loaded.append(fsdp_trainer.load_model(folder))
    exported = loaded[1].config.to_hf("bfloat16")
    assert "quantization_config" not in exported
    assert exported["num_nextn_predict_layers"] == 0
    assert_byte_equal(*(model.named_weights() for model in loaded))


@pytest.mark.slow
@pytest.mark.further
def test_mxfp4_is_read_as_transformers_decodes_it_and_exported_in_bfloat16(train, export, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "shard": "1GB"}
    folder = make_folder(tmp_path / "in", family="gpt_oss", dtype=torch.bfloat16, **sizes)
    expected = store_in_mxfp4(folder)
    how = ["sharding.expert=2", "train.steps=0", f"model.init_from={folder}"]
    run = train("run", *how, base=HF, ranks=2, seam=SMALL_PIECES)
    out = export(run.folder, seam=SMALL_PIECES)
    assert_byte_equal(expected, tensors(out))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.slow
def test_an_expert_in_mxfp4_is_read_once_and_not_for_each_piece(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    folder = make_folder(tmp_path, family="gpt_oss", dtype=torch.bfloat16, **sizes)
    store_in_mxfp4(folder)
    sizes_read = []

    def counting(path, offset, into, read=tensor_files.read):
        sizes_read.append(into.nbytes)
        read(path, offset, into)

    monkeypatch.setattr(
        tensor_files, "PIECE_BYTES", 2000
    )  # 13 for the smaller of an expert's matrices
    monkeypatch.setattr(tensor_files, "read", counting)
    fsdp_trainer.load_model(folder)
    # a thread that lags behind may read an expert again
    assert sum(sizes_read) < 2 * (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_each_tensor_keeps_its_own_number_format(train, export, tmp_path):
    folder = make_folder(tmp_path / "in", dtype=torch.bfloat16)
    mixed = {
        name: tensor.float() + 1e-5 if "norm" in name else tensor
        for name, tensor in tensors(folder).items()
    }
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    run = train("run", f"model.init_from={folder}", "train.steps=0", base=HF)
    assert_byte_equal(mixed, tensors(export(run.folder)))
    assert {
        t.dtype for t in tensors(export(run.folder, "dtype=float16", name="half")).values()
    } == {torch.float16}


@pytest.mark.slow
def test_what_was_trained_computes_the_same_everywhere(train, export, tmp_path):
    folder = make_folder(tmp_path / "in", "qwen3", head_dim=16, tie_word_embeddings=True)
    run = train(
        "run",
        f"model.init_from={folder}",
        "train.steps=3",
        "optim.lr=1e-2",
        "checkpoint.export_hf=true",
        base=HF,
        ranks=2,
    )
    out = export(run.folder)
    tokens = torch.randint(264, (2, 50), generator=torch.Generator().manual_seed(0))
    ours = fsdp_trainer.load_model(run.folder).logits(tokens)
    for path in (run.folder / "checkpoints" / run.checkpoints[-1], out, run.folder / "hf"):
        assert torch.equal(fsdp_trainer.load_model(path).logits(tokens), ours), path
    assert fsdp_trainer.load_model(out, dtype=torch.bfloat16).logits(tokens).dtype == torch.bfloat16
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        assert (theirs(tokens).logits - ours).abs().max() < 1e-4
        assert (
            transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits - ours
        ).abs().max() > 1e-2, "it was trained"
    assert "is complete" in verify(f"source={run.folder}", f"hf={out}")
    assert "DIFFER" in verify(f"source={run.folder}", f"hf={folder}", code=3)


@pytest.mark.slow
def test_the_exported_tokenizer_and_template_are_those_of_training(train, export):
    run = train("run", "train.steps=0")
    out = export(run.folder)
    ours, theirs = load_tokenizer("demo:bytes"), transformers.AutoTokenizer.from_pretrained(out)
    for text in ("Hello wörld", "<|im_start|>user\nhi<|im_end|>\n"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == load_template(None, ours).render(messages, add_generation_prompt=True)
    generation = json.loads((out / "generation_config.json").read_text())
    assert ours.special_tokens["<|im_end|>"] in generation["eos_token_id"]
    assert json.loads((out / "config.json").read_text())["vocab_size"] == ours.vocab_size, (
        "with random weights the vocabulary follows the tokenizer"
    )


@pytest.mark.slow
def test_a_template_that_was_chosen_is_exported(train, export):
    run = train("plain", "train.steps=0", "data.template=plain")
    out = export(run.folder)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "hi"}]
    ours = load_template("plain", load_tokenizer("demo:bytes")).render(
        messages, add_generation_prompt=True
    )
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == ours


@pytest.mark.slow
def test_the_export_is_split_with_a_right_index(train, export):
    run = train("run", "train.steps=0", "model.tie_word_embeddings=false")
    out = export(run.folder, "shard_gib=2e-5")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
    assert set(tensors(out)) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(out).values())
    assert all(
        file.stat().st_size < 2e-5 * 2**30 + 4000 or len(load_file(file)) == 1
        for file in out.glob("*.safetensors")
    )
    assert_byte_equal(tensors(out), tensors(export(run.folder, name="whole")))
    transformers.AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_is_wrong_with_weights_is_told_at_once(train, tmp_path, ranks):
    folder = make_folder(tmp_path / "in")
    state = tensors(folder)
    del state["model.layers.0.mlp.up_proj.weight"], state["lm_head.weight"]
    state["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(32)
    state["model.norm.weight"] = torch.zeros(31)
    state["model.layers.0.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int64)
    save_file(state, folder / "model.safetensors")
    refused = train(
        "run", f"model.init_from={folder}", "train.steps=1", base=HF, ranks=ranks, code=2
    )
    for name in (
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        "self_attn.q_proj.bias",
        "model.norm.weight",
        "0.input_layernorm.weight",
    ):
        assert name in refused.err
    assert "[31]" in refused.err
    assert "[32]" in refused.err
    assert "I64" in refused.err
    assert "Traceback" not in refused.err
    assert all(rank.err == "" for rank in refused.ranks[1:]), "only rank 0 speaks"
    assert not refused.folder.exists()


@pytest.mark.slow
def test_a_header_that_contradicts_itself_is_no_weights(train, tmp_path):
    folder = make_folder(tmp_path / "in")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    norm, q_proj = header["model.norm.weight"], header["model.layers.0.self_attn.q_proj.weight"]
    norm["data_offsets"], q_proj["data_offsets"] = q_proj["data_offsets"], norm["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refused = train("run", f"model.init_from={folder}", "train.steps=1", base=HF, code=2)
    assert file.name in refused.err
    assert "invalid shape, data type, or offset" in refused.err


@pytest.mark.parametrize(
    "text",
    ['{"a": {"dtype": "F32", "shape": [2.0, 3], "data_offsets": [0, 24]}}',
    '{"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24.0]}}',
             "[" * 100_000, "[1]", "NaN", '{"a": "b"}'],
    ids=["half a row", "half a byte", "deep", "list", "number", "text"],
)  # fmt: skip
def test_a_header_of_nonsense_is_told(tmp_path, text):
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text.encode() + bytes(24)
    )
    headers, problems = read_headers(tmp_path)
    assert not headers
    assert len(problems) == 1
    assert "model.safetensors" in problems[0].what


@pytest.mark.slow
def test_pieces_smaller_than_a_tensor_and_not_of_its_size_come_together(train, export, tmp_path):
    folder = make_folder(tmp_path / "in", dtype=torch.bfloat16, tie_word_embeddings=True)
    state = tensors(folder)
    save_file(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    run = train(
        "run", f"model.init_from={folder}", "train.steps=0", base=HF, ranks=2, seam=SMALL_PIECES
    )
    assert_byte_equal(state, tensors(export(run.folder, seam=SMALL_PIECES)))
    assert_byte_equal(
        {n: t.float() for n, t in state.items()},
        tensors(export(run.folder, "dtype=float32", name="wide", seam=SMALL_PIECES)),
    )


def disk_of_one_rank_fails():
    """Let the second read of one rank fail."""
    from unittest.mock import patch

    from fsdp_trainer.checkpoint.formats import tensor_files

    real, reads = os.preadv, []

    def preadv(*what):
        reads.append(what)
        if os.environ["RANK"] == "1" and len(reads) == 2:
            raise OSError(5, "Input/output error")
        return real(*what)

    return patch.object(tensor_files.os, "preadv", preadv)


@pytest.mark.slow
def test_weights_that_one_rank_cannot_read_end_the_run_with_that_message(train, tmp_path):
    folder = make_folder(tmp_path / "in")
    refused = train(
        "run",
        f"model.init_from={folder}",
        "train.steps=1",
        base=HF,
        ranks=2,
        code=1,
        seam=disk_of_one_rank_fails,
    )
    assert "rank 1 cannot read the weights" in refused.err
    assert "Input/output error" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_import_onto_a_gpu_is_byte_equal(train, export, tmp_path):
    folder = make_folder(tmp_path / "in", dtype=torch.bfloat16)
    run = train(
        "run",
        f"model.init_from={folder}",
        "train.steps=0",
        "launch.device=cuda",
        base=HF,
        seam=SMALL_PIECES,
    )
    assert_byte_equal(tensors(folder), tensors(export(run.folder)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_files_cut_short_or_missing_are_listed_together(train, tmp_path, ranks):
    folder = make_folder(tmp_path / "in", shard="20KB")
    first, second, third, *_ = sorted(folder.glob("*.safetensors"))
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size - 5)
    second.unlink()
    third.write_bytes(b"<html>not found</html>")
    refused = train(
        "run", f"model.init_from={folder}", "train.steps=1", base=HF, ranks=ranks, code=2
    )
    assert all(path.name in refused.err for path in (first, second, third))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "named"),
    [("index", "safetensors"), ("nothing", "safetensors"), ("bin", "pytorch_model.bin")],
)
def test_folders_without_readable_weights_are_refused(train, tmp_path, broken, named):
    folder = make_folder(tmp_path / "in", shard="20KB")
    index = folder / "model.safetensors.index.json"
    index.write_text("{}") if broken == "index" else index.unlink()
    if broken == "bin":
        (folder / "pytorch_model.bin").write_bytes(b"")
    refused = train("run", f"model.init_from={folder}", "train.steps=1", base=HF, code=2)
    assert named in refused.err


@pytest.mark.parametrize(
    "name", ['"../a"', '"/etc/passwd"', '"a\\u0000"', '"."', "5", "null", "[]", "[" * 10**5]
)
def test_an_index_names_files_of_its_own_folder_alone(tmp_path, name):
    content = f'{{"weight_map": {{"a": {name}}}}}'
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="cannot read the index"):
        read_headers(tmp_path)


@pytest.mark.slow
def test_a_tied_head_that_was_stored_all_the_same_is_no_mistake(train, export, tmp_path):
    folder = make_folder(tmp_path / "in", tie_word_embeddings=True)
    state = tensors(folder)
    save_file(
        {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert_byte_equal(
        state,
        tensors(export(train("run", f"model.init_from={folder}", "train.steps=0", base=HF).folder)),
    )


@pytest.mark.slow
def test_a_named_model_that_differs_from_the_folder_is_refused(train, tmp_path):
    folder = make_folder(tmp_path / "in")
    refused = train(
        "run", "model=tiny", f"model.init_from={folder}", "train.steps=1", base=[], code=2
    )
    assert "model=tiny" in refused.err
    assert "hidden_size" in refused.err
    assert "128" in refused.err
    assert "32" in refused.err
    refused = train(
        "run",
        "model=auto",
        "model.num_hidden_layers=3",
        f"model.init_from={folder}",
        "train.steps=1",
        base=[],
        code=2,
    )
    assert "model.num_hidden_layers=3" in refused.err


@pytest.mark.slow
def test_a_tokenizer_larger_than_the_embedding_is_refused(train, tmp_path):
    folder = make_folder(tmp_path / "in", vocab_size=200)
    refused = train("run", f"model.init_from={folder}", "train.steps=1", base=HF, code=2, ranks=2)
    assert "200" in refused.err
    assert "260" in refused.err


@pytest.mark.slow
def test_training_starts_from_a_run_a_checkpoint_and_its_export_alike(train, export, tmp_path):
    first = train("first", "train.steps=3")
    sources = [
        first.folder,
        first.folder / "checkpoints" / first.checkpoints[-1],
        export(first.folder, "dtype=float32"),
    ]
    runs = [
        train(f"from{i}", f"model.init_from={source}", "train.steps=2", base=HF, ranks=1 + i % 2)
        for i, source in enumerate(sources)
    ]
    assert runs[1].column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)
    assert runs[2].column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)
    assert runs[0].column("step") == [1, 2]
    assert runs[0].column("loss")[0] < first.column("loss")[0]


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


@pytest.mark.slow
def test_an_export_that_fails_leaves_no_folder(train, world, export, tmp_path):
    run = train("run", "train.steps=0")
    with pytest.raises(AssertionError, match="No space left"):
        export(run.folder, "shard_gib=2e-5", seam=failing_write())
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_nothing_that_looks_like_one(train, export, tmp_path):
    run = train("run", "train.steps=0")
    with pytest.raises(AssertionError, match="died"):
        export(run.folder, seam=inject.around("commit", exit_at_once))
    assert not (tmp_path / "out").exists()
    export(run.folder)
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


@pytest.mark.slow
def test_an_export_overwrites_nothing_and_reads_nothing_damaged(train, world, export, tmp_path):
    run = train("run", "train.steps=0")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    assert (
        "exists"
        in world.command("export", f"source={run.folder}", f"out={tmp_path / 'used'}", code=2)[
            0
        ].err
    )
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    data = next((copy / "checkpoints").glob("*/*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"\x55")
    assert (
        "checksum"
        in world.command("export", f"source={copy}", f"out={tmp_path / 'out'}", code=2)[0].err
    )
    assert "damaged" in world.command("verify", f"source={copy}", code=3)[0].out
    refused = world.command("generate", f"source={copy}", "prompt=hi", code=2)[0]
    assert "checksum" in refused.err
    assert "No other checkpoint of this run is intact" in refused.err
    damaged = data.parent
    whole = next((run.folder / "checkpoints").iterdir())
    shutil.copytree(whole, damaged.with_name("step-00000009"))
    for verb, more, code in (
        ("verify", (), 3),
        ("generate", ("prompt=hi",), 2),
        ("export", (f"out={tmp_path / 'out'}",), 2),
    ):
        said = world.command(verb, f"source={damaged}", *more, code=code)[0]
        instead = f"source={damaged.with_name('step-00000009')}"
        assert f"The newest whole one is  {instead}" in said.out + said.err, verb
    assert world.command("verify", f"source={run.folder}")[0].out.count("checksums correct") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    train, tmp_path, ranks
):
    folder = make_folder(tmp_path / "model", tie_word_embeddings=True)
    stored = tensors(folder)
    save_file(
        stored | {"lm_head.weight": torch.randn_like(stored["model.embed_tokens.weight"])},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    run = train(
        "run", *HF, f"model.init_from={folder}", "train.steps=0", ranks=ranks, code=2, base=[]
    )
    assert "lm_head.weight" in run.err
    assert "tie_word_embeddings" in run.err


@pytest.mark.slow
def test_broken_files_and_unexpected_tensors_are_listed_together(train, tmp_path):
    folder = make_folder(tmp_path / "model", shard="20KB")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    save_file(load_file(first) | {"stranger": torch.zeros(2)}, first, {"format": "pt"})
    second.write_bytes(second.read_bytes()[:-8])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["stranger"] = first.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    run = train("run", *HF, f"model.init_from={folder}", "train.steps=0", code=2, base=[])
    assert "stranger" in run.err
    assert second.name in run.err
    assert "is missing" not in run.err


@pytest.mark.slow
def test_verify_says_no_to_another_vocabulary(train, tmp_path):
    run = train(
        "run", *HF, f"model.init_from={make_folder(tmp_path / 'one')}", "train.steps=0", base=[]
    )
    other = make_folder(tmp_path / "other", vocab_size=300)
    assert "another model" in verify(f"source={run.folder}", f"hf={other}", code=3)


@pytest.mark.parametrize(
    "wrong",
    [{"rope_scaling": "linear"}, {"max_position_embeddings": None}, {"rms_norm_eps": "1e-5"}],
)
def test_a_config_with_the_wrong_types_is_refused_by_name(train, tmp_path, wrong):
    folder = make_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | wrong
    (folder / "config.json").write_text(json.dumps(config))
    run = train("run", *HF, f"model.init_from={folder}", "train.steps=0", code=2, base=[])
    assert next(iter(wrong)) in run.err
