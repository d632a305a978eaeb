"""Other trainers' configuration files become recipes, and every setting in them is answered."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from world import write_json

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.environment_tasks import EnvironmentTask
from fsdp_trainer.interop.convert.converter import convert, recipe_text
from fsdp_trainer.interop.convert.foreign_file import read_foreign_file

AXOLOTL = """
base_model: NousResearch/Llama-2-7b-hf
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
    split: train
val_set_size: 0.05
output_dir: ./out
sequence_len: 4096
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
weight_decay: 0.0
bf16: auto
fp16: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
saves_per_epoch: 1
wandb_project:
my_own_setting: 3
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
pref_beta: 0.1
pref_loss: orpo
dataset: known,other
dataset_dir: .
template: llama3
cutoff_len: 2048
deepspeed: ds_z2_offload.json
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
max_steps: 200
warmup_ratio: 0.1
lr_scheduler_type: cosine
fp16: true
report_to: wandb
"""
TORCHTUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /m/tokenizer.model}
model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}
batch_size: 2
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, fused: true, weight_decay: 0.01, lr: 3e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
epochs: 1
dtype: bf16
compile: false
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: false}
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
main_process_ip: node0
main_process_port: 29501
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_offload_params: false
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
DEEPSPEED = """
{
 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
 "bf16": {"enabled": true},
 "gradient_clipping": 0.5,
 "train_micro_batch_size_per_gpu": 4,
 "gradient_accumulation_steps": 2,
 "optimizer": {
  "type": "AdamW",
  "params": {"lr": 3e-05, "betas": [0.9, 0.95]}
 }
}
"""
ARGUMENTS = """
{
 "output_dir": "out",
 "per_device_train_batch_size": 2,
 "gradient_accumulation_steps": 4,
 "learning_rate": 1e-05,
 "num_train_epochs": 2,
 "lr_scheduler_type": "linear",
 "warmup_steps": 0.1,
 "max_steps": 50,
 "optim": "adafactor",
 "seed": 7,
 "save_steps": 10,
 "save_total_limit": 2,
 "report_to": ["tensorboard"],
 "push_to_hub": true
}
"""
FILES = {
    "axolotl.yml": (
        AXOLOTL,
        """
model.init_from: NousResearch/Llama-2-7b-hf
adapter: qlora
optim: adamw_8bit
schedule: cosine
precision: bf16
activation_checkpoint: full
data.path: hf://datasets/tatsu-lab/alpaca
data.format: alpaca
data.validation: 0.05
data.packing: best_fit
batch.seq_len: 4096
batch.micro_rows: 2
batch.rows: 16
train.epochs: 3
optim.lr: 0.0002
optim.weight_decay: 0.0
adapter.rank: 32
adapter.alpha: 16
adapter.targets: all
run.root: ./out
run.seed: 42
schedule.warmup: 0.1
checkpoint.every: 0.3333333333333333
checkpoint.keep: 4
optim.betas: [0.9, 0.999]
optim.eps: 1.0e-08
optim.grad_clip: 1.0
schedule.from_zero: true
checkpoint.export_hf: true
""",
        {
            "lora_dropout: 0.05": "there is no dropout",
            "datasets[0].split: train": "data of the hub is named by files",
            "my_own_setting: 3": "no setting with this meaning",
            "wandb_project: null": "not set",
        },
    ),
    "llama_factory.yaml": (
        LLAMA_FACTORY,
        """
objective: orpo
adapter: lora
adapter.targets: [q_proj, v_proj]
data.path: [FOLDER/k.json, 'hf://datasets/a/b']
data.format: alpaca
data.template: llama3
sharding: fsdp
sharding.reshard_after_forward: false
optim.offload: cpu
precision: fp16
train.steps: 200
schedule.warmup_steps: 20
logging.wandb: online
batch.rows: 16
batch.micro_rows: 1
batch.seq_len: 4096
objective.beta: 0.1
adapter.rank: 8
optim.lr: 5.0e-06
schedule: cosine
model.init_from: meta-llama/Meta-Llama-3-8B-Instruct
optim: adamw
adapter.alpha: 16
data.packing: none
data.pad_to_multiple: 8
batch.across_epochs: false
optim.weight_decay: 0.0
run.seed: 42
checkpoint.every: 500
optim.betas: [0.9, 0.999]
optim.eps: 1.0e-08
optim.grad_clip: 1.0
schedule.from_zero: true
checkpoint.export_hf: true
""",
        {},
    ),
    "torchtune.yaml": (
        TORCHTUNE,
        """
