"""Seconds from the command to the first step's metrics, compared with a script of transformers.

    python -m benchmarks.startup [--repeat 3] [--check]

The same tiny Llama from the same folder, the same texts, rows and batch, float32, one step; the
first losses must agree to 1e-4. Both write a line of JSON after their first step, and the clock
stops when it appears. On 1 rank and on 2: ours starts them itself, the script uses torchrun. Our
modules are compiled to bytecode before, as pip did for the other packages at installation. "warm":
our second start, which reuses the first one's tokens. Also: seconds of --help and of a mistake in
the configuration.
"""

import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fsdp_trainer
from benchmarks.harness import arguments, finish, in_turn, inverse, ratio, spread, torchrun
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

RANKS = (1, 2)
ROWS, LENGTH, LR, TEXTS = 8, 128, 1e-3, 200
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SCRIPT = f'''
import json, os, sys
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

folder, data, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
texts = [json.loads(line)["text"] for line in open(data)]
rows = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def collate(rows):
    length = max(map(len, rows))
    return {{
        "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (length - len(row)) for row in rows]),
    }}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


class Write(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs and state.is_world_process_zero:
            with open(out, "a") as file:
                file.write(json.dumps(logs) + "\\n")


model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
arguments = TrainingArguments(
    output_dir=os.path.dirname(out), max_steps=1, per_device_train_batch_size={ROWS} // int(os.environ.get("WORLD_SIZE", 1)), logging_steps=1,
    learning_rate={LR}, use_cpu=True, report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
)
InOrder(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[Write()]).train()
'''  # fmt: skip


def prepare(place: Path) -> None:
    """Write the model's folder, the texts, the script, and our bytecode."""
    compileall.compile_dir(str(Path(fsdp_trainer.__file__).parent), quiet=1)
    load_tokenizer("demo:bytes").save(place / "hf")
    torch.manual_seed(0)
    vocabulary = len(AutoTokenizer.from_pretrained(place / "hf"))
    LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, **SIZES, max_position_embeddings=256)
    ).save_pretrained(place / "hf")
    lines = [
        json.dumps({"text": f"The sum of {i} and {i + 1} is {2 * i + 1}. " * (1 + i % 3)})
        for i in range(TEXTS)
    ]
    (place / "texts.jsonl").write_text("\n".join(lines) + "\n")
    (place / "script.py").write_text(SCRIPT)


def until_line(command: list[str], file: Path, losses: list[float], env: dict[str, str]) -> float:
    """Return the seconds until a command writes a line to `file`, and append its loss to `losses`.

    Raises RuntimeError if the command fails.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    seconds = None
    while process.poll() is None:
        if seconds is None and file.exists() and file.stat().st_size:
            seconds = time.perf_counter() - started
        time.sleep(0.005)
    output = process.communicate()[0]
    if process.returncode or not file.exists():
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-4000:]}")
    losses.append(float(json.loads(file.read_text().splitlines()[0])["loss"]))
    return seconds or time.perf_counter() - started


def ours(place: Path, ranks: int, losses: list[float], warm: bool) -> float:
    """Return the seconds of this trainer. warm: keep the token cache of the last start."""
    shutil.rmtree(place / "runs" / "ours", ignore_errors=True)
    if not warm:
        shutil.rmtree(place / "cache", ignore_errors=True)
    data = [
        f"data.path={place / 'texts.jsonl'}",
        f"data.cache={place / 'cache'}",
        "data.packing=none",
        "data.shuffle=false",
    ]
    batch = [
        f"batch.seq_len={LENGTH}",
        f"batch.rows={ROWS}",
        f"batch.micro_rows={ROWS // ranks}",
        f"optim.lr={LR}",
        "precision=fp32",
    ]
    how = [
        f"run.root={place / 'runs'}",
        "run.name=ours",
        "train.steps=1",
        f"launch.nproc_per_node={ranks}",
    ]
    command = [
        sys.executable,
        "-m",
        "fsdp_trainer",
        "model=auto",
        f"model.init_from={place / 'hf'}",
        "data=pretrain",
        *data,
        *batch,
        *how,
    ]
    return until_line(command, place / "runs" / "ours" / "metrics.jsonl", losses, {})


def theirs(place: Path, ranks: int, losses: list[float]) -> float:
    """Return the seconds of the transformers script."""
    shutil.rmtree(place / "theirs", ignore_errors=True)
    (place / "theirs").mkdir()
    launch = torchrun(ranks) if ranks > 1 else [sys.executable]
    out = place / "theirs" / "metrics.jsonl"
    command = [
        *launch,
        str(place / "script.py"),
        str(place / "hf"),
        str(place / "texts.jsonl"),
        str(out),
    ]
    return until_line(command, out, losses, {"HF_HUB_OFFLINE": "1"})


def answer(*words: str) -> float:
    """Return the seconds of a command that does not train."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fsdp_trainer", *words], capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure in turn, check that the losses agree, print and store the result."""
    given = arguments(__doc__, repeat=3)
    result: dict[str, Any] = {
        "what": f"Llama {SIZES}, {ROWS} rows a step, one step",
        "rounds": given.repeat,
    }
    compared = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare(place)
        for ranks in RANKS:
            losses: dict[str, list[float]] = {"ours": [], "transformers": []}
            ways = {
                "transformers": partial(theirs, place, ranks, losses["transformers"]),
                "ours": partial(ours, place, ranks, losses["ours"], warm=False),
                "ours, warm": partial(ours, place, ranks, losses["ours"], warm=True),
            }
            seconds = in_turn(ways, given.repeat)
            all_losses = [loss for values in losses.values() for loss in values]
            assert max(all_losses) - min(all_losses) < 1e-4, losses
            times = {
                name: ratio(seconds[name], seconds["transformers"])
                for name in ("ours", "ours, warm")
            }
            result[f"{ranks} rank{'s' * (ranks > 1)}"] = {
                "first_loss": {name: values[0] for name, values in losses.items()},
                "seconds": {name: spread(values) for name, values in seconds.items()},
                "ours/transformers": times,
            }
            compared[f"transformers/ours on {ranks}"] = inverse(times["ours"])
    answers = {
        "--help": partial(answer, "--help"),
        "a mistake": partial(answer, "optim.learning_rate=1"),
    }
    result["answers"] = {
        name: spread(values) for name, values in in_turn(answers, given.repeat).items()
    }
    finish("startup", result, compared, given.check, packages=("transformers", "accelerate"))


if __name__ == "__main__":
    main()
