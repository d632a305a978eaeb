"""The meaning of settings of other trainers that keep not just another name.

All others are looked up in names.yaml. A rule gets the value and the whole file.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.names import table
from fsdp_trainer.interop.convert import trl
from fsdp_trainer.interop.convert.data_sets import hub_or_file
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.lengths import (
    MICRO,
    accumulated,
    epochs_of,
    held_out,
    is_packed,
    max_steps,
    steps_of_epoch,
    steps_of_run,
    trained_samples,
    warm_up_steps,
)
from fsdp_trainer.interop.convert.trainers import OWN_TOOL, PREFERENCES, SPELT, TABLES
from fsdp_trainer.interop.convert.translation import (
    OFF,
    TRANSLATED,
    Answer,
    Rule,
    as_number,
    impossible,
    is_off,
    is_on,
    nothing,
    rules_of,
    sets,
)

NAMED = {
    "optim": ("adamw", "adamw_8bit", "muon", "lion", "sgd", "lamb"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
}
"""Options of groups that other trainers name alike."""
TEMPLATES = TABLES["templates"]
OWN_TEMPLATE = ("default", "tokenizer_default", "jinja", "tokenizer_default_fallback_chatml")
METHODS = ("sft", "dpo", "ipo", "kto", "orpo", "simpo", "grpo", "rm", "pairwise")
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
DATA_PATH = "data.path=FILE"


def choose(group: str) -> Rule:
    known = {name: name for name in NAMED[group]} | table().options[group]

    def rule(value: Any, file: ForeignFile) -> Answer:
        name = str(value).rpartition(".")[2].lower()
        if name in known:
            return sets(**{group: known[name]})
        options = " ".join(dict.fromkeys(known.values()))
        what = "optimizer" if group == "optim" else group
        return impossible(f"there is no {what} {name}. There are: {options}  ({group}=…)")

    return rule


def rows(value: Any, file: ForeignFile) -> Answer:
    micro, times, ranks = int(value), accumulated(file), file.ranks
    each = counted(ranks, "rank")
    note = f"{micro} a device × {times} accumulated × {each} (world_size={ranks})"
    return sets(note, batch__micro_rows=micro, batch__rows=micro * times * ranks)


def accumulation(value: Any, file: ForeignFile) -> Answer:
    if int(value) == 1 or any(file.value(name) for name in (*MICRO, "batch_size")):
        return nothing("in  batch.rows")
    return impossible(
        "how many rows a device computes is not in the file:  batch.rows=ROWS  counts all of a step"
    )


def warm_up(value: Any, file: ForeignFile) -> Answer:
    """Return the warm-up: steps, or below 1 a share of them."""
    steps = warm_up_steps(file, steps_of_run(file))
    if steps == 0:
        return sets("there is none with  constant" if value else "", schedule__warmup_steps=0)
    if not 0 < float(value) < 1:
        return sets(schedule__warmup_steps=int(value))
    if steps is not None:
        return sets(f"{value} of {steps_of_run(file)} steps", schedule__warmup_steps=steps)
    note = "rounded down there" if file.tool == "axolotl" and float(value) else ""
    if "warmup_ratio" in file.implied:
        note += ", and at most 100 steps:  schedule.warmup=0 schedule.warmup_steps=100"
    return sets(note, schedule__warmup=value)


def betas(value: Any, file: ForeignFile) -> Answer:
    first = file.value("adam_beta1", "beta1", "optimizer.beta1")
    second = file.value("adam_beta2", "beta2", "optimizer.beta2")
    chosen = [0.9 if first is None else first, 0.999 if second is None else second]
    return sets(optim__betas=[float(as_number(one)) for one in chosen])


def lowest_rate(value: Any, file: ForeignFile) -> Answer:
    highest = as_number(file.value("learning_rate", "optimizer.lr", "lr"))
    if not isinstance(highest, int | float) or not highest:
        return impossible("the floor is a share of optim.lr:  schedule.min_ratio=0.1")
    return sets(f"{value} of {highest}", schedule__min_ratio=float(value) / highest)


def steps(value: Any, file: ForeignFile) -> Answer:
    """Return the number of optimizer steps; one that is not positive leaves it to the epochs."""
    return sets(train__steps=int(value)) if int(value) > 0 else nothing("the epochs decide")


def row_length(value: Any, file: ForeignFile) -> Answer:
    if file.method in (*PREFERENCES, "reward"):
        return trl.pair_length(value, file)
    cuts = file.tool == "LLaMA-Factory" or (file.tool == OWN_TOOL and file.method == "sft")
    is_split = file.method == "pt" or file.value("packing_strategy") in ("wrapped", "bfd_split")
    if not cuts or is_split:
        return sets(batch__seq_len=int(value))
    note = "longer samples are cut at their end"
    note += "; there question and answer both are" * (file.tool == "LLaMA-Factory")
    return sets(note, batch__seq_len=int(value), data__too_long="truncate")


def clipping(value: Any, file: ForeignFile) -> Answer:
    return sets(optim__grad_clip=None if value is None or is_off(value) else value)


def of_hub(value: Any, file: ForeignFile) -> Answer:
    if is_off(file.value("push_to_hub") or False):
        return nothing("only counts with  push_to_hub: true")
    return impossible("afterwards:  fsdp-trainer push runs/NAME to=ORG/NAME")


def processes(value: Any, file: ForeignFile) -> Answer:
    return sets("0: none besides the rank" if int(value) == 0 else "",
                data__workers=max(1, int(value)))  # fmt: skip


def mixture(value: Any, file: ForeignFile) -> Answer:
    if value == "concat":
        return nothing("the data sets are read together, each once an epoch")
    return impossible(
        "data sets are mixed by shares of their tokens:  data.path=[{path: …, weight: 0.7}, …]"
    )


def sampling_order(value: Any, file: ForeignFile) -> Answer:
    if value == "random":
        return nothing("samples have a new order every epoch")
    if value == "sequential":
        return sets(data__shuffle=False)
    return nothing("rows are packed (data.packing), so lengths cost nothing")


def torchtune_loss(value: Any, file: ForeignFile) -> Answer:
    name = str(value).rpartition(".")[2]
    known = {"DPOLoss": "dpo", "SimPOLoss": "simpo", "IPOLoss": "ipo"}
    if name in known:
        return sets(objective=known[name])
    if "CrossEntropy" in name or "KDLoss" in name or "LinearCrossEntropy" in name:
        return nothing("the head never holds all logits of a micro-batch (loss.chunk_mib)")
    return impossible("there is  objective=sft , dpo, ipo, simpo, orpo, kto, reward, grpo, distil")


def of_preferences(key: str) -> Rule:
    def rule(value: Any, file: ForeignFile) -> Answer:
        if file.method == "grpo" and key == "objective.beta":
            return trl.divergence(value, file)
        if file.method in PREFERENCES or "loss._component_" in file.settings:
            return sets(**{key: value})
        return nothing("only counts for preferences")

    return rule


def on_off_format(name: str) -> Rule:
    def rule(value: Any, file: ForeignFile) -> Answer:
        if not is_off(value):
            return sets(precision=name)
        others = [file.value(f"{other}{end}") for other in ("bf16", "fp16", "pure_bf16", "fp8")
                  for end in ("", ".enabled")]  # fmt: skip
        if name == "bf16" and all(other in (None, *OFF) for other in others):
            both = file.method is not None and file.tool == OWN_TOOL  # TRL loads float32
            both |= "bf16" in file.settings and "fp16" in file.settings
            return (
                sets(precision="fp32") if both else nothing("off; the default is  precision=bf16")
            )
        return nothing("off")

    return rule


def adapter(value: Any, file: ForeignFile) -> Answer:
    kind = str(value).lower()
    if kind in ("full", "none"):
        return sets("all weights are trained", adapter="none")
    bits = file.value("quantization_bit")
    is_four_bit = file.value("load_in_4bit") is True or bits == 4
    if kind == "qlora" or (kind == "lora" and is_four_bit):
        return sets(adapter="qlora")
    if kind == "lora":
        return sets(adapter="dora" if file.value("use_dora", "peft_use_dora") else "lora")
    if kind == "freeze":
        return impossible("name what is not to be trained:  train.freeze=[…]")
    return impossible("there is  adapter=lora , dora  and  qlora")


def four_bit(value: Any, file: ForeignFile) -> Answer:
    if value is True or value == 4:
        return sets(adapter="qlora")
    if is_off(value):
        return nothing("off")
    return impossible("weights beneath an adapter are kept in 4 bits ( adapter=qlora ) or whole")


def targets(value: Any, file: ForeignFile) -> Answer:
    names = value if isinstance(value, list) else [n.strip() for n in str(value).split(",")]
    names = ["o_proj" if name == "output_proj" else name for name in names]
    if names in (["all"], ["all-linear"]) or set(names) == LINEAR:
        return sets(adapter__targets="all")
    if file.value("model.apply_lora_to_mlp") is True:
        names = [*names, *sorted(LINEAR - set(names) - {"q_proj", "k_proj", "v_proj", "o_proj"})]
    return sets(adapter__targets=names)


def torchtune_data(value: Any, file: ForeignFile) -> Answer:
    """Return that a builder of torchtune's is replaced by the data that it reads."""
    source = file.value("dataset.source", "dataset.data_files")
    if source and source not in ("json", "csv", "text", "parquet"):
        return sets(f"of {value}", data__path=hub_or_file(str(source)))
    if str(value).endswith(("alpaca_dataset", "alpaca_cleaned_dataset")):
        name = "yahma/alpaca-cleaned" if "cleaned" in str(value) else "tatsu-lab/alpaca"
        return sets(f"of {value}", data__path=f"hf://datasets/{name}", data__format="alpaca")
    return impossible(f"name the data that it reads:  {DATA_PATH}")


