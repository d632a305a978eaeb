"""Ways to share and to keep that do not go together are refused, with what to type instead."""

import pytest

EXPERTS = "model.family=qwen3_moe model.num_experts=4 sharding.expert"
TENSOR = "sharding.tensor=2"
STAGES = "sharding.pipeline=2"
CUT = f"{TENSOR} optim=adamw_8bit model.intermediate_size=64"
COPY = "sharding.reshard_after_forward=2"
COMPILED = "compile=enabled"
REFUSED = {
    1: {
        f"{EXPERTS}=3": "must divide num_experts=4. Use sharding.expert=2",
        f"{EXPERTS}=2": "(shard × context × tensor), which are 1. Use sharding.expert=1",
        "sharding.expert=2 model.family=qwen3": "qwen3 has no experts",
        TENSOR: "must divide the number of ranks, which is 1",
        "sharding.tensor=3": "Use sharding.tensor=2",
        f"{TENSOR} batch.seq_len=63": "must divide batch.seq_len=63",
        CUT: "cuts blocks of 64. Use optim.state_dtype=bfloat16",
        f"{CUT} train.freeze=['*.o_proj.weight']": "intermediate_size=64 leaves each of 2 ranks 32",
        f"{TENSOR} adapter=qlora": "cuts blocks of 64. Use adapter.base=bf16",
        f"{TENSOR} data.pad_to_multiple=3": "Use data.pad_to_multiple=4",
        STAGES: "must divide the number of ranks, which is 1",
        "sharding.pipeline=3": "2 blocks. Use sharding.pipeline=2",
        f"{STAGES} sharding.pipeline_schedule=interleaved": (
            "makes 4 stages, each of at least one of 2 blocks. Use sharding.pipeline=1"
        ),
        f"{STAGES} sharding.pipeline_schedule=zbv {COMPILED}": (
            "Use compile=disabled or sharding.pipeline_schedule=interleaved"
        ),
        "sharding.pipeline_schedule=gpipe": "only counts with sharding.pipeline=2",
        f"{STAGES} data.packing=none data.pad_to_multiple=8": "stages pass on rows of one length",
        f"{STAGES} sharding.cpu_offload=true": "Use sharding.cpu_offload=false",
        "activation_checkpoint=budget": COMPILED,
        "activation_checkpoint.every=2": "activation_checkpoint=selective",
        "activation_checkpoint=full activation_checkpoint.save=[matmul]": (
            "activation_checkpoint=selective"
        ),
        "activation_checkpoint=selective activation_checkpoint.save=[]": (
            "activation_checkpoint=full"
        ),
        "activation_checkpoint=selective activation_checkpoint.save=[conv]": (
            "attention, matmul, second_matmul"
        ),
        f"{COMPILED} compile.mode=reduce-overhead": "compile.mode=default",
        "compile.mode=default": f"only counts with {COMPILED}",
    },
    2: {
        f"{STAGES} batch.micro_rows=6": "Use batch.rows=12 or batch.micro_rows=3",
        f"{COPY} {TENSOR}": "sharding.reshard_after_forward=true",
        f"{COPY} sharding=ddp": "sharding.reshard_after_forward=auto",
        "sharding.reshard_after_forward=1": "must be at least 2",
        "sharding.quantize=weights sharding=ddp": "sharding.quantize=none",
        "sharding.error_feedback=true": "sharding.quantize=gradients",
        "sharding.quantize=both sharding.messages=registered": "sharding.messages=ordinary",
    },
}
"""Part of the message by number of ranks and words."""


@pytest.mark.parametrize(
    "ranks, typed", [(ranks, typed) for ranks, each in REFUSED.items() for typed in each]
)
def test_what_does_not_go_together_is_refused_with_what_does(train, ranks, typed):
    run = train("refused", *typed.split(), ranks=ranks, code=2)
    assert REFUSED[ranks][typed] in " ".join(run.err.split())
