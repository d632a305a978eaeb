"""The files by which sentence-transformers reads an embedding model, beside transformers' own.

They are in the form that its versions from 2 on read.
"""

from pathlib import Path

from fsdp_trainer.checkpoint.atomic_files import write_json
from fsdp_trainer.models.config import POOLING, POOLINGS, ModelConfig

MODULES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
    "2_Normalize": "sentence_transformers.models.Normalize",
}
"""The modules that embed a text, one after the other, by the folder of each."""
SETTINGS = "config_sentence_transformers.json"
"""The file with the prompts."""


def write_sentence_files(folder: Path, config: ModelConfig, prompts: dict[str, str]) -> None:
    for name in filter(None, MODULES):
        (folder / name).mkdir(exist_ok=True)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(MODULES.items())
    ]
    write_json(folder / "modules.json", modules)
    length = {"max_seq_length": config.max_position_embeddings, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", length)
    own = {f"pooling_mode_{key}": name == config.pooling for key, name in POOLINGS.items()}
    write_json(folder / POOLING, {"word_embedding_dimension": config.hidden_size, **own})
    write_json(folder / "2_Normalize" / "config.json", {})
    named = {"query": "", "document": ""} | prompts
    settings = {"prompts": named, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / SETTINGS, settings)
