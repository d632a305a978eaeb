"""Combinations of method, model, optimizer and layout, each compared with one rank.

    make fuzz SEED=2 N=50       # the first 50 combinations of another seed
    make covering               # writes covering_array.json again, after a new value of a dimension

A combination has a value of each dimension of dimensions.yaml, in `TASK` and in `LAYOUT`. Its run
has all of them, the reference those of TASK only: one rank, one micro-batch a step, nothing
recomputed or offloaded.
Metrics of every step and exported weights must be equal within the tolerance of the optimizer.

A value may be written in several ways, which take turns, those of few ranks more often.
Combinations are chosen so that each pair of values of two dimensions occurs, if the program accepts
it; a refusal must be one message, without a traceback. Where a combination differs, both command
lines are printed, and those of the smallest combination with a difference.
"""

import math
import re
import shlex
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from string import Template
from typing import NamedTuple
from zlib import crc32

import inject
import torch
import yaml
from folders import copy_rows
from heads import write_classes, write_queries, write_tags
from image_models import make_image_folder, write_pictures
from pairs import write_labelled, write_pairs
from stored import tensors
from world import SMALL, RankFailed, Run, World, command, write_chats

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.trained_head import why_no_head
from fsdp_trainer.models.from_config.resolve import sharding_problems
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.planning.plan.plan_inputs import architecture

STEPS = 2
RANKS = "launch.nproc_per_node="
THEN = "then:"
"""Begins the words of a second layout, on which the run is resumed after its first step."""
BASE = [
    *SMALL, "batch.micro_rows=8", "schedule=constant", "tokenizer.path=demo:bytes",
    "checkpoint.export_hf=true", "launch.device=cpu",
]  # fmt: skip
WRITTEN = yaml.safe_load(Path(__file__).with_name("dimensions.yaml").read_text())


def dimensions(part):
    """Return the values of each dimension of a part of the file."""
    return {
        name: [
            tuple(Template(way).substitute(WRITTEN["names"]) for way in value) for value in values
        ]
        for name, values in WRITTEN[part].items()
    }


TASK, LAYOUT = dimensions("task"), dimensions("layout")
"""Words of the reference and of the run; and those of the run only. The first value of a dimension
is the simplest."""
WITH_A_FOLDER = ("model=auto", "model.init_from", "model.attention=", "model.vocab_multiple")
"""Beginnings of the words about the model that a run has which starts from a folder."""
DIMENSIONS = TASK | LAYOUT


# --- what may differ ------------------------------------------------------------------------------


class Tolerance(NamedTuple):
    """The largest differences from one rank.

    metrics: relative, of every step's metrics, beside `rounding`. weights: of a number, as a share
    of the largest one of its tensor. share: of numbers that may differ by more, up to `outliers`.
    """

    metrics: float = 2e-5
    weights: float = 1e-5
    share: float = 0.0
    outliers: float = 0.0
    rounding: float = 1e-5
    """Difference of any metric: of sums of log-probabilities, which may nearly cancel."""


TOLERANCES = {
    # Newton-Schulz amplifies the rounding of small singular values
    "muon": Tolerance(metrics=5e-4, weights=2e-4),
    "normuon": Tolerance(metrics=5e-4, weights=2e-4),
    # the sign of an average that is nearly 0 depends on rounding
    "lion": Tolerance(metrics=1e-3, share=0.01, outliers=0.1),
    # a number near the middle of two values of its format may be rounded to either
    "adamw_8bit": Tolerance(metrics=1e-3, weights=1e-3),
    "adamw_bf16": Tolerance(metrics=1e-3, weights=1e-3),
}
"""By the option of optim."""
NOT_COMPARED = re.compile(
    r"seconds|per_second|^time$|memory|phases|mfu|accuracy|f1|auc|recall|mrr|ndcg|entity"
)
"""Metrics that are measured, or count signs of differences that are 0 at the first step."""
SMALL_NUMBERS = 0.1
"""Tensors whose largest number is below this are compared as if it were this."""
NUDGES = 2
"""Number of references that begin with weights that differ by rounding, to see how much the task
amplifies it."""
AMPLIFIED = 4.0
"""How many times the largest difference of those references a difference may be."""


ROUNDED = Tolerance(metrics=0.1, weights=5e-2, share=0.02, outliers=0.3, rounding=2e-2)
"""Where each number is rounded to 8 bits: in bfloat16, and in quantised messages."""
DECISIVE = {"loss", "objective", "grad_norm", "validation_loss", "tokens", "supervised_tokens"}
"""Metrics that are compared there; others are differences of numbers that nearly cancel."""


