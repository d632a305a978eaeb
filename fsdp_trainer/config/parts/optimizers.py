"""The optimizers (optim.name): what each needs and refuses, and the group's keys. No torch.

Every other module asks the `OptimizerSpec` of the configured optimizer, and compares no names. A
new optimizer is an entry of OPTIMIZERS here, a class in `fsdp_trainer/optim/` with a function in
`optimizers.py` there, and a file `conf/optim/NAME.yaml`; one of the user's own is an OptimizerSpec.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.config.keys import key
from fsdp_trainer.config.parts.own_parts import code_at, usable_part

BUILDERS, FOOTPRINTS = "fsdp_trainer.optim.optimizers:", "fsdp_trainer.optim.footprint:"


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: the code that builds it, and its needs.

    build: a function, or MODULE:NAME of one, of (groups of parameters, Optim, seed, ranks), as in
    optim/optimizers.py. state_bytes: one of (Optim, master_dtype, shape, in_block), as in
    optim/footprint.py. whole_matrices: True if the update of a number depends on others of its
    matrix. has_owners: True if ranks own whole matrices of blocks and multiply them, as Muon's.
    is_fused: True if torch has a fused kernel for it. takes_states: True if it can begin with
    another tool's states. in_8_bits, in_bfloat16: overrides that store its moments so.
    with_fewer_moments: an optimizer with one moment for matrices in place of two. depth_lr: its
    learning rate for model.depth=12 and 2**19 tokens a step; None: unknown. highest_lr: above it no
    model learns, and `preview` and `train` warn.
    """

    build: str | Callable[..., Any]
    state_bytes: str | Callable[..., float] = f"{FOOTPRINTS}moment_bytes"
    whole_matrices: bool = False
    has_owners: bool = False
    is_fused: bool = False
    takes_states: bool = False
    in_8_bits: str = "optim.state_dtype=8bit"
    in_bfloat16: str = "optim.state_dtype=bfloat16"
    with_fewer_moments: str | None = None
    depth_lr: float | None = None
    highest_lr: float = 0.1  # of updates that are about as large as the rate

    def builder(self) -> Callable[..., Any]:
        return code_at(self.build)

    def footprint(self) -> Callable[..., float]:
        return code_at(self.state_bytes)


OPTIMIZERS = {
    "adamw": OptimizerSpec(
        f"{BUILDERS}build_adamw",
        f"{FOOTPRINTS}two_moments",
        is_fused=True,
        takes_states=True,
        in_8_bits="optim=adamw_8bit",
        in_bfloat16="optim=adamw_bf16",
        with_fewer_moments="muon",
        depth_lr=1.0e-3,  # as in the recipe chain_pretrain
    ),
    # nanochat's 0.02 for orthogonal updates, in Moonlight's scale: 0.02 / (0.2 · √768)
    "muon": OptimizerSpec(
        f"{BUILDERS}build_muon",
        f"{FOOTPRINTS}muon_state_bytes",
        whole_matrices=True,
        has_owners=True,
        depth_lr=3.6e-3,
    ),
    "lion": OptimizerSpec(f"{BUILDERS}build_lion"),
    "sgd": OptimizerSpec(f"{BUILDERS}build_sgd", highest_lr=100.0),
    "lamb": OptimizerSpec(
        f"{BUILDERS}build_lamb",
        f"{FOOTPRINTS}two_moments",
        whole_matrices=True,
        highest_lr=1.0,
    ),
    "lars": OptimizerSpec(f"{BUILDERS}build_lars", whole_matrices=True, highest_lr=100.0),
}


