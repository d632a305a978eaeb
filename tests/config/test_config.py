"""Configuration through its doors: the command line and `compose`. Nothing here imports torch."""

import logging
import os
import resource
import subprocess
import sys

import pytest
import yaml
from folders import REPO
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.cli import VERBS, main
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import CONF, compose, hydra_message, options
from fsdp_trainer.config.composing.overrides import quoted
from fsdp_trainer.config.document import documented_files, markdown
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.version import __version__

DEMO = ["data.path=demo:backwards", "tokenizer.path=demo:bytes"]


@pytest.fixture
def refused(capsys):
    """Run a command line that must be refused with exit code 2; gives its message."""

    def run(*argv: str) -> str:
        assert main(list(argv)) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    return run


def answers(message: str) -> dict[str, str]:
    """Return what a message says about each thing that was typed."""
    answers_by_word: dict[str, str] = {}
    for part in message.split("\n\n")[1:]:
        head, _, rest = (
            part.strip().partition("  ")
            if "  " in part.strip().split("\n")[0]
            else part.strip().partition("\n")
        )
        answers_by_word[head] = rest
    return answers_by_word


@pytest.fixture
def own(tmp_path):
    """Write files into a --config-dir; gives the folder."""

    def write(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / "own" / (name.replace("__", "/") + ".yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path / "own")

    return write


# --- what is typed arrives ----------------------------------------------------------------------


def test_recipe_then_command_line_are_laid_over_the_defaults():
    cfg = compose(
        "train",
        [
            "+recipe=quickstart",
            "optim.lr=1e-5",
            "train.steps=1e4",
            "sharding=ddp",
            "data.path=[demo:backwards]",
        ],
    )
    assert (cfg.run.name, cfg.precision.param_dtype, cfg.sharding.strategy) == (
        "quickstart",
        "float32",
        "ddp",
    )
    assert cfg.optim.lr == 1e-5
    assert cfg.train.steps == 10_000
    assert isinstance(cfg.train.steps, int)
    assert cfg.data.path == ["demo:backwards"]
    assert cfg.optim.betas == [0.9, 0.95]


@pytest.mark.parametrize("typed", ["007", "1e3", "2024", "1_000"])
def test_a_name_stays_as_it_was_typed(typed):
    assert compose("train", [*DEMO, f"run.name={typed}"]).run.name == typed


@pytest.mark.slow
def test_numbers_written_as_text_are_numbers(own, monkeypatch):
    monkeypatch.setenv("ROWS", "48")
    folder = own(
        recipe__mine=(
            "# @package _global_\noptim: {lr: '1e-4', grad_clip: 2}\nbatch: {rows: "
            "'${oc.env:ROWS}'}\n"
        )
    )
    cfg = compose("train", ["+recipe=mine", *DEMO], folder)
    assert (cfg.optim.lr, cfg.optim.grad_clip, cfg.batch.rows, cfg.run.name) == (
        1e-4,
        2.0,
        48,
        "mine",
    )


def test_keys_inside_a_mapping_can_be_set_one_by_one():
    cfg = compose("train", [*DEMO, "data.fields.prompt=question", "launch.env.OMP_NUM_THREADS=4"])
    assert cfg.data.fields == {"prompt": "question"}
    assert cfg.launch.env == {"OMP_NUM_THREADS": "4"}


@pytest.mark.slow
@settings(max_examples=200, deadline=None, database=None)
@given(st.text(st.sampled_from("\\\\\"'ab$={},[]:() \n\t#~é")))
def test_a_quoted_text_comes_through_hydra_as_it_is(text):
    assert OverridesParser.create().parse_override(f"key={quoted(text)}").value() == text


@pytest.mark.parametrize(
    "prompt",
    [
        "Hello, world",
        "What's 2 + 2?",
        'Say "hi" (twice)',
        "a=b, {c}",
        "null and void",
        "line\none",
        "${5}",
        "\\",
    ],
)
def test_a_prompt_needs_no_quotes(prompt):
    assert compose("generate", [f"prompt={prompt}"], inputs=False).prompt == prompt
    assert compose("generate", ["prompt=null"], inputs=False).prompt is None


def test_home_is_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chats.jsonl").touch()
    cfg = compose(
        "train", ['data.path="~/chats.jsonl"', "tokenizer.path=demo:bytes", 'run.root="~/runs"']
    )
    assert cfg.data.path == str(tmp_path / "chats.jsonl")
    assert cfg.run.root == str(tmp_path / "runs")


def test_preview_shares_trainings_groups_and_adds_its_own():
    cfg = compose(
        "preview", ["+recipe=quickstart", "preview.format=json", "preview.rows=2", "sharding=ddp"]
    )
    assert cfg.preview.rows == 2
    assert cfg.sharding.strategy == "ddp"
    assert cfg.run.name == "quickstart"


def test_durations_are_read_as_people_write_them():
    assert [parse_duration(t) for t in ("90s", "30m", "1h30m", "2d", "45", "1.5h")] == [
        90,
        1800,
        5400,
        172_800,
        45,
        5400,
    ]


# --- what is wrong is told, all at once ---------------------------------------------------------


def test_all_problems_are_told_at_once(refused):
    said = refused(
        "optim.learning_rate=3e-5",
        "++optm.wd=1",
        "batch.rows=abc",
        "batch.seq_len=16384",
        "data.path=nope.jsonl",
        "tokenizer.path=demo:bytes",
    )
    assert "5 problems in the configuration" in said
    for part in (
        "Did you mean  optim.lr=3e-5 ?",
        "optim.weight_decay=1",
        "must be a whole number",
        "context",
        "no such file",
    ):
        assert part in said


MEANT = {
    "training.batch_size=8": "batch.rows=8",
    "per_device_train_batch_size=8": "batch.micro_rows=8",
    "data.max_length=64": "batch.seq_len=64",
    "++num_train_epochs=3": "train.epochs=3",
    "+model_name_or_path=x/y": "model.init_from=x/y",
    "gradient_checkpointing=true": "activation_checkpoint=full",
    "optimizer=adamw": "optim=adamw",
    "seed=1": "run.seed=1",
    "optim.warmup_steps=10": "schedule.warmup_steps=10",
    "optim.weigth_decay=0.1": "optim.weight_decay=0.1",
    "optim.learning_rat=1": "optim.lr=1",
    "logging.steps=4": "logging.every=4",
    "bach.rows=1": "batch.rows=1",
    "model=qwen3_06b": "model=qwen3_0_6b",
    "data=chats.jsonl": "data.path=chats.jsonl",
    "compile=true": "compile=enabled",
}


def test_an_unknown_name_is_refused_and_the_right_one_named(refused):
    said = answers(refused(*MEANT))
    assert list(said) == list(MEANT)
    for typed, meant in MEANT.items():
        assert meant in said[typed], typed


MISTAKES = [
    {
        "data.path=https://host/a?b=c": """'data.path="https://host/a?b=c"'""",
        "data.path=[~/a,~/b]": """'data.path=["~/a","~/b"]'""",
        "optim.betas=(0.9,0.95)": "optim.betas=[0.9,0.95]",
        "~optim": "not deleted",
        "optim.lr": "neither a verb nor key=value",
        "batch=3": "batch has: seq_len rows micro_rows",
        "hydra.run.dir=x": "hydra.* is closed",
        "+hydra.callbacks.x._target_=os.system": "hydra.* is closed",
        "data.fields={_target_: os.system}": "_target_",
        "run.name=${now:%H}": "differs between ranks",
    },
    {
        "optim.betas=[0.9,2]": "at most 1",
        "optim.grad_clip=0": "or null",
        "optim.eps=null": "optim.eps=1e-8",
        "run.overwrite=3": "true or false",
        "data.validation=1.5": "data.validation=0.02",
        "train.time_limit=soon": "1h30m",
        "sharding.replicas=2": "sharding=hsdp",
        "tokenizer.path=Qwen/Qwen3-0.6B": "model.init_from",
        "model.init_from=nowhere/": "no such folder",
        "data.path=demo:forwards": "demo:backwards",
        "data.template=mine.jinja": "no such file",
        "checkpoint.resume=runs/none": "neither auto nor never",
    },
    {"data.path=*.nothing": "no file matches", "tokenizer.path=no.model": "no such file"},
    {"sharding.replicas=1": "sharding.replicas=2", "sharding=hsdp": ""},
    {"train.epochs=2": "keep one", "train.steps=3": ""},
    {"model.hidden_size=100": "multiple", "model.num_attention_heads=3": ""},
    {"model=auto": "chosen twice", "model=tiny": ""},
]


@pytest.mark.parametrize("mistakes", MISTAKES, ids=lambda m: next(iter(m)))
def test_a_mistake_says_what_to_type_instead(refused, mistakes):
    said = answers(
        refused(
            *reversed(mistakes), *(d for d in DEMO if d.split("=")[0] not in " ".join(mistakes))
        )
    )
    for typed, reason in mistakes.items():
        assert reason in said.get(typed, ""), typed


def test_only_what_a_sweep_can_vary_is_sent_to_one(refused):
    assert "-m" not in refused("report", "source=a,b")
    assert "choose one value" in refused("launch-files", "kind=slurm,docker")


@pytest.mark.slow
def test_the_verbs_own_keys_are_meant_before_trainings(refused):
    assert "Did you mean  plan.memory_gib=80 ?" in refused("plan", "plan.memory=80")
    assert "Did you mean  kind=slurm ?" in refused("launch-files", "slurm")


def test_a_mistake_is_not_told_twice(refused):
    said = refused(
        "dataset=demo:backwards", "tokenizer.path=demo:bytes"
    )  # data.path is not also missing
    assert "a problem in the configuration" in said


# --- files: recipes and --config-dir ------------------------------------------------------------


@pytest.mark.slow
def test_a_recipe_is_checked_as_the_command_line_is(own, refused):
    folder = own(
        recipe__bad="""\
# @package _global_
defaults: [override /hydra/job_logging: disabled]
optim: {learning_rate: 1, lr: fast}
sharding: {strategy: ddp}
train:
hydra: {callbacks: {x: {_target_: os.system}}}
foo: {bar: 1}
model: {rope_scaling: {_target_: x}}
logging: {wandb: off}
"""
    )
    said = refused("--config-dir", folder, "+recipe=bad", *DEMO)
    for part in (
        "Did you mean  optim.lr ?", "must be a number", "override /sharding: NAME",
        "train has: steps", "hydra.callbacks.x._target_  ", "foo.bar  there is no such key",
        "_target_ is refused", "put it in quotes", "/hydra/job_logging  ", "recipe/bad.yaml:3",
    ):  # fmt: skip
        assert part in said


@pytest.mark.slow
def test_a_folder_of_ones_own_adds_options_and_recipes(own):
    folder = own(
        model__mine="name: mine\nhidden_size: 64\n",
        recipe__mine="# @package _global_\ndefaults: [override /model: mine]\n",
    )
    cfg = compose("train", ["+recipe=[quickstart,mine]"], folder)
    assert (cfg.model.name, cfg.model.hidden_size, cfg.run.name, cfg.data.path) == (
        "mine",
        64,
        "mine",
        "demo:backwards",
    )


MINE = """\
defaults:
  - override /precision: fp32
data: {path: demo:backwards}
tokenizer: {path: demo:bytes}
train: {steps: 7}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "FILE",
        "train FILE",
        "+recipe=FILE",
        "--config FILE",
        "--config=FILE",
        "--config-dir DIR +recipe=mine",
        "--config-dir DIR --config-name mine",
        "--config-dir DIR --config-name mine.yaml",
    ],
)
def test_a_recipes_file_is_laid_over_the_defaults_however_it_is_named(own, capsys, words):
    folder = own(recipe__mine=MINE)
    line = words.replace("FILE", f"{folder}/recipe/mine.yaml").replace("DIR", folder).split()
    assert main(["--cfg", "job", *line, "batch.rows=5"]) == 0
    cfg = yaml.safe_load(capsys.readouterr().out)
    assert (cfg["run"]["name"], cfg["train"]["steps"], cfg["batch"]["rows"]) == ("mine", 7, 5)
    assert cfg["precision"]["param_dtype"] == "float32"


@pytest.mark.slow
def test_a_recipes_file_needs_no_folder_of_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run.yaml").write_text(f"# @package _global_\n{MINE}")
    for file in ("my run.yaml", str(tmp_path / "my run.yaml")):
        cfg = compose("train", [file, "train.steps=8"])
        assert (cfg.run.name, cfg.train.steps) == ("my run", 8)
    with pytest.raises(UserError, match="no option my"):  # it belongs to its command line only
        compose("train", ["+recipe=my", *DEMO])


@pytest.mark.slow
def test_a_recipe_is_built_on_packaged_ones_and_on_files_beside_it(own):
    folder = own(
        recipe__base="train: {steps: 3}\nbatch: {rows: 4}\n",
        recipe__mine="defaults: [quickstart, base]\nbatch: {rows: 6}\n",
        model__small="name: small\nhidden_size: 64\n",
        recipe__sized="defaults: [mine, override /model: small]\n",
    )
    for words, own_dir in (
        (["+recipe=mine"], folder),
        ([f"{folder}/recipe/mine.yaml"], None),
    ):
        cfg = compose("train", words, own_dir)
        assert (cfg.train.steps, cfg.batch.rows, cfg.data.path) == (3, 6, "demo:backwards")
    cfg = compose("train", [f"{folder}/recipe/sized.yaml"])
    assert (cfg.model.hidden_size, cfg.batch.rows, cfg.run.name) == (64, 6, "sized")


WRONG_DEFAULTS = {
    "- precision: fp32": "- override /precision: fp32",
    "- override precision: fp32": "- override /precision: fp32",
    "- override /schedule: lin": "- override /schedule: linear ?",
    "- override /optim: shampoo": "Muon with AdamW beside it",
    "- override /precison: fp32": "- override /precision: fp32 ?",
    "- recipe: llama8b_sft": "by its name alone: - llama8b_sft",
    "- /recipe: maths": "by its name alone: - maths",
    "- quikstart": "- quickstart ?",
    "- fp32": "- override /precision: fp32",
}


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
def test_mistakes_in_a_recipes_defaults_are_told_with_file_line_and_correction(
    own, refused, header
):
    entries = "".join(f"  {entry}\n" for entry in WRONG_DEFAULTS)
    folder = own(recipe__bad=f"{header}defaults:\n{entries}optim:\n  learning_rate: 1\n")
    message = refused("--config-dir", folder, "+recipe=bad", *DEMO)
    lines = {p.split()[0]: " ".join(p.split()) for p in message.split("\n\n")[1:]}
    first = 2 + header.count("\n")
    for i, (entry, said) in enumerate(WRONG_DEFAULTS.items()):
        problem = lines[f"{folder}/recipe/bad.yaml:{first + i}"]
        assert entry in problem
        assert said in problem
    assert "composing" not in message
    last = f"{folder}/recipe/bad.yaml:{first + len(WRONG_DEFAULTS) + 1}"
    assert "optim.learning_rate there is no such key" in lines[last]


@pytest.mark.slow
def test_a_value_of_a_file_is_told_with_its_line(own, refused):
    folder = own(recipe__mine="optim:\n  lr: fast\n")
    assert "(set in " + folder + "/recipe/mine.yaml:2)" in refused(
        f"{folder}/recipe/mine.yaml", *DEMO
    )


def test_a_file_that_is_not_there_is_told_with_the_nearest(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maths.yaml").write_text(MINE)
    assert "Did you mean  maths.yaml ?" in refused("mahts.yaml")
    assert "there is no such file" in refused("none/at/all.yaml")


def test_a_name_that_exists_twice_is_refused_and_both_files_named(own, refused):
    said = refused("--config-dir", own(recipe__quickstart="a: 1"), "+recipe=quickstart")
    assert "own/recipe/quickstart.yaml" in said
    assert str(CONF / "recipe" / "quickstart.yaml") in said


@pytest.mark.parametrize(
    "text",
    [
        "a: [1\nb: }",
        "- a",
        "# @package _global_\ndefaults: [override /model: none_such]",
        "# @package _global_\nrun: {name: '${no.key}'}",
    ],
)
def test_a_broken_recipe_is_one_message(own, refused, text):
    assert "Traceback" not in refused(
        "--config-dir", own(recipe__broken=text), "+recipe=broken", *DEMO
    )


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
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for argv in (
        ["--cfg", "job"],
        ["-c", "job", "--resolve"],
        ["--cfg", "job", "data.path=not_there_yet.jsonl"],
    ):
        assert main([*argv, "+recipe=quickstart", "sharding=ddp"]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["sharding"]["strategy"] == "ddp"
        assert list(printed) == [
            key.split(".")[0]
            for key in dict.fromkeys(k.split(".")[0] for k in flatten(TrainConfig))
        ]
    assert not list(tmp_path.iterdir())


def test_hydras_own_view_is_there(capsys, monkeypatch):
    monkeypatch.setattr(
        logging.root, "handlers", [*logging.root.handlers]
    )  # it leaves one, to what is then captured no more
    assert main(["--info", "defaults", "+recipe=quickstart"]) == 0
    assert "recipe/quickstart" in capsys.readouterr().out


@pytest.mark.slow
def test_help_lists_verbs_groups_and_recipes(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in (*VERBS, *GROUPS, *options("train")["recipe"], "qwen3_0_6b")
    )
    for verb in VERBS:
        assert main([verb, "--help"]) == 0
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ex", "export"),
        ("preview preview.", "preview.rows="),
        ("plan plan.gpu=b", "plan.gpu=b200"),
        ("+recipe=qu", "+recipe=quickstart"),
        ("-m +sweep=", "+sweep=lr"),
        ("export so", "source="),
        ("train sharding=", "sharding=hsdp"),
        ("op", "optim."),
        ("optim.w", "optim.weight_decay="),
        ("activation_checkpoint.mode=s", "activation_checkpoint.mode=selective"),
        ("run.overwrite=", "run.overwrite=true"),
        ("data.path=de", "data.path=demo:backwards"),
        ("data.path=pyproj", "data.path=pyproject.toml"),
        ("data.path=conf/opt", "data.path=conf/optim/"),
        ("config key=export.d", "key=export.dtype"),
        ("--info defaults-", "defaults-tree"),
    ],
)
def test_completion_knows_verbs_recipes_keys_and_values(capsys, monkeypatch, line, offered):
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("COMP_LINE", f"fsdp-trainer {line} and what follows")
    monkeypatch.setenv("COMP_POINT", str(len(f"fsdp-trainer {line}")))
    assert main(["-sc", "query=bash"]) == 0
    said = capsys.readouterr().out.split()
    assert offered in said
    assert all(word.startswith(line.split()[-1]) for word in said)


def test_completion_offers_recipes_of_ones_own_and_leaves_folders_to_the_shell(
    own, capsys, monkeypatch
):
    folder = own(recipe__mine="# @package _global_")
    for line, offered in (
        (f"--config-dir {folder} +recipe=mis", "+recipe=mistral7b_sft"),
        (f"--config-dir {folder} +recipe=min", "+recipe=mine"),
        ("--config-dir ", ""),
    ):
        monkeypatch.setenv("COMP_LINE", f"fsdp-trainer {line}")
        assert main(["-sc", "query=bash"]) == 0
        assert " ".join(capsys.readouterr().out.split()) == offered


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["optim.learning_rate=1"],
        ["--cfg", "job", "+recipe=llama70b_sft"],
        ["recipes"],
        ["config", "key=optim.lr"],
        ["-sc", "query=bash"],
    ],
)
@pytest.mark.grid(3)
def test_answers_come_within_two_seconds_and_without_torch(argv):
    code = (
        f"import sys; from fsdp_trainer.cli import main; main({argv}); assert 'torch' not in "
        f"sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=REPO,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor seconds: what else the machine does must not decide
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


# --- the schema is the documentation ------------------------------------------------------------


def test_comments_and_values_in_conf_are_the_schemas():
    for path, text in documented_files(CONF).items():
        assert path.read_text() == text, f"{path}: run  python -m fsdp_trainer.config.document"


def test_the_configuration_page_is_the_schemas():
    assert (REPO / "docs" / "configuration.md").read_text() == markdown(options("train"))


def test_every_key_is_explained(capsys):
    assert main(["config"]) == 0
    every = capsys.readouterr().out
    assert all(f"{key} " in every for key in flatten(TrainConfig))
    for typed_key in ("optim.lr", "learning_rate", "lr"):
        assert main(["config", f"key={typed_key}"]) == 0
        output = capsys.readouterr().out
        assert all(
            part in output
            for part in (
                "optim.lr",
                "peak learning rate [at least 0]",
                "1e-5",
                "learning_rate, max_lr",
            )
        ), typed_key


@pytest.mark.slow
def test_a_key_is_explained_with_what_a_recipe_makes_of_it(capsys, own):
    assert main(["config", "key=optim.lr", "+recipe=quickstart"]) == 0
    assert "here     0.001, set by  recipe/quickstart.yaml" in capsys.readouterr().out
    assert main(["config", "key=preview.rows", "preview.rows=7"]) == 0
    assert "here     7, set by  preview.rows=7" in capsys.readouterr().out
    assert (
        main(
            [
                "--config-dir",
                own(recipe__mine="# @package _global_\noptim: {lr: 2}"),
                "config",
                "key=lr",
                "+recipe=mine",
            ]
        )
        == 0
    )
    assert "here     2.0, set by" in capsys.readouterr().out


def test_groups_and_keys_of_other_verbs_are_explained(capsys):
    assert main(["config", "key=sharding"]) == 0
    output = capsys.readouterr().out
    assert all(f"{key} " in output for key in flatten(TrainConfig) if key.startswith("sharding."))
    assert "ddp fsdp hsdp" in output
    assert main(["config", "key=export.dtype"]) == 0
    assert "fsdp-trainer export dtype=…" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [
        ("launch.device", "gpu", "cuda"),
        ("logging.wandb", "false", "disabled"),
        ("train.on_spike", "on", "warn"),
        ("data.packing", "bestfit", "best_fit"),
        ("activation_checkpoint.mode", "selectiv", "selective"),
    ],
)
def test_a_choice_by_another_name_is_understood(refused, key, typed, meant):
    assert f"Did you mean  {key}={meant} ?" in refused(*DEMO, f"{key}={typed}")


def test_other_programs_names_of_adapters_are_answered_with_ours(refused):
    typed = {
        "lora_r=8": "adapter.rank=8",
        "load_in_4bit=true": "adapter=qlora",
        "target_modules=[q_proj]": "adapter.targets=[q_proj]",
        "lora_dropout=0.05": "there is no dropout",
        "adapter.r=4": "adapter.rank=4",
        "adapter.lora_alpha=4": "adapter.alpha=4",
        "adapter=qlora2": "adapter=qlora ?",
        "adapter.name=qlora": "adapter=qlora",
        "optim.name=adamw_8bit": "optim=adamw_8bit",
        "adapter.rank_pattern={'layers.[0-1].*':4}": r"{layers.\[0-1\].*:4}",
    }
    said = answers(refused(*DEMO, *typed))
    for argument, meant in typed.items():
        assert meant in said[argument]


def test_keys_of_adapters_count_with_one_only(refused):
    said = answers(refused(*DEMO, "adapter.rank=8", "checkpoint.merge=true"))
    assert "only counts with  adapter=lora" in said["adapter.rank=8"]
    assert "there is none" in said["checkpoint.merge=true"]


def test_an_adapters_folder_is_known_for_one(refused, tmp_path):
    (tmp_path / "adapter_config.json").touch()
    assert "base_model_name_or_path" in refused(
        f"model.init_from={tmp_path}", "data.path=demo:backwards"
    )


def test_a_model_without_a_tokenizer_is_known_by_its_folder(refused, tmp_path):
    (tmp_path / "config.json").touch()
    assert "neither a tokenizer.json" in refused("generate", f"source={tmp_path}")


def test_the_recipes_verb_names_hardware_and_command_from_small_to_large(capsys, own):
    folder = own(recipe__mine="# @package _global_\n# Mine.")
    assert main(["--config-dir", folder, "recipes"]) == 0
    text = capsys.readouterr().out
    assert "mine  (your own: " in text
    assert f"fsdp-trainer --config-dir {folder} +recipe=mine" in text
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert "not said" not in text
    assert all(f"+recipe={name}" in text for name in options("train")["recipe"])
    places = [
        text.index(f"\n{name}\n")
        for name in ("qwen3_0_6b_sft", "llama1b_sft", "llama8b_sft", "llama70b_sft")
    ]
    assert places == sorted(places)


def test_every_verb_has_a_configuration():
    assert set(VERBS) == set(PRIMARY)


def test_an_allowed_change_must_be_a_key(capsys):
    assert main(["+recipe=quickstart", "checkpoint.allow_changes=[optim.lrr]"]) == 2
    assert "optim.lr ?" in capsys.readouterr().err


@pytest.mark.parametrize("betas", ["[0.9]", "[0.9,1.0]", "[0.9,0.95,0.99]"])
def test_betas_are_two_numbers_below_one(capsys, betas):
    assert main(["+recipe=quickstart", f"optim.betas={betas}"]) == 2
    assert "optim.betas=[0.9,0.95]" in capsys.readouterr().err


def test_a_run_stays_inside_its_root(capsys):
    words = ["data.path=demo:backwards", "tokenizer.path=demo:bytes", "model=tiny"]
    assert main(["train", *words, "run.root=runs", "run.name=../x"]) == 2
    assert "is not inside run.root=runs" in capsys.readouterr().err
