"""Names of other trainers: each is answered with what there is here, never with a similar spelling.

other_trainers.txt has the options of their main configuration files, and where they are from.
"""

import re
import tomllib
from pathlib import Path

import pytest
from answers import ANSWERS

from fsdp_trainer.cli import VERBS
from fsdp_trainer.config import names as names_module
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import options
from fsdp_trainer.config.composing.overrides import takes, why_unknown
from fsdp_trainer.config.names import known_elsewhere, meant_by, table
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.extensions import BUILT_IN

KEYS = flatten(TrainConfig)
GROUPS = options("train")
TEXT = (Path(__file__).with_name("other_trainers.txt")).read_text()
SECTIONS = re.findall(r"(?m)^\[(.+?)\].*\n((?:.+\n)+)", TEXT)
OPTIONS = {trainer: names.split() for trainer, names in SECTIONS}
OF_OTHER_VERBS = {
    key
    for verb in ("plan", "export", "generate", "chat", "evaluate", "tokenizer", "rewards", "push")
    for key in flatten(PRIMARY[verb])
} - KEYS.keys()
NAMES = Path(names_module.__file__).with_name("names.yaml")
NEGATIVE = re.compile(
    r"\b(this version|three|one of|all there is|is no|nothing (to|else)|no (other|part|levels)"
    r"|not (used|set))\b"
)
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
    exact, patterns = table().exact, table().patterns
    for name, answer in [*exact.items(), *patterns]:
        assert name not in GROUPS, name
        key, equals, value = answer.meant.partition("=")
        assert answer.sentence or key in KEYS or key in GROUPS, (name, key)
        if equals:
            assert value in GROUPS[key] if key in GROUPS else takes(KEYS[key], value), answer.meant
    for group, names in table().options.items():
        assert set(names.values()) <= set(GROUPS[group])


def test_what_a_sentence_says_to_type_exists():
    sentences = {a.sentence for _, a in [*table().exact.items(), *table().patterns]}
    for sentence in sentences:
        for key, value in re.findall(r"(?<![\w.=-])([a-z_]+(?:\.[a-z_]+)*)=([\w.]*)", sentence):
            if key == "key" or key in OF_OTHER_VERBS or key.startswith("hydra."):
                continue
            assert key in KEYS or value in GROUPS.get(key, ()), (key, sentence)


def test_what_a_sentence_says_not_to_exist_does_not():
    tree = load_yaml(NAMES.read_text())
    every = {key: f for verb in PRIMARY for key, f in flatten(PRIMARY[verb]).items()}
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    words = {*every, *GROUPS, *VERBS, *extras["project"]["optional-dependencies"]}
    words |= {str(choice) for f in every.values() for choice in f.metadata.get("choices") or ()}
    # a form of `prepare` has the name of another program
    built_in = [names for kind, names in BUILT_IN.items() if kind != "token_form"]
    words |= {word for names in [*GROUPS.values(), *built_in] for word in names}
    for entry in [*tree["missing"].values(), *tree["instead"]]:
        say = entry["say"]
        assert "without" in entry or "lists" in entry or not NEGATIVE.search(say), say
        for word in entry.get("without", "").split():
            there = [one for one in words if re.search(rf"(^|[._-]){word}([._-]|$)", one)]
            assert not there, (word, say)
        for name, besides in entry.get("lists", {}).items():
            of_leaf = [key for key in KEYS if key.endswith(f".{name}")]
            listed = GROUPS.get(name) or (of_leaf or KEYS[name].metadata["choices"])
            absent = [one for one in listed if not re.search(rf"\b{one}\b", say)]
            assert sorted(absent) == sorted(besides), (name, say)


def test_a_key_that_exists_is_named_before_what_other_trainers_mean():
    for name in ("moe_intermediate_size", "q_lora_rank", "normuon", "num_local_experts"):
        assert meant_by(name, KEYS, GROUPS).meant in KEYS


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


def test_what_does_not_exist_here_is_said_in_one_line(program):
    absent = ANSWERS["[names of other trainers]"]
    message = program(*absent, *DEMO, code=2)
    for typed, said in absent.items():
        paragraph = next(p for p in message.split("\n\n") if p.strip().startswith(typed))
        assert said in " ".join(paragraph.split()).replace("Did you mean ", "Did you mean  "), typed


@pytest.mark.parametrize("name", ["xylophone", "train.xylophone", "loggin_mode_x", "clearly"])
def test_nothing_is_suggested_for_a_name_like_no_other(name):
    assert "Did you mean" not in why_unknown(name, "1", KEYS, GROUPS)
