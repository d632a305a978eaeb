"""The inputs of a run, ready on this machine."""

from dataclasses import dataclass
from pathlib import Path

from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer


@dataclass
class RunInputs:
    """Tokenizer, template, data and the model's folder.

    init_from, teacher: model.init_from and objective.teacher, fetched.
    """

    tokenizer: TextTokenizer
    template: Template
    data: Prepared
    init_from: Path | None
    teacher: Path | None = None
