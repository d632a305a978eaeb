"""Check that a rebuild changes nothing that a user can see: `make same` or `tools/same.py COMMIT`.

For a rebuild that must keep every number: call it with the commit before the work, after each
step. The first call checks that commit out, records it in build/same/COMMIT/ and keeps the record;
each call then records the working tree and lists what differs. Takes some minutes on two cores.

    compose   the composed configuration of every recipe
    plan      the plan of every recipe as JSON, on GPUS and WORLDS
    preview   rows as JSON, of every kind of data that a method reads
    runs      tiny trainings, RUNS: metrics without times, and digests of exported weights
    resumed   RESUMED: runs that the recorded commit stopped half way, continued from its
              checkpoints and its token cache

Only command lines are used, so that the recorded commit may have any shape inside. To cover a new
method or layout, add a line to RUNS, and delete build/same. Runs are exact only on one machine:
do not compare records of two.

usage: tools/same.py COMMIT [PART ...]    PART: one of the names above; none: all of them;
                                          runs=dpo or resumed=lora: those whose name has the word
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GPUS = ["h100", "a100", "l40s"]
WORLDS = [1, 8, 64]
TIMES = re.compile(r"seconds|per_second|^time$|memory|phases|mfu")
"""Columns of metrics.jsonl that are measured and not computed."""
AT_ONCE = 2
CALL = """
import contextlib, io, json, sys
from fsdp_trainer.cli import main
answers = []
for line in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(line)
    answers.append([code, out.getvalue()])
print(json.dumps(answers))
"""

SMALL = [
    "model=tiny", "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2",
    "model.head_dim=8", "model.initializer_range=0.1", "precision=fp32", "batch.seq_len=64",
    "batch.rows=4", "batch.micro_rows=1", "optim.lr=3e-3", "schedule=constant", "train.steps=3",
    "tokenizer.path=demo:bytes", "launch.device=cpu", "launch.watchdog=false",
    "checkpoint.export_hf=true",
]  # fmt: skip
EXPERTS = [
    "model.family=qwen3_moe", "model.num_experts=4", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=12",
]  # fmt: skip
PAIRS, LABELLED, SUMS = "data.path=pairs.jsonl", "data.path=labelled.jsonl", "data.path=demo:sums"
GRPO = [
    SUMS, "objective=grpo", "objective.samples=2", "objective.max_new_tokens=6",
    'objective.rewards=[{name: regex, pattern: "[a-z]"},{name: length, max: 4, unit: tokens}]',
]  # fmt: skip
TEACHER = ["objective=distil", "objective.teacher=teacher"]
LORA, DORA, QLORA = "adapter=lora", "adapter=dora", "adapter=qlora"
RUNS: dict[str, tuple[int, list[str]]] = {
    "sft 1": (1, ["data.validation=0.2", "train.validate_every=2"]),
    "sft 2": (2, []),
    "sft 4": (4, ["batch.rows=6"]),
    "bf16 2": (2, ["precision=bf16"]),
    "hsdp 4": (4, ["sharding.strategy=hsdp", "sharding.replicas=2"]),
    "ddp 2": (2, ["sharding.strategy=ddp"]),
    "no packing 1": (1, ["data.packing=none"]),
    "muon 2": (2, ["optim=muon"]),
    "8-bit 1": (1, ["optim=adamw_8bit"]),
    "z-loss 1": (1, ["loss.z_loss=1e-3", "loss.label_smoothing=0.1"]),
    "lora 1": (1, [LORA]),
    "lora 2": (2, [LORA, "adapter.rank=4"]),
    "dora tensor 2": (2, [DORA, "sharding.tensor=2"]),
    "qlora 1": (1, [QLORA]),
    "tensor 2": (2, ["sharding.tensor=2"]),
    "tensor context 4": (4, ["sharding.tensor=2", "sharding.context=2"]),
    "context 2": (2, ["sharding.context=2"]),
    "ring 2": (2, ["sharding.context=2", "sharding.context_method=ring"]),
    "pipeline 2": (2, ["sharding.pipeline=2"]),
    "pipeline lora 4": (4, ["sharding.pipeline=2", LORA]),
    "experts 1": (1, EXPERTS),
    "experts 2": (2, [*EXPERTS, "sharding.expert=2"]),
    "experts tensor 4": (4, [*EXPERTS, "sharding.expert=2", "sharding.tensor=2"]),
    "dpo 1": (1, [PAIRS, "objective=dpo"]),
    "dpo 2": (2, [PAIRS, "objective=dpo", "data.validation=0.2", "train.validate_every=2"]),
    "dpo lora 2": (2, [PAIRS, "objective=dpo", LORA]),
    "dpo tensor 2": (2, [PAIRS, "objective=dpo", "sharding.tensor=2"]),
    "ipo 2": (2, [PAIRS, "objective=ipo"]),
    "simpo 2": (2, [PAIRS, "objective=simpo"]),
    "orpo 4": (4, [PAIRS, "objective=orpo"]),
    "kto 1": (1, [LABELLED, "objective=kto"]),
    "kto 2": (2, [LABELLED, "objective=kto", LORA]),
    "reward 1": (1, [PAIRS, "objective=reward"]),
    "reward 2": (2, [PAIRS, "objective=reward", "objective.center_weight=0.01"]),
    "distil 1": (1, TEACHER),
    "distil 2": (2, [*TEACHER, "objective.divergence=reverse"]),
    "distil tensor 2": (2, [*TEACHER, "sharding.tensor=2"]),
    "distil stored 1": (1, [*TEACHER, "objective.top_k=7"]),
    "distil stored 4": (4, [*TEACHER, "objective.top_k=7", "data.validation=0.2"]),
    "grpo 1": (1, GRPO),
    "grpo 2": (2, [*GRPO, "objective.updates=2"]),
    "grpo lora kl 2": (2, [*GRPO, LORA, "objective.kl=0.1"]),
    "grpo reference 1": (1, [*GRPO, "objective.kl=0.1"]),
    "grpo tensor 2": (2, [*GRPO, "sharding.tensor=2"]),
}
"""Trainings by name: the number of ranks, and overrides beside SMALL."""
RESUMED = [
    "sft 2", "lora 2", "dpo 2", "kto 2", "distil 1", "distil stored 1", "grpo 2", "experts 2",
]  # fmt: skip
PREVIEWS = {
    "chats": [],
    "unpacked": ["data.packing=none"],
    "pairs": [PAIRS, "objective=dpo"],
    "labelled": [LABELLED, "objective=kto"],
    "prompts": GRPO,
    "all": ["data.loss_on=all", "data.packing=stream"],
}


class Tree:
    """A checkout of the package, whose command lines are run in a folder of input files."""

    def __init__(self, package: Path, folder: Path):
        self.folder = folder
        self.word = ""
        """Only trainings whose name contains it are run."""
        self.environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder)

    def lines(self, lines: list[list[str]]) -> list[Any]:
        """Run command lines in one process; return the exit code and the output of each."""
        text = self.run(["-c", CALL], json.dumps(lines))
        return json.loads(text.splitlines()[-1])

    def run(self, words: list[str], text: str = "") -> str:
        """Run Python with these words and return its output. Raises SystemExit if it fails."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder, env=self.environment, input=text, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 3):  # 3: the plan does not fit
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    def train(self, name: str, ranks: int, overrides: list[str], cache: str = "cache") -> None:
        """Train into runs/NAME."""
        given = {word.partition("=")[0] for word in overrides}
        words = [word for word in SMALL if word.partition("=")[0] not in given]
        data = [] if "data.path" in given else ["data.path=chats.jsonl"]
        place = [f"run.name={name}", f"launch.nproc_per_node={ranks}", f"data.cache={cache}"]
        self.run(["-m", "fsdp_trainer", "train", *words, *data, *place, *overrides])

    def result(self, name: str) -> dict[str, Any]:
        """Return the metrics of runs/NAME without times, and the digest of each exported file."""
        run = self.folder / "runs" / name
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [{k: v for k, v in line.items() if not TIMES.search(k)} for line in lines]
        files = [path for path in run.glob("*/*.safetensors") if path.parent.name != "checkpoints"]
        assert files, f"{run} exported nothing"
        digests = {
            f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(files)
        }
        return {"metrics": metrics, **digests}


