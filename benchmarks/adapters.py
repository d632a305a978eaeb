"""LoRA compared with peft under accelerate's FSDP2: speed, memory, bytes sent and stored.

    python -m benchmarks.adapters [--repeat 3] [--ranks 2] [--check]
    python -m benchmarks.adapters --gpu llama3_8b  # one GPU, against torchtune's published figures
    python -m benchmarks.adapters --gpu tiny       # the same with a tiny model, to try it out

Model, samples and the two ways of batching are those of benchmarks.train_step. Adapters of rank 16
on all linear layers of the blocks, in float32, start from the same numbers, so losses must agree.
The checkpoint of the peft script holds what transformers' Trainer stores of an adapter: its weights
and the optimizer's state. Bytes sent are those of a rank's all-gathers and reduce-scatters, per
step.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import (
    arguments,
    finish,
    in_turn,
    inverse,
    print_result,
    rank_memory,
    ratio,
    run_ranks,
    spread,
)
from benchmarks.train_step import (
    LR,
    ROWS,
    STEPS,
    accelerator_with_fsdp2,
    check_losses,
    command,
    our_figures,
    peers_figures,
    peers_task,
    prepare,
    start,
    timed_steps,
)

RANK, ALPHA = 16, 32
FIGURES = ("tokens_per_second", "memory_mib", "mib_sent_per_step", "checkpoint_mib")
PUBLISHED = {
    "lora": {"memory_gib": 16.2, "tokens_per_second": 3083, "card": "RTX 4090"},
    "qlora": {"memory_gib": 7.4, "tokens_per_second": 2413, "card": "RTX 4090"},
}
"""torchtune's README, Llama 3.1 8B: 2 packed rows of 2,048 tokens, compiled."""


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=3, ranks=2, task="", gpu="")
    if given.task:
        task = json.loads(Path(given.task).read_text())
        print_result(PROGRAMS[task["program"]](task))
        os._exit(0)  # torch's threads may abort the interpreter's end
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if given.gpu:
            return on_one_gpu(folder, given.gpu, given.check)
        draw_adapter(folder)
        tasks = {way: peers_task(folder, way) for way in ROWS}
        ways = {
            (program, way): (
                lambda program=program, way=way: measure(
                    folder, program, way, tasks[way], given.ranks
                )
            )
            for way in ROWS
            for program in PROGRAMS
        }
        measured = in_turn(ways, given.repeat)
    result: dict[str, Any] = {"what": f"{given.ranks} ranks over gloo, {given.repeat} rounds"}
    for way in ROWS:
        ours, theirs = measured["fsdp_trainer", way], measured["peft", way]
        result[way] = {
            "largest_difference_of_losses": check_losses(ours[0]["losses"], theirs[0]["losses"])
        }
        for what in FIGURES:
            mine, other = [run[what] for run in ours], [run[what] for run in theirs]
            result[way][what] = {
                "fsdp_trainer": spread(mine),
                "peft": spread(other),
                "ratio": ratio(mine, other),
            }
    compared = {}
    for way in ROWS:
        ratios = {what: result[way][what]["ratio"] for what in FIGURES}
        compared[f"{way}: speed"] = ratios["tokens_per_second"]
        compared[f"{way}: memory saved"] = inverse(ratios["memory_mib"])
    finish("adapters", result, compared, given.check, ("transformers", "accelerate", "peft"))


def measure(
    folder: Path, program: str, way: str, task: dict[str, Any], ranks: int
) -> dict[str, Any]:
    """Train once and return the figures. program: a key of PROGRAMS; way: a key of ROWS."""
    out = folder / f"{program}-{way}-{time.monotonic_ns()}"
    shape = [f"batch.micro_rows={ROWS[way] // ranks}", f"train.steps={STEPS}", "precision=fp32"]
    adapter = ["adapter=lora", f"adapter.rank={RANK}", f"adapter.alpha={ALPHA}"]
    how = [f"optim.lr={LR[way]}", "schedule=constant", "checkpoint.every=null"]
    words = [*command(folder, way), *shape, *adapter, *how, f"run.root={out}", "run.name=run"]
    file = folder / "task.json"
    file.write_text(json.dumps({**task, "program": program, "out": str(out), "command": words}))
    results = run_ranks("benchmarks.adapters", ranks, "--task", str(file))
    if program == "fsdp_trainer":
        figures = our_figures(out / "run", way)
        figures["memory_mib"] = max(rank["memory_mib"] for rank in results)
    else:
        figures = peers_figures(task, way, results)
    stored = sum(path.stat().st_size for path in out.rglob("*.distcp"))
    figures["checkpoint_mib"] = stored / 2**20
    figures["mib_sent_per_step"] = max(rank["sent"] for rank in results) / 2**20 / STEPS
    return figures