def template(value: Any, file: ForeignFile) -> Answer:
    name = str(value).lower()
    if name in OWN_TEMPLATE:
        return nothing("the tokenizer's own template is the default")
    if name in TEMPLATES:
        system = file.value("default_system") or TABLES["system turns"].get(name)
        if system and TEMPLATES[name] in ("chatml", "qwen2"):
            said = {"default_system": str(system)}
            return sets(data__template="qwen2", data__template_args=said)
        return sets(data__template=TEMPLATES[name])
    if name.endswith(".jinja"):
        return sets(data__template=str(value))
    return impossible(
        "there is no such template; without  data.template  the tokenizer's own is used, else name"
        f" a .jinja file. There are: {' '.join(dict.fromkeys(TEMPLATES.values()))}"
    )


def system_turn(value: Any, file: ForeignFile) -> Answer:
    answer = template(file.value("template") or "", file)
    said = answer.sets.get("data.template_args")
    return sets(data__template_args=said) if said else impossible("put it into the data's chats")


def validation(value: Any, file: ForeignFile) -> Answer:
    if is_off(value):
        return sets(data__validation=None)
    if isinstance(value, float) and value < 1:
        return sets(data__validation=value)
    return impossible(f"a share is held out, not {value} samples:  data.validation=0.02  or a path")


