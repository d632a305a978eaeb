"""Speed of our expert block compared with transformers', routing included, forward and backward.

    python -m benchmarks.experts [--repeat 5] [--check]

A Qwen3-MoE block with few and with many experts on the same 2,048 tokens with the same weights.
transformers computes experts in a loop ("eager") or by grouped products ("grouped_mm"). Outputs
must agree. bfloat16 on a GPU, float32 elsewhere.
"""

import time
from typing import Any

import torch

from benchmarks.harness import arguments, finish, in_turn, ratio, spread, wait_for_device

TOKENS = 2048
SIZES = {
    "8 experts, 2 of them": {"num_experts": 8, "num_experts_per_tok": 2, "inner": 512},
    "64 experts, 8 of them": {"num_experts": 64, "num_experts_per_tok": 8, "inner": 128},
}
HIDDEN = 512
PEERS = ("eager", "grouped_mm")


def main() -> None:
    """Measure, print and store the result."""
    given = arguments(__doc__, repeat=5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result: dict[str, Any] = {"what": f"{TOKENS:,} tokens of width {HIDDEN}, {dtype} on {device}"}
    compared = {}
    for name, sizes in SIZES.items():
        torch.manual_seed(0)
        ours = our_block(sizes).to(device, dtype)
        blocks: dict[str, Any] = {"fsdp_trainer": ours}
        blocks |= {peer: their_block(sizes, ours, peer).to(device, dtype) for peer in PEERS}
        x = torch.randn(1, TOKENS, HIDDEN, device=device, dtype=dtype)
        check_outputs(blocks, x)
        ways = {who: (lambda block=block, x=x: seconds(block, x)) for who, block in blocks.items()}
        in_turn(ways, 1)  # warm-up
        measured = in_turn(ways, given.repeat)
        mine = [TOKENS / each for each in measured["fsdp_trainer"]]
        result[name] = {"fsdp_trainer": {"tokens_per_second": spread(mine)}}
        for peer in PEERS:
            other = [TOKENS / each for each in measured[peer]]
            speedup = ratio(mine, other)
            result[name][peer] = {"tokens_per_second": spread(other), "ratio": speedup}
            compared[f"{name}: speed beside {peer}"] = speedup
    finish("experts", result, compared, given.check, ("transformers",))


def our_block(sizes: dict[str, int]) -> Any:
    """Return our block with random weights."""
    from fsdp_trainer.models.config import ModelConfig
    from fsdp_trainer.models.moe import MixtureOfExperts

    config = ModelConfig(
        family="qwen3_moe",
        hidden_size=HIDDEN,
        num_experts=sizes["num_experts"],
        num_experts_per_tok=sizes["num_experts_per_tok"],
        moe_intermediate_size=sizes["inner"],
        norm_topk_prob=True,
    )
    block = MixtureOfExperts(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return block


def their_block(sizes: dict[str, int], ours: Any, implementation: str) -> Any:
    """Return transformers' block with the weights of ours."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=sizes["num_experts"],
        num_experts_per_tok=sizes["num_experts_per_tok"],
        moe_intermediate_size=sizes["inner"],
        norm_topk_prob=True,
        experts_implementation=implementation,
    )
    block = Qwen3MoeSparseMoeBlock(config)
    experts = ours.experts
    with torch.no_grad():
        block.gate.weight.copy_(ours.gate.weight)
        fused = torch.cat([experts.gate_proj, experts.up_proj], 1)
        block.experts.gate_up_proj.copy_(fused)
        block.experts.down_proj.copy_(experts.down_proj)
    return block


def check_outputs(blocks: dict[str, Any], x: torch.Tensor) -> None:
    """Raise AssertionError if the blocks' outputs differ."""
    with torch.no_grad():
        expected = blocks["fsdp_trainer"](x)
        for block in blocks.values():
            tolerance = 0.05 if x.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(block(x), expected, rtol=tolerance, atol=tolerance)


def seconds(block: Any, x: torch.Tensor) -> float:
    """Return the seconds of one forward and backward."""
    leaf = x.clone().requires_grad_()
    wait_for_device()
    start = time.perf_counter()
    out = block(leaf)
    out.backward(torch.ones_like(out))
    wait_for_device()
    block.zero_grad(set_to_none=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
