"""Tokens from a cache beside transformers' generate: the same model, the same tokens, greedy, on this machine.

    python -m benchmarks.generate [--repeat 5] [--new 64] [--check]

Llamas with random weights in float32, prompts of 64 tokens, batches of 1 and 8; a round is one batch of each way.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import fsdp_trainer
from benchmarks.harness import arguments, finish, in_turn, ratio, spread
from fsdp_trainer.generation.generate import generate_tokens
from fsdp_trainer.generation.sampling import Sampling

VOCABULARY = 8000
PROMPT = 64
SIZES = {
    "width 128, 4 blocks": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    "width 384, 8 blocks": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
}
BATCHES = (1, 8)


def main() -> None:
    """Measure, print, write down."""
    given = arguments(__doc__, repeat=5, new=64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "what": f"{PROMPT} + {given.new} tokens, float32, one {device}, {given.repeat} rounds"
    }
    compared = {}
    for size, config in SIZES.items():
        ours, theirs = both(config, device)
        for rows in BATCHES:
            ways = prepared(ours, theirs, rows, given.new)
            taken = in_turn(ways, given.repeat)
            name = f"{size}, batch {rows}"
            faster = ratio(taken["transformers"], taken["fsdp_trainer"])
            speeds = {
                way: spread([rows * given.new / seconds for seconds in each])
                for way, each in taken.items()
            }
            result[name] = {"tokens_per_second": speeds, "times_as_fast": faster}
            compared[f"{name}: times as fast"] = faster["median"]
    finish("generate", result, compared, given.check, ("transformers",))


def both(config: dict[str, int], device: str) -> tuple[Any, Any]:
    """One model as ours and as transformers'."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **heads, **config)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    theirs.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = fsdp_trainer.load_model(folder, device)
    return ours, theirs.to(device)


def prepared(ours: Any, theirs: Any, rows: int, new: int) -> dict[str, Callable[[], float]]:
    """Ways that give their seconds, once both have given the same tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (rows, PROMPT), generator=generator)
    given = prompts.to(theirs.device)
    mask = torch.ones_like(given)

    def our_tokens() -> list[list[int]]:
        answers = generate_tokens(ours, prompts.tolist(), (), Sampling(max_tokens=new))
        return [tokens for [tokens] in answers]

    def their_tokens() -> list[list[int]]:
        generated = theirs.generate(
            given, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return generated[:, PROMPT:].tolist()

    assert our_tokens() == their_tokens()
    return {"transformers": timed(their_tokens), "fsdp_trainer": timed(our_tokens)}


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Work that gives its seconds; its tokens have reached the host."""

    def run() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return run


if __name__ == "__main__":
    main()
