"""Tasks of retrieval from local files, and the metrics of how documents are ranked.

A task is a folder in BEIR's form, as MTEB's tasks have it (corpus.jsonl, queries.jsonl,
qrels/test.tsv), or a file of rows as objective=embed and objective=rerank read them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.sources import Problems, Record, find_sources
from fsdp_trainer.data.records.labelled_texts import QUERIES, QUERY, LabelledTexts
from fsdp_trainer.data.records.texts_with_media import MarkedText
from fsdp_trainer.data.tokens.records_to_samples import choose_reader, read_texts
from fsdp_trainer.errors import UserError

CORPUS, QUERY_FILE = "corpus.jsonl", "queries.jsonl"
Text = str | MarkedText
"""A query or a document, perhaps with media."""
SPLITS = ("test", "dev", "validation", "train")
"""Names of the files of relevance, the first of which is used that is there."""
RECALLS, FIRST = (1, 10, 100), 10
"""Numbers k of documents in which recall@k looks, and in which NDCG does."""
SIMILARITIES = 1 << 25
"""The most similarities of queries and documents in memory at a time."""


@dataclass(frozen=True)
class RetrievalTask:
    """Queries, and the documents to be found for them.

    relevant: of each query its documents with their gains, by their numbers. candidates: of each
    query the numbers of the documents that are ranked; None: all are.
    """

    name: str
    queries: list[Text]
    documents: list[Text]
    relevant: list[dict[int, float]]
    candidates: list[list[int]] | None = None


def read_retrieval(
    path: str, kind: str, data: Data, limit: int | None, with_media: bool = False
) -> RetrievalTask:
    """Return the task of a folder or a file. Raises UserError.

    kind: of a file's rows, QUERIES or RANKED. data: says which columns mean what. limit: the first
    so many queries. with_media: whether the model reads media.
    """
    if not Path(path).is_dir():
        task = of_rows(Path(path).stem, [*rows_of(path, kind, data, with_media)], kind)
        own = task.candidates and task.candidates[:limit]
        return replace(
            task, queries=task.queries[:limit], relevant=task.relevant[:limit], candidates=own
        )
    if kind != QUERIES:
        reason = "has all documents for each query, and a reranker reads a query with its own.\n"
        reason += "Use  a file of rows with  query, documents  and  scores"
        raise UserError("a task cannot be run", f"tasks=[{path}]", reason)
    return of_folder(Path(path), limit)


def rows_of(path: str, kind: str, data: Data, with_media: bool) -> Iterator[LabelledTexts]:
    problems = Problems("fail")

    def refuse(row: Record, reason: str) -> None:
        problems.add(row.where, reason)

    for source in find_sources(path, "tasks"):
        for file in source.files:

            def choose(row: Record, file: str = file) -> Any:
                own = data.format, data.fields, kind, with_media
                return choose_reader(data, row.columns, file, *own)

            for *_, texts in read_texts(read_records(file), choose, lambda one: one, refuse):
                assert isinstance(texts, LabelledTexts)
                yield texts
    problems.raise_if_failing()


def of_rows(name: str, rows: Sequence[LabelledTexts], kind: str) -> RetrievalTask:
    numbers: dict[Text, int] = {}
    queries, relevant, candidates = [], [], []
    for row in rows:
        own: list[int] = []
        gains: dict[int, float] = {}
        for one in row.texts:
            text = plain_or_marked(one.marked(row.where[0])[-1])
            if kind == QUERIES and one.kind == QUERY:
                continue
            number = numbers.setdefault(text, len(numbers))
            own.append(number)
            gain = float(one.kind == 1) if kind == QUERIES else float(one.label)
            if gain > 0:
                gains[number] = max(gain, gains.get(number, 0.0))
        queries.append(plain_or_marked(row.texts[0].marked(row.where[0])[0]))
        relevant.append(gains)
        candidates.append([*dict.fromkeys(own)])
    return RetrievalTask(
        name, queries, [*numbers], relevant, None if kind == QUERIES else candidates
    )


def plain_or_marked(text: MarkedText) -> Text:
    return text if text.media else text.text


def of_folder(folder: Path, limit: int | None) -> RetrievalTask:
    """Return the task of a folder in BEIR's form. Raises UserError."""
    documents = {id: full_text(row) for id, row in by_id(folder / CORPUS)}
    queries = {id: str(row.get("text", "")) for id, row in by_id(folder / QUERY_FILE)}
    places = {id: place for place, id in enumerate(documents)}
    gains: dict[str, dict[int, float]] = defaultdict(dict)
    file = relevance_file(folder)
    for row in read_records(str(file)):
        query, document, score = (
            str(row.columns.get(name)) for name in ("query-id", "corpus-id", "score")
        )
        if reason := row.error or why_unusable(query in queries, document in places, score):
            where = f"{row.where[0]}:{row.where[1]}"
            raise UserError("a task cannot be run", where, reason)
        if float(score) > 0:
            gains[query][places[document]] = float(score)
    chosen = [*gains][:limit]
    return RetrievalTask(
        folder.resolve().name,
        [queries[id] for id in chosen],
        [*documents.values()],
        [gains[id] for id in chosen],
    )


