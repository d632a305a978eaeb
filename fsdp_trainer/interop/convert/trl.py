"""The meaning of settings of TRL's trainers, which differs from one trainer to another.

Which trainer a file is for follows from its settings: `num_generations` is GRPO's. A default that
is written out changes nothing, and is answered as what it is.
"""

from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.lengths import MICRO, accumulated, group_size
from fsdp_trainer.interop.convert.trainers import OWN_TOOL, TABLES, TRAINER, loss_types
from fsdp_trainer.interop.convert.translation import (
    SERVER,
    Answer,
    Rule,
    as_number,
    fixed,
    impossible,
    is_off,
    lacking,
    nothing,
    rules_of,
    same,
    sets,
    uses_server,
)

ANSWER = 512
"""TRL's own limit of an answer's tokens."""
ROW = 2048
"""Tokens of a row unless batch.seq_len says otherwise."""


def rule_of(name: str, file: ForeignFile) -> Rule | None:
    if name == TRAINER:
        return trainer
    section, _, leaf = name.rpartition(".")
    if section not in ("", "trl"):
        return None
    if file.method is None:
        return AMBIGUOUS.get(leaf) if file.tool == OWN_TOOL else None
    return OF_METHOD.get(file.method, {}).get(leaf)


def trainer(value: Any, file: ForeignFile) -> Answer:
    assert file.method is not None
    if file.method in ("grpo", "kto", "orpo", "reward", "simpo", "ipo"):
        return sets(objective=file.method)
    if file.method == "cpo":
        return of_cpo(file)
    if file.method == "dpo":
        name = loss_types(file.value("loss_type"))[:1]
        return sets(objective="ipo" if name == ["ipo"] else "dpo")
    if file.method == "sft":
        return nothing("objective=sft  is the default")
    if file.method == "distil":
        said = "answers that the student samples are not learnt from;  objective=distil"
        return impossible(f"{said}  learns from a teacher's probabilities of the data's own texts")
    return impossible(
        "there is  objective=sft , dpo, ipo, simpo, orpo, kto, reward, grpo  and  distil"
    )


# --- answers that are rewarded --------------------------------------------------------------------


def generation_steps(file: ForeignFile) -> int:
    """Return the micro-batches whose answers are made at the same time. Raises ValueError."""
    if steps := file.own("steps_per_generation"):
        return int(steps)
    answers = file.own("generation_batch_size")
    if answers is None:
        return accumulated(file)
    micro = int(file.value(*MICRO)) * file.ranks
    if int(answers) % micro:
        raise ValueError
    return int(answers) // micro


