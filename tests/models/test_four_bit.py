"""The promises of adapter.base=nf4: the blocks' matrices in 4.25 bits a number, and training on
them as on the numbers that they stand for."""

import contextlib
import shutil
from functools import partial
from unittest.mock import patch

import inject
import numpy
import pytest
import torch
from memory_of_a_step import LiveBytes
from safetensors.torch import load_file, save_file
from stored import assert_same_end, newest, tensors
from tables import rows
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from world import read_json, write_json
from zoo import HF, make_folder

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.checkpoint.formats.four_bit_encoding import encoded
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk
from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.models.four_bit import (
    LEVELS,
    Linear4,
    decode,
    decode_bytes,
    encode,
    encoded_columns,
    level_pairs,
)
from fsdp_trainer.parallel.gloo_messages import DirectAllGather


def test_a_number_becomes_the_nearest_level_of_its_block():
    numbers = torch.randn(3, 128)
    largest = numbers.view(3, 2, 64).abs().amax(2, keepdim=True).bfloat16().float()
    levels = torch.tensor(LEVELS)
    nearest = (numbers.view(3, 2, 64, 1) / largest.unsqueeze(3) - levels).abs().argmin(3)
    decoded = decode(encode(numbers), 128, torch.float32)
    assert torch.equal(decoded, (levels[nearest] * largest).view(3, 128))


def test_normal_numbers_take_4_25_bits_and_lose_nine_per_cent():
    numbers = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0)) * 0.02
    codes = encode(numbers)
    assert codes.nbytes * 8 / numbers.numel() == 4.25
    error = decode(codes, 4096, torch.float32) - numbers
    assert error.norm() / numbers.norm() == pytest.approx(0.0919, abs=2e-4)
    decoded = decode(codes, 4096, torch.bfloat16)
    with LiveBytes() as memory:
        decode(codes, 4096, torch.bfloat16)
    assert memory.most < 1.8 * decoded.nbytes, "codes, and a byte of index a number, beside it"
    flat = decode_bytes(codes.view(-1), level_pairs(torch.bfloat16, codes.device))
    assert torch.equal(flat.view_as(decoded), decoded), "as a GPU computes it"


def test_a_compiled_product_keeps_codes_for_backward_and_no_decoded_matrix():
    """The compiler would see that forward and backward decode the same."""
    linear = nn.Linear(128, 192, bias=False)
    encoded, saved = Linear4(linear, torch.float32), []
    encoded.weight.copy_(encode(linear.weight.detach()))
    x = torch.randn(8, 128, requires_grad=True)
    run = torch.compile(encoded, backend="aot_eager_decomp_partition", fullgraph=True)
    for product in (encoded, run):
        with saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
            product(x.sin()).sum().backward()
    assert saved.count(torch.uint8) == 2
    assert len(saved) == 4, saved
    once = torch.autograd.grad(encoded(x.sin()).sum(), x)[0]
    assert torch.equal(x.grad, 2 * once)


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 130])
def test_any_number_of_columns_can_be_encoded(columns):
    numbers = torch.randn(5, columns)
    codes = encode(numbers)
    assert codes.shape == (5, encoded_columns(columns))
    decoded = decode(codes, columns, torch.float32)
    whole = torch.nn.functional.pad(numbers, (0, -columns % 64))
    expected = decode(encode(whole), whole.shape[1], torch.float32)[:, :columns]
    assert torch.equal(decoded, expected)


def test_zeros_stay_zeros_and_a_bad_number_is_seen():
    numbers = torch.zeros(2, 128)
    numbers[0, 70] = torch.nan
    decoded = decode(encode(numbers), 128, torch.bfloat16)
    assert decoded[0, 64:].isnan().all()
    assert not decoded[0, :64].any()
    assert not decoded[1].any()


WIDE = {"hidden_size": 64, "intermediate_size": 80}
"""Rows of one block, and rows with a shorter second one."""
COMMON = [
    "tokenizer.path=demo:bytes train.steps=3 optim.lr=3e-3 schedule=constant",
    "adapter.rank=4 checkpoint.every=null",
]


def folder_in(precision):
    """Return how a folder is trained in another precision."""
    return [word.replace("precision=fp32", f"precision={precision}") for word in HF]


def decoded_folder(folder, into, dtype, also):
    """Write what a 4-bit model of a folder computes with, in `dtype`, as another folder.

    also: what is trained in full.
    """
    shutil.copytree(folder, into)
    file = into / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        is_matrix = weight.ndim > 1 and not name.endswith(("_bias", "gate.weight", "router.weight"))
        if is_matrix and ".layers." in name and name.split(".")[-2] not in also:
            rows = weight.flatten(0, -2)
            weight = decode(encode(rows), rows.shape[1], dtype).view_as(weight)
        weights[name] = weight.to(dtype)
    save_file(weights, file, {"format": "pt"})
    return into


DECODED = rows("""
3 → qwen2 → bf16 → adapter=dora adapter.also=[norms]
2 → phi3 → fp32 → adapter=lora adapter.also=[o_proj] adapter.targets=[mlp.gate_up_proj]
  sharding.cpu_offload=true
2 → qwen3_moe → bf16 → adapter=lora adapter.targets=[all,experts]
  activation_checkpoint=full sharding.expert=2
1 → gpt_oss → fp32 → adapter=lora adapter.targets=[q_proj,experts]
1 → llama → bf16 → adapter=lora adapter.targets=[q_proj,down_proj] activation_checkpoint=full
  compile=enabled
""")


