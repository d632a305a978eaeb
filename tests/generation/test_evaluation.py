"""Tasks of lm-evaluation-harness on our decoder: the same numbers as with transformers."""

import shutil

import inject
import jinja2
import pytest
import torch
import yaml
from other_models import make_other_folder
from refused import refusal
from texts import turn
from world import read_json, read_lines, write_lines
from zoo import make_folder

from fsdp_trainer.config.evaluation_inputs import require_tasks, task_names
from fsdp_trainer.config.schema import Evaluation
from fsdp_trainer.evaluation.generation_settings import (
    GenerationSettings,
    read_settings,
    settings_of_model,
    unused_settings,
)
from fsdp_trainer.generation.sampling import Sampling

pytest.importorskip("lm_eval")

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
    train: {items}
test_split: test
fewshot_split: train
{more}
"""
MORE = {
    "choice": """output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: '{{choices}}'
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm""",
    "likelihood": """output_type: loglikelihood
doc_to_text: '{{question}} '
doc_to_target: '{{choices[0]}}'
metric_list:
  - metric: perplexity
  - metric: acc""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list:
  - metric: bits_per_byte
  - metric: word_perplexity""",
    "answer": """output_type: generate_until
doc_to_text: 'Q: {{question}} A:'
doc_to_target: '{{text}}'
generation_kwargs:
  until: ['q', '7']
  max_gen_toks: 12
metric_list:
  - metric: bleu""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Paths of YAML files; one task has texts longer than the context."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"What is {i} plus {i % 7}?",
            "choices": [str(i + i % 7), str(i + 3), "seven", "I do not know at all"],
            "answer": i % 4,
            "text": f"line {i} of text é " * (1 + i % 9),
        }
        for i in range(9)  # which two ranks do not divide
    ]
    items = folder / "items.jsonl"
    write_lines(items, rows)
    paths = []
    for name, more in MORE.items():
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(TASK.format(name=name, items=items, more=more))
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "hf")


def with_transformers(folder, tasks, **options):
    """Return what the harness finds with its own model class."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    from fsdp_trainer.evaluation.harness_tasks import metrics_of

    model = HFLM(str(folder), device="cpu", dtype="float32", batch_size=4)
    results = simple_evaluate(
        model,
        tasks=[load_yaml(task, resolve_func=True) for task in tasks],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
        **options,
    )
    return metrics_of(results["results"])


def without_errors(metrics):
    return {
        task: {name: value for name, value in values.items() if "_stderr" not in name}
        for task, values in metrics.items()
    }


def test_the_metrics_are_those_of_transformers_on_any_number_of_ranks(evaluate, folder, tasks):
    theirs = with_transformers(folder, tasks)
    assert theirs.keys() == MORE.keys()
    for options, ranks in (([], 2), (["sharded=true"], 2)):
        ours = without_errors(evaluate(folder, tasks, *options, ranks=ranks))
        assert ours.keys() == theirs.keys()
        for task, values in theirs.items():
            assert ours[task] == pytest.approx(values, rel=1e-6), (task, ranks)


def test_a_model_of_transformers_classes_gets_its_metrics(evaluate, tmp_path, tasks):
    folder = make_other_folder(tmp_path / "hf", "falcon_h1")
    theirs = with_transformers(folder, tasks, limit=3)
    ours = without_errors(evaluate(folder, tasks, "sharded=true limit=3", ranks=2))
    for task, values in theirs.items():
        assert ours[task] == pytest.approx(values, rel=1e-5), task


def test_limit_and_examples_are_the_harness_own(evaluate, folder, tasks):
    theirs = with_transformers(folder, tasks[:2], limit=5, num_fewshot=1)
    ours = without_errors(evaluate(folder, tasks[:2], "limit=5 fewshot=1 rows=3"))
    for task, values in theirs.items():
        assert ours[task] == pytest.approx(values, rel=1e-6)


def test_each_generated_text_is_that_of_transformers(folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    ours = harness_model(folder)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    prompts = ["abc", "a longer question?", "x" * 150]
    requests = [
        Instance("generate_until", {}, (prompt, dict(each)), i)
        for i, (prompt, each) in enumerate((p, o) for o in COMPUTED for p in prompts)
    ]
    texts = ours.generate_until(requests)
    assert texts == theirs.generate_until(requests)
    assert any(texts)


COMPUTED = yaml.safe_load("""
- {until: [q, "7"], max_gen_toks: 20}
- {until: [], max_gen_toks: 9}
- {until: [], max_gen_toks: 9, repetition_penalty: 1.8, num_beams: 1}
- {until: [], max_gen_toks: 9, no_repeat_ngram_size: 1}
- {until: [], max_gen_toks: 9, min_new_tokens: 9}
- {until: [], max_gen_toks: 9, do_sample: true, top_k: 1, temperature: 0.7}
- {until: q, max_new_tokens: 5, do_sample: true, min_p: 1.0, temperature: 2.0}
""")
"""Settings of requests."""
NOT_COMPUTED = yaml.safe_load("""
{num_beams: 3, length_penalty: 0.5, num_return_sequences: 2, max_length: 99, stop: [x],
 bad_words_ids: [[1]], repetition_penalti: 2, repetition_penalty: a, until: [7], min_p: 2,
 do_sample: maybe, max_gen_toks: 0, top_k: -1, max_new_tokens: .inf, 3: 4}
