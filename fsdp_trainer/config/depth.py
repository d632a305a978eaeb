"""The settings that follow from model.depth: one number decides the model's sizes and its training.

The rules are those of nanochat (Karpathy 2025, scripts/base_train.py), which measured them on
models of 12 to 26 blocks. docs/depth.md states them.
"""

import math

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.check import Report
from fsdp_trainer.config.parts.optimizers import OPTIMIZERS
from fsdp_trainer.config.schema import Model, TrainConfig

WIDTH_PER_BLOCK = 64
HEAD_DIM = 128
SEQ_LEN = 2048
MAX_POSITIONS = 8192
ROPE_THETA = 100_000.0
"""The value of SmolLM2, which leaves room for the longer rows of later stages."""
VOCABULARY = 32_768
"""nanochat's vocabulary size, used if model.vocab_size is not set."""
REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19
"""The best number of tokens per step for 12 blocks, measured by nanochat."""
BATCH_EXPONENT = 0.383
"""Exponent of the best batch size as a power of the total number of tokens (arXiv 2505.13738)."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2")
"""Model families with dense blocks, ordinary attention and a gated feed-forward layer."""


def settle_depth(cfg: TrainConfig, report: Report) -> None:
    """Set the values that follow from model.depth, except keys set by the user or a recipe."""
    if "model.depth" not in report.typed and cfg.model.name != "auto":
        cfg.model.depth = None  # it comes from a recipe: a named size wins
    if cfg.model.depth is None:
        return
    reason = contradiction(cfg)
    if reason:
        report.add("model.depth", cfg.model.depth, reason)
        return
    for name, size in sizes(cfg.model, cfg.model.depth).items():
        if getattr(cfg.model, name) is None:
            setattr(cfg.model, name, size)
    set_unless_given(cfg, report, "batch.seq_len", SEQ_LEN)
    tokens = cfg.train.tokens_per_parameter * scaling_parameters(cfg.model)
    rows = max(1, round(best_batch(cfg, tokens) / cfg.batch.seq_len))
    set_unless_given(cfg, report, "batch.rows", rows)
    step_tokens = cfg.batch.rows * cfg.batch.seq_len
    if not is_given(report, "train.epochs"):
        set_unless_given(cfg, report, "train.steps", max(1, round(tokens / step_tokens)))
    if not is_given(report, "optim.lr"):
        settle_learning_rate(cfg, report)


def contradiction(cfg: TrainConfig) -> str:
    """Return the reason why model.depth contradicts other keys of model; "" if it does not."""
    model, depth = cfg.model, cfg.model.depth
    if model.init_from:
        return f"{model.init_from} decides all sizes: drop it"
    if model.name != "auto":
        return f"model={model.name} has sizes of its own.\nUse  model=auto  or drop model.depth"
    if model.family not in (None, *FAMILIES):
        named = ", ".join(FAMILIES)
        return f"knows no rules for the blocks of {model.family}.\nIt has them for {named}"
    if model.num_hidden_layers not in (None, depth):
        return f"is not model.num_hidden_layers={model.num_hidden_layers}: drop one of them"
    return ""


def sizes(model: Model, depth: int) -> dict[str, int | float | bool]:
    """Return the sizes of a model with `depth` blocks, by key of model.

    The width is a multiple of the head size. Three feed-forward matrices of 8/3 of the width have
    as many weights as nanochat's two of four times the width.
    """
    head_dim = model.head_dim or HEAD_DIM
    width = model.hidden_size or round_up(WIDTH_PER_BLOCK * depth, HEAD_DIM)
    heads = model.num_attention_heads or max(1, width // head_dim)
    return {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "intermediate_size": round_up(8 * width // 3, HEAD_DIM),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": ROPE_THETA,
    }


def scaling_parameters(model: Model) -> int:
    """Return the number of weights for tokens per parameter: all but the embedding and norms."""
    given = [
        model.num_hidden_layers,
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
    ]
    blocks, width, inner, heads, key_heads, head_dim = (int(size or 0) for size in given)
    attention = 2 * width * head_dim * (heads + key_heads)
    vocabulary = model.vocab_size or VOCABULARY
    return blocks * (attention + 3 * width * inner) + vocabulary * width


def best_batch(cfg: TrainConfig, tokens: float) -> int:
    """Return the best number of tokens per step, a power of 2, for training on `tokens` tokens."""
    reference = Model(vocab_size=cfg.model.vocab_size)
    for name, size in sizes(reference, REFERENCE_DEPTH).items():
        setattr(reference, name, size)
    reference_tokens = cfg.train.tokens_per_parameter * scaling_parameters(reference)
    best = REFERENCE_BATCH * (tokens / reference_tokens) ** BATCH_EXPONENT
    return 2 ** round(math.log2(best))


def settle_learning_rate(cfg: TrainConfig, report: Report) -> None:
    """Set optim.lr, which falls with the square root of the width and rises with the batch's."""
    reference = cfg.optim.spec.depth_lr
    if reference is None:
        known = "  or  ".join(f"optim={name}" for name, spec in OPTIMIZERS.items() if spec.depth_lr)
        reason = f"model.depth knows none for {cfg.optim.name}: write one, or  {known}"
        report.add("optim.lr", cfg.optim.lr, reason)
        return
    width = cfg.model.hidden_size or 1
    narrower = WIDTH_PER_BLOCK * REFERENCE_DEPTH / width
    larger = cfg.batch.rows * cfg.batch.seq_len / REFERENCE_BATCH
    rate = reference * math.sqrt(narrower * larger)
    set_unless_given(cfg, report, "optim.lr", float(f"{rate:.2e}"))


def is_given(report: Report, key: str) -> bool:
    return key in report.typed or key in report.in_recipes


def set_unless_given(cfg: TrainConfig, report: Report, key: str, value: float) -> None:
    """Set a key that neither the command line nor a recipe sets."""
    if is_given(report, key):
        return
    group, _, name = key.partition(".")
    setattr(getattr(cfg, group), name, value)
    report.origins[key] = report.typed.get("model.depth", f"model.depth={cfg.model.depth}")


def depth_in_words(cfg: TrainConfig) -> str:
    """Return a line with the model's sizes and its training, after model.depth was applied."""
    model, batch = cfg.model, cfg.batch
    step = batch.rows * batch.seq_len
    length = ""
    if cfg.train.steps:
        tokens = cfg.train.steps * step
        ratio = tokens / scaling_parameters(model)
        length = f", {cfg.train.steps:,} steps = {tokens:,} tokens, {ratio:.3g} a parameter"
    return (
        f"model.depth={model.depth}: width {model.hidden_size:,}, {model.num_attention_heads} heads"
        f" of {model.head_dim}; {batch.rows} rows × {batch.seq_len:,} tokens = {step:,} a step"
        f"{length}; optim.lr={cfg.optim.lr:g}"
    )
