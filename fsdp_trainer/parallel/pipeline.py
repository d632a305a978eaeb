"""Pipeline parallelism: each rank has one or two stages of consecutive blocks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.base.torch_private import accumulate_gradients
from fsdp_trainer.config.pipeline_schedules import Stages, divide_blocks
from fsdp_trainer.errors import WHAT_GOES_TOGETHER, UserError
from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.decoder import Auxiliary, Decoder, MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims

EMBEDDING = "model.embed_tokens.weight"


class Ends(nn.Module):
    """Norm and head of a last stage, which are one FSDP unit.

    A tied embedding belongs to it, since its matrix is the head's.
    """

    def __init__(self, model: Decoder):
        super().__init__()
        if model.config.tie_word_embeddings:
            self.embed_tokens = model.model.embed_tokens
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor, *args: Any) -> Any:
        """Return the head's result for hidden states [tokens, hidden]. args: the head's others."""
        return self.lm_head(self.norm(hidden), *args)


class Stage(nn.Module):
    """Consecutive blocks, with the embedding in the first stage, with norm and head in the last.

    embed_tokens: None if it is not in this stage or if it belongs to `ends` on this rank.
    number, count: index of this stage and number of stages. scores: in the last stage, scores of
    each micro-batch since they were last read. auxiliary: the blocks' auxiliary values for each
    micro-batch of training.
    """

    def __init__(self, model: Decoder, number: int, count: int, names: Sequence[str]):
        super().__init__()
        self.number, self.count = number, count
        self.scores: list[Scores] = []
        self.auxiliary: list[Auxiliary] = []
        self.__dict__["decoder"] = model  # not a module of this one
        self.layers = nn.ModuleDict({name: model.model.layers[name] for name in names})
        is_in_ends = model.config.tie_word_embeddings and model.lm_head is not None
        has_embedding = self.is_first and not is_in_ends
        self.embed_tokens = model.model.embed_tokens if has_embedding else None
        self.ends: Any = Ends(model) if self.is_last else None

    @property
    def decoder(self) -> Decoder:
        return self.__dict__["decoder"]

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def forward(self, x: Tensor, batch: MicroBatch, objective: Objective | None = None) -> Tensor:
        """Return the residual stream, or in the last stage the objective's value.

        x: in the first stage the tokens, else the residual stream, [batch, length, hidden]. The
        value is a scalar, 0 without an objective.
        """
        decoder = self.decoder
        x = self.embed(x) if self.is_first else ContiguousGradient.apply(x)
        share = batch.token_share if objective else None  # a validation has no auxiliary losses
        blocks = dict(self.layers.items())
        x, auxiliary = decoder.run_blocks(
            x, batch.positions, batch.layout, blocks, token_share=share
        )
        if auxiliary:
            x = self.minimise(x, auxiliary)
        if not self.is_last:
            return x.contiguous()
        hidden = decoder.all_tokens(x).flatten(0, 1).index_select(0, batch.index)
        value, scores = self.ends(hidden, batch.targets, objective)
        self.scores.append(scores)
        return hidden.new_zeros((), dtype=torch.float32) if value is None else value

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embed_tokens is None:
            # the last stage would gather it, but too late for a step's first micro-batch
            stages_of(self.decoder)[-1].ends.unshard()
        return self.decoder.embed(tokens)

    def minimise(self, x: Tensor, auxiliary: Auxiliary) -> Tensor:
        """Attach the blocks' auxiliary losses to the stream's backward, and keep their values.

        They need no gradient from other stages, since each is a summand of the total loss.
        """
        balance = self.decoder.balance
        assert balance is not None
        numbers = [int(name) for name in self.layers]
        self.auxiliary.append(balance.of_stage(auxiliary, numbers))
        losses = [value for name, value in auxiliary.items() if name.endswith("_loss")]
        return WithLoss.apply(x, sum(losses[1:], start=losses[0])) if losses else x

    def advance(
        self,
        x: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        index: Tensor,
        caches: Mapping[str, Cache],
    ) -> Tensor:
        """Return the residual stream, or in the last stage logits [index, vocabulary].

        Used for inference. x: as in `forward`; other arguments: see Decoder.next_logits.
        """
        decoder = self.decoder
        with decoder.inference():
            x = self.embed(x) if self.is_first else x
            x, _ = decoder.run_blocks(x, positions, layout, dict(self.layers.items()), caches)
            x = decoder.all_tokens(x)
        if not self.is_last:
            return x.contiguous()
        return self.ends(x.flatten(0, 1).index_select(0, index))


class ContiguousGradient(torch.autograd.Function):
    """Identity with a contiguous gradient, as is required to send it to another rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class WithLoss(torch.autograd.Function):
    """Identity on the residual stream whose backward also runs backward of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype, loss.device
        return x.clone()  # not a view: zbv and dualpipev detach a stage's output in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream's gradient, and 1 for the loss."""
        dtype, device = ctx.loss
        return gradients[0], torch.ones((), dtype=dtype, device=device)


