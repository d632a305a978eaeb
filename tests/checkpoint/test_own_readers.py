"""Exports are read by the tools they are for, where these are installed.

pip install torchtitan triton        # 0.2 or 0.3
pip install llama-models fairscale   # Meta's own code
pip install llama-cpp-python         # llama.cpp
"""

import runpy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from folders import REPO
from foreign import AS_LLAMA_CPP, export, of
from world import read_json
from zoo import make_folder

pytestmark = pytest.mark.slow

WRITTEN = REPO / "tests" / "checkpoint" / "titan_checkpoints"
IDS = torch.arange(40)[None]
LLAMA_3_1 = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
}  # fmt: skip


def model_of_torchtitan():
    """Return torchtitan's own model, of the sizes of the fixtures."""
    own = runpy.run_path(str(REPO / "tools/fixtures/titan_checkpoints.py"))
    model, _ = own["MODELS"][own["release"]()]()
    return model


def test_torchtitans_model_computes_the_logits_of_the_folder_that_was_exported(tmp_path):
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    folder = export(WRITTEN / "torchtitan-0.2", tmp_path / "hf")
    out = export(folder, tmp_path / "titan", "form=torchtitan")
    model = model_of_torchtitan()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=out)
    model.load_state_dict(state)
    with torch.no_grad():
        assert torch.allclose(model(IDS), of(folder)(IDS).logits, atol=1e-5)


def logits_of_meta(folder):
    """Return the logits that Meta's own code computes of its files."""
    import fairscale.nn.model_parallel.initialize as model_parallel
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    dist.init_process_group("gloo")
    try:
        model_parallel.initialize_model_parallel(1)
        params = read_json(folder / "params.json")
        model = Transformer(ModelArgs(**params, max_batch_size=1, max_seq_len=64))
        model.load_state_dict(torch.load(folder / "consolidated.00.pth", weights_only=True))
        with torch.no_grad():
            return model(IDS, 0).clone()
    finally:
        model_parallel.destroy_model_parallel()


@pytest.mark.parametrize("options", [{}, LLAMA_3_1], ids=["llama", "llama-3.1"])
def test_metas_code_computes_the_logits_of_the_folder_that_was_exported(world, tmp_path, options):
    pytest.importorskip("llama_models", reason="needs llama-models and fairscale")
    folder = make_folder(tmp_path / "hf", "llama", **options)
    out = export(folder, tmp_path / "meta", "form=meta")
    (logits,) = world.call(1, logits_of_meta, out)
    assert torch.allclose(logits, of(folder)(IDS).logits, atol=2e-5)


LIKE_LLAMA_CPP = AS_LLAMA_CPP | {"phi3": {"sliding_window": None}}
"""llama.cpp ignores the window of Phi."""


def logits_of_llama_cpp(file, **options):
    """Return the logits that llama.cpp computes, with states in float32."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0,
        **options,
    )  # fmt: skip
    model.eval(IDS[0].tolist())
    return torch.tensor(model.scores[: IDS.shape[1]].copy())


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3",
     "olmo2", "olmoe", "phi3"],
)  # fmt: skip
def test_llama_cpp_computes_the_logits_of_the_folder_that_was_exported(tmp_path, family):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    folder = make_folder(tmp_path / "hf", family, **LIKE_LLAMA_CPP.get(family, {}))
    file = export(folder, tmp_path / "a.gguf", "form=gguf", "dtype=f32")
    with torch.no_grad():
        expected = of(folder).float()(IDS).logits[0]
    # it has a table of float16 for Gemma's activation
    limit = 5e-3 if family.startswith("gemma") else 1e-5
    error = (logits_of_llama_cpp(file) - expected).abs().max()
    assert error < limit * expected.abs().max()


def test_llama_cpp_adds_an_exported_adapter_as_peft_does(tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    peft = pytest.importorskip("peft")
    folder = make_folder(tmp_path / "hf", "llama")
    options = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear")
    model = peft.get_peft_model(of(folder).float(), options)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "adapter")
    base = export(folder, tmp_path / "base.gguf", "form=gguf", "dtype=f32")
    adapter = export(tmp_path / "adapter", tmp_path / "adapter.gguf", "form=gguf_adapter")
    with torch.no_grad():
        expected = model(IDS).logits[0]
    ours = logits_of_llama_cpp(base, lora_path=str(adapter))
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (logits_of_llama_cpp(base) - expected).abs().max() > 0.1 * expected.abs().max()
