"""Names of other trainers: each is answered with what there is here, never with a similar spelling.

other_trainers.txt has the options of their main configuration files, and where they are from.
"""

import re
from pathlib import Path

import pytest

from fsdp_trainer.cli import main
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import options
from fsdp_trainer.config.composing.overrides import takes, why_unknown
from fsdp_trainer.config.names import OPTION_SYNONYMS, known_elsewhere, meant_by, table
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import PRIMARY

KEYS = flatten(TrainConfig)
GROUPS = options("train")
TEXT = (Path(__file__).with_name("other_trainers.txt")).read_text()
SECTIONS = re.findall(r"(?m)^\[(.+?)\].*\n((?:.+\n)+)", TEXT)
OPTIONS = {trainer: names.split() for trainer, names in SECTIONS}
OF_OTHER_VERBS = {
    key
    for verb in ("plan", "export", "generate", "chat", "evaluate", "tokenizer", "rewards")
    for key in flatten(PRIMARY[verb])
} - KEYS.keys()
DEMO = ["data.path=demo:backwards", "tokenizer.path=demo:bytes"]


def is_ours(name):
    """Return whether a name is a key or group here, or the last part of exactly one key."""
    same_leaf = [key for key in KEYS if key.split(".")[-1] == name.split(".")[-1]]
    return name in KEYS or name in GROUPS or len(same_leaf) == 1


@pytest.mark.parametrize("trainer", OPTIONS)
def test_every_option_of_another_trainer_is_answered_by_name(trainer):
    unanswered = [name for name in OPTIONS[trainer] if not (known_elsewhere(name) or is_ours(name))]
    assert not unanswered
    for name in set(OPTIONS[trainer]) - KEYS.keys():
        answer = meant_by(name, KEYS, GROUPS)
        by_name = known_elsewhere(name)
        assert answer, name
        assert by_name is None or answer == by_name, name


def test_every_answer_is_real():
    exact, patterns = table()
    for name, answer in [*exact.items(), *patterns]:
        assert name not in GROUPS, name
        key, equals, value = answer.meant.partition("=")
        assert answer.sentence or key in KEYS or key in GROUPS, (name, key)
        if equals:
            assert value in GROUPS[key] if key in GROUPS else takes(KEYS[key], value), answer.meant
    for group, names in OPTION_SYNONYMS.items():
        assert set(names.values()) <= set(GROUPS[group])


def test_what_a_sentence_says_to_type_exists():
    sentences = {a.sentence for _, a in [*table().exact.items(), *table().patterns]}
    for sentence in sentences:
        for key, value in re.findall(r"(?<![\w.=-])([a-z_]+(?:\.[a-z_]+)*)=([\w.]*)", sentence):
            if key == "key" or key in OF_OTHER_VERBS or key.startswith("hydra."):
                continue
            assert key in KEYS or value in GROUPS.get(key, ()), (key, sentence)


@pytest.mark.slow
def test_a_suggestion_is_never_refused_in_turn():
    names = {n for names in OPTIONS.values() for n in names} - KEYS.keys() - GROUPS.keys()
    by_meaning = {meant_by(name, KEYS, GROUPS).meant: name for name in sorted(names)}
    for name in by_meaning.values():
        for value in ("true", "1", "0.5", "steps", "[a,b]"):
            reason = why_unknown(name, value, KEYS, GROUPS)
            for suggested in re.findall(r"Did you mean  (\S+=\S+) \?", reason):
                key, _, text = suggested.partition("=")
                good = text in GROUPS[key] if key in GROUPS else takes(KEYS[key], text)
                assert good, (name, reason)


ABSENT = {
    "logging.comet=online": "three trackers",
    "logging.tracker=comet": "three trackers",
    "report_to=mlflow": "logging.mlflow=true",
    "mlflow=true": "logging.mlflow=true",
    "tensor_parallel=2": "Did you mean  sharding.tensor=2 ?",
    "sequence_parallel=true": "sharding.tensor=N",
    "parallelism.context_parallel_degree=2": "Did you mean  sharding.context=2 ?",
    "deepspeed=ds.json": "sharding=fsdp",
    "data.loss=bco": "learns from preferences by objective=dpo",
    "reward_modeling=true": "objective=reward",
    "ref_model=m": "objective.reference=PATH",
    "label_smoothing=0.1": "objective.label_smoothing=0.1",
    "dpo_beta=0.2": "Did you mean  objective.beta=0.2 ?",
    "optim=adafactor": "Muon with AdamW beside it",
    "optimizer=shampoo": "Muon with AdamW beside it",
    "model=mixtral": "model=qwen3_30b_a3b",
    "callbacks=mine.py": "--import my_module",
    "objective=bco": "orpo and kto",
    "reward_funcs=[accuracy]": "objective.rewards=[number]",
    "use_vllm=true": "objective.server=URL",
    "vllm_server_base_url=http://h:8000": "Did you mean  objective.server=http://h:8000 ?",
    "num_generations=16": "Did you mean  objective.samples=16 ?",
    "rollout.n=5": "Did you mean  objective.samples=5 ?",
    "epsilon_high=0.28": "Did you mean  objective.clip_high=0.28 ?",
    "scale_rewards=none": "dr_grpo",
    "loss_type=dr_grpo": "objective.weighting=dapo",
    "beta=0.04": "objective.kl=0.04",
    "init_kl_coef=0.01": "Did you mean  objective.kl=0.01 ?",
    "distillation=true": "Did you mean  objective=distil ?",
    "teacher_model=m": "Did you mean  objective.teacher=m ?",
    "gkd=true": "a teacher's probabilities",
    "neftune_noise_alpha=5": "adds no noise",
    "special_tokens=x": "Did you mean  tokenizer.add_tokens ?",
    "eval_strategy=steps": "Did you mean  train.validate_every ? It takes a whole number",
    "lr_scheduler_type=cosine_with_min_lr": "Did you mean  schedule=cosine ?",
    "--use_lora=true": "adapter=lora",
    "adapter.type=lora": "Did you mean  adapter=lora ?",
    "adapter.bits=4": "Did you mean  adapter=qlora ?",
    "adapter.base=int4": "Did you mean  adapter.base=nf4 ?",
    "layers_to_transform=[1]": "patterns of names",
    "logging.wandb=swanlab": "three trackers",
}


def test_what_does_not_exist_here_is_said_in_one_line(capsys):
    assert main([*ABSENT, *DEMO]) == 2
    message = capsys.readouterr().err
    for typed, said in ABSENT.items():
        paragraph = next(p for p in message.split("\n\n") if p.strip().startswith(typed))
        assert said in " ".join(paragraph.split()).replace("Did you mean ", "Did you mean  "), typed


@pytest.mark.parametrize("name", ["xylophone", "train.xylophone", "loggin_mode_x", "clearly"])
def test_nothing_is_suggested_for_a_name_like_no_other(name):
    assert "Did you mean" not in why_unknown(name, "1", KEYS, GROUPS)


def test_config_key_answers_as_the_command_line_does(capsys):
    assert main(["config", "key=lora"]) == 0
    assert "adapter.rank" in capsys.readouterr().out
    for name, said in {"comet": "three trackers", "fp16": "precision=bf16"}.items():
        assert main(["config", f"key={name}"]) == 2
        assert said in capsys.readouterr().err


def test_a_verb_of_another_trainer_is_answered(capsys):
    for word, said in {
        "lm_eval": "fsdp-trainer evaluate",
        "preprocess": "fsdp-trainer prepare",
    }.items():
        assert main([word]) == 2
        assert said in capsys.readouterr().err
