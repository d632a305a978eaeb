"""Rules between keys of the objective, its data, its rewards and its second model.

See config/rules/rules.py. What a method refuses altogether is in its entry of config/methods.py.
"""

from pathlib import Path

from fsdp_trainer.config.check import Report, Violations, value_of
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.paths import find_checkpoint, has_weights
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import WHAT_GOES_TOGETHER
from fsdp_trainer.extensions import objective_names
from fsdp_trainer.rl.environments.known_environments import environment_problems
from fsdp_trainer.rl.rewards.table import entry_problems

OF_ENVIRONMENTS = (
    "turns",
    "discount",
    "environment_seconds",
    "environment_output",
    "environments_at_once",
)
"""Keys of objective that only have an effect with an environment."""


def registered_objective(cfg: TrainConfig, report: Report) -> Violations:
    """Check that the objective is built in or was registered by the user's code."""
    names = objective_names()
    if cfg.objective.name not in names:
        yield (
            "objective.name",
            f"is not one of: {', '.join(names)}.\nOne of your own is registered by a module:  "
            "--import my_module",
        )


def refused(cfg: TrainConfig, report: Report) -> Violations:
    choice = cfg.objective
    for key, is_wrong, reason in choice.method.refused:
        if is_wrong(value_of(cfg, key)):
            yield key, reason.replace("{name}", choice.name)


def mtp_head(cfg: TrainConfig, report: Report) -> Violations:
    if not cfg.objective.mtp:
        return
    without = "or  objective.mtp=0"
    for name in ("tensor", "context", "pipeline"):
        if getattr(cfg.sharding, name) > 1:
            reason = "an MTP head needs each token's next one and the states of whole rows"
            yield f"sharding.{name}", f"{reason}.\nUse  sharding.{name}=1  {without}"
    if cfg.adapter.name != "none":
        reason = "an MTP head is trained with all weights, and no server reads adapters of it"
        yield "objective.mtp", f"{reason}.\nUse  adapter=none  {without}"


def reference(cfg: TrainConfig, report: Report) -> Violations:
    second = cfg.second_model
    if second is None or second.is_separate or second.is_start:
        return
    folder = Path(second.source)
    if not (find_checkpoint(folder) or has_weights(folder)):
        yield (
            "objective.reference",
            "is neither a run nor a Hugging Face folder with weights.\n"
            "Use a path to one,  start , the model that the run begins with, or  none",
        )


def stored_teacher(cfg: TrainConfig, report: Report) -> Violations:
    """Check that stored lists of a teacher belong to stored tokens with an unchanging context."""
    if not cfg.second_model or not cfg.second_model.has_lists:
        return
    stored = f"objective.top_k={cfg.objective.top_k} stores a teacher's probabilities"
    online = "or, with the teacher in memory,  objective.top_k=null"
    if cfg.data.streaming:
        reason = f"{stored} next to the tokens, and a stream is not stored.\n"
        yield "data.streaming", f"{reason}Use  data.streaming=false  {online}"
    if cfg.data.packing == "stream":
        reason = f"{stored} once, and a stream cuts texts at other places in each epoch.\n"
        yield "data.packing", f"{reason}Use  data.packing=best_fit  {online}"


def rewards(cfg: TrainConfig, report: Report) -> Violations:
    """Check that entries of objective.rewards name existing rewards, with parts that these have."""
    choice = cfg.objective
    problems = list(entry_problems(choice.rewards))
    if problems:
        yield "objective.rewards", "\n".join(problems)
    if choice.method.samples and not choice.rewards and choice.environment is None:
        reason = "answers are trained on by their rewards.\n"
        yield "objective.rewards", reason + "Use  objective.rewards=[exact]  or  [number]"


def environment_of_answers(cfg: TrainConfig, report: Report) -> Violations:
    choice = cfg.objective
    if choice.environment is None:
        for name in OF_ENVIRONMENTS:
            if f"objective.{name}" in report.typed:
                yield f"objective.{name}", "only counts with  objective.environment=NAME"
        return
    problems = list(environment_problems(choice.environment))
    if problems:
        yield "objective.environment", "\n".join(problems)
    if choice.environment_seconds > parse_duration(cfg.launch.timeout):
        reason = f"other ranks wait for an environment, at most launch.timeout={cfg.launch.timeout}"
        yield "objective.environment_seconds", f"{reason}.\nUse less, or a longer launch.timeout"


