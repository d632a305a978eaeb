"""The verb `verify`: check a checkpoint's files, and its logits against another program's."""

import os
import re
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.apps.prove.folders.head_numbers import numbers_elsewhere, numbers_here
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.checkpoint.atomic_files import (
    damage,
    named_checkpoint,
    newest_undamaged,
    read_manifest,
)
from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.formats.description import require_safe_for_others
from fsdp_trainer.checkpoint.frozen_weights import (
    base_folder,
    kept_in_four_bits,
    model_config,
    require_unchanged,
)
from fsdp_trainer.checkpoint.huggingface import check_tensors, stored_tensors, tensor_parts
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.checkpoint.origin import read_origin
from fsdp_trainer.config.paths import (
    checkpoint_configuration,
    find_checkpoint,
    is_adapter,
    model_folder,
    tokenizer_folder,
)
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.config.verbs import VerifyConfig
from fsdp_trainer.data.media.kinds import READ, processor_of, reader_of
from fsdp_trainer.data.media.media import MediaProcessor
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.generation.prompt_media import PromptMedia, packed_media
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.read_architecture import read_architecture

VARIABLE = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")
TOLERANCE = 1e-4  # largest absolute difference of logits between two float32 implementations
# shape of the random tokens; any tokens show whether two models are the same
TOKENS = (2, 64)
MERGES = {"trained": "as it was trained", "original": "merged into the original weights"}


def verify(cfg: VerifyConfig) -> int:
    """Run the verb. Returns 0 if the checkpoint is undamaged and equal to cfg.hf, else 3."""
    source = Path(str(cfg.source)).expanduser()
    if not is_adapter(source):
        source = named_checkpoint(str(cfg.source))
        if problems := damage(source):
            print(f"{source} is damaged:")
            for problem in problems:
                print(f"  {problem.what} {problem.reason}")
            print(newest_undamaged(source))
            return 3
        require_safe_for_others(source)
        files = read_manifest(source)["files"].values()
        size = sum(file["bytes"] for file in files)
        count = counted(len(files), "file")
        print(f"{source} is complete: {count}, {size:,} bytes, all checksums correct")
    require_unchanged(model_config(source), source)
    print(f"weights digest {weights_digest(source)}")
    code = compare(source, Path(cfg.hf).expanduser()) if cfg.hf else 0
    if cfg.data:
        show_losses(source, cfg.data)
    return code


# --- the logits of another program ----------------------------------------------------------------


def compare(source: Path, folder: Path) -> int:
    """Compare logits with those of transformers or peft on `folder`; return 0 if equal, else 3.

    If the folder is a complete model, the source's weights are rounded to its number formats.
    """
    adapter = is_adapter(folder)
    auto = _require_transformers(source, folder)
    ours: Any
    if adapter:
        ours = read_model(source, merge_into="original", is_checked=True)
        theirs = peft_model(auto, folder, ours.config.scores)
    else:
        merge_into = read_origin(folder).get("merge_into", "original")
        ours = read_model(source, merge_into=merge_into, is_checked=True)
        stored, problems = stored_tensors(folder, ours.config)
        problems = problems or check_tensors(ours, stored, ours.config.vocab_size)
        parts = tensor_parts(ours, ours.config.vocab_size)
        lacking = [part.tensor for part in parts if part.tensor not in stored]
        problems += [Problem(name, "is missing") for name in lacking]
        if problems:
            print(f"{folder} holds another model: {problems[0].what} {problems[0].reason}")
            return 3
        weights = ours.named_weights()
        for part in parts:
            weight = weights[part.parameter]
            weight.copy_(weight.to(stored[part.tensor].dtype))
        # transformers' other kernels leave out what they cannot do, such as Gemma 2's soft cap
        options = {"attn_implementation": "eager", "trust_remote_code": remote_code_is_allowed()}
        theirs = auto.from_pretrained(folder, dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ours.config.vocab_size, TOKENS, generator=generator)
    with torch.no_grad():
        if ours.config.reads_images:  # the image's own token is no text
            tokens = torch.where(tokens == ours.tower.token, 0, tokens)
        if ours.config.predicts:
            code = report_difference(ours.logits(tokens), theirs(tokens).logits, folder)
        else:
            where = tokenizer_folder(folder)
            given = numbers_here(ours, where), numbers_elsewhere(theirs, where, ours.config)
            code = report_difference(*given, folder, "numbers of texts")
        if ours.config.reads_images:
            code = max(code, compare_image(ours, theirs, tokens, source, folder))
        return code