def loss_on(value: Any, file: ForeignFile) -> Answer:
    return sets(data__loss_on="assistant" if is_off(value) else "all")


def packing(value: Any, file: ForeignFile) -> Answer:
    """Return whether several samples share a row; rows of one are padded to their longest."""
    if file.method == "grpo":
        return nothing("prompts are not packed, and answers always are")
    if is_off(value) and is_packed(file):
        return nothing("in  neat_packing")
    if is_off(value):
        is_compiled = any(is_on(file.value(name)) for name in ("torch_compile", "compile"))
        padded = {} if is_compiled else {"data.pad_to_multiple": 8}
        return Answer(TRANSLATED, {"data.packing": "none"} | padded)
    if file.method == "pt":
        return sets(data__packing="stream", data__too_long="split")
    if kind := file.own("packing_strategy"):
        return trl.packing_kind(kind, file)
    sees_each_other = file.tool == "LLaMA-Factory" and is_off(file.value("neat_packing") or False)
    note = "samples of a row see each other there, without  neat_packing" * sees_each_other
    return sets(note, data__packing="best_fit")


def end_of_epoch(value: Any, file: ForeignFile) -> Answer:
    if file.method == "grpo":
        return nothing("prompts that do not fill the last step of an epoch are left out there")
    if file.tool == "axolotl" and steps_of_run(file) is None:
        return nothing("as many steps as rows of all epochs fill, there too")
    return sets(batch__across_epochs=False)


def method(value: Any, file: ForeignFile) -> Answer:
    name = str(value).lower()
    if name == "pt":
        return sets("texts are learnt whole", data="pretrain")
    loss = str(file.value("pref_loss") or "sigmoid")
    if name == "dpo":
        if loss not in LOSSES:
            return impossible(f"there is no pref_loss={loss}: objective=dpo, ipo, orpo or simpo")
        return sets(objective=LOSSES[loss])
    if name == "cpo":
        return trl.of_cpo(file)
    if name in METHODS:
        return sets(objective=SPELT.get(name, name))
    return impossible("there is  objective=sft , dpo, ipo, kto, orpo, simpo, grpo, reward, distil")


def zero_stage(value: Any, file: ForeignFile) -> Answer:
    stage = int(value)
    if stage == 0:
        return sets("stage 0", sharding="ddp")
    if stage == 3:
        return sets("stage 3", sharding="fsdp")
    note = f"stage {stage}: weights stay whole after a forward, gradients and states are sharded"
    return sets(note, sharding="fsdp", sharding__reshard_after_forward=False)


