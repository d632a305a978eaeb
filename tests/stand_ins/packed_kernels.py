"""Stand-ins of flash-linear-attention and causal-conv1d, by their documented signatures.

Run with folders of models, it prints for each how its documents are computed, and by how much its
gradients then differ from those of the documents one by one.
"""

import json
import sys
from types import ModuleType

import torch
import torch.nn.functional as F


def documents(length, ends):
    if ends is None:
        return [(0, length)]
    assert ends.dtype == torch.int64
    assert ends[-1] == length
    return [*zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    """[batch, tokens, heads, channels]; g: of a head, or of each channel of its keys."""
    assert cu_seqlens is None or len(q) == 1, "the kernel wants all documents in one row"
    assert use_qk_l2norm_in_kernel
    assert scale is None
    assert initial_state is None
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = (g if g.ndim == 4 else g[..., None]).exp()[..., None]
    results = []
    for start, end in documents(q.shape[1], cu_seqlens):
        state = q.new_zeros(len(q), v.shape[2], k.shape[-1], v.shape[-1])
        for t in range(start, end):
            state = state * decay[:, t]
            known = (state * k[:, t, :, :, None]).sum(-2)
            change = (v[:, t] - known) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * change[..., None, :]
            results.append((state * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(results, 1), None


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
    final_states_out=None, activation=None,
):  # fmt: skip
    """x: [batch, channels, tokens]; seq_idx: [batch, tokens] int32."""
    assert activation in (None, "silu", "swish")
    width = weight.shape[1]
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (len(x), x.shape[2])
        assert x.stride(1) == 1, "the kernel wants channels last"
    total = torch.zeros_like(x) if bias is None else bias[None, :, None].expand_as(x)
    for back in range(width):
        moved = F.pad(x, (back, 0))[..., : x.shape[2]]
        if seq_idx is not None:
            same = F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx
            moved = moved * same[:, None]
        total = total + moved * weight[None, :, width - 1 - back, None]
    return total if activation is None else F.silu(total)


def install():
    """Let transformers find them, which must not be imported yet."""
    delta = {"chunk_gated_delta_rule": chunk_gated_delta_rule}
    parts = {
        "fla": {}, "fla.ops": {}, "fla.ops.gated_delta_rule": delta,
        "fla.ops.kda": {"chunk_kda": chunk_gated_delta_rule},
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    }  # fmt: skip
    for name, functions in parts.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(functions, __path__=[])


if __name__ == "__main__":
    install()
    import gradients

    import fsdp_trainer
    from fsdp_trainer.models.attention import LAYOUTS
    from fsdp_trainer.models.decoder import MicroBatch
    from fsdp_trainer.models.hf.boundary_kernels import try_boundaries
    from fsdp_trainer.training.objective import CrossEntropy

    lengths, row = gradients.LENGTHS, gradients.ROW
    tokens = gradients.random_tokens(len(lengths), row)
    layout = LAYOUTS["documents"](lengths, row, torch.device("cpu"))
    places = gradients.positions_of(lengths, row)
    targets = gradients.INDEX, gradients.TARGETS, gradients.WEIGHTS
    batch = MicroBatch(tokens, places, layout, *targets)
    for folder in sys.argv[1:]:
        model = fsdp_trainer.load_model(folder).requires_grad_(True)
        arguments, reason = try_boundaries(model.config, layout.device, "float32")
        computed = []
        for used in (arguments, ()):
            model.zero_grad()
            model.use_boundaries(used)
            model(batch, CrossEntropy(gradients.WEIGHTS)).value.backward()
            computed.append([p.grad for p in model.parameters() if p.grad is not None])
        difference = max(float((a - b).abs().max()) for a, b in zip(*computed, strict=True))
        print(json.dumps([arguments, reason, difference]))
