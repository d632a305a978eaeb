"""Speed of greedy generation with a cache compared with transformers' generate, on the same model.

    python -m benchmarks.generate [--repeat 5] [--new 64] [--check]

Llamas with random weights in float32, prompts of 64 tokens, batches of 1 and 8; a round is one
batch of each way, and all ways must generate the same tokens. transformers' cache is the default,
which grows, or static: ours is compared with the faster of the two. Every token reads all weights
but the embedding once, so their bytes and torch's memory read speed bound the speed of any way.
"""

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import fsdp_trainer
from benchmarks.harness import arguments, finish, in_turn, ratio, spread
from fsdp_trainer.generation.continuations import generate_tokens
from fsdp_trainer.generation.sampling import Sampling

VOCABULARY = 8000
PROMPT = 64
SIZES = {
    "width 128, 4 blocks": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    "width 384, 8 blocks": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
    "width 576, 30 blocks": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    },
}
BATCHES = (1, 8)
DYNAMIC, STATIC = "transformers", "transformers, static cache"


def main() -> None:
    """Measure, print and store the result."""
    given = arguments(__doc__, repeat=5, new=64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    speed = memory_speed(device)
    result: dict[str, Any] = {
        "what": f"{PROMPT} + {given.new} tokens, float32, one {device}, {given.repeat} rounds",
        "memory_gb_per_second": speed,
    }
    compared = {}
    for size, config in SIZES.items():
        ours, theirs = both(config, device)
        head_and_blocks = (
            sum(p.numel() for p in ours.parameters()) - VOCABULARY * ours.config.hidden_size
        )
        weights = 4 * head_and_blocks
        for rows in BATCHES:
            ways = prepared(ours, theirs, rows, given.new)
            timings = in_turn(ways, given.repeat)
            name = f"{size}, batch {rows}"
            fastest = min((DYNAMIC, STATIC), key=lambda way: median(timings[way]))
            faster = ratio(timings[fastest], timings["fsdp_trainer"])
            speeds = {
                way: spread([rows * given.new / seconds for seconds in each])
                for way, each in timings.items()
            }
            result[name] = {
                "tokens_per_second": speeds,
                "weights_mib": round(weights / 2**20, 1),
                "share_of_memory_speed": {
                    way: round(weights * given.new / min(each) / 1e9 / speed, 3)
                    for way, each in timings.items()
                },
                "compared_with": fastest,
                "times_as_fast": faster,
            }
            compared[f"{name}: times as fast"] = faster
    finish("generate", result, compared, given.check, ("transformers",))


def memory_speed(device: str) -> float:
    """Return GB/s at which torch reads a tensor larger than any cache, the best of ten times."""
    numbers = torch.ones(2**26, device=device)
    numbers.sum()
    best = min(timed(lambda: numbers.sum().item())() for _ in range(10))
    return round(4 * numbers.numel() / best / 1e9, 1)


def both(config: dict[str, int], device: str) -> tuple[Any, Any]:
    """Return one model as ours and as transformers'."""
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
    """Return timed functions of all ways, after checking that they generate the same tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (rows, PROMPT), generator=generator)
    given = prompts.to(theirs.device)
    mask = torch.ones_like(given)

    def our_tokens() -> list[list[int]]:
        answers = generate_tokens(ours, prompts.tolist(), (), Sampling(max_tokens=new))
        return [tokens for [tokens] in answers]

    def their_tokens(cache: str | None = None) -> list[list[int]]:
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        generated = theirs.generate(
            given, attention_mask=mask, cache_implementation=cache, **options
        )
        return generated[:, PROMPT:].tolist()

    assert our_tokens() == their_tokens() == their_tokens("static")
    return {
        DYNAMIC: timed(their_tokens),
        STATIC: timed(lambda: their_tokens("static")),
        "fsdp_trainer": timed(our_tokens),
    }


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that runs `work` and returns its seconds.

    `work` must end with a copy to the host, so that a GPU is finished.
    """

    def run() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return run


if __name__ == "__main__":
    main()
