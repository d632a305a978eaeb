"""The architecture, world sizes and device of a plan, found without weights, ranks or a GPU."""

import math
import re
from dataclasses import replace
from pathlib import Path

import torch

from fsdp_trainer.config.composing.compose import compose, find_file, options
from fsdp_trainer.config.context_methods import context_problems
from fsdp_trainer.config.depth import VOCABULARY as VOCABULARY_OF_DEPTH
from fsdp_trainer.config.depth import depth_in_words
from fsdp_trainer.config.devices import (
    Device,
    device,
    gpu_names,
    gpus,
    named_by_driver,
    nothing_to_plan_for,
    with_flops,
)
from fsdp_trainer.config.host_list import hosts_of, ranks_of
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.schema import Model, Sharding, TrainConfig
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.records.labelled_texts import LABELLED, TAGGED
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.folders.other_weights import is_described
from fsdp_trainer.methods.trained_head import with_head
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.from_config.resolve import (
    resolve_model,
    sharding_problems,
    with_trained_head,
)
from fsdp_trainer.parallel.memory_check import host_bytes
from fsdp_trainer.planning.plan.planned_model import IMAGE_SHARE

VOCABULARY = 32_000
"""Vocabulary of Llama 2, used if neither the configuration nor the named size determines one."""


def architecture(cfg: TrainConfig) -> tuple[ModelConfig, list[str]]:
    """Return the model's architecture, and a sentence for each assumption about it.

    Nothing is downloaded: the sizes of weights that are not on this disk are taken from a named
    model. Raises UserError if there is none.
    """
    model, assumed = cfg.model, []
    if model.init_from and not is_described(model_folder(model.init_from)):
        model, source = _named_size(model)
        sizes = f"its sizes are taken to be those of {source}"
        assumed.append(f"{cfg.model.init_from} is not on this disk: {sizes}")
        if model.init_from:
            return architecture(replace(cfg, model=model))
    tokens = None
    if model.init_from is None and model.vocab_size is None:
        tokens, reason = _vocabulary(cfg, model.name)
        assumed.append(f"{tokens:,} tokens in the vocabulary, {reason}")
    if model.depth:
        assumed.append(depth_in_words(cfg))
    resolved = replace(resolve_model(model, tokens), mtp_heads=0)  # one is frozen, not computed
    config = with_trained_head(resolved, cfg.objective.mtp)
    if cfg.objective.method.scores:
        config = with_head(resolved, cfg.objective, model.init_from, ())
    if config.scores == 1 and cfg.objective.method.reads in (LABELLED, TAGGED):
        assumed.append("the head has one label unless the data is read: set  objective.labels")
    if config.by_transformers:
        assumed.append(
            f"transformers' class computes {config.family}: a rehearsal shows what its blocks do; "
            "without one only their weights count"
        )
    return config, assumed


def assumed_of_images(typed: float | None, config: ModelConfig) -> list[str]:
    """Return a sentence about the images of a model that reads them.

    typed: plan.image_share. Raises UserError if a model reads only text and it is set.
    """
    if not config.reads_images:
        if typed is None:
            return []
        reason = (
            f"{config.family} reads only text here: leave it out, or if it has a tower, use"
            "  model.implementation=transformers"
        )
        problem = Problem(f"plan.image_share={typed:g}", reason)
        raise UserError("the model has no tower for images", [problem])
    if typed is not None:
        return []
    half = f"{IMAGE_SHARE:.0%} of the tokens of a row are of images"
    return [f"{half}: set  plan.image_share=0.2  for a fifth"]


def _named_size(model: Model) -> tuple[Model, str]:
    """Return the architecture of weights that are not on this disk, and the override it is from.

    It is the named size configured with them, the size with their id on the hub, or that of the
    recipe with their name.
    """
    if model.name != "auto":
        return replace(model, init_from=None), f"model={model.name}"
    path, names = str(model.init_from), options("plan")
    published = [
        f"model={size}"
        for size in names["model"]
        if f"({path})" in (find_file(f"model/{size}") or Path()).read_text()
    ]
    recipe = Path(path).name
    known = [*published, *([f"+recipe={recipe}"] if recipe in names["recipe"] else [])]
    if known:
        return compose("train", known[:1], inputs=False).model, known[0]
    reason = (
        "is not on this disk, and a plan fetches nothing. "
        "Say which size it is, e.g.  model=llama3_8b  (fsdp-trainer --help lists them)"
    )
    raise UserError("the architecture is not known", [Problem(f"model.init_from={path}", reason)])


