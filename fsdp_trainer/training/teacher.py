"""A teacher in memory: a frozen model beside the student, shared by the same ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.config.context import context_method, context_problems
from fsdp_trainer.config.paths import model_folder, tokenizer_folder
from fsdp_trainer.config.schema import (
    DISTIL,
    ActivationCheckpoint,
    Adapter,
    ObjectiveChoice,
    Train,
    TrainConfig,
)
from fsdp_trainer.data.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.hub import fetch
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import Block, Decoder, MicroBatch, meta_decoder
from fsdp_trainer.models.resolve import tensor_problems
from fsdp_trainer.models.soft_targets import TeacherLogits
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.parallel.parallelize import parallelize, reshard
from fsdp_trainer.training.stored_reference import digest_of_weights
from fsdp_trainer.training.weights import fill

RECORD = "teacher"
"""Key of a checkpoint's state."""


@dataclass
class Teacher:
    """A frozen model whose probabilities a student learns from.

    source: its folder. vocabulary: tokens that both know. stays_gathered: each rank keeps all
    weights, as the student's.
    """

    model: Decoder
    source: Path
    choice: ObjectiveChoice
    vocabulary: int
    stays_gathered: bool

    @contextmanager
    def reading(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the batch with soft targets, which hold as long as this lasts. Collective."""
        try:
            yield replace(batch, soft=self._soft_targets(batch))
        finally:
            if not self.stays_gathered:
                reshard(self.model)

    @torch.no_grad()
    def _soft_targets(self, batch: MicroBatch) -> TeacherLogits:
        """Return the hidden states of the targets and the head, which the forward has gathered."""
        hidden: Tensor = self.model(replace(batch, token_share=None)).scores
        temperature, kl = self.choice.temperature, self.choice.divergence
        return TeacherLogits(hidden, self.model.lm_head, self.vocabulary, temperature, kl)


def build_teacher(
    cfg: TrainConfig, source: Path | None, student: ModelConfig, dims: Dims, compiled: bool
) -> Teacher | None:
    """Return a teacher without weights, on the meta device; None: the run has none.

    source: its folder. Before the student's `parallelize`, whose budget for activations holds.
    Collective.
    """
    if source is None:
        return None
    _, config = with_teacher(student, source, cfg.sharding.tensor)
    return share_teacher(cfg, source, config, student, dims, compiled)


def share_teacher(
    cfg: TrainConfig,
    source: Path,
    config: ModelConfig,
    student: ModelConfig,
    dims: Dims,
    compiled: bool,
) -> Teacher:
    """Return what build_teacher does, of a teacher with this architecture."""
    model = meta_decoder(config)
    model.lm_head.forward = lambda hidden, *_: (None, hidden)  # the student's head makes the logits
    give_own_graphs(model)
    model = parallelize(model, dims, frozen(cfg), None, compiled)
    model.requires_grad_(False)
    known = min(config.vocab_size, student.vocab_size)
    return Teacher(model, source, cfg.objective, known, keeps_gathered(cfg.sharding))


def fill_teacher(
    teacher: Teacher | None,
    cfg: TrainConfig,
    checkpoint: Path | None,
    device: torch.device,
    computing: torch.device,
) -> str | None:
    """Read a teacher's weights; return their digest, behind the format in which they are kept.

    Collective. device: where they are kept; computing: where they are computed with. Raises
    UserError unless `checkpoint`, from which the run goes on, was trained with them, as far as
    that can be compared: not in another format.
    """
    if teacher is None:
        return None
    allocate(teacher.model, device, computing)
    fill(teacher.model, frozen(cfg), teacher.source)
    format = f"{cfg.precision.param_dtype}:"
    digest = format + digest_of_weights(teacher.model)
    known = (read_progress(checkpoint).get(RECORD) if checkpoint else None) or ""
    if known.startswith(format) and known != digest:
        text = (
            f"holds other weights than the teacher that {checkpoint} was trained with.\n"
            "Give that one, or begin a new run:  run.name=NEW"
        )
        what = f"objective.teacher={cfg.objective.teacher}"
        raise UserError("the teacher is another one", [Problem(what, text)])
    return digest


def readers(student: ModelConfig, teacher: Teacher | None) -> list[ModelConfig]:
    """Return the architectures that read a run's rows, the student's first."""
    return [student] if teacher is None else [student, teacher.model.config]


def give_own_graphs(model: Decoder) -> None:
    """Give the blocks a forward of another name, the same otherwise.

    torch.compile remembers shapes by function: those of a second model would become symbols in the
    first one's graphs.
    """
    forward = Block.forward
    code = forward.__code__.replace(co_name="teacher_forward")
    own = FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__)
    for block in model.blocks().values():
        block.forward = MethodType(own, block)


def frozen(cfg: TrainConfig) -> TrainConfig:
    """Return the configuration of the same layout for a model that only computes forward.

    Its weights are kept in the number format in which they are computed with.
    """
    dtype = cfg.precision.param_dtype
    return replace(
        cfg,
        adapter=Adapter(),
        train=Train(),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        precision=replace(cfg.precision, master_dtype=dtype, float8=None),
        sharding=replace(cfg.sharding, separate_reduce_scatter=False, reduce_scatter_buffers=1),
    )


# --- what it is, and whether it fits --------------------------------------------------------------


def fetch_teacher(cfg: TrainConfig) -> Path | None:
    """Return the folder of objective.teacher, fetched if it is on the hub; None: there is none."""
    named = cfg.objective.teacher
    if cfg.objective.name != DISTIL or named is None:
        return None
    return fetch(named, key="objective.teacher")


def with_teacher(student: ModelConfig, source: Path, ranks: int) -> tuple[ModelConfig, ModelConfig]:
    """Return student and teacher with a vocabulary that `ranks` ranks share alike.

    source: the teacher's folder. Raises UserError for an architecture that is not supported.
    """
    teacher = ModelConfig.from_hf(model_folder(source))
    if ranks == 1:
        return student, teacher
    rows = max(one.with_equal_rows(ranks).embedding_rows for one in (student, teacher))
    return replace(student, vocab_multiple=rows), replace(teacher, vocab_multiple=rows)


def require_fitting(cfg: TrainConfig, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raise UserError for a teacher that cannot read the student's rows on the student's ranks."""
    named = cfg.objective.teacher
    what = f"objective.teacher={named}"
    problems = [
        Problem(what, f"{problem.what} {problem.why}")
        for problem in (*tensor_problems(cfg, teacher), *context_problems(cfg, teacher))
    ]
    length, positions = cfg.batch.seq_len, teacher.max_position_embeddings
    if length > positions:
        reason = f"has a shorter context than the rows.\nUse  batch.seq_len={positions}"
        problems.append(Problem(what, reason))
    if EXPERTS in teacher.feed_forwards and cfg.sharding.tensor > 1:
        reason = "has experts, which tensor groups do not share with it.\nUse  sharding.tensor=1"
        problems.append(Problem(what, reason))
    if cfg.sharding.context > 1:
        problems += _other_methods(cfg, what, student, teacher)
    if problems:
        raise UserError("the teacher cannot read what the student reads", problems)


def _other_methods(
    cfg: TrainConfig, what: str, student: ModelConfig, teacher: ModelConfig
) -> Iterator[Problem]:
    """Yield why both cannot share rows by one method, for which the rows are laid out."""
    shares = cfg.sharding.tensor
    methods = [
        context_method(cfg, replace(one, num_attention_heads=one.num_attention_heads // shares))
        for one in (student, teacher)
    ]
    if methods[0].method != methods[1].method:
        reason = (
            f"shares rows by {methods[1].method}, the student by {methods[0].method}.\n"
            "Use  sharding.context_method=gathered"
        )
        yield Problem(what, reason)


def require_same_vocabulary(cfg: TrainConfig, tokenizer: TextTokenizer, source: Path) -> None:
    """Raise UserError unless every ordinary token of the run has the same number in the teacher.

    source: the teacher's folder. One without a tokenizer can be compared by its size alone.
    """
    what = f"objective.teacher={cfg.objective.teacher}"
    rows = ModelConfig.from_hf(model_folder(source)).vocab_size
    if tokenizer.vocab_size > rows:
        reason = (
            f"knows {rows:,} tokens, and the run's tokenizer has {tokenizer.vocab_size:,}"
            f"{_first_beyond(tokenizer, rows)}"
        )
        raise _other_vocabulary(what, reason)
    try:
        other = load_tokenizer(str(tokenizer_folder(source)))
    except UserError:
        return
    special = {*tokenizer.special_tokens.values(), *other.special_tokens.values()}
    theirs = {id: text for text, id in other.backend.get_vocab().items()}
    different = [
        (id, text)
        for text, id in tokenizer.backend.get_vocab().items()
        if id not in special and theirs.get(id) != text
    ]
    if different:
        id, text = min(different)
        there = f"{theirs[id]!r}" if id in theirs else "no token"
        reason = (
            f"has another vocabulary: {len(theirs):,} tokens, the run's tokenizer "
            f"{tokenizer.vocab_size:,}. The first that differs is {id:,}: {text!r} here, {there} "
            "there"
        )
        raise _other_vocabulary(what, reason)


def _first_beyond(tokenizer: TextTokenizer, rows: int) -> str:
    text = tokenizer.backend.id_to_token(rows)
    return f".\nThe first that differs is {rows:,}: {text!r} here, no token there"


def _other_vocabulary(what: str, reason: str) -> UserError:
    instead = "\nUse a teacher of the student's vocabulary: its probabilities are of its own tokens"
    return UserError("teacher and student know other tokens", [Problem(what, reason + instead)])
