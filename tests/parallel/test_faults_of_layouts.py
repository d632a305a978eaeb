"""All stages of a pipeline meet alike what goes wrong in one of them."""

import signal
from functools import partial

import inject
from inject import SPIKED
from stored import assert_same_end
from world import SPIKY


def test_a_bad_step_a_spike_and_a_stop_are_met_by_all_stages_alike(train):
    """A gradient that is not finite on the last rank, a spike, then a signal to the first one."""
    how = [
        *SPIKY, "sharding.pipeline=2 batch.micro_rows=1 train.on_spike=rewind",
        f"train.steps={SPIKED + 2}",
    ]  # fmt: skip
    faults = [inject.infinite_gradient(3), inject.garbage()]
    whole = train("whole", *how, ranks=2, seam=inject.together(*faults))
    assert [event["step"] for event in whole.event("skipped")] == [3]
    (rewound,) = whole.event("rewind")
    assert (rewound["step"], rewound["to"]) == (SPIKED, 18)

    signal_once = inject.at(
        "backward", partial(inject.send, signal.SIGUSR1), rank=0, step=10, nth=1
    )
    stopped = train("stopped", *how, ranks=2, seam=inject.together(*faults, signal_once), code=75)
    step = len(stopped.metrics)
    assert SPIKED > step > 3
    assert stopped.checkpoints[-1] == f"step-{step:08d}"
    ended = train("stopped", *how, ranks=2, seam=inject.garbage())
    assert_same_end(ended, whole)
