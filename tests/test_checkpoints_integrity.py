"""A checkpoint is whole or is not taken for one, and two that hold the same say so."""


def digest_of(world, run):
    told = world.command("verify", f"source={run.folder}")[0].out
    return next(line.split()[-1] for line in told.splitlines() if line.startswith("weights digest "))


def test_the_digest_of_weights_does_not_depend_on_who_wrote_them(train, world):
    """On 2 ranks, on 1, and sharded otherwise; learning changes it."""
    how = ["schedule=constant", "optim.lr=0"]
    digests = [
        digest_of(world, train("two", *how, "train.steps=1", ranks=2)),
        digest_of(world, train("one", *how, "train.steps=2")),
        digest_of(world, train("ddp", *how, "train.steps=1", "sharding=ddp", ranks=2)),
    ]
    assert len(set(digests)) == 1 and len(digests[0]) == 16
    assert digest_of(world, train("other", "schedule=constant", "train.steps=1")) != digests[0]
