"""Configuration through its doors: the command line and `compose`. Nothing here imports torch."""

import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from answers import ANSWERS
from folders import REPO, table
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.base.safe_text import identity, safe
from fsdp_trainer.cli import VERBS, main
from fsdp_trainer.config.check import as_text, flatten
from fsdp_trainer.config.composing.compose import (
    CONF,
    as_yaml,
    compose,
    hydra_message,
    options,
)
from fsdp_trainer.config.composing.handover import (
    DESCRIPTOR,
    configuration_file,
    inherited_configuration,
)
from fsdp_trainer.config.composing.help import examples
from fsdp_trainer.config.composing.overrides import quoted
from fsdp_trainer.config.document import documented_files, markdown
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.rules.rules_code import code_of_sweep
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.version import __version__

CASES = table("config/config_cases.yaml")

DEMO = ["data.path=demo:backwards", "tokenizer.path=demo:bytes"]


@pytest.fixture
def refused(program):
    """Run a command line that must be refused with exit code 2; gives its message."""

    def run(*words):
        message = program(*words, code=2)
        assert program.out == ""
        return message

    return run


def answers(message):
    """Return what a message says about each thing that was typed."""
    parts = message.split("\n\n")[1:]
    return dict(re.split(r"  |\n", f"{part.strip()}\n", maxsplit=1) for part in parts)


@pytest.fixture
def own(tmp_path):
    """Write files into a --config-dir; gives the folder."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / "own" / (name.replace("__", "/") + ".yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return f"{tmp_path}/own"

    return write


# --- what is typed arrives ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["007", "1e3", "2024", "1_000"])
def test_recipe_then_command_line_are_laid_over_the_defaults_as_they_are_typed(name):
    words = [
        "+recipe=quickstart", f"run.name={name}", "optim.lr=1e-5", "train.steps=1e4",
        "sharding=ddp", "data.path=[demo:backwards]", "data.fields.prompt=question",
        "launch.env.OMP_NUM_THREADS=4", "preview.rows=2",
    ]  # fmt: skip
    cfg = compose("preview", words)
    assert (cfg.run.name, cfg.precision.param_dtype) == (name, "float32")
    assert (cfg.sharding.strategy, cfg.optim.lr, cfg.preview.rows) == ("ddp", 1e-5, 2)
    assert repr(cfg.train.steps) == "10000"
    assert cfg.data.path == ["demo:backwards"]
    assert cfg.data.fields == {"prompt": "question"}
    assert cfg.launch.env == {"OMP_NUM_THREADS": "4"}


def test_a_number_stays_one_where_text_is_taken_as_well():
    for word, value in {"4091": 4091, "'4091'": "4091", "end": "end"}.items():
        assert compose("train", [*DEMO, f"data.end_of_text={word}"]).data.end_of_text == value


def test_home_is_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chats.jsonl").touch()
    cfg = compose("train", [*DEMO[1:], 'data.path="~/chats.jsonl"', 'run.root="~/runs"'])
    assert cfg.data.path == f"{tmp_path}/chats.jsonl"
    assert cfg.run.root == f"{tmp_path}/runs"


def test_a_prompt_needs_no_quotes():
    for prompt in CASES["prompts"]:
        assert compose("generate", [f"prompt={prompt}"], inputs=False).prompt == prompt
    assert compose("generate", ["prompt=null"], inputs=False).prompt is None


@settings(max_examples=200, deadline=None, database=None)
@given(st.text(st.sampled_from("\\\\\"'ab$={},[]:() \n\t#~é")))
def test_a_quoted_text_comes_through_hydra_as_it_is(text):
    assert OverridesParser.create().parse_override(f"key={quoted(text)}").value() == text


def test_durations_are_read_as_people_write_them():
    written = CASES["durations"]
    assert {text: parse_duration(text) for text in written} == written


# --- what is wrong is told, all at once ---------------------------------------------------------


def test_an_unknown_name_is_refused_and_the_right_one_named(refused):
    names = ANSWERS["[other names]"]
    said = answers(refused(*names))
    assert list(said) == list(names)
    for typed, meant in names.items():
        assert meant in said[typed], typed


def test_a_mistake_says_what_to_type_instead(refused):
    for mistakes in (part for title, part in ANSWERS.items() if "together" in title):
        usual = [word for word in DEMO if word.split("=")[0] not in " ".join(mistakes)]
        said = answers(refused(*reversed(mistakes), *usual))
        for typed, reason in mistakes.items():
            assert reason in said.get(typed, ""), typed


def test_an_older_torchft_is_named_with_what_to_install(refused, tmp_path, monkeypatch):
    (tmp_path / "manager.py").touch()
    old = SimpleNamespace(origin=f"{tmp_path}/__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: old)
    groups = ["model=tiny", "replicas.method=sync", "launch.groups=2", *DEMO]
    for words in (groups, ["lighthouse", "port=0"]):
        said = refused(*words)
        assert "is too old" in said
        assert "pip install 'fsdp_trainer[replicas]'" in said


def test_only_what_a_sweep_can_vary_is_sent_to_one(refused):
    assert "-m" not in refused("report", "source=a,b")


# --- files: recipes and --config-dir ------------------------------------------------------------


MINE = """\
defaults:
  - override /precision: fp32
