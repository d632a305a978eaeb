"""Mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many experts.

No token is dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.config.parts.families import BIASED
from fsdp_trainer.config.parts.own_parts import part_named
from fsdp_trainer.models.balance import Balancing, auxiliary_values
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.feed_forward import MLP
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.four_bit_experts import DecodedGroups
from fsdp_trainer.models.grouped import grouped_bias, grouped_linear

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""Factor of the sigmoid's input in GPT-OSS's activation, and the limit of gate and up."""


class Routing(NamedTuple):
    """Experts of each token and their weights, both [tokens, k]; logits: [tokens, experts]."""

    experts: Tensor
    weights: Tensor
    logits: Tensor


class Router(nn.Module):
    """Router that chooses each token's experts.

    Not a `Linear`, so that it gets no adapter and no 4-bit or 8-bit format.
    """

    bias: Tensor | None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        has_bias = config.family_spec.router_bias
        bias = nn.Parameter(torch.empty(config.num_experts)) if has_bias else None
        self.register_parameter("bias", bias)
        self.chosen = config.num_experts_per_tok
        self.normalizes = config.normalizes_experts

    def matrix(self) -> Tensor:
        return self.weight

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each expert, [tokens, experts] float32."""
        return logits.softmax(-1, dtype=torch.float32)

    def offsets(self) -> Tensor | None:
        return self.bias

    def forward(self, x: Tensor) -> Routing:
        logits = F.linear(x, self.matrix(), self.offsets())
        weights, experts = self.probabilities(logits).topk(self.chosen, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights.to(x.dtype), logits)


class SigmoidRouter(Router):
    """DeepSeek-V3's router (2024, §2.1.2): each expert's score is an independent sigmoid.

    Experts are chosen by score + bias and weighted by their scores. If experts are in groups, a
    token chooses from the groups with the highest sums of their two best scores.
    """

    e_score_correction_bias: Tensor
    """[experts] float32, a buffer without a gradient."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.groups = config.n_group
        self.chosen_groups = config.topk_group
        self.scale = config.routed_scaling_factor
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the scores divided by their sum (DeepSeek-V3, equation 19)."""
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Routing:
        logits = F.linear(x.float(), self.matrix().float())
        scores = logits.sigmoid()
        experts = self.choose(scores.detach() + self.e_score_correction_bias)
        weights = scores.gather(-1, experts)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, (weights * self.scale).to(x.dtype), logits)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, [tokens, k].

        scores: [tokens, experts], including the bias.
        """
        if self.groups > 1:
            in_groups = scores.unflatten(-1, (self.groups, -1))
            best = in_groups.topk(2, dim=-1).values.sum(-1)
            groups = best.topk(self.chosen_groups, dim=-1).indices
            is_outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            scores = in_groups.masked_fill(is_outside.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.chosen, dim=-1).indices

    @torch.no_grad()
    def move_bias(self, counts: Tensor, speed: float, skip: Tensor) -> None:
        """Change biases by `speed` towards a balanced load.

        The bias of experts with fewer tokens than the mean rises, that of experts with more falls
        (Wang et al. 2024, "Auxiliary-loss-free load balancing").
        counts: [experts] float64 integers, the tokens of a step; skip: a bool scalar, True if the
        update is skipped.
        """
        bias = self.e_score_correction_bias
        below_mean = counts.sum() - len(counts) * counts
        move = speed * below_mean.sign().to(bias.dtype)
        bias += torch.where(skip, torch.zeros_like(move), move)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "SigmoidRouter":
        """Keep the bias in float32 when the model is cast to another number format."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != bias.dtype:
            self.e_score_correction_bias = bias.to(self.e_score_correction_bias.device)
        return self


ROUTERS: dict[str, type[Router]] = {"softmax": Router, BIASED: SigmoidRouter}
"""Routers by `Family.router`."""


class Experts(nn.Module):
    """Gated feed-forwards with stacked matrices, one [out, in] for each expert.

    lora_A, lora_B: matrices of adapters; absent without adapters.
    """

    lora_A: nn.Module
    lora_B: nn.Module
    is_transposed = False
    """True if the matrices are stored as [in, out]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.active_share = config.num_experts_per_tok / config.num_experts
        """Share of the weights that one token uses."""
        self.lora_scales: dict[str, float] = {}
        """Factor of B·A of each adapted matrix, by name."""
        self.add_parameters(config)
        self.shapes = {
            name: self.outputs_first(parameter.shape)
            for name, parameter in self.named_parameters(recurse=False)
            if parameter.ndim == 3
        }
        """Shape (experts, outputs, inputs) of each matrix by name, independent of its format."""

    def outputs_first(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (experts, outputs, inputs) of the matrices of a parameter of this shape."""
        count, rows, columns = shape
        return (count, columns, rows) if self.is_transposed else (count, rows, columns)

    def add_parameters(self, config: ModelConfig) -> None:
        count = config.num_experts
        width = config.hidden_size
        inner = config.expert_size
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        self.activation = part_named("activation", config.hidden_act)

    def local(self, parameter: Tensor) -> Tensor:
        return parameter

    def matrix(self, name: str) -> Tensor:
        """Return the matrices (or biases) of this process's experts, in the stored layout."""
        return self.local(getattr(self, name))

    def product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row times its expert's matrix, including adapters: [rows, out].

        name: name of the stacked matrices; rows, ends: as in `forward`.
        """
        return self.add_adapter(name, rows, ends, self.base_product(name, rows, ends))

    def base_product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row times its expert's matrix, without adapters: [rows, out]."""
        weights = self.matrix(name)
        if is_encoded(weights):
            columns = self.shapes[name][1 if self.is_transposed else 2]
            return DecodedGroups.apply(rows, weights, ends, columns, self.is_transposed)
        return grouped_linear(
            rows, weights.transpose(1, 2) if self.is_transposed else weights, ends
        )

    def add_adapter(self, name: str, rows: Tensor, ends: Tensor, out: Tensor) -> Tensor:
        """Return `out` plus the output of the matrices' adapters, if they have any."""
        if name not in self.lora_scales:
            return out
        a, b = (self.local(getattr(matrices, name)) for matrices in (self.lora_A, self.lora_B))
        return out + grouped_linear(grouped_linear(rows, a, ends) * self.lora_scales[name], b, ends)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the output of each row's expert: [rows, hidden].

        rows: [rows, hidden], sorted by expert; ends: [experts] int32, the end of each expert's
        rows. An expert may have no rows.
        """
        gate = self.product("gate_proj", rows, ends)
        up = self.product("up_proj", rows, ends)
        return self.product("down_proj", self.activation(gate) * up, ends)


class ClampedExperts(Experts):
    """GPT-OSS's experts, with biases and a clamped activation.

    Parameters are as in its folders: matrices are [experts, in, out], and gate and up are one
    matrix with interleaved outputs.
    """

    is_transposed = True

    def add_parameters(self, config: ModelConfig) -> None:
        count = config.num_experts
        width = config.hidden_size
        inner = config.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj_bias = nn.Parameter(torch.empty(count, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        inside = clamped_gate(self.product("gate_up_proj", rows, ends))
        return self.product("down_proj", inside, ends)

    def product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row times its expert's matrix plus the expert's bias: [rows, out]."""
        biases = grouped_bias(rows, self.matrix(f"{name}_bias"), ends)
        return self.add_adapter(name, rows, ends, self.base_product(name, rows, ends) + biases)


def clamped_gate(x: Tensor) -> Tensor:
    """Return (up + 1) · gate · σ(1.702 gate) of clamped gate and up: [rows, width].

    x: [rows, 2 · width], gate and up interleaved. The gate has no lower limit.
    """
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=CLAMP_LIMIT)
    up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMP_ALPHA))


