"""Heads that give texts numbers: losses are transformers' on any ranks, and so are exports."""

import json
import math
import shutil

import inject
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from heads import ENCODERS, STEP, WORDS, gradients, make_encoder, write_rows
from other_models import make_other_folder
from peft import (
    AutoPeftModelForFeatureExtraction,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
)
from sklearn.metrics import roc_auc_score
from starlette.testclient import TestClient
from stored import assert_near
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from world import cli, read_json, read_lines, verify

from fsdp_trainer.apps.chat.app import make_app
from fsdp_trainer.apps.chat.readings import ServedReader
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.schema import Data
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.retrieval import read_retrieval
from fsdp_trainer.methods.classification import ClassMetrics
from fsdp_trainer.methods.contrast import StepTexts, loss_of_texts
from fsdp_trainer.methods.labels import SINGLE
from fsdp_trainer.methods.text_reader import TextReader

OBJECTIVES = {
    "queries": "embed", "alike": "embed", "lists": "rerank", "tags": "tag", "steps": "tag",
}  # fmt: skip
ROUNDING = 1.2e-7
"""Of a weight near 1 that loses a small gradient."""
COSENT = "objective.comparison=cosent"
KINDS = {"classes": "single_label", "several": "multi_label", "numbers": "regression"}
PLAIN = ["model.init_from=RUN(plain)", "objective=classify"]


def run_of(ledger, kind, *more, ranks=1):
    words = [
        PLAIN[0],
        f"objective={OBJECTIVES.get(kind, 'classify')}",
        *STEP,
        f"data.path=DATA/{kind}.jsonl",
        *more,
    ]
    return ledger.run(words=words, ranks=ranks)


def rows_of(ledger, kind):
    return read_lines(ledger.data / f"{kind}.jsonl")


def loss_of_transformers(model, tokenizer, rows):
    """The mean loss over rows, one text at a time."""
    total = 0
    for row in rows:
        inputs, label = tokenizer(row["text"], return_tensors="pt"), row["label"]
        if model.config.problem_type == "regression":
            labels = torch.tensor([[label]])
        elif isinstance(label, list):
            labels = torch.tensor([[float(name in label) for name in model.config.label2id]])
        else:
            labels = torch.tensor([model.config.label2id[label]])
        total = total + model(input_ids=inputs["input_ids"], labels=labels).loss
    return total / len(rows)


def assert_equal(gradients, expected):
    for name, gradient in gradients.items():
        scale = expected[name].abs().max().clamp_min(1e-3)
        error = (gradient - expected[name]).abs() - ROUNDING
        assert error.max() / scale < 1e-5, name


def theirs(folder, auto=AutoModelForSequenceClassification):
    """Return transformers' model and tokenizer of a folder."""
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def assert_learns(ledger, kind, start, model, loss, *words, prefix="", ranks=1):
    """Check the loss of a run's start, and each gradient of a step from there; return its run.

    prefix: what our names have before those of transformers.
    """
    assert start["objective"] == pytest.approx([loss.item()], rel=1e-6)
    loss.backward()
    run = run_of(ledger, kind, *words, f"model.init_from={start.folder / 'hf'}", ranks=ranks)
    expected = {f"{prefix}{name}": p.grad for name, p in model.named_parameters()}
    assert_equal(gradients(start, run), expected)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_classes_have_transformers_loss_and_gradients(ledger, kind):
    start = run_of(ledger, kind, "optim.lr=1e-9")
    model, tokenizer = theirs(start.folder / "hf")
    assert model.config.problem_type.startswith(KINDS[kind])
    loss = loss_of_transformers(model, tokenizer, rows_of(ledger, kind))
    assert_learns(ledger, kind, start, model, loss)


BOTH = "objective.pooling=mean model.attention_direction=bidirectional"
MEAN = f"{BOTH} objective.symmetric=true"
SPLIT = 2, "sharding.context=2 sharding.context_method=gathered"
DIVIDED = 4, "sharding.tensor=2 sharding.context=2"
EVERY = (4, "sharding.tensor=2 batch.micro_rows=2"), (1, "data.packing=none batch.micro_rows=8")
CASES = [
    ("classes", "", SPLIT),
    ("queries", MEAN, SPLIT, DIVIDED),
    ("alike", COSENT, SPLIT),
    ("lists", "objective.ranking=pairwise", SPLIT),
    ("tags", "objective.class_weights=balanced objective.label_smoothing=0.1", DIVIDED),
]


@pytest.mark.parametrize(
    "kind, words, ranks, share",
    [(kind, words, *way) for kind, words, *own in CASES for way in [*own, *EVERY]],
)
def test_a_step_is_the_same_however_rows_are_shared(ledger, kind, words, ranks, share):
    start = run_of(ledger, kind, *words.split(), "optim.lr=1e-9")
    one = run_of(ledger, kind, *words.split())
    other = run_of(ledger, kind, *words.split(), *share.split(), ranks=ranks)
    assert_near(one, other, objective=1e-6)
    shown = [{k: v for k, v in run.metrics[0].items() if "f1" in k} for run in (one, other)]
    assert shown[0] == pytest.approx(shown[1])
    assert_equal(gradients(start, other), gradients(start, one))