def prompts(value: Any, file: ForeignFile) -> Answer:
    """Return the prompts of a step: a micro-batch of TRL's counts answers."""
    ranks, samples = file.ranks, group_size(file)
    answers = int(value) * accumulated(file) * ranks
    note = (
        f"{counted(int(value), 'answer')} a device × {accumulated(file)} accumulated"
        f" × {counted(ranks, 'rank')}"
        f" (world_size={ranks}) ÷ {samples} to a prompt; how many answers share a forward is"
        " batch.micro_rows"
    )
    if answers % samples:
        return impossible(
            f"{answers} answers a step, with {counted(ranks, 'rank')}, are not whole groups of"
            f" {samples}:  batch.rows  counts prompts"
        )
    return sets(note, batch__rows=answers // samples)


def updates(value: Any, file: ForeignFile) -> Answer:
    if file.own("steps_per_generation") and file.own("generation_batch_size"):
        return impossible("TRL takes  steps_per_generation  or  generation_batch_size , not both")
    steps, times = generation_steps(file), accumulated(file)
    note = f"{steps} micro-batches of answers ÷ {times} accumulated"
    if steps <= times and times % steps == 0:
        return sets(note, objective__updates=1)
    if steps % times:
        return impossible(f"{steps} micro-batches of answers are not whole steps of {times}")
    note += "; each step has prompts of its own"
    return sets(note, objective__updates=steps // times)


def iterations(value: Any, file: ForeignFile) -> Answer:
    if int(value) == 1:
        return nothing("each answer is learnt from once")
    return impossible(
        f"each answer is learnt from once, not {value} times:  objective.updates=N  makes the"
        " answers of N steps at the same time, each from prompts of its own"
    )


def answer_length(value: Any, file: ForeignFile) -> Answer:
    if value is None:
        return impossible("an answer has a limit:  objective.max_new_tokens")
    prompt = file.own("max_prompt_length")
    whole = file.own("vllm_max_model_length", "max_model_length")
    length = int(value)
    key: dict[str, Any] = {"objective__max_new_tokens": length}
    if prompt or whole:
        note = "a row holds a prompt and its answer"
        return sets(note, **key, batch__seq_len=length + int(prompt) if prompt else int(whole))
    if 2 * length > ROW and not file.value("max_length", "sequence_len"):
        note = "prompts are not cut there; here a row has as much room for one as for its answer"
        return sets(note, **key, batch__seq_len=2 * length)
    return sets(**key)


def prompt_length(value: Any, file: ForeignFile) -> Answer:
    length = int(file.own("max_completion_length") or ANSWER)
    note = "longer prompts are left out, not cut at their beginning"
    return sets(note, batch__seq_len=int(value) + length)


def clip_high(value: Any, file: ForeignFile) -> Answer:
    """Return the upper limit of a token's ratio, which CISPO counts from 0."""
    if is_cispo(file):
        return sets("the limit itself there, its distance from 1 here",
                    objective__clip_high=float(value) - 1)  # fmt: skip
    return sets(objective__clip_high=value)


def is_cispo(file: ForeignFile) -> bool:
    """Return True for CISPO, whose only limit is epsilon_high."""
    return loss_types(file.own("loss_type"))[:1] == ["cispo"]


def clip_low(value: Any, file: ForeignFile) -> Answer:
    """Return both limits, of which TRL has one unless epsilon_high is set."""
    if file.own("epsilon_high") is not None:
        unused = nothing("only  epsilon_high  counts with  loss_type: cispo")
        return unused if is_cispo(file) else sets(objective__clip_low=value)
    if is_cispo(file):
        return impossible(NO_LIMIT)
    return sets(objective__clip_low=value, objective__clip_high=value)


NO_LIMIT = (
    "the limit of a weight is  epsilon_high  there, or  epsilon , and 1 + objective.clip_high  here"
)
NOT_DIVIDED = "objective.weighting=dr_grpo  alone does not divide rewards by their deviation"


def scaling(file: ForeignFile) -> str:
    value = file.own("scale_rewards")
    names = {"true": "group", "false": "none", "none": "none"}
    return "group" if value is None else names.get(str(value).lower(), str(value).lower())


def policy_loss(value: Any, file: ForeignFile) -> Answer:
    name = loss_types(value)[0]
    if name == "dr_grpo":
        note = "" if scaling(file) == "none" else f"TRL divides them by the {scaling(file)}'s too"
        note = note and f"rewards are not divided by their deviation here; {note}"
        return sets(note, objective__weighting="dr_grpo")
    if name in ("grpo", "dapo"):
        return sets(objective__weighting=name)
    if name == "cispo":
        note = NO_LIMIT if file.own("epsilon_high") is None else ""
        return sets(note, objective__surrogate="cispo", objective__weighting="dapo")
    if name == "bnpo":
        return impossible("objective.weighting=dapo  divides by all tokens of a step")
    return impossible(
        "there is  objective.weighting=dapo , grpo , dr_grpo  and"
        "  objective.surrogate=clip , gspo , cispo"
    )


def scale(value: Any, file: ForeignFile) -> Answer:
    by, weighting = scaling(file), loss_types(file.own("loss_type"))[:1]
    if by == "none" and weighting == ["dr_grpo"]:
        return sets(objective__weighting="dr_grpo")
    if by == "group" and weighting != ["dr_grpo"]:
        return nothing("the deviation of a prompt's rewards divides them here too")
    return impossible(f"rewards are divided by the deviation of their prompt's; {NOT_DIVIDED}")


def importance_level(value: Any, file: ForeignFile) -> Answer:
    """Return whose probability a ratio is of: a token's or an answer's."""
    if value == "token":
        return nothing("as here")
    if value == "sequence" and not is_cispo(file):
        return sets("with  objective.weighting=grpo  as in the paper", objective__surrogate="gspo")
    return impossible("ratios are of tokens, or of answers with  objective.surrogate=gspo")


def divergence(value: Any, file: ForeignFile) -> Answer:
    note = "the estimate without TRL's ratio before it (use_bias_correction_kl)"
    return sets("" if is_off(value) else note, objective__kl=value)


def reward_functions(value: Any, file: ForeignFile) -> Answer:
    names = value if isinstance(value, list) else [value]
    weights = file.own("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names) or not all("/" in str(name) for name in names):
        return impossible(
            "functions are not known by name:  objective.rewards=[number] , [exact] , [regex] …  or"
            " your own, registered with  --import"
        )
    models = [
        {"name": "model", "source": name, "weight": weight}
        for name, weight in zip(names, weights, strict=True)
    ]
    return sets("reward models", objective__rewards=models)


def reward_weights(value: Any, file: ForeignFile) -> Answer:
    names = file.own("reward_funcs")
    if names and reward_functions(names, file).sets:
        return nothing("in  objective.rewards")
    return impossible("a weight is a part of a reward:  objective.rewards=[{name: …, weight: …}]")


CORRECTION = "of a server's answers a token counts  objective.importance_cap  times at most"


def vllm(value: Any, file: ForeignFile) -> Answer:
    if is_off(value):
        return nothing("the training ranks make the answers")
    if address := file.own("vllm_server_base_url"):
        return sets(objective__server=str(address))
    if file.own("vllm_mode") == "server":
        host, port = file.own("vllm_server_host"), file.own("vllm_server_port")
        shown = "localhost" if host in (None, "0.0.0.0") else host
        return sets(objective__server=f"http://{shown}:{port or 8000}")
    return impossible("the training ranks make the answers; a server does with  objective.server")


def importance_cap(value: Any, file: ForeignFile) -> Answer:
    """Return the most that a token counts for being likelier here than on the server."""
    if not uses_server(file):
        return nothing(SERVER)
    if file.own("vllm_importance_sampling_mode") == "token_truncate" and float(value) >= 1:
        return sets(objective__importance_cap=value)
    return impossible(f"{CORRECTION}; TRL leaves out what exceeds it")


def top_k(value: Any, file: ForeignFile) -> Answer:
    said = "answers are sampled from all tokens, since others would bias the update"
    return nothing("off") if int(value) <= 0 else impossible(said)


def reward_model(value: Any, file: ForeignFile) -> Answer:
    return sets(objective__rewards=[{"name": "model", "source": str(value)}])


def bias_correction(value: Any, file: ForeignFile) -> Answer:
    if is_off(value) or is_off(file.own("beta") or 0):
        return nothing("as here")
    return impossible("the estimate of  objective.kl  has no ratio before it")


# --- preferences ----------------------------------------------------------------------------------


def of_cpo(file: ForeignFile) -> Answer:
    share = as_number(file.own("cpo_alpha"))
    name = (loss_types(file.own("loss_type")) or ["sigmoid"])[0]
    own = 1.0 if share is None else share
    if name == "simpo":
        return sets(objective="simpo", objective__sft_weight=own)
    if name not in ("sigmoid", "ipo"):
        return impossible("there is  objective=dpo , ipo  and  simpo")
    note = "CPO is DPO without a reference, with the chosen answer's own loss"
    chosen = "ipo" if name == "ipo" else "dpo"
    return sets(note, objective=chosen, objective__reference="none", objective__sft_weight=own)


OTHER_LOSS = "there is  objective=dpo  ( loss_type: sigmoid ), ipo, simpo, orpo  and  kto"


def preference_loss(value: Any, file: ForeignFile) -> Answer:
    names = loss_types(value)
    weights = map(float, file.own("loss_weights") or [1] * len(names))
    shares = dict(zip(names, weights, strict=True))
    share = shares.pop("sft", None)
    known = {("sigmoid", 1.0): "dpo", ("ipo", 1.0): "ipo"}
    chosen = known.get(next(iter(shares.items()), ("", 0.0)))
    if not chosen or len(shares) > 1:
        return impossible(OTHER_LOSS)
    if share is None:
        return sets(objective=chosen)
    note = "as a mean over each chosen answer's tokens; TRL's is one over the micro-batch's"
    return sets(note, objective=chosen, objective__sft_weight=share)


def smoothing(value: Any, file: ForeignFile) -> Answer:
    """Return the share of pairs taken to be exchanged."""
    if is_off(value):
        return nothing("off")
    if loss_types(file.own("loss_type")) not in ([], ["sigmoid"]):
        return impossible("only counts with  objective=dpo  and  simpo")
    note = "" if file.method == "cpo" else "TRL 1 ignores it with  loss_type: sigmoid ; before, not"
    return sets(note, objective__label_smoothing=value)


def cut_at(value: Any, file: ForeignFile) -> Answer:
    if value == "keep_start":
        return sets(data__too_long="truncate")
    return impossible("the end of a sample is cut, or the sample left out:  data.too_long")


def pair_length(value: Any, file: ForeignFile) -> Answer:
    """Return the tokens of a row, which holds two answers; TRL limits each of them."""
    note = f"{value} for each of the two answers in a row; what is longer is left out, not cut"
    return sets(note, batch__seq_len=2 * int(value))


def margin(value: Any, file: ForeignFile) -> Answer:
    if file.method == "cpo" and loss_types(file.own("loss_type"))[:1] != ["simpo"]:
        return nothing("only counts with  loss_type: simpo")
    return sets(objective__gamma=value)


def answer_share(value: Any, file: ForeignFile) -> Answer:
    if file.own("max_length") is None:
        return impossible("a sample is limited as a whole:  batch.seq_len")
    return nothing("a sample is limited as a whole, by  batch.seq_len")


def weights_of_losses(value: Any, file: ForeignFile) -> Answer:
    is_kept = preference_loss(file.own("loss_type"), file).sets
    return nothing("in  objective") if is_kept else impossible(OTHER_LOSS)


def divergence_type(value: Any, file: ForeignFile) -> Answer:
    if str(value).lower().endswith("reverse_kl"):
        return nothing("as here")
    return impossible("the divergence from the reference is the reverse KL")


def samples(value: Any, file: ForeignFile) -> Answer:
    """Return a prompt that is answered at each validation."""
    return nothing("off") if is_off(value) else sets(train__sample_prompts=["Hello"])


# --- supervised -----------------------------------------------------------------------------------


def learnt_turns(value: Any, file: ForeignFile) -> Answer:
    """Return which tokens are learnt: of chats TRL learns all, unless the file says otherwise."""
    if not {"prompt", "completion"} - file.columns:
        return sets("of the completion", data__loss_on="assistant")
    chosen = (file.own("assistant_only_loss"), file.own("completion_only_loss"))
    if any(one is not None and not is_off(one) for one in chosen):
        return sets(data__loss_on="assistant")
    if file.own("completion_only_loss") is not None or file.columns:
        return sets(data__loss_on="all")
    return impossible(
        "TRL then learns every token of a chat, and only the completion of a prompt:"
        "  data.loss_on=all  or  assistant"
    )


def packing_kind(value: Any, file: ForeignFile) -> Answer:
    if is_off(file.own("packing") or False):
        return nothing("only counts with  packing: true")
    kinds = {"bfd": "best_fit", "ffd": "best_fit", "wrapped": "stream"}
    if value in ("bfd_split", "wrapped"):
        return sets(data__packing=kinds.get(value, "best_fit"), data__too_long="split")
    if value not in kinds:
        return impossible("there is  data.packing=best_fit , stream  and  none")
    return sets(data__packing=kinds[value])


def text_column(value: Any, file: ForeignFile) -> Answer:
    if value == "text":
        return nothing("found by its name")
    return sets(data__fields={"text": str(value)}, data__format="text")


def packing_of_validation(value: Any, file: ForeignFile) -> Answer:
    if is_off(value) == is_off(file.own("packing") or False):
        return nothing("as  data.packing")
    return impossible("validation is packed as training is")


def template_file(value: Any, file: ForeignFile) -> Answer:
    if str(value).endswith(".jinja"):
        return sets(data__template=str(value))
    return impossible("name the template's file:  data.template=FILE.jinja")


PARTS = ("references", "rollouts", "pairs", "texts", "ambiguous")
RULES = {part: rules_of(part, globals()) for part in PARTS}
"""By part of settings.yaml, and by name."""
ROLLOUTS, PAIRS = (RULES[part] | RULES["references"] for part in ("rollouts", "pairs"))
AMBIGUOUS = RULES["ambiguous"] | RULES["references"]
ELSEWHERE = lacking(
    "belongs to a method that is not trained here; docs/reference/methods.md lists all"
)
OF_METHOD: dict[str, dict[str, Rule]] = {
    **{
        name: dict.fromkeys({*ROLLOUTS, *TABLES["signs"][name]}, ELSEWHERE)
        for name in ("rloo", "distil")
    },
    **dict.fromkeys(("ppo", "bco"), dict.fromkeys({*ROLLOUTS, *PAIRS}, ELSEWHERE)),
    "grpo": ROLLOUTS,
    "sft": RULES["texts"],
    "kto": PAIRS | {"loss_type": same("there is  objective=kto", "kto")},
    "cpo": PAIRS | {"loss_type": fixed("in  objective")},
    **dict.fromkeys(("dpo", "orpo", "simpo", "ipo", "reward"), PAIRS),
}