def tolerance(combination):
    """Return the largest differences that a combination may have."""
    if combination["precision"] or "sharding.quantize" in combination["gather"]:
        return ROUNDED
    optim = combination["optim"].split()[0].removeprefix("optim=")
    return TOLERANCES.get(optim, Tolerance())


@dataclass
class Results:
    """The compared results of a run: metrics by step and name, weights by name."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]

    @classmethod
    def of(cls, run):
        lines = [dict(numbers(line)) for line in run.metrics]
        weights = tensors(run.folder / "hf") or tensors(run.folder / "adapter")
        return cls(lines, weights)


def numbers(line, prefix=""):
    """Yield the metrics of a line that are compared, also those inside lists and mappings."""
    for name, value in line.items():
        if NOT_COMPARED.search(name):
            continue
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from numbers({str(i): v for i, v in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)
        elif value is None:
            yield prefix + name, math.nan


class Difference(NamedTuple):
    """A difference as a multiple of what is allowed, and where it is."""

    ratio: float
    where: str


def differences(one, other, allowed):
    """Return the largest difference of two runs."""
    listed = [Difference(0.0, "")]
    if len(one.metrics) != len(other.metrics) or one.weights.keys() != other.weights.keys():
        return Difference(math.inf, "other steps or other names of weights")
    for step, (line, expected) in enumerate(zip(one.metrics, other.metrics, strict=True), 1):
        if not line.keys() >= expected.keys():  # a run that is resumed has validated before
            return Difference(math.inf, f"no metrics {sorted(expected.keys() - line.keys())}")
        for name, value in expected.items():
            if allowed is ROUNDED and name not in DECISIVE:
                continue
            ratio = abs(line[name] - value) / (allowed.metrics * abs(value) + allowed.rounding)
            if math.isnan(line[name]) or math.isnan(value):
                ratio = 0.0 if math.isnan(line[name]) == math.isnan(value) else math.inf
            text = f"{name} of step {step}: {line[name]:.8g}, expected {value:.8g}"
            listed.append(Difference(ratio, text))
    listed += differing_weights(one.weights, other.weights, allowed)
    return max(listed)


def differing_weights(one, other, allowed):
    """Yield the largest difference of each weight."""
    for name, expected in other.items():
        if one[name].shape != expected.shape or one[name].dtype != expected.dtype:
            yield Difference(math.inf, f"form of {name}")
            continue
        largest = max(expected.float().abs().max().item(), SMALL_NUMBERS)
        distance = (one[name].float() - expected.float()).abs().nan_to_num(math.inf) / largest
        worst = distance.max().item()
        text = f"{name} by {worst:.1e} of its largest number"
        usual = distance.flatten().sort().values
        usual = usual[: math.ceil(len(usual) * (1 - allowed.share))][-1].item()
        yield Difference(usual / allowed.weights, text)
        if allowed.share:
            yield Difference(worst / allowed.outliers, text)


# --- runs -----------------------------------------------------------------------------------------


class Refused(Exception):
    """The program refuses a combination, with one message. keys: those that it names."""

    def __init__(self, keys):
        super().__init__(keys)
        self.keys = keys


class Failed(Exception):
    """A run ended otherwise than it should. args[0] says how."""


def nudge(seed, trainer):
    """Change each weight by a few units of its last place, as another order of sums would."""
    for name, parameter in trainer.runner.model.named_parameters():
        if not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)[local_slice(parameter)]
        with torch.no_grad():
            local_part(parameter).mul_(1 + 3e-7 * noise)


@dataclass
class Fuzz:
    """Runs combinations in a pool of ranks.

    folder: runs are written into it. data: what they read, written by `write_inputs`. fault: a seam
    of every run on several ranks, to see whether it is found.
    """

    world: World
    folder: Path
    data: Path
    fault: Callable | None = None
    count: int = 0

    def write_inputs(self):
        """Write the data, models and teacher that words name as DATA."""
        self.data.mkdir(parents=True, exist_ok=True)
        write_chats(self.data / "chats.jsonl", 50)
        write_pairs(self.data / "pairs.jsonl", 20)
        write_labelled(self.data / "labelled.jsonl", 20)
        for name in ("weighted", "texts"):
            copy_rows(self.data / f"{name}.jsonl")
        write_shown(self.data, 20)
        for write in (write_classes, write_queries, write_tags):
            write(self.data)
        for kind in ("llava", "qwen3_vl"):
            make_image_folder(self.data / "vision" / kind, kind)
        teacher = [f"data.path={self.data / 'chats.jsonl'}", "run.seed=7", "train.steps=1"]
        self.start(teacher, self.data / "teacher")

    def words(self, combination, dimensions):
        """Return the words of these dimensions, without those of a second layout."""
        chosen = [
            combination[name] for name in dimensions if not combination[name].startswith(THEN)
        ]
        words = " ".join(chosen).split()
        words = [self.with_places(word) for word in words]
        if any(word.startswith("model.init_from") for word in words):
            words = [word for word in words if word.startswith(WITH_A_FOLDER) or not is_size(word)]
        return words

    def with_places(self, word):
        """Return a word in which DATA and HERE are folders."""
        return word.replace("DATA", str(self.data)).replace("HERE", str(self.folder))

    def check(self, combination):
        """Return the largest difference between a combination and its reference.

        Raises Refused, and Failed.
        """
        self.require_accepted(combination)
        reference = self.train(self.words(combination, TASK))
        if combination["start"]:
            shutil.rmtree(self.folder / "start", ignore_errors=True)
            self.start(self.words_of_start(combination), self.folder / "start")
            accepted.cache_clear()  # it has looked into that folder
        results = self.train(self.words(combination, DIMENSIONS), then=combination["resume"])
        allowed = tolerance(combination)
        largest = differences(results, reference, allowed)
        if largest.ratio <= 1 or largest.ratio == math.inf:
            return largest
        task = self.words(combination, TASK)
        amplified = 0.0
        for seed in range(NUDGES):
            nudged = self.train(task, seam=inject.with_trainer(partial(nudge, seed)))
            amplified = max(amplified, differences(nudged, reference, allowed).ratio)
        ratio = largest.ratio / max(1.0, AMPLIFIED * amplified)
        return Difference(
            ratio, f"{largest.where} (rounding makes {amplified:.2g} of what is allowed)"
        )

    def require_accepted(self, combination):
        """Raise Refused if the configuration is refused before any rank starts."""
        require_comparable(combination)
        words = self.words(combination | {"start": ""}, DIMENSIONS)
        accepted(*self.argv(words))
        if then := combination["resume"]:
            accepted(*self.argv(second_layout(words, then)))

    def timed(self, combination):
        """Return the largest difference, infinite if a run failed, and seconds. Raises Refused."""
        started = time.monotonic()
        try:
            largest = self.check(combination)
        except Failed as error:
            largest = Difference(math.inf, str(error))
        return largest, time.monotonic() - started

    def train(self, words, then="", seam=None):
        """Train, perhaps on a second layout after the first step; return the results."""
        self.count += 1
        folder = self.folder / f"run{self.count}"
        if then:
            self.start([*words, "train.steps=1"], folder)
            words = second_layout(words, then)
        self.start(words, folder, seam)
        results = Results.of(Run(folder))
        shutil.rmtree(folder)
        return results

    def start(self, words, folder, seam=None):
        """Train into a folder on as many ranks as the words say. Raises Refused, and Failed."""
        argv, ranks = self.argv(words)
        cfg = accepted(argv, ranks)
        cfg = replace(cfg, run=replace(cfg.run, root=str(folder.parent), name=folder.name))
        seam = self.fault if ranks > 1 else seam
        try:
            answers = self.world.call(ranks, command, list(argv), seam, cfg)
        except RankFailed as error:
            raise Failed(str(error)) from None
        codes = [answer.code for answer in answers]
        said = "\n".join(f"{answer.out}{answer.err}" for answer in answers)
        if codes == [2] * ranks:
            raise refusal(answers[0].err)
        if codes != [0] * ranks:
            raise Failed(f"exit codes {codes}\n{said}")

    def argv(self, words):
        """Return the command line of every rank, without its folder, and the number of ranks."""
        own = [word for word in words if not word.startswith(RANKS)]
        return ("train", *self.all_words([f"train.steps={STEPS}", *own])), ranks_of(words)

    def words_of_start(self, combination):
        """Return the words of a run that only exports the weights of the combination's model."""
        words = self.words(combination, TASK)
        sizes = [word for word in words if is_size(word) or word.startswith("precision")]
        return [*sizes, "objective=sft", f"data.path={self.data}/chats.jsonl", "train.steps=0"]

    def all_words(self, words):
        from_folder = any(word.startswith("model.init_from") for word in words)
        base = [word for word in BASE if not (from_folder and is_size(word))]
        if any("/vision/" in word for word in words):
            base.remove("tokenizer.path=demo:bytes")
        return [*base, f"data.cache={self.data / 'cache'}", *words]

    def command_lines(self, combination):
        """Return the command lines of a combination and its reference."""
        lines = []
        for dimensions, name in ((DIMENSIONS, "run"), (TASK, "reference")):
            words = self.all_words([*self.words(combination, dimensions), f"train.steps={STEPS}"])
            last = {word.partition("=")[0]: word for word in words}
            lines.append(f"  fsdp-trainer run.name={name} {shlex.join(last.values())}")
        if combination["start"]:
            place = [f"run.root={self.folder}", "run.name=start"]
            words = self.all_words([*self.words_of_start(combination), *place])
            lines.insert(0, f"  fsdp-trainer {shlex.join(words)}")
        if combination["resume"]:
            lines[-2] += (
                f"\n    with train.steps=1 first, and then with {combination['resume'][6:]}"
            )
        return "\n".join(lines)

    def smallest(self, combination):
        """Return a combination that still differs, with as many simplest values as can be."""
        for name in reversed(DIMENSIONS):
            simpler = combination | {name: SIMPLEST[name]}
            if simpler != combination and self.differs(simpler):
                combination = simpler
        return combination

    def differs(self, combination):
        try:
            return self.check(combination).ratio > 1
        except Refused:
            return False
        except Failed:
            return True