def words_of(row, tokenizer, label2id):
    """Input ids and labels: -100 for all but each word's first token, as in run_ner.py."""
    encoded = tokenizer(" ".join(row["tokens"]), return_offsets_mapping=True)
    labels, begin, place = [-100] * len(encoded["input_ids"]), 0, 0
    for word, tag in zip(row["tokens"], row["ner_tags"], strict=True):
        while encoded["offset_mapping"][place][1] <= begin:
            place += 1
        labels[place] = -100 if tag is None else label2id[tag]
        begin += len(word) + 1
    return encoded["input_ids"], labels


def steps_of(row, tokenizer, label2id):
    """Input ids and labels as in TRL's PRMTrainer."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    tokens = [tokenizer.bos_token_id] * (tokenizer.bos_token_id is not None) + ids(row["prompt"])
    labels = [-100] * len(tokens)
    for step, label in zip(row["completions"], row["labels"], strict=True):
        own = ids(step) + ids("\n")
        tokens += own
        labels += [-100] * (len(own) - 1) + [int(label)]
    return tokens, labels


def spans(tags):
    """Entities of a text by their types, as (first word, last word)."""
    entities, begin = set(), None
    for i, tag in enumerate([*tags, "O"]):
        goes_on = begin is not None and tag == f"I-{tags[begin][2:]}"
        if begin is not None and not goes_on:
            entities.add((tags[begin][2:], begin, i - 1))
            begin = None
        if tag != "O" and not goes_on:
            begin = i
    return entities


@pytest.mark.parametrize(
    "kind, read, other",
    [
        ("tags", words_of, ""), ("steps", steps_of, ""), ("tags", words_of, "gpt2"),
        ("steps", steps_of, "starcoder2"),
    ],
)  # fmt: skip
def test_tokens_are_labelled_by_transformers_loss(ledger, kind, read, other):
    """Our decoder, and two that transformers' classes compute."""
    words = other_words(ledger, other) if other else []
    start = run_of(ledger, kind, *words, "optim.lr=1e-9")
    model, tokenizer = theirs(start.folder / "hf", AutoModelForTokenClassification)
    rows = rows_of(ledger, kind)
    total, hits, entities = 0, [], [0, 0, 0]
    for row in rows:
        tokens, labels = map(torch.tensor, read(row, tokenizer, model.config.label2id))
        output = model(input_ids=tokens[None], labels=labels[None])
        total = total + output.loss * (labels != -100).sum()
        at = labels != -100
        given = output.logits[0].argmax(1)[at]
        hits += (given == labels[at]).tolist()
        texts = [[model.config.id2label[int(i)] for i in each] for each in (given, labels[at])]
        one, other = map(spans, texts) if kind == "tags" else (set(), set())
        entities = [
            a + b for a, b in zip(entities, map(len, (one & other, one, other)), strict=True)
        ]
    loss = total / len(hits)
    assert start["accuracy"] == pytest.approx([sum(hits) / len(hits)])
    if kind == "tags":
        f1 = 2 * entities[0] / (entities[1] + entities[2])
        assert start["entity_f1"] == pytest.approx([f1])
    shared = ["batch.micro_rows=2"] if other else []
    assert_learns(ledger, kind, start, model, loss, *shared, ranks=1 + bool(other))


def other_words(ledger, kind):
    """Words to begin with a small encoder, or a decoder that transformers' class computes."""
    folder = ledger.data / kind
    with ledger.once(f"data-{kind}") as is_done:
        if not is_done():
            (make_encoder if kind in ENCODERS else make_other_folder)(folder, kind)
    return [f"model.init_from={folder}", f"tokenizer.path={folder}"]


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_classify_by_their_own_heads(ledger, kind):
    """A step over texts of different lengths: each alone and padded there, then packed."""
    words = other_words(ledger, kind)
    alone = "data.packing=none", "batch.micro_rows=8"
    start = run_of(ledger, "classes", *words, "optim.lr=1e-9", *alone)
    model, tokenizer = theirs(start.folder / "hf")
    loss = loss_of_transformers(model, tokenizer, rows_of(ledger, "classes"))
    shared = "batch.micro_rows=2", words[1]
    run = assert_learns(ledger, "classes", start, model, loss, *shared, ranks=2)
    assert ("rows hold one document each" in run.out) == (kind == "modernbert")


def mixes(real, model):
    return real(model)._replace(mixing=1.0)


def test_an_encoders_run_of_one_text_a_row_resumes_as_it_was(ledger, train, tmp_path):
    """Rows keep one text if encoders computed no packed rows when the run began."""
    word, tokenizer = other_words(ledger, "bert")
    earlier = shutil.copytree(word.partition("=")[2], tmp_path / "earlier")  # each is tried once
    words = ["objective=classify", *STEP, f"data.path={ledger.data / 'classes.jsonl'}", tokenizer]
    words += ["batch.micro_rows=8"]
    begun = inject.around("probed", mixes)
    train("run", *words, f"model.init_from={earlier}", base=[], seam=begun)
    run = train("run", *words, word, "train.steps=2", base=[])
    assert "rows hold one document each, as when the run began" in run.out
    assert run["step"] == [1, 2]


