"""One rank of `prepare`: it holds a shard of the teacher, which reads the supervised tokens."""

import os

import torch
import torch.distributed as dist

from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.verbs import PrepareConfig
from fsdp_trainer.data.order.mixture import build_order, validation_order
from fsdp_trainer.data.prepared_data import build_data
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.methods.teacher import fetch_frozen_model, require_same_vocabulary
from fsdp_trainer.methods.teacher_lists import ListPass, digest_for_lists
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import Console
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.run.build import orders_of, resolve_architecture
from fsdp_trainer.run.tokenize_ahead import report
from fsdp_trainer.training.run_inputs import RunInputs, progress_with_heartbeat


def prepare_as_rank(cfg: PrepareConfig) -> int:
    """Tokenise the data and store a teacher's lists, as one of the ranks. Returns the exit code."""
    timeout = parse_duration(cfg.launch.timeout)
    env = environment_of_ranks(os.environ) or os.environ
    console = Console(quiet=env.get("RANK", "0") != "0")
    world = join(env, cfg.launch.device, timeout)
    try:
        inputs = world.rank0_then_nodes_then_all(
            "preparing the data",
            lambda: prepare_inputs(cfg, world, console),
            parse_duration(cfg.launch.data_timeout),
        )
        report(inputs.data, cfg, console)
        config = resolve_architecture(cfg, inputs)
        connect(world, timeout)
        store_lists(cfg, inputs, config, world, console)
    except UserError as error:
        if world.main:  # all ranks have the same error; rank 0 reports it
            raise
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def prepare_inputs(cfg: PrepareConfig, world: World, console: Console) -> RunInputs:
    """Fetch the models and tokenise the data, reusing what an earlier rank or run left on disk."""
    progress = progress_with_heartbeat(console, world)
    init_from = fetch(cfg.model.init_from, weights=False) if cfg.model.init_from else None
    teacher = fetch_frozen_model(cfg)
    inputs = RunInputs(*build_data(cfg, Reporter(progress, console.say)), init_from, teacher)
    assert teacher
    require_same_vocabulary(cfg, inputs.tokenizer, teacher)
    inputs.teacher_files = digest_for_lists(cfg, teacher, progress)
    return inputs


def store_lists(
    cfg: PrepareConfig, inputs: RunInputs, config: ModelConfig, world: World, console: Console
) -> None:
    """Run the teacher on all data whose lists are not stored yet. Collective. Raises UserError."""
    assert inputs.frozen_model
    assert inputs.teacher_files
    order, held_out = build_order(cfg, inputs.data, config.attention_cost), None
    if inputs.data.validation:
        held_out = validation_order(cfg, inputs.data.validation, config.attention_cost)
    orders = orders_of(order, held_out, cfg.batch.rows)
    lists = ListPass(
        cfg=cfg,
        source=inputs.frozen_model,
        digest=inputs.teacher_files,
        student=config,
        orders=orders,
        dims=Dims(cfg.sharding, world.device.type, parse_duration(cfg.launch.timeout)),
        device=torch.device("cpu") if cfg.sharding.cpu_offload else world.device,
        computing=world.device,
        writes=world.local_rank == 0,
        say=console.say,
        progress=console.paced(),
    )
    known = lists.prepare().vocabulary
    for one, _ in orders:
        console.say(f"in     {lists.folder(one, known)}")