adapter: qlora
model.init_from: /m
tokenizer.path: /m/tokenizer.model
data.path: hf://datasets/yahma/alpaca-cleaned
data.packing: best_fit
adapter.targets: [q_proj, v_proj, o_proj, down_proj, gate_proj, up_proj]
optim: adamw
optim.lr: 0.0003
optim.weight_decay: 0.01
batch.rows: 32
schedule: cosine
schedule.warmup_steps: 100
precision: bf16
train.epochs: 1
adapter.rank: 8
data.format: alpaca
batch.micro_rows: 2
optim.implementation: fused
""",
        {"profiler.enabled: false": "profile.steps"},
    ),
    "accelerate.yaml": (
        ACCELERATE,
        """
sharding: fsdp
sharding.reshard_after_forward: false
precision: bf16
activation_checkpoint: full
launch.nodes: 2
launch.nproc_per_node: 8
launch.rendezvous: node0:29501
""",
        {},
    ),
    "deepspeed.json": (
        DEEPSPEED,
        """
sharding: fsdp
sharding.reshard_after_forward: false
optim.offload: disk
precision: bf16
optim.grad_clip: 0.5
batch.micro_rows: 4
batch.rows: 16
optim: adamw
optim.lr: 3.0e-05
optim.betas: [0.9, 0.95]
""",
        {},
    ),
    "arguments.json": (
        ARGUMENTS,
        """
