"""The verb `verify`: is a checkpoint whole, and does it compute what a Hugging Face folder computes."""

from pathlib import Path

import torch
import torch.nn.functional as F

from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.files import damage, read_manifest
from fsdp_trainer.checkpoint.huggingface import DTYPES, check_tensors, read_headers
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.paths import checkpoint_folders, find_checkpoint
from fsdp_trainer.config.verbs import VerifyConfig
from fsdp_trainer.errors import Problem, UserError

TOLERANCE = 1e-4  # largest absolute difference of logits between two float32 implementations
TOKENS = (
    2,
    64,
)  # random ones: whether two models are the same does not depend on what they are asked


def verify(cfg: VerifyConfig) -> int:
    """0: whole (and equal to hf); 3: not."""
    source = Path(str(cfg.source)).expanduser()
    without_manifest = source if source in checkpoint_folders(source.parent.parent) else None
    checkpoint = find_checkpoint(source) or without_manifest
    if checkpoint is None:
        raise UserError(
            "nothing to verify",
            [
                Problem(
                    f"source={cfg.source}", "is neither a checkpoint nor a run with a committed one"
                )
            ],
        )
    if problems := damage(checkpoint):
        print(f"{checkpoint} is damaged:")
        for problem in problems:
            print(f"  {problem.what} {problem.why}")
        return 3
    files = read_manifest(checkpoint)["files"]
    print(
        f"{checkpoint} is whole: {len(files)} files, {sum(told['bytes'] for told in files.values()):,} bytes, all checksums right"
    )
    print(f"weights digest {weights_digest(checkpoint)}")
    return compare(checkpoint, Path(cfg.hf).expanduser()) if cfg.hf else 0


def compare(checkpoint: Path, folder: Path) -> int:
    """Logits of the checkpoint, its weights rounded as the folder's are, against transformers' on the folder."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise UserError(
            "transformers is not installed",
            [Problem(f"hf={folder}", "is compared by transformers:  pip install transformers")],
        ) from None
    disable_progress_bar()
    ours = load_model(checkpoint)
    stored, problems = read_headers(folder)
    problems = problems or check_tensors(ours, stored, ours.config.vocab_size)
    if problems:
        print(f"{folder} holds another model: {problems[0].what} {problems[0].why}")
        return 3
    for name, parameter in ours.named_parameters():
        parameter.copy_(parameter.to(DTYPES[stored[ours.config.form.stored_name(name)].dtype]))
    # its other kernels leave out what they do not know, such as Gemma 2's soft limit
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(
        ours.config.vocab_size, TOKENS, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        a, b = ours.logits(tokens), theirs(tokens).logits
    difference = (a - b).abs().max().item()
    divergence = (
        F.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="none")
        .sum(-1)
        .max()
        .item()
    )
    same = difference <= TOLERANCE
    print(
        f"logits {'equal' if same else 'DIFFER from'} {folder}'s: largest difference {difference:.2e}, largest KL divergence {divergence:.2e} over {tokens.numel()} tokens"
    )
    return 0 if same else 3
