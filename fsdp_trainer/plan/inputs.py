"""What a plan is made for: the architecture without its weights, the world without its ranks, the device without a driver."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from fsdp_trainer.config.compose import compose, find_file, options
from fsdp_trainer.config.hosts import hosts_of, ranks_of
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.schema import Model, TrainConfig
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.data import demo
from fsdp_trainer.devices import (
    Device,
    device,
    gpu_names,
    gpus,
    named_by_driver,
    nothing_to_plan_for,
    with_flops,
)
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.parallel.memory_check import host_bytes

VOCABULARY = 32_000  # where nothing says how many tokens there are: Llama 2's


def architecture(cfg: TrainConfig) -> tuple[ModelConfig, list[str]]:
    """The model, and what was assumed about it. Nothing is fetched: what is not on this disk is of the named size. Raises UserError without one."""
    model, assumed = cfg.model, []
    if model.init_from and not (model_folder(model.init_from) / "config.json").is_file():
        model, known_by = _named_size(model)
        assumed.append(
            f"{cfg.model.init_from} is not on this disk: its sizes are taken to be those of {known_by}"
        )
        if model.init_from:
            return architecture(replace(cfg, model=model))
    tokens = None
    if model.init_from is None and model.vocab_size is None:
        tokens, why = _vocabulary(cfg, model.name)
        assumed.append(f"{tokens:,} tokens in the vocabulary, {why}")
    return resolve_model(model, tokens), assumed


def _named_size(model: Model) -> tuple[Model, str]:
    """The architecture of weights that are not here, and what tells it: the named size beside them, the hub's name of one, the recipe of the run."""
    path, names = str(model.init_from), options("plan")
    if model.name != "auto":
        return replace(model, init_from=None), f"model={model.name}"
    published = (
        f"model={size}"
        for size in names["model"]
        if f"({path})" in (find_file(f"model/{size}") or Path()).read_text()
    )
    recipe = f"+recipe={Path(path).name}" if Path(path).name in names["recipe"] else None
    if words := next(published, recipe):
        return compose("train", [words], inputs=False).model, words
    why = "is not on this disk, and a plan fetches nothing. Say which size it is, e.g.  model=llama3_8b  (fsdp-trainer --help lists them)"
    raise UserError("the architecture is not known", [Problem(f"model.init_from={path}", why)])


def _vocabulary(cfg: TrainConfig, size: str) -> tuple[int, str]:
    """How many tokens the model will know, and why so many."""
    path = cfg.tokenizer.path
    if path and (path == demo.TOKENIZER or Path(path).exists()):
        from fsdp_trainer.data.tokenizer import load_tokenizer  # which a plan does without, else

        return load_tokenizer(path, cfg.tokenizer.add_tokens).vocab_size, f"those of {path}"
    file = find_file(f"model/{size}")
    if file and (found := re.search(r"published vocabulary of ([\d,]+)", file.read_text())):
        return int(found[1].replace(",", "")), f"as many as {size} was published with"
    return VOCABULARY, "which nothing says: write  model.vocab_size=N  or  tokenizer.path=…"


def world_sizes(cfg: PlanConfig) -> list[int]:
    """The worlds to plan for, smallest first. Raises UserError for one that does not divide into its replicas."""
    asked, launch = cfg.plan.world_size, cfg.launch
    if asked is None:
        of_a_node = launch.nproc_per_node
        if of_a_node == "auto":
            of_a_node = gpus(launch) or (
                1 if launch.device == "cpu" and cfg.plan.gpu is None else 8
            )
        asked = of_a_node * launch.nodes
        if launch.hosts:
            hosts = hosts_of(launch.hosts)
            asked = sum(ranks_of(host, launch.nproc_per_node) or of_a_node for host in hosts)
    worlds = sorted(set(asked if isinstance(asked, list) else [asked]))
    replicas, same = cfg.sharding.replicas, cfg.sharding.tensor * cfg.sharding.context
    if wrong := next((world for world in worlds if world % same), None):
        near = max(same, round(wrong / same) * same)
        sizes = {name: getattr(cfg.sharding, name) for name in ("tensor", "context")}
        named = " × ".join(f"sharding.{name}={size}" for name, size in sizes.items() if size > 1)
        why = f"cannot be divided into groups of {named} ranks.\nUse  plan.world_size={near}"
        raise UserError("the mesh does not divide", [Problem(f"plan.world_size={wrong}", why)])
    replicas *= same
    if odd := [world for world in worlds if world % replicas]:
        near = max(replicas, round(odd[0] / replicas) * replicas)
        why = f"cannot be divided into sharding.replicas={cfg.sharding.replicas} groups.\nUse  plan.world_size={near}  or  sharding=fsdp"
        raise UserError("the mesh does not divide", [Problem(f"plan.world_size={odd[0]}", why)])
    if not worlds:
        raise UserError(
            "there is nothing to plan",
            [Problem("plan.world_size=[]", "name at least one, e.g.  plan.world_size=[8,16,64]")],
        )
    return worlds


def each_gpu(cfg: PlanConfig) -> list[PlanConfig]:
    """Return the configuration once for each GPU that plan.gpu names; as it is if it names none."""
    names = gpu_names(cfg.plan.gpu)
    return [replace(cfg, plan=replace(cfg.plan, gpu=name)) for name in names] or [cfg]


def only_target(cfg: PlanConfig) -> tuple[int, Device]:
    """Return the world and the device that layouts are searched for.

    Raises UserError for several of them: a search compares what one cluster can do.
    """
    # these are searched, and need not divide the world as they are
    sharding = replace(cfg.sharding, replicas=1, tensor=1, context=1)
    worlds = world_sizes(replace(cfg, sharding=sharding))
    problems = []
    for key, values in (("world_size", worlds), ("gpu", gpu_names(cfg.plan.gpu))):
        if len(values) > 1:
            typed = f"plan.{key}=[{','.join(map(str, values))}]"
            why = f"plan.search looks at one cluster.\nUse  plan.{key}={values[-1]}"
            problems.append(Problem(typed, why))
    if problems:
        raise UserError("a search is for one cluster", problems)
    return worlds[0], target(cfg, worlds[0])


def target(cfg: PlanConfig, world: int) -> Device:
    """What each of `world` ranks computes on. Raises UserError where nothing says."""
    asked, found = cfg.plan, None
    if asked.gpu:
        found = device(gpu_names(asked.gpu)[0])
    elif asked.memory_gib:
        found = Device("any", asked.memory_gib)
    elif cfg.launch.device == "cpu":
        found = Device("cpu", host_bytes({}) / 2**30 / world, per_node=world)
    elif torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = named_by_driver(properties.name) or Device(properties.name, 0)
        found = known._replace(memory_gib=properties.total_memory / 2**30)
    if found is None:
        raise nothing_to_plan_for()
    if cfg.precision.float8 and found.name.startswith(("A100", "A800")):
        why = f"{found.name} has no float8 matrix products.\nUse  precision=bf16  or  plan.gpu=h100"
        raise UserError(
            "there is no float8 on this device",
            [Problem(f"precision.float8={cfg.precision.float8}", why)],
        )
    if asked.memory_gib:
        found = found._replace(memory_gib=asked.memory_gib)
    if asked.tflops:
        found = with_flops(found, asked.tflops * 1e12)
    if asked.network_gbps:
        found = found._replace(network=asked.network_gbps / 8 * 1e9)
    if cfg.launch.nproc_per_node != "auto" and found.name != "cpu":
        found = found._replace(per_node=cfg.launch.nproc_per_node)
    return found._replace(efficiency=asked.efficiency, disk=asked.disk * 1e9)
