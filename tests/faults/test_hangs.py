"""Hangs under a real torchrun: found in seconds, the right rank named, and the weights of an
undisturbed run at the end. hang_recovery.py prints them."""

import pytest
from hang_recovery import FAULTS, SLOW, hang
from stored import newest

from fsdp_trainer.checkpoint.digest import weights_digest

PLACES = {
    "stopped (SIGSTOP)": ("forward", 8),
    "holds a lock": ("backward", 8),
    "skips a collective": ("forward", 8),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return hang(tmp_path_factory.mktemp("whole") / "run", "").run


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_a_hang_costs_seconds_and_no_bit(whole, tmp_path, name):
    outcome = hang(tmp_path / "run", FAULTS[name], "launch.watchdog=true")
    assert outcome.code == 0, outcome.said
    assert outcome.noticed < (10 if "stopped" in name else 20), "far from torchrun's grace"
    assert outcome.resumed < outcome.noticed + 30, "far from torchrun's grace"
    assert (outcome.told["rank"], (outcome.told["phase"], outcome.told["step"])) == (
        1,
        PLACES[name],
    )
    assert "rank 1 on" in outcome.said
    assert outcome.run.column("step") == list(range(1, 13))
    assert weights_digest(newest(outcome.run)) == weights_digest(newest(whole))
    stacks = [file.read_text() for file in (outcome.run.folder / "hangs").rglob("rank-*.txt")]
    assert len(stacks) == 2
    assert any("/torch/distributed/" in text for text in stacks)


@pytest.mark.faults
def test_a_slow_rank_is_named_and_nobody_is_killed(whole, tmp_path):
    outcome = hang(
        tmp_path / "run", SLOW, "launch.watchdog=true", "launch.stall=1s", "logging.stragglers=1s"
    )
    assert outcome.code == 0, outcome.said
    assert not outcome.run.event("hang"), outcome.said
    assert not outcome.run.event("resume"), outcome.said
    assert {(e["rank"], e["phase"]) for e in outcome.run.event("straggler")} == {(1, "forward")}
    assert weights_digest(newest(outcome.run)) == weights_digest(newest(whole))
