"""Groups and titles of the numbers in metrics.jsonl, for the report and the trackers.

A number is a general one (see GENERAL), or of the user's own metrics if `own_metrics` of its line
names it, or else of the run's training method. So the metrics of a new method need no entry here;
TITLES only has better titles than their names. Imports no torch.
"""

from collections.abc import Collection
from typing import NamedTuple

from fsdp_trainer.config.methods import METHODS

OWN = "own"
"""The group of the user's own metrics."""
OWN_METRICS = "own_metrics"
"""The entry of a line of metrics.jsonl that names those of the user's own metrics."""
VALIDATION = "validation_"
"""Beginning of the names of metrics that were computed on the validation data."""


class Title(NamedTuple):
    """The title of a metric's chart.

    line: label of the metric's line, if several metrics share a chart. log: whether a logarithmic
    axis is offered. is_share: whether it is between 0 and 1. is_smoothed: whether steps vary much.
    """

    text: str
    line: str = ""
    log: bool = False
    is_share: bool = False
    is_smoothed: bool = False


COURSE, SPEED, EXPERTS = "Course", "Speed and memory", "Experts"
GENERAL: dict[str, dict[str, Title]] = {
    COURSE: {
        "loss": Title("Loss", log=True, is_smoothed=True),
        "objective": Title("Objective (what was minimised)", log=True, is_smoothed=True),
        "mtp_loss": Title("Loss of the MTP head, two tokens ahead", log=True, is_smoothed=True),
        "loss_by_source/": Title("Loss by source", is_smoothed=True),
        "validation_loss": Title("Validation loss", log=True),
        "validation_bits_per_byte": Title("Validation, bits per byte"),
        "validation_loss_by_source/": Title("Validation loss by source"),
        "tasks/": Title("Tasks"),
        "lr": Title("Learning rate", log=True),
        "grad_norm": Title("Gradient norm, before clipping", log=True, is_smoothed=True),
        "loss_scale": Title("Loss scale, float16", log=True),
    },
    SPEED: {
        "tokens_per_second": Title("Tokens per second", is_smoothed=True),
        "step_seconds": Title("Seconds a step", log=True),
        "memory_gib": Title("Memory at the peak, GiB"),
        "mfu_palm": Title("MFU (6N + 12LHDT)"),
        "mfu_causal": Title("MFU, causal"),
    },
    EXPERTS: {
        "load_balancing_loss": Title("Load-balancing loss, weighted"),
        "router_z_loss": Title("Routers' z-loss, weighted"),
        "expert_load_max": Title("Largest load of an expert, over the even load"),
        "expert_load_entropy": Title("Entropy of the experts' load, 1: even"),
        "experts_unused": Title("Experts without a token"),
    },
}
"""Numbers that runs of any method have, by section. A name that ends with / is the beginning of
several numbers' names."""
WITHOUT_CURVE = {
    "step": "Steps so far",
    "time": "Seconds since 1970",
    "tokens": "Tokens so far, padding not counted",
    "supervised_tokens": "Supervised tokens so far",
    "phases/": "Seconds of rank 0 in each phase since the last write",
    "expert_load": "Load of each expert, as a digit or letter",
    OWN_METRICS: "Names of your own metrics",
}
"""What a line has without a curve: an axis of the others, or what has a picture of its own."""
REWARDS, LIKELIHOODS, LENGTHS = (
    "Rewards of the answers",
    "Log-probabilities of the answers, nats",
    "Tokens of an answer",
)
TITLES = {
    "reward_margin": Title("Reward margin"),
    "reward_accuracy": Title("Pairs whose chosen answer has the higher reward", is_share=True),
    "reward_chosen": Title(REWARDS, "chosen"),
    "reward_rejected": Title(REWARDS, "rejected"),
    "reward_good": Title(REWARDS, "good"),
    "reward_bad": Title(REWARDS, "bad"),
    "baseline": Title("Baseline: divergence from the reference, nats an answer"),
    "log_probability_chosen": Title(LIKELIHOODS, "chosen"),
    "log_probability_rejected": Title(LIKELIHOODS, "rejected"),
    "log_probability_good": Title(LIKELIHOODS, "good"),
    "log_probability_bad": Title(LIKELIHOODS, "bad"),
    "answer_tokens_chosen": Title(LENGTHS, "chosen"),
    "answer_tokens_rejected": Title(LENGTHS, "rejected"),
    "answer_tokens_good": Title(LENGTHS, "good"),
    "answer_tokens_bad": Title(LENGTHS, "bad"),
    "reward": Title("Reward, mean"),
    "reward/": Title("Each reward, mean"),
    "reward_std": Title("Reward, standard deviation"),
    "equal_groups": Title("Prompts with equal rewards", is_share=True),
    "answer_tokens": Title("Tokens of a sampled answer", "mean"),
    "answer_tokens_max": Title("Tokens of a sampled answer", "longest"),
    "truncated_share": Title("Answers that were cut", is_share=True),
    "kl": Title("Divergence from the reference, nats a token", log=True),
    "distil/kl": Title("Divergence from the teacher, nats a token", log=True),
    "entropy": Title("Entropy, estimated, nats a token"),
    "clip_share": Title("Tokens that are clipped", is_share=True),
    "sampler_kl": Title("Divergence of sampling from training, nats a token", log=True),
    "sampler_difference": Title("Log-probabilities, sampling against training", log=True),
    "turns": Title("Turns of a rollout", "mean"),
    "turns_max": Title("Turns of a rollout", "most"),
    "wrong_calls": Title("Tool calls that could not be read, by rollout"),
    "environment_seconds": Title("Seconds in the environment, by rollout"),
    "environment_failures": Title("Rollouts whose environment failed", is_share=True),
    "staleness": Title("Age of the answers' weights, steps", "mean"),
    "staleness_max": Title("Age of the answers' weights, steps", "oldest"),
    "dropped": Title("Unfinished rollouts that are dropped", is_share=True),
    "teacher_loss": Title("The teacher's loss on the same tokens"),
    "accuracy": Title("Texts whose labels are all right", is_share=True),
    "f1_macro": Title("F1 of the labels", "mean of the labels", is_share=True),
    "f1_micro": Title("F1 of the labels", "of all texts", is_share=True),
    "auc": Title("Area under the ROC curve", is_share=True),
    "entity_precision": Title("Entities", "precision", is_share=True),
    "entity_recall": Title("Entities", "recall", is_share=True),
    "entity_f1": Title("Entities", "F1", is_share=True),
    "entity_f1_macro": Title("Entities", "F1, mean of the kinds", is_share=True),
    "mrr": Title("Mean reciprocal rank of the right document", is_share=True),
    "recall_1": Title("Right documents among the first k", "k = 1", is_share=True),
    "recall_10": Title("Right documents among the first k", "k = 10", is_share=True),
    "ndcg_10": Title("NDCG of the first 10 documents", is_share=True),
    "absolute_error": Title("Mean absolute error"),
    "correlation": Title("Correlation with the data's numbers"),
}
"""Titles of the methods' metrics, in the order of their charts; METHOD/NAME is for one method."""
ORDER = {name: order for order, name in enumerate(TITLES)}


