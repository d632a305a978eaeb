"""Every layout on two ranks that share one GPU, over NCCL 2.30 or newer, beside one rank.

    python -m benchmarks.two_ranks [--device cpu] [--only ring,experts] [--at-once 4]

Each case trains a tiny model for a few steps on the same rows as a run of one rank. Losses and norms
of gradients of all steps must agree. The exit code is 1 if a case differs or fails. It shows whether
NCCL, streams and events of a layout are right, not how fast it is. Where there are two GPUs each rank
has its own.

--device cpu: the same cases over gloo, which only shows that they run.
"""

import json
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_gpu import metrics, write_documents
from benchmarks.harness import arguments, python_process
from fsdp_trainer.config.devices import gpus, has_gpus
from fsdp_trainer.config.schema import Launch

STEPS = 4
SECONDS = 120
"""Time limit of a run; on a CPU, which may be shared, five times as long."""
COMPARED = ("loss", "grad_norm")
COMMON = (
    "model=tiny model.num_hidden_layers=2 model.vocab_size=260 tokenizer.path=demo:bytes"
    f" precision=fp32 batch.seq_len=128 batch.rows=4 batch.micro_rows=1 train.steps={STEPS}"
    " optim.lr=1e-3 schedule=constant checkpoint.every=null logging.every=1 launch.timeout=60s"
    " launch.watchdog=false"
    " data.too_long=split"
)
MIXTURE = (
    "model.family=qwen3_moe model.num_experts=4 model.num_experts_per_tok=2"
    " model.moe_intermediate_size=64"
)
REWARDS = (
    'objective=grpo objective.rewards=[{name:regex,pattern:"[a-z]"}] data.path=demo:sums'
    " data.too_long=drop objective.max_new_tokens=6 objective.samples=4"
)
BFLOAT16 = "precision.param_dtype=bfloat16"
RING = "sharding.context=2 sharding.context_method=ring"


@dataclass(frozen=True)
class Case:
    """Overrides of a run of two ranks, those that one rank gets, too, and what may differ."""

    words: str
    model: str = ""
    tolerance: float = 2e-3


CASES = {
    "fsdp": Case(""),
    "fsdp in bfloat16": Case("", BFLOAT16, 0.03),
    "tensor": Case("sharding.tensor=2"),
    "context": Case("sharding.context=2"),
    "ring": Case(RING),
    "ring in bfloat16": Case(RING, BFLOAT16, 0.03),
    "experts": Case("sharding.expert=2", MIXTURE),
    "pipeline": Case("sharding.pipeline=2"),
    "hsdp": Case("sharding=hsdp sharding.replicas=2"),
    "quantised messages": Case("sharding.quantize=both", tolerance=0.03),
    "offload": Case("optim.offload=cpu"),
    "compiled": Case("compile=enabled"),
    "rollout rank": Case("launch.rollout_ranks=1", REWARDS),
    "replica groups": Case(
        "launch.groups=2 launch.nproc_per_node=1 replicas.method=sync replicas.min=2"
    ),
}


class Runs:
    """Runs in one folder. device: cuda or cpu."""

    def __init__(self, folder: Path, device: str):
        self.folder, self.device = folder, device
        self.seconds = SECONDS if device == "cuda" else 5 * SECONDS
        shared = device == "cuda" and gpus(Launch()) < 2
        self.two = ["launch.nproc_per_node=2", *["launch.ranks_per_gpu=2"] * shared]

    def train(self, name: str, words: list[str]) -> str:
        """Train; return the end of what a run that failed has printed, or nothing."""
        place = [f"run.root={self.folder}", f"run.name={name}", f"launch.device={self.device}"]
        place += [f"data.path={self.folder}/docs.jsonl", f"data.cache={self.folder}/cache"]
        output = self.folder / f"{name}.txt"
        command = ["-m", "fsdp_trainer", *COMMON.split(), *place, *words]
        with python_process(command, output) as process:
            deadline = time.monotonic() + self.seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if process.returncode == 0:
                return ""
        reason = f"code {process.returncode}" if process.returncode else f"over {self.seconds} s"
        return f"{reason}: {output.read_text(errors='replace')[-1500:]}"

    def one_rank(self, model: str) -> str:
        """Train on one rank, as `train`. model: overrides of this kind of run."""
        return self.train(name_of(model), [*model.split(), "launch.nproc_per_node=1"])

    def compare(self, name: str, failed: dict[str, str]) -> dict[str, Any]:
        """Return how a case differs from one rank's run. failed: what `one_rank` returned."""
        case, began = CASES[name], time.monotonic()
        problem = failed[case.model] and f"on one rank, {failed[case.model]}"
        words = [*case.model.split(), *self.two, *case.words.split()]
        run = re.sub(r"\W+", "-", f"two {name}")
        problem = problem or self.train(run, words)
        result: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        if problem:
            return {"same": False, "problem": problem, **result}
        one, two = metrics(self.folder / name_of(case.model)), metrics(self.folder / run)
        pairs = [(a[key], b[key]) for a, b in zip(one, two, strict=True) for key in COMPARED]
        difference = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
        same = difference <= case.tolerance and len(one) == STEPS
        return {"same": same, "difference": float(f"{difference:.2g}"), **result}


def name_of(model: str) -> str:
    """Return the name of the run of one rank with these overrides."""
    return f"one-{[case.model for case in CASES.values()].index(model)}"


def main() -> None:
    """Run all cases, or those that --only names, and print how they differ."""
    given = arguments(__doc__, repeat=1, device="cuda", only="", at_once=0)
    if given.device == "cuda" and not has_gpus(Launch()):
        sys.exit("this machine has no GPU: try the cases with  make two-ranks ARGS=--device=cpu")
    names = given.only.split(",") if given.only else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"--only={','.join(unknown)}: there is no such case, only {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        write_documents(Path(folder) / "docs.jsonl", 40)
        runs = Runs(Path(folder), given.device)
        at_once = given.at_once or (5 if given.device == "cuda" else 1)
        models = list(dict.fromkeys(CASES[name].model for name in names))
        with ThreadPoolExecutor(at_once) as pool:
            failed = dict(zip(models, pool.map(runs.one_rank, models), strict=True))
            results = dict(
                zip(names, pool.map(lambda name: runs.compare(name, failed), names), strict=True)
            )
    for name, result in results.items():
        print(f"{name:20}{'same' if result['same'] else 'DIFFERENT':11}{json.dumps(result)}")
    sys.exit(0 if all(result["same"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
