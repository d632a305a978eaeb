"""The same as thirty_faults.py, with what must come of it."""

import time

import pytest
from thirty_faults import soak, table


@pytest.mark.faults
def test_a_run_with_thirty_random_faults_ends_with_the_weights_of_an_undisturbed_one(
    inputs, tmp_path, capsys
):
    began = time.monotonic()
    run, whole, happened = soak(
        tmp_path, [f"{k}={v}" for k, v in inputs.items()], faults=30, seed=1
    )
    with capsys.disabled():
        print(
            "\n" + table(run, whole, happened, time.monotonic() - began - whole.attempts[0].seconds)
        )
    assert len(happened) >= 30
    assert run.digest == whole.digest
    assert run.column("step") == whole.column("step")
    assert run.column("loss") == whole.column("loss")
