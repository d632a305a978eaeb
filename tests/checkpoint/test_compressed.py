"""Quantised exports are read back by transformers through the package that owns the format."""

import pytest
import torch
import transformers
from foreign import export, of
from stored import save_tensors, tensors
from tables import rows
from world import read_json
from zoo import make_folder

pytest.importorskip("compressed_tensors")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe"]
STEPS = {"fp8": 2**-4, "int8": 1 / 127 / 2, "int4": 1 / 7.5 / 2}
"""Largest error of a number: for fp8 as a share of itself, else of the largest in its scale."""
DISTANCES = {"fp8": 0.2, "int8": 0.05, "int4": 0.5}
"""Largest distance of the logits of a small random model, as a share of their norm."""
BITS = {"fp8": 8, "int8": 8, "int4": 4}


@pytest.mark.parametrize(
    "family, kind",
    rows("""
llama → fp8
llama → int8
qwen3 → int4
mixtral → fp8
qwen2_moe → int4
qwen3_moe → fp8
"""),
)
def test_each_number_is_within_half_a_step_and_the_model_is_nearly_the_same(tmp_path, family, kind):
    folder = make_folder(tmp_path / "hf", family, shard="100KB", **SIZES)
    template = folder / "chat_template.jinja"
    template.write_text("{{ messages }}")
    out = export(folder, tmp_path / "out", "form=compressed", f"quantization={kind}")
    assert (out / template.name).read_text() == template.read_text()
    config = read_json(out / "config.json")["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    options = transformers.CompressedTensorsConfig(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", quantization_config=options
    )
    decoded, original = read.state_dict(), of(folder)
    group = 64 if kind == "int4" else None
    for name, matrix in original.state_dict().items():
        error = (decoded[name] - matrix).abs()
        if matrix.ndim < 2 or "layers" not in name or name.endswith("gate.weight"):
            assert error.max() == 0, name
            continue
        groups = matrix.unflatten(-1, (-1, group or matrix.shape[-1])).abs()
        largest = groups.amax(-1, keepdim=True).expand_as(groups).reshape(matrix.shape)
        limit = largest * STEPS[kind]
        if kind == "fp8":
            limit = matrix.abs() * STEPS[kind] + largest * 2**-17
        assert (error <= limit * 1.01).all(), name
        assert error.max() > 0
    if family in EXPERTS:  # a router of random weights sends many tokens elsewhere
        return
    matrices, stored = (
        sum(t.nbytes for name, t in tensors(path).items() if name.endswith(STORED))
        for path in (folder, out)
    )
    assert stored == matrices * BITS[kind] / 32, "as few bytes as the numbers need"
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, ours = original(ids).logits, read(ids).logits
    assert (ours - expected).norm() < DISTANCES[kind] * expected.norm()


STORED = ("_proj.weight", "weight_packed")


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_8_bits_are_within_half_a_step(tmp_path, family):
    """The stored numbers times their scale; transformers does not read experts in this form."""
    folder = make_folder(tmp_path / "hf", family, **SIZES)
    out = export(folder, tmp_path / "out", "form=compressed", "quantization=int8")
    stored, original = tensors(out), tensors(folder)
    quantised = [name for name, tensor in stored.items() if tensor.dtype == torch.int8]
    assert sum(".experts." in name for name in quantised) >= 6
    for name in quantised:
        matrix, scale = original[name], stored[f"{name}_scale"]
        error = (stored[name] * scale - matrix).abs()
        assert (error <= matrix.abs().amax(1, keepdim=True) * STEPS["int8"] * 1.01).all(), name


def test_blocks_that_no_module_reads_keep_their_numbers(tmp_path):
    folder = make_folder(tmp_path / "hf", "deepseek_v3", num_hidden_layers=2, **SIZES)
    name = "model.layers.2.eh_proj.weight"
    stored = tensors(folder) | {name: torch.randn(64, 128)}
    save_tensors(folder, stored)
    out = export(folder, tmp_path / "out", "form=compressed", "quantization=int8")
    assert torch.equal(tensors(out)[name], stored[name])
    description = read_json(out / "config.json")["quantization_config"]
    assert name.removesuffix(".weight") in description["ignore"]