def test_encoders_read_pairs_tag_and_embed(ledger):
    """BERT's second text has a type of its own; a head begins on a model without one."""
    words = other_words(ledger, "bert")
    first = "optim.lr=1e-9"
    runs = {kind: run_of(ledger, kind, *words, first) for kind in ("lists", "tags", "queries")}
    folders = {kind: run.folder / "hf" for kind, run in runs.items()}
    reader, row = TextReader.load(runs["lists"].folder), rows_of(ledger, "lists")[1]
    ranker, tokenizer = theirs(folders["lists"])
    losses = []
    for row in rows_of(ledger, "lists"):
        texts = [[row["query"]] * len(row["documents"]), row["documents"]]
        pairs = tokenizer(*texts, padding=True, return_tensors="pt")
        assert pairs["token_type_ids"].any()
        wanted = torch.tensor(row["scores"]).float()
        losses.append(textbook_ranking("listwise", ranker(**pairs).logits[:, 0], wanted))
    expected = torch.stack(losses).mean().item()
    assert runs["lists"]["objective"] == pytest.approx([expected], rel=1e-5)
    texts = reader.encode_ranked(row["query"], row["documents"])
    pairs = [tokenizer(row["query"], one, return_tensors="pt") for one in row["documents"]]
    scores = [ranker(**pair).logits[0, 0].sigmoid().item() for pair in pairs]
    assert reader.relevance(texts).tolist() == pytest.approx(scores, rel=1e-6)
    # a literal separator is text, and begins no second one
    pair = tokenizer("a [SEP] b", "c", split_special_tokens=True, return_tensors="pt")
    score = ranker(**pair).logits[0, 0].sigmoid().item()
    literal = reader.relevance(reader.encode_ranked("a [SEP] b", ["c"]))
    assert literal.tolist() == pytest.approx([score], rel=1e-6)
    tagger, loaded = AutoModelForTokenClassification.from_pretrained(
        folders["tags"], output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    tagger.eval()
    loss = loss_of_tags(tagger, tokenizer, rows_of(ledger, "tags"), tagger.config.label2id)
    assert runs["tags"]["objective"] == pytest.approx([loss], rel=1e-5)
    loss = loss_of_queries(folders["queries"], rows_of(ledger, "queries"), "mean")
    assert runs["queries"]["objective"] == pytest.approx([loss], rel=1e-5)
    other = run_of(ledger, "queries", *words, "batch.micro_rows=4", "batch.seq_len=300", ranks=2)
    assert other["objective"] == pytest.approx([loss], rel=1e-5)


ADAPTER = ["adapter=lora", "adapter.rank=4", "train.steps=2", "optim.lr=0.1"]


@pytest.mark.parametrize("other", ["", "gpt2"])
def test_peft_reads_heads_of_tokens(ledger, other):
    rows, words = rows_of(ledger, "tags"), other_words(ledger, other) if other else []
    run = run_of(ledger, "tags", *words, *ADAPTER)
    again = run_of(ledger, "tags", *words[1:], f"model.init_from={run.folder}", "optim.lr=0")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "adapter")
    tags = sorted({tag for row in rows for tag in row["ner_tags"] if tag})
    names = {tag: i for i, tag in enumerate(tags)}
    tagger = AutoPeftModelForTokenClassification.from_pretrained(
        str(run.folder / "adapter"), num_labels=len(names)
    )
    loss = loss_of_tags(tagger, tokenizer, rows, names)
    assert again["objective"] == pytest.approx([loss], rel=1e-5)
    assert "numbers of texts equal" in verify(f"source={run.folder}", f"hf={run.folder}/adapter")
    for folder, reason in (
        ("", "a model of words' labels"),
        ("adapter", "an adapter of TOKEN_CLS"),
    ):
        with pytest.raises(UserError, match=reason):
            TextReader.load(run.folder / folder)


def test_peft_reads_heads_of_encoders(ledger):
    words = other_words(ledger, "roberta")
    run = run_of(ledger, "classes", *words, *ADAPTER)
    again = run_of(ledger, "classes", f"model.init_from={run.folder}", words[1], "optim.lr=0")
    folder = str(run.folder / "adapter")
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    assert 'from_pretrained("BASE", num_labels=3)' in (run.folder / "adapter/README.md").read_text()
    model.config.label2id = {name: i for i, name in enumerate(sorted(WORDS))}
    model.config.problem_type = "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loss = loss_of_transformers(model, tokenizer, rows_of(ledger, "classes")).item()
    assert again["objective"] == pytest.approx([loss], rel=1e-5)
    more = ["adapter=lora", f"adapter.init_from={run.folder}", "optim.lr=0"]
    assert run_of(ledger, "classes", *words, *more)["objective"] == again["objective"]


def loss_of_tags(model, tokenizer, rows, label2id):
    """The mean loss of the labelled tokens of rows, one row at a time."""
    total = count = 0
    for row in rows:
        tokens, labels = map(torch.tensor, words_of(row, tokenizer, label2id))
        size = (labels != -100).sum().item()
        loss = model(input_ids=tokens[None], labels=labels[None]).loss.item()
        total, count = total + size * loss, count + size
    return total / count


