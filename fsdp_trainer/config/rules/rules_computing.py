"""Rules about how a step is computed: sharding, recomputation, kernels, number formats.

See config/rules/rules.py.
"""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.check import Report, Violations, as_text
from fsdp_trainer.config.formats import is_compact, moments_format, rounds
from fsdp_trainer.config.layout import number_of_ranks
from fsdp_trainer.config.pipeline_schedules import SCHEDULES
from fsdp_trainer.config.schema import NEEDS_NCCL, Sharding, TrainConfig
from fsdp_trainer.errors import WHAT_GOES_TOGETHER
from fsdp_trainer.extensions import registered_by_user
from fsdp_trainer.models.attention_choice import AttentionContext, attention_problems

COLLECTIVES = {
    "messages": (2, 11),
    "separate_reduce_scatter": (2, 13),
    "reduce_scatter_buffers": (2, 13),
}
"""Options of FSDP2's collectives, and the first torch version that has them."""
PIPELINE = (2, 13)
"""The first torch version whose stages accept the shapes of their messages beforehand."""
NO_PIPELINE = (2, 15)
"""The first torch version whose FSDP2 sums unsharded gradients in a way that stages do not know."""
FOUR_BITS = (2, 12)
"""The first torch version whose FSDP2 does not cast integers in an all-gather."""
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes of the compiler that record CUDA graphs, and for each the nearest mode that does not."""


def replicas(cfg: TrainConfig, report: Report) -> Violations:
    sharding = cfg.sharding
    if sharding.strategy == "hsdp" and sharding.replicas == 1:
        yield (
            "sharding.replicas",
            "hsdp replicates across groups: say how many, e.g.  sharding.replicas=2",
        )
    if sharding.strategy != "hsdp" and sharding.replicas > 1:
        yield (
            "sharding.replicas",
            f"{sharding.strategy} has no replica groups.\n"
            "Use  sharding=hsdp  or  sharding.replicas=1",
        )
    if sharding.strategy == "ddp" and sharding.cpu_offload:
        yield (
            "sharding.cpu_offload",
            "ddp keeps everything on the device.\n"
            "Use  sharding=fsdp  or  sharding.cpu_offload=false",
        )


def dimensions(cfg: TrainConfig, report: Report) -> Violations:
    """Check that the ranks of a tensor group can split the tokens of a padded row.

    models/from_config/resolve.py checks that they divide the model's sizes.
    """
    size = cfg.sharding.tensor
    if size == 1:
        return
    multiple = cfg.data.pad_to_multiple
    if multiple is not None and multiple % size:
        nearest = round_up(multiple, size)
        yield (
            "data.pad_to_multiple",
            f"the ranks of a tensor group share a row's tokens: {size} must divide them.\n"
            f"Use  data.pad_to_multiple={nearest}",
        )


def split_rows(cfg: TrainConfig, report: Report) -> Violations:
    """Check that the ranks that split a row divide its tokens and know its length.

    models/from_config/resolve.py checks the model's heads.
    """
    sharding = cfg.sharding
    row = cfg.batch.seq_len
    if sharding.context == 1:
        if "sharding.context_method" in report.typed:
            yield "sharding.context_method", "only counts with  sharding.context=2  or more"
        return
    parts = sharding.context * sharding.tensor
    if row % parts:
        longer = round_up(row, parts)
        shorter = f"  or  {longer - parts}" if row > parts else ""
        by_tensor = " × sharding.tensor" if sharding.tensor > 1 else ""
        yield (
            "batch.seq_len",
            f"must be a multiple of the {parts} parts (sharding.context{by_tensor}) that a row is "
            f"cut into.\nUse  batch.seq_len={longer}{shorter}",
        )
    if cfg.data.pad_to_multiple is not None:
        yield (
            "data.pad_to_multiple",
            "ranks that share rows need all of one length, also a rank that cannot read its "
            "data.\nUse  data.pad_to_multiple=null  , without padding  "
            "data.packing=best_fit data.pad_to_multiple=null",
        )


def stages(cfg: TrainConfig, report: Report) -> Violations:
    """Check that other settings work with pipeline stages.

    The number of blocks is checked with the model (models/from_config/resolve.py), that of
    micro-batches with
    the number of ranks.
    """
    sharding = cfg.sharding
    if sharding.pipeline == 1:
        if "sharding.pipeline_schedule" in report.typed:
            yield "sharding.pipeline_schedule", "only counts with  sharding.pipeline=2  or more"
        return
    torch = version("torch")
    if not is_older(torch, NO_PIPELINE):
        older = f"pip install 'torch<{NO_PIPELINE[0]}.{NO_PIPELINE[1]}'"
        yield "sharding.pipeline", f"does not run with torch {torch}:  {older}"
    if is_older(torch, PIPELINE):
        needed = f"needs torch {PIPELINE[0]}.{PIPELINE[1]}; installed is {torch}"
        yield "sharding.pipeline", f"{needed}.\nUse  sharding.pipeline=1"
    if cfg.data.pad_to_multiple is not None:
        yield (
            "data.pad_to_multiple",
            "stages pass on rows of one length.\nUse  data.packing=best_fit  or leave it out",
        )
    together = f"does not work with sharding.pipeline={sharding.pipeline}: {WHAT_GOES_TOGETHER}"
    if cfg.precision.float8 is not None:
        yield "precision.float8", f"{together}.\nUse  precision=bf16  or  sharding.pipeline=1"
    for key, is_set in {
        "activation_checkpoint.offload": cfg.activation_checkpoint.offload,
        "sharding.cpu_offload": sharding.cpu_offload,
    }.items():
        if is_set:
            yield key, f"{together}.\nUse  {key}=false  or  sharding.pipeline=1"
    if SCHEDULES[sharding.pipeline_schedule].splits and cfg.compile.enabled:
        yield (
            "sharding.pipeline_schedule",
            "computes the gradients of weights apart, which torch cannot do in compiled blocks.\n"
            "Use  compile=disabled  or  sharding.pipeline_schedule=interleaved",
        )


def second_copy(cfg: TrainConfig, report: Report) -> Violations:
    """Check that FSDP2 can keep a second copy of the blocks, divided among neighbouring ranks.

    The number of ranks is checked with the layout.
    """
    sharding, key = cfg.sharding, "sharding.reshard_after_forward"
    if number_of_ranks(sharding) is None:
        return
    instead = f"Use  {key}=true"
    if sharding.strategy == "ddp":
        yield key, f"ddp gathers nothing.\nUse  sharding=fsdp  or  {key}=auto"
    divided = {"sharding.tensor": sharding.tensor, "sharding.expert": sharding.expert}
    for other, size in divided.items():
        if size > 1:
            cannot = f"FSDP2 keeps a second copy of whole matrices only, not with  {other}={size}"
            yield key, f"{cannot}.\n{instead}  or  {other}=1"
    if cfg.precision.float8 == "tensorwise":
        cannot = "FSDP2 keeps no second copy of what it gathers in float8"
        yield key, f"{cannot}.\n{instead}  or  precision=bf16"


def quantized_messages(cfg: TrainConfig, report: Report) -> Violations:
    """Check that messages of fully_shard can be sent in 8-bit numbers."""
    sharding, key = cfg.sharding, "sharding.quantize"
    if sharding.error_feedback and sharding.quantize not in ("gradients", "both"):
        yield (
            "sharding.error_feedback",
            "only counts with  sharding.quantize=gradients  or  sharding.quantize=both",
        )
    if sharding.quantize == "none":
        return
    instead = f"Use  {key}=none"
    if sharding.strategy == "ddp":
        yield key, f"ddp gathers and scatters nothing.\nUse  sharding=fsdp  or  {key}=none"
    if sharding.messages != "ordinary":
        cannot = (
            f"encodes into memory of its own, not that of  sharding.messages={sharding.messages}"
        )
        yield key, f"{cannot}.\n{instead}  or  sharding.messages=ordinary"
    if cfg.precision.float8 == "tensorwise" and sharding.quantize != "gradients":
        cannot = "weights are gathered in float8 already"
        yield key, f"{cannot}.\nUse  {key}=gradients  or  precision=bf16"


def collectives(cfg: TrainConfig, report: Report) -> Violations:
    """Check that the strategy and the torch version have the options of FSDP2's collectives.

    The device is checked later.
    """
    for name in COLLECTIVES:
        value = getattr(cfg.sharding, name)
        if value != getattr(Sharding(), name):
            yield from _wrong_collective(cfg, name, value)
    if cfg.sharding.messages == "symmetric" and cfg.sharding.reduce_scatter_buffers > 1:
        yield (
            "sharding.reduce_scatter_buffers",
            "symmetric messages share one buffer.\n"
            "Use  sharding.reduce_scatter_buffers=1  or  sharding.messages=registered",
        )


def _wrong_collective(cfg: TrainConfig, name: str, value: Any) -> Violations:
    """Yield the reason why an option of the collectives cannot be set, if there is one."""
    key = f"sharding.{name}"
    torch = version("torch")
    needed = (2, 12) if value == "symmetric" else COLLECTIVES[name]
    if cfg.sharding.strategy == "ddp":
        default = as_text(getattr(Sharding(), name))
        yield key, f"ddp gathers and scatters nothing.\nUse  sharding=fsdp  or  {key}={default}"
    elif is_older(torch, needed):
        yield key, f"needs torch {needed[0]}.{needed[1]}; installed is {torch}"
    elif name == "messages" and cfg.launch.device == "cpu":
        yield key, f"{NEEDS_NCCL}.\nUse  sharding.messages=ordinary"


def is_older(installed: str, needed: tuple[int, int]) -> bool:
    """Return whether an installed version is older than a (major, minor) version."""
    return tuple(map(int, installed.split(".")[:2])) < needed


def activation_checkpointing(cfg: TrainConfig, report: Report) -> Violations:
    chosen = cfg.activation_checkpoint
    if chosen.mode == "budget" and not cfg.compile.enabled:
        yield (
            "activation_checkpoint.mode",
            "the compiler decides what is computed again.\n"
            "Use  compile=enabled  or  activation_checkpoint=selective",
        )
    if chosen.mode == "selective" and not chosen.save:
        yield "activation_checkpoint.save", "nothing kept is  activation_checkpoint=full"


def attention(cfg: TrainConfig, report: Report) -> Violations:
    """Check the attention kernel as far as possible without a device and a model.

    The rest is checked where attention is chosen.
    """
    context = AttentionContext(
        device=None if cfg.launch.device == "auto" else cfg.launch.device,
        dtype=cfg.precision.param_dtype,
        softcap=cfg.model.attn_logit_softcapping is not None,
        compiled=cfg.compile.enabled,
        selective=cfg.activation_checkpoint.mode == "selective",
    )
    for problem in attention_problems(cfg.model.attention, cfg.model.attention_kernel, context):
        yield problem.what.partition("=")[0], problem.reason


def compilation(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.compile.mode in WITHOUT_GRAPHS:
        yield (
            "compile.mode",
            "records CUDA graphs, which replay with weights at fixed addresses; fully_shard "
            "gathers them anew, and all blocks share one graph.\n"
            f"Use  compile.mode={WITHOUT_GRAPHS[cfg.compile.mode]}",
        )
    for name in ("mode", "cache"):
        if f"compile.{name}" in report.typed and not cfg.compile.enabled:
            yield f"compile.{name}", "only counts with  compile=enabled"


def moments(cfg: TrainConfig, report: Report) -> Violations:
    optim, master = cfg.optim, cfg.precision.master_dtype
    if optim.implementation != "auto" and is_compact(optim, master):
        rounded = not is_compact(replace(optim, rounding="nearest"), master)
        yield (
            "optim.implementation",
            f"torch has no AdamW with {moments_format(optim, master)} moments over {master} "
            "weights, nor stochastic rounding.\nUse  optim.implementation=auto"
            + ("  or  optim.rounding=nearest" if rounded else ""),
        )
    if "optim.rounding" in report.typed and not rounds(optim, master):
        yield (
            "optim.rounding",
            "only counts where something is kept in bfloat16, as with  precision=pure_bf16  "
            "or  optim=adamw_bf16",
        )


def float8(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.precision.float8 is None:
        return
    ranks = cfg.sharding.context
    tokens = cfg.batch.seq_len // ranks * cfg.batch.micro_rows
    if cfg.launch.device == "cpu":
        yield (
            "precision.float8",
            "needs a GPU of compute capability 8.9 or higher, not launch.device=cpu.\n"
            "Use  precision=bf16",
        )
    if cfg.precision.param_dtype != "bfloat16":
        yield (
            "precision.float8",
            "is faster than bfloat16 only: use  precision.param_dtype=bfloat16",
        )
    if tokens % 16:
        yield (
            "batch.seq_len",
            f"float8 products need a multiple of 16 tokens, not {tokens:,} (seq_len × "
            f"micro_rows on each rank).\n"
            f"Use  batch.seq_len={round_up(cfg.batch.seq_len, 16 * ranks)}",
        )


def float16(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.precision.param_dtype != "float16":
        for name in ("loss_scale", "loss_scale_steps"):
            if f"precision.{name}" in report.typed:
                yield f"precision.{name}", "only counts with  precision=fp16"
        return
    if registered_by_user(cfg.objective):
        yield (
            "precision.param_dtype",
            "float16 scales the weights of tokens, which an objective of your own may use "
            "otherwise.\nUse  precision=bf16  or  precision=fp32",
        )
    for name in ("load_balancing", "router_z_loss"):
        if getattr(cfg.loss, name):
            yield (
                f"loss.{name}",
                f"is not scaled with the loss in float16.\nUse  precision=bf16  or  loss.{name}=0",
            )


def four_bits(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.adapter.name == "none" or cfg.adapter.base != "nf4":
        return
    torch = version("torch")
    if cfg.precision.float8 is not None:
        yield (
            "precision.float8",
            "products with 4-bit weights are computed in precision.param_dtype.\n"
            "Use  precision=bf16  or  adapter.base=bf16",
        )
    if is_older(torch, FOUR_BITS):
        yield (
            "adapter.base",
            f"nf4 needs torch {FOUR_BITS[0]}.{FOUR_BITS[1]}; installed is {torch}, whose "
            "fully_shard casts the codes.\nUse  adapter.base=bf16",
        )
