"""A plain Hugging Face script on one GPU, as one would write it to be fast; prints JSON.

    python -m benchmarks.plain_script --rows 4 [--small 1]

Eight blocks of Llama-3.1-8B's shape by transformers, with Liger's kernels, compiled blocks, autocast
to bfloat16, attention by torch, fused AdamW and clipping: without FSDP, packing or checkpoints. It is
what `benchmarks.gpu` compares one GPU with. Install liger-kernel first; the result says whether it
was there.
"""

import json
import time
from importlib.util import find_spec

import torch

from benchmarks.harness import arguments, rank_memory, wait_for_device
from benchmarks.step_budget import BLOCKS, HIDDEN, INNER, PEAK, ROW, VOCABULARY

WARM_UP, TIMED = 4, 6


def main() -> None:
    """Train on random tokens and print the figures."""
    given = arguments(__doc__, repeat=1, rows=1, small=0)
    device = "cpu" if given.small else "cuda"
    row = 64 if given.small else ROW
    model = make_model(bool(given.small), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (given.rows, row), device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(WARM_UP):
        step()
    wait_for_device()
    began = time.perf_counter()
    for _ in range(TIMED):
        loss = step()
    wait_for_device()
    rate = TIMED * tokens.numel() / (time.perf_counter() - began)
    config = model.config
    counted = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    operations = 6 * counted + 12 * config.num_hidden_layers * config.hidden_size * row
    results = {"tokens_per_second": rate, "mfu_palm": operations * rate / PEAK}
    results |= {"memory_gib": rank_memory() / 1024, "loss": loss.item(), "liger": has_liger()}
    print(json.dumps(results))


def has_liger() -> bool:
    """Return True if Liger's kernels are installed."""
    return find_spec("liger_kernel") is not None


def make_model(small: bool, device: str) -> torch.nn.Module:
    """Return the model with random weights in float32, its blocks compiled unless `small`."""
    import transformers

    if has_liger() and not small:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    shape = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": BLOCKS}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY}
    if small:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260}
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=ROW, tie_word_embeddings=False, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if not small:
        for block in model.model.layers:
            block.compile()
    return model.train()


if __name__ == "__main__":
    main()