def embedded(model, tokenizer, rows, pooling):
    """The normalised embeddings of the queries and documents of rows, and their groups."""
    texts = [
        (group, kind, text)
        for group, row in enumerate(rows)
        for kind, name in enumerate(["query", "positive", "negatives"])
        for text in ([row[name]] if name == "query" else row[name])
    ]
    vectors = []
    for _, _, text in texts:
        states = model(tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0]
        vectors.append(states.mean(0) if pooling == "mean" else states[-1])
    groups, kinds = (torch.tensor([text[i] for text in texts]) for i in range(2))
    return torch.nn.functional.normalize(torch.stack(vectors).double(), dim=1), groups, kinds


def loss_of_queries(folder, rows, pooling):
    """The mean loss of queries by transformers' model; equal texts have equal numbers."""
    vectors, _, kinds = embedded(*theirs(folder, AutoModel), rows, pooling)
    texts = [t for row in rows for t in (row["query"], *row["positive"], *row["negatives"])]
    same = torch.tensor([float(texts.index(text)) for text in texts])
    step = StepTexts(vectors, kinds, torch.full(kinds.shape, torch.nan), same, len(rows))
    return loss_of_texts(step, ObjectiveChoice(temperature=0.05)).item() / len(rows)


@pytest.mark.parametrize("words", ["", MEAN])
def test_queries_are_compared_with_all_documents_of_the_step(ledger, words):
    """The textbook's loss, over a step of several micro-batches, by transformers' model."""
    start = run_of(ledger, "queries", *words.split(), "optim.lr=1e-9")
    model, tokenizer = theirs(start.folder / "hf", AutoModel)
    pooling = "mean" if words else "last"
    vectors, groups, kinds = embedded(model, tokenizer, rows_of(ledger, "queries"), pooling)
    logits = vectors[kinds == 0] @ vectors[kinds > 0].T / 0.05
    of_document, is_positive = groups[kinds > 0], kinds[kinds > 0] == 1
    losses, turned = [], []
    for query, row in enumerate(logits):
        own = (of_document == query) & is_positive
        others = row[~own].exp().sum()
        losses.append((-(row.exp() / (row.exp() + others)).log())[own].mean())
        turned.append(-logits.log_softmax(0)[query, own].mean())
    loss = torch.stack(losses).mean()
    loss = (loss + torch.stack(turned).mean()) / 2 if words else loss
    assert start["loss"] == pytest.approx(start["objective"])
    own = words.replace(BOTH, "")  # the folder says so itself
    assert_learns(ledger, "queries", start, model, loss, *own.split(), prefix="model.")


def test_peft_computes_what_an_adapter_and_its_head_have_learnt(ledger):
    data = "DATA/classes.jsonl"
    run = run_of(
        ledger, "classes", "adapter=lora", "adapter.rank=4", "objective.class_weights={root: 3}",
        "train.steps=3", "optim.lr=0.1", f"data.validation={data}", "train.validate_every=3",
    )  # fmt: skip
    assert "labels fruit" in run.out
    last = run.metrics[-1]
    folder = str(run.folder / "adapter")
    assert "does not describe the head.\n" in cli("chat", folder, code=2).err
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = losses = 0
    for row in rows_of(ledger, "classes"):
        target = torch.tensor(sorted(WORDS).index(row["label"]))
        with torch.no_grad():
            logits = model(tokenizer(row["text"], return_tensors="pt")["input_ids"]).logits[0]
        right += (logits.argmax() == target).item()
        losses += torch.nn.functional.cross_entropy(logits, target) * (1 + 2 * (target == 2))
    assert last["validation_accuracy"] == right / 24
    assert last["validation_loss"] == pytest.approx(losses.item() / 24, rel=1e-5)


def test_tables_name_their_labels_and_validation_keeps_their_shares(ledger, tmp_path):
    """The area under the curve is scikit-learn's, and the report has which is taken for which."""
    texts = [f"{'ab'[i % 5 > 3]}{i * i % 97}" for i in range(100)]
    names = ClassLabel(names=["rare", "usual"])
    rows = {"text": texts, "label": [int(i % 5 > 0) for i in range(100)]}
    features = Features({"text": Value("string"), "label": names})
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "rows.parquet")
    words = [*PLAIN, *STEP, f"data.path={tmp_path}/rows.parquet", "data.validation=0.1"]
    run = ledger.run(words=[*words, "optim.lr=0.1"])
    assert "labels rare 18, usual 72" in run.out
    (event,) = (one for one in run.events if one["event"] == "confusion" and one["step"])
    assert event["labels"] == ["rare", "usual"]
    assert [*map(sum, event["counts"])] == [2, 8]
    numbers = torch.randn(64, 2, dtype=torch.float64).mul(3)
    wanted = torch.arange(64) % 3 % 2
    metrics = ClassMetrics(("a", "b"), SINGLE)
    sums = metrics.of_labels(numbers.argmax(1), wanted, wanted >= 0)
    sums = torch.cat([sums, metrics.of_curves(numbers, wanted)])
    area = roc_auc_score(wanted, numbers[:, 1] - numbers[:, 0])
    assert metrics.written(sums.tolist())["auc"] == pytest.approx(area, abs=0.01)