def _vocabulary(cfg: TrainConfig, size: str) -> tuple[int, str]:
    path = cfg.tokenizer.path
    if path and (path == quickstart_data.TOKENIZER or Path(path).exists()):
        # imported here because it imports packages that most plans do not need
        from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

        return load_tokenizer(path, cfg.tokenizer.add_tokens).vocab_size, f"those of {path}"
    if published := published_vocabulary(size):
        return published, f"as many as {size} was published with"
    if cfg.model.depth:
        return VOCABULARY_OF_DEPTH, "as the rules of model.depth assume: or  model.vocab_size=N"
    return VOCABULARY, "an assumption: set  model.vocab_size=N  or  tokenizer.path=…"


def published_vocabulary(size: str) -> int | None:
    file = find_file(f"model/{size}")
    text = file.read_text() if file else ""
    published = re.search(r"published vocabulary of ([\d,]+)", text)
    return int(published[1].replace(",", "")) if published else None


def world_sizes(cfg: PlanConfig) -> list[int]:
    """Return the numbers of training ranks to plan for, smallest first.

    Raises UserError if no rank is left beside those that only generate, if a number of ranks does
    not fit the mesh, or if a step is too small for the pipeline.
    """
    sizes = cfg.plan.world_size
    if sizes is None:
        sizes = started_ranks(cfg)
    worlds = sorted(set(sizes if isinstance(sizes, list) else [sizes]))
    if not worlds:
        reason = "name at least one, e.g.  plan.world_size=[8,16,64]"
        raise UserError("there is nothing to plan", [Problem("plan.world_size=[]", reason)])
    generators = cfg.launch.rollout_ranks
    if worlds[0] <= generators:
        reason = f"leaves no rank for training: there are {worlds[0]}"
        problem = Problem(f"launch.rollout_ranks={generators}", reason)
        raise UserError("the ranks cannot be divided", [problem])
    worlds = [world - generators for world in worlds]
    layouts = [Layout(cfg.sharding, world, cfg.batch) for world in worlds]
    check_mesh(cfg.sharding, layouts)
    problems = [layout.pipeline_problem for layout in layouts]
    if any(problems):
        raise UserError("a step is too small for the pipeline", [p for p in problems if p][-1:])
    return worlds


def started_ranks(cfg: PlanConfig) -> int:
    """Return how many ranks `launch` would start; 8 per node for GPUs that this machine lacks."""
    launch = cfg.launch
    per_node = launch.nproc_per_node
    if per_node == "auto":
        on_host = launch.device == "cpu" and cfg.plan.gpu is None
        per_node = gpus(launch) * launch.ranks_per_gpu or (1 if on_host else 8)
    if not launch.hosts:
        return per_node * launch.nodes
    hosts = hosts_of(launch.hosts)
    return sum(ranks_of(host, launch.nproc_per_node) or per_node for host in hosts)


def check_mesh(sharding: Sharding, layouts: list[Layout]) -> None:
    """Raise UserError for the first number of ranks that does not fit the mesh."""
    worlds = [layout.ranks for layout in layouts]
    sizes = {
        f"sharding.{name}": getattr(sharding, name) for name in ("pipeline", "tensor", "context")
    }
    product = " × ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
    same_rows, replicas = math.prod(sizes.values()), sharding.replicas
    rules = (
        (same_rows, f"groups of {product} ranks", ""),
        (same_rows * replicas, f"sharding.replicas={replicas} groups", "  or  sharding=fsdp"),
    )
    for size, groups, instead in rules:
        for world in worlds:
            if world % size:
                near = max(size, round(world / size) * size)
                reason = f"cannot be divided into {groups}.\nUse  plan.world_size={near}{instead}"
                problem = Problem(f"plan.world_size={world}", reason)
                raise UserError("the mesh does not divide", [problem])
    for layout in layouts:
        if layout.problem:
            raise UserError("the mesh does not divide", [layout.problem])