def rounds_of_generation(cfg: TrainConfig, report: Report) -> Violations:
    choice = cfg.objective
    if not choice.method.samples:
        return
    if choice.ahead % choice.updates:
        reason = f"objective.updates={choice.updates} steps learn from rollouts begun together.\n"
        nearest = choice.updates * (1 + choice.ahead // choice.updates)
        yield "objective.ahead", f"{reason}Use a multiple of it, such as  objective.ahead={nearest}"
    if choice.round_tokens is None:
        if "objective.unfinished" in report.typed:
            yield "objective.unfinished", "only counts with  objective.round_tokens=N"
        return
    minimum = 2 * choice.updates
    if choice.unfinished == "continue" and choice.ahead < minimum:
        reason = "rollouts are finished by the weights that began them: none is continued.\n"
        use = f"Use  objective.ahead={minimum}  or more, or  objective.unfinished=drop"
        yield "objective.round_tokens", reason + use


def rollout_ranks(cfg: TrainConfig, report: Report) -> Violations:
    ranks, tensor = cfg.launch.rollout_ranks, cfg.sharding.tensor
    if not ranks:
        return
    name = "launch.rollout_ranks"
    if not cfg.objective.method.samples:
        yield name, "generate answers to learn from.\nOnly counts with  objective=grpo"
    elif cfg.objective.server is not None:
        use = "Use  objective.server=null  or  launch.rollout_ranks=0"
        yield name, f"and objective.server are both set, and both generate answers.\n{use}"
    elif cfg.replicas.method != "none":
        use = "Use  replicas.method=none  or  launch.rollout_ranks=0"
        yield name, f"serve one group of training ranks.\n{use}"
    elif ranks % tensor:
        use = f"Use  launch.rollout_ranks={tensor * (1 + ranks // tensor)}"
        yield name, f"must be a multiple of sharding.tensor={tensor}.\n{use}"


def prompts(cfg: TrainConfig, report: Report) -> Violations:
    if not cfg.objective.method.samples:
        return
    if "data.packing" in report.typed and cfg.data.packing != "none":
        yield "data.packing", "prompts are not packed, and answers always are.\nLeave it out"
    if cfg.batch.seq_len < cfg.objective.max_new_tokens + 16:
        needed = cfg.objective.max_new_tokens
        reason = f"a row holds a prompt and an answer of up to {needed:,} tokens.\n"
        yield "batch.seq_len", reason + f"Use  batch.seq_len={needed + max(needed, 16)}  or more"


def different_labels(cfg: TrainConfig, report: Report) -> Violations:
    labels = cfg.objective.labels
    twice = [label for label in dict.fromkeys(labels) if labels.count(label) > 1]
    if twice:
        yield "objective.labels", f"has {', '.join(twice)} more than once"


def prompts_of_texts(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.data.prompts and cfg.objective.method.reads != "queries":
        yield "data.prompts", "only counts with  objective=embed"
    elif {*(cfg.data.prompts or {})} - {"query", "document"}:
        yield "data.prompts", "has only  query  and  document"
    if "data.step_separator" in report.typed and cfg.objective.method.reads != "tagged":
        yield "data.step_separator", "only counts with  objective=tag"
    if not cfg.data.step_separator:
        yield "data.step_separator", "is empty, and its last token gets the label of a step"


def divergence(cfg: TrainConfig, report: Report) -> Violations:
    choice, second = cfg.objective, cfg.second_model
    if not choice.method.samples:
        return
    if choice.kl and choice.reference == "none":
        reason = "weighs the divergence from objective.reference, which is none.\n"
        yield "objective.kl", reason + "Use  objective.reference=start  or  objective.kl=0"
        return
    if "objective.reference" in report.typed and choice.reference != "none" and not choice.kl:
        reason = "only counts with a weight of the divergence from it.\nUse  objective.kl=0.01"
        yield "objective.reference", reason
    if second and second.mode == "loaded" and cfg.sharding.expert > 1:
        reason = f"the experts of a reference are not divided: {WHAT_GOES_TOGETHER}.\n"
        yield "sharding.expert", reason + "Use  sharding.expert=1  or  objective.kl=0"