def is_size(word):
    """Return True for a word that decides the architecture, or how random weights are drawn."""
    return word.startswith("model")


def ranks_of(words):
    """Return the largest number of ranks in some words; 1 without one."""
    return max([1, *(int(w.removeprefix(RANKS)) for w in words if w.startswith(RANKS))])


def second_layout(words, then):
    """Return the words of a run that goes on with the layout of a resume."""
    own = [word for word in words if not word.startswith(("sharding", RANKS))]
    return own + then.removeprefix(THEN).split()


@lru_cache
def accepted(argv, ranks):
    """Return the configuration. Raises Refused if it is refused, by itself or for this model."""
    try:
        cfg = compose("train", list(argv[1:]))
        config, _ = architecture(cfg)
        problems = list(sharding_problems(cfg, config))
        assert ModelSetup.resolve(config, cfg.adapter, cfg.train.freeze).trained_numbers
    except UserError as error:
        raise Refused([problem.what.partition("=")[0] for problem in error.problems]) from None
    except Exception:
        raise Failed(traceback.format_exc()) from None
    if why_no_head(config, cfg.objective.method):
        raise Refused(["objective"])
    layout = Layout(cfg.sharding, ranks, cfg.batch)
    problems += filter(None, [layout.problem, layout.pipeline_problem])
    if problems:
        raise Refused([problem.what.partition("=")[0] for problem in problems])
    return cfg