def test_embeddings_by_transformers_class_go_on_from_a_run_and_its_export(ledger):
    """GPT-2 without its head, with transformers' names, and then a classifier of it."""
    first = run_of(ledger, "queries", *other_words(ledger, "gpt2"), "optim.lr=1e-3")
    loss = loss_of_queries(first.folder / "hf", rows_of(ledger, "queries"), "last")
    for source in (first.folder, first.folder / "hf"):
        run = run_of(ledger, "queries", f"model.init_from={source}", "optim.lr=0")
        assert run["objective"] == pytest.approx([loss], rel=1e-5)
    run_of(ledger, "classes", f"model.init_from={first.folder}")


def test_labels_that_the_head_does_not_have_are_refused(ledger, train, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "elm", "label": "tree"}\n')
    words = [*map(ledger.with_places, [*PLAIN, *STEP, "data.path=DATA/classes.jsonl"])]
    said = train("held out", *words, f"data.validation={other}", code=2).err
    assert f"data.validation: {other}:1" in said
    assert "is tree, and the head has the labels fruit, grain, root" in said
    other.write_text("".join(f'{{"text": "elm {i}", "label": "tree {i}"}}\n' for i in range(9)))
    share = [*words[:-1], f"data.path={other}", "data.validation=0.5"]
    assert ", tree 8 " in train("share", *share).out
    twice = train("twice", *words, "objective.labels=[fruit,root,fruit]", code=2).err
    assert "has fruit more than once" in twice
    said = train("split", *words, "data.too_long=split", code=2).err
    assert "holds labelled texts" in said
    head = f"model.init_from={run_of(ledger, 'classes').folder}"
    words.remove("objective=classify")
    assert (
        "has 3 labels, and a reward model one"
        in train(
            "reward",
            *words,
            head,
            "objective=reward",
            f"data.path={ledger.data}/pairs.jsonl",
            code=2,
        ).err
    )


@pytest.mark.parametrize(
    "ranking, reason",
    [("pointwise", "needs scores from 0 to 1"), ("listwise", "each query has one")],
)
def test_scores_that_a_ranking_learns_nothing_from_are_refused(ledger, train, ranking, reason):
    fields = "data.fields={query: sentence1, documents: sentence2}"
    ranked = ["objective=rerank", f"objective.ranking={ranking}", fields]
    words = map(ledger.with_places, [PLAIN[0], *STEP, "data.path=DATA/alike.jsonl", *ranked])
    assert reason in train("ranked", *words, code=2).err


def test_labels_of_a_csv_file_are_what_they_are_elsewhere(ledger, tmp_path):
    table = tmp_path / "numbers.csv"
    rows = [f'"{row["text"]}",{row["label"]}' for row in rows_of(ledger, "numbers")]
    table.write_text("\n".join(["text,label", *rows]))
    run = run_of(ledger, "numbers")
    same = ledger.run(words=[*PLAIN, *STEP, f"data.path={table}"])
    assert same["objective"] == pytest.approx(run["objective"], rel=1e-6)


def test_losses_are_those_of_sentence_transformers():
    """The same vectors have the same losses and gradients there, if it is installed."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    torch.manual_seed(0)
    columns = [torch.randn(8, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    normal = [torch.nn.functional.normalize(each, dim=1) for each in columns]
    scores = torch.randn(8, 2, dtype=torch.float64)
    margins = scores[:, :1] - scores[:, 1:]
    model = torch.nn.Sequential(torch.nn.Identity())  # is not called
    cases = {
        "infonce": (losses.MultipleNegativesRankingLoss(model), 3, None),
        "cosent": (losses.CoSENTLoss(model), 2, scores[:, 0]),
        "margin_mse": (losses.MarginMSELoss(model), 3, margins[:, 0]),
    }
    for comparison, (their_loss, count, labels) in cases.items():
        expected = their_loss.compute_loss_from_embeddings(normal[:count], labels)
        if comparison == "infonce":
            cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
            parts = [[*each.split(3)] for each in normal]
            assert cached.calculate_loss(parts).item() == pytest.approx(expected.item(), rel=1e-6)
        vectors = torch.stack(normal[:count], 1).flatten(0, 1)
        of_texts = torch.nn.functional.pad(scores[:, : count - 1], (1, 0), value=torch.nan)
        kinds = torch.arange(count).repeat(8)
        texts = StepTexts(vectors, kinds, of_texts.flatten(), torch.arange(8.0 * count), 8)
        ours = loss_of_texts(texts, ObjectiveChoice(comparison=comparison, temperature=0.05)) / 8
        assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
        both = [
            torch.autograd.grad(each, columns[0], retain_graph=True)[0] for each in (ours, expected)
        ]
        assert torch.allclose(*both, rtol=1e-6, atol=1e-9)


def textbook_ranking(ranking, scores, wanted):
    """The loss of one query's documents."""
    if ranking == "listwise":
        is_binary = {*wanted.tolist()} <= {0, 1}
        shares = wanted / wanted.sum() if is_binary else wanted.softmax(0)
        return -(shares * scores.log_softmax(0)).sum()
    if ranking == "pointwise":
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
    pairs = [
        (a, b) for a in range(len(wanted)) for b in range(len(wanted)) if wanted[a] > wanted[b]
    ]
    return -torch.stack(
        [torch.nn.functional.logsigmoid(scores[a] - scores[b]) for a, b in pairs]
    ).mean()


