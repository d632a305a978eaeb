"""Training on the model's own answers, by their rewards: grpo.

The loss uses the probability of each token, and the advantage of its answer over the other answers
to the same prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.checkpoint.frozen_weights import Base
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.rules.rules_server import sends_adapter, server_folder
from fsdp_trainer.config.schema import Checkpoint
from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.reference_model import (
    REFERENCE_ARCHITECTURE,
    ReferenceModel,
    architecture_digest,
    build_reference,
)
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.methods.teacher import FrozenModel
from fsdp_trainer.models.adapters.adapters import without_adapters
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.observe.step_log import finite_or_none
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.rl.rewards.model import ModelReward
from fsdp_trainer.rl.rewards.reward import Reward
from fsdp_trainer.rl.rounds.answers import ADVANTAGE, SAMPLED
from fsdp_trainer.rl.rounds.rank_rounds import RankRounds
from fsdp_trainer.rl.rounds.rollout_source import RolloutSource
from fsdp_trainer.rl.rounds.round_makers import RoundMakers
from fsdp_trainer.rl.rounds.rounds import OwnRounds, Rounds
from fsdp_trainer.rl.serving.policy_server import PolicyServer, ServedModel
from fsdp_trainer.rl.serving.policy_weights import PolicyWeights
from fsdp_trainer.rl.serving.server_sampler import find_served
from fsdp_trainer.training.batches import BatchOptions, StepPlan
from fsdp_trainer.training.data_source import DataSource, SourceContext, StoredRows
from fsdp_trainer.training.documents.document_sums import answer_sums
from fsdp_trainer.training.metrics import MethodMetric, MicroBatchResult
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward, with_step_token_share

REFERENCE = "reference"
"""Name in MicroBatch.columns of a token's log-probability under the reference. The others are those
of packed answers."""


@dataclass(frozen=True)
class PolicyGradient:
    """Σ weight · loss of a micro-batch's tokens (Shao et al. 2024, eq. 3; Yu et al. 2025, §3).

    Variants: GSPO (Zheng et al. 2025, eq. 13) and CISPO (MiniMax-M1, 2025, eq. 4). The head calls
    it. weights: [tokens] float32, already divided by the step's Σ weight. columns: see columns_of.
    batch, dims: for GSPO's sums over answers; see answer_sums.
    """

    weights: Tensor
    columns: dict[str, Tensor]
    cfg: ObjectiveChoice
    batch: MicroBatch | None = None
    dims: Dims | None = None
    needs_mean = False

    @property
    def needs_all_tokens(self) -> bool:
        return self.cfg.compares_answers

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        log_probability, advantage = scores.log_probability, self.columns[ADVANTAGE][tokens]
        ratio = self.ratio(scores, tokens)
        if self.cfg.surrogate == "cispo":
            weight = ratio.detach().clamp(max=1 + self.cfg.clip_high)
            loss = -weight * advantage * log_probability
        else:
            clipped = ratio.clamp(1 - self.cfg.clip_low, 1 + self.cfg.clip_high)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if self.cfg.samples_elsewhere and self.cfg.updates == 1:
            loss = loss * self.importance(scores, tokens)
        if self.cfg.kl:
            distance = self.columns[REFERENCE][tokens] - log_probability
            loss = loss + self.cfg.kl * (distance.exp() - distance - 1)
        return (loss * self.weights[tokens]).sum()

    def ratio(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the ratio of each token's probability now to its probability at sampling.

        With a single update per set of answers the ratio is 1, and only its derivative matters: the
        model has not changed since sampling, or `importance` corrects for the change.
        """
        if self.cfg.updates == 1:
            return (scores.log_probability - scores.log_probability.detach()).exp()
        change = scores.log_probability - self.columns[SAMPLED][tokens]
        if self.cfg.compares_answers:
            # the answer's mean change, with the derivative of this token's
            change = self.answer_means(change.detach()) + (change - change.detach())
        return change.exp().clamp(max=self.cfg.importance_cap)

    def answer_means(self, values: Tensor) -> Tensor:
        """Return for each token the mean of the values of its answer's tokens. Collective."""
        assert self.batch is not None
        both = torch.stack([values, torch.ones_like(values)])
        sums, counts = answer_sums(both, self.batch, self.dims)
        means = F.pad(sums / counts.clamp(min=1), (0, 1))  # the last one: of padding
        return means[self.batch.documents.index].to(values.dtype)

    def importance(self, scores: Scores, tokens: slice) -> Tensor:
        """Return truncated importance weights of tokens (Yao et al. 2025).

        They correct for the older weights or the other numerics of the sampler.
        """
        difference = scores.log_probability.detach() - self.columns[SAMPLED][tokens]
        return difference.exp().clamp(max=self.cfg.importance_cap)