def require_comparable(combination):
    """Raise Refused if some words count for nothing, or if rounding decides what is trained on."""
    if "model.init_from" in combination["method"]:
        void = ("family", "blocks", "embedding", "start")
        if any(combination[name] != SIMPLEST[name] for name in void):
            raise Refused(["model.init_from"])
        if combination["stream"]:
            raise Refused(["data.streaming"])
    if "grpo" in combination["method"] and tolerance(combination) is ROUNDED:
        raise Refused(["objective"])  # other answers would be sampled


def refusal(text):
    """Return what a message refuses. Raises Failed unless it is one message."""
    if "Traceback" in text or text.count("fsdp-trainer:") != 1:
        raise Failed(f"a refusal is not one message:\n{text}")
    refused = re.findall(r"^  ([a-z_]+(?:\.\w+)?)=", text, re.MULTILINE)
    return Refused(refused or re.findall(r"\b[a-z_]+\.[a-z_]+\b", text))


def write_shown(folder, count):
    """Write chats.jsonl's like with a picture in most of them, and the pictures beside it."""
    write_pictures(folder / "pictures", 5)
    copy_rows(folder / "images.jsonl", count=count)


SIMPLEST = {name: values[0][0] for name, values in DIMENSIONS.items()}
"""A combination: words by dimension."""


def title(combination):
    """Return a combination's words in short: without data, sizes and simplest values."""
    words = " ".join(
        value for name, value in combination.items() if value != SIMPLEST[name]
    ).split()
    short = [word for word in words if not word.startswith(("data.path", "model.", "batch.seq"))]
    family = combination["family"].split()[0].partition("=")[2]
    return " ".join([family, *short]).replace(RANKS, "ranks=")


def run_all(fuzz, combinations, say=print):
    """Check combinations and print a line for each; return reports of those that differ."""
    reports = []
    for number, combination in enumerate(combinations, 1):
        try:
            largest, seconds = fuzz.timed(combination)
        except Refused as refused:  # by its ranks, which know more than the configuration
            say(f"{number:4} refused {', '.join(refused.keys)}: {title(combination)}")
            continue
        differs = largest.ratio > 1
        verdict = "DIFFERS" if differs else "same"
        say(
            f"{number:4} {verdict} {largest.ratio:.1g} of what is allowed, {seconds:.1f} s: "
            f"{title(combination)}"
        )
        if differs:
            reports.append(f"{largest.where}\n{fuzz.command_lines(combination)}")
            say(reports[-1])
            smallest = fuzz.smallest(combination)
            say(f"and with as few words as possible:\n{fuzz.command_lines(smallest)}")
    return reports
