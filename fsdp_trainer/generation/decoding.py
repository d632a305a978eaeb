"""A faster forward of one new token in each row on a CPU, from copies of the weights.

Its time is that of reading the weights and of calling the operators. torch multiplies a few rows
with a matrix [outputs, inputs] at a third of the memory's speed, so the weights are copied into
other layouts, and matrices with the same inputs are joined. Results equal the model's but for
rounding. Parts that are not plain, such as experts or layers with adapters, are called unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.base.torch_private import can_pack, pack_weight, packed_linear
from fsdp_trainer.generation.key_value_cache import NextTokens
from fsdp_trainer.models.attention import Cache
from fsdp_trainer.models.decoder import Attention, Block, Decoder, normed_heads
from fsdp_trainer.models.feed_forward import MLP
from fsdp_trainer.models.head import Head, cap_logits
from fsdp_trainer.models.latent_attention import CosSin
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.rope import rotate
from fsdp_trainer.parallel.memory_check import free_bytes

LEAST_TOKENS = 16
"""Number of tokens in which the copies save about as much time as they cost."""
PACKED_FROM = 2**18
"""Size of a matrix, in numbers, from which one row is multiplied faster with the packed layout:
torch then uses several threads, and one for other layouts."""
PLAIN_MODULES = (Attention, MLP, RMSNorm, Head, nn.Linear)
Apply = Callable[[Tensor], Tensor]


class Decoding:
    """A model whose weights do not change, and its copies for one row and for several.

    A copy is made the first time that it saves time. It takes at most half of the free memory.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self.copies: dict[bool, DecodingModel] = {}
        self.is_plain = type(model) is Decoder and is_plain(model.lm_head)

    def model_for(self, rows: int, tokens: int) -> "DecodingModel | None":
        """Return the copy for this number of rows; None if a copy would not save time.

        tokens: number of tokens that may still be generated in each row.
        """
        several = rows > 1
        if several not in self.copies and self.is_worth_it(several, tokens):
            self.copies[several] = DecodingModel(self.model, several)
        return self.copies.get(several)

    def is_worth_it(self, several: bool, tokens: int) -> bool:
        if not self.is_plain or tokens < LEAST_TOKENS or (several and not can_pack()):
            return False
        needed = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return needed <= free_bytes(torch.device("cpu")) / 2


class DecodingModel:
    """A copy of a model for one new token in each row. several: it is for more than one row."""

    def __init__(self, model: Decoder, several: bool):
        self.model = model
        blocks: dict[str, Any] = model.blocks()
        self.blocks: dict[str, Any] = {
            name: DecodingBlock(block, several) if is_own(block, Block) else block
            for name, block in blocks.items()
        }
        head = model.lm_head
        self.head = linear([head.weight[: head.vocab_size]], [None], several)
        self.softcap = head.softcap

    @torch.inference_mode()
    def next_logits(
        self, tokens: Tensor, layout: NextTokens, caches: Mapping[str, Cache]
    ) -> Tensor:
        x = self.model.embed(tokens)
        x, _ = self.model.run_blocks(x, layout.positions, layout, self.blocks, caches)
        logits = self.head(self.model.model.norm(x[:, 0]))
        return logits if self.softcap is None else cap_logits(logits, self.softcap)


class DecodingBlock:
    def __init__(self, block: Block, several: bool):
        self.norms = [None if name is None else norm(getattr(block, name)) for name in block.norms]
        mixer: Any = block.self_attn
        mlp: Any = block.mlp
        self.mixer = DecodingAttention(mixer, several) if is_plain(mixer) else mixer
        self.mlp = DecodingMLP(mlp, several) if is_plain(mlp) else mlp

    def __call__(
        self, x: Tensor, cos_sin: CosSin, layout: NextTokens, cache: Cache
    ) -> tuple[Tensor, dict[str, Tensor]]:
        before_mixer, after_mixer, before_mlp, after_mlp = self.norms
        mixed = self.mixer(before_mixer(x) if before_mixer else x, cos_sin, layout, cache)
        x = x + (after_mixer(mixed) if after_mixer else mixed)
        fed = self.mlp(before_mlp(x) if before_mlp else x)
        fed = fed[0] if isinstance(fed, tuple) else fed
        return x + (after_mlp(fed) if after_mlp else fed), {}


