"""Pipeline parallelism: how blocks and steps are divided."""

import pytest
import yaml
from schedules import followed
from stored import assert_near
from world import write_chats

from fsdp_trainer.config.pipeline_schedules import SCHEDULES, Stages, divide_blocks
from fsdp_trainer.config.schema import Sharding


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_rank(schedule):
    sharding = Sharding(pipeline=4, pipeline_schedule=schedule)
    stages = Stages.of(sharding)
    numbers = {rank: stages.of_rank(rank) for rank in range(4)}
    count = 4 * SCHEDULES[schedule].stages
    assert sorted(n for own in numbers.values() for n in own) == list(range(count))
    for rank, own in numbers.items():
        assert [stages.rank_of(n) for n in own] == [rank] * len(own)


@pytest.mark.parametrize(
    "blocks, head, stages, sizes",
    yaml.safe_load("""
- [8, 0, 4, [2, 2, 2, 2]]
- [8, 2, 4, [1, 3, 3, 1]]
- [5, 1, 2, [3, 2]]
- [126, 1, 16, [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]]
- [3, 9, 3, [1, 1, 1]]
"""),
)
def test_blocks_are_divided_by_cost_and_the_head_counts(blocks, head, stages, sizes):
    parts = divide_blocks([1] * blocks, head, stages)
    assert [number for part in parts for number in part] == list(range(blocks))
    assert [len(part) for part in parts] == sizes


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv", "dualpipev"])
@pytest.mark.parametrize("ranks, count", [(2, 4), (4, 8), (4, 16), (8, 64)])
def test_torchs_schedules_wait_and_hold_as_long_as_is_said(name, ranks, count):
    """The forward pass and both halves of backward take equally long here."""
    sharding = Sharding(pipeline=ranks, pipeline_schedule=name)
    idle, held = followed(name, ranks, count)
    stages = Stages.of(sharding)
    assert idle == pytest.approx(stages.idle(count))
    assert held == [stages.in_flight(rank, count) for rank in range(ranks)]


def test_a_step_with_fewer_micro_batches_is_filled_up(train, tmp_path):
    how = (
        f"data.path={write_chats(tmp_path / 'few.jsonl', 14)} data.packing=none batch.rows=8"
        " batch.micro_rows=1 optim.eps=1e-3 schedule=constant train.epochs=1"
        " train.steps=null model.num_hidden_layers=4"
    )
    expected = train("whole", how)
    assert expected["step"][-1] == 2  # of 14 rows, the last six
    stages = "sharding.pipeline=2 sharding.pipeline_schedule=interleaved"
    run = train("stages", how, stages, ranks=2)
    assert run["tokens"] == expected["tokens"]
    assert_near(run, expected, loss=1e-5, grad_norm=1e-4)