@dataclass(frozen=True)
class BaseTokens:
    """The reference of a model with adapters: the same model without them."""

    model: Decoder

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each target, [supervised]. Collective."""
        with without_adapters(self.model):
            return self.model(batch).scores.log_probability


@dataclass(kw_only=True)
class RolloutForwardBackward(ForwardBackward):
    """Runs micro-batches of answers. The reported loss is the objective's.

    reference: function for the reference's log-probabilities of targets; None without objective.kl.
    """

    choice: ObjectiveChoice
    reference: Callable[[MicroBatch], Tensor] | None = None

    def compute(self, plan: StepPlan, batch: MicroBatch) -> MicroBatchResult:
        phases.enter("forward")
        batch = with_step_token_share(batch, plan)
        if self.reference is not None:
            columns = {**batch.columns, REFERENCE: self.reference(batch)}
            batch = replace(batch, columns=columns)
        weights = batch.weights / (plan.weight or 1.0)
        scale = to_device_of(self.loss_scale.scale, weights) if self.loss_scale else 1.0
        objective = PolicyGradient(weights, columns_of(batch), self.choice, batch, self.dims)
        value, scores, auxiliary = self.model(batch, replace(objective, weights=weights * scale))
        phases.enter("backward")
        value.backward()
        loss = objective(scores, slice(0, len(weights)))
        return MicroBatchResult(batch, scores, loss, value.detach() / scale, auxiliary)


class RolloutMetrics:
    """Metrics of a step's answers, as means over their tokens.

    Sums: number of tokens, Σ -log-probability (an estimate of the entropy), number of tokens whose
    gradient is stopped by clipping, Σ estimates of the KL divergence between sampling and training,
    Σ |difference of log-probabilities| between sampling and training, and Σ estimates of the KL
    divergence between the model and its reference.
    """

    keys: tuple[str, ...] = ("entropy", "clip_share", "sampler_kl", "sampler_difference", "kl")
    size = 1 + len(keys)
    of_tokens = True

    def __init__(self, cfg: ObjectiveChoice, dims: Dims | None = None):
        self.cfg, self.dims = cfg, dims

    def part(self, result: MicroBatchResult) -> Tensor:
        scores, batch = result.scores, result.batch
        columns = columns_of(batch)
        mask = batch.weights > 0
        objective = PolicyGradient(batch.weights, columns, self.cfg, batch=batch, dims=self.dims)
        every = slice(0, len(batch.targets))
        ratio = objective.ratio(scores, every)
        gain = columns[ADVANTAGE]
        is_clipped = ((ratio > 1 + self.cfg.clip_high) & (gain > 0)) | (
            (ratio < 1 - self.cfg.clip_low) & (gain < 0)
        )
        change = scores.log_probability - columns[SAMPLED]
        distance = columns[REFERENCE] - scores.log_probability
        values = [
            torch.ones_like(change),
            -scores.log_probability,
            is_clipped,
            change.exp() - change - 1,
            change.abs(),
            distance.exp() - distance - 1,
        ]
        return torch.stack([(value.double() * mask).sum() for value in values])

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the means, with `kl` only if there is a reference."""
        count, *totals = sums
        keys = self.keys if self.cfg.kl else self.keys[:-1]
        pairs = zip(keys, totals, strict=False)
        return {key: finite_or_none(total / count) for key, total in pairs} if count else {}


def columns_of(batch: MicroBatch) -> dict[str, Tensor]:
    zeros = torch.zeros_like(batch.weights)
    return {name: batch.columns.get(name, zeros) for name in (ADVANTAGE, SAMPLED, REFERENCE)}


def short_contexts(rewards: Sequence[Reward], prompt: int, answer: int) -> list[str]:
    """Return a warning for each reward model that may not read the longest prompt and answer.

    prompt, answer: the most tokens of both. It is no error: the model's answers may stay shorter,
    and the reward model may have another tokenizer.
    """
    lines = []
    for reward in rewards:
        if not isinstance(reward, ModelReward) or reward.scorer is None:
            continue
        longest = reward.scorer.longest
        if prompt + answer > longest:
            use = f"Use  objective.max_new_tokens={longest - prompt}  or  a reward model that does"
            if longest <= prompt:
                use = "Use  a reward model that does, or shorter prompts"
            lines.append(
                f"warning: the reward {reward.title} reads at most {longest:,} tokens, but the "
                f"longest prompt ({prompt:,}) with an answer (objective.max_new_tokens={answer}) "
                f"has {prompt + answer:,}: such an answer ends the run. {use}"
            )
    return lines


