"""The training methods (objective.name): what each reads, needs and refuses. Imports no torch.

Every other module asks the `MethodSpec` of the configured method, and compares no names. A new
method is an entry of METHODS and its keys here, a class in `fsdp_trainer/methods/`, and a file
`conf/objective/NAME.yaml`, so that `objective=NAME` selects it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fsdp_trainer.config.keys import key
from fsdp_trainer.errors import WHAT_GOES_TOGETHER

PACKAGE = "fsdp_trainer.methods."
LIKELIHOODS = ("dpo", "ipo", "simpo", "orpo")
"""The methods on pairs that use log-probabilities."""


@dataclass
class ObjectiveChoice:
    """The objective: the loss that is minimised."""

    name: str = key(
        "sft",
        "`sft`: cross-entropy of the supervised tokens (see the keys of loss); `dpo`, `ipo`, "
        "`simpo`, `orpo`: losses of preference pairs; `kto`: of answers labelled good or bad; "
        "`reward`: a reward model from pairs; `grpo`: the model's own answers to prompts, by "
        "their rewards; `distil`: a teacher's probabilities; `classify`: a classifier of labelled "
        "texts; `tag`: labels of words, or of steps; `embed`: embeddings of queries and documents; "
        "`rerank`: scores of a query's documents; or an objective that your own code registers "
        "(--import)",
    )
    beta: float = key(
        0.1,
        "methods on pairs, kto: scale of the difference of log-probabilities; with dpo, ipo and "
        "kto a higher one keeps the model nearer to the reference",
        above=0,
        used_by=(*LIKELIHOODS, "kto"),
    )
    label_smoothing: float = key(
        0.0,
        "dpo, simpo: assumed share of pairs whose labels are swapped; classify, tag: share of "
        "each label that is spread over all labels",
        minimum=0,
        maximum=0.5,
        used_by=("dpo", "simpo", "classify", "tag"),
    )
    sft_weight: float = key(
        0.0,
        "methods on pairs: coefficient of the chosen answer's mean loss of a token, which is added",
        minimum=0,
        used_by=LIKELIHOODS,
    )
    gamma: float = key(
        0.0,
        "simpo: target margin of the chosen answer's reward",
        minimum=0,
        used_by=("simpo",),
    )
    center_weight: float = key(
        0.0,
        "reward: coefficient of the square of the sum of a pair's scores, which centres scores "
        "at 0",
        minimum=0,
        used_by=("reward",),
    )
    desirable_weight: float = key(1.0, "kto: weight of good answers", minimum=0, used_by=("kto",))
    undesirable_weight: float = key(1.0, "kto: weight of bad answers", minimum=0, used_by=("kto",))
    mtp: float = key(
        0.0,
        "sft: weight of the loss of the model's MTP head, which predicts the token after the next "
        "one; it is trained with the model. 0: an export has the folder's head as it was",
        minimum=0,
        used_by=("sft",),
    )
    reference: str = key(
        "start",
        "dpo, ipo, kto, grpo with kl: the reference model. `start`: the model at the start of "
        "the run; a run or a Hugging Face folder, for grpo of any size and family with the same "
        "vocabulary, else of the same shape; `none`",
        used_by=("dpo", "ipo", "kto", "grpo"),
    )
    rewards: list[str | dict[str, Any]] = key(
        [],
        "rewards that score answers: a list of exact, number, regex, length, code, http, model "
        "or your own as FILE.py:NAME, each a name or a mapping with its settings, as [number, "
        "{name: length, max: 512}]",
    )
    environment: str | dict[str, Any] | None = key(
        None,
        "grpo: the environment of rollouts over several turns: calculator, python, search, user, "
        "endpoint (a program that calls the model), verifiers, openenv (a server), or a class of "
        "your own as FILE.py:NAME, whose code runs on every rank; with settings as {name: "
        "search, folder: documents}; null: an answer is one turn",
        used_by=("grpo",),
    )
    turns: int = key(
        8, "grpo: most turns of the model with an environment", minimum=1, used_by=("grpo",)
    )
    discount: float = key(
        1.0,
        "grpo: discount factor per turn, where an environment rewards each turn",
        minimum=0,
        maximum=1,
        used_by=("grpo",),
    )
    environment_seconds: float = key(
        60.0,
        "grpo: time limit of one call of an environment, after which its rollout has failed",
        above=0,
        used_by=("grpo",),
    )
    environment_output: int = key(
        8192,
        "grpo: most characters of an environment's turn; the rest is cut",
        minimum=1,
        used_by=("grpo",),
    )
    environments_at_once: int = key(
        32,
        "grpo: number of environments that a rank calls at the same time",
        minimum=1,
        used_by=("grpo",),
    )
    samples: int = key(
        8,
        "grpo: group size, the number of answers to each prompt that are compared with each other",
        minimum=2,
        used_by=("grpo",),
    )
    max_new_tokens: int = key(256, "grpo: most tokens of an answer", minimum=1, used_by=("grpo",))
    temperature: float = key(
        1.0,
        "grpo: temperature of sampling, also applied to the logits in training; distil: of both "
        "models' logits before they are compared; embed: divides similarities, 0.05 there",
        above=0,
        used_by=("grpo", "distil", "embed"),
    )
    answer_rows: int = key(
        64,
        "grpo: number of answers that a rank generates at the same time",
        minimum=1,
        used_by=("grpo",),
    )
    weighting: str = key(
        "dapo",
        "grpo: `dapo`: all tokens of a step have equal weight; `grpo`: all answers have, "
        "whatever their length; `dr_grpo`: all tokens, divided by the maximum length of an "
        "answer, and rewards are not divided by their deviation",
        choices=("dapo", "grpo", "dr_grpo"),
        used_by=("grpo",),
    )
    surrogate: str = key(
        "clip",
        "grpo: policy-gradient surrogate. `clip`: clipped ratio of each token's probability now "
        "and at sampling (PPO); `gspo`: of the whole answer's, a mean over its tokens, with "
        "weighting=grpo as in the paper; `cispo`: a clipped weight of the log-probability, so "
        "that every token has a gradient",
        choices=("clip", "gspo", "cispo"),
        used_by=("grpo",),
    )
    clip_low: float = key(
        0.2,
        "grpo: a token has no gradient once its probability has fallen by this share",
        minimum=0,
        used_by=("grpo",),
    )
    clip_high: float = key(
        0.2,
        "grpo: a token has no gradient once its probability has risen by this share; DAPO: 0.28",
        minimum=0,
        used_by=("grpo",),
    )
    kl: float = key(
        0.0,
        "grpo: coefficient of the KL divergence from objective.reference; 0: no reference",
        minimum=0,
        used_by=("grpo",),
    )
    updates: int = key(
        1,
        "grpo: number of optimizer steps on answers that were generated with the same weights, "
        "each with prompts of its own",
        minimum=1,
        used_by=("grpo",),
    )
    ahead: int = key(
        0,
        "grpo: off-policy steps, the number of updates by which rollouts may lag, a multiple of "
        "updates; generation then goes on during training, on launch.rollout_ranks or a server",
        minimum=0,
        used_by=("grpo",),
    )
    round_tokens: int | None = key(
        None,
        "grpo: partial rollouts: most tokens that one version of the weights adds to a rollout "
        "before its step is due; null: no limit",
        minimum=1,
        used_by=("grpo",),
    )
    unfinished: str = key(
        "continue",
        "grpo: rollouts with more than round_tokens: `continue`: newer weights go on with them; "
        "`drop`: they are left out of training",
        choices=("continue", "drop"),
        used_by=("grpo",),
    )
    importance_cap: float = key(
        2.0,
        "grpo: cap of the truncated importance ratio, a token's probability here over that where "
        "it was sampled",
        minimum=1,
        used_by=("grpo",),
    )
    mask_truncated: bool = key(
        False, "grpo: leave answers that max_new_tokens has cut out of the loss", used_by=("grpo",)
    )
    teacher: str | None = key(
        None,
        "distil: the teacher: a Hugging Face folder or hub id, a run, a checkpoint, or a PEFT "
        "adapter; of any size and family with the same vocabulary",
        used_by=("distil",),
    )
    share: float = key(
        0.5,
        "distil: share of the divergence from the teacher (times temperature²) in the loss; the "
        "rest is the loss of the data's own tokens",
        minimum=0,
        maximum=1,
        used_by=("distil",),
    )
    divergence: str = key(
        "forward",
        "distil: `forward`: KL(teacher ‖ student), which covers all that the teacher says; "
        "`reverse`: KL(student ‖ teacher), which concentrates on what it says most",
        choices=("forward", "reverse"),
        used_by=("distil",),
    )
    top_k: int | None = key(
        None,
        "distil: number of the teacher's likeliest tokens that are stored for each supervised "
        "token before the first step; then no teacher is in memory, and the probability of all "
        "other tokens is divided as the student's is; null: the teacher is in memory",
        minimum=1,
        used_by=("distil",),
    )
    server: str | None = key(
        None,
        "grpo: address of a vLLM server that answers prompts, as http://localhost:8000; null: "
        "the model answers on the training ranks",
        used_by=("grpo",),
    )
    server_folder: str | None = key(
        None,
        "folder from which the server reads weights: with adapter=lora one for adapters, null: "
        "the run's; else the folder of the model that the server was started with",
        used_by=("grpo",),
    )
    max_staleness: int = key(
        0,
        "number of optimizer steps that the server's weights may lag; with more, weights are "
        "sent less often",
        minimum=0,
        used_by=("grpo",),
    )

    labels: list[str] = key(
        [],
        "classify, tag: names of the labels, in the order of the head's scores; []: those of the "
        "head in model.init_from, else those in the data, sorted",
        used_by=("classify", "tag"),
    )
    problem: str = key(
        "auto",
        "classify: `single`: a text has one label of several; `multi`: any number of them;"
        " `regression`: a number, or several; `auto`: multi for lists, regression for fractions",
        choices=("auto", "single", "multi", "regression"),
        used_by=("classify",),
    )
    class_weights: str | dict[str, Any] | None = key(
        None,
        "classify, tag: how much the loss of a text, or word, with each label counts: {spam: 4}, "
        "others 1, or `balanced`: in inverse proportion to its number in the training data; null: "
        "all 1",
        used_by=("classify", "tag"),
    )

    comparison: str = key(
        "infonce",
        "embed: `infonce`: each query's document among all of a step; of data with scores:"
        " `cosent`: pairs that are more alike than others; `margin_mse`, `kl`: a teacher's scores",
        choices=("infonce", "cosent", "margin_mse", "kl"),
        used_by=("embed",),
    )
    ranking: str = key(
        "listwise",
        "rerank: `listwise`: the probabilities of a query's documents; `pairwise`: better ones"
        " above worse ones; `pointwise`: each document's score from 0 to 1",
        choices=("listwise", "pairwise", "pointwise"),
        used_by=("rerank",),
    )
    symmetric: bool = key(
        False,
        "embed: half of infonce is that of each document's query among all queries",
        used_by=("embed",),
    )
    false_negatives: float | None = key(
        None,
        "embed: documents that are more similar to a query than its own positive one, by more than"
        " this, are not compared with it; null: only those with the same text are not",
        used_by=("embed",),
    )
    widths: list[int] = key(
        [],
        "embed: the first so many numbers of an embedding are trained to be one by themselves"
        " (Matryoshka), as [1024, 256, 64]; []: the whole alone",
        minimum=1,
        used_by=("embed",),
    )
    pooling: str = key(
        "auto",
        "embed: the state that embeds a text: of its `last` token, of its first (`cls`), or the"
        " `mean` of all; `auto`: as the embedding model in model.init_from, else last",
        choices=("auto", "last", "mean", "cls"),
        used_by=("embed",),
    )

    @property
    def samples_elsewhere(self) -> bool:
        """True if tokens are sampled by other weights or other code than those that train."""
        return self.server is not None or self.ahead > 0

    @property
    def most_turns(self) -> int:
        return 1 if self.environment is None else self.turns

    @property
    def compares_answers(self) -> bool:
        """True if a token's loss depends on the other tokens of its answer."""
        is_gspo = self.method.samples and self.surrogate == "gspo" and self.updates > 1
        return self.method.compares_answers or is_gspo

    @property
    def method(self) -> "MethodSpec":
        return METHODS.get(self.name, METHODS["sft"])