""")


def test_settings_that_are_not_computed_are_refused_by_name():
    for name, value in NOT_COMPUTED.items():
        said = refusal(read_settings, "a task", {name: value})
        assert f"a task: generation_kwargs: {name}=" in said
    assert "different lengths" in refusal(
        read_settings, "a task", {"max_gen_toks": 5, "max_new_tokens": 6}
    )
    sampled = read_settings("a task", {"until": "x", "temperature": "0.5", "top_p": 0.9, "seed": 3})
    assert sampled == GenerationSettings(Sampling(256, 0.5, 0.9, 3, top_k=50), ["x"])


def test_settings_without_an_effect_are_said(tmp_path):
    for options, names in yaml.safe_load("""
    - [{do_sample: false, temperature: "0.7", top_p: 1, top_k: 5}, "temperature, top_k"]
    - [{do_sample: true, temperature: 0.0}, "do_sample: true"]
    - [{do_sample: false, temperature: 0.0, top_p: 1.0}, ""]
    - [{do_sample: true, top_p: 0.5}, ""]
    """):
        assert unused_settings(options).startswith(names)
        assert bool(unused_settings(options)) == bool(names)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [1], "top_k": 3}')
    assert settings_of_model(tmp_path) == {"suppress_tokens": [1], "top_k": 3}


def test_the_beginning_of_an_answer_goes_on_as_in_the_harness(folder, tmp_path):
    from lm_eval.models.huggingface import HFLM

    shutil.copytree(folder, tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ours = harness_model(tmp_path / "hf")
    theirs = HFLM(str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    turns = [turn("system", "Be kind."), turn("user", "Hi")]
    for last, asks in (("The answer is", False), ("a ", False), ("done", True)):
        history = [*turns, turn("assistant", last)]
        assert ours.apply_chat_template(history, asks) == theirs.apply_chat_template(history, asks)


def test_paths_of_tasks_are_those_beside_their_file(tmp_path, monkeypatch):
    from fsdp_trainer.evaluation.harness_tasks import HarnessTasks

    (tmp_path / "tasks/data").mkdir(parents=True)
    (tmp_path / "tasks/data/items.jsonl").write_text('{"question": "a", "text": "b"}\n')
    base = TASK.format(name="x", items="data/items.jsonl", more=MORE["answer"])
    for name, text in {
        "base": base.replace("task: x\n", ""),
        "one": "include: base.yaml\ntask: one\ngenerate: x\n",
        "two": "include: base.yaml\ntask: two\ntag: [some]\n",
        "group": "group: both\ntask: [two, two]\n",
    }.items():
        (tmp_path / f"tasks/{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)

    def load(tasks, **options):
        cfg = Evaluation(tasks=tasks, **options)
        require_tasks(cfg, "")
        return HarnessTasks(cfg, task_names(cfg), {})

    assert "generate: there is no such key" in refusal(load, "tasks")
    (tmp_path / "tasks/one.yaml").write_text("include: base.yaml\ntask: one\n")
    (tmp_path / "tasks/group.yaml").write_text("group: both\ntask: [two]\n")
    tasks = load("tasks/one.yaml")
    assert [*tasks.manager.loaded["tasks"]] == ["one"]
    assert tasks.data_files["one"] == f"{tmp_path}/tasks/data/items.jsonl"
    assert task_names(Evaluation(tasks="tasks")) == [
        f"tasks/{name}.yaml" for name in ("group", "one", "two")
    ]
    assert task_names(Evaluation(tasks="tasks/t*.yaml")) == ["tasks/two.yaml"]
    assert "no folder with a task's YAML file" in refusal(load, "tasks/none/")
    (tmp_path / "tasks/one.yaml").write_text("include: base.yaml\ntask: one\nunsafe_code: true")
    assert "unsafe_code" in refusal(load, "tasks/one.yaml")


def harness_model(folder):
    from fsdp_trainer.checkpoint.load import load_model
    from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
    from fsdp_trainer.data.tokens.tokenizer_template import load_template
    from fsdp_trainer.evaluation.harness import HarnessModel
    from fsdp_trainer.evaluation.scoring import Scorer

    tokenizer = load_tokenizer(folder)
    scorer = Scorer(load_model(folder), 4, torch.device("cpu"))
    return HarnessModel(scorer, tokenizer, load_template(None, tokenizer))


def generated(model, prompt, **options):
    """Return the answers to two repeats of a request."""
    from lm_eval.api.instance import Instance

    request = Instance("generate_until", {}, (prompt, {"until": [], **options}), 0)
    return model.generate_until([request] * 2)


def test_repeats_of_a_request_are_other_samples_and_the_same_each_time(folder):
    model = harness_model(folder)
    sampled = generated(model, "abc", do_sample=True, max_gen_toks=20)  # temperature 1
    assert sampled[0] != sampled[1]
    assert generated(model, "abc", do_sample=True, max_gen_toks=20) == sampled
    first, again = generated(model, "abc", max_gen_toks=20)
    assert first == again


def test_a_prompt_is_read_also_where_the_longest_answer_would_fill_the_context(folder):
    model = harness_model(folder)
    answers = [
        generated(model, prompt, max_gen_toks=4 * model.max_length)[0]
        for prompt in ("one thing", "other thing")
    ]
    assert answers[0] != answers[1]


def test_a_run_keeps_its_evaluations(ledger, evaluate, world, tasks, tmp_path):
    run = ledger.copy("plain", tmp_path / "run")
    metrics = evaluate(run.folder, tasks[:1], f"out={tmp_path}/results.json")
    [line] = read_lines(run.folder / "evaluations.jsonl")
    assert line["step"] == 4
    assert line["tasks"] == metrics
    assert read_json(tmp_path / "results.json") == metrics
    exported = evaluate(run.folder / "hf", tasks[:1])
    assert exported["choice"] == pytest.approx(metrics["choice"], rel=1e-6)
    words = f"source={run.folder} tasks=[{tasks[0]}] chat=true launch.device=cpu"
    table = world.command("evaluate", words)[0].out
    assert table.startswith("choice  acc ")
    assert "±" in table


def test_a_task_that_lm_eval_does_not_know_is_refused_by_name():
    from fsdp_trainer.evaluation.harness_tasks import LoadedTasks

    said = refusal(LoadedTasks, ["no_task_of_this_name"], include_defaults=False)
    assert "no such task" in said


def test_the_file_of_a_task_runs_only_code_that_is_typed(tmp_path, monkeypatch):
    import lm_eval.utils

    from fsdp_trainer.evaluation.harness_tasks import HarnessTasks, confined_templates, read_task

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import pathlib\npathlib.Path('ran').touch()\nf = len\n")
    file = tmp_path / "task.yaml"
    for text, reason in [
        ("task: a\nprocess_docs: !function own.f\n", f"code=[{tmp_path}/own.py]"),
        ("group: g\ntask: [{task: a, metric_list: [{metric: ./own.py}]}]\n", "none is fetched"),
        ("task: a\nmetric_list: [{metric: acc, hf_evaluate: true}]\n", "none is fetched"),
        (
            "group: g\nprocess_results: f\nmetric_list: [{metric: ./own.py}]\n"
            "task: [{task: a, process_results: null}]\n",
            "none is fetched",
        ),
        ("group: g\ntask: [null]\n", "g"),
    ]:
        file.write_text(text)
        assert reason in refusal(HarnessTasks, Evaluation(tasks=[str(file)]), [str(file)], {})
    file.write_text("task: a\nprocess_docs: !function own.f\n")
    assert not (tmp_path / "ran").exists()
    assert read_task(str(file), ["own.py"])["process_docs"] is len
    file.write_text("task: a\nprocess_results: !function own.f\nmetric_list: [{metric: own}]\n")
    assert read_task(str(file), ["own.py"])["metric_list"] == [{"metric": "own"}]
    with confined_templates(), pytest.raises(jinja2.exceptions.SecurityError):
        lm_eval.utils.apply_template("{{ cycler.__init__.__globals__ }}", {})


def test_tasks_are_checked_before_anything_begins(evaluate, folder, tmp_path):
    missing = f"{tmp_path}/none.yaml"
    assert "tasks=[arc_easy]" in evaluate(folder, [], code=2)
    assert "there is no such file" in evaluate(folder, [missing], code=2)


AT_STEPS = "evaluation.limit=3 train.steps=4 train.evaluate_every=2 checkpoint.every=2"


def evaluations(run):
    """Steps and metrics of a run's evaluations, as its events tell them."""
    return [(event["step"], without_errors(event["tasks"])) for event in run.event("tasks")]


