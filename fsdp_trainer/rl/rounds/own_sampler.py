"""Answers of the model in training, made on the ranks that train it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.evaluation.scoring import WorkSplit
from fsdp_trainer.generation.continuations import generation_of
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.compile import without_compiling
from fsdp_trainer.parallel.parallelize import reshard, stay_gathered
from fsdp_trainer.rl.rollouts.sampler import Request, SampledAnswer, answer_all


@dataclass(frozen=True)
class OwnSampler:
    """Samples from the model in training, on the ranks that train it.

    The random draws depend on run.seed, the prompt and its row, and the sample, not on the ranks.
    """

    cfg: TrainConfig
    model: Decoder
    tokenizer: TextTokenizer
    split: WorkSplit
    device: torch.device

    @torch.no_grad()
    def sample(
        self, requests: Sequence[Request], step: int, check: Callable[[], None]
    ) -> list[SampledAnswer]:
        """See AnswerSampler. check: called before each batch of answers."""
        cfg, choice = self.cfg, self.cfg.objective
        sampling = Sampling(
            max_tokens=choice.max_new_tokens,
            temperature=choice.temperature,
            seed=cfg.run.seed,
            log_probabilities=True,
        )
        gathered = stay_gathered(self.model, cfg.sharding, cfg.precision, self.device)
        rows = choice.answer_rows
        try:
            with without_compiling(cfg.compile.enabled), gathered:
                generation = generation_of(self.model, sampling, self.device)
                how = choice.samples, self.tokenizer.stop_ids, self.split.ranks
                return answer_all(generation, requests, step, *how, rows=rows, check=check)
        finally:
            reshard(self.model)
