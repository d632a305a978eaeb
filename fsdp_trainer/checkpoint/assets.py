"""What a Hugging Face folder holds besides weights; every checkpoint carries it, so that it can be exported anywhere."""

import json
from pathlib import Path

from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.models.config import ModelConfig


def write_hf_assets(
    folder: Path,
    config: ModelConfig,
    tokenizer: TextTokenizer,
    chat_template: str | None,
    dtype: str,
    source: Path | None,
) -> None:
    """config.json, generation_config.json, the tokenizer's files and the chat template. source: the folder the model came from."""
    folder.mkdir(parents=True, exist_ok=True)
    stop_ids = sorted(tokenizer.stop_ids, key=lambda i: (i != tokenizer.eos_id, i))
    described = config.to_hf(dtype, tokenizer.bos_id, stop_ids or None)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    kept = source / "generation_config.json" if source else None
    generation = (
        json.loads(kept.read_text())
        if kept and kept.is_file()
        else {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    )
    ends = generation.get("eos_token_id") or []
    # a base model's list lacks the end of turn that fine-tuning teaches
    generation["eos_token_id"] = list(
        dict.fromkeys([*(ends if isinstance(ends, list) else [ends]), *stop_ids])
    )
    (folder / "generation_config.json").write_text(
        json.dumps({k: v for k, v in generation.items() if v not in (None, [])}, indent=2) + "\n"
    )
    tokenizer.save(folder, chat_template)
