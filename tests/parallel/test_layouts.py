"""Each layout's run is asked whether it trains as one rank does, and as it was rehearsed and
planned."""

import pytest
import torch
from named_runs import LAYOUTS, RECORDED, RUNS, NamedRun
from recorded_step import calls, passed
from stored import assert_columns, assert_near, newest, stored

INEXACT = {"in eight bits": 2e-2, "in eight bits, with feedback": 2e-2}
"""Relative tolerance of losses and norms for layouts whose messages are rounded."""
ROUNDED = {"bfloat16", "pure bfloat16", "eight bits", "lion", "muon"}
"""Layouts whose tasks round numbers, or take their signs, so that an error may be a whole step."""


def reference_of(layout):
    """Return the run of the same task on one rank, which recomputes nothing."""
    words = RUNS[layout].words
    return NamedRun(1, tuple(w for w in words if not w.startswith(("sharding", "activation"))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_rank(ledger, layout):
    run, alone = ledger.run(layout), ledger.execute(reference_of(layout))
    near = INEXACT.get(layout, 1e-3 if layout in ROUNDED else 1e-5)
    assert_columns(run, alone, "step", "tokens")
    assert_near(run, alone, loss=near, grad_norm=10 * near)
    if near > 1e-5:
        return
    weights, expected = stored(newest(run)), stored(newest(alone))
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, *RECORDED])
def test_a_real_step_has_the_collectives_and_the_peak_of_its_rehearsal(ledger, layout):
    rehearsal, run = ledger.comparison(layout).rehearsal, ledger.run(layout)
    assert rehearsal.finishes, [one.problem for one in rehearsal.kinds] + rehearsal.mismatches
    for one in rehearsal.kinds:
        called, peak, work = run.steps[one.kind.rank]
        for name in ("forward products", "backward products"):
            assert one.work.get(name) == work.get(name), name
        assert calls(one.step.collectives, one.step.groups) == called
        assert 0.98 * one.peak <= peak.total <= 1.02 * one.peak + passed(one.step)
    known = [calls(one.step.collectives, one.step.groups) for one in rehearsal.kinds]
    assert all(called in known for called, *_ in run.steps), "also of ranks that were only counted"
