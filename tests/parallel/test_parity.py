"""The same data gives the same losses and gradient norms, however the work is split into ranks,
micro-batches, rows and recomputation."""

import json
import math

import inject
import pytest
import torch
import torch.nn.functional as F
from stored import newest, stored
from world import SMALL, write_chats

import fsdp_trainer

COMMON = [
    "schedule=constant",
    "optim.grad_clip=0.5",
]  # so that the first steps of a long run are those of a short one


@pytest.fixture(scope="module")
def alone(world, inputs, tmp_path_factory):
    """The reference: one rank, one micro-batch a step, nothing recomputed. By its overrides."""
    runs: dict[tuple, tuple] = {}

    def reference(*overrides: str) -> tuple[list[float], list[float]]:
        if overrides not in runs:
            folder = tmp_path_factory.mktemp("alone") / "run"
            run = world.train(
                folder,
                *(f"{k}={v}" for k, v in inputs.items()),
                *COMMON,
                "train.steps=20",
                *overrides,
            )
            runs[overrides] = run.column("loss"), run.column("grad_norm")
        return runs[overrides]

    return reference


@pytest.fixture
def same(train, alone):
    """A training on `ranks` with `how` has the reference's losses and norms."""

    def check(
        ranks: int, *how: str, common: tuple[str, ...] = (), steps: int = 4, **options
    ) -> None:
        how = (*COMMON, f"train.steps={steps}", *common, *how)
        run = train("other", *how, ranks=ranks, **options)
        loss, norm = alone(*common)
        assert run.column("step") == list(range(1, steps + 1))
        assert run.column("loss") == pytest.approx(loss[:steps], rel=1e-5)
        assert run.column("grad_norm") == pytest.approx(norm[:steps], rel=1e-4)
        assert loss[-1] < loss[0] - 0.5, (
            "the reference must learn and be clipped, else this shows nothing"
        )
        assert max(norm) > 0.5, "the reference must learn and be clipped, else this shows nothing"

    return check


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks(same, ranks):
    same(ranks)  # with one micro-batch of 6 rows the other ranks have nothing but empty rows


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro_rows"), [(2, 2), (4, 1)])
@pytest.mark.grid(1)
def test_with_accumulation_and_rows_that_do_not_divide(same, ranks, micro_rows):
    same(ranks, f"batch.micro_rows={micro_rows}", common=("batch.rows=7",))


