"""`make prove-faults`: faults planted in folders and runs, each of which `prove` must name.

Honest folders and runs come first: of them it may say nothing. ONLY=WORD takes those whose names
have the word. Faults of a run are planted in its ranks by
prove_plants.py.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: threads do not survive the forks of ranks

from damaged_folders import (
    FOLDERS,
    HONEST,
    OUTPUT,
    UP,
    WEIGHTS,
    FolderFault,
    other_base_of_rope,
    set_keys,
    set_tensors,
    write_folders,
    wrong_in_folder,
    wrong_of,
    wrong_with,
)  # fmt: skip
from forked import Forked
from world import CommandResult, read_json, start_server, write_json
from zoo import HF, make_folder

ADAPTER = "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


# --- folders --------------------------------------------------------------------------------------


def wrong_place(folder: Path) -> None:
    """Let the index name another file of a tensor."""
    index = read_json(folder / INDEX)
    places = index["weight_map"]
    first, *_, last = sorted({*places.values()})
    places[next(name for name, file in places.items() if file == first)] = last
    write_json(folder / INDEX, index)


def cut(folder: Path) -> None:
    """Cut the end of the weights off."""
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def other_marks(folder: Path) -> None:
    """Let the template begin turns with a token that there is not."""
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|im_start|>", "<|im_begin|>"))


def zero_outputs(tensors: dict) -> None:
    """Set every B to 0, as before a training."""
    for name, tensor in tensors.items():
        tensor.mul_("lora_A" in name)


def shifted(tensors: dict) -> None:
    """Read a matrix seven numbers too far on."""
    tensors[UP] = tensors[UP].flatten().roll(7).reshape(tensors[UP].shape)


FOLDERS |= {
    "shard's offset": FolderFault("base", set_tensors(shifted), "base", "reference: matrices"),
    "RoPE lost in the export": FolderFault(
        "base",
        other_base_of_rope,
        "base",
        "reference: config.json",
    ),
    "tied head exported different": FolderFault(
        "base",
        set_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "base",
        "tensors",
    ),
    "misnamed tensor": FolderFault(
        "base", set_tensors(lambda t: t.update({"o.weight": t.pop(OUTPUT)})), "", "tensors"
    ),
    "other vocabulary": FolderFault(
        "base", set_keys("config.json", vocab_size=300), "", "promises"
    ),
    "shard that is not there": FolderFault(
        "shards", lambda folder: min(folder.glob("*.safetensors")).unlink(), "", "files"
    ),
    "MTP head that is not there": FolderFault(
        "base", set_keys("config.json", num_nextn_predict_layers=1), "", "promises"
    ),
    "MTP head that is there in part": FolderFault(
        "drafts",
        set_tensors(lambda t: t.pop("model.layers.3.enorm.weight")),
        "",
        "tensors",
    ),
    "other number format": FolderFault(
        "base", set_keys("config.json", dtype="bfloat16"), "", "promises"
    ),
    "index of other shards": FolderFault("shards", wrong_place, "", "files"),
    "copied in part": FolderFault("base", cut, "", "files"),
    "undefined numbers": FolderFault(
        "base", set_tensors(lambda t: t[UP].fill_(float("nan"))), "", "numbers"
    ),
    "template of other tokens": FolderFault("base", other_marks, "", "tokenizer and template"),
    "end that never ends": FolderFault(
        "base", set_keys("generation_config.json", eos_token_id=256), "", "tokenizer and template"
    ),
    "stale adapter": FolderFault(
        "adapter",
        set_keys("adapter_config.json", base_model_name_or_path="org/other"),
        "base",
        "adapter: base",
    ),
    "adapter of no module": FolderFault(
        "adapter",
        set_keys("adapter_config.json", target_modules=["q_proj", "v_proj", "c_proj"]),
        "base",
        "adapter: names",
    ),
    "adapter that does not move": FolderFault(
        "adapter", set_tensors(zero_outputs, ADAPTER), "base", "adapter: moves"
    ),
    "merged into another base": FolderFault(
        "merged",
        set_tensors(lambda t: t["model.norm.weight"].mul_(1.01)),
        "adapter",
        "merged: other tensors",
    ),
}
HONEST += [("base", "base"), ("shards", "base"), ("merged", "base")]

# --- runs -----------------------------------------------------------------------------------------

SMALL = [*HF, "batch.seq_len=128", "data.path=demo:backwards", "plan.world_size=2"]
RUNS = {
    "leak between documents": ("packing", "packed = alone"),
    "wrong mask": ("mask", "the mask"),
    "eos that is never learnt": ("mask", "the mask"),
    "dropped gradient of one rank": ("layout", "layout: gradients"),
    "divisor by local weight": ("layout", "layout: gradients"),
    "frozen tensor that moves": ("trained", "frozen weights stay"),
    "off by one after resume": ("resume", "resume, as many ranks"),
    "template that differs in chat": ("prompts", "prompts: chat"),
    "biases by the wrong sign": ("other_program", "transformers: routers' biases"),
    "biases by a mean over ranks": ("layout", "layout: routers' biases"),
    "biases of a rank's own counts": ("layout", "layout: copies"),
}
"""By fault of `prove_plants` the module of the check that names it, the only one that is asked,
and the check's name."""
ROUTERS = "deepseek_v3 loss.bias_update_speed=0.001"
"""Words of a run with routers whose biases move."""
HONEST_RUNS = {
    "sft qwen3": "base",
    "sft of shards, LoRA, tensor": "shards adapter=lora adapter.rank=4 sharding.tensor=2",
    "sft, frozen norms": "base train.freeze=['*norm*']",
    "sft, DoRA": "base adapter=dora adapter.rank=2",
    "dpo": "base objective=dpo data.path={pairs}",
    "orpo, LoRA": "base objective=orpo adapter=lora data.path={pairs}",
    "simpo": "base objective=simpo data.path={pairs}",
    "reward": "base objective=reward data.path={pairs}",
    "sft llama, context": "llama sharding.context=2",
    "sft gemma2": "gemma2",
    "sft mixtral": "mixtral",
    "sft deepseek, routers' biases": ROUTERS,
}
"""Configurations of other methods and families, of which `prove` may say nothing."""


