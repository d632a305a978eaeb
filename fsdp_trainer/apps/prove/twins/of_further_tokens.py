"""The loss of a head for further tokens (DeepSeek-V3, 2024, §2.2), by transformers' module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsdp_trainer.apps.prove.twins.of_tokens import cross_entropies, learnt_documents
from fsdp_trainer.apps.prove.twins.twin_step import NoTwin, TwinDocument, TwinStep
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.further_blocks import HEADS, MTP, start_of_names

FURTHER = "further"
"""The name of the head in its twin."""
PARTS = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
    "post_norm": "norm",
}  # fmt: skip
OF_NEXT_BLOCK = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "post_norm": "shared_head.norm",
}
"""What lies beside the block in transformers' module, by its names in both kinds of folders."""
Revert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
OpenBlock = Callable[[Mapping[str, Tensor]], Any]


def further_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each document's part: targets are predicted a token earlier, by the next one too."""
    for document, targets, shares in learnt_documents(step):
        is_ahead = document.learnt.nonzero()[:, 0] > 0
        if is_ahead.any():
            logits = drafted(step, document)[document.learnt.nonzero()[is_ahead, 0] - 1]
            each = cross_entropies(step, logits, targets[is_ahead])
            yield step.choice.mtp * (each * shares[is_ahead]).sum()


def drafted(step: TwinStep, document: TwinDocument) -> Tensor:
    """Return the head's logits of a document, [tokens, vocabulary] float32."""
    model, given = step.model, {}
    blocks = model.get_decoder().layers

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
            given[name] = (inputs[0] if inputs else named["hidden_states"], named)

        return hook

    places = {"embedded": blocks[0], "like": blocks[like_number(model)], "states": model.lm_head}
    with ExitStack() as stack:
        for name, module in places.items():
            handle = module.register_forward_pre_hook(note(name), with_kwargs=True)
            stack.callback(handle.remove)
        step.output(document)
    following = given["embedded"][0].roll(-1, 1)  # nothing is read of the last one
    named = {name: value for name, value in given["like"][1].items() if name != "hidden_states"}
    states = getattr(model, FURTHER)(following, given["states"][0], **named)
    return model.lm_head(states)[0].float()


def like_number(model: Any) -> int:
    """Return the number of the block that the head's is like: the last of full attention."""
    config = model.get_decoder().config
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return max(number for number, kind in enumerate(types) if kind == "full_attention")


@dataclass(frozen=True)
class HeadNames:
    """How names of a head's tensors begin: of its block in folders, and of what lies beside that.

    like: how names of the block begin that it is like.
    """

    like: str
    block: str
    beside: dict[str, str]

    @classmethod
    def of(cls, model: Any, config: ModelConfig) -> "HeadNames":
        """Return those of a family. model: transformers'."""
        # imports transformers
        from fsdp_trainer.models.hf.hf_config import block_list

        blocks, start = f"{block_list(model)[0]}.", start_of_names(config)
        is_beside = HEADS[config.family] == MTP
        names = {**PARTS, **({} if is_beside else OF_NEXT_BLOCK)}
        beside = {f"{FURTHER}.{own}.": f"{start}{stored}." for own, stored in names.items()}
        block = f"{start}layers.0." if is_beside else start
        return cls(f"{blocks}{like_number(model)}.", block, beside)

    def as_stored(self, tensors: Mapping[str, Tensor], revert: Revert) -> dict[str, Tensor]:
        """Return a head's tensors by their names in a folder. revert: of those of a block."""
        own = f"{FURTHER}.mtp_block."
        inside = {self.like + n.removeprefix(own): t for n, t in tensors.items() if own in n}
        stored = {n.replace(self.like, self.block): t for n, t in revert(inside).items()}
        for start, begins in self.beside.items():
            stored |= {n.replace(start, begins): t for n, t in tensors.items() if start in n}
        return stored

    def put_head(self, model: Any, stored: Mapping[str, Tensor], open_block: OpenBlock) -> None:
        """Add the head to transformers' model. stored: its tensors of a folder. Raises NoTwin.

        open_block: returns the model with such tensors in place of its own.
        """
        try:
            from transformers.modeling_layers import MtpLayer
        except ImportError:
            name = "transformers with a head for further tokens"
            raise NoTwin(name, "pip install -U transformers ; ") from None
        of_block = {
            self.like + name.removeprefix(self.block): tensor
            for name, tensor in stored.items()
            if not name.startswith((*self.beside.values(),))
        }
        number, config = like_number(model), model.get_decoder().config
        block = open_block(of_block).get_decoder().layers[number]
        head = MtpLayer(config, type(block), type(block.input_layernorm), number).eval()
        head.add_module("mtp_block", block)
        model.add_module(FURTHER, head)
        own = dict(model.named_parameters())
        for start, begins in self.beside.items():
            own[f"{start}weight"].data.copy_(stored[f"{begins}weight"])