@pytest.mark.parametrize("ranks, family, dtype, how", DECODED)
def test_training_is_bitwise_that_on_the_decoded_weights(
    train, compiled, tmp_path, ranks, family, dtype, how
):
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    sizes, options = WIDE, {"ranks": int(ranks), "base": folder_in(dtype)}
    common = [*COMMON, how]
    if "compile=" in how:
        common, sizes = [*common, *compiled[1:]], WIDE | {"num_hidden_layers": 1}
        options["seam"] = inject.no_kernels()
    folder = make_folder(tmp_path / "hf", family, torch_dtype, **sizes)
    also = "o_proj" if "adapter.also=[o_proj]" in how else ""
    decoded = decoded_folder(folder, tmp_path / "decoded", torch_dtype, also)
    run = train("run", *common, f"adapter.base=nf4 model.init_from={folder}", **options)
    expected = train("expected", *common, f"model.init_from={decoded}", **options)
    assert_same_end(run, expected)
    assert run["loss"][-1] < run["loss"][0]
    name = "model.layers.0.self_attn.q_proj.weight"
    if family == "phi3":
        name = name.replace("q_proj", "qkv_proj")
    before, after = (tensors(f)[name] for f in (folder, decoded))
    assert (before - after).norm() > 0.05 * before.norm(), "4 bits must differ"


def digests(run):
    return read_progress(newest(run))["frozen"]["digests"]


@contextlib.contextmanager
def recorded(file):
    """Write the bytes that rank 0 holds of the blocks' matrices, and the bytes that it gathers."""
    held, gathered = [], []
    gather = DirectAllGather.__call__

    def count(message, output_tensor, *args, **options):
        gathered.append(output_tensor.nbytes)
        return gather(message, output_tensor, *args, **options)

    def keep(trainer):
        parameters = trainer.runner.model.named_parameters()
        held.extend(local_part(p).nbytes for n, p in parameters if n.endswith("_proj.weight"))

    with inject.with_trainer(keep), patch.object(DirectAllGather, "__call__", count):
        yield
    if inject.this_rank(0):
        write_json(file, [sum(held), sum(gathered)])


def test_a_rank_holds_and_gathers_codes_in_place_of_numbers(train, tmp_path):
    folder = make_folder(tmp_path / "hf", **WIDE)
    how = [*COMMON, f"model.init_from={folder} train.steps=1 adapter=lora"]
    for base in ("fp32", "nf4"):
        seam = partial(recorded, tmp_path / base)
        train(f"on_{base}", *how, f"adapter.base={base}", ranks=2, base=HF, seam=seam)
    weights = tensors(folder)
    shapes = [weights[name].shape for name in weights if name.endswith("_proj.weight")]
    numbers = 4 * sum(rows * columns for rows, columns in shapes)
    codes = sum(rows * encoded_columns(columns) for rows, columns in shapes)
    held, gathered = read_json(tmp_path / "fp32")
    held_of_codes, gathered_of_codes = read_json(tmp_path / "nf4")
    assert (held, held_of_codes) == (numbers // 2, codes // 2)
    assert gathered - gathered_of_codes == numbers - codes


def test_encoding_needs_a_few_pieces_beside_what_it_gives(tmp_path):
    rows, columns = 1024, 1024
    file = tmp_path / "numbers"
    numpy.zeros((rows, columns), "float32").tofile(file)
    whole = (slice(0, rows), slice(0, columns))
    on_disk = TensorOnDisk(torch.float32, (rows, columns), [Chunk(file, 0, whole)])
    codes = encoded(on_disk)
    with inject.setting("tensor_piece_bytes", 2**15), LiveBytes() as memory:
        buffer = torch.empty(codes.nbytes, dtype=torch.uint8)
        codes.read_rows(0, rows, buffer)
    assert memory.most < codes.nbytes + 2 * 2**15 < on_disk.nbytes / 3


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "hf", dtype=torch.bfloat16, **WIDE)


QLORA = [*COMMON, "adapter=qlora checkpoint.every=2"]


def test_codes_do_not_depend_on_the_number_of_ranks_and_a_base_may_not_change(train, folder):
    how = [*QLORA, f"model.init_from={folder}"]
    digests_of_one = digests(train("run", *how, "train.steps=2", base=HF))
    assert digests(train("run", *how, "train.steps=3", base=HF, ranks=3)) == digests_of_one
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3] *= -1
    save_file(weights, file, {"format": "pt"})
    run = train("run", *how, "train.steps=4", base=HF, code=2)
    assert "in model.layers.1.mlp.down_proj.weight." in run.err


def test_a_checkpoint_can_be_the_base(train, ledger):
    first = ledger.run("plain on two")
    how = [*QLORA, f"model.init_from={first.folder}"]
    train("run", *how, "train.steps=2", ranks=2, base=HF)
    run = train("run", *how, "train.steps=3", ranks=2, base=HF)
    assert run["step"] == [1, 2, 3]
    assert run["loss"][0] == pytest.approx(first["loss"][-1], rel=0.1)


def test_what_4_bits_cannot_be_together_with_is_refused(train, folder):
    common = f"train.steps=1 model.init_from={folder} tokenizer.path=demo:bytes"
    float8 = folder_in("fp8")
    run = train("float8", common, "adapter=qlora", base=float8, code=2)
    assert "Use  precision=bf16  or  adapter.base=bf16" in run.err
    seam = inject.around("torch_version", torch_2_11)
    old = train("old", common, "adapter=qlora", base=HF, code=2, seam=seam)
    assert "nf4 needs torch 2.12; installed is 2.11.0+cu128" in old.err
    assert "Use  adapter.base=bf16" in old.err


def torch_2_11(_real, _package):
    return "2.11.0+cu128"