def write_data(folder: Path) -> None:
    """Write chats, pairs and labelled answers, the same each time."""
    chats = [
        {"prompt": chr(97 + i % 26) * (1 + i % 9), "completion": f"{i * i % 97}" + "!" * (i % 7)}
        for i in range(60)
    ]
    pairs = [
        {"prompt": f"{i}+{i % 7}?", "chosen": f"{i + i % 7}" + "!" * (i % 4), "rejected": f"no {i}"}
        for i in range(30)
    ]
    labelled = [
        {"prompt": f"{i}?", "completion": f"{i * 7 % 13}", "label": i % 3 > 0} for i in range(40)
    ]
    for name, rows in (("chats", chats), ("pairs", pairs), ("labelled", labelled)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


def recipes() -> list[str]:
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


def compose(tree: Tree, recorded: Path) -> dict[str, Any]:
    """Return the composed configuration of each recipe."""
    lines = [["train", f"+recipe={name}", "--cfg", "job"] for name in recipes()]
    return dict(zip(recipes(), tree.lines(lines), strict=True))


def plan(tree: Tree, recorded: Path) -> dict[str, Any]:
    """Return the plan of each recipe, on each of GPUS and WORLDS."""
    cases = [(name, gpu, world) for name in recipes() for gpu in GPUS for world in WORLDS]
    lines = [
        ["plan", "plan.format=json", f"+recipe={name}", f"plan.gpu={gpu}", f"plan.world_size={n}"]
        for name, gpu, n in cases
    ]
    answers = []
    for line, (code, out) in zip(lines, tree.lines(lines), strict=True):
        assert code in (0, 2, 3), line
        answers.append([code, json.loads(out) if out else None])
    return {" ".join(map(str, case)): answer for case, answer in zip(cases, answers, strict=True)}


def preview(tree: Tree, recorded: Path) -> dict[str, Any]:
    """Return the rows of each kind of data."""
    words = ["preview.format=json", "preview.rows=4", "data.cache=cache"]
    small = [word for word in SMALL if not word.startswith(("train.", "launch.", "checkpoint."))]
    lines = []
    for own in PREVIEWS.values():
        data = [] if "data.path=" in " ".join(own) else ["data.path=chats.jsonl"]
        lines.append(["preview", *small, *words, *data, *own])
    return dict(zip(PREVIEWS, tree.lines(lines), strict=True))


def runs(tree: Tree, recorded: Path) -> dict[str, Any]:
    """Return the results of all RUNS."""
    shutil.rmtree(tree.folder / "runs", ignore_errors=True)
    tree.train("teacher", 1, ["model.hidden_size=16", "run.seed=7", "data.path=chats.jsonl"])
    shutil.rmtree(tree.folder / "teacher", ignore_errors=True)
    (tree.folder / "runs" / "teacher" / "hf").rename(tree.folder / "teacher")

    def train(name: str) -> dict[str, Any]:
        ranks, overrides = RUNS[name]
        # a new cache for each: what a second model says is stored there, and a last bit of it
        # depends on the ranks that computed it
        cache = f"cache of {name}"
        shutil.rmtree(tree.folder / cache, ignore_errors=True)
        tree.train(name, ranks, overrides, cache)
        return tree.result(name)

    return at_once(train, [name for name in RUNS if tree.word in name])


def resumed(tree: Tree, recorded: Path) -> dict[str, Any]:
    """Return the results of RESUMED, each started by the recorded commit and continued here."""
    for name in ("cache of halves", "teacher"):
        if tree.folder != recorded:
            shutil.rmtree(tree.folder / name, ignore_errors=True)
            shutil.copytree(recorded / name, tree.folder / name)

    def train(name: str) -> dict[str, Any]:
        ranks, overrides = RUNS[name]
        half, whole = recorded / "halves" / name, tree.folder / "runs" / f"{name} resumed"
        if not half.exists():
            tree.train(f"{name} half", ranks, [*overrides, "train.steps=2"], "cache of halves")
            half.parent.mkdir(exist_ok=True)
            (tree.folder / "runs" / f"{name} half").rename(half)
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(half, whole)
        tree.train(whole.name, ranks, [*overrides, "train.steps=4"], "cache of halves")
        return tree.result(whole.name)

    return at_once(train, [name for name in RESUMED if tree.word in name])


def at_once(function: Any, names: list[str]) -> dict[str, Any]:
    """Return the results of `function(name)` by name, computed AT_ONCE at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


PARTS = {"compose": compose, "plan": plan, "preview": preview, "runs": runs, "resumed": resumed}


def recorded_at(commit: str, parts: list[str]) -> tuple[dict[str, Any], Path]:
    """Return the record of a commit and its folder, made first if it is missing."""
    home = ROOT / "build" / "same" / commit
    file, folder, checkout = home / "record.json", home / "files", home / "tree"
    record = json.loads(file.read_text()) if file.exists() else {}
    if missing := [part for part in parts if part not in record]:
        if not checkout.exists():
            text = ["git", "-C", str(ROOT), "worktree", "add", "-f", "--detach"]
            subprocess.run([*text, str(checkout), commit], check=True, capture_output=True)
        tree = Tree(checkout, folder)
        for part in missing:
            print(f"recording {part} of {commit}", flush=True)
            record[part] = PARTS[part](tree, folder)
            file.write_text(json.dumps(record))
    return record, folder


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Return a line for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [
            line
            for name in names
            for line in differences(old.get(name), new.get(name), f"{place} · {name}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{place}[{i}]")]
    return [] if old == new else [f"{place}: {str(old)[:300]} → {str(new)[:300]}"]


def main() -> int:
    words = [word.partition("=")[::2] for word in sys.argv[2:] or PARTS]
    if len(sys.argv) < 2 or (unknown := {part for part, _ in words} - PARTS.keys()):
        print(__doc__.rpartition("\n\n")[2], *(unknown if sys.argv[1:] else ()), file=sys.stderr)
        return 2
    name = ["git", "-C", str(ROOT), "rev-parse", "--short", sys.argv[1]]
    commit = subprocess.run(name, check=True, capture_output=True, text=True).stdout.strip()
    old, recorded = recorded_at(commit, [part for part, _ in words])
    tree = Tree(ROOT, ROOT / "build" / "same" / "now")
    lines: list[str] = []
    for part, tree.word in words:
        print(f"comparing {part}", flush=True)
        new = PARTS[part](tree, recorded)
        expected = {name: old[part].get(name) for name in new} if tree.word else old[part]
        lines += differences(expected, new, part)
    print("".join(f"{line}\n" for line in lines[:40]), end="")
    what = f"{len(lines)} values differ" if lines else "nothing differs"
    print(f"{what} from {commit}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
