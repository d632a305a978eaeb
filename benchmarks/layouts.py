"""Host time of tensor parallelism, and memory per rank of tensor and context parallelism.

    python -m benchmarks.layouts [--repeat 5] [--check]

- host time: forward and backward of 4 blocks on 2 ranks, so small that computing takes almost no
  time: processor time of the main thread, for fsdp_trainer/parallel/tensor.py ("by hand") and for
  torch's `parallelize_module` with the same sharding. All gradients are compared first.
- memory: growth of the peak of a rank's resident memory in two training steps of one row of 4,096
  tokens, by sharding.tensor and sharding.context.
"""

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsdp_trainer
from benchmarks.harness import (
    arguments,
    finish,
    in_turn,
    print_result,
    rank_memory,
    ratio,
    run_ranks,
    spread,
)
from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Sharding
from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.tensor import shard_tensors

RANKS, LENGTH, STEPS, WARM = 2, 64, 30, 5
SMALL = ModelConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=64, tie_word_embeddings=False,
)  # fmt: skip
LARGE = [
    "model=tiny", "model.hidden_size=256", "model.intermediate_size=768",
    "model.num_hidden_layers=8", "model.num_attention_heads=8", "model.num_key_value_heads=4",
    "model.head_dim=32", "model.vocab_size=8192", "model.tie_word_embeddings=false",
    "model.max_position_embeddings=4096", "precision=fp32", "batch.seq_len=4096", "batch.rows=1",
    "batch.micro_rows=1", "data.packing=stream", "data.too_long=split", "tokenizer.path=demo:bytes",
    "train.steps=2", "checkpoint.every=null", "run.overwrite=true", "checkpoint.resume=never",
]  # fmt: skip
LAYOUTS = {
    "one rank": (1, []),
    "tensor 2": (2, ["sharding.tensor=2"]),
    "tensor 4": (4, ["sharding.tensor=4"]),
    "context 2": (2, ["sharding.context=2"]),
    "context 4": (4, ["sharding.context=4"]),
}


def main() -> None:
    """Measure, print and store the result, or run one rank's part."""
    given = arguments(__doc__, repeat=5, host=0, memory="")
    if given.host:
        return print_host_times(given.repeat)
    if given.memory:
        print_memory(json.loads(given.memory))
        os._exit(0)  # torch's threads may abort the interpreter's end
    hosts = run_ranks("benchmarks.layouts", RANKS, "--host", "1", "--repeat", str(given.repeat))
    by_hand = [host["by hand"] for host in hosts]
    modules = [host["parallelize_module"] for host in hosts]
    slowest = {
        name: [max(each) for each in zip(*times, strict=True)]
        for name, times in (("by hand", by_hand), ("parallelize_module", modules))
    }
    memory = {name: grown_memory(ranks, how) for name, (ranks, how) in LAYOUTS.items()}
    ours = ratio(slowest["parallelize_module"], slowest["by hand"])
    result: dict[str, Any] = {
        "what": f"4 blocks of width 64 on {RANKS} ranks, {given.repeat} rounds of {STEPS} steps",
        "host_milliseconds_a_step": {name: spread(times) for name, times in slowest.items()},
        "parallelize_module / by hand": ours,
        "largest_difference_of_a_gradient": max(host["difference"] for host in hosts),
        "memory": {
            name: {"mib": round(mib), "of_one_rank": round(mib / memory["one rank"], 3)}
            for name, mib in memory.items()
        },
    }
    compared = {"host time, parallelize_module / by hand": ours}
    compared |= {f"memory, one rank / {name}": memory["one rank"] / memory[name] for name in memory}
    finish("layouts", result, compared, given.check)


# --- host time ------------------------------------------------------------------------------------


