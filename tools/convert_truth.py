"""What transformers' Trainer and TRL train, run for real on a CPU with a tiny model.

    python -m tools.convert_truth              # runs all there and here, compares with the stored
    python -m tools.convert_truth --write      # runs all there and stores the result
    python -m tools.convert_truth --ours       # only trains the recipes; needs no TRL

What is stored is in tests/config/convert_truth.json.

Each configuration is what a user writes into a YAML file. Stored are the number of steps, the
learning rate of every step, the steps of checkpoints and validations, the trained parameters, and
the losses of the first steps, in float32 and in the order of the file. Both start from the same
weights, an adapter's and a scoring head's too, which are random in a run of a user's.
tests/config/test_truth.py compares the recipes that `convert` makes of them, and trains them.
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.config.schema import Adapter
from fsdp_trainer.extensions import Callback, RunInfo
from fsdp_trainer.interop.convert.converter import Conversion, convert, settings_text
from fsdp_trainer.interop.convert.foreign_file import read_foreign_file

TRUTH = Path(__file__).parent.parent / "tests/config/convert_truth.json"
WORDS = 60
ROWS = 100
BATCH = 8
"""Samples of a device's micro-batch by default."""
LOSSES = 4
TOLERANCE = 1e-4
WITHOUT_LOSSES = ("grpo",)
"""Trainers whose samples are drawn: no two runs have the same losses."""
TEMPLATE = (
    "{% for one in messages %}{{ ' w1 ' if one.role == 'user' else ' w2 ' }}{{ one.content }}"
    "{% if one.role == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} w2 {% endif %}"
)
QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
"""Settings of every run there, besides those of its case; they change no number."""
SEQUENTIAL = {"output_dir": "out", "train_sampling_strategy": "sequential", "save_strategy": "no",
              "dataset_name": "rows.jsonl", "model_name_or_path": "model"}  # fmt: skip
SFT = SEQUENTIAL | {"bf16": False, "dataset_text_field": "text"}
LORA = SFT | {"use_peft": True, "lora_dropout": 0.0, "max_steps": 6, "lora_r": 4}
PAIRS = SEQUENTIAL | {"bf16": False, "dataset_name": "pairs.jsonl", "num_train_epochs": 1}
LARGE_RATE = {"learning_rate": 1e-3}
"""With TRL's own of 10⁻⁶ the losses of the first steps would be those of the untrained model."""
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
    "sft of texts": ("sft", SFT | {"dataset_name": "texts.jsonl"}),
    "sft of plain prompts": ("sft", SFT | {"dataset_name": "plain.jsonl"}),
    "dpo of plain prompts": ("dpo", PAIRS | LARGE_RATE | {
        "loss_type": ["sigmoid"], "dataset_name": "plain_pairs.jsonl"}),
    "dpo": ("dpo", PAIRS | LARGE_RATE | {"beta": 0.2, "loss_type": ["sigmoid"]}),
    "ipo": ("dpo", PAIRS | LARGE_RATE | {"loss_type": ["ipo"], "warmup_steps": 0.25}),
    "kto": ("kto", PAIRS | LARGE_RATE | {
        "desirable_weight": 1.5, "dataset_name": "labelled.jsonl"}),
    "reward": ("reward", PAIRS | {
        "center_rewards_coefficient": 0.01, "max_length": 64, "model_name_or_path": "scorer"}),
    "grpo": ("grpo", PAIRS | {
        "dataset_name": "prompts.jsonl", "num_generations": 4, "max_completion_length": 4,
        "gradient_accumulation_steps": 2}),
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
    """Write models with a tokenizer and data into a folder, the same in every version."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    config = LlamaConfig(
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
        num_labels=1,
    )  # fmt: skip
    words = {f"w{i}": i for i in range(WORDS)} | {"<unk>": 60, "<pad>": 61, "<s>": 62, "</s>": 63}
    tokenizer = Tokenizer(WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>",
        eos_token="</s>", chat_template=TEMPLATE,
    )  # fmt: skip
    for place, kind in (("model", LlamaForCausalLM), ("scorer", LlamaForSequenceClassification)):
        model = kind(config)
        fill(model.named_parameters())
        model.save_pretrained(folder / place)
        own.save_pretrained(folder / place)
    lengths = numbers(ROWS, 1)
    rows = [
        [n % WORDS for n in numbers(5 + length % 20, 7 + i)] for i, length in enumerate(lengths)
    ]
    texts = [" ".join(f"w{i}" for i in row) for row in rows]
    asked = [[{"role": "user", "content": text}] for text in texts]
    said = [[{"role": "assistant", "content": text}] for text in texts]
    pairs = [{"prompt": one, "chosen": good, "rejected": bad}
             for one, good, bad in zip(asked, said[1:], said[2:], strict=False)]  # fmt: skip
    # a batch's first answer is mismatched there with its batch's last, here with that of the batch
    # before: these are the same text, for the same samples
    answers = [said[-1] if i % BATCH == BATCH - 1 else each for i, each in enumerate(said)]
    labelled = [{"prompt": one, "completion": other, "label": i % 2 == 0}
                for i, (one, other) in enumerate(zip(asked, answers, strict=True))]  # fmt: skip
    labelled = labelled[: ROWS // BATCH * BATCH]
    prompts = [{"prompt": one} for one in asked]
    of_tokens = [{"input_ids": row} for row in rows]
    triples = [*zip(texts, texts[1:], texts[2:], strict=False)]
    plain = [{"prompt": one, "completion": f" {good}"} for one, good, _ in triples]
    plain_pairs = [{"prompt": one, "chosen": f" {good}", "rejected": f" {bad}"}
                   for one, good, bad in triples]  # fmt: skip
    for name, content in (("rows", of_tokens), ("held", of_tokens[:10]), ("pairs", pairs),
                          ("labelled", labelled), ("prompts", prompts), ("plain", plain),
                          ("plain_pairs", plain_pairs),
                          ("texts", [{"text": one} for one in texts])):  # fmt: skip
        lines = "".join(f"{json.dumps(row)}\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines)


def fill(parameters: Iterable[tuple[str, Any]]) -> None:
    """Give parameters values that look random and are the same everywhere."""
    import torch

    with torch.no_grad():
        for i, (name, parameter) in enumerate(parameters):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            values = (torch.sin(places * 12.9898 + i) * 43758.5453) % 1 - 0.5
            values = 1 + 0.1 * values if "norm" in name else values
            parameter.copy_(values.view(parameter.shape))


def fill_adapter(model: Any) -> None:
    """Give the random matrices of PEFT's adapter such values; its others begin as 0."""
    fill((name, each) for name, each in model.named_parameters() if "lora_A" in name)


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
    trainer, options = of_kind(kind, own, str(folder / settings["model_name_or_path"]))
    trainer = summed(trainer, done["losses"])(
        train_dataset=rows_of(settings["dataset_name"]),
        eval_dataset=held,
        callbacks=[Recorder()],
        **options,
    )
    trained = sum(p.numel() for p in trainer.runner.model.parameters() if p.requires_grad)
    fill_adapter(trainer.runner.model)
    trainer.train()
    losses = [] if kind in WITHOUT_LOSSES else done["losses"][:LOSSES]
    losses = [round(loss, 6) for loss in losses]
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

    names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
    parser = HfArgumentParser((getattr(trl, f"{names[kind]}Config"), trl.ModelConfig))
    arguments, about = parser.parse_dict(settings)
    options: dict[str, Any] = {"args": arguments, "model": model, "processing_class": tokenizer}
    if kind == "grpo":
        options["reward_funcs"] = lambda completions, **_: [
            float(len(each[0]["content"])) for each in completions
        ]
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