def deepspeed_file(value: Any, file: ForeignFile) -> Answer:
    """Return the sharding of a file of DeepSpeed's, as its content or its name says."""
    path = next((p for p in (file.path.parent / str(value), Path(str(value))) if p.is_file()), None)
    content: dict[str, Any] = json.loads(path.read_text()) if path else {}
    zero = content.get("zero_optimization", {})
    named = re.search(r"z(?:ero)?_?([0-3])", Path(str(value)).name)
    stage = zero.get("stage", int(named[1]) if named else None)
    if stage is None:
        return impossible("say how weights are sharded:  sharding=fsdp , hsdp  or  ddp")
    chosen = zero_stage(stage, file)
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded or (not content and "offload" in str(value)):
        chosen = replace(chosen, sets=chosen.sets | {"optim.offload": "cpu"})
    more = "convert that file too, to see what becomes of each of its settings"
    return replace(chosen, note=f"{chosen.note}; {more}")


def offloaded_states(value: Any, file: ForeignFile) -> Answer:
    weights = file.value(
        "zero_optimization.offload_param.device", "deepspeed_config.offload_param_device"
    )
    if weights == "cpu" and str(value) == "cpu":
        return nothing("sharding.cpu_offload  has the states in host memory too")
    return offload_device("optim.offload")(value, file)


def offload_device(key: str) -> Rule:
    def rule(value: Any, file: ForeignFile) -> Answer:
        if is_off(value):
            return nothing("off")
        if key == "optim.offload":
            return sets(**{key: "disk" if str(value) == "nvme" else "cpu"})
        return sets("", **{key: True})

    return rule


