"""The Hugging Face folder without weights in every checkpoint, from which an export starts."""

import shutil
from pathlib import Path

from fsdp_trainer.base.json_files import Json, read_object
from fsdp_trainer.checkpoint.atomic_files import write_json
from fsdp_trainer.checkpoint.sentence_files import write_sentence_files
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.models.config import ModelConfig

OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model's processor of images."""


def write_hf_assets(
    folder: Path,
    config: ModelConfig,
    tokenizer: TextTokenizer,
    chat_template: dict[str, str] | None,
    dtype: str,
    source: Path | None,
    prompts: dict[str, str] | None = None,
) -> None:
    """Write config.json, generation_config.json, files of tokenizer and images, and the template.

    chat_template: texts by name, in place of the tokenizer's own.
    source: the folder that the model came from, whose generation_config.json is kept. prompts: of
    an embedding model, by the kind of text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop_ids = sorted(tokenizer.stop_ids, key=lambda i: (i != tokenizer.eos_id, i))
    hf_config = config.to_hf(dtype, tokenizer.bos_id, stop_ids or None)
    write_json(folder / "config.json", with_padding(hf_config, padding(config, tokenizer)))
    copied = [*Path(config.folder).glob("*.py")] if config.folder else []
    copied += [source / name for name in OF_IMAGES] if source and config.reads_images else []
    for file in filter(Path.is_file, copied):
        shutil.copyfile(file, folder / file.name)
    write_json(folder / "generation_config.json", generation_settings(tokenizer, stop_ids, source))
    if config.pooling:
        write_sentence_files(folder, config, prompts or {})
    tokenizer.save(folder, chat_template)


def with_padding(hf_config: Json, keys: Json) -> Json:
    """Return a config.json with keys of the part for text, which may be the whole of it."""
    text = hf_config.get("text_config")
    return hf_config | ({"text_config": text | keys} if keys and isinstance(text, dict) else keys)


def padding(config: ModelConfig, tokenizer: TextTokenizer) -> Json:
    """Return the key of config.json by which transformers finds the last token, which it scores.

    Not the token of padding if the tokenizer itself ends texts with it.
    """
    if not config.scores or config.encoder:
        return {}
    return {"pad_token_id": None if tokenizer.ends_with_pad else tokenizer.pad_id}


def generation_settings(tokenizer: TextTokenizer, stop_ids: list[int], source: Path | None) -> Json:
    """Return the content of generation_config.json. source: see write_hf_assets."""
    generation: Json = {
        "bos_token_id": tokenizer.bos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    if source and (source / "generation_config.json").is_file():
        title = "cannot read the settings of generation"
        generation = read_object(source / "generation_config.json", title)
    ends = generation.get("eos_token_id") or []
    ends = ends if isinstance(ends, list) else [ends]
    # a base model's list lacks the end of turn that fine-tuning teaches
    generation["eos_token_id"] = list(dict.fromkeys([*ends, *stop_ids]))
    return {key: value for key, value in generation.items() if value not in (None, [])}