class Refused(NamedTuple):
    """A value that a key cannot have with a method.

    is_wrong: True for such a value of the key. reason: of the message, in which `{name}` stands for
    the method's name.
    """

    key: str
    is_wrong: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class MethodSpec:
    """The needs of a training method: of the data, the model and the rest of the configuration.

    reads: the kind of data, one of those in data/records/preference_records.py or a format of
    OF_HEADS in record_formats.py.
    second: the role of a second, frozen model, which a run has unless its keys say otherwise.
    scores: True for a model that gives a text numbers, and writes none.
    extra_forwards: forwards of a step's rows without gradients, besides that of a second model.
    title: the method's name in reports. main_metric: the one of its own metrics that says most
    about progress; "" for a method without metrics of its own. build: MODULE:NAME of its class.
    """

    reads: Literal[
        "single", "pairs", "unpaired", "prompts", "labelled", "queries", "ranked", "tagged"
    ] = "single"
    second: Literal["teacher", "reference"] | None = None
    scores: bool = False
    extra_forwards: int = 0
    refused: tuple[Refused, ...] = ()
    title: str = ""
    main_metric: str = ""
    build: str = f"{PACKAGE}method:Method"

    @property
    def compares_answers(self) -> bool:
        """True if the loss is one of whole answers, and not a sum over tokens."""
        return self.reads not in ("single", "prompts", "tagged")

    @property
    def samples(self) -> bool:
        return self.reads == "prompts"


