"""Exports are read by the tools they are for, where these are installed; no test of CI has them.

pip install torchtitan triton              # 0.2 or 0.3
pip install llama-models fairscale         # Meta's own code
pip install llama-cpp-python xllamacpp     # llama.cpp

pytest tools/own_readers.py
"""

import runpy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from folders import TESTS, table
from foreign import AS_LLAMA_CPP, export, of
from other_models import make_other_folder
from world import World, read_json
from zoo import make_folder

WRITTEN = TESTS / "checkpoint/titan_checkpoints"
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
    own = runpy.run_path(str(TESTS.parent / "tools/fixtures/titan_checkpoints.py"))
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
def test_metas_code_computes_the_logits_of_the_folder_that_was_exported(tmp_path, options):
    pytest.importorskip("llama_models", reason="needs llama-models and fairscale")
    folder = make_folder(tmp_path / "hf", "llama", **options)
    out = export(folder, tmp_path / "meta", "form=meta")
    ranks = World()
    (logits,) = ranks.call(1, logits_of_meta, out)
    ranks.close()
    assert torch.allclose(logits, of(folder)(IDS).logits, atol=2e-5)


TIED = ["llama biases", "qwen2", "gemma2", "gemma3"]
UNTIED = [
    *("llama", "mistral", "olmo2", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "olmoe", "phi3"),
]
HYBRIDS = table("checkpoint/gguf_hybrids.yaml")


def of_llama_cpp(file, prompts):
    """The log-probabilities of all next tokens, by llama.cpp."""
    import xllamacpp as package

    settings = package.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(file), 128, 1
    settings.warmup, settings.n_gpu_layers, settings.cpuparams.n_threads = False, 0, 1
    settings.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = package.ggml_type.GGML_TYPE_F32
    server = package.Server(settings)
    options = {
        "n_predict": 1,
        "logprobs": 264,
        "n_probs": 264,
        "samplers": [],
        "cache_prompt": False,
    }
    options["logit_bias"] = [[65, 1000.0]]  # what is chosen shall be a letter
    answers = [server.handle_completions({"prompt": each, **options}) for each in prompts]
    each = [one["choices"][0]["logprobs"]["content"][0]["top_logprobs"] for one in answers]
    return [torch.tensor([p for _, p in sorted((t["id"], t["logprob"]) for t in o)]) for o in each]


@pytest.mark.parametrize("which", [*TIED, *UNTIED, *HYBRIDS])
@torch.no_grad()
def test_llama_cpp_gives_the_probabilities_of_the_folder_that_was_exported(tmp_path, which):
    pytest.importorskip("xllamacpp", reason="needs xllamacpp")
    options = AS_LLAMA_CPP.get(which, {}) | {"tie_word_embeddings": which in TIED}
    if which == "phi3":  # llama.cpp sees all tokens
        options["sliding_window"] = None
    folder = (
        make_other_folder(tmp_path / "hf", which.split()[0], **HYBRIDS[which])
        if which in HYBRIDS
        else make_folder(tmp_path / "hf", which, vocab_size=264, **options)
    )
    file = export(folder, tmp_path / "a.gguf", "form=gguf", "dtype=f32")
    model, prompts = of(folder).float().eval(), [[70], [70, 65], [*range(60, 130)]]
    for prompt, theirs in zip(prompts, of_llama_cpp(file, prompts), strict=True):
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
        limit = 3e-2 if "gemma" in which else 2e-5  # llama.cpp has a table of GELU
        assert (theirs - expected).abs().max() < limit


def logits_of_llama_cpp(file, **options):
    """Return the logits that llama.cpp computes, with states in float32."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0,
        **options,
    )  # fmt: skip
    model.eval(IDS[0].tolist())
    return torch.tensor(model.scores[: IDS.shape[1]].copy())


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
