"""transformers' models with its own module for a further token."""

import torch
import torch.nn.functional as F
from gradients import zero_if_none
from stored import save_tensors, tensors
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpLayer

WEIGHT = 0.3
"""Of the loss of the module."""
INSIDE = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
    "shared_head.norm": "norm",
}  # fmt: skip
"""Names of Qwen's for parts of a head, by those of DeepSeek's."""


class Theirs(torch.nn.Module):
    """A model of transformers, and its own module for a further token with random weights."""

    def __init__(self, main):
        super().__init__()
        self.main, decoder = main, main.get_decoder()
        self.is_qwen = main.config.model_type.startswith("qwen")
        types = getattr(decoder.config, "layer_types", None) or ["full_attention"]
        number = len(decoder.layers) - types[::-1].index("full_attention") - 1
        like = decoder.layers[number]
        self.mtp = MtpLayer(decoder.config, type(like), type(like.input_layernorm), number)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.mtp.parameters():
            size = parameter.shape
            parameter.data = torch.randn(size, generator=generator) * 0.2 + (parameter.ndim == 1)
        for name, buffer in self.mtp.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)

    def logits(self, **inputs):
        """Return the logits of a document, and those of the head at all tokens but the last."""
        recorded, rotary = [], self.main.get_decoder().rotary_emb
        hook = rotary.register_forward_hook(lambda _, given, out: recorded.append((given[0], out)))
        output = self.main(**inputs, output_hidden_states=True)
        hook.remove()
        embedded, rotations = recorded[0]
        length = embedded.shape[1] - 1
        if not length:
            return output.logits[0], None
        causal = torch.full((1, 1, length, length), -torch.inf).triu(1)
        rotations = [each[:, :-1] for each in rotations]
        states = output.hidden_states[-1][:, :-1]
        drafted = self.mtp(embedded[:, 1:], states, rotations, causal, None, None)
        return output.logits[0], self.main.lm_head(drafted)[0]

    def head(self, view):
        """Return what `view` gives of each parameter of the head, by the names in a folder."""
        start = f"model.layers.{len(self.main.get_decoder().layers)}."
        # the conversion of experts knows names of blocks
        own = named(self.mtp.mtp_block, view).items()
        head = revert_weight_conversion(self.main, {start + name: each for name, each in own})
        parts = dict(self.mtp.named_children()) | {"shared_head.norm": self.mtp.post_norm}
        head |= {f"{start}{name}.weight": view(parts[name].weight) for name in INSIDE}
        if not self.is_qwen:
            return head
        renamed = {f"{start}{old}.weight": f"mtp.{new}.weight" for old, new in INSIDE.items()}
        return {renamed.get(n, n.replace(start, "mtp.layers.0.")): each for n, each in head.items()}

    def save_head(self, folder):
        """Write the head into a folder under the names that vLLM reads; return its tensors."""
        held, head = tensors(folder), self.head(lambda each: each.detach().clone())
        if not self.is_qwen:
            start = f"model.layers.{len(self.main.get_decoder().layers)}."
            head[f"{start}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
            head[f"{start}shared_head.head.weight"] = held["lm_head.weight"].clone()
        save_tensors(folder, held | {name: each.contiguous() for name, each in head.items()})
        return head


def named(module, view):
    """Return the parameters and stored buffers of a module by name, each as `view` gives it."""
    stored = dict(module.state_dict(keep_vars=True))
    return {name: view(each) for name, each in stored.items()}


def steps_of(theirs, samples, count, lr):
    """Return [loss, loss of the head] of some steps of gradient descent, each sample by itself.

    samples: (the model's inputs, which tokens are supervised).
    """
    losses, weight = [], sum(mask[1:].sum() for _, mask in samples)
    for _ in range(count):
        loss, further = torch.zeros(()), torch.zeros(())
        for inputs, mask in samples:
            (logits, drafted), tokens = theirs.logits(**inputs), inputs["input_ids"][0]
            each = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            ahead = F.cross_entropy(drafted[:-1], tokens[2:], reduction="none")
            loss = loss + (each * mask[1:]).sum()
            further = further + (ahead * mask[2:]).sum()
        ((loss + WEIGHT * further) / weight).backward()
        losses.append([loss.item() / weight, further.item() / weight])
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter -= lr * zero_if_none(parameter)
                parameter.grad = None
    return torch.tensor(losses).T