run.root: out
batch.micro_rows: 2
batch.rows: 16
optim.lr: 1.0e-05
train.steps: 50
schedule: linear
schedule.warmup_steps: 5
run.seed: 7
checkpoint.every: 10
checkpoint.keep: 2
logging.tensorboard: true
data.packing: none
data.pad_to_multiple: 8
batch.across_epochs: false
optim.weight_decay: 0.0
optim.betas: [0.9, 0.999]
optim.eps: 1.0e-08
optim.grad_clip: 1.0
schedule.from_zero: true
checkpoint.export_hf: true
""",
        {"optim: adafactor": "there is no optimizer adafactor", "push_to_hub: true": "push runs/"},
    ),
}
"""Content of a file, what its recipe sets for two ranks (as YAML), and what is said about some."""


def sets_of(recipe):
    """The groups and keys that a recipe sets, given as text or as a tree."""
    tree = yaml.safe_load(recipe) if isinstance(recipe, str) else recipe
    groups = {}
    for entry in tree.pop("defaults", []):
        ((group, option),) = entry.items()
        groups[group.removeprefix("override /")] = option
    return groups | {
        f"{node}.{key}": value for node, each in tree.items() for key, value in each.items()
    }


def line_after(text, start):
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"#   {start}"))
    return next(line for line in lines[at:] if line.startswith("#       "))


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_recipe_it_means_and_each_setting_has_a_line(name, tmp_path, program):
    content, sets, said = FILES[name]
    (tmp_path / name).write_text(content)
    known = {"known": {"file_name": "k.json"}, "other": {"hf_hub_url": "a/b"}}
    write_json(tmp_path / "dataset_info.json", known)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    write_json(tmp_path / "ds_z2_offload.json", {"zero_optimization": zero})
    text = program("convert", tmp_path / name, "world_size=2")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    compose("train", [f"+recipe={recipe}"], inputs=False)
    assert sets_of(text.replace(str(tmp_path), "FOLDER")) == yaml.safe_load(sets)
    for setting in read_foreign_file(tmp_path / name).settings:
        assert f"{setting}: " in text, setting
    for setting, answer in said.items():
        assert answer in line_after(text, setting), setting


def test_a_value_that_the_recipe_is_refused_for_is_told_and_left_out(tmp_path):
    file = tmp_path / "a.yml"
    file.write_text("base_model: a/b\nsequence_len: 4\nlearning_rate: -1\n")
    text = recipe_text(convert(read_foreign_file(file), 1))
    assert "batch.seq_len=4" in line_after(text, "sequence_len: 4")
    assert "optim.lr=-1" in line_after(text, "learning_rate: -1")
    assert sets_of(text)["model.init_from"] == "a/b"
    assert not {"batch.seq_len", "optim.lr"} & sets_of(text).keys()


BOMB = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in pairwise("abcdefgh")
)
TOO_MUCH = {
    "repeats": (BOMB, "aliases that repeat more than 10,000 values"),
    "itself": ("run: &a {name: *a}", "one that contains itself"),
    "deep": ("run: " + "[" * 200 + "]" * 200, "more than 100 lists and mappings within each other"),
    "chain": ("a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(120)),
              "more than 100 lists and mappings within each other"),
    "control": ("run: {name: '\x07'}", "control characters are not allowed"),
    "typed": ("run: {name: !!int x}", "a value cannot be read"),
    "set": ("run: {name: !!set {a, b}}", "could not determine a constructor"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_yaml_that_is_too_much_is_refused_wherever_it_is_read(name, tmp_path, monkeypatch, program):
    """YAML is read as another trainer's file, as a recipe, in a folder of recipes, as a task.

    Each is one message.
    """
    content, reason = TOO_MUCH[name]
    monkeypatch.chdir(tmp_path)
    Path("own/model").mkdir(parents=True)
    for file in ("a.yaml", "own/model/mine.yaml"):
        Path(file).write_text(f"{content}\n")
    for line in ("convert a.yaml", "config a.yaml", "config --config-dir own model=mine"):
        assert reason in " ".join(program(line, code=2).split())
    with pytest.raises(UserError, match="a task cannot be run") as raised:
        EnvironmentTask.read("a.yaml")
    assert reason in str(raised.value)


REPEATED = "".join(f"    A{i + 1}: '{f'${{launch.env.A{i}}}' * 10}'\n" for i in range(9))
USED = "run: {name: '${launch.env.A9}'}\n"
INTERPOLATIONS = {
    "repeats": (f"    A0: x\n{REPEATED}{USED}", "of them refer to values with others"),
    "deep": (f"    A: '{'${a:' * 5000}{'}' * 5000}'\n", "a.yaml cannot be read: maximum recursion"),
}


@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolations_that_are_too_much_are_refused(name, tmp_path, monkeypatch, program):
    lines, reason = INTERPOLATIONS[name]
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(f"launch:\n  env:\n{lines}")
    for line in ("config a.yaml", "-m run.seed=1,2 a.yaml"):
        assert reason in " ".join(program(line, code=2).split())


def test_many_interpolations_of_short_values_are_read(tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "runs")
    used = "".join(
        f"    A{i}: ${{run.root}}/{i}\n    B{i}: /{i}${{data.path}}\n" for i in range(100)
    )
    run = "run: {name: 2026-01-01, root: '${oc.env:MINE}'}\ndata: {path: null}"
    Path("a.yaml").write_text(f"{run}\nlaunch:\n  env:\n{used}")
    shown = program("config a.yaml")
    assert "2026-01-01" in shown
    assert "A99: ${run.root}/99" in shown
    assert "B99: /99None" in shown


def test_values_that_are_named_once_and_used_often_are_read(tmp_path):
    file = tmp_path / "a.yml"
    file.write_text("optimizer: &o adamw\nbase_model: a/b\nsequence_len: 64\nother: [*o, *o]\n")
    assert read_foreign_file(file).settings["other"] == ["adamw", "adamw"]


HOSTILE = [
    "x\nrun:\n  name: A", "\u2028run: {name: A}", "\x85run: {name: A}", "\r", "\x1b]0;A\x07",
    "\u202e", "# A", "' A", '" A', "a: A", "- A", "---", "...", "%YAML 1.1", "&a", "*a", "!!set",
    "null", "1e-5", " A ", "\ufeff", "🙂", "|", "{A: 1}", "A" * 300, "",
]  # fmt: skip


def test_no_name_and_no_value_adds_a_key_or_becomes_another(tmp_path, program):
    texts = {f"{i}{text}": text for i, text in enumerate(HOSTILE)}
    nested = {"datasets": [{"path": text, "type": text} for text in HOSTILE if text], "seed": 7}
    settings = {"base_model": HOSTILE[0], "sequence_len": 64, **texts, **nested}
    file = tmp_path / "a\nrun:\n  name: A.json"
    write_json(file, settings)
    text = program("convert", file)
    assert all(line.isprintable() for line in text.split("\n"))
    sets = sets_of(text)
    assert sets.pop("data.path") == [each["path"] for each in nested["datasets"]]
    write_json(file, {"base_model": HOSTILE[0], "sequence_len": 64, "seed": 7})
    assert sets == {"data.format": "auto"} | sets_of(
        recipe_text(convert(read_foreign_file(file), 1))
    )


def test_a_value_that_stands_for_another_is_not_kept(tmp_path, program):
    file = tmp_path / "a.yml"
    file.write_text("base_model: a/b\nsequence_len: 64\noutput_dir: ${oc.env:HOME}\n")
    text = program("convert", f"source={file}")
    assert "run.root" not in sets_of(text)
    assert "${…}" in line_after(text, "output_dir")


def test_files_that_trl_ships_are_converted_whole():
    trl = pytest.importorskip("trl")
    files = sorted((Path(trl.__file__).parent / "accelerate_configs").glob("*.yaml"))
    assert files
    for path in files:
        file = read_foreign_file(path)
        result = convert(file, 1)
        assert result.answers.keys() == file.settings.keys()
        assert result.open == []
