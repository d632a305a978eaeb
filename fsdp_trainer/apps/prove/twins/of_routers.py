"""The further losses of routers, of transformers' own modules, and their biases after a step."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.apps.prove.proof.recordings import BIAS
from fsdp_trainer.apps.prove.twins.twin_step import TwinDocument, TwinStep, base_of
from fsdp_trainer.config.parts.families import BIASED
from fsdp_trainer.config.schema import Loss
from fsdp_trainer.models.config import ModelConfig


@dataclass
class RouterTwins:
    """The routers of a twin. by_scores: they choose by sigmoids.

    load: each expert's share of the last step's tokens, [blocks, experts].
    """

    routers: list[nn.Module]
    cfg: Loss
    by_scores: bool
    load: Tensor

    @classmethod
    def of(cls, model: Any, config: ModelConfig, cfg: Loss) -> "RouterTwins | None":
        """Return those of a model, with an even load; None if the run has no further losses."""
        if not (cfg.load_balancing or cfg.router_z_loss or cfg.bias_update_speed):
            return None
        # they import transformers
        from fsdp_trainer.models.hf.hf_config import block_list
        from fsdp_trainer.models.hf.routers import routers

        own = routers(base_of(model), block_list(base_of(model))[1])
        every = [module for _, module in sorted(own.items())]
        even = config.num_experts_per_tok / config.num_experts
        by_scores = config.family_spec.router == BIASED and not config.by_transformers
        return cls(every, cfg, by_scores, torch.full((len(own), config.num_experts), even))

    @property
    def has_losses(self) -> bool:
        return bool(self.cfg.load_balancing or self.cfg.router_z_loss)

    def losses(self, step: TwinStep) -> Iterator[Tensor]:
        """Yield each document's part of the losses, then remember the load.

        Balance as in Fedus et al. 2021, equations 4 to 6, by the load of the step before; the
        z-loss as in Zoph et al. 2022, equation 5. Both are means over tokens and blocks.
        """
        counts = torch.zeros_like(self.load)
        total = sum(len(one.tokens) for one in step.documents)
        for document in step.documents:
            losses = []
            for block, (logits, chosen) in enumerate(self.outputs(step, document)):
                counts[block] += chosen.flatten().bincount(minlength=len(self.load[block]))
                share = (self.shares_of(logits) * self.load[block]).sum()
                z = logits.logsumexp(-1).square().sum()
                balance = self.cfg.load_balancing * self.load.shape[1] * share
                losses.append((balance + self.cfg.router_z_loss * z) / total)
            if self.has_losses:
                yield torch.stack(losses).mean()
        self.load = counts / total

    def outputs(self, step: TwinStep, document: TwinDocument) -> list[tuple[Tensor, Tensor]]:
        """Return each router's logits and choices of a document, [tokens, …]."""
        outputs: list[tuple[Tensor, Tensor]] = []

        def note(router: nn.Module, inputs: Any, given: Any) -> None:
            chosen = next(each for each in given[1:] if not each.is_floating_point())
            outputs.append((given[0].float(), chosen))

        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.has_losses))
            for router in self.routers:
                stack.callback(router.register_forward_hook(note).remove)
            step.output(document)
        return outputs

    @torch.no_grad()
    def move_biases(self) -> None:
        """Raise the bias of experts with less than the mean load, and lower others' (Wang 2024)."""
        for router, load in zip(self.routers, self.load, strict=True):
            if self.cfg.bias_update_speed:
                # whole numbers of tokens differ by more than this
                lacking = (load.mean() - load).where((load.mean() - load).abs() > 1e-6, 0)
                getattr(router, BIAS).add_(lacking.sign(), alpha=self.cfg.bias_update_speed)

    def shares_of(self, logits: Tensor) -> Tensor:
        """Return the probability of each expert, [tokens, experts].

        They are those of transformers' loss, but of DeepSeek's paper where this program computes
        the model by itself.
        """
        if not self.by_scores:
            return logits.softmax(-1)
        return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
