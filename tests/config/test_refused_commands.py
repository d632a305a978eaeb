"""Command lines that cannot be meant: each is refused in one message, and nothing is written."""

import pytest
from folders import table

REFUSED = table("config/refused_commands.yaml")
LAUNCHED = ("RANK", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize("topic", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_type_and_nothing_is_written(
    topic, program, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, text in REFUSED[topic].get("files", {}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    before = {*tmp_path.rglob("*")}
    program.refuses(REFUSED[topic]["cases"], *REFUSED[topic].get("begins", "").split())
    assert {*tmp_path.rglob("*")} == before
