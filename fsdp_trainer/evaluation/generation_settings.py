"""The settings of a task's generation, which are those of transformers' `generate`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.config.check import convert, describe
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.generation.sampling import Sampling

DEFAULT_ANSWER = 256
"""Tokens that a task may generate by default, as in lm-evaluation-harness."""
DEFAULT_TOP_K = 50
"""Tokens that transformers samples from by default."""
TABLE = table_beside(__file__)
LENGTHS, NEUTRAL, OF_MODEL = TABLE["lengths"], TABLE["neutral"], TABLE["of model"]
TYPES = {"int": int, "float": float}
NUMBERS: dict[str, tuple[type, float, float]] = {
    name: (TYPES[kind], low, high) for name, (kind, low, high) in TABLE["numbers"].items()
}
COMPUTED = (*NUMBERS, "until", "do_sample")


@dataclass(frozen=True)
class GenerationSettings:
    """Settings by which a task's answers are generated. until: texts that end an answer."""

    sampling: Sampling
    until: list[str]


def settings_of_model(folder: Path) -> dict[str, Any]:
    """Return the settings of a model's generation_config.json that also hold for tasks.

    They include those that are not computed here.
    """
    file = folder / "generation_config.json"
    settings = read_object(file, "the model cannot be evaluated") if file.is_file() else {}
    of_length = ("max_length", "min_length")  # of prompt and answer; a task has its own
    known = [name for name in (*OF_MODEL, *NEUTRAL) if name not in of_length]
    return {name: settings[name] for name in known if settings.get(name) is not None}


def read_settings(task: str, options: Mapping[str, Any]) -> GenerationSettings:
    """Return what a task's generation_kwargs say. Raises UserError for what is not computed."""
    problems = [
        Problem(f"{task}: generation_kwargs: {name}={value}", reason)
        for name, value in options.items()
        if (reason := why_not(name, value))
    ]
    if problems:
        raise UserError("a task cannot be run", problems)
    lengths = {name: int(options[name]) for name in LENGTHS if options.get(name) is not None}
    if len(set(lengths.values())) > 1:
        shown = f"{task}: generation_kwargs: {'  '.join(lengths)}"
        raise UserError("a task cannot be run", shown, "say different lengths: leave one of them")
    until = options.get("until") or []
    return GenerationSettings(
        _sampling(options, next(iter(lengths.values()), DEFAULT_ANSWER)),
        [until] if isinstance(until, str) else list(until),
    )


def unused_settings(options: Mapping[str, Any]) -> str:
    does = options.get("do_sample")
    if does and options.get("temperature") is not None and not float(options["temperature"]):
        return "do_sample: true has no effect, since its temperature is 0"
    names = ("temperature", "top_k", "top_p", "min_p")
    idle = [name for name in names if float(options.get(name) or 0) not in (0, 1)]
    return f"{', '.join(idle)}: no effect with do_sample: false" if idle and does is False else ""


def why_not(name: str, value: Any) -> str | None:
    if name not in (*COMPUTED, *NEUTRAL):
        near = nearest(str(name), COMPUTED)
        return "there is no such setting here" + (f". Did you mean  {near} ?" if near else "")
    if value is None:
        return None
    if name in NUMBERS:
        return _wrong_number(value, *NUMBERS[name])
    if name == "until":
        texts = value if isinstance(value, list) else [value]
        are_texts = all(isinstance(text, str) for text in texts)
        return None if are_texts else "should be a text, or a list of texts, in quotes"
    if name == "do_sample":
        return None if isinstance(value, bool) else "should be true or false"
    if value in NEUTRAL[name]:
        return None
    return f"is not computed here: {TABLE['instead'].get(name, 'leave it out')}"


def _wrong_number(value: Any, kind: type, low: float, high: float) -> str | None:
    try:
        number = convert(value, kind)
    except (ValueError, OverflowError):
        return f"should be {describe(kind)}"
    return None if low <= number <= high else f"should be from {low:g} to {high:g}"


def _sampling(options: Mapping[str, Any], longest: int) -> Sampling:
    def value(name: str, default: float) -> Any:
        given = options.get(name)
        return default if given is None else convert(given, NUMBERS[name][0])

    # without do_sample a temperature decides, as in the harness
    does = options.get("do_sample")
    does = value("temperature", 0) > 0 if does is None else does
    return Sampling(
        max_tokens=longest,
        temperature=value("temperature", 1.0) if does else 0.0,
        top_p=value("top_p", 1.0) or 1e-9,
        seed=value("seed", 0),
        top_k=value("top_k", DEFAULT_TOP_K),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        presence_penalty=value("presence_penalty", 0.0),
        no_repeat_ngram=value("no_repeat_ngram_size", 0),
        min_tokens=max(value("min_new_tokens", 0), value("min_tokens", 0)),
    )
