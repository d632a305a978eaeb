"""The lighthouse only keeps who is there: groups train on when it comes back."""

from concurrent.futures import ThreadPoolExecutor

from replica_groups import GroupPools, lighthouse
from world import Run, wait_until


def test_groups_go_on_when_the_lighthouse_is_started_again_and_end_if_it_stays_away(
    world, input_words, tmp_path
):
    run = Run(tmp_path / "run")
    words = [*input_words, "train.steps=99999"]
    words += ["replicas.min=2 launch.timeout=8s"]

    def trains_on():
        before = len(run.metrics)
        wait_until(lambda: len(run.metrics) > before + 5 or training.done())
        assert not training.done()

    with ThreadPoolExecutor(1) as thread:
        with lighthouse() as address:
            pools = GroupPools(world, address)
            training = thread.submit(pools.train, run.folder, *words, code=1)
            trains_on()
        with lighthouse(int(address.rpartition(":")[2])):
            trains_on()
        training.result()
    pools.close()
    assert run["step"] == list(range(1, len(run.metrics) + 1))
    assert run.event("groups")[-1]["groups"] == 2
    (end,) = run.event("end")
    assert "no meeting of the groups for 8 s" in end["reason"]