# --- what methods refuse --------------------------------------------------------------------------


def is_missing(value: Any) -> bool:
    return not value


def is_given(value: Any) -> bool:
    return value is not None


def is_divided(ranks: int) -> bool:
    return ranks > 1


def is_other_than(value: Any) -> Callable[[Any], bool]:
    return lambda given: given != value


def is_one(value: Any) -> Callable[[Any], bool]:
    return lambda given: given == value


SUPERVISED_ONLY = "only counts with  objective=sft"
LOSSES = (
    Refused("loss.label_smoothing", bool, SUPERVISED_ONLY),
    Refused("loss.z_loss", bool, SUPERVISED_ONLY),
)


def whole_answers(compared: str, smoothing: str) -> tuple[Refused, ...]:
    """Return what methods refuse whose loss needs complete answers in one micro-batch.

    compared: what the loss compares. smoothing: what to use in place of loss.label_smoothing.
    """
    comparison = f"objective={{name}} compares {compared}"
    return (
        Refused(
            "sharding.pipeline",
            is_divided,
            f"{comparison} in one micro-batch at once, which stages do not have:"
            f" {WHAT_GOES_TOGETHER}.\n"
            "Use  sharding.pipeline=1  and share blocks and rows with  sharding.tensor  or"
            "  sharding.context",
        ),
        Refused(
            "data.streaming",
            bool,
            f"{comparison}, which streams do not keep in one row.\nUse  data.streaming=false",
        ),
        Refused(
            "data.packing",
            is_one("stream"),
            f"{comparison}, and a stream cuts documents where a row is full.\n"
            "Use  data.packing=best_fit",
        ),
        Refused(
            "loss.label_smoothing",
            bool,
            f"spreads targets over the vocabulary, for  objective=sft .\n{smoothing}",
        ),
        Refused("loss.z_loss", bool, SUPERVISED_ONLY),
    )