def transformers_ranking(folder, ranking, rows):
    """Return transformers' model, which a CrossEncoder wraps, and its mean loss on pairs."""
    model, tokenizer = theirs(folder)
    losses = []
    for row in rows:
        pairs = [tokenizer(row["query"], text, return_tensors="pt") for text in row["documents"]]
        scores = torch.stack([model(pair["input_ids"]).logits[0, 0] for pair in pairs])
        losses.append(textbook_ranking(ranking, scores, torch.tensor(row["scores"]).float()))
    return model, torch.stack(losses).mean()


@pytest.mark.parametrize("ranking", ["listwise", "pairwise", "pointwise"])
def test_documents_are_ranked_by_the_textbooks_losses(ledger, ranking):
    start = run_of(ledger, "lists", f"objective.ranking={ranking}", "optim.lr=1e-9")
    model, loss = transformers_ranking(start.folder / "hf", ranking, rows_of(ledger, "lists"))
    assert_learns(ledger, "lists", start, model, loss, f"objective.ranking={ranking}")


@pytest.mark.parametrize("mixed", [False, True])
def test_data_whose_scores_are_all_grades_is_ranked_alone_and_beside_other_lists(
    ledger, tmp_path, mixed
):
    lists = rows_of(ledger, "lists")
    rows = [
        row | {"scores": [3 - i + number % 7 / 7 for i in range(len(row["documents"]))]}
        for number, row in enumerate(lists)
    ]
    (tmp_path / "grades.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    named = [f"{{path: {tmp_path}/grades.jsonl, repeat: 1}}"]
    if mixed:
        named.append("{path: DATA/lists.jsonl, repeat: 1}")
        rows += lists
    data = f"data.path=[{','.join(named)}]"
    run = ledger.run(words=[PLAIN[0], "objective=rerank", *STEP, data, "batch.micro_rows=4"])
    _, loss = transformers_ranking(run.folder / "hf", "listwise", rows)
    again = ledger.run(
        words=[f"model.init_from={run.folder}/hf", "objective=rerank", *STEP, data, "optim.lr=0"]
    )
    assert again["objective"] == pytest.approx([loss.item()], rel=1e-5)


def test_peft_and_sentence_transformers_read_what_embeds_texts(ledger):
    prompts = "data.prompts={query: 'q: ', document: ''}"
    adapter = ["adapter=lora", "adapter.rank=4", "checkpoint.merge=true"]
    run = run_of(ledger, "queries", prompts, *adapter, "optim.lr=0.1")
    tokens = torch.tensor([[64, 65, 70]])
    models = [
        AutoPeftModelForFeatureExtraction.from_pretrained(str(run.folder / "adapter")),
        AutoModel.from_pretrained(run.folder / "hf", dtype=torch.float32),
    ]
    with torch.no_grad():
        states = [model(input_ids=tokens).last_hidden_state for model in models]
    assert torch.allclose(*states, atol=1e-5)
    again = [
        run_of(ledger, "queries", prompts, f"{key}={run.folder / name}", "optim.lr=0")
        for key, name in [("adapter.init_from", "adapter"), ("model.init_from", "hf")]
    ]
    first, other = (each["loss"] for each in again)
    assert first == pytest.approx(other, rel=1e-5) != run["loss"]
    settings = read_json(run.folder / "hf/config_sentence_transformers.json")
    assert settings["prompts"] == {"query": "q: ", "document": ""}
    assert "numbers of texts equal" in verify(f"source={run.folder}", f"hf={run.folder}/hf")
    other = run_of(ledger, "lists", "objective.ranking=pairwise").folder
    assert "score.weight is missing" in verify(f"source={other}", f"hf={run.folder}/hf", code=3)
    files = read_json(run.folder / "hf/modules.json")
    assert [file["path"] for file in files] == ["", "1_Pooling", "2_Normalize"]
    assert not (run.folder / "hf/chat_template.jinja").exists()


def served(folder):
    """A client of the server of a model, which is in this process."""
    return TestClient(
        make_app(ServedReader("model", None, 0, "", TextReader.load(folder))),
        base_url="http://127.0.0.1",
    )


def test_the_server_gives_the_numbers_of_transformers(ledger, tmp_path):
    openai = pytest.importorskip("openai")
    run = run_of(ledger, "queries", *MEAN.split(), "optim.lr=1e-9")
    model, tokenizer = theirs(run.folder / "hf", AutoModel)
    rows = rows_of(ledger, "queries")
    vectors, _, kinds = embedded(model, tokenizer, rows, "mean")
    queries = [row["query"] for row in rows]
    client = served(run.folder)
    api = openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=client)
    for form in ({}, {"encoding_format": "float"}):  # without one, the client asks for base64
        answer = api.embeddings.create(model="model", input=queries, dimensions=8, **form)
        given = torch.tensor([each.embedding for each in answer.data])
        first = torch.nn.functional.normalize(vectors[kinds == 0][:, :8], dim=1)
        assert torch.allclose(given, first.float(), atol=1e-5)
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in queries)
    body = {"query": queries[0], "documents": [queries[1], {"text": queries[0]}], "top_n": 1}
    (best,) = client.post("/v1/rerank", json=body).json()["results"]
    assert best["document"] == {"text": queries[0]}
    assert best["relevance_score"] == pytest.approx(1)

    shutil.copytree(run.folder / "hf", tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")  # its names lack "model."
    reader = TextReader.load(tmp_path / "saved")
    assert torch.allclose(reader.vectors(reader.encode(queries)), vectors[kinds == 0], atol=1e-6)

    folder = run_of(ledger, "lists", "objective.ranking=pairwise").folder / "hf"
    ranker, _ = theirs(folder)
    row = rows_of(ledger, "lists")[1]
    body = {"query": row["query"], "documents": row["documents"], "return_documents": False}
    results = served(folder).post("/v1/rerank", json=body).json()["results"]
    pairs = [tokenizer(row["query"], text, return_tensors="pt") for text in row["documents"]]
    logits = [ranker(pair["input_ids"]).logits[0, 0].item() for pair in pairs]
    assert [each["index"] for each in results] == sorted(
        range(len(pairs)), key=lambda i: -logits[i]
    )
    for each in results:
        score = 1 / (1 + math.exp(-logits[each["index"]]))
        assert each["relevance_score"] == pytest.approx(score, abs=1e-6)

    for kind in KINDS:
        folder = run_of(ledger, kind, "optim.lr=1e-9").folder / "hf"
        model, _ = theirs(folder)
        texts = [row["text"] for row in rows_of(ledger, kind)[:5]]
        data = served(folder).post("/v1/classify", json={"input": texts}).json()["data"]
        for text, each in zip(texts, data, strict=True):
            logits = model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0]
            wanted = {"classes": logits.softmax(0), "several": logits.sigmoid(), "numbers": logits}
            assert each["probs"] == pytest.approx(wanted[kind].tolist(), abs=1e-5)
            assert each["label"] == model.config.id2label[logits.argmax().item()]