def compare_image(ours: Any, theirs: Any, tokens: Tensor, source: Path, folder: Path) -> int:
    """Compare what is computed of a text with an image; return 0 if it is equal, else 3."""
    # imports transformers
    from fsdp_trainer.models.hf.start_check import with_image

    picture = processor_of(str(model_folder(source))).example()
    document, _, media = with_image(ours, picture, tokens[:1])
    of_class = theirs.get_base_model() if hasattr(theirs, "get_base_model") else theirs
    whole = ours.hf if ours.config.predicts else of_class.base_model
    given = ours.tower.own_inputs(whole, media, document)
    output = theirs(input_ids=document, **given)
    shown = output.last_hidden_state if ours.config.pooling else output.logits
    here = ours.logits(document, media)
    here = here[:, -1] if here.ndim > shown.ndim else here  # the class reads the last token
    what = "logits" if ours.config.predicts else "numbers"
    return report_difference(here, shown, folder, f"{what} with an {READ.name}")


def report_difference(a: Tensor, b: Tensor, folder: Path, what: str = "logits") -> int:
    """Print the difference between two models' logits; return 0 if they are equal, else 3."""
    difference = (a - b).abs().max().item()
    same = difference <= TOLERANCE
    about = f"largest difference {difference:.2e}"
    if what.startswith("logits"):
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        divergences = F.kl_div(log_a, log_b, log_target=True, reduction="none").sum(-1)
        divergence, count = divergences.max().item(), divergences.numel()
        about += f", largest KL divergence {divergence:.2e} over {count} tokens"
    print(f"{what} {'equal' if same else 'DIFFER from'} {folder}'s: {about}")
    return 0 if same else 3


def peft_model(auto: Any, folder: Path, labels: int = 0) -> Any:
    """Return peft's model of an adapter and its base model, in float32.

    labels: of the adapter's head; 0: the base model's own.
    """
    try:
        from peft import PeftModel
    except ImportError:
        how = "is an adapter, which is compared by peft:  pip install peft"
        raise UserError("peft is not installed", f"hf={folder}", how) from None
    base = base_folder(folder)
    if find_checkpoint(base):
        how = f"has {base} as base model, which peft cannot read: name an export of it there"
        raise UserError("the adapter's base is a checkpoint", f"hf={folder}", how)
    return PeftModel.from_pretrained(base_model(auto, base, labels), folder).eval()


def base_model(auto: Any, folder: Path, labels: int) -> Any:
    """Return transformers' model, in float32. labels: see peft_model.

    A class that transformers does not have, of a model with a tower, is given the model without a
    head: transformers knows former names of weights by its own classes.
    """
    from transformers import AutoModel

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if not auto.__module__.startswith("transformers."):
        bare = AutoModel.from_pretrained(folder, **options)
        bare.config.num_labels = labels
        model = auto._from_config(bare.config, **options)
        model.model = bare
        return model
    return auto.from_pretrained(folder, **options, **({"num_labels": labels} if labels else {}))


def _require_transformers(source: Path, folder: Path) -> Any:
    try:
        from transformers.utils.logging import disable_progress_bar

        from fsdp_trainer.models.hf.hf_config import published_class
    except ImportError:
        how = "is compared by transformers:  pip install transformers"
        raise UserError("transformers is not installed", f"hf={folder}", how) from None
    disable_progress_bar()
    return published_class(model_config(source))


