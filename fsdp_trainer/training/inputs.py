"""The inputs of a run, prepared on this machine."""

from dataclasses import dataclass
from pathlib import Path

from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer


@dataclass
class RunInputs:
    """Tokenizer, template, data and the folders of models.

    init_from: local folder of model.init_from; None: random weights.
    frozen_model: folder of a second model, a teacher or a reference; None: there is none, or it is
    the model that the run begins with.
    teacher_files: digest of the files in frozen_model, if it is a teacher whose lists are stored;
    else None.
    """

    tokenizer: TextTokenizer
    template: Template
    data: Prepared
    init_from: Path | None
    frozen_model: Path | None = None
    teacher_files: str | None = None