def test_a_run_that_was_stopped_amid_an_evaluation_neither_loses_nor_repeats_it(
    train, evaluate, tasks
):
    chosen = [f"evaluation.tasks=[{tasks[0]},{tasks[3]}]", AT_STEPS]
    whole = train("whole", *chosen, ranks=2)
    assert [step for step, _ in evaluations(whole)] == [2, 4]
    assert "tasks  after step 4: choice acc " in whole.out
    for line, (_, metrics) in zip(whole.metrics[1::2], evaluations(whole), strict=True):
        assert line["tasks"] == {
            f"{task}/{name}": value
            for task, values in metrics.items()
            for name, value in values.items()
        }
    by_verb = without_errors(evaluate(whole.folder, [tasks[0], tasks[3]], "limit=3"))
    assert by_verb == {
        task: pytest.approx(values, rel=1e-5) for task, values in evaluations(whole)[-1][1].items()
    }

    seam = inject.signalled("evaluation", 1, 2)
    stopped = train("run", *chosen, ranks=2, seam=seam, code=75)
    assert stopped["step"] == [1, 2]
    assert evaluations(stopped) == []
    run = train("run", *chosen, ranks=2)
    assert evaluations(run) == evaluations(whole)
    assert [line.get("tasks") for line in run.metrics] == [
        line.get("tasks") for line in whole.metrics
    ]


def test_tasks_in_training_give_the_same_numbers_however_the_model_is_sharded(train, tasks):
    chosen = f"evaluation.tasks=[{tasks[0]},{tasks[3]}] evaluation.limit=3"
    still = "train.steps=1 optim.lr=0 batch.micro_rows=1 launch.timeout=120s"
    [(_, alone)] = evaluations(train("alone", chosen, still))
    for ranks, *layout in (
        (4, "sharding.tensor=2", "sharding.context=2"),
        (2, "sharding.pipeline=2"),
    ):
        run = train(f"on {ranks}", chosen, still, *layout, ranks=ranks)
        [(_, shared)] = evaluations(run)
        for task, values in alone.items():
            assert shared[task] == pytest.approx(values, rel=1e-5), layout