def test_requests_that_a_model_of_numbers_cannot_answer_get_a_message(ledger):
    folder = run_of(ledger, "queries", *MEAN.split(), "optim.lr=1e-9").folder
    client = served(folder)
    context = 10**6
    for path, body, message in [
        ("/v1/chat/completions", {"messages": []}, "it answers /v1/embeddings, /v1/rerank"),
        ("/v1/classify", {"input": "x"}, "it answers /v1/embeddings, /v1/rerank"),
        ("/v1/embeddings", {"input": ""}, "none empty"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "at most 2,048"),
        ("/v1/embeddings", {"input": "x" * context}, "'truncate_prompt_tokens': -1"),
        ("/v1/embeddings", {"input": "x", "dimensions": 10**4}, "'dimensions' should be"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "q"}, "query, document"),
        ("/v1/embeddings", {"input": "x", "top_k": 3}, "there is no setting 'top_k'"),
        ("/v1/rerank", {"query": "x", "documents": []}, "'documents' should be a list"),
    ]:
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    body = {"input": "x" * context, "truncate_prompt_tokens": 5}
    assert client.post("/v1/embeddings", json=body).json()["usage"]["total_tokens"] == 5
    ranker = served(run_of(ledger, "lists", "objective.ranking=pairwise").folder)
    body = {"query": "x" * 20_000, "documents": ["y"] * 2048, "truncate_prompt_tokens": 5}
    assert "too long for so many" in ranker.post("/v1/rerank", json=body).text
    assert (
        f"chat {folder}  , which answers /v1/embeddings"
        in cli("generate", str(folder), "prompt=x", code=2).err
    )


def evaluated(world, *words, ranks=1, code=0):
    return world.command("evaluate", *words, "format=json", ranks=ranks, code=code)[0]


NAMES = ("recall_1", "mrr", "ndcg_10")


def test_evaluate_has_the_metrics_of_a_run_and_finds_hard_negatives(ledger, world, tmp_path):
    held_out = "data.validation=DATA/{}.jsonl train.validate_every=1 optim.lr=0.1"
    for kind, more in (("queries", ["data.prompts={query: 'q: '}"]), ("lists", [])):
        run = run_of(ledger, kind, *held_out.format(kind).split(), *more)
        own = {name: run.metrics[-1][f"validation_{name}"] for name in NAMES}
        words = [str(run.folder), f"tasks=[{ledger.data / kind}.jsonl]"]
        for ranks in (1, 2):
            metrics = json.loads(evaluated(world, *words, ranks=ranks).out)[kind]
            assert {name: metrics[name] for name in NAMES} == pytest.approx(own, rel=1e-6)
        mined = [f"mined={tmp_path / kind}.jsonl", "negatives=2", "hardest=2"]
        if kind == "lists":
            assert "needs an embedding model" in evaluated(world, *words, *mined, code=2).err
            continue
        said = evaluated(world, *words, *mined, ranks=2).err
        assert "queries.jsonl: 16 queries, " in said
        hard = read_lines(tmp_path / "queries.jsonl")
        assert [row["positive"] for row in hard] == [
            row["positive"] for row in rows_of(ledger, kind)
        ]
        for row in hard:
            assert not {*row["negatives"]} & {*row["positive"], row["query"]}
        assert max(len(row["negatives"]) for row in hard) == 2
        write_folder(tmp_path / "folder", rows_of(ledger, kind))
        words[1] = f"tasks=[{tmp_path / 'folder'}]"
        assert json.loads(evaluated(world, *words).out)["folder"] == pytest.approx(metrics)
        relevance = tmp_path / "folder/qrels/test.tsv"
        relevance.write_text(f"{relevance.read_text()}\nq0\td0\tmuch")
        with pytest.raises(UserError, match="has the score much, which is no number"):
            read_retrieval(str(tmp_path / "folder"), "queries", Data(), None)
        assert (
            "Use  a file of queries" in evaluated(world, words[0], "tasks=[arc_easy]", code=2).err
        )