# --- the loss on a file ---------------------------------------------------------------------------


def show_losses(source: Path, data: str) -> None:
    """Print the loss on a file; for an adapter of 4-bit weights, merged in both ways."""
    ways = list(MERGES) if kept_in_four_bits(source) else ["original"]
    processor, config = None, model_config(source)
    if not config.predicts:
        reason = f"predicts no tokens.\nUse  fsdp-trainer evaluate {source} tasks=[{data}]"
        reason += "  for embeddings and ranks, and  data.validation  for labels"
        raise UserError("the model has another head", str(source), reason)
    if config.reads_images:
        processor = processor_of(str(model_folder(source)))
    with tempfile.TemporaryDirectory() as cache:
        store = tokenized(source, data, Path(cache), processor)
        tokens = int(sum(store.supervised))
        for way in ways:
            model = read_model(source, merge_into=way, is_checked=True)
            loss = mean_loss(model, store, processor)
            how = f", {MERGES[way]}" if len(ways) > 1 else ""
            print(f"loss {loss:.4f} on {tokens:,} tokens of {data}{how}")


def tokenized(source: Path, data: str, cache: Path, processor: MediaProcessor | None) -> TokenStore:
    """Return a file tokenized as in the source's own run. processor: of the model's media."""
    settings: dict[str, Any] = {}
    if not is_adapter(source):
        stored = checkpoint_configuration(source)
        known = {field.name for field in fields(Data)}
        settings = {key: value for key, value in stored["data"].items() if key in known}
    settings |= {"path": data, "validation": None, "streaming": False, "packing": "none"}
    settings = with_variables(settings, source)
    length = read_architecture(model_folder(source)).max_position_embeddings
    tokenizer = load_tokenizer(str(tokenizer_folder(source)))
    wanted = Data(**settings)
    template = load_template(wanted.template, tokenizer, wanted.template_args, wanted.template_date)
    media = reader_of(processor, cache) if processor else None
    batch = Batch(seq_len=length)
    return prepare(wanted, batch, tokenizer, template, cache, media=media).train[0]


def with_variables(value: Any, source: Path) -> Any:
    """Return a value of a checkpoint's configuration with the environment's values.

    Raises UserError for a variable that is not set.
    """
    if isinstance(value, dict):
        return {name: with_variables(part, source) for name, part in value.items()}
    if isinstance(value, list):
        return [with_variables(part, source) for part in value]

    def look_up(variable: re.Match[str]) -> str:
        text = os.environ.get(variable[1], variable[2])
        if text is None:
            reason = f"is in the configuration of {source}: write  {variable[1]}=VALUE  before"
            raise UserError(
                "an environment variable is not set", variable[0], f"{reason} the command"
            )
        return text

    return VARIABLE.sub(look_up, value) if isinstance(value, str) else value


@torch.no_grad()
def mean_loss(model: Decoder, store: TokenStore, processor: MediaProcessor | None) -> float:
    """Return Σ weight · nll ÷ Σ weight over all samples. processor: of the model's media."""
    total = 0.0
    weights = 0.0
    for sample in range(len(store)):
        stored_tokens, stored_weights = store.read(sample)
        tokens = torch.tensor(stored_tokens).long()
        weight = torch.tensor(stored_weights)[1:].double()
        shown = PromptMedia.of_files(processor, store.media(sample)) if processor else None
        media = packed_media(model, [tuple(tokens[:-1].tolist())], [shown], tokens.device)
        given: dict[str, Any] = {} if media is None else {"media": media}
        scores = model.logits(tokens[None, :-1], **given)[0].float().log_softmax(-1)
        learnt = scores.gather(1, tokens[1:, None])[:, 0].double()
        total -= float((weight * learnt).sum())
        weights += float(weight.sum())
    return total / weights
