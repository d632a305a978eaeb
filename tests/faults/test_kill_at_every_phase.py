"""A rank, or all of them, killed hard as a phase begins: the same command resumes, and ends with
the weights of an undisturbed run."""

import pytest

STEP = 6  # the third checkpoint is written after it, and the first deleted
HOW = ["train.steps=10", "checkpoint.every=2", "checkpoint.keep=2"]
OF_RANK_0 = ("rename", "prune")  # others wait for it there
PHASES = [
    "data",
    "forward",
    "backward",
    "clip",
    "update",
    "log",
    "staging",
    "shards",
    "manifest",
    "rename",
    "prune",
    "agree",
]
QUICK = [("shards", "kill", "sync"), ("rename", "kill_all", "async")]  # in `make test`
CASES = [
    (phase, do, mode)
    for phase in PHASES
    for do in ("kill", "kill_all")
    for mode in ("sync", "async")
]


@pytest.fixture(scope="module")
def undisturbed(bench, inputs, tmp_path_factory):
    return bench.train(
        tmp_path_factory.mktemp("undisturbed") / "run",
        *HOW,
        *(f"{k}={v}" for k, v in inputs.items()),
    )


@pytest.mark.parametrize(
    ("phase", "do", "mode"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in QUICK else pytest.mark.faults)
        for case in CASES
    ],
)
@pytest.mark.grid(1)
def test_a_kill_costs_no_bit(bench, inputs, undisturbed, tmp_path, phase, do, mode):
    rank = 0 if phase in OF_RANK_0 else 1
    words = [*HOW, *(f"{k}={v}" for k, v in inputs.items()), f"checkpoint={mode}"]
    run = bench.train(
        tmp_path / "run", *words, faults=f"rank={rank} phase={phase} step={STEP} do={do}"
    )
    first, *later = run.attempts
    assert first.codes[rank] == -9, first
    assert do == "kill" or first.codes == [-9, -9], first
    assert len(later) == 1, "the first start after the fault goes to the end"
    assert run.digest == undisturbed.digest
    assert run.column("step") == list(range(1, 11))
    assert run.column("loss") == undisturbed.column("loss")
    assert run.checkpoints == undisturbed.checkpoints == ["step-00000008", "step-00000010"], (
        "nothing half written or half deleted stays"
    )
