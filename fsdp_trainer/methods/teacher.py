"""A frozen second model in memory, sharded over the ranks that train.

It is a teacher, which is most of this file, or a reference (reference_model.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.config.context_methods import context_method, context_problems
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.methods import ObjectiveChoice, SecondModel
from fsdp_trainer.config.paths import model_folder, tokenizer_folder
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import AdapterSpec
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import Block, Decoder, MicroBatch
from fsdp_trainer.models.from_config.resolve import tensor_problems
from fsdp_trainer.models.from_config.setup import WeightSource
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.models.soft_targets import TeacherLogits
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.memory_check import stays_gathered
from fsdp_trainer.parallel.parallelize import Computation, parallelize, reshard
from fsdp_trainer.training.weights import digest_of_weights, fill


@dataclass
class FrozenModel:
    """A second model that only runs forward.

    source: where its weights are read. stays_gathered: True if each rank keeps all weights, as for
    the model in training.
    """

    name: ClassVar[str]
    """Name in messages, and key of the model's digest in a checkpoint's state."""
    advice: ClassVar[str]
    """Advice for the user if it is not the model that was used before."""

    model: Decoder
    source: WeightSource
    stays_gathered: bool

    def load(self, device: torch.device, computing: torch.device, dtype: str) -> str:
        """Read the weights and return "FORMAT:DIGEST" of them. Collective.

        device: where they are kept. computing: see allocate. dtype: their number format.
        """
        allocate(self.model, device, computing)
        fill(self.model, self.source, dtype)
        return f"{dtype}:{digest_of_weights(self.model)}"

    @classmethod
    def require_same(cls, second: SecondModel | None, checkpoint: Path | None, digest: str) -> None:
        """Raise UserError if `checkpoint` was trained with another model of this kind.

        digest: "FORM:DIGEST" as stored in a checkpoint; only digests of the same form are compared.
        checkpoint: None if the run is new.
        """
        form = digest.partition(":")[0]
        known = (read_progress(checkpoint).get(cls.name) if checkpoint else None) or ""
        if known.startswith(f"{form}:") and known != digest:
            text = (
                f"holds other weights than the {cls.name} that {checkpoint} was trained with.\n"
                f"{cls.advice}, or begin a new run:  run.name=NEW"
            )
            what = second.setting if second else ""
            raise UserError(f"the {cls.name} is another one", what, text)


@dataclass
class Teacher(FrozenModel):
    """A second model whose probabilities a student is trained on.

    vocabulary: number of tokens that both models know. choice: how they are compared.
    """

    name = "teacher"
    advice = "Give that one"
    vocabulary: int
    choice: ObjectiveChoice

    @contextmanager
    def reading(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the batch with soft targets, which are valid inside the context. Collective."""
        try:
            yield replace(batch, soft=self._soft_targets(batch))
        finally:
            if not self.stays_gathered:
                reshard(self.model)

    @torch.no_grad()
    def _soft_targets(self, batch: MicroBatch) -> TeacherLogits:
        hidden = self.model.states_for_head(batch)
        heat, kl = self.choice.temperature, self.choice.divergence
        return TeacherLogits(hidden, self.model.lm_head, self.vocabulary, heat, kl)


def shard_teacher(
    cfg: TrainConfig,
    source: Path,
    config: ModelConfig,
    student: ModelConfig,
    dims: Dims,
    compiled: bool,
) -> Teacher:
    """Return a teacher without weights, on the meta device. Collective.

    config: its architecture, padded as by `with_second_model`. student: that of the model in
    training. Must be called before `parallelize` of the student, whose budget for activations must
    stay in force.
    """
    model = meta_decoder(config)
    model.lm_head.passes_states = True  # the student's head makes the logits
    model = shard_frozen(model, Computation.of(cfg, compiled), dims)
    register_fsdp_forward_method(model, "states_for_head")
    known = min(config.vocab_size, student.vocab_size)
    weights = WeightSource(cfg.run.seed, source)
    stays = stays_gathered(dims.layout, config, cfg.precision)
    return Teacher(model, weights, stays, known, cfg.objective)


def shard_frozen(
    model: Decoder, computation: Computation, dims: Dims, adapters: AdapterSpec | None = None
) -> Decoder:
    """Shard a model on the meta device for forward only, and freeze it.

    computation: that of the model in training.
    """
    give_own_graphs(model)
    model = parallelize(model, dims, computation.forward_only(), adapters)
    model.requires_grad_(False)
    return model


def record_of_lists(digest: str) -> str:
    """Return the entry in a checkpoint for a teacher with stored lists. digest: of its files."""
    return f"lists:{digest}"