# --- a model in stages


def stages_of(model: nn.Module) -> list[Stage]:
    return model.__dict__.get("stages", [])


def block_costs(model: Decoder) -> tuple[list[int], int]:
    """Return the number of weights that a token uses in each block and in the head, as costs."""
    costs = [sum(map(_numbers_met, block.modules())) for block in model.blocks().values()]
    return costs, model.lm_head.weight.numel()


def _numbers_met(module: nn.Module) -> int:
    """Return how many of a module's own weights a token uses: of experts, the chosen ones."""
    count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return round(count * getattr(module, "active_share", 1))


def blocks_by_stage(model: Decoder, stages: int) -> list[list[int]]:
    costs, head = block_costs(model)
    return divide_blocks(costs, head, stages)


def cut_into_stages(model: Any, dims: Dims) -> None:
    """Reduce a complete model on the meta device to this rank's stages, if there is a pipeline.

    Names do not change. A tied embedding stays on the ranks of the first and of the last stage.
    Raises UserError if a rank would have nothing to train.
    """
    stages = dims.layout.stages
    if stages.ranks == 1:
        return
    require_no_auxiliary(model, stages.ranks)
    whole = copy.deepcopy(model)
    parts = blocks_by_stage(whole, stages.count)
    numbers = stages.of_rank(dims.coordinates["pipeline"])
    names = {number: [str(i) for i in parts[number]] for number in numbers}
    own = {name for stage in names.values() for name in stage}
    for name in set(model.blocks()) - own:
        del model.model.layers[name]
    last = len(parts) - 1
    is_tied = model.config.tie_word_embeddings
    if 0 not in numbers and not (is_tied and last in numbers):
        model.model.embed_tokens = None
    if last not in numbers:
        model.model.norm = model.lm_head = None
    model.cut_from = (whole,)
    model.__dict__["stages"] = [Stage(model, n, len(parts), names[n]) for n in numbers]
    require_training(whole, stages, parts)


def require_no_auxiliary(model: Decoder, ranks: int) -> None:
    """Raise UserError if modules declare `auxiliary_names`, which stages do not pass on."""
    if model.auxiliary_names:
        values = ", ".join(model.auxiliary_names)
        reason = f"blocks that return {values} are not cut into stages: {WHAT_GOES_TOGETHER}.\n"
        key = f"sharding.pipeline={ranks}"
        raise UserError(
            "this model cannot be cut into stages", key, f"{reason}Use  sharding.pipeline=1"
        )


def require_training(whole: Decoder, stages: Stages, parts: list[list[int]]) -> None:
    trained = {name for name, p in whole.named_parameters() if p.requires_grad}
    for rank in range(stages.ranks):
        numbers = stages.of_rank(rank)
        prefixes = [f"model.layers.{i}." for number in numbers for i in parts[number]]
        is_last = len(parts) - 1 in numbers
        if 0 in numbers or (is_last and whole.config.tie_word_embeddings):
            prefixes.append("model.embed_tokens.")
        prefixes += ["model.norm.", "lm_head."] if is_last else []
        if not any(name.startswith(tuple(prefixes)) for name in trained):
            blocks = f"{parts[numbers[0]][0]} to {parts[numbers[0]][-1]}"
            reason = (
                f"leaves rank {rank} of the pipeline, with blocks {blocks}, nothing to train.\n"
                "Train some of it, or use  sharding.pipeline=1"
            )
            raise UserError(
                "a stage has nothing to train", f"sharding.pipeline={stages.ranks}", reason
            )


def is_tied_to_itself(model: Decoder) -> bool:
    stages = stages_of(model)
    is_both = bool(stages) and stages[0].is_first and stages[-1].is_last
    return is_both and model.config.tie_word_embeddings


def copies_in_stages(name: str, model: Decoder) -> int:
    """Return the number of ranks of a pipeline that hold a parameter of this rank.

    A tied embedding is on two, unless one rank has both the first and the last stage.
    """
    is_copied = name == EMBEDDING and model.config.tie_word_embeddings
    return 2 if is_copied and stages_of(model) and not is_tied_to_itself(model) else 1


# --- a step