class PolicyGradientMethod(Method):
    """Training on the model's own answers to prompts, which rewards score."""

    def __init__(self, setup: RunSetup, rows: RunRows, checkpoint: Path | None):
        super().__init__(setup, rows, checkpoint)
        is_loaded = self.second is not None and self.second.mode == "loaded"
        self.loaded = self._reference_in_memory() if is_loaded else None
        self.served = self._served_model() if self.choice.server else None
        self.makers = RoundMakers.of(setup, scores=setup.link is None)

    def _reference_in_memory(self) -> ReferenceModel:
        setup, inputs = self.setup, self.setup.inputs
        return build_reference(
            setup.cfg, inputs.second_folder, setup.model_setup, setup.dims, setup.compiled
        )

    def _served_model(self) -> ServedModel:
        cfg, is_adapter = self.setup.cfg, sends_adapter(self.setup.cfg.adapter)
        wanted = str(server_folder(self.choice, self.setup.folder))
        if is_adapter and cfg.model.init_from:
            wanted = cfg.model.init_from
        return find_served(PolicyServer(str(self.choice.server)), wanted, not is_adapter)

    @property
    def head_temperature(self) -> float:
        """See Method. It is the one used for sampling."""
        return self.choice.temperature

    @property
    def frozen_models(self) -> list[FrozenModel]:
        return [self.loaded] if self.loaded else []

    def about(self) -> list[str]:
        choice, rows, environment = self.choice, self.setup.cfg.batch.rows, self.makers.environment
        titles = ", ".join(self.makers.titles)
        together = f", made for {choice.updates} steps at a time" if choice.updates > 1 else ""
        return [
            f"{counted(rows, 'prompt')} a step × {counted(choice.samples, 'answer')} of at most "
            f"{choice.max_new_tokens:,} tokens{together}, judged by {titles}",
            *([f"{environment.about}, {choice.turns} at most"] if environment else []),
            *short_contexts(self.makers.rewards, self._longest_prompt, choice.max_new_tokens),
        ]

    @property
    def _longest_prompt(self) -> int:
        lengths = (order.store.lengths for order, _ in self.rows.stored)
        return max((int(each.max()) for each in lengths if len(each)), default=0)

    def load(self, model: Decoder, options: BatchOptions) -> tuple[RunRows, dict[str, str]]:
        if self.loaded is None:
            return self.rows, {}
        architecture = architecture_digest(self.loaded.model.config)
        digests = {"reference": self.load_frozen(self.loaded), REFERENCE_ARCHITECTURE: architecture}
        return self.rows, digests

    def source(
        self,
        rows: DataSource,
        context: SourceContext,
        model: Decoder,
        base: Base | None,
        dtypes: dict[str, str],
    ) -> DataSource:
        """See Method. The rows are prompts, and micro-batches are made of answers to them."""
        assert isinstance(rows, StoredRows)
        rounds = self._rounds(model, base, dtypes)
        tokenizer = self.setup.inputs.tokenizer
        return RolloutSource(rows, rounds, self.makers.titles, tokenizer, context)

    def _rounds(self, model: Decoder, base: Base | None, dtypes: dict[str, str]) -> Rounds:
        """Return where rollouts are generated: by a server, on ranks of their own, or on these."""
        setup = self.setup
        if self.served:
            weights = self._weights_for(self.served, model, base, dtypes)
            return self.makers.by_server(model, self.served, weights)
        if setup.link:
            return RankRounds(model, setup.link, setup.device, lambda: setup.signals.ended_ranks)
        return OwnRounds(self.makers.on_ranks(model))

    def _weights_for(
        self, served: ServedModel, model: Decoder, base: Base | None, dtypes: dict[str, str]
    ) -> PolicyWeights:
        setup, kind = self.setup, Checkpoint(mode="sync", best=False)
        return PolicyWeights(
            adapter=setup.cfg.adapter,
            run_name=str(setup.cfg.run.name),
            folder=server_folder(self.choice, setup.folder),
            model=model,
            server=PolicyServer(str(self.choice.server)),
            store=CheckpointStore(
                setup.folder / "server", kind, setup.timeout, setup.write_assets, lambda _: None
            ),
            served=served.name,
            base=base,
            dtypes=dtypes,
        )

    def metric(self) -> MethodMetric:
        return RolloutMetrics(self.choice, self.setup.dims)

    def step(self, parts: StepParts) -> ForwardBackward:
        reference: Callable[[MicroBatch], Tensor] | None = self.loaded
        if self.second and self.second.mode == "base":
            reference = BaseTokens(parts.model)
        return RolloutForwardBackward(*parts, choice=self.choice, reference=reference)