def give_own_graphs(model: Decoder) -> None:
    """Give the blocks a copy of their forward under another name.

    torch.compile remembers shapes per function: with a shared function, the second model's shapes
    would turn sizes in the first one's graphs into symbols. Blocks of transformers keep theirs.
    """
    forward = Block.forward
    code = forward.__code__.replace(co_name="teacher_forward")
    own = FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__)
    own_blocks: list[Any] = [block for block in model.blocks().values() if type(block) is Block]
    for block in own_blocks:
        block.forward = MethodType(own, block)


# --- origin of the second model, and checks -------------------------------------------------------


def fetch_second_model(second: SecondModel | None) -> Path | None:
    """Return the folder of a teacher or of a reference in memory, fetched from the hub if needed.

    None: there is no such model, or it is the model that the run begins with.
    """
    if second is None or not second.is_separate or second.is_start:
        return None
    return fetch(second.source, key=second.key)


def with_second_model(
    trained: ModelConfig, source: Path | None, ranks: int
) -> tuple[ModelConfig, ModelConfig]:
    """Return the architectures of the model in training and of the second model.

    Their vocabularies are padded to be divided equally by `ranks` ranks. source: folder of the
    second model; None: it has the trained one's architecture. Raises UserError for an architecture
    that is not supported.
    """
    second = read_architecture(model_folder(source)) if source else trained
    if ranks == 1:
        return trained, second
    # the vocabulary of random weights has no rows before the tokenizer is read
    rows = max(ranks, *(one.with_equal_rows(ranks).embedding_rows for one in (trained, second)))
    return replace(trained, vocab_multiple=rows), replace(second, vocab_multiple=rows)


def require_fitting(cfg: TrainConfig, trained: ModelConfig, second: ModelConfig) -> None:
    """Raise UserError for a second model that cannot read the rows on the ranks of the run.

    trained: architecture of the model in training. second: that of the second model.
    """
    assert cfg.second_model
    what, role = cfg.second_model.setting, cfg.second_model.role
    problems = [
        Problem(what, f"{problem.what} {problem.reason}")
        for problem in (
            *tensor_problems(second, cfg.sharding.tensor, cfg.batch.seq_len),
            *context_problems(cfg.sharding, cfg.batch.seq_len, cfg.model, second),
        )
    ]
    length, positions = cfg.batch.seq_len, second.max_position_embeddings
    if length > positions:
        reason = f"has a shorter context than the rows.\nUse  batch.seq_len={positions}"
        problems.append(Problem(what, reason))
    if EXPERTS in second.feed_forwards and cfg.sharding.tensor > 1:
        reason = "has experts, which tensor groups do not share with it.\nUse  sharding.tensor=1"
        problems.append(Problem(what, reason))
    if cfg.sharding.context > 1:
        problems += _other_methods(cfg, what, trained, second)
    if problems:
        raise UserError(f"the {role} cannot read what the trained model reads", problems)


def _other_methods(
    cfg: TrainConfig, what: str, trained: ModelConfig, second: ModelConfig
) -> Iterator[Problem]:
    """Yield a problem if the models would divide rows by different methods.

    The rows are laid out for one method only.
    """
    sharding, row = cfg.sharding, cfg.batch.seq_len
    methods = [
        context_method(sharding, row, one.on_tensor_rank(sharding.tensor))
        for one in (trained, second)
    ]
    if methods[0].method != methods[1].method:
        reason = (
            f"shares rows by {methods[1].method}, the trained model by {methods[0].method}.\n"
            "Use  sharding.context_method=gathered"
        )
        yield Problem(what, reason)


def require_same_vocabulary(
    second: SecondModel | None, tokenizer: TextTokenizer, source: Path
) -> None:
    """Raise UserError unless every ordinary token of the run has the same id in a second model.

    source: folder of the second model. If it has no tokenizer, only the sizes are compared.
    """
    rows = read_architecture(model_folder(source)).vocab_size
    if tokenizer.vocab_size > rows:
        reason = (
            f"knows {rows:,} tokens, and the run's tokenizer has {tokenizer.vocab_size:,}"
            f"{_first_beyond(tokenizer, rows)}"
        )
        raise _other_vocabulary(second, reason)
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
        raise _other_vocabulary(second, reason)


def _first_beyond(tokenizer: TextTokenizer, rows: int) -> str:
    text = tokenizer.backend.id_to_token(rows)
    return f".\nThe first that differs is {rows:,}: {text!r} here, no token there"


def _other_vocabulary(second: SecondModel | None, reason: str) -> UserError:
    assert second
    instead = "\nUse one of the same vocabulary: its probabilities are of its own tokens"
    return UserError(
        f"the {second.role} knows other tokens than the trained model",
        second.setting,
        reason + instead,
    )
