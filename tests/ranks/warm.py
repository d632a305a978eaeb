"""Imports of the server that ranks are forked from.

Otherwise each rank would import the same modules and parse the same files when it first trains.
"""

import gc

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.pipelining

import fsdp_trainer.apps.preview.preview
import fsdp_trainer.cli
import fsdp_trainer.models.hf.hf_folder
import fsdp_trainer.run.run
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import has_gpus
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.launch.facts import versions
from tests.ranks import composing
from tests.ranks.world import SMALL

if not has_gpus(Launch()):
    # transformers and torchao ask for GPUs, after which a forked process cannot use them
    import fsdp_trainer.models.hf.hf_decoder  # noqa: F401
composing.keep()
compose("train", [*SMALL, "data.path=demo:backwards", "tokenizer.path=demo:bytes"])
versions(torch.device("cpu"))
gc.collect()
gc.freeze()  # pages that garbage collection does not touch stay shared with the ranks