def general_title(name: str) -> Title | None:
    for titles in GENERAL.values():
        for known, title in titles.items():
            if name == known or is_below(name, known):
                return title
    return None


def group_of(name: str, method: str | None, own: Collection[str]) -> str:
    """Return the group of a number of metrics.jsonl: "" (general), OWN, or the method's name.

    name: as `records.numbers` gives it. method: its name; None: not known. own: the names in
    OWN_METRICS.
    """
    if any(name == metric or name.startswith(f"{metric}/") for metric in own):
        return OWN
    if general_title(name) or any(name == one or is_below(name, one) for one in WITHOUT_CURVE):
        return ""
    # older versions did not name the user's own metrics
    has_metrics = method is not None and (method not in METHODS or METHODS[method].main_metric)
    return str(method) if has_metrics else OWN


def is_below(name: str, beginning: str) -> bool:
    """Return True if `beginning` ends with / and the name begins with it."""
    return beginning.endswith("/") and name.startswith(beginning)


def group_title(group: str) -> str:
    if group == OWN:
        return "Your own metrics"
    return METHODS[group].title if group in METHODS else group


def title_of(name: str, group: str) -> Title:
    """Return the title of a metric of a method or of the user's own.

    name: without VALIDATION; as the beginning of several names it ends with /.
    """
    if group != OWN:
        for known in (f"{group}/{name}", name):
            if known in TITLES:
                return TITLES[known]
    words = name.rstrip("/").replace("_", " ").strip() or name
    return Title(words[:1].upper() + words[1:])


def order_of(name: str) -> tuple[int, bool, str]:
    """Return the sort key of a metric: the order of TITLES, then training before validation."""
    metric = name.removeprefix(VALIDATION)
    beginning, slash, _ = metric.partition("/")
    return ORDER.get(beginning + slash, len(ORDER)), metric != name, name


def tracked_name(name: str, method: str | None, own: Collection[str]) -> str:
    """Return the name of a number in a tracker, which groups charts by what precedes the slash.

    General numbers keep their names; others get their group: `dpo/reward_margin`. For parameters
    see group_of.
    """
    group = group_of(name, method, own)
    return f"{group}/{name}" if group else name
