"""Full rows: no padding, every token supervised. One rank and one thread beside a plain loop.

`benchmarks.train_step` measures this as its third case. The loop is transformers' Llama with torch's
fused AdamW and clip_grad_norm_, without a trainer. Compared is processor time (user and system) of
a step, which other work on the machine changes less than seconds. Losses must agree at every step.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.harness import print_result

SIZES = {
    "vocab_size": 4_096,
    "hidden_size": 512,
    "intermediate_size": 1_408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
SEQ_LEN, STEPS, WARM = 256, 12, 4  # optimizer steps in all, and untimed ones at the start
LR = 1e-3
USAGE = "usage.json"


def write_tokenizer(file: Path, vocabulary: int) -> None:
    """Write a tokenizer of words w0, w1, … with this many tokens in all."""
    words = {f"w{i}": i for i in range(vocabulary - 2)} | {
        "<unk>": vocabulary - 2,
        "</s>": vocabulary - 1,
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))


def prepare(folder: Path) -> None:
    """Write a tokenizer, rows of tokens and a random Llama."""
    import torch
    import transformers

    write_tokenizer(folder / "full.json", SIZES["vocab_size"])
    drawn = np.random.default_rng(0).zipf(1.2, (STEPS, SEQ_LEN)) % (SIZES["vocab_size"] - 2)
    lines = [json.dumps({"input_ids": row.tolist()}) + "\n" for row in drawn]
    (folder / "full.jsonl").write_text("".join(lines))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "full")


def ours(folder: Path) -> dict[str, Any]:
    """Train with this trainer and return the figures."""
    run = folder / "runs" / f"full-{time.monotonic_ns()}"
    words = [
        f"model.init_from={folder}/full", f"data.path={folder}/full.jsonl", "data.shuffle=false",
        f"tokenizer.path={folder}/full.json", "data.packing=none", f"batch.seq_len={SEQ_LEN}",
        "batch.rows=1", "precision=fp32", f"train.steps={STEPS}", f"optim.lr={LR}",
        "schedule=constant", "checkpoint.every=null", "launch.nproc_per_node=1",
        "launch.device=cpu", f"run.root={run.parent}", f"run.name={run.name}",
    ]  # fmt: skip
    on_one_thread(["fsdp_trainer", "train", "--import", "benchmarks.step_usage", *words])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run / USAGE).read_text()) | {"losses": [line["loss"] for line in lines]}


def plain(folder: Path) -> dict[str, Any]:
    """Train with a plain loop in a process of its own and return the figures."""
    return json.loads(on_one_thread(["benchmarks.full_rows", str(folder)]).splitlines()[-1])


def on_one_thread(words: list[str]) -> str:
    """Run a module of Python on one thread and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", *words]
    return subprocess.run(line, check=True, capture_output=True, text=True, env=environment).stdout


def train_plainly(folder: Path) -> dict[str, Any]:
    """Train transformers' model on the rows and return the figures."""
    import torch
    import transformers

    from benchmarks.step_usage import Usage

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "full", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    rows = [json.loads(line)["input_ids"] for line in (folder / "full.jsonl").open()]
    used, losses = Usage(), []
    for row in rows:
        tokens = torch.tensor([row])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        used.step()
    return used.figures() | {"losses": losses}


if __name__ == "__main__":
    print_result(train_plainly(Path(sys.argv[1])))