OF_PAIRS = whole_answers("both answers of a pair", "Pairs have  objective.label_smoothing")
OF_TEXTS = whole_answers("whole texts", "Texts have  objective.label_smoothing")
OF_EMBEDDINGS = (
    *whole_answers("whole texts", "Use  0"),
    Refused(
        "replicas.method",
        is_other_than("none"),
        "all texts of a step are compared, which groups of ranks divide.\n"
        "Use  replicas.method=none",
    ),
)
OF_SCORES = (
    Refused(
        "train.sample_prompts",
        bool,
        "objective={name} trains a model that writes no text: leave it out",
    ),
    Refused(
        "train.evaluate_every",
        bool,
        "objective={name} trains a model that answers no tasks.\nUse  train.evaluate_every=null",
    ),
)
OF_LABELLED_ANSWERS = (
    *whole_answers("whole answers", "Use  0"),
    Refused(
        "objective.reference",
        is_one("none"),
        "objective={name} compares with a reference.\nUse  start  or a path",
    ),
    Refused(
        "replicas.method",
        is_other_than("none"),
        "the loss has a baseline from all rows of a step, which groups of ranks divide.\n"
        "Use  replicas.method=none",
    ),
)
OF_SAMPLED_ANSWERS = (
    Refused(
        "data.streaming",
        bool,
        "prompts are numbered, so that their answers can be made again.\nUse  data.streaming=false",
    ),
    Refused(
        "data.too_long",
        is_other_than("drop"),
        "a prompt is answered whole, or left out.\nUse  data.too_long=drop",
    ),
    Refused(
        "data.validation",
        is_given,
        "there is no loss on held-out prompts: the reward of each step is of new ones.\n"
        "Use  data.validation=null  and  evaluation.tasks=[…]",
    ),
    Refused(
        "sharding.pipeline",
        is_divided,
        f"answers are generated by whole models, not by stages: {WHAT_GOES_TOGETHER}.\n"
        "Use  sharding.pipeline=1",
    ),
    Refused(
        "replicas.method",
        is_other_than("none"),
        "groups of ranks would make the same answers, and not always to the last bit.\n"
        "Use  replicas.method=none",
    ),
    *LOSSES,
)
OF_STUDENTS = (
    Refused(
        "objective.teacher",
        is_missing,
        "is required: name the model to learn from, e.g.  objective.teacher=runs/large",
    ),
    Refused(
        "sharding.pipeline",
        is_divided,
        f"a teacher's blocks are not cut into stages: {WHAT_GOES_TOGETHER}.\n"
        "Use  sharding.pipeline=1",
    ),
    Refused(
        "sharding.expert",
        is_divided,
        f"a teacher's experts are not divided: {WHAT_GOES_TOGETHER}.\nUse  sharding.expert=1",
    ),
    *LOSSES,
)
ON_PAIRS = MethodSpec(
    "pairs",
    refused=OF_PAIRS,
    main_metric="reward_accuracy",
    build=f"{PACKAGE}preferences:PreferenceMethod",
)
METHODS: dict[str, MethodSpec] = {
    "sft": MethodSpec(),
    "dpo": replace(ON_PAIRS, title="DPO", second="reference"),
    "ipo": replace(ON_PAIRS, title="IPO", second="reference"),
    "simpo": replace(ON_PAIRS, title="SimPO"),
    "orpo": replace(ON_PAIRS, title="ORPO"),
    "kto": MethodSpec(
        "unpaired",
        "reference",
        extra_forwards=1,
        refused=OF_LABELLED_ANSWERS,
        title="KTO",
        main_metric="reward_margin",
        build=f"{PACKAGE}kto:KtoMethod",
    ),
    "reward": replace(ON_PAIRS, title="Reward model", scores=True, refused=(*OF_PAIRS, *OF_SCORES)),
    "grpo": MethodSpec(
        "prompts",
        "reference",
        refused=OF_SAMPLED_ANSWERS,
        title="GRPO",
        main_metric="reward",
        build=f"{PACKAGE}policy_gradient:PolicyGradientMethod",
    ),
    "distil": MethodSpec(
        second="teacher",
        refused=OF_STUDENTS,
        title="Distillation",
        main_metric="kl",
        build=f"{PACKAGE}distillation:DistillationMethod",
    ),
    "classify": MethodSpec(
        "labelled",
        scores=True,
        refused=(*OF_TEXTS, *OF_SCORES),
        title="Classification",
        main_metric="accuracy",
        build=f"{PACKAGE}classification:LabelMethod",
    ),
    "embed": MethodSpec(
        "queries",
        scores=True,
        extra_forwards=1,
        refused=(*OF_EMBEDDINGS, *OF_SCORES),
        title="Embeddings",
        main_metric="mrr",
        build=f"{PACKAGE}embedding:EmbeddingMethod",
    ),
    "tag": MethodSpec(
        "tagged",
        scores=True,
        refused=(*OF_TEXTS, *OF_SCORES),
        title="Labels of tokens",
        main_metric="f1_macro",
        build=f"{PACKAGE}tagging:TagMethod",
    ),
    "rerank": MethodSpec(
        "ranked",
        scores=True,
        refused=(*whole_answers("a query's documents", "Use  0"), *OF_SCORES),
        title="Reranking",
        main_metric="mrr",
        build=f"{PACKAGE}reranking:RankingMethod",
    ),
}