@dataclass
class Optim:
    """The optimizer. Weight decay never applies to norms and biases."""

    name: str = key(
        "adamw",
        "which optimizer; `muon`: for the matrices of the blocks, and AdamW for all else",
        choices=tuple(OPTIMIZERS),
        part="optimizer",
    )
    implementation: str = key(
        "auto",
        "torch's `fused` kernel; or its `foreach`, one operation at a time over all"
        " parameters and a wait for the device each step; `auto`: fused, or this program's"
        " own where torch lacks the number formats",
        choices=("auto", "fused", "foreach"),
        used_by=("adamw", "muon"),
    )
    init_from: str | None = key(
        None,
        "folder of another tool's checkpoint, whose AdamW states and step the run continues from:"
        " torchtitan's, FSDP's, accelerate's or DeepSpeed's. Weights: model.init_from",
        used_by=("adamw",),
    )
    state_dtype: str | None = key(
        None,
        "number format of the moments; `8bit`: blocks of up to 256 numbers share a scale;"
        " null: precision.master_dtype",
        choices=("float32", "bfloat16", "8bit"),
    )
    offload: str = key(
        "none",
        "where moments and the weights in precision.master_dtype are kept: `none`: on the "
        "device; `cpu`: in host memory, where the update runs; `disk`: in files, updated a part "
        "at a time. With `cpu` and `disk` the device keeps weights in precision.param_dtype",
        choices=("none", "cpu", "disk"),
    )
    offload_path: str | None = key(
        None, "offload=disk: folder of the files, on a local disk; null: the run's own folder"
    )
    rounding: str = key(
        "stochastic",
        "rounding of weights and mean squares that are stored in bfloat16: `stochastic` is right "
        "on average, `nearest` loses updates below 1/256 of a number",
        choices=("stochastic", "nearest"),
    )
    lr: float = key(1e-5, "peak learning rate", minimum=0)
    weight_decay: float = key(0.0, "decoupled weight decay", minimum=0)
    betas: list[float] = key(
        [0.9, 0.95],
        "decay of the running mean and mean square; lion: of the mean as used in the update, and as"
        " stored",
        minimum=0,
        maximum=1,
        used_by=("adamw", "muon", "lion", "lamb"),
    )
    eps: float = key(
        1e-8, "added to the root of the mean square", above=0, used_by=("adamw", "muon", "lamb")
    )
    momentum: float = key(
        0.95,
        "muon, sgd: decay of the running sum of gradients; lars: of the running sum of updates",
        minimum=0,
        maximum=1,
        used_by=("muon", "sgd", "lars"),
    )
    nesterov: bool = key(
        True, "muon, sgd: look ahead by the gradient of this step", used_by=("muon", "sgd")
    )
    trust_coefficient: float = key(
        0.001,
        "lars: trust coefficient, the norm of an update over the norm of its weight at lr=1 and "
        "without momentum",
        above=0,
        used_by=("lars",),
    )
    ns_steps: int = key(
        5,
        "muon: number of Newton-Schulz steps, which make updates orthogonal",
        minimum=1,
        used_by=("muon",),
    )
    ns_dtype: str = key(
        "bfloat16",
        "muon: number format of Newton-Schulz and of the messages to and from the rank that"
        " computes it; in `float32` weights do not depend on the number of ranks",
        choices=("bfloat16", "float32"),
        used_by=("muon",),
    )
    normuon: bool = key(
        False,
        "muon: divide each row of an orthogonal update by the root of its running mean square "
        "(NorMuon), so that all neurons change equally",
        used_by=("muon",),
    )
    normuon_beta: float = key(
        0.95, "NorMuon: decay of that running mean square", minimum=0, maximum=1, used_by=("muon",)
    )
    ns_coefficients: str = key(
        "quintic",
        "muon: polynomials of Newton-Schulz; `quintic`: Keller Jordan's, the same in each step;"
        " `polar_express`: one for each step, closer to orthogonal",
        choices=("quintic", "polar_express"),
        used_by=("muon",),
    )
    scale: str = key(
        "adamw",
        "muon: factor of an orthogonal update. `adamw`: 0.2 · √max(rows, columns), for the lr"
        " and weight decay of AdamW (Moonlight); `keller`: √max(1, rows / columns), for an lr"
        " of about 0.02",
        choices=("adamw", "keller"),
        used_by=("muon",),
    )
    lr_scaling: str | None = key(
        None,
        "scale lr with the batch: by (batch.rows × batch.seq_len / lr_batch_tokens), by its root "
        "(usual for Adam), or not (null)",
        choices=("sqrt", "linear"),
    )
    lr_batch_tokens: int | None = key(
        None, "the batch size, in tokens of a step, for which lr is given", minimum=1
    )
    grad_clip: float | None = key(1.0, "largest global gradient norm; null: off", above=0)
    grad_clip_value: float | None = key(
        None,
        "largest absolute value of a gradient's element, applied before the norm; null: off",
        above=0,
    )

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer's entry in OPTIMIZERS, or the user's own. Raises UserError."""
        own: OptimizerSpec | None = OPTIMIZERS.get(self.name)
        return own or usable_part("optimizer", self.name, OptimizerSpec)