class Gate(nn.Module):
    """Gate of the shared expert, between 0 and 1. Not a `Linear`, for the reasons of `Router`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))

    def matrix(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix()).sigmoid()


class MixtureOfExperts(nn.Module):
    """Router and experts in place of a dense feed-forward.

    Some families add a shared expert, a dense feed-forward that every token passes through.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        family = config.family_spec
        self.gate = ROUTERS[family.router](config)
        self.experts = (ClampedExperts if family.clamped_experts else Experts)(config)
        self.shared = family.shared_expert if config.shared_size else ""
        if self.shared:
            self.add_module(self.shared, MLP(config, config.shared_size))
        self.gates_shared = family.gates_shared_expert
        if self.gates_shared:
            self.shared_expert_gate = Gate(config)

    def forward(
        self, x: Tensor, balancing: Balancing | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the output, shaped as x, and auxiliary values if `balancing` is given.

        x: [batch, length, hidden].
        """
        tokens = x.flatten(0, -2)
        routing = self.gate(tokens)
        out = self.mix(tokens, routing)
        if self.shared:
            of_all = getattr(self, self.shared)(x).flatten(0, -2)
            out = out + (self.shared_expert_gate(tokens) * of_all if self.gates_shared else of_all)
        if balancing is None:
            return out.view_as(x)
        auxiliary = auxiliary_values(
            routing.experts, routing.logits, self.gate.probabilities, balancing
        )
        return out.view_as(x), auxiliary

    def mix(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: [tokens, hidden]."""
        count = self.gate.weight.shape[0]
        chosen = routing.experts.shape[-1]
        flat = routing.experts.flatten()
        by_expert, order = flat.sort(stable=True)
        every = torch.arange(count, device=flat.device)
        ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        rows = Rearranged.apply(tokens, order, back, chosen)
        computed = Rearranged.apply(self.experts(rows, ends), back, order, 1)
        each = computed.unflatten(0, (-1, chosen))
        return (each * routing.weights.unsqueeze(-1)).sum(1)


class Rearranged(torch.autograd.Function):
    """Repeated and permuted rows, with a deterministic gradient.

    The gradient is gathered and summed in a fixed order. torch's indexing would scatter it with
    atomic additions, whose order varies.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        """Return the permuted copies of the rows: [rows · copies, width].

        copies: how often each row is repeated, with its copies adjacent. order: permutation of the
        copies; back: its inverse.
        """
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        grad = grad.index_select(0, back)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None, None