def draw_adapter(folder: Path) -> None:
    """Write the initial A matrices of our training, by peft's names."""
    from safetensors.torch import save_file

    from fsdp_trainer.base.distributed import whole_slice
    from fsdp_trainer.config.schema import Adapter
    from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
    from fsdp_trainer.models.config import ModelConfig
    from fsdp_trainer.models.from_config.initialize import draw_part, draw_symmetric
    from fsdp_trainer.models.hf.new_model import meta_decoder

    config = ModelConfig.from_hf(folder / "hf")
    adapters = resolve_adapters(Adapter(name="lora", rank=RANK, alpha=ALPHA), config)
    assert adapters
    model, drawn = meta_decoder(config), {}
    for layer in adapters.layers:
        width = model.get_submodule(layer).in_features
        name, shape = f"{layer}.lora_A.weight", (RANK, width)
        part = draw_part(0, name, whole_slice(shape), shape, width**-0.5, draw_symmetric)
        drawn[f"base_model.model.{layer}.lora_A.default.weight"] = part.contiguous()
    save_file(drawn, folder / "hf" / "adapter.start")


# --- on a rank


def train_ours(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of this trainer; return its figures."""
    from fsdp_trainer.cli import main as fsdp_trainer

    with counting_sent() as sent, contextlib.redirect_stdout(sys.stderr):
        code = fsdp_trainer(["train", *task["command"]])
    assert code == 0
    return {"sent": sum(sent), "memory_mib": rank_memory()}


def train_with_peft(task: dict[str, Any]) -> dict[str, Any]:
    """Train peft's model as one rank under accelerate; return its figures."""
    import peft
    import torch
    import transformers
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from safetensors.torch import load_file

    accelerator = accelerator_with_fsdp2()
    base = transformers.AutoModelForCausalLM.from_pretrained(task["folder"], dtype=torch.float32)
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config).train()
    drawn = load_file(Path(task["folder"]) / "adapter.start")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in drawn:
                parameter.copy_(drawn.pop(name))
    assert not drawn
    figures: dict[str, Any] = {}

    def save(model: Any, optimizer: Any) -> None:
        figures.update(sent=sum(sent), memory_mib=rank_memory())
        plugin = accelerator.state.fsdp_plugin
        save_fsdp_model(plugin, accelerator, model, task["out"], adapter_only=True)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, task["out"])

    with counting_sent() as sent:
        losses, seconds = timed_steps(accelerator, model, task, save)
    return {**figures, "seconds": seconds, "losses": losses}


@contextlib.contextmanager
def counting_sent() -> Any:
    """Yield a list to which every all-gather and reduce-scatter appends this rank's sent bytes."""
    import torch.distributed as dist

    from fsdp_trainer.parallel.gloo_messages import DirectAllGather, DirectReduceScatter

    sent: list[float] = []

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [arg for arg in (*args, *options.values()) if hasattr(arg, "nbytes")]
            sent.append(abs(tensors[0].nbytes - tensors[1].nbytes))  # all ranks' bytes less its own
            return function(*args, **options)

        return call

    # the names that fully_shard calls in torch 2.13, and in earlier versions
    pairs = (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
    places: list[Any] = [
        (dist, next(name for name in pair if hasattr(dist, name))) for pair in pairs
    ]
    places += [(message, "__call__") for message in (DirectAllGather, DirectReduceScatter)]
    with contextlib.ExitStack() as stack:
        for place, name in places:
            stack.enter_context(patch.object(place, name, counted(getattr(place, name))))
        yield sent


PROGRAMS = {"fsdp_trainer": train_ours, "peft": train_with_peft}


# --- on one GPU


def on_one_gpu(folder: Path, model: str, check: bool) -> None:
    """Train a model with random weights by LoRA and QLoRA, and compare with torchtune's figures.

    The batch is that of torchtune's published figures: 2 packed rows of 2,048 tokens.
    """
    data = [f"data.path={folder}/rows.jsonl", f"tokenizer.path={folder}/tokenizer.json"]
    shape = ["batch.seq_len=2048", "batch.rows=2", "batch.micro_rows=2", "train.steps=12"]
    how = ["data.template=plain", "activation_checkpoint=full", "checkpoint.every=null"]
    adapter = ["adapter.rank=8", "adapter.alpha=16", "optim.lr=3e-4", "logging.every=1"]
    if model != "tiny":
        how += ["model.vocab_size=128256", "compile=enabled"]
    result: dict[str, Any] = {"what": f"{model}, one device, 2 packed rows of 2,048 tokens"}
    for kind, published in PUBLISHED.items():
        run = [f"model={model}", f"adapter={kind}", f"run.root={folder}", f"run.name={kind}"]
        start([sys.executable, "-m", "fsdp_trainer", *run, *data, *shape, *how, *adapter], 1)
        records = (folder / kind / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in records][4:]  # the first ones compile
        speeds = [line["tokens_per_second"] for line in lines]
        memory = round(lines[-1]["memory_gib"], 2)
        ours = {"tokens_per_second": spread(speeds), "memory_gib": memory}
        result[kind] = {"fsdp_trainer": ours, "torchtune": published}
    compared = {
        f"{k}: memory saved": 1 / result[k]["fsdp_trainer"]["memory_gib"] for k in PUBLISHED
    }
    finish(f"adapters_{model}", result, compared, check)


if __name__ == "__main__":
    main()
