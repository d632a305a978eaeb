"""Words of optimizers that do not go together are refused, with what would go instead."""

import pytest

PURE = "precision.master_dtype=bfloat16"
REFUSED = {
    "optim=muon adapter=lora model.init_from=hf": "low-rank",
    "optim=muon sharding.cpu_offload=true": "sharding.cpu_offload=false",
    "optim.ns_steps=4": "optim=muon",
    "optim=muon optim.normuon_beta=0.9": "optim.normuon=true",
    "optim=muon optim.momentum=1": "optim.momentum=0.95",
    "optim=adamw_8bit optim.implementation=fused": "optim.implementation=auto",
    f"{PURE} optim.implementation=foreach": "optim.rounding=nearest",
    "optim.rounding=nearest": "only counts where something is kept in bfloat16",
    "optim.state_dtype=int4": "8bit",
    "optim=sgd optim.eps=1e-6": "optim=adamw",
    "optim=lamb optim.momentum=0.8": "optim=sgd",
    "optim=sgd optim.trust_coefficient=0.1": "only counts with  optim=lars",
    "optim.lr_scaling=sqrt": "optim.lr_scaling=sqrt optim.lr_batch_tokens=",
}
"""Part of the message by what is typed."""


@pytest.mark.parametrize("typed", REFUSED)
def test_what_an_optimizer_cannot_do_is_refused_before_anything_starts(train, typed):
    assert REFUSED[typed] in train("run", *typed.split(), code=2).err