class Pipeline:
    """This rank's stages and their schedule.

    count: number of micro-batches that it runs at a time. after_backward: called on the rank of the
    first stage with the number of each micro-batch whose backward is complete.
    """

    def __init__(
        self,
        model: Decoder,
        dims: Dims,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Build the stages and the schedule. dtype: format of the residual stream. Collective."""
        # imported here: importing it takes a second, and torch before 2.13 has another API
        from fsdp_trainer.parallel import pipeline_runtime as runtime

        layout = dims.layout
        self.model, self.dims, self.dtype, self.device = model, dims, dtype, device
        self.config, self.division = model.config, layout.stages
        self.group = dims.group("pipeline")
        self.count = self.division.in_rounds(layout.micro_batches)
        self.after_backward: Callable[[int], None] = lambda number: None
        self.own = {stage.number: stage for stage in stages_of(model)}
        self.stage_count = self.division.count
        tokens = layout.row_tokens // layout.sharding.tensor
        shape = (layout.batch.micro_rows, tokens, self.config.hidden_size)
        stream = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        kind = runtime.LeanStage if layout.reduces_once else runtime.EagerStage
        last = runtime.LateStage if is_tied_to_itself(model) else kind
        self.stages = [
            (last if stage.is_last else kind)(
                stage,
                number,
                self.stage_count,
                device,
                stream,
                self.group,
                self._reached_input if number == 0 else lambda number: None,
            )
            for number, stage in self.own.items()
        ]
        single = self.division.order.stages == 1
        self.schedule = runtime.SCHEDULES[self.division.schedule](
            self.stages[0] if single else self.stages,
            self.count,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )
        self.run_schedule = runtime.run_schedule
        self.copies = self._group_of_copies()

    def _group_of_copies(self) -> dist.ProcessGroup | None:
        """Return the group of the two ranks that have a copy of a tied embedding. Collective.

        None if it is not tied or if one rank has both the first and the last stage.
        """
        last = self.division.rank_of(self.stage_count - 1)
        if last == 0 or not self.config.tie_word_embeddings:
            return None
        members = [[group[0], group[last]] for group in self.dims.groups_along("pipeline")]
        return dist.new_subgroups_by_enumeration(members, self.dims.timeout)[0]

    def _reached_input(self, number: int) -> None:
        if is_tied_to_itself(self.model):
            accumulate_gradients(stages_of(self.model)[-1].ends)
        self.after_backward(number)

    @property
    def last(self) -> Stage | None:
        return self.own.get(self.stage_count - 1)

    def train(
        self, batches: Sequence[MicroBatch], objectives: Sequence[Objective]
    ) -> list[tuple[Tensor, Scores]]:
        """Compute the summed, sharded gradients of `count` micro-batches. Collective.

        Returns value and scores of each micro-batch; empty on ranks without the last stage.
        """
        values = self._run(batches, objectives, train=True)
        for stage in self.stages:
            stage.finish()
        self._add_gradients_of_copies()
        scores = self._pop_scores()
        return [(value.detach(), each) for value, each in zip(values, scores, strict=True)]

    @torch.no_grad()
    def score(self, batches: Sequence[MicroBatch]) -> list[Scores]:
        """Return the scores of `count` micro-batches; empty on ranks without the last stage.

        Collective.
        """
        self._run(batches, [None] * len(batches), train=False)
        return self._pop_scores()

    def _run(
        self, batches: Sequence[MicroBatch], objectives: Sequence[Objective | None], train: bool
    ) -> list[Tensor]:
        inputs = [(batch.tokens,) for batch in batches]
        pairs = zip(batches, objectives, strict=True)
        options = [{"batch": batch, "objective": objective} for batch, objective in pairs]
        self._pop_scores()
        return self.run_schedule(self.schedule, self.stages, inputs, options, train)

    def pop_auxiliary(self) -> list[Auxiliary]:
        values = [value for stage in self.own.values() for value in stage.auxiliary]
        for stage in self.own.values():
            stage.auxiliary = []
        return values

    def _pop_scores(self) -> list[Scores]:
        if self.last is None:
            return []
        scores, self.last.scores = self.last.scores, []
        return scores

    @torch.no_grad()
    def _add_gradients_of_copies(self) -> None:
        """Sum the gradients of a tied embedding's two copies, so that both stay equal."""
        if self.copies is None or not {0, self.stage_count - 1} & self.own.keys():
            return
        gradient = self.model.get_parameter(EMBEDDING).grad
        if gradient is not None:
            dist.all_reduce(local_part(gradient), group=self.copies)

    # --- inference

    def blocks(self) -> dict[str, nn.Module]:
        return self.model.blocks()

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        index: Tensor,
        caches: Mapping[str, Cache] = MappingProxyType({}),
    ) -> Tensor:
        """Run one stage after the other, as Decoder.next_logits; all ranks get the logits.

        Collective.
        """
        x = tokens
        for number in range(self.stage_count):
            if number in self.own:
                x = self.own[number].advance(x, positions, layout, index, caches).contiguous()
            else:
                shape = (*tokens.shape, self.config.hidden_size)
                if number == self.stage_count - 1:
                    shape = (len(index), self.config.vocab_size)
                x = torch.empty(shape, dtype=self.dtype, device=tokens.device)
            owner = self.division.rank_of(number)
            assert self.group
            dist.broadcast(x, dist.get_global_rank(self.group, owner), group=self.group)
        return x
