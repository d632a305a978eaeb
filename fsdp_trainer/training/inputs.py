"""The inputs of a run, ready on this machine."""

from dataclasses import dataclass
from pathlib import Path

from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer


@dataclass
class RunInputs:
    """Tokenizer, template, data and the model's folder.

    init_from: model.init_from, fetched.
    frozen_model: the folder of a second model, a teacher or a reference; None: there is none, or
    it is the model that the run begins with.
    teacher_files: a digest of the files in it, of a teacher of which lists are stored; None: of
    any other.
    """

    tokenizer: TextTokenizer
    template: Template
    data: Prepared
    init_from: Path | None
    frozen_model: Path | None = None
    teacher_files: str | None = None