def why_unusable(has_query: bool, has_document: bool, score: str) -> str:
    """Return why a line of relevance cannot be used, "" if it can."""
    if not (has_query and has_document):
        return "names a query or a document that is not there"
    try:
        return "" if math.isfinite(float(score)) else f"has the score {score}"
    except ValueError:
        return f"has the score {score}, which is no number"


def by_id(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in read_records(str(file)):
        if row.error or "_id" not in row.columns:
            raise UserError(
                "a task cannot be run", f"{row.where[0]}:{row.where[1]}", row.error or "has no _id"
            )
        yield str(row.columns["_id"]), row.columns


def full_text(row: dict[str, Any]) -> str:
    """Return a document's title and text, as BEIR and MTEB join them."""
    return f"{row.get('title') or ''} {row.get('text') or ''}".strip()


def relevance_file(folder: Path) -> Path:
    names = [f"qrels/{split}.{suffix}" for split in SPLITS for suffix in ("tsv", "jsonl")]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        reason = "has no qrels/test.tsv with the columns query-id, corpus-id and score"
        raise UserError("a task cannot be run", f"tasks=[{folder}]", reason)
    return file


# --- ranking --------------------------------------------------------------------------------------


def ranks_of(similarity: Tensor, relevant: dict[int, float]) -> dict[int, int]:
    """Return the rank of each relevant document, from 1. similarity: [documents].

    Of equally similar documents the first ones are ahead.
    """
    ranks = {}
    for number in relevant:
        own = similarity[number]
        ahead = (similarity > own).sum() + (similarity[:number] == own).sum()
        ranks[number] = int(ahead) + 1
    return ranks


def metrics_of(ranks: dict[int, int], relevant: dict[int, float]) -> dict[str, float]:
    places = sorted(ranks.values())
    recalls = {f"recall_{k}": sum(p <= k for p in places) / len(places) for k in RECALLS}
    ideal = sorted(relevant.values(), reverse=True)[:FIRST]
    gained = sum(relevant[i] / np.log2(rank + 1) for i, rank in ranks.items() if rank <= FIRST)
    best = sum(gain / np.log2(place + 2) for place, gain in enumerate(ideal))
    return {**recalls, "mrr": 1 / places[0], f"ndcg_{FIRST}": float(gained / best)}


def list_metrics_of(ranks: dict[int, int], relevant: dict[int, float]) -> dict[str, float]:
    """Return the metrics of a query with a list of its own: where the best document is."""
    best = max(relevant.values())
    first = min(ranks[number] for number, gain in relevant.items() if gain == best)
    ndcg = f"ndcg_{FIRST}"
    own = {"recall_1": float(first == 1), "mrr": 1 / first}
    return own | {ndcg: metrics_of(ranks, relevant)[ndcg]}


def means(each: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in each) / len(each) for name in each[0]} if each else {}


@dataclass(frozen=True)
class Mining:
    """Which documents become hard negatives of a query.

    count: of each query, at most. share: those with more than this share of the similarity of the
    query's own document may answer it too, and are left out (Moreira et al. 2024).
    """

    count: int
    share: float

    def negatives(
        self, similarity: Tensor, query: Text, task: RetrievalTask, place: int
    ) -> list[int]:
        """Return the numbers of a query's hard negatives, the most similar first.

        similarity: [documents].
        """
        own = task.relevant[place]
        limit = self.share * float(similarity[[*own]].min())
        allowed = similarity.masked_fill(similarity > limit, -torch.inf)
        allowed[[*own]] = -torch.inf
        order = allowed.topk(min(self.count + 1, len(allowed)))
        chosen = [
            number
            for value, number in zip(order.values.tolist(), order.indices.tolist(), strict=True)
            if value > -torch.inf and task.documents[number] != query
        ]
        return chosen[: self.count]


def in_blocks(queries: Tensor, documents: Tensor) -> Iterator[Tensor]:
    """Yield the similarities of each query to all documents, [documents]."""
    size = max(1, SIMILARITIES // max(1, len(documents)))
    for part in queries.split(size):
        yield from part @ documents.T


def scored_queries(
    task: RetrievalTask,
    similarities: Callable[[Sequence[int]], Iterator[Tensor]],
    places: Sequence[int],
    mining: Mining | None,
) -> list[tuple[dict[str, float], list[int]]]:
    """Return the metrics and the hard negatives of some queries, those that have a document.

    similarities: yields those of queries to their documents. places: numbers of the queries.
    """
    results = []
    for place, similarity in zip(places, similarities(places), strict=True):
        relevant, measure = task.relevant[place], metrics_of
        if task.candidates is not None:
            measure = list_metrics_of
            numbers = {number: i for i, number in enumerate(task.candidates[place])}
            relevant = {numbers[number]: gain for number, gain in relevant.items()}
        metrics = measure(ranks_of(similarity, relevant), relevant)
        query = task.queries[place]
        mined = mining.negatives(similarity, query, task, place) if mining else []
        results.append((metrics, mined))
    return results
