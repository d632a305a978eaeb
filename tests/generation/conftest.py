"""Fixtures that tests of evaluations share."""

import json

import pytest


@pytest.fixture(scope="session")
def evaluate(world):
    """Return `evaluate(source, tasks, *options, ranks=1, code=0)`.

    It returns {task: {metric: value}}, or the error if the exit code is another one.
    """

    def run(source, tasks, *options, ranks=1, code=0):
        results = world.command(
            "evaluate", f"source={source} tasks=[{','.join(map(str, tasks))}] format=json",
            "launch.device=cpu launch.timeout=120s", *options, ranks=ranks, code=code,
        )  # fmt: skip
        assert all(rank.out == "" for rank in results[1:])
        return results[0].err if code else json.loads(results[0].out)

    return run
