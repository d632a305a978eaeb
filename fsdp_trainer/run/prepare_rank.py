"""One rank of `prepare`: it holds a shard of the teacher, which reads the supervised tokens."""

import os

import torch.distributed as dist

from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.verbs import PrepareConfig
from fsdp_trainer.data.order.mixture import OrderMaker
from fsdp_trainer.data.prepared_data import build_data, cache_root
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.world import World, connect, environment_of_ranks, join
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.methods.stored_teacher import TeacherColumn, digest_of_teacher
from fsdp_trainer.methods.teacher import fetch_second_model, require_same_vocabulary
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import Console
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.run.tokenize_ahead import report
from fsdp_trainer.run.trained_model import resolve_architecture, resolve_for
from fsdp_trainer.training.setup.run_inputs import RunInputs, progress_with_heartbeat


def prepare_as_rank(cfg: PrepareConfig) -> int:
    """Tokenize the data and store a teacher's lists, as one of the ranks. Returns the exit code."""
    timeout = parse_duration(cfg.launch.timeout)
    env = environment_of_ranks(os.environ) or os.environ
    console = Console(quiet=env.get("RANK", "0") != "0")
    world = join(env, cfg.launch.device, timeout, cfg.launch.ranks_per_gpu)
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
    """Fetch the models and tokenize the data, reusing what an earlier rank or run left on disk."""
    progress = progress_with_heartbeat(console, world)
    init_from = fetch(cfg.model.init_from, weights=False) if cfg.model.init_from else None
    teacher = fetch_second_model(cfg.second_model)
    assert teacher

    def check(tokenizer: TextTokenizer) -> None:
        resolve_for(cfg, init_from, tokenizer)
        require_same_vocabulary(cfg.second_model, tokenizer, teacher)

    reporter = Reporter(progress, console.say)
    tokenizer, template, data = build_data(cfg, reporter, check)
    cache = cache_root(cfg.data, cfg.run)
    files = digest_of_teacher(cfg.second_model, teacher, cache, progress)
    return RunInputs(tokenizer, template, data, init_from, teacher, files)


def store_lists(
    cfg: PrepareConfig, inputs: RunInputs, config: ModelConfig, world: World, console: Console
) -> None:
    """Run the teacher on all data whose lists are not stored yet. Collective. Raises UserError."""
    assert inputs.second_folder
    assert inputs.teacher_files
    maker = OrderMaker.of(cfg, config.attention_cost, config.packs)
    held_out = inputs.data.validation
    validation = maker.validation(held_out) if held_out else None
    rows = RunRows(maker.training(cfg.data, inputs.data), validation, cfg.batch.rows)
    layout = Layout(cfg.sharding, world.size, cfg.batch)
    column = TeacherColumn(
        cfg=cfg,
        rows=rows,
        source=inputs.second_folder,
        student=config,
        dims=Dims(layout, world.device.type, parse_duration(cfg.launch.timeout)),
        world=world,
        say=console.say,
        progress=console.paced(),
    )
    column.prepare(inputs.teacher_files)
    for one, _ in rows.stored:
        console.say(f"in     {column.place(one, inputs.teacher_files)}")
