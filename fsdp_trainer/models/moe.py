"""Mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al.
2017). No token is dropped."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.balance import Balancing, block_figures
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.families import BIASED
from fsdp_trainer.models.feed_forward import ACTIVATIONS, MLP
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.four_bit_experts import DecodedGroups
from fsdp_trainer.models.grouped import grouped_bias, grouped_linear

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""The sigmoid's factor in GPT-OSS's activation, and the limit of its inputs."""


class Routing(NamedTuple):
    """The experts of each token and their weights, [tokens, k]; logits: [tokens, experts]."""

    experts: Tensor
    weights: Tensor
    logits: Tensor


class Router(nn.Module):
    """Chooses each token's experts. Not a `Linear`: no adapter, no 4-bit or 8-bit format."""

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
        """Return [experts, hidden], what the router multiplies with."""
        return self.weight

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each expert, [tokens, experts] float32."""
        return logits.softmax(-1, dtype=torch.float32)

    def offsets(self) -> Tensor | None:
        """Return [experts], what the router adds to its logits."""
        return self.bias

    def forward(self, x: Tensor) -> Routing:
        """x: [tokens, hidden]."""
        logits = F.linear(x, self.matrix(), self.offsets())
        weights, experts = self.probabilities(logits).topk(self.chosen, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights.to(x.dtype), logits)


class SigmoidRouter(Router):
    """DeepSeek-V3's (2024, §2.1.2): an expert's score, a sigmoid, does not depend on the others'.

    Experts are chosen by score + bias and weighted by their scores. Where they are in groups, only
    those groups count whose two best experts score highest.
    """

    e_score_correction_bias: Tensor
    """[experts] float32, a buffer: no gradient changes it."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.groups = config.n_group
        self.chosen_groups = config.topk_group
        self.scale = config.routed_scaling_factor
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the scores over their sum (DeepSeek-V3, equation 19)."""
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Routing:
        """x: [tokens, hidden]. In float32."""
        logits = F.linear(x.float(), self.matrix().float())
        scores = logits.sigmoid()
        experts = self.choose(scores.detach() + self.e_score_correction_bias)
        weights = scores.gather(-1, experts)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, (weights * self.scale).to(x.dtype), logits)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, [tokens, k]. scores: [tokens, experts], with bias."""
        if self.groups > 1:
            in_groups = scores.unflatten(-1, (self.groups, -1))
            best = in_groups.topk(2, dim=-1).values.sum(-1)
            groups = best.topk(self.chosen_groups, dim=-1).indices
            is_outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
            scores = in_groups.masked_fill(is_outside.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.chosen, dim=-1).indices

    @torch.no_grad()
    def move_bias(self, counts: Tensor, speed: float, skip: Tensor) -> None:
        """Raise the bias of experts with fewer tokens than the mean by `speed`, and lower that of
        those with more (Wang et al. 2024, "Auxiliary-loss-free load balancing").

        counts: [experts] float64, whole numbers, the tokens of a step; skip: a bool scalar, True
        where the step changes nothing.
        """
        bias = self.e_score_correction_bias
        below_mean = counts.sum() - len(counts) * counts
        move = speed * below_mean.sign().to(bias.dtype)
        bias += torch.where(skip, torch.zeros_like(move), move)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "SigmoidRouter":
        """Leave the bias in float32, whatever number format the model is cast to."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != bias.dtype:
            self.e_score_correction_bias = bias.to(self.e_score_correction_bias.device)
        return self


ROUTERS: dict[str, type[Router]] = {"softmax": Router, BIASED: SigmoidRouter}
"""Routers by `Family.router`."""


class Experts(nn.Module):
    """Gated feed-forwards side by side: a matrix [out, in] for each expert, stacked.

    lora_A, lora_B: matrices of adapters, where models.adapters has given the experts some.
    """

    lora_A: nn.Module
    lora_B: nn.Module
    is_transposed = False
    """True if the matrices are kept as [in, out]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.active_share = config.num_experts_per_tok / config.num_experts
        """Share of the weights that a token meets."""
        self.lora_scales: dict[str, float] = {}
        """The factor of B·A for each matrix that has an adapter, by name."""
        self.add_parameters(config)
        self.shapes = {
            name: self.outputs_first(parameter.shape)
            for name, parameter in self.named_parameters(recurse=False)
            if parameter.ndim == 3
        }
        """Experts, outputs and inputs of the matrices by name, whatever format these have."""

    def outputs_first(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return experts, outputs and inputs of matrices whose parameter has this shape."""
        count, rows, columns = shape
        return (count, columns, rows) if self.is_transposed else (count, rows, columns)

    def add_parameters(self, config: ModelConfig) -> None:
        """Add those of all experts."""
        count = config.num_experts
        width = config.hidden_size
        inner = config.expert_size
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        self.activation = ACTIVATIONS[config.hidden_act]

    def own(self, parameter: Tensor) -> Tensor:
        """Return what this process has of a parameter: of its experts."""
        return parameter

    def matrix(self, name: str) -> Tensor:
        """Return the matrices that this process multiplies with, [experts, out, in]."""
        return self.own(getattr(self, name))

    def product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, out]: rows times their experts' matrices, with the adapters of these.

        name: of the matrices; rows, ends: as in `forward`.
        """
        return self.add_adapter(name, rows, ends, self.base_product(name, rows, ends))

    def base_product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, out]: rows times their experts' matrices. See `product`."""
        weights = self.matrix(name)
        if is_encoded(weights):
            columns = self.shapes[name][1 if self.is_transposed else 2]
            return DecodedGroups.apply(rows, weights, ends, columns, self.is_transposed)
        return grouped_linear(
            rows, weights.transpose(1, 2) if self.is_transposed else weights, ends
        )

    def add_adapter(self, name: str, rows: Tensor, ends: Tensor, out: Tensor) -> Tensor:
        """Return `out`, of `product`, and what the matrices' adapters add to it."""
        if name not in self.lora_scales:
            return out
        a, b = (self.own(getattr(matrices, name)) for matrices in (self.lora_A, self.lora_B))
        return out + grouped_linear(grouped_linear(rows, a, ends) * self.lora_scales[name], b, ends)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, hidden], each row computed by its expert.

        rows: [rows, hidden], those of an expert together, in the experts' order; ends: [experts]
        int32, the row behind each expert's last. An expert may have no rows.
        """
        gate = self.product("gate_proj", rows, ends)
        up = self.product("up_proj", rows, ends)
        return self.product("down_proj", self.activation(gate) * up, ends)


class ClampedExperts(Experts):
    """GPT-OSS's experts: with biases, and an activation between limits.

    Parameters are as in its folders: matrices [experts, in, out], those of gate and up in one,
    their outputs by turns.
    """

    is_transposed = True

    def add_parameters(self, config: ModelConfig) -> None:
        """See Experts."""
        count = config.num_experts
        width = config.hidden_size
        inner = config.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj_bias = nn.Parameter(torch.empty(count, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See Experts."""
        inside = clamped_gate(self.product("gate_up_proj", rows, ends))
        return self.product("down_proj", inside, ends)

    def product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Return each row times its expert's matrix, and its expert's bias: [rows, out]."""
        biases = grouped_bias(rows, self.matrix(f"{name}_bias"), ends)
        return self.add_adapter(name, rows, ends, self.base_product(name, rows, ends) + biases)


def clamped_gate(x: Tensor) -> Tensor:
    """Return (up + 1) · gate · σ(1.702 gate), both limited: [rows, width].

    x: [rows, 2 · width], gate and up by turns. A gate has no lower limit.
    """
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=CLAMP_LIMIT)
    up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMP_ALPHA))


class Gate(nn.Module):
    """Gives each token a number between 0 and 1. Not a `Linear`, as `Router`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))

    def matrix(self) -> Tensor:
        """Return [1, hidden], what the gate multiplies with."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, 1]. x: [tokens, hidden]."""
        return F.linear(x, self.matrix()).sigmoid()


class MixtureOfExperts(nn.Module):
    """Router and experts, in place of a dense feed-forward; in some families a dense one beside
    them, which every token meets."""

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
        """Return [batch, length, hidden], and auxiliary values where `balancing` is given.

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
        figures = block_figures(routing.experts, routing.logits, self.gate.probabilities, balancing)
        return out.view_as(x), figures

    def mix(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of what each token's experts compute: [tokens, hidden]."""
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
    """Rows in another order, each as often as asked.

    Its gradient is gathered and summed in a fixed order; that of torch's own indexing is scattered
    by atomic additions, whose order varies.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        """Return [rows · copies, width]: copy `order[i]` of all copies, each row's side by side.

        back: the inverse permutation of `order`.
        """
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `rows`."""
        (back,) = ctx.saved_tensors
        grad = grad.index_select(0, back)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None, None