def distributed(value: Any, file: ForeignFile) -> Answer:
    kinds = {"FSDP": "fsdp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
    if str(value) in kinds:
        return sets(sharding=kinds[str(value)])
    if str(value) in ("NO", "DEEPSPEED"):
        return nothing("nothing to shard" if value == "NO" else "see zero_stage")
    return impossible("there is  sharding=fsdp , hsdp  and  ddp")


def per_epoch(key: str, times: float, file: ForeignFile) -> Answer:
    of_epoch = steps_of_epoch(file)
    if of_epoch and of_epoch % times == 0:
        return sets(f"{of_epoch} steps an epoch", **{key: int(of_epoch // times)})
    if max_steps(file) and file.tool != "axolotl":
        return impossible(f"how many steps an epoch has follows from the data:  {key}=STEPS")
    share = 1 / (times * epochs_of(file))
    if share >= 1:
        return sets("at the end", **{key: None})
    # rounded down, as the share is rounded up to a step; axolotl has no more digits than this
    return sets("", **{key: share if file.tool == "axolotl" else math.floor(share * 1e6) / 1e6})


def times_per_epoch(key: str) -> Rule:
    return lambda value, file: (
        nothing("off") if is_off(value) else per_epoch(key, float(value), file)
    )


def strategy(key: str, kind: str) -> Rule:
    def rule(value: Any, file: ForeignFile) -> Answer:
        name = str(value).rpartition(".")[2].lower()
        if name == "epoch":
            return per_epoch(key, 1, file)
        if name == "best":
            return sets(checkpoint__best=True)
        if is_off(name):
            return sets("at the end", **{key: None})
        if file.value(f"{kind}_steps") is None and kind == "eval":
            return interval(key, kind)(file.value("logging_steps") or 500, file)
        return nothing(f"in  {kind}_steps")

    return rule


def interval(key: str, kind: str) -> Rule:
    """Return a rule for steps between two times, which below 1 are a share of all."""

    def rule(value: Any, file: ForeignFile) -> Answer:
        names = (f"{kind}_strategy", "evaluation_strategy" if kind == "eval" else "")
        chosen = str(file.value(*names) or "steps").rpartition(".")[2].lower()
        if chosen not in ("steps", "best"):
            return nothing(f"only counts with  {kind}_strategy: steps")
        return sets("", **{key: value if float(value) < 1 else int(value)})

    return rule


def trackers(value: Any, file: ForeignFile) -> Answer:
    names = value if isinstance(value, list) else [str(value)]
    known: dict[str, tuple[str, Any]] = {
        "wandb": ("logging.wandb", "online"), "tensorboard": ("logging.tensorboard", True),
        "mlflow": ("logging.mlflow", True), "trackio": ("logging.trackio", True),
        "comet_ml": ("logging.comet", "online"), "swanlab": ("logging.swanlab", "online"),
    }  # fmt: skip
    chosen = dict(known[name] for name in names if name in known)
    if chosen:
        return sets(**chosen)
    if names in (["none"], ["all"]):
        return nothing("metrics.jsonl and the report in the run's folder are always written")
    return impossible(f"there are  {'  '.join(key for key, _ in known.values())}")


def logger_component(value: Any, file: ForeignFile) -> Answer:
    for part in ("wandb", "tensorboard", "mlflow", "comet"):
        if part in str(value).lower():
            return trackers("comet_ml" if part == "comet" else part, file)
    return nothing("metrics.jsonl and the report in the run's folder are always written")


def wandb_project(value: Any, file: ForeignFile) -> Answer:
    """Return the project; naming one switches Weights & Biases on."""
    return sets(logging__wandb="online", logging__project=str(value))


def model_builder(value: Any, file: ForeignFile) -> Answer:
    if "lora" in str(value):
        is_four_bit = "qlora" in str(value) or file.value("model.quantize_base") is True
        note = "config.json of the weights says which model it is"
        return sets(note, adapter="qlora" if is_four_bit else "lora")
    return nothing("config.json of the weights says which model it is (model.init_from)")


def rendezvous(value: Any, file: ForeignFile) -> Answer:
    host, port = file.value("main_process_ip"), file.value("main_process_port")
    if host is None:
        return nothing("a free port is found on one node; on several: launch.rendezvous=HOST:PORT")
    return sets(launch__rendezvous=f"{host}:{port or 29500}")


def tokenizer_path(value: Any, file: ForeignFile) -> Answer:
    """Return the tokenizer's folder for one of its files, except a SentencePiece model."""
    path = Path(str(value))
    return sets(tokenizer__path=str(path.parent if path.suffix in (".json", ".txt") else path))


def epochs(value: Any, file: ForeignFile) -> Answer:
    if max_steps(file):
        return nothing("max_steps  decides")
    steps, is_whole = steps_of_run(file), float(value).is_integer()
    ends_otherwise = not is_whole or held_out(file) or file.tool == "axolotl"
    if steps and (ends_otherwise or file.method == "grpo"):
        return sets(f"{trained_samples(file)} samples there", train__steps=steps)
    if is_whole:
        return sets(train__epochs=int(value))
    return impossible(f"passes over the data are whole; {value} of them are  train.steps=…")


def unfrozen(value: Any, file: ForeignFile) -> Answer:
    if file.value("adapter", "finetuning_type") in ("lora", "qlora"):
        return nothing("of an adapter run the adapter is trained")
    return impossible("name what is not to be trained:  train.freeze=[…]")


def teacher(value: Any, file: ForeignFile) -> Answer:
    return sets(objective="distil", objective__teacher=str(value))


def reshard(value: Any, file: ForeignFile) -> Answer:
    """Return whether weights are freed after a forward; older files name FSDP1's strategies."""
    if isinstance(value, bool):
        return sets(sharding__reshard_after_forward=value)
    return RULES["sharding_strategy"](value, file)


def data_set(value: Any, file: ForeignFile) -> Answer:
    return sets(data__path=hub_or_file(str(value)))


def thinking(value: Any, file: ForeignFile) -> Answer:
    """Return where a template's switch is set."""
    said = f"{{enable_thinking: {str(value).lower()}}}"
    return impossible(f"with a template of it:  'data.template_args={said}'")


def project(value: Any, file: ForeignFile) -> Answer:
    is_default = value == "huggingface"
    return nothing("Trackio's default") if is_default else sets(logging__project=str(value))


def timeout(value: Any, file: ForeignFile) -> Answer:
    return sets(launch__timeout=f"{int(value)}s")


def resumed(value: Any, file: ForeignFile) -> Answer:
    if value in (True, False):
        return nothing("a run goes on from its last checkpoint")
    return sets(model__init_from=str(value))


def ranks_of_node(value: Any, file: ForeignFile) -> Answer:
    nodes = int(file.value("num_machines") or 1)
    return sets(f"{nodes} nodes", launch__nproc_per_node=int(value) // nodes)


def nodes(value: Any, file: ForeignFile) -> Answer:
    return sets(launch__nodes=int(value)) if int(value) > 1 else nothing("one node is the default")


RULES = rules_of("every tool", globals())
"""By dotted name, or by its last part."""
SECTIONS = rules_of("sections", globals())
"""By the beginning of a dotted name."""
