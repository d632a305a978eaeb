"""Quantised exports are read back by transformers through the package that owns the format."""

import json

import pytest
import torch
from safetensors.torch import load_file
from zoo import make_folder

pytestmark = pytest.mark.slow
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
DENSE, EXPERTS = ["llama", "qwen3"], ["mixtral", "qwen2_moe", "qwen3_moe"]
STEPS = {"fp8": 2**-4, "int8": 1 / 127 / 2, "int4": 1 / 7.5 / 2}
"""Largest error of a number: for fp8 as a share of itself, else of the largest in its scale."""

DISTANCES = {"fp8": 0.2, "int8": 0.05, "int4": 0.5}
"""Largest distance of the logits of a small random model, as a share of their norm."""


def read_back(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def matrices(folder):
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if name.endswith("_proj.weight")
    }


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, kind) for family in DENSE for kind in STEPS),
        *((family, kind) for family in EXPERTS for kind in ("fp8", "int4")),
    ],
)
@pytest.mark.grid(6)
def test_each_number_is_within_half_a_step_and_the_model_is_nearly_the_same(
    world, tmp_path, family, kind
):
    folder = make_folder(tmp_path / "hf", family, shard="100KB", **SIZES)
    out = tmp_path / "out"
    words = f"source={folder}", f"out={out}", "form=compressed", f"quantization={kind}"
    world.command("export", *words)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    options = transformers.CompressedTensorsConfig(dequantize=True)
    read = read_back(out, quantization_config=options)
    decoded = read.state_dict()
    group = 64 if kind == "int4" else None
    original = read_back(folder)
    for name, matrix in original.state_dict().items():
        error = (decoded[name] - matrix).abs()
        if matrix.ndim < 2 or "layers" not in name or name.endswith("gate.weight"):
            assert error.max() == 0, name
            continue
        groups = matrix.unflatten(-1, (-1, group or matrix.shape[-1])).abs()
        largest = groups.amax(-1, keepdim=True).expand_as(groups).reshape(matrix.shape)
        if kind == "fp8":
            limit = matrix.abs() * STEPS[kind] + largest * 2**-17
        else:
            limit = largest * STEPS[kind]
        assert (error <= limit * 1.01).all(), name
        assert error.max() > 0
    if family not in DENSE:  # a router of random weights sends many tokens elsewhere
        return
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, ours = original(ids).logits, read(ids).logits
    assert (ours - expected).norm() < DISTANCES[kind] * expected.norm()


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_8_bits_are_within_half_a_step(world, tmp_path, family):
    """The stored numbers times their scale; transformers does not read experts in this form."""
    folder = make_folder(tmp_path / "hf", family, **SIZES)
    out = tmp_path / "out"
    words = f"source={folder}", f"out={out}", "form=compressed", "quantization=int8"
    world.command("export", *words)
    stored, original = (load_file(path / "model.safetensors") for path in (out, folder))
    quantised = [name for name, tensor in stored.items() if tensor.dtype == torch.int8]
    assert sum(".experts." in name for name in quantised) >= 6
    for name in quantised:
        matrix, scale = original[name], stored[f"{name}_scale"]
        error = (stored[name] * scale - matrix).abs()
        assert (error <= matrix.abs().amax(1, keepdim=True) * STEPS["int8"] * 1.01).all(), name


def test_matrices_take_as_few_bytes_as_their_numbers(world, tmp_path):
    folder = make_folder(tmp_path / "hf", dtype=torch.bfloat16, **SIZES)
    whole = sum(matrix.nbytes for matrix in matrices(folder).values())
    for kind, share in (("fp8", 0.5), ("int8", 0.5), ("int4", 0.25)):
        out = tmp_path / kind
        words = f"source={folder}", f"out={out}", "form=compressed", f"quantization={kind}"
        world.command("export", *words)
        stored = load_file(out / "model.safetensors")
        held = sum(t.nbytes for name, t in stored.items() if name.endswith(("weight_packed",
                   "_proj.weight")))  # fmt: skip
        assert held == whole * share


@pytest.mark.parametrize(
    ("family", "words", "reason"),
    [
        ("llama", ["form=compressed"], "needs  quantization=fp8|int8|int4"),
        ("llama", ["quantization=fp8"], "only counts with  form=compressed"),
        ("gpt_oss", ["form=compressed", "quantization=fp8"], "has all experts in one tensor"),
        ("llama", ["form=compressed", "quantization=int4"], "no multiple of 32: use int8"),
    ],
)
def test_what_cannot_be_quantised_is_refused_and_nothing_is_left(
    world, tmp_path, family, words, reason
):
    folder = make_folder(tmp_path / "hf", family, intermediate_size=72)
    words = f"source={folder}", f"out={tmp_path / 'out'}", *words
    (result,) = world.command("export", *words, code=2)
    assert reason in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
