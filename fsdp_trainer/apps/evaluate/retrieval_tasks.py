"""Evaluation of models that embed or rank texts, and the hard negatives that one of them finds."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.checkpoint.load import endpoint_of
from fsdp_trainer.config.evaluation_inputs import MTEB, is_retrieval, task_names
from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.data.records.labelled_texts import QUERIES, RANKED
from fsdp_trainer.data.records.media import MARK
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.retrieval import (
    Mining,
    RetrievalTask,
    Text,
    in_blocks,
    means,
    read_retrieval,
    scored_queries,
)
from fsdp_trainer.evaluation.scoring import Metrics, Scorer
from fsdp_trainer.methods.text_reader import TextReader
from fsdp_trainer.models.config import ModelConfig

OF_IMAGE = 2000
"""Characters that take about as long as an image."""


def evaluate_reader(cfg: EvaluateConfig, device: torch.device) -> Metrics:
    """Return {task: {metric: value}} of tasks of retrieval, and write cfg.mined. Collective.

    Each rank has a complete copy of the model, and reads a part of the texts. Raises UserError.
    """
    dtype = getattr(torch, cfg.dtype)
    reader = TextReader.load(str(cfg.source), device, dtype, cfg.implementation)
    embeds = bool(reader.model.config.pooling)
    require_ranking(cfg, reader.model.config)
    mining = Mining(cfg.negatives, cfg.hardest) if cfg.mined else None
    metrics: Metrics = {}
    rows: list[dict] = []
    for name in task_names(cfg):
        if name.startswith(MTEB):
            metrics |= run_mteb(
                name, MtebEncoder(vectors_of(reader), reader.prompts), cfg.mteb_data
            )
            continue
        kind, has_media = QUERIES if embeds else RANKED, reader.media is not None
        task = read_retrieval(name, kind, cfg.data, cfg.limit, has_media)
        results = RankedTask(reader, task).results(mining)
        metrics[task.name] = means([each for each, _ in results])
        rows += [*mined_rows(task, [numbers for _, numbers in results])] if mining else []
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if cfg.mined and is_first:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(cfg.mined).expanduser().write_text("".join(lines), encoding="utf-8")
        count = sum(len(row["negatives"]) for row in rows)
        print(f"{cfg.mined}: {len(rows):,} queries, {count:,} hard negatives", file=sys.stderr)
    return metrics


def require_ranking(cfg: EvaluateConfig, config: ModelConfig) -> None:
    problems = [
        Problem(f"tasks=[{name}]", reason)
        for name in task_names(cfg)
        if (reason := why_no_task(name, cfg, config))
    ]
    if endpoint_of(config) == "/v1/classify":
        reason = (
            "is a classifier, which ranks no documents.\nIts metrics are those of training with"
        )
        problems.append(Problem(f"source={cfg.source}", f"{reason}  data.validation=FILE"))
    if cfg.mined and not config.pooling:
        reason = "needs an embedding model, which compares a query with all documents"
        problems.append(Problem(f"mined={cfg.mined}", reason))
    if problems:
        raise UserError("the model cannot be evaluated so", problems)


def why_no_task(name: str, cfg: EvaluateConfig, config: ModelConfig) -> str:
    if not is_retrieval(name):
        return (
            "asks a model that writes text, and this one embeds or ranks texts.\nUse  a file of"
            " queries with documents, or a folder with corpus.jsonl and queries.jsonl"
        )
    if name.startswith(MTEB) and (cfg.mined or cfg.limit or not config.pooling):
        return "is for embedding models, as a whole, without  limit  and  mined"
    return ""


class RankedTask:
    """A task with the vectors of its texts by a model."""

    def __init__(self, reader: TextReader, task: RetrievalTask):
        """Compute all vectors. Collective."""
        self.reader, self.task = reader, task
        self.answered = [place for place, own in enumerate(task.relevant) if own]
        """Numbers of the queries that have a document."""
        if task.candidates is None:
            vectors, prompts = vectors_of(reader), reader.prompts
            self.documents = vectors(task.documents, prompts.get("document", ""))
            self.queries = vectors(task.queries, prompts.get("query", ""))

    def results(self, mining: Mining | None) -> list[tuple[dict[str, float], list[int]]]:
        """Return metrics and hard negatives of each query that has a document. Collective."""

        def work(places: Sequence[int]) -> list[tuple[dict[str, float], list[int]]]:
            return scored_queries(self.task, self._similarities, places, mining)

        scorer = Scorer(self.reader.model, 1, self.reader.device)
        return scorer.compute_in_parts(self.answered, work, self._cost)

    def _cost(self, place: int) -> int:
        return 1 if self.task.candidates is None else len(self.task.candidates[place])

    def _similarities(self, places: Sequence[int]) -> Iterator[Tensor]:
        if self.task.candidates is None:
            yield from in_blocks(self.queries[[*places]], self.documents)
            return
        for place in places:
            documents = [self.task.documents[i] for i in self.task.candidates[place]]
            context = self.reader.context
            tokens = self.reader.encode_ranked(self.task.queries[place], documents, context)
            yield self.reader.relevance(tokens)


def vectors_of(reader: TextReader) -> Callable[[Sequence[Text], str], Tensor]:
    """Return a function that embeds texts, of which each rank computes a part. It is collective.

    Texts are cut to the model's context.
    """
    scorer = Scorer(reader.model, 1, reader.device)

    def vectors(texts: Sequence[Text], prompt: str) -> Tensor:
        def work(own: Sequence[Text]) -> list[Tensor]:
            return [*reader.vectors(reader.encode(own, prompt, reader.context)).float()]

        return torch.stack(scorer.compute_in_parts(texts, work, cost_of))

    return vectors


def cost_of(text: Text) -> int:
    """Return about how long a text is, in characters."""
    if isinstance(text, str):
        return len(text)
    return len(text.text) + OF_IMAGE * len(text.media)


def mined_rows(task: RetrievalTask, negatives: Sequence[Sequence[int]]) -> Iterator[dict]:
    """Yield each query with its documents and its hard negatives, as objective=embed reads them."""
    places = [place for place, own in enumerate(task.relevant) if own]
    for place, numbers in zip(places, negatives, strict=True):
        positive = [as_json(task.documents[number]) for number in task.relevant[place]]
        row = {"query": as_json(task.queries[place]), "positive": positive}
        yield row | {"negatives": [as_json(task.documents[number]) for number in numbers]}


def as_json(text: Text) -> Any:
    """Return a text as rows have it, its images with their whole paths."""
    if isinstance(text, str):
        return text
    first, *others = [{"type": "text", "text": piece} for piece in text.text.split(MARK)]
    parts = [first]
    for item, after in zip(text.media, others, strict=True):
        parts += [{"type": item.part, item.part: item.at(text.file)}, after]
    return [part for part in parts if part["type"] != "text" or part["text"]]


# --- MTEB -----------------------------------------------------------------------------------------


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
