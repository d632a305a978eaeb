"""MTEB's tasks for models that embed texts. The package mteb is imported late: it is heavy."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.config.evaluation_inputs import MTEB
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.scoring import Metrics

Vectors = Callable[[Sequence[str], str], Tensor]
"""Returns the embeddings of texts after a prompt, [texts, width] float32, each of length 1."""


class MtebEncoder:
    """A model as mteb calls it (EncoderProtocol). prompts: by the kind of text."""

    def __init__(self, vectors: Vectors, prompts: dict[str, str]):
        from mteb.models.model_meta import ModelMeta

        self.vectors, self.prompts = vectors, prompts
        self.mteb_model_meta = ModelMeta.create_empty()

    def encode(
        self, inputs: Iterable[dict[str, Any]], *, prompt_type: Any = None, **others: Any
    ) -> np.ndarray:
        """Return the embeddings of batches of texts, [texts, width].

        prompt_type: query or document; None: of a task that does not tell them apart.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        kind = str(getattr(prompt_type, "value", prompt_type))
        return self.vectors(texts, self.prompts.get(kind, "")).cpu().numpy()

    def similarity(self, one: Any, other: Any) -> Tensor:
        """Return the cosines of all pairs, [ones, others]."""
        return torch.as_tensor(one) @ torch.as_tensor(other).T

    def similarity_pairwise(self, one: Any, other: Any) -> Tensor:
        return (torch.as_tensor(one) * torch.as_tensor(other)).sum(-1)


def run_mteb(name: str, encoder: MtebEncoder, data: str | None) -> Metrics:
    """Return the metrics of one of MTEB's tasks, the mean over its splits and subsets.

    name: as typed, mteb:NAME. data: a folder with a folder for each data set, by the name that it
    has on the hub; None: the hub's. Raises UserError for a task that mteb does not have.
    """
    import mteb

    try:
        task = mteb.get_task(name.removeprefix(MTEB))
    except KeyError as error:
        raise UserError("mteb has no such task", f"tasks=[{name}]", str(error.args[0])) from None
    if data is not None:
        task.metadata.dataset["path"] = str(local_data(data, task.metadata.dataset["path"], name))
    result = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False)
    scores = [each for one in result.task_results for some in one.scores.values() for each in some]
    return {name: mean_scores(scores)}


def local_data(folder: str, hub_name: str, task: str) -> Path:
    """Return the folder of a data set among local ones. Raises UserError."""
    path = Path(folder).expanduser() / hub_name.rpartition("/")[2]
    if not path.is_dir():
        reason = f"has no folder {path.name} with the data of {task}.\nFetch it:  hf download"
        reason += f" {hub_name} --repo-type dataset --local-dir {path}"
        raise UserError("the data is not there", f"mteb_data={folder}", reason)
    return path.resolve()


def mean_scores(scores: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the means of the numbers of several objects that all of them have, without NaN."""
    names = [name for name, value in scores[0].items() if isinstance(value, int | float)]
    means = {name: float(np.mean([each.get(name, np.nan) for each in scores])) for name in names}
    return {name: mean for name, mean in means.items() if np.isfinite(mean)}
