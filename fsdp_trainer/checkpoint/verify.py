"""The verb `verify`: is a checkpoint whole, and does it compute what a Hugging Face folder does."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.files import damage, named_checkpoint, newest_whole, read_manifest
from fsdp_trainer.checkpoint.huggingface import check_tensors, read_headers
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.verbs import VerifyConfig
from fsdp_trainer.errors import Problem, UserError

TOLERANCE = 1e-4  # largest absolute difference of logits between two float32 implementations
# shape of the random tokens; whether two models are the same does not depend on which they are
TOKENS = (2, 64)


def verify(cfg: VerifyConfig) -> int:
    """Run the verb. Returns 0 for a checkpoint that is whole, and equal to hf; else 3."""
    checkpoint = named_checkpoint(str(cfg.source))
    if problems := damage(checkpoint):
        print(f"{checkpoint} is damaged:")
        for problem in problems:
            print(f"  {problem.what} {problem.why}")
        print(newest_whole(checkpoint))
        return 3
    files = read_manifest(checkpoint)["files"].values()
    size = sum(file["bytes"] for file in files)
    print(f"{checkpoint} is whole: {len(files)} files, {size:,} bytes, all checksums right")
    print(f"weights digest {weights_digest(checkpoint)}")
    return compare(checkpoint, Path(cfg.hf).expanduser()) if cfg.hf else 0


def compare(checkpoint: Path, folder: Path) -> int:
    """Compare logits with those of transformers on `folder`; return 0 if they are equal, else 3.

    The checkpoint's weights are rounded as the folder's are.
    """
    auto = _require_transformers(folder)
    ours = load_model(checkpoint)
    stored, problems = read_headers(folder)
    problems = problems or check_tensors(ours, stored, ours.config.vocab_size)
    if problems:
        print(f"{folder} holds another model: {problems[0].what} {problems[0].why}")
        return 3
    for name, parameter in ours.named_parameters():
        parameter.copy_(parameter.to(stored[ours.config.family_spec.stored_name(name)].dtype))
    # its other kernels leave out what they do not know, such as Gemma 2's soft limit
    theirs = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ours.config.vocab_size, TOKENS, generator=generator)
    with torch.no_grad():
        a = ours.logits(tokens)
        b = theirs(tokens).logits
    difference = (a - b).abs().max().item()
    log_a = a.log_softmax(-1)
    log_b = b.log_softmax(-1)
    divergences = F.kl_div(log_a, log_b, log_target=True, reduction="none").sum(-1)
    same = difference <= TOLERANCE
    print(
        f"logits {'equal' if same else 'DIFFER from'} {folder}'s: largest difference "
        f"{difference:.2e}, largest KL divergence {divergences.max().item():.2e} "
        f"over {tokens.numel()} tokens"
    )
    return 0 if same else 3


def _require_transformers(folder: Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        how = "is compared by transformers:  pip install transformers"
        raise UserError("transformers is not installed", [Problem(f"hf={folder}", how)]) from None
    disable_progress_bar()
    return AutoModelForCausalLM