def write_pairs(file: Path) -> None:
    """Write questions with a better and a worse answer."""
    rows = [
        {
            "prompt": f"What is {i} and {i + 3}?",
            "chosen": f"It is {2 * i + 3}, of course.",
            "rejected": f"I do not know {i}.",
        }
        for i in range(60)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))


def wrong_in_run(words: str, folders: Path, planted: str = "") -> list[str]:
    """Return the checks of a run that are not ok. words: its model, then its keys."""
    model, *keys = words.format(pairs=folders / "pairs.jsonl").split()
    if not (folders / model).exists():
        make_folder(folders / model, model, max_position_embeddings=256)
    own = {"FSDP_TRAINER_IMPORT": "prove_plants", "PLANTED": planted} if planted else {}
    own |= {"CHECK": RUNS[planted][0]} if planted else {}
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as root:
        place = [f"model.init_from={folders / model}", f"run.root={root}", "run.name=run"]
        line = [sys.executable, "-m", "fsdp_trainer", "prove", *SMALL, *place, *keys, "format=json"]
        done = Forked(line, Path(root) / "log", own | {"PYTHONPATH": paths})
        code, said = done.wait(1800), done.said
    answers = [one for one in said.splitlines() if one.startswith('{"checks"')]
    return wrong_of(CommandResult(code, answers[-1] if answers else "", said))


def main() -> int:
    """Print a line for each fault; return 1 if one is not named, or an honest one is."""
    word, code = os.environ.get("ONLY", ""), 0

    def line(name: str, wrong: list[str], expected: str) -> None:
        nonlocal code
        is_right = (expected in "\n".join(wrong)) if expected else not wrong
        code = code if is_right else 1
        said = ", ".join(wrong) or "nothing"
        print(
            f"{'ok' if is_right else 'MISSED' if expected else 'FALSE':8}{name}: {said}", flush=True
        )

    start_server()
    with tempfile.TemporaryDirectory() as scratch:
        folders = Path(scratch)
        write_folders(folders)
        for source, reference in HONEST:
            name = f"honest {source} beside {reference or 'nothing'}"
            if word in name:
                given = folders / reference if reference else None
                line(name, wrong_in_folder(folders / source, given), "")
        for name, fault in FOLDERS.items():
            if word in name:
                line(name, wrong_with(fault, folders), fault.check)
        write_pairs(folders / "pairs.jsonl")
        for name, words in HONEST_RUNS.items():
            if word in (name := f"honest run: {name}"):
                line(name, wrong_in_run(words, folders), "")
        for name, (_, check) in RUNS.items():
            if word in name:
                keys = ROUTERS if "biases" in name else "base train.freeze=['*q_norm*']"
                line(name, wrong_in_run(keys, folders, name), check)
    return code


if __name__ == "__main__":
    sys.exit(main())