data: {path: demo:backwards}
tokenizer: {path: demo:bytes}
train: {steps: 7}
"""


def test_a_recipes_file_is_laid_over_the_defaults_however_it_is_named(own, program):
    folder = own(recipe__mine=MINE)
    file = f"{folder}/recipe/mine.yaml"
    for words in (
        file,
        f"train {file}",
        f"+recipe={file}",
        f"--config {file}",
        f"--config={file}",
        f"--config-dir {folder} +recipe=mine",
        f"--config-dir {folder} --config-name mine",
        f"--config-dir {folder} --config-name mine.yaml",
    ):
        cfg = yaml.safe_load(program(f"--cfg job {words} batch.rows=5"))
        assert (cfg["run"]["name"], cfg["train"]["steps"], cfg["batch"]["rows"]) == ("mine", 7, 5)
        assert cfg["precision"]["param_dtype"] == "float32"


def test_a_recipes_file_needs_no_folder_of_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROWS", "48")
    # numbers written as text are numbers
    text = f"{MINE}optim: {{lr: '1e-4', grad_clip: 2}}\nbatch: {{rows: '${{oc.env:ROWS}}'}}\n"
    (tmp_path / "my run.yaml").write_text(text)
    for file in ("my run.yaml", f"{tmp_path}/my run.yaml"):
        cfg = compose("train", [file, "train.steps=8"])
        assert (cfg.run.name, cfg.train.steps, cfg.batch.rows) == ("my run", 8, 48)
        assert (cfg.optim.lr, cfg.optim.grad_clip) == (1e-4, 2.0)
    with pytest.raises(UserError, match="no option my"):  # it belongs to its command line only
        compose("train", ["+recipe=my", *DEMO])


def test_a_recipe_is_built_on_packaged_ones_and_on_files_beside_it(own):
    folder = own(
        recipe__base="train: {steps: 3}\nbatch: {rows: 4}\n",
        recipe__mine="defaults: [quickstart, base]\nbatch: {rows: 6}\n",
        model__small="name: small\nhidden_size: 64\n",
        recipe__sized="defaults: [mine, override /model: small]\n",
    )
    for cfg in (
        compose("train", ["+recipe=mine"], folder),
        compose("train", [f"{folder}/recipe/mine.yaml"]),
    ):
        assert (cfg.train.steps, cfg.batch.rows, cfg.data.path) == (3, 6, "demo:backwards")
    for cfg in (
        compose("train", ["+recipe=[quickstart,sized]"], folder),
        compose("train", [f"{folder}/recipe/sized.yaml"]),
    ):
        assert (cfg.model.hidden_size, cfg.batch.rows, cfg.run.name) == (64, 6, "sized")


def test_mistakes_in_a_recipes_defaults_are_told_with_file_line_and_correction(own, refused):
    wrong = ANSWERS["[a recipe's defaults]"]
    entries = "".join(f"  {entry}\n" for entry in wrong)
    folder = own(recipe__bad=f"defaults:\n{entries}optim:\n  learning_rate: 1\n")
    message = refused("--config-dir", folder, "+recipe=bad", *DEMO)
    lines = {p.split()[0]: " ".join(p.split()) for p in message.split("\n\n")[1:]}
    for line, (entry, said) in enumerate(wrong.items(), start=2):
        problem = lines[f"{folder}/recipe/bad.yaml:{line}"]
        assert entry in problem
        assert said in problem
    assert "composing" not in message
    last = f"{folder}/recipe/bad.yaml:{line + 2}"
    assert "optim.learning_rate there is no such key" in lines[last]


def test_of_two_warm_ups_the_one_that_the_message_names_is_used(own, refused, program):
    words = ["--config-dir", own(recipe__both="schedule: {warmup: 0.1, warmup_steps: 7}"), *DEMO]
    said = refused(*words, "+recipe=both")
    (change,) = re.findall(r"keep one, as in  (\S+)", said)
    composed = program(*words, "+recipe=both", change, "--cfg", "job")
    assert yaml.safe_load(composed)["schedule"]["warmup_steps"] == 7


# --- verbs and options --------------------------------------------------------------------------


def test_only_rank_0_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert main(["nonsense=1"]) == 2
    assert capsys.readouterr().err == ""


def test_an_error_of_hydras_without_a_text_is_told_by_its_cause_or_kind():
    cause, bare = HydraException(), HydraException()
    cause.__cause__ = ValueError("the cause")
    assert (hydra_message(cause), hydra_message(bare)) == ("the cause", "HydraException")
    assert "composing" in str(UserError("title", [Problem("composing", "")]))


def test_python_gets_the_error_itself():
    import fsdp_trainer

    with pytest.raises(UserError, match=r"optim\.lr"):
        fsdp_trainer.train(["learning_rate=1"])


def test_cfg_job_prints_the_composed_configuration_and_writes_nothing(
    program, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for how in ("--cfg job", "-c job --resolve", "--cfg job data.path=not_there_yet.jsonl"):
        printed = yaml.safe_load(program(f"{how} +recipe=quickstart sharding=ddp"))
        assert printed["sharding"]["strategy"] == "ddp"
        assert list(printed) == [*dict.fromkeys(key.split(".")[0] for key in flatten(TrainConfig))]
    assert not list(tmp_path.iterdir())


def test_hydras_own_view_is_there(program, monkeypatch):
    # it leaves a handler, to what is then captured no more
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])
    assert "recipe/quickstart" in program("--info defaults +recipe=quickstart")


def test_help_lists_verbs_groups_and_recipes(program):
    text = program("--help")
    listed = (*VERBS, *GROUPS, *options("train")["recipe"], "qwen3_0_6b")
    assert not [word for word in listed if word not in text]
    for verb in VERBS:
        first, _, *lines = program(f"{verb} --help").splitlines()
        assert first[0].isupper()
        assert [line.split()[0] for line in lines[:2]] == ["fsdp-trainer"] * 2
        keys = [re.match(r"  (?:\w+\.)?(\w+)=", line) for line in lines[4:]]
        assert len(flatten(PRIMARY[verb])) == 0 or keys[0]
    assert "  optim.lr=1e-5  peak learning rate" in program("plan --help optim")
    assert "  optim.lr=1e-5  peak learning rate" in program("plan --help optim.lr")
    assert program("chat runs/x --help") == program("chat --help")
    assert "plan.gpu" in program("plan --help").partition("keys")[2].splitlines()[1]
    assert main(["plan", "--help", "optimizer"]) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_help_have_no_wrong_key(program, verb, capsys):
    for line in examples(verb):
        verb_typed, *words = line.split()[1:]
        typed = [w for w in (words if verb_typed in VERBS else [verb_typed, *words]) if "=" in w]
        own = [w for w in typed if not w.startswith("all.")]
        try:
            compose(verb, own, inputs=False)
        except UserError as error:
            assert "there is no such key" not in str(error), line
    assert __version__ in program("--version")


def test_completion_knows_verbs_recipes_keys_and_values(program, own, monkeypatch):
    monkeypatch.chdir(REPO)
    folder = own(recipe__mine="# @package _global_")
    for typed, offered in ANSWERS["[completed]"].items():
        line = typed.replace("FOLDER", folder)
        monkeypatch.setenv("COMP_LINE", f"fsdp-trainer {line} and what follows")
        monkeypatch.setenv("COMP_POINT", str(len(f"fsdp-trainer {line}")))
        said = program("-sc query=bash").split()
        assert offered in said
        assert all(word.startswith(line.split()[-1]) for word in said)
    monkeypatch.setenv("COMP_LINE", "fsdp-trainer --config-dir ")
    monkeypatch.delenv("COMP_POINT")
    assert program("-sc query=bash").split() == [], "folders are left to the shell"


def test_bash_completes(tmp_path):
    program = tmp_path / "fsdp-trainer"
    program.write_text(
        f"#!{sys.executable}\nimport sys; from fsdp_trainer.cli import main; sys.exit(main())\n"
    )
    program.chmod(0o755)
    script = """eval "$(fsdp-trainer -sc install=bash)"; complete -p fsdp-trainer
        COMP_LINE="fsdp-trainer activation_checkpoint.mode=" COMP_POINT=${#COMP_LINE} COMP_CWORD=1
        hydra_bash_completion; echo ${COMPREPLY[@]}"""
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
    out = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "hydra_bash_completion fsdp-trainer" in out
    assert out.split()[-1] == "activation_checkpoint.mode=selective"


def test_answers_come_within_two_seconds_and_without_torch(tmp_path):
    code = """
import sys, time
from fsdp_trainer.cli import main
begun = time.process_time()
for line in sys.argv[1].splitlines():
    before = time.process_time()
    main(line.split())
    print(begun + time.process_time() - before, file=sys.stderr)
    assert "torch" not in sys.modules, line
"""
    lines = f"""--help
optim.learning_rate=1
--cfg job +recipe=llama70b_sft
recipes
config key=optim.lr
-sc query=bash
report {tmp_path}/run"""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    command = [sys.executable, "-c", code, lines]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, check=True, cwd=REPO, env=env, capture_output=True, text=True)
    # processor seconds: what else the machine does must not decide
    seconds = [float(line) for line in done.stderr.splitlines() if re.fullmatch(r"[\d.]+", line)]
    assert len(seconds) == 7
    assert max(seconds) < 2


# --- the schema is the documentation ------------------------------------------------------------


def test_comments_and_values_in_conf_and_on_the_page_are_the_schemas():
    for path, text in documented_files(CONF).items():
        assert path.read_text() == text, f"{path}: run  python -m fsdp_trainer.config.document"
    assert (REPO / "docs/configuration.md").read_text() == markdown(options("train"))


def test_every_key_is_explained_and_what_sets_it(program, own):
    folder = own(recipe__mine="optim: {lr: 2}")
    keys = flatten(TrainConfig)
    of_lr = ["optim.lr", "peak learning rate [at least 0]", "1e-5", "learning_rate, max_lr"]
    of_sharding = [f"{key} " for key in keys if key.startswith("sharding.")]
    for words, parts in {
        "": [f"{key} " for key in keys],
        "key=optim.lr": of_lr,
        "key=learning_rate": of_lr,
        "key=lr": of_lr,
        "key=lora": ["adapter.rank"],
        "key=sharding": ["ddp fsdp hsdp", *of_sharding],
        "key=export.dtype": ["fsdp-trainer export dtype=…"],
        "key=optim.lr +recipe=quickstart": ["here     0.001, set by  recipe/quickstart.yaml"],
        "key=preview.rows preview.rows=7": ["here     7, set by  preview.rows=7"],
        f"key=lr --config-dir {folder} +recipe=mine": ["here     2.0, set by"],
    }.items():
        said = program(f"config {words}")
        assert not [part for part in parts if part not in said], words


def test_the_recipes_verb_names_hardware_and_command_from_small_to_large(program, own):
    folder = own(recipe__mine="# @package _global_\n# Mine.")
    text = program(f"--config-dir {folder} recipes")
    assert "mine  (your own: " in text
    assert f"fsdp-trainer --config-dir {folder} +recipe=mine" in text
    text = program("recipes")
    assert "not said" not in text
    assert all(f"+recipe={name}" in text for name in options("train")["recipe"])
    sizes = ["0_6b", "1b", "8b", "8b", "70b"]
    assert re.findall(r"(?m)^(?:qwen3_|llama)(0_6b|1b|8b|70b)_sft$", text) == sizes


def test_every_verb_has_a_configuration():
    assert set(VERBS) == set(PRIMARY)


# --- what strangers write -----------------------------------------------------------------------

TABLE = f"{REPO}/examples/extend/tracker.py:Table"


def test_code_is_named_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from pathlib import Path\n\nPath('was_run').touch()\n")
    usual = [*DEMO, "objective=grpo", "objective.rewards=[exact]"]
    for typed in CASES["code"]:
        compose("train", [typed.replace("TABLE", TABLE).replace("REPO", str(REPO)), *usual])
    assert not (tmp_path / "was_run").exists()
    assert code_of_sweep("hydra.sweeper.params.objective.rewards", "[own.py:Path],[exact]")
    monkeypatch.setenv("MINE", "own.py:Own")
    compose("train", ["objective.environment=${oc.env:MINE}", *usual])
    (tmp_path / "mine.yaml").write_text("objective: {environment: calculator}")
    assert compose("train", ["mine.yaml", *usual]).objective.environment == "calculator"


@pytest.mark.parametrize(
    "key, values, is_refused",
    CASES["environments"],
)
def test_a_file_of_a_sweep_varies_an_environment_of_this_program(key, values, is_refused):
    swept = f"hydra.sweeper.params.objective.environment{key}"
    assert (code_of_sweep(swept, values) is not None) == is_refused


ADDRESS = "https://host/a.jsonl?key=SECRET"


def test_records_have_what_was_written_for_the_environments_values(monkeypatch):
    monkeypatch.setenv("MINE", "SECRET")
    monkeypatch.setenv("ROWS", "48")
    words = ["launch.env={K: '${oc.env:MINE}'}", "run.name=a-${oc.env:MINE}"]
    words += ["data.path=[{path: '${oc.env:MINE}', weight: 1}, {path: b, weight: 1}]"]
    words += ["batch.rows=${oc.env:ROWS}", f'data.validation="{ADDRESS}"']
    cfg = compose("train", [*words, "tokenizer.path=demo:bytes"], inputs=False)
    with configuration_file(cfg) as file:
        monkeypatch.setenv(DESCRIPTOR, str(os.dup(file.fileno())))
        handed = inherited_configuration(TrainConfig)
    for one in (cfg, handed):
        assert (one.run.name, one.launch.env, one.batch.rows) == ("a-SECRET", {"K": "SECRET"}, 48)
        assert one.data.path[0]["path"] == "SECRET"
        assert one.data.validation == ADDRESS
        written = yaml.safe_load(as_yaml(one))
        assert written["launch"]["env"] == {"K": "${oc.env:MINE}"}
        assert written["run"]["name"] == "a-${oc.env:MINE}"
        assert written["batch"]["rows"] == 48
        assert "SECRET" not in as_yaml(one) + as_text(one.data.path)


def test_texts_of_strangers_are_made_safe_in_a_moment():
    """Each would take hours if the time grew with the square of the length, or faster."""
    for text in ("http://h/?" + "a=bcd" * 20_000 + "!", "http://" * 20_000,
                 "a?b=c://" * 20_000, "http://a@" * 20_000, "x://:" * 20_000,
                 "http://h/?" + "&a=b" * 20_000):  # fmt: skip
        assert safe(text)
        assert identity(text)


def test_a_message_quotes_the_beginning_of_a_long_text():
    message = str(UserError("a", [Problem("b", "c" * 100_000)]))
    assert message.endswith("ccc … (100,000 characters)")
    assert len(message) < 5_000


@pytest.mark.parametrize(
    "text, shown",
    CASES["safe"],
)
def test_what_is_shown_has_no_secrets_and_no_control_characters(text, shown):
    assert safe(text) == shown
    assert Problem(text, text) == Problem(shown, shown)


def test_signatures_are_no_part_of_an_addresss_identity():
    for query in ("?X-Amz-Date=1&X-Amz-Signature=2", "?sv=1&se=2&sig=3", "?Expires=1&Signature=2"):
        assert identity(f"https://host/a{query}") == "https://host/a"
        assert identity(f"https://host/a?id=7&{query[1:]}") == "https://host/a?id=7"
    assert identity("https://host/a?se=1") == "https://host/a?se=1"


def test_a_name_that_is_too_long_is_one_message(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "n" * 300
    for words in (
        [*DEMO, f"run.name={name}"],
        [*DEMO, f"run.root={name}", "train.steps=1"],
        [f"data.path={name}.txt", DEMO[1]],
        ["report", name],
        ["export", str(tmp_path), f"out={name}"],
        ["launch-files", "kind=docker", *DEMO, f"out={name}"],
    ):
        assert "too long" in refused(*words)
    assert not [*tmp_path.iterdir()]