def write_folder(folder, rows):
    """Write rows as BEIR has them."""
    (folder / "qrels").mkdir(parents=True)
    texts = dict.fromkeys(text for row in rows for text in [*row["positive"], *row["negatives"]])
    number = {text: f"d{i}" for i, text in enumerate(texts)}
    write_rows(folder / "corpus.jsonl", [{"_id": number[text], "text": text} for text in texts])
    queries = [{"_id": f"q{i}", "text": row["query"]} for i, row in enumerate(rows)]
    write_rows(folder / "queries.jsonl", queries)
    lines = [f"q{i}\t{number[t]}\t1" for i, row in enumerate(rows) for t in row["positive"]]
    (folder / "qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))


def test_attention_in_both_directions_is_refused_where_it_is_not_computed(ledger, train):
    both = "model.attention_direction=bidirectional"
    words = [*map(ledger.with_places, [*PLAIN, *STEP, "data.path=DATA/classes.jsonl", both])]
    ring = ["sharding.context=2", "sharding.context_method=ring"]
    assert "sharding.context_method=gathered" in train("ring", *words, *ring, code=2).err
    text = [PLAIN[0], *STEP, "data.path=demo:backwards", both]
    text = map(ledger.with_places, text)
    assert "learns to predict" in train("text", *text, code=2).err
    other = [*words[1:], "model.family=gemma2", "model.sliding_window=8"]
    assert "windows of 8 tokens" in train("windows", *other, code=2).err


MTEB = """
import json
from types import SimpleNamespace as Named


class Meta:
    @classmethod
    def create_empty(cls):
        return cls()


def get_task(name):
    if name != "Toy":
        raise KeyError(f"{name} is not known, did you mean Toy?")
    return Named(metadata=Named(dataset={"path": "mteb/toy", "revision": "1"}))


def evaluate(model, task, *, cache, show_progress_bar):
    assert isinstance(model.mteb_model_meta, Meta)
    with open(task.metadata.dataset["path"] + "/rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    about = dict(task_metadata=task.metadata, hf_split="test", hf_subset="default")
    texts = {kind: [{"text": [row[kind] for row in rows]}] for kind in ("query", "positive")}
    queries = model.encode(texts["query"], prompt_type=Named(value="query"), **about)
    documents = model.encode(texts["positive"], prompt_type=Named(value="document"), **about)
    right = model.similarity(queries, documents).argmax(1)
    share = sum(int(place) == i for i, place in enumerate(right)) / len(rows)
    pairs = float(model.similarity_pairwise(queries, documents).mean())
    scores = {"main_score": share, "pairs": pairs, "hf_subset": "default"}
    return Named(task_results=[Named(scores={"test": [scores]})])
"""


def test_mteb_gets_a_runs_vectors_and_local_data(ledger, tmp_path, monkeypatch):
    """The package itself is not installed here: a stand-in makes its calls."""
    (tmp_path / "mteb/models/model_meta").mkdir(parents=True)
    (tmp_path / "mteb/__init__.py").write_text(MTEB)
    (tmp_path / "mteb/models/__init__.py").touch()
    (tmp_path / "mteb/models/model_meta/__init__.py").write_text(
        "from mteb import Meta as ModelMeta"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of(ledger, "queries", *MEAN.split(), "optim.lr=1e-9")
    rows = [{**row, "positive": row["positive"][0]} for row in rows_of(ledger, "queries")]
    (tmp_path / "toy").mkdir()
    write_rows(tmp_path / "toy/rows.jsonl", rows)
    words = ["evaluate", str(run.folder), "launch.nproc_per_node=1", "format=json"]
    reader = TextReader.load(run.folder)
    one, other = (
        reader.vectors(reader.encode([row[kind] for row in rows])) for kind in ("query", "positive")
    )
    metrics = json.loads(cli(*words, "tasks=[mteb:Toy]", f"mteb_data={tmp_path}").out)["mteb:Toy"]
    assert metrics["pairs"] == pytest.approx((one * other).sum(1).mean().item(), abs=1e-6)
    assert (
        "hf download mteb/toy --repo-type dataset"
        in cli(*words, "tasks=[mteb:Toy]", f"mteb_data={run.folder}", code=2).err
    )
    assert "did you mean Toy?" in cli(*words, "tasks=[mteb:Gone]", code=2).err