class DecodingAttention:
    """A copy of grouped-query attention, with queries, keys and values from one product."""

    def __init__(self, attention: Attention, several: bool):
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.project = linear([p.weight for p in three], [p.bias for p in three], several)
        output = attention.o_proj
        self.output = linear([output.weight], [output.bias], several)
        self.widths = [p.out_features for p in three]
        self.head_dim = attention.head_dim
        self.qk_norm = attention.qk_norm
        if self.qk_norm:
            self.q_norm = norm(attention.q_norm)
            self.k_norm = norm(attention.k_norm)
        self.scoring = attention.scoring._replace(sinks=attention.sinks)

    def __call__(self, x: Tensor, cos_sin: CosSin, layout: NextTokens, cache: Cache) -> Tensor:
        """Return the attention's output, [rows, 1, hidden]. x: [rows, 1, hidden]."""
        q, k, v = normed_heads(self, *self.project(x).split(self.widths, -1))
        k, v = cache.append(rotated(k, *cos_sin), v)
        mixed = layout.attend(rotated(q, *cos_sin), k, v, self.scoring)
        return self.output(mixed.flatten(-2))


class DecodingMLP:
    """A copy of a gated feed-forward, with gate and up from one product."""

    def __init__(self, mlp: MLP, several: bool):
        two = (mlp.gate_proj, mlp.up_proj)
        self.gate_up = linear([p.weight for p in two], [p.bias for p in two], several)
        self.down = linear([mlp.down_proj.weight], [mlp.down_proj.bias], several)
        self.activation = mlp.activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


def is_own(module: nn.Module, *classes: type[nn.Module]) -> bool:
    return type(module) in classes and "forward" not in vars(module)


def is_plain(module: nn.Module) -> bool:
    """Return True if a module and its children are plain modules in unsharded float32 on a CPU."""
    if not all(is_own(each, *PLAIN_MODULES) for each in module.modules()):
        return False
    return all(
        type(p) is nn.Parameter and p.dtype == torch.float32 and p.device.type == "cpu"
        for p in module.parameters()
    )


def norm(module: RMSNorm) -> Apply:
    """Return a root-mean-square norm with fewer operators if it is plain, else the module."""
    if not is_plain(module):
        return module
    size = module.weight.numel()
    weight = (module.weight.detach() + module.offset) * size**0.5
    epsilon = torch.tensor((size * module.eps) ** 0.5)

    def apply(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(length, epsilon) * weight  # √(Σ x² + size · eps)

    return apply


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the result of `rotate`, with fewer operators if all channels are rotated."""
    if x.shape[-1] != cosine.shape[-1]:
        return rotate(x, cosine, sine)
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cosine, torch.cat((-second, first), -1), sine)


def linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None], several: bool) -> Apply:
    """Return one layer that joins layers with the same inputs.

    weights: [outputs, inputs] each. biases: a tensor for each layer, or None for each.
    """
    weight = weights[0].detach()
    if len(weights) > 1:
        weight = torch.cat([each.detach() for each in weights])
    present = [each.detach() for each in biases if each is not None]
    bias = torch.cat(present) if present else None
    is_large = torch.get_num_threads() > 1 and weight.numel() >= PACKED_FROM
    if several or (is_large and can_pack()):
        packed = pack_weight(weight)
        return lambda x: packed_linear(x, packed, bias)
    outputs, inputs = weight.shape
    if outputs > inputs:  # for one row the product reads faster along the longer dimension
        weight = weight.t().contiguous().t()
    return lambda x: F.linear(x, weight, bias)
