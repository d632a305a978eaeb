"""What transformers' Trainer and TRL train, run for real on a CPU with a tiny model.

    python -m tools.convert_truth              # runs all and compares with what is stored
    python -m tools.convert_truth --write      # runs all and stores the result
    python -m tools.convert_truth --ours       # also trains the recipes, and compares losses

What is stored is in tests/config/convert_truth.json.

Each configuration is what a user writes into a YAML file. Stored are the number of steps, the
learning rate of every step, the steps of checkpoints and validations, the trained parameters, and
the losses of the first steps, in float32 and in the order of the file. tests/config/test_truth.py
compares the recipes that `convert` makes of them.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

TRUTH = Path(__file__).parent.parent / "tests/config/convert_truth.json"
WORDS = 60
ROWS = 100
LOSSES = 4
TOLERANCE = 1e-4
QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
"""Settings of every run there, besides those of its case; they change no number."""
SEQUENTIAL = {"output_dir": "out", "train_sampling_strategy": "sequential", "save_strategy": "no",
              "dataset_name": "rows.jsonl", "model_name_or_path": "model"}  # fmt: skip
SFT = SEQUENTIAL | {"bf16": False, "dataset_text_field": "text"}
LORA = SFT | {"use_peft": True, "lora_dropout": 0.0, "max_steps": 6, "lora_r": 4}
PAIRS = SEQUENTIAL | {"bf16": False, "dataset_name": "pairs.jsonl", "num_train_epochs": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("trainer", SEQUENTIAL),
    "accumulated": ("trainer", SEQUENTIAL | {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2}),
    "short epochs": ("trainer", SEQUENTIAL | {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
        "learning_rate": 1e-3}),
    "share of warm-up": ("trainer", SEQUENTIAL | {
        "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "learning_rate": 1e-3}),
    "warm-up": ("trainer", SEQUENTIAL | {"warmup_steps": 5, "num_train_epochs": 1}),
    "constant": ("trainer", SEQUENTIAL | {
        "lr_scheduler_type": "constant", "warmup_steps": 5, "max_steps": 20}),
    "constant after warm-up": ("trainer", SEQUENTIAL | {
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.3, "num_train_epochs": 1}),
    "floor": ("trainer", SEQUENTIAL | {
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "num_train_epochs": 1}),
    "optimizer": ("trainer", SEQUENTIAL | {
        "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1,
        "max_grad_norm": 0.1, "learning_rate": 3e-3, "max_steps": 6}),
    "part of an epoch": ("trainer", SEQUENTIAL | {
        "num_train_epochs": 2.5, "save_strategy": "epoch", "eval_strategy": "steps",
        "eval_steps": 0.2, "dataset_test_split": "held.jsonl"}),
    "sft": ("sft", SFT),
    "sft accumulated": ("sft", SFT | {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2}),
    "sft cosine": ("sft", SFT | {
        "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "learning_rate": 1e-3}),
    "sft saved": ("sft", SFT | {"save_strategy": "epoch", "save_total_limit": 1}),
    "sft lora": ("sft", LORA),
    "sft lora of all": ("sft", LORA | {
        "lora_target_modules": ["all-linear"], "use_rslora": True, "lora_alpha": 8}),
    "dpo": ("dpo", PAIRS | {"beta": 0.2, "loss_type": ["sigmoid"]}),
    "ipo": ("dpo", PAIRS | {"loss_type": ["ipo"], "learning_rate": 1e-3, "warmup_steps": 0.25}),
    "kto": ("kto", PAIRS | {"desirable_weight": 1.5, "dataset_name": "labelled.jsonl"}),
    "reward": ("reward", PAIRS | {"center_rewards_coefficient": 0.01, "max_length": 64}),
}  # fmt: skip
"""The trainer of each, and its file."""


def numbers(count: int, seed: int) -> list[int]:
    """Return `count` numbers below 2³¹, the same everywhere."""
    values = []
    for _ in range(count):
        seed = (seed * 1103515245 + 12345) % 2**31
        values.append(seed >> 8)
    return values


def write_inputs(folder: Path) -> None:
    """Write a model with a tokenizer and data into a folder, the same in every version."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            bos_token_id=62,
            eos_token_id=63,
            pad_token_id=61,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            values = (torch.sin(places * 12.9898 + i) * 43758.5453) % 1 - 0.5
            values = 1 + 0.1 * values if "norm" in name else values
            parameter.copy_(values.view(parameter.shape))
    model.save_pretrained(folder / "model")
    words = {f"w{i}": i for i in range(WORDS)} | {"<unk>": 60, "<pad>": 61, "<s>": 62, "</s>": 63}
    tokenizer = Tokenizer(WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder / "model")  # fmt: skip
    lengths = numbers(ROWS, 1)
    rows = [
        [n % WORDS for n in numbers(5 + length % 20, 7 + i)] for i, length in enumerate(lengths)
    ]
    texts = [" ".join(f"w{i}" for i in row) for row in rows]
    pairs = [{"prompt": one, "chosen": " " + other, "rejected": " " + third}
             for one, other, third in zip(texts, texts[1:], texts[2:], strict=False)]  # fmt: skip
    labelled = [{"prompt": one, "completion": " " + other, "label": i % 2 == 0}
                for i, (one, other) in enumerate(pairwise(texts))]  # fmt: skip
    of_tokens = [{"input_ids": row} for row in rows]
    for name, content in (("rows", of_tokens), ("held", of_tokens[:10]), ("pairs", pairs),
                          ("labelled", labelled)):  # fmt: skip
        lines = "".join(f"{json.dumps(row)}\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines)


def run_there(kind: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a trainer does with a file's settings in a folder with the inputs."""
    from datasets import Dataset
    from transformers import TrainerCallback

    done: dict[str, Any] = {"rates": [], "saved": [], "validated": [], "losses": []}

    class Recorder(TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer=None, **rest):
            done["rates"].append(optimizer.param_groups[0]["lr"])

        def on_save(self, args, state, control, **rest):
            done["saved"].append(state.global_step)

        def on_evaluate(self, args, state, control, **rest):
            done["validated"].append(state.global_step)

    def rows_of(name: str) -> Dataset:
        return Dataset.from_list([json.loads(line) for line in (folder / name).open()])

    own = {k: v for k, v in settings.items() if k not in ("dataset_name", "dataset_test_split")}
    own |= QUIET | {"output_dir": str(folder / "out")}
    held = rows_of(settings["dataset_test_split"]) if "dataset_test_split" in settings else None
    trainer, options = of_kind(kind, own, str(folder / "model"))
    trainer = summed(trainer, done["losses"])(
        train_dataset=rows_of(settings["dataset_name"]),
        eval_dataset=held,
        callbacks=[Recorder()],
        **options,
    )
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.train()
    losses = [round(loss, 6) for loss in done["losses"][:LOSSES]]
    return done | {"steps": trainer.state.global_step, "trained": trained, "losses": losses}


def summed(trainer: Any, losses: list[float]) -> Any:
    """Return a class of trainers that adds the losses of the micro-batches of each step."""

    class Summed(trainer):
        def training_step(self, *args, **options):
            loss = super().training_step(*args, **options)
            losses.extend([0.0] * (self.state.global_step + 1 - len(losses)))
            losses[self.state.global_step] += loss.item()
            return loss

    return Summed


def of_kind(kind: str, settings: dict[str, Any], model: str) -> tuple[Any, dict[str, Any]]:
    """Return the class of a trainer and its arguments, as its script makes them of a file."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        HfArgumentParser,
        Trainer,
        TrainingArguments,
    )
    from transformers import DataCollatorForLanguageModeling as Collator

    settings = settings | {"model_name_or_path": model}
    tokenizer = AutoTokenizer.from_pretrained(model)
    if kind == "trainer":
        settings.pop("model_name_or_path")
        (arguments,) = HfArgumentParser((TrainingArguments,)).parse_dict(settings)
        return Trainer, {
            "args": arguments,
            "model": AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            "data_collator": Collator(tokenizer, mlm=False),
        }
    import trl

    names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
    parser = HfArgumentParser((getattr(trl, f"{names[kind]}Config"), trl.ModelConfig))
    arguments, about = parser.parse_dict(settings)
    options: dict[str, Any] = {"args": arguments, "model": model, "processing_class": tokenizer}
    return getattr(trl, f"{names[kind]}Trainer"), options | {
        "peft_config": trl.get_peft_config(about)
    }


def write_case(name: str, folder: Path) -> Path:
    """Write the file of a case beside its inputs, as a user has it; return its path."""
    kind, settings = CASES[name]
    held = settings.get("dataset_test_split")
    settings = {k: v for k, v in settings.items() if k != "dataset_test_split"}
    settings |= {"eval_dataset": held} if held else {}
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def train_here(name: str, folder: Path) -> list[float]:
    """Convert the file of a case, train the recipe in a folder, and return its first losses."""
    file = write_case(name, folder)
    program = [sys.executable, "-m", "fsdp_trainer"]
    recipe = subprocess.run([*program, "convert", file.name], cwd=folder, check=True,
                            capture_output=True, text=True).stdout  # fmt: skip
    (folder / "recipe.yaml").write_text(recipe)
    words = [
        "run.name=ours",
        "precision=fp32",
        "launch.device=cpu",
        "logging.every=1",
        "checkpoint.export_hf=false",
        "run.overwrite=true",
        "checkpoint.resume=never",
    ]
    run = subprocess.run([*program, "train", "recipe.yaml", *words], cwd=folder, text=True,
                         capture_output=True)  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{name}: {run.stdout}{run.stderr}")
    lines = (folder / "out/ours/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)][:LOSSES]


def differences(stored: dict[str, Any], done: dict[str, Any]) -> list[str]:
    """Return what differs between two results."""
    lines = []
    for key, value in stored.items():
        other = done.get(key)
        is_near = isinstance(value, list) and isinstance(other, list) and len(value) == len(other)
        if is_near and all(math.isclose(a, b, rel_tol=1e-6, abs_tol=TOLERANCE * (key == "losses"))
                           for a, b in zip(value, other, strict=True)):  # fmt: skip
            continue
        if value != other:
            lines.append(f"{key}: {value} stored, {other} now")
    return lines


def main() -> int:
    """Run all cases and return the exit code: 1 if a result is not the stored one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--only", default="")
    flags = parser.parse_args()
    stored = json.loads(TRUTH.read_text()) if TRUTH.exists() else {}
    code = 0
    for name, (kind, settings) in CASES.items():
        if flags.only not in name:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_inputs(folder)
            done = run_there(kind, settings, folder)
            lines = [] if flags.write else differences(stored.get(name, {}), done)
            if flags.ours:
                lines += differences(
                    {"losses": done["losses"]}, {"losses": train_here(name, folder)}
                )
        stored[name] = done if flags.write else stored.get(name, done)
        code |= bool(lines)
        print(f"{name}: {done['steps']} steps, {done['trained']:,} parameters", *lines, sep="\n  ")
    if flags.write:
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in stored.items())
        TRUTH.write_text(f"{{\n{text}\n}}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
