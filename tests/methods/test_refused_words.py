"""Words that a method cannot use are refused before anything starts, with what to type instead."""

from pathlib import Path

import pytest
from world import cli

GRPO = "objective=grpo objective.rewards=[exact]"
SERVER = f"{GRPO} objective.server=http://localhost:1"
ONE = f"{GRPO} launch.rollout_ranks=1"
REFUSED = {
    # a teacher
    "objective=distil sharding.pipeline=2 sharding.expert=2 loss.z_loss=0.1": [
        "is required: name the model to learn from", "sharding.pipeline=1", "sharding.expert=1",
        "objective=sft",
    ],
    "objective=distil objective.top_k=8 data.streaming=true data.packing=stream": [
        "data.streaming=false", "data.packing=best_fit",
    ],
    "objective=distil objective.teacher=nowhere objective.beta=1": [
        "there is no such folder", "objective=dpo",
    ],
    # pairs
    "objective=simpo sharding.pipeline=2 data.streaming=true data.packing=stream"
    " loss.label_smoothing=0.1 loss.z_loss=0.1": [
        "sharding.pipeline=1", "data.streaming=false", "data.packing=best_fit",
        "objective.label_smoothing", "objective=sft",
    ],
    "objective=dpo objective.reference=nowhere objective.gamma=1": [
        "a run nor a Hugging Face folder", "objective=simpo",
    ],
    "objective.beta=1 objective.reference=none": [
        "objective=dpo", "objective=dpo  or  objective=ipo",
    ],
    # a reward model
    "objective=reward train.sample_prompts=[Hello] objective.beta=1": [
        "writes no text", "objective=dpo",
    ],
    # answers
    "objective=grpo objective.rewards=[] sharding.pipeline=2 data.streaming=true"
    " data.packing=best_fit data.too_long=truncate data.validation=demo:backwards/heldout"
    " batch.seq_len=200 loss.z_loss=0.1 sharding.expert=2 objective.kl=0.1 objective.beta=0.2": [
        "objective.rewards=[exact]", "sharding.pipeline=1", "data.streaming=false", "Leave it out",
        "data.too_long=drop", "data.validation=null", "batch.seq_len=512", "objective=sft",
        "sharding.expert=1", "objective=dpo",
    ],
    "objective.rewards=[exact] objective.samples=4": ["objective=grpo"],
    f"{GRPO} objective.kl=0.1 objective.reference=none": ["objective.kl=0"],
    f"{GRPO} objective.reference=nowhere": ["objective.kl=0.01"],
    f"{GRPO} objective.kl=1 objective.reference=nowhere": ["there is no such"],
    f"{GRPO} objective.ahead=3 objective.updates=2": ["objective.ahead=4"],
    f"{GRPO} objective.ahead=1 objective.round_tokens=8": ["objective.ahead=2  or more"],
    f"{GRPO} objective.unfinished=drop": ["objective.round_tokens=N"],
    # environments
    f"{GRPO} batch.seq_len=512 objective.turns=3": ["objective.environment=NAME"],
    "objective=grpo objective.environment=calculater": ["Did you mean  calculator"],
    "objective=grpo objective.environment=gone.py:Name": ["gone.py is no file"],
    # what generates
    f"{ONE} objective.server=http://localhost:1": ["objective.server=null"],
    f"{ONE} sharding.tensor=2": ["launch.rollout_ranks=2"],
    "launch.rollout_ranks=1": ["Only counts with  objective=grpo"],
    f"{GRPO} adapter=lora objective.server=localhost": ["objective.server=http://localhost:8000"],
    f"{GRPO} adapter=lora objective.server=http://me:secret@host": ["VLLM_API_KEY"],
    SERVER: ["objective.server_folder=FOLDER"],
    f"{SERVER} objective.server_folder={Path(__file__).parent}": [
        "holds something else than a model"
    ],
    f"{GRPO} objective.max_staleness=2": ["only counts with  objective.server=URL"],
}  # fmt: skip
"""Words that are typed together → parts of the message."""


@pytest.mark.parametrize("typed", REFUSED)
def test_what_a_method_cannot_do_is_refused_before_anything_starts(typed):
    said = cli("data.path=demo:sums", "tokenizer.path=demo:bytes", *typed.split(), code=2).err
    for part in REFUSED[typed]:
        assert part in said