def method_in(configuration: dict[str, Any]) -> str | None:
    """Return the training method that a stored configuration names, also if it is not in METHODS.

    configuration: values by dotted key. Returns None if it has none.
    """
    name = configuration.get("objective.name")
    return None if name is None else str(name)


# --- the second model -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SecondModel:
    """A frozen model beside the one in training: a teacher, or a reference to stay near to.

    source: a path, a hub id, or `start`: the model that the run begins with. mode: `loaded`: in
    memory; `stored`: what it says about the data is computed before the first step, and stored;
    `base`: it is the model in training without its adapters.
    """

    role: Literal["teacher", "reference"]
    source: str
    mode: Literal["loaded", "stored", "base"]

    @property
    def key(self) -> str:
        return f"objective.{self.role}"

    @property
    def setting(self) -> str:
        return f"{self.key}={self.source}"

    @property
    def is_start(self) -> bool:
        return self.source == "start"

    @property
    def has_lists(self) -> bool:
        """True for a teacher whose likeliest tokens are stored, so that it is not in memory."""
        return self.role == "teacher" and self.mode == "stored"

    @property
    def is_separate(self) -> bool:
        """True if it is a model of its own, of any architecture with the same vocabulary.

        Otherwise its weights are read into the model in training, or are those of that model.
        """
        return self.role == "teacher" or self.mode == "loaded"


def second_model(choice: ObjectiveChoice, has_base: bool) -> SecondModel | None:
    """Return the second model of a run; None: it has none.

    has_base: True if the model without its adapters is the one that the run begins with.
    """
    role = choice.method.second
    if role == "teacher" and choice.teacher:
        return SecondModel(role, choice.teacher, "loaded" if choice.top_k is None else "stored")
    if role != "reference" or choice.reference == "none":
        return None
    if choice.method.samples and not choice.kl:
        return None
    if choice.reference == "start" and has_base:
        return SecondModel(role, choice.reference, "base")
    # answers that are sampled during training cannot be read before
    return SecondModel(role, choice.reference, "loaded" if choice.method.samples else "stored")
