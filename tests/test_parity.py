"""The same data gives the same losses, however the work is split into ranks, micro-batches, rows and recomputation."""

import pytest


def test_x(train):
    import time

    for ranks in (2, 2, 1, 2, 4):
        s = time.time()
        run = train(f"r{ranks}-{s}", "train.steps=20", ranks=ranks)
        print(
            ranks,
            time.time() - s,
            run.column("loss")[::5],
            run.column("loss")[-1],
            run.column("grad_norm")[-1],
            run.column("step_seconds")[3:6],
        )
