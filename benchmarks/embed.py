"""Training of embeddings compared with sentence-transformers' cached loss, on two ranks.

    python -m benchmarks.embed [--repeat 3] [--ranks 2] [--check]

A Llama of 6 blocks, 128 wide, in float32, on questions with their answers. A step has all of them,
each question compared with all answers on all ranks, so that both programs have the same loss in
every step, with a learning rate of 0. Both compute vectors first and gradients second (GradCache),
in micro-batches: ours of packed rows, CachedMultipleNegativesRankingLoss of padded texts.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from benchmarks.train_step import check_losses, start
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.checkpoint.sentence_files import write_sentence_files
from fsdp_trainer.data.files.quickstart_data import TOKENIZER
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.models.config import ModelConfig

SIZES = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
PAIRS, ROW, MICRO_ROWS = 128, 1024, 4
"""Pairs of a step, tokens of our rows, and rows of our micro-batch."""
MICRO_TEXTS = 16
"""Texts of the other program's micro-batch: about as many tokens as ours with their padding."""
STEPS, WARM = 6, 2
OURS, OTHERS = "fsdp_trainer", "sentence-transformers"


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=3, ranks=2, peer="")
    if given.peer:
        return print_result(train_with_sentence_transformers(Path(given.peer), given.ranks))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        ways = {
            OURS: lambda: ours(folder, given.ranks),
            OTHERS: lambda: others(folder, given.ranks),
        }
        measured = in_turn(ways, given.repeat)
    mine, theirs = measured[OURS], measured[OTHERS]
    result: dict[str, Any] = {
        "what": f"{given.ranks} ranks over gloo, {given.repeat} rounds, {STEPS - WARM} timed steps",
        "difference_of_losses": check_losses(mine[0]["losses"], theirs[0]["losses"]),
    }
    for what in ("pairs_per_second", "memory_mib"):
        figures = {name: [run[what] for run in runs] for name, runs in measured.items()}
        result[what] = {name: spread(values) for name, values in figures.items()}
        result[f"{what}_ratio"] = ratio(figures[OURS], figures[OTHERS])
    compared = {
        "speed": result["pairs_per_second_ratio"],
        "memory saved": inverse(result["memory_mib_ratio"]),
    }
    finish("embed", result, compared, given.check, ("sentence-transformers", "transformers"))


def prepare(folder: Path) -> None:
    """Write the model, and questions of 20 to 80 letters with answers of 40 to 400."""
    from transformers import LlamaConfig, LlamaModel

    tokenizer = load_tokenizer(TOKENIZER)
    ends = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, **ends, **SIZES)
    torch.manual_seed(0)
    LlamaModel(config).to(torch.float32).save_pretrained(folder / "hf")
    tokenizer.save(folder / "hf", None)
    write_sentence_files(folder / "hf", ModelConfig.from_hf(folder / "hf"), {})
    random, rows = np.random.default_rng(0), []
    for _ in range(PAIRS):
        question, answer = (
            "".join(map(chr, random.integers(97, 123, random.integers(*size))))
            for size in ((20, 80), (40, 400))
        )
        rows.append(json.dumps({"anchor": question, "positive": answer}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(rows))


def ours(folder: Path, ranks: int) -> dict[str, Any]:
    """Train with this trainer and return the figures, read from the run's records."""
    run = folder / "runs" / str(time.monotonic_ns())
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    needed = 1.05 * sum(len(text) for row in rows for text in row.values()) / ROW
    words = [
        "objective=embed", f"model.init_from={folder}/hf", f"data.path={folder}/pairs.jsonl",
        f"batch.seq_len={ROW}", f"batch.rows={round_up(math.ceil(needed), MICRO_ROWS * ranks)}", "batch.across_epochs=false",
        f"batch.micro_rows={MICRO_ROWS}", f"train.epochs={STEPS}", "precision=fp32", "optim.lr=0",
        "schedule=constant", "checkpoint.every=null", f"run.root={run.parent}",
        f"run.name={run.name}", f"launch.nproc_per_node={ranks}", "data.workers=1",
    ]  # fmt: skip
    start([sys.executable, "-m", "fsdp_trainer", *words], ranks)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line["step_seconds"] for line in lines[WARM:])
    return {
        "pairs_per_second": PAIRS * (STEPS - WARM) / seconds,
        "memory_mib": lines[-1]["memory_gib"] * 1024,
        "losses": [line["loss"] for line in lines],
    }


def others(folder: Path, ranks: int) -> dict[str, Any]:
    """Train with sentence-transformers on the same pairs and return the figures."""
    given = ("--peer", str(folder), "--ranks", str(ranks))
    results = run_ranks("benchmarks.embed", ranks, *given)
    seconds = max(result["seconds"] for result in results)
    return {
        "pairs_per_second": PAIRS * (STEPS - WARM) / seconds,
        "memory_mib": max(result["memory_mib"] for result in results),
        "losses": np.mean([result["losses"] for result in results], 0).tolist(),
    }


def train_with_sentence_transformers(folder: Path, ranks: int) -> dict[str, Any]:
    """Train as one rank of its Trainer; return its figures."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )
    from transformers import PrinterCallback

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    model = SentenceTransformer(str(folder / "hf"), device="cpu")
    losses: list[float] = []
    times: list[float] = []

    class Recording(SentenceTransformerTrainer):
        """Keeps the loss and the end of each step."""

        def training_step(self, *args: Any, **options: Any) -> Any:
            """Return the loss of a step."""
            loss = super().training_step(*args, **options)
            losses.append(loss.item())
            times.append(time.monotonic())
            return loss

    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "others"), per_device_train_batch_size=PAIRS // ranks,
        learning_rate=0.0, num_train_epochs=STEPS, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    loss = CachedMultipleNegativesRankingLoss(
        model, scale=20.0, mini_batch_size=MICRO_TEXTS, gather_across_devices=True
    )
    trainer = Recording(
        model=model, args=settings, train_dataset=Dataset.from_list(rows), loss=loss
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return {
        "losses": losses,
        "seconds": times[-1] - times[WARM - 1],
        "memory_mib": rank_memory(),
    }


if __name__ == "__main__":
    main()