def print_host_times(rounds: int) -> None:
    """Print this rank's milliseconds per step of both ways, and their gradients' difference."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dims = Dims(Layout(Sharding(tensor=RANKS), RANKS, Batch()), "cpu", 60)
    by_hand = meta_decoder(SMALL)
    shard_tensors(by_hand, dims)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    modules = meta_decoder(SMALL)
    for block in modules.blocks().values():
        by_torch(block, mesh)
    models = {"by hand": by_hand, "parallelize_module": modules}
    steps = {name: prepared_step(model) for name, model in models.items()}
    for step in steps.values():
        step()
    difference = largest_difference(by_hand, modules)
    ways = {name: (lambda step=step: milliseconds(step)) for name, step in steps.items()}
    print_result({**in_turn(ways, rounds), "difference": difference})
    dist.barrier()
    dist.destroy_process_group()


def by_torch(block: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a block as parallel/tensor.py does, by torch's own parallel styles."""
    whole, part = Replicate(), Shard(1)
    others = (None, None, None)
    parallelize_module(
        block,
        mesh,
        {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(part, *others), desired_input_layouts=(whole, *others)
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=part),
            "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=part),
        },
    )


def prepared_step(model: Decoder) -> Callable[[], None]:
    """Return a function that runs forward and backward of the blocks on this rank's tokens.

    Weights and inputs are the same on all ranks and in both ways.
    """
    model.model.layers.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.model.layers.parameters():
        whole = torch.randn(parameter.shape) / 8
        with torch.no_grad():
            local_part(parameter).copy_(whole[local_slice(parameter)])
    x = torch.randn(1, LENGTH, SMALL.hidden_size)
    first = dist.get_rank() * LENGTH // RANKS
    own = x[:, first : first + LENGTH // RANKS]
    layout = DocumentAttention([[LENGTH]], LENGTH, torch.device("cpu"))
    angles = torch.randn(1, LENGTH, 1, SMALL.head_dim)
    cos_sin = angles.cos(), angles.sin()

    def step() -> None:
        hidden = own.clone().requires_grad_()
        for block in model.blocks().values():
            hidden, _ = block(hidden, cos_sin, layout, None)
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        hidden.square().mean().backward()

    return step


def largest_difference(one: Decoder, other: Decoder) -> float:
    """Return the largest difference of any gradient, relative to its largest number.

    Raises AssertionError if it is not rounding.
    """
    others = dict(other.model.layers.named_parameters())
    worst = 0.0
    for name, parameter in one.model.layers.named_parameters():
        pair = [whole_gradient(p) for p in (parameter, others[name])]
        worst = max(worst, float((pair[0] - pair[1]).abs().max() / pair[1].abs().max()))
    assert worst < 1e-4, worst
    return worst


def whole_gradient(parameter: Any) -> Tensor:
    """Return the complete gradient, gathered from all ranks."""
    return parameter.grad.full_tensor()


def milliseconds(step: Callable[[], None]) -> float:
    """Return the median processor time of this thread over the timed steps, in milliseconds."""
    times = []
    for _ in range(WARM + STEPS):
        begun = time.thread_time()
        step()
        times.append(1000 * (time.thread_time() - begun))
    return statistics.median(times[WARM:])


# --- memory ---------------------------------------------------------------------------------------


def grown_memory(ranks: int, overrides: list[str]) -> float:
    """Return the growth of peak memory in a training on the rank with the most, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(chr(97 + i * i % 26) for i in range(40_000))
        (Path(folder) / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
        given = [
            *LARGE, *overrides, f"data.path={folder}/text.jsonl", f"run.root={folder}/runs",
        ]  # fmt: skip
        results = run_ranks("benchmarks.layouts", ranks, "--memory", json.dumps(given))
    return max(rank["mib"] for rank in results)


def print_memory(overrides: list[str]) -> None:
    """Print this rank's growth of peak memory in a training, without imports, in MiB."""
    for name in ("torch._dynamo", "fsdp_trainer.run.run"):
        import_module(name)
    with contextlib.redirect_stdout(io.StringIO()):
        before = rank_memory()
        fsdp_trainer.train(overrides)
    print_result({"mib": rank_memory() - before})


if __name__ == "__main__":
    main()