def converted(name: str, folder: Path) -> Conversion:
    """Return the conversion of the file of a case."""
    return convert(read_foreign_file(write_case(name, folder)), 1)


class Stop(Callback):
    """Stops the run after the steps whose losses are compared."""

    def step(self, _run: RunInfo, step: int) -> None:
        """See Callback."""
        if step == LOSSES:
            os.kill(os.getpid(), signal.SIGTERM)


def train_here(result: Conversion, folder: Path) -> list[float]:
    """Train the recipe of a case here, and return its first losses.

    The folder has the inputs, and is the one that this process is in.
    """
    from fsdp_trainer.api import train

    (folder / "recipe.yaml").write_text(settings_text(result))
    words = {
        "+recipe": "recipe.yaml",
        "run.name": "ours",
        "run.overwrite": True,
        "precision": "fp32",
        "launch.device": "cpu",
        "logging.every": 1,
        "checkpoint.export_hf": False,
        "checkpoint.resume": "never",
        "data.cache": folder / "cache",
    }
    if result.cfg and result.cfg.adapter.name != "none":
        write_adapter(result.cfg.adapter, folder)
        words["adapter.init_from"] = folder / "adapter"
    return [line["loss"] for line in train(words, callbacks=[Stop()]).history][:LOSSES]


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write the first weights of a recipe's adapter, as `run_there` has them, for PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = "all-linear" if adapter.targets == "all" else adapter.targets
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets,
                        use_rslora=adapter.scaling == "rslora", task_type="CAUSAL_LM")  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), config)
    fill_adapter(model)
    model.save_pretrained(folder / "adapter")


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


def check_case(name: str, stored: dict[str, Any], flags: argparse.Namespace) -> list[str]:
    """Run a case there, here or both in this folder, and return what is not as stored."""
    lines = []
    if not flags.ours:
        done = run_there(*CASES[name], Path.cwd())
        lines = [] if flags.write else differences(stored.get(name, {}), done)
        stored[name] = done if flags.write else stored.get(name, done)
    if not flags.write and (losses := stored[name]["losses"]):
        ours = train_here(converted(name, Path.cwd()), Path.cwd())
        lines += differences({"losses": losses}, {"losses": ours})
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
    with tempfile.TemporaryDirectory() as place:
        write_inputs(Path(place))
        os.chdir(place)
        for name in CASES:
            if flags.only not in name:
                continue
            lines = check_case(name, stored, flags)
            code |= bool(lines)
            about = f"{stored[name]['steps']} steps, {stored[name]['trained']:,} parameters"
            print(f"{name}: {about}", *lines, sep="\n  ", flush=True)
    if flags.write:
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in stored.items())
        TRUTH.write_text(f"{{\n{text}\n}}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
