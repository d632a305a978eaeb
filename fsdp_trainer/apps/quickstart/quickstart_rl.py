"""The verb `quickstart` with task=sums: a model that adds badly improves by rewards."""

import json
from pathlib import Path

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.verbs import QuickstartConfig
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.launch.start import start_ranks

OVERRIDES = table_beside(__file__, "quickstart.yaml")["sums"]
NEXT = """
Where the files are
  {run}/metrics.jsonl                reward, answer_tokens, equal_groups … of every step
  {run}/samples.jsonl                answers with their rewards, during training

What to type next (your own prompts, first looked at, then answered and rewarded)
  fsdp-trainer preview objective=grpo 'objective.rewards=[number]' data.path=questions.jsonl \
model.init_from=FOLDER
  fsdp-trainer rewards data.path=questions.jsonl 'objective.rewards=[number]'
  fsdp-trainer objective=grpo 'objective.rewards=[number]' data.path=questions.jsonl \
model.init_from=FOLDER
"""


def quickstart_rl(cfg: QuickstartConfig) -> int:
    """Train on sums of which half are wrong, then with rewards, and print the reward's increase.

    The increase is from the first third of the steps to the last third.
    """
    steps = [f"train.steps={cfg.steps}"] if cfg.steps else []
    print("first a model that adds badly: half of the sums that it is trained on are wrong\n")
    if code := start([*OVERRIDES["model"], *OVERRIDES["wrong"], f"run.root={cfg.root}", *steps]):
        return code
    weak = Path(cfg.root) / "sums-half-wrong"
    print("\nnow it answers itself, and is rewarded where the answer is right\n", flush=True)
    own = [f"run.root={cfg.root}", f"model.init_from={weak}", *steps]
    if code := start([*OVERRIDES["model"], *OVERRIDES["rewarded"], *own]):
        return code
    run = Path(cfg.root) / "sums-rewarded"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    first, last = thirds(rewards)
    print(f"\nreward in the first third of the steps: {first:.2f}")
    print(f"reward in the last third:               {last:.2f}")
    print(NEXT.format(run=run), end="")
    return 0


def start(overrides: list[str]) -> int:
    return start_ranks(compose("train", overrides), overrides)


def thirds(values: list[float]) -> tuple[float, float]:
    size = max(1, len(values) // 3)
    return sum(values[:size]) / size, sum(values[-size:]) / size
