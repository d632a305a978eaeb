"""The story that `make pull-the-plug` tells is true."""

import subprocess
import sys

import pytest
from folders import REPO


@pytest.mark.faults
def test_the_plug_is_pulled_and_the_digest_is_equal(tmp_path):
    process = subprocess.run(
        [sys.executable, REPO / "tools/pull_the_plug.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("digest equal: yes") == 1
    assert "exit code 3, damaged" in process.stdout