def require_sharing(cfg: PlanConfig, config: ModelConfig) -> None:
    """Raise UserError if the ranks cannot share the model or its rows as configured."""
    problems = [
        *sharding_problems(cfg, config),
        *context_problems(cfg.sharding, cfg.batch.seq_len, cfg.model, config),
    ]
    if problems:
        raise UserError("the ranks cannot share the model and its rows like this", problems)


def each_gpu(cfg: PlanConfig) -> list[PlanConfig]:
    """Return a configuration for each GPU that plan.gpu names; only `cfg` if it names none."""
    names = gpu_names(cfg.plan.gpu)
    return [replace(cfg, plan=replace(cfg.plan, gpu=name)) for name in names] or [cfg]


def only_target(cfg: PlanConfig) -> tuple[int, Device]:
    """Return the number of ranks and the device that layouts are searched for.

    Raises UserError for several of them: a search compares the layouts of one cluster.
    """
    # the search chooses these sizes: the configured ones need not fit the number of ranks
    sharding = replace(cfg.sharding, replicas=1, pipeline=1, tensor=1, context=1, expert=1)
    return single_target(replace(cfg, sharding=sharding), "plan.search looks at one cluster")


def single_target(cfg: PlanConfig, why: str) -> tuple[int, Device]:
    """Return the number of ranks and the device. Raises UserError for several of them, saying why.

    Raises it also if the number of ranks does not fit the mesh.
    """
    worlds = world_sizes(cfg)
    problems = []
    for key, values in (("world_size", worlds), ("gpu", gpu_names(cfg.plan.gpu))):
        if len(values) > 1:
            typed = f"plan.{key}=[{','.join(map(str, values))}]"
            problems.append(Problem(typed, f"{why}.\nUse  plan.{key}={values[-1]}"))
    if problems:
        raise UserError("there are several clusters", problems)
    return worlds[0], target(cfg, worlds[0])


def target(cfg: PlanConfig, world: int) -> Device:
    """Return the device of each of `world` ranks. Raises UserError if none is known."""
    chosen = chosen_device(cfg, world)
    if cfg.precision.float8 and chosen.name.startswith(("A100", "A800")):
        reason = (
            f"{chosen.name} has no float8 matrix products.\nUse  precision=bf16  or  plan.gpu=h100"
        )
        problem = Problem(f"precision.float8={cfg.precision.float8}", reason)
        raise UserError("there is no float8 on this device", [problem])
    typed = cfg.plan
    if typed.memory_gib:
        chosen = chosen._replace(memory_gib=typed.memory_gib)
    if typed.tflops:
        chosen = with_flops(chosen, typed.tflops * 1e12)
    if typed.network_gbps:
        chosen = chosen._replace(network=typed.network_gbps / 8 * 1e9)
    if cfg.launch.nproc_per_node != "auto" and chosen.name != "cpu":
        chosen = chosen._replace(per_node=cfg.launch.nproc_per_node)
    if cfg.launch.ranks_per_gpu > 1 and chosen.name != "cpu":  # they share its memory
        chosen = chosen._replace(memory_gib=chosen.memory_gib / cfg.launch.ranks_per_gpu)
    states = (typed.offload_disk or 2 * typed.disk) * 1e9
    return chosen._replace(efficiency=typed.efficiency, disk=typed.disk * 1e9, offload_disk=states)


def chosen_device(cfg: PlanConfig, world: int) -> Device:
    """Return the device that the configuration names, else that of this machine.

    Raises UserError if there is neither.
    """
    if cfg.plan.gpu:
        return device(gpu_names(cfg.plan.gpu)[0])
    if cfg.plan.memory_gib:
        return Device("any", cfg.plan.memory_gib)
    if cfg.launch.device == "cpu":
        return Device("cpu", host_bytes({}) / 2**30 / world, per_node=world)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = named_by_driver(properties.name) or Device(properties.name, 0)
        return known._replace(memory_gib=properties.total_memory / 2**30)
    raise nothing_to_plan_for()
