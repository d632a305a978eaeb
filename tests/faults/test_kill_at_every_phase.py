"""A rank, or the only one, killed hard as a phase begins: the same command resumes, and ends with
the weights of an undisturbed run."""

import inject
import pytest
from named_runs import NamedRun
from stored import assert_columns, assert_same_end, end_of, newest
from world import RankFailed, Run, read_json

STEP = 4  # the second checkpoint is written after it, and the first deleted
HOW = (
    "data.path=DATA/chats.jsonl", "schedule=constant", "batch.micro_rows=2", "train.steps=6",
    "checkpoint.every=2", "checkpoint.keep=1",
)  # fmt: skip
OF_RANK_0 = ("rename", "prune")  # others wait for it there
PHASES = [
    "data", "forward", "backward", "clip", "update", "log", "staging", "shards", "manifest",
    "rename", "prune", "agree",
]  # fmt: skip
QUICK = [("shards", 2, "sync"), ("rename", 1, "async")]
CASES = [(phase, ranks, mode) for phase in PHASES for ranks in (1, 2) for mode in ("sync", "async")]


@pytest.mark.parametrize(
    "phase, ranks, mode",
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.faults) for case in CASES],
)
def test_a_kill_costs_no_bit(ledger, world, tmp_path, phase, ranks, mode):
    whole = ledger.run(words=HOW, ranks=ranks)
    words = [*ledger.words_of(NamedRun(ranks, HOW)), f"checkpoint={mode}"]
    command = {"base": [], "ranks": ranks}
    victim = 0 if phase in OF_RANK_0 else ranks - 1
    seam = inject.at(phase, inject.kill, rank=victim, step=STEP)
    with pytest.raises(RankFailed, match=f"rank {victim}: died"):
        world.train(tmp_path / "run", *words, seam=seam, **command)
    killed = Run(tmp_path / "run")
    assert "finished" not in [event.get("reason") for event in killed.events]
    with (killed.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a half line
    run = world.train(tmp_path / "run", *words, **command)
    assert len(run.event("resume")) == 1, "the first start after the fault goes to the end"
    assert_columns(run, whole, "step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens")
    assert end_of(run) == ("end", 0)
    assert run.checkpoints == whole.checkpoints == ["step-00000006"], (
        "nothing half written or half deleted stays"
    )
    assert_same_end(run, whole)
    ours, theirs = (read_json(newest(each) / "trainer.json") for each in (run, whole))
    assert ours == theirs