WAYS = [
    (2, ["sharding=ddp", "sharding.accumulate=unsharded"]),
    (
        2,
        [
            "sharding.reshard_after_forward=false",
            "activation_checkpoint=selective",
            "activation_checkpoint.save=[attention]",
        ],
    ),
    (2, ["sharding.cpu_offload=true", "sharding.blocks_per_unit=2", "sharding.prefetch=0"]),
    (
        4,
        [
            "sharding.reshard_after_forward=2",
            "sharding.blocks_per_unit=2",
            "activation_checkpoint=full",
        ],
    ),
    (2, ["sharding.prefetch=2", "activation_checkpoint=full", "model.attention=mask"]),
    (
        1,
        [
            "activation_checkpoint=selective",
            "activation_checkpoint.every=2",
            "model.attention=mask",
        ],
    ),
    (1, ["activation_checkpoint=full", "activation_checkpoint.every=2"]),
    (1, ["activation_checkpoint=selective", "activation_checkpoint.save=[matmul]"]),
    (
        4,
        [
            "activation_checkpoint=selective",
            "sharding=hsdp",
            "sharding.replicas=2",
            "sharding.accumulate=unsharded",
        ],
    ),
    (
        2,
        [
            "activation_checkpoint=full",
            "sharding.blocks_per_unit=2",
            "sharding.accumulate=unsharded",
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how"), WAYS, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
@pytest.mark.grid(3)
def test_every_way_of_sharding_and_recomputing(same, ranks, how):
    same(ranks, "batch.micro_rows=1", *how, common=("batch.rows=7",))


@pytest.mark.slow
@pytest.mark.further
def test_an_untied_model(same):
    # the embedding, a unit of its own, is not gathered in backward
    same(2, "batch.micro_rows=2", common=("model.tie_word_embeddings=false",))


@pytest.mark.slow
@pytest.mark.further
def test_a_qwen3(same):
    same(2, "batch.micro_rows=2", common=("model.family=qwen3", "model.head_dim=16"))


@pytest.mark.slow
def test_values_are_clipped_before_the_norm_on_shards_as_in_one_process(same):
    same(2, common=("optim.grad_clip_value=0.01",))


@pytest.mark.slow
def test_packed_as_unpacked(train, tmp_path):
    """A step that holds all samples does not depend on how they are laid into rows."""
    data = f"data.path={write_chats(tmp_path / 'few.jsonl', 24)}"
    packed_rows = int(
        train("probe", data, "train.steps=0").out.split(" rows an epoch")[0].split()[-1]
    )
    assert packed_rows < 20
    packed = train(
        "packed", data, "train.epochs=6", f"batch.rows={packed_rows}", "batch.micro_rows=1"
    )
    alone = train(
        "alone",
        data,
        "train.epochs=6",
        "batch.rows=24",
        "batch.micro_rows=4",
        "data.packing=none",
        ranks=2,
    )
    long = train(
        "long", data, "train.epochs=1", "batch.rows=1000", "batch.micro_rows=1", "batch.seq_len=512"
    )
    assert packed.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    assert packed.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-4)
    assert packed.column("supervised_tokens") == alone.column("supervised_tokens")
    assert packed.column("tokens") == alone.column("tokens"), "padding is not counted"
    assert long.column("loss")[0] == pytest.approx(alone.column("loss")[0], rel=1e-5)


@pytest.mark.slow
def test_weights_of_messages_count_in_numerator_and_divisor(train, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q" * (i % 5)},
                {"role": "assistant", "content": f"{i}", "weight": 0.25 * (1 + i % 4)},
            ]
        }
        for i in range(40)
    ]
    (tmp_path / "weighted.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.path={tmp_path / 'weighted.jsonl'}", "train.steps=4"]
    one, two = train("one", *data), train("two", *data, "batch.micro_rows=1", ranks=2)
    assert one.column("loss") == pytest.approx(two.column("loss"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bf16_is_near_fp32(train, alone, ranks):
    run = train("bf16", *COMMON, "train.steps=8", "precision.param_dtype=bfloat16", ranks=ranks)
    assert run.column("loss") == pytest.approx(alone()[0][:8], rel=0.02)
    assert run.column("loss") != alone()[0][:8]


def print_formats(rotate, x, cosine, sine):
    """Print the formats in which a block rotates its queries and keys."""
    print("rotates", x.dtype, "by", cosine.dtype, sine.dtype)
    return rotate(x, cosine, sine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rotations"), [("olmo2", torch.float32), ("llama", torch.bfloat16)]
)
def test_rotations_that_a_family_keeps_in_float32_are_not_rounded_in_bf16(train, family, rotations):
    how = [
        f"model.family={family}",
        "model.num_key_value_heads=4",
        "precision.param_dtype=bfloat16",
        "activation_checkpoint=full",
    ]
    run = train(
        family, *how, "train.steps=1", seam=inject.around("rotary_embedding", print_formats)
    )
    lines = {line for line in run.out.splitlines() if line.startswith("rotates")}
    assert lines == {f"rotates torch.bfloat16 by {rotations} {rotations}"}, "in recomputation too"


@pytest.mark.slow
@pytest.mark.further
def test_pure_bf16_trains_with_states_of_two_bytes_and_is_near_fp32(train, alone):
    base = [
        "precision=pure_bf16" if override == "precision=fp32" else override for override in SMALL
    ]
    run = train("pure", *COMMON, "train.steps=20", base=base, ranks=2)
    assert run.column("loss") == pytest.approx(alone()[0], rel=0.05), (
        "weights are rounded at every step: not as near as bf16 compute alone"
    )
    dtypes = {
        name: t.dtype for name, t in stored(newest(run)).items() if not name.endswith("/step")
    }
    assert len([name for name in dtypes if name.startswith("optimizer/")]) == 2 * len(
        [name for name in dtypes if name.startswith("weights/")]
    )
    assert set(dtypes.values()) == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, []),
        (1, ["activation_checkpoint=full"]),
        (1, ["activation_checkpoint=budget", "activation_checkpoint.budget=0.3"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.further
def test_compiled_as_eager(same, compiled, ranks, how):
    same(ranks, *compiled, *how, steps=3, seam=inject.no_kernels())


@pytest.mark.slow
def test_weights_at_the_start_do_not_depend_on_ranks_nor_sharding(train):
    runs = [
        train(f"{r}{how}", "train.steps=0", f"sharding={how}", ranks=r)
        for r, how in ((1, "fsdp"), (3, "fsdp"), (2, "ddp"))
    ]
    first, *others = [fsdp_trainer.load_model(run.folder).state_dict() for run in runs]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    other_seed = fsdp_trainer.load_model(
        train("seed", "train.steps=0", "run.seed=1").folder
    ).state_dict()
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"], other_seed["model.layers.0.mlp.up_proj.weight"]
    )
    assert (
        len({tensor.float().sum().item() for name, tensor in first.items() if "proj" in name}) == 14
    ), "every matrix has its own numbers"


@pytest.mark.slow
def test_the_validation_loss_is_the_mean_over_exactly_the_validation_set(
    train, tmp_path, inputs, world
):
    held_out = write_chats(tmp_path / "held_out.jsonl", 13, start=500)
    runs = [
        train(
            f"r{r}",
            "train.steps=4",
            f"data.validation={held_out}",
            "train.validate_every=2",
            "batch.micro_rows=2",
            ranks=r,
        )
        for r in (1, 4)
    ]
    losses = [[line["loss"] for line in run.event("evaluation")] for run in runs]
    assert len(losses[0]) == 3  # before the first step too
    assert runs[0].metrics[1]["validation_loss"] == losses[0][1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    shown = world.command(
        "preview",
        "preview.format=json",
        "preview.rows=13",
        f"data.path={held_out}",
        "tokenizer.path=demo:bytes",
        "batch.seq_len=64",
        "data.packing=none",
        "data.shuffle=false",
        f"data.cache={inputs['data.cache']}",
    )[0].out
    model, total, count, nats = fsdp_trainer.load_model(runs[0].folder), 0.0, 0, 0.0
    text = []
    for row in map(json.loads, shown.splitlines()):
        labels = torch.tensor(row["labels"])
        each = F.cross_entropy(
            model.logits(torch.tensor([row["tokens"]]))[0], labels, reduction="none"
        )
        total += each.sum().item()
        count += int((labels != -100).sum())
        is_text = (labels >= 0) & (labels < 256)  # of demo:bytes; special tokens come behind
        nats += each[is_text].sum().item()
        text += labels[is_text].tolist()
    assert losses[0][-1] == pytest.approx(total / count, rel=1e-5)
    bits = [run.metrics[-1]["validation_bits_per_byte"] for run in runs]
    assert bits == pytest.approx([nats / math.log(2) / len(text)] * 2, rel=1e-5)
    assert runs[0].event("evaluation")[-1]["bits_per_byte"] == bits[0]
    assert "bits/byte" in runs[0].out


@pytest.mark.slow
def test_validating_changes_nothing_of_training(train, tmp_path):
    held_out = f"data.validation={write_chats(tmp_path / 'h.jsonl', 5, 500)}"
    often, once = (
        train(name, held_out, "train.steps=5", *how, ranks=2)
        for name, how in (("often", ["train.validate_every=1"]), ("once", []))
    )
    assert often.column("loss") == once.column("loss")
    assert [event["step"] for event in often.event("evaluation")] == [0, 1, 2, 3, 4, 5]
    assert [event["step"] for event in once.event("evaluation")] == [0, 5]
    assert (
        often.metrics[-1]["validation_loss"]
        == once.metrics[-1]["validation_loss"]
        == once.event("evaluation")[-1]["loss"]
    )


@pytest.mark.slow
def test_a_run_in_epochs_ends_with_the_partial_step(train, tmp_path):
    data = f"data.path={write_chats(tmp_path / 'few.jsonl', 10)}"
    run = train("epochs", data, "data.packing=none", "train.epochs=2", ranks=2)
    assert run.column("step") == [1, 2, 3, 4]
    assert "4 steps" in run.out
    again = train("once", data, "data.packing=none", "train.epochs=1", "batch.rows=10")
    assert run.column("tokens")[-1] == 2 * again.column("tokens")[-1]
