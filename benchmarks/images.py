"""Fine-tuning on images compared with transformers' Trainer, and images decoded by worker processes.

    python -m benchmarks.images [--repeat 3] [--ranks 2] [--check]

A LLaVA whose tower and language model are 256 wide, in float32, on JPEG files of 320 × 240 pixels,
each with a question and an answer; 196 tokens for an image. Both programs decode in the process
that trains, see the same samples, and have a learning rate of 0, so that their mean losses must
agree. Ours packs samples into rows, the Trainer pads a batch of them to its longest.

Decoding: JPEG files of 640 × 480 pixels, with the processor of the same model, by 1 and 2 workers.
"""

import io
import json
import tempfile
import time
from collections.abc import Iterator
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
from benchmarks.train_step import check_losses, our_figures, start
from fsdp_trainer.apps.quickstart.quickstart_shapes import TEXT, VISION, make_model, question
from fsdp_trainer.data.files.media_files import MediaFile, SampleMedium, digest_of
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.training.media_loader import MediaLoader

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
TOWER = VISION | SIZES | {"num_attention_heads": 8, "image_size": 224, "patch_size": 16}
LANGUAGE = TEXT | SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}
LANGUAGE |= {"max_position_embeddings": 2048}
SAMPLES, BATCH = 64, 4
STEPS, WARM = 8, 2
"""Steps of the Trainer, an epoch on two ranks, and untimed ones at the start of both programs."""
DECODED = 400
OURS, TRAINER = "fsdp_trainer", "transformers"


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=3, ranks=2, peer="")
    if given.peer:
        return print_result(train_with_trainer(Path(given.peer)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        ways = {
            OURS: lambda: ours(folder, given.ranks),
            TRAINER: lambda: trainers(folder, given.ranks),
        }
        measured = in_turn(ways, given.repeat)
        workers = {
            f"{count} workers": lambda count=count: decode(folder, count) for count in (1, 2)
        }
        decoded = in_turn(workers, given.repeat)
    mine, theirs = measured[OURS], measured[TRAINER]
    result: dict[str, Any] = {
        "what": f"{given.ranks} ranks over gloo, {given.repeat} rounds, {STEPS - WARM} timed steps",
        "difference_of_losses": check_losses(mine[0]["losses"], theirs[0]["losses"]),
        "images_per_second": {name: spread(values) for name, values in decoded.items()},
    }
    for what in ("tokens_per_second", "memory_mib"):
        figures = {name: [run[what] for run in runs] for name, runs in measured.items()}
        result[what] = {name: spread(values) for name, values in figures.items()}
        result[f"{what}_ratio"] = ratio(figures[OURS], figures[TRAINER])
    compared = {
        "speed": result["tokens_per_second_ratio"],
        "memory saved": inverse(result["memory_mib_ratio"]),
    }
    finish("images", result, compared, given.check, ("transformers", "accelerate", "pillow"))


def prepare(folder: Path) -> None:
    """Write the model, pictures, and chats about them with answers of 20 to 120 characters."""
    make_model(folder / "hf", TOWER, LANGUAGE)
    random, rows = np.random.default_rng(0), []
    for number in range(SAMPLES):
        (folder / f"{number}.jpg").write_bytes(photo(random, 320, 240))
        words = "".join(map(chr, random.integers(97, 123, random.integers(20, 120))))
        turns = [question(f"{number}.jpg"), {"role": "assistant", "content": words}]
        rows.append(json.dumps({"messages": turns}) + "\n")
    (folder / "chats.jsonl").write_text("".join(rows))
    (folder / "large.jpg").write_bytes(photo(random, 640, 480))


def photo(random: np.random.Generator, width: int, height: int) -> bytes:
    """Return a JPEG file of smooth colours with some noise."""
    from PIL import Image

    coarse = random.integers(0, 256, (height // 40, width // 40, 3), np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = random.integers(-12, 12, (height, width, 3))
    pixels = (np.asarray(picture).astype(int) + noise).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def ours(folder: Path, ranks: int) -> dict[str, Any]:
    """Train with this trainer and return the figures, read from the run's records."""
    import sys

    run = folder / "runs" / str(time.monotonic_ns())
    words = [
        f"model.init_from={folder}/hf", f"data.path={folder}/chats.jsonl", "batch.seq_len=1536",
        f"batch.rows={ranks}", "batch.micro_rows=1", "train.epochs=1", "precision=fp32",
        "optim.lr=0", "schedule=constant", "checkpoint.every=null", f"run.root={run.parent}",
        f"run.name={run.name}", f"launch.nproc_per_node={ranks}", "data.workers=1",
    ]  # fmt: skip
    start([sys.executable, "-m", "fsdp_trainer", *words], ranks)
    return our_figures(run, "natural")


def trainers(folder: Path, ranks: int) -> dict[str, Any]:
    """Train with transformers' Trainer on the same samples and return the figures."""
    results = run_ranks("benchmarks.images", ranks, "--peer", str(folder))
    sums = np.array([result["losses"] for result in results]).reshape(-1, 2).sum(0)
    return {
        "tokens_per_second": sum(result["tokens"] for result in results)
        / max(result["seconds"] for result in results),
        "memory_mib": max(result["memory_mib"] for result in results),
        "losses": [float(sums[0] / sums[1])],
    }


def train_with_trainer(folder: Path) -> dict[str, Any]:
    """Train as one rank of the Trainer; return its figures."""
    from transformers import (
        AutoModelForImageTextToText,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    processor = ImageProcessor(str(folder / "hf")).processor
    model = AutoModelForImageTextToText.from_pretrained(folder / "hf", dtype=torch.float32)
    counted: list[tuple[float, int, int, float]] = []

    class Recording(Trainer):
        """Keeps the sum and the number of losses, the tokens and the time of each batch."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            """Return the mean loss of a batch."""
            labels = inputs["labels"]
            loss = model(**inputs).loss
            count = int((labels[:, 1:] != -100).sum())
            tokens = int(inputs["attention_mask"].sum())
            counted.append((loss.item() * count, count, tokens, time.monotonic()))
            return loss

    settings = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=BATCH, learning_rate=0.0,
        max_steps=STEPS, use_cpu=True, report_to=[], remove_unused_columns=False,
        ddp_find_unused_parameters=True, save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    trainer = Recording(
        model,
        settings,
        train_dataset=rows,
        data_collator=lambda some: batch(processor, folder, some),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    timed = counted[WARM:]
    return {
        "losses": [(total, count) for total, count, _, _ in counted],
        "tokens": sum(tokens for _, _, tokens, _ in timed[:-1]),
        "seconds": timed[-1][3] - timed[0][3],
        "memory_mib": rank_memory(),
    }


def batch(processor: Any, folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what transformers' processor makes of some chats, with labels for the answers."""
    from PIL import Image

    texts, pictures, answers = [], [], []
    for row in rows:
        user, answer = row["messages"]
        name = user["content"][0]["image"]
        pictures.append([Image.open(folder / name)])
        turns = [{"role": "user", "content": [{"type": "image"}, text_part(user)]}, answer]
        texts.append(processor.tokenizer.apply_chat_template(turns, tokenize=False))
        answers.append(len(answer["content"]) + 1)  # a token for each character, and the end
    inputs = processor(text=texts, images=pictures, padding=True, return_tensors="pt")
    labels = torch.full_like(inputs["input_ids"], -100)
    for i, count in enumerate(answers):
        end = int(inputs["attention_mask"][i].nonzero()[-1])  # the line end after the answer
        labels[i, end - count : end] = inputs["input_ids"][i, end - count : end]
    return {**inputs, "labels": labels}


def text_part(turn: dict[str, Any]) -> dict[str, str]:
    """Return the text of a question as a part."""
    return {"type": "text", "text": turn["content"][1]}


def decode(folder: Path, workers: int) -> float:
    """Return how many images a second some worker processes load, after the first ones."""
    file = folder / "large.jpg"
    image = SampleMedium(MediaFile(str(file), digest_of(file.read_bytes()), (640, 480), (0, 0)), 1)

    def rows() -> Iterator[Rows]:
        for _ in range(DECODED // 8):
            some = Rows.empty(1, 1)
            some.media = [[image] * 8]
            yield some

    loader = MediaLoader(ImageProcessor(str(folder / "hf")), None, workers)
    loaded = loader.ahead(rows())
    for _ in range(4):  # the workers' imports
        next(loaded)
    began = time.monotonic()
    count = sum(len(arrays) for _, arrays in loaded)
    return count / (time.monotonic() - began)


if __name__ == "__main__":
    main()
