"""The stages of a chain, and the command line words of each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_trainer.apps.chain.demo_texts import ANIMALS, DEMO
from fsdp_trainer.config.check import as_value
from fsdp_trainer.config.composing.compose import compose, config_flag
from fsdp_trainer.config.verbs import ChainConfig

ALL = "all"
"""Prefix of words for all trainings, in place of a stage's name: `all.optim.lr=1`."""
TINY_SIZES = {"depth": 2, "vocab_size": 448}
"""Keys of the verb `chain` that the demo changes if they have their default values."""
DEMO_PROMPTS = [f"What colour is the {ANIMALS[0]}?", f"Where does the {ANIMALS[1]} live?"]
HELD_OUT = 0.01
"""Share of each stage's rows that are held out for its validation loss."""


@dataclass
class Chain:
    """A chain: its configuration, its folder, and the overrides that the user typed, by stage.

    config_dir: folder of the user's own groups and recipes, used for all stages.
    """

    cfg: ChainConfig
    folder: Path
    words: dict[str, list[str]]
    config_dir: str | None = None

    def folder_of(self, stage: str) -> Path:
        return self.folder / stage

    @property
    def stages(self) -> list["ChainStage"]:
        return [stage for stage in STAGES if stage.name != "mid" or self.cfg.good]

    @property
    def trainings(self) -> list["ChainStage"]:
        return [stage for stage in self.stages if stage.verb == "train"]

    def words_of(self, stage: "ChainStage") -> list[str]:
        """Return the command line of a stage after its verb; later words override earlier ones."""
        groups = (ALL, stage.name) if stage.verb == "train" else (stage.name,)
        of_demo = [
            word for name in groups for word in DEMO["overrides"].get(name, []) if self.cfg.demo
        ]
        typed = [word for name in groups for word in self.words.get(name, [])]
        return without_earlier([*stage.words(self), *of_demo, *typed])

    def line_of(self, stage: "ChainStage") -> list[str]:
        return [*config_flag(self.config_dir), *self.words_of(stage)]

    def compose(self, stage: "ChainStage", inputs: bool = True) -> Any:
        """Return the configuration of a stage. Raises UserError. inputs: see config.compose."""
        return compose(stage.verb, self.words_of(stage), self.config_dir, inputs=inputs)


class ChainStage(NamedTuple):
    """A stage: its name, the verb that runs it ("" for none), and a function for its words."""

    name: str
    verb: str
    words: Callable[[Chain], list[str]]


def tokenizer_words(chain: Chain) -> list[str]:
    return as_words(
        {
            "data.path": chain.cfg.text,
            "out": str(chain.folder_of("tokenizer")),
            "vocab_size": chain.cfg.vocab_size,
            "run.root": str(chain.folder),
            "data.validation": HELD_OUT,
        }
    )


def pretrain_words(chain: Chain) -> list[str]:
    return [
        "+recipe=chain_depth",
        *training_words(chain, "pretrain", chain.cfg.text, raw=True),
        *as_words(
            {
                "model.depth": chain.cfg.depth,
                "model.vocab_size": chain.cfg.vocab_size,
                "tokenizer.path": str(chain.folder_of("tokenizer")),
            }
        ),
    ]


def mid_words(chain: Chain) -> list[str]:
    before = {"model.init_from": str(chain.folder_of("pretrain"))}
    words = training_words(chain, "mid", chain.cfg.good, raw=True)
    return ["+recipe=chain_mid", *words, *as_words(before)]


def sft_words(chain: Chain) -> list[str]:
    before = "mid" if chain.cfg.good else "pretrain"
    words = training_words(chain, "sft", chain.cfg.chats, raw=False)
    init_from = {"model.init_from": str(chain.folder_of(before))}
    return ["+recipe=chain_sft", *words, *as_words(init_from)]


def training_words(chain: Chain, name: str, data: Any, raw: bool) -> list[str]:
    """Return the words common to all trainings. raw: continue sample prompts as plain text."""
    words = {
        "run.root": str(chain.folder),
        "run.name": name,
        "data.path": data,
        "data.validation": HELD_OUT,
    }
    if chain.cfg.prompts:
        words |= {"train.sample_prompts": chain.cfg.prompts, "train.sample_raw": raw}
    return as_words(words)


STAGES = (
    ChainStage("tokenizer", "tokenizer", tokenizer_words),
    ChainStage("pretrain", "train", pretrain_words),
    ChainStage("mid", "train", mid_words),
    ChainStage("sft", "train", sft_words),
    ChainStage("evaluation", "", lambda chain: []),
)
"""All stages in order. A new one needs a function and a line here, and its verb in verb.WORK."""


def as_words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={as_value(value)}" for key, value in settings.items()]


def by_stage(words: list[str]) -> dict[str, list[str]]:
    """Group words by their prefix: `["mid.optim.lr=1"]` gives `{"mid": ["optim.lr=1"]}`."""
    parts: dict[str, list[str]] = {}
    for word in words:
        stage, _, override = word.partition(".")
        parts.setdefault(stage, []).append(override)
    return parts


def without_earlier(words: list[str]) -> list[str]:
    """Drop each word whose key a later word sets again, since a key may be set only once."""
    last = {word.partition("=")[0]: number for number, word in enumerate(words)}
    return [word for number, word in enumerate(words) if last[word.partition("=")[0]] == number]
