"""The configurations of verbs: training's groups plus a node with the verb's name, or a few keys.

The first line of a configuration's docstring is printed by --help.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_trainer.config.data_files import TOKEN_FORMS
from fsdp_trainer.config.keys import key
from fsdp_trainer.config.parts.own_parts import usable_part, why_no_part
from fsdp_trainer.config.schema import Evaluation, TrainConfig
from fsdp_trainer.config.sweep_keys import CORES_A_GPU
from fsdp_trainer.errors import UserError

TRUSTED = "run Python code that comes with the model's folder: only if you trust it"


def text_or_json(text: str) -> Any:
    return key("text", text, choices=("text", "json"))


def number_format() -> Any:
    return key("float32", "number format of the weights", choices=("float32", "bfloat16"))


def device_of_verb() -> Any:
    text = "`auto`: cuda where there is one, else cpu"
    return key("auto", text, choices=("auto", "cpu", "cuda"))


def computed_by() -> Any:
    text = (
        "`transformers`: its class computes the model, as model.implementation; it also reads the"
        " images of a Gemma 3, which this program's own decoder does not"
    )
    return key("auto", text, choices=("auto", "native", "transformers"))


@dataclass
class Preview:
    """The rows that `preview` shows."""

    format: str = text_or_json(
        "`text` for people; `json`: one row a line, in the order and form of training"
    )
    rows: int = key(4, "number of rows to show", minimum=1)
    html: str | None = key(None, "file name of an HTML page with all of it")


@dataclass
class PreviewConfig(TrainConfig):
    """Shows what the model sees: tokens, the loss mask, how rows are packed."""

    preview: Preview = field(default_factory=Preview)


@dataclass
class Plan:
    """The device, the world and the data of a plan."""

    gpu: str | list[str] | None = key(
        None,
        "a GPU of the table: h100, h200, b200, a100, l40s, mi300x …, or several to compare: "
        "[h100,l40s]; null: the one in this machine",
    )
    memory_gib: float | None = key(
        None,
        "memory of a device in GiB, in place of the table's; suffices without plan.gpu, but then "
        "times need plan.tflops",
        above=0,
    )
    world_size: int | list[int] | None = key(
        None,
        "number of ranks, or several to compare: [8,16,64]; null: as many as launch would start, "
        "without a GPU 8",
        minimum=1,
    )
    format: str = text_or_json(
        "`text` for people; `json`: one object, of a list of GPUs a list of them"
    )
    search: bool = key(
        False,
        "list the layouts that fit, fastest first, with what to type: tensor, context, sharding,"
        " micro_rows, activation_checkpoint",
    )
    table: bool = key(
        False,
        "list the named models with the longest row that fits: all weights, LoRA, QLoRA",
    )
    rehearse: bool = key(
        True,
        "peak and messages are those of a step that is run on tensors without storage, of a search"
        " the fastest three; false: a lower bound of the peak, and planned messages",
    )
    expert_load: float = key(
        1.5,
        "with sharding.expert: rows of the busiest rank over the even number, for which peak and "
        "time are shown beside those of even routing",
        minimum=1,
    )
    efficiency: float | None = key(
        None,
        "share of the GPU's peak that matrix products reach; null: a range from published "
        "trainings",
        above=0,
        maximum=1,
    )
    tflops: float | None = key(
        None,
        "dense bfloat16 TFLOP/s of a device, in place of the table's; suffices with "
        "plan.memory_gib for a GPU that the table does not have",
        above=0,
    )
    network_gbps: float | None = key(
        None, "Gbit/s between nodes for each GPU; null: the table's, e.g. 400 for h100", above=0
    )
    groups_gbps: float | None = key(
        None,
        "with replicas.method: Gbit/s between groups of ranks for each GPU; null: as between nodes",
        above=0,
    )
    disk: float = key(2.0, "GB/s that each node writes to run.root", above=0)
    offload_disk: float | None = key(
        None,
        "optim.offload=disk: GB/s of reads and writes together of each node, as doctor measures; "
        "null: twice plan.disk",
        above=0,
    )
    image_share: float | None = key(
        None,
        "of a model for images: share of image tokens in a row; null: 0.5",
        minimum=0,
        maximum=1,
    )
    tokens: float | None = key(
        None,
        "number of tokens of the data, for the time of train.epochs, 1 without train.steps; "
        "null: train.steps decide",
        above=0,
    )


@dataclass
class PlanConfig(TrainConfig):
    """Estimates whether a run fits, how fast it would be, and what would make it fit.

    Needs no GPU, data, tokenizer or weights.
    """

    plan: Plan = field(default_factory=Plan)


@dataclass
class Rehearse:
    """The page that `rehearse` writes."""

    html: str | None = key(
        None, "also write a page with the memory of a step over time: a file name"
    )


@dataclass
class RehearseConfig(PlanConfig):
    """Runs one step of each kind of rank on tensors without storage, and compares it with the plan.

    Needs no GPU, data, tokenizer or weights.
    """

    rehearse: Rehearse = field(default_factory=Rehearse)


@dataclass
class Certified:
    """The folder that is proved in place of a run, and the form of the certificate."""

    source: str | None = key(
        None,
        "a folder of any tool instead of a run: an export, a merged model or an adapter of PEFT's",
    )
    reference: str | None = key(
        None, "with source: the model that the folder was made from, a Hugging Face folder or a run"
    )
    format: str = text_or_json(
        "`text` for people; `json`: one object with checks, not_proved and ok"
    )
    html: str | None = key(None, "also write the certificate as a page: a file name")


@dataclass
class ProveConfig(PlanConfig, Certified):
    """Trains a small copy of a run and compares it with plain programs, before the run is paid for.

    Takes the keys of a run, and of plan plan.world_size; it starts its own ranks on the CPU.
    """


@dataclass
class Prepare:
    """The part of the work that `prepare` does."""

    shard: str | None = key(
        None,
        "`i/n`: part i of n of the work, counted from 0, for n machines; the last to finish "
        "joins the parts; null: all of it",
    )


@dataclass
class PrepareConfig(TrainConfig):
    """Tokenizes ahead of training, into the cache that `train` with the same keys uses."""

    prepare: Prepare = field(default_factory=Prepare)
    out: str | None = key(
        None, "also write the tokens as files that other tools read, into this new folder"
    )
    form: str | None = key(
        None,
        "format of the files in `out`: nanoGPT's .bin, llm.c's (and modded-nanogpt's) shards,"
        " Megatron's .bin and .idx, or OLMo's flat .npy",
        choices=TOKEN_FORMS,
        part="token_form",
    )


@dataclass
class Doctor:
    """The measurements of `doctor`, and the form of its report."""

    format: str = text_or_json("`text` for people; `json`: one finding a line")
    measure: bool = key(
        True,
        "also measure devices, network and disk; false: only what `train` checks at its start, "
        "and the settings",
    )
    slow: float = key(
        0.7,
        "a device, link or disk is named as slow below this share of the median of its kind",
        above=0,
        maximum=1,
    )
    file_mib: int = key(
        256, "MiB that each node writes to the run's folder and reads back", minimum=1
    )


@dataclass
class DoctorConfig(TrainConfig):
    """Checks the machine or the cluster, and names nodes that differ from the others."""

    doctor: Doctor = field(default_factory=Doctor)


@dataclass
class LaunchFiles:
    """The kind of launch files, and their settings."""

    kind: str | None = key(
        None,
        "`slurm`: a batch script; `kubernetes`: a PyTorchJob; `trainjob`: a TrainJob of Kubeflow"
        " Trainer 2; `ray`: a job for a Ray cluster; `docker`: a command; `skypilot`: a task",
        choices=("slurm", "kubernetes", "trainjob", "ray", "docker", "skypilot"),
    )
    out: str | None = key(None, "the folder to write to; null: launch/NAME of the run")
    nodes: int = key(1, "number of nodes", minimum=1)
    gpus_per_node: int = key(
        8, "number of GPUs, and of ranks, of each node; 0: one rank without", minimum=0
    )
    gpu: str = key("H100", "skypilot: type of the GPUs, as in `sky show-gpus`")
    cpus_per_gpu: int = key(CORES_A_GPU, "slurm: cores", minimum=1)
    time: str = key("24h", "slurm: time after which the job is requeued, as `30m` or `24h`")
    partition: str | None = key(None, "slurm: the partition")
    account: str | None = key(None, "slurm: the account")
    setup: list[str] = key(
        [], "slurm, ray, skypilot: lines of bash before the run, e.g. ['source venv/bin/activate']"
    )
    restarts: int = key(3, "number of restarts of a failed run within the job", minimum=0)
    image: str = key(
        "fsdp_trainer",
        "kubernetes, trainjob, docker: the container's; examples/launch/Dockerfile builds one."
        " skypilot: one of a registry",
    )
    claim: str | None = key(
        "shared",
        "kubernetes, trainjob: the claim on storage that all pods write to; skypilot: the volume,"
        " null: none. It is /shared. ray: the folder, without its slash, that all nodes see",
    )


@dataclass
class LaunchFilesConfig(TrainConfig, LaunchFiles):
    """Writes ready files that start a run, on Slurm, Kubernetes, Ray, in Docker or a cloud."""


GGUF_NUMBERS = ("f32", "f16", "bf16", "q8_0")
"""Number formats of a GGUF file that are named as there."""


@dataclass
class ExportConfig:
    """Writes a run, a checkpoint or another tool's weights in Hugging Face's or another form."""

    source: str | None = key(
        None,
        "a run or a checkpoint; a PEFT folder, to merge it; weights of another tool; a whole model,"
        " for other forms than Hugging Face's",
    )
    trust_remote_code: bool = key(False, TRUSTED)
    out: str | None = key(
        None, "the folder to write, for GGUF the FILE.gguf; must not exist, or be empty"
    )
    dtype: str | None = key(
        None,
        "number format of the weights; null: as they were imported, else precision.param_dtype, for"
        " GGUF bf16; f16, bf16, f32 and q8_0 are GGUF's",
        choices=("float32", "bfloat16", "float16", *GGUF_NUMBERS),
    )
    form: str = key(
        "merged",
        "`merged`: a whole model, with a run's adapter merged into it; `adapter`: the adapter "
        "alone, as PEFT stores it; a whole model as `gguf` for llama.cpp, `torchtitan`'s "
        "checkpoint, `meta`'s files, or `compressed` for vLLM; `gguf_adapter`: the adapter alone "
        "for llama.cpp",
        choices=(
            "merged",
            "adapter",
            "gguf",
            "gguf_adapter",
            "torchtitan",
            "meta",
            "compressed",
        ),
        part="form",
    )
    quantization: str | None = key(
        None,
        "form=compressed: the numbers of the blocks' matrices: float8 or 8-bit integers, and inputs"
        " in as many bits, or 4-bit integers",
        choices=("fp8", "int8", "int4"),
    )
    merge_into: str = key(
        "original",
        "for an adapter with 4-bit weights: `original`: merged into the weights before"
        " quantisation; `trained`: into the decoded 4-bit weights",
        choices=("original", "trained"),
    )
    experts: str = key(
        "stacked",
        "of an adapter of experts: `stacked`: two tensors for all experts of a block, as peft"
        " keeps them with transformers 5; `separate`: two for each expert, as vLLM reads them",
        choices=("stacked", "separate"),
    )
    shard_gib: float = key(4.0, "largest safetensors file, in GiB", above=0)


@dataclass
class ConvertConfig:
    """Prints a recipe for another trainer's configuration file, with an answer to each setting."""

    source: str | None = key(
        None,
        "a file of axolotl, LLaMA-Factory, TRL, torchtune or accelerate (YAML), of"
        " TrainingArguments or DeepSpeed (JSON); a command line that starts a trainer, in quotes"
        " or a script of it; `-`: standard input",
    )
    world_size: int = key(
        1,
        "number of ranks that the recipe is for: a step has the rows of all of them; a command "
        "line may give another number",
        minimum=1,
    )


@dataclass
class VerifyConfig:
    """Checks that a checkpoint is complete; with hf, that both give the same logits."""

    source: str | None = key(None, "a run, a checkpoint or a PEFT folder")
    trust_remote_code: bool = key(False, TRUSTED)
    hf: str | None = key(
        None, "a Hugging Face folder, or an adapter of PEFT's, to compare logits with"
    )
    data: str | None = key(
        None,
        "a file to compute the loss on; for an adapter with 4-bit weights, merged in both ways",
    )


@dataclass
class GenerateConfig:
    """Answers a prompt or many at once, or chats at the terminal."""

    source: str | None = key(None, "a run, a checkpoint or a Hugging Face folder")
    trust_remote_code: bool = key(False, TRUSTED)
    implementation: str = computed_by()
    prompt: str | list[str] | None = key(
        None,
        'the user\'s text, or a list, e.g. \'["Who are you?","Count to 3."]\'; null: a chat at the '
        "terminal",
    )
    prompts: str | None = key(
        None, "a file of prompts: one a line, or .jsonl with a `prompt` in each line"
    )
    image: str | list[str] | None = key(
        None,
        "an image of the prompt, or a list: files or URLs, for a model that reads images; "
        "`<image>` in the prompt marks its place",
    )
    system: str | None = key(None, "a system turn before the prompt")
    raw: bool = key(False, "continue the prompt as plain text, without the chat template")
    max_tokens: int = key(256, "most tokens of an answer", minimum=1)
    temperature: float = key(0.0, "0: always the likeliest token", minimum=0)
    top_p: float = key(
        1.0, "sample from the smallest set of tokens with this probability", above=0, maximum=1
    )
    seed: int = key(0, "seed of the sampling", minimum=0)
    samples: int = key(
        1, "number of answers to each prompt; at temperature 0 all are the same", minimum=1
    )
    rows: int = key(32, "number of answers that are computed at the same time", minimum=1)
    mtp: bool = key(
        False,
        "also say how many tokens of greedy answers the model's MTP head drafts, so that a server "
        "accepts them",
    )
    format: str = text_or_json(
        "`text` for people; `json`: an object a line, with prompt, sample and text, and with mtp "
        "the numbers of drafted and of accepted tokens"
    )
    device: str = device_of_verb()
    dtype: str = number_format()


@dataclass
class ChatConfig:
    """Serves a page to chat on, and OpenAI's interface, for any model that `generate` reads."""

    source: str | None = key(
        None, "a run, a checkpoint, an adapter of PEFT's or a Hugging Face folder"
    )
    trust_remote_code: bool = key(False, TRUSTED)
    implementation: str = computed_by()
    host: str = key(
        "127.0.0.1", "address to listen at; other machines reach 0.0.0.0, which needs token"
    )
    port: int = key(8000, "port to listen at; 0: any that is free", minimum=0, maximum=65535)
    token: str | None = key(
        None,
        "API key that each request must bring; null: the environment variable "
        "FSDP_TRAINER_CHAT_TOKEN, which others on the machine do not see, else none is needed",
    )
    temperature: float = key(
        0.7, "of requests without one; 0: always the likeliest token", minimum=0
    )
    top_p: float = key(1.0, "of requests without one", above=0, maximum=1)
    max_tokens: int = key(512, "most tokens of an answer, of requests without a limit", minimum=1)
    rows: int = key(
        32, "number of answers that are computed at the same time; further ones wait", minimum=1
    )
    device: str = device_of_verb()
    dtype: str = number_format()


@dataclass
class Evaluate(Evaluation):
    """The model and the tasks of an evaluation."""

    source: str | None = key(
        None, "a run, a checkpoint, an adapter of PEFT's or a Hugging Face folder"
    )
    implementation: str = computed_by()
    template: str | None = key(
        None, "chat template, as data.template; null: the tokenizer's own, else plain"
    )
    sharded: bool | None = key(
        None,
        "the ranks hold parts of one model in place of whole copies; null: where a rank has no "
        "memory for the whole model",
    )
    format: str = text_or_json("`text`: a table; `json`: one object, {task: {metric: value}}")
    out: str | None = key(None, "also write the object to this file")
    mteb_data: str | None = key(
        None,
        "for tasks mteb:NAME: a folder with their data sets, each in a folder named as on the hub;"
        " null: they are fetched from there",
    )
    mined: str | None = key(
        None,
        "of tasks of retrieval: also write the queries with their documents and hard negatives to"
        " this JSONL file, which objective=embed reads; null: none are looked for",
    )
    negatives: int = key(8, "mined: hard negatives of each query, at most", minimum=1)
    hardest: float = key(
        0.95,
        "mined: documents with more than this share of the similarity of the query's own one may"
        " answer it too, and are left out",
        above=0,
    )
    dtype: str = number_format()


@dataclass
class EvaluateConfig(TrainConfig, Evaluate):
    """Evaluates a model on tasks of lm-evaluation-harness, on any number of ranks."""


@dataclass
class RewardsTrial:
    """The answers that are scored, and how they are shown."""

    answers: str | None = key(
        None,
        "a file of answers: a line for each row, or .jsonl with `prompt` and `text`, as generate"
        " format=json writes it; null: the data's own answers",
    )
    limit: int = key(1000, "score only this many rows of data.path", minimum=1)
    show: int = key(5, "number of answers with the lowest scores to show", minimum=0)
    format: str = text_or_json(
        "`text`: a table; `json`: one object, with all answers and their scores"
    )


@dataclass
class RewardsConfig(TrainConfig, RewardsTrial):
    """Scores answers by objective.rewards without training: the data's own, or a file's."""


@dataclass
class NewTokenizer:
    """The size, the kind and the place of a new tokenizer."""

    out: str | None = key(None, "the folder to write; must not exist or be empty")
    vocab_size: int = key(
        32768,
        "number of tokens in total: bytes, those of the chat template, and trained ones",
        minimum=1,
    )
    kind: str = key(
        "bpe",
        "`bpe`: byte-level, as GPT's, Llama 3's and Qwen's; `sentencepiece`: its BPE with bytes for"
        " rare characters, as Llama 2's",
        choices=("bpe", "sentencepiece"),
    )
    max_gib: float = key(
        2.0,
        "GiB of text to train on, taken evenly from all files; sentencepiece keeps it in memory",
        above=0,
    )
    compare: list[str] = key(
        [], "other tokenizers to measure on the same text: folders or files, as tokenizer.path"
    )
    format: str = text_or_json("`text`: a table; `json`: one object with all figures")


@dataclass
class TokenizerConfig(TrainConfig, NewTokenizer):
    """Trains a tokenizer on data, adds a chat template, and measures its bytes per token."""


@dataclass
class ReportConfig:
    """Reports on one run or many: a web page that needs no network, a summary in text."""

    source: str | list[str] | None = key(
        None, "a run, a sweep, a folder of runs, or a list of them, e.g. [runs/a,runs/b]"
    )
    out: str | None = key(
        None, "the page to write; null: report.html in the run's or the sweep's folder"
    )
    format: str = text_or_json(
        "`text`: the page, and a summary for people; `json`: the summary's figures, and a"
        " page only with out"
    )


@dataclass
class PushConfig:
    """Uploads an export with its model card to the Hugging Face hub."""

    source: str | None = key(
        None, "a run, of which hf/ or adapter/ is uploaded, or such a folder itself"
    )
    to: str | None = key(None, "the repository, org/name; it is created if there is none")
    private: bool = key(True, "create a repository that only its owners can read")
    base: str | None = key(
        None,
        "of an adapter: the base model's name on the hub, in place of a folder of this machine",
    )


@dataclass
class ConfigConfig:
    """Explains a key of the configuration."""

    schema: bool = key(
        False, "print a JSON Schema of recipes, with which editors complete and check them"
    )
    key: str | None = key(None, "the key to explain, e.g. optim.lr; null: all of them")


@dataclass
class RecipesConfig:
    """Lists the recipes and their hardware."""


@dataclass
class ChainConfig:
    """Makes a chat model from text in stages, from tokenizer to report card.

    Further words set keys of a stage, as pretrain.train.steps=100, or of all trainings, as
    all.launch.nproc_per_node=8.
    """

    text: str | list[str] | None = key(
        None, "text for the tokenizer and for pretraining, as data.path"
    )
    good: str | list[str] | None = key(
        None, "the best text, for mid-training; null: that stage is left out"
    )
    chats: str | list[str] | None = key(None, "conversations, for the last training")
    questions: str | None = key(
        None,
        "a .jsonl of conversations in `messages`: the card says how often the model gives the last"
        " answer word for word",
    )
    demo: bool = key(
        False, "generated texts and a tiny model, in place of the above: minutes on two cores"
    )
    depth: int = key(24, "model.depth of pretraining", minimum=1)
    vocab_size: int = key(32768, "tokens of the new tokenizer", minimum=1)
    tasks: str | list[str] = key(
        [], "tasks of lm-evaluation-harness for the model of each stage, as evaluation.tasks"
    )
    code: list[str] = key([], "Python files that the files of tasks may run, as evaluation.code")
    limit: int | None = key(
        None, "evaluate only this many items of each task; null: all", minimum=1
    )
    prompts: list[str] = key(
        [], "prompts that each stage's model continues at its end, to show its state"
    )
    price: float = key(3.0, "dollars for an hour of a GPU, to estimate the cost", minimum=0)
    name: str = key("chain", "the chain lives in root/name")
    root: str = key("runs", "folder that holds it")
    again: str | None = key(
        None,
        "delete the results of this stage and of those after it, and repeat them",
        choices=("tokenizer", "pretrain", "mid", "sft", "evaluation"),
    )


@dataclass
class QuickstartConfig:
    """Trains a small model on a generated task and tests it on held-out questions."""

    task: str = key(
        "words",
        "`words`: spells words backwards; `sums`: adds badly, then learns from rewards; `shapes`:"
        " names drawn shapes and their colours; `tools`: learns from rewards to call a calculator;"
        " `search`: learns embeddings that find the answers to questions",
        choices=("words", "sums", "shapes", "tools", "search"),
    )
    steps: int | None = key(None, "optimizer steps; null: the recipe's", minimum=1)
    root: str = key("runs", "folder that holds the run")
    questions: int = key(100, "held-out questions to ask before and after", minimum=1)


@dataclass
class LighthouseConfig:
    """Serves the place where groups of ranks find each other; replicas.lighthouse names it."""

    host: str = key(
        "0.0.0.0", "address to listen at; whoever reaches it can end groups: on a trusted network"
    )
    port: int = key(29510, "port to listen at; 0: any that is free", minimum=0, maximum=65535)
    patience: str = key(
        "60s",
        "how long groups that are ready wait for one that is alive but busy, as with a checkpoint",
    )
    silence: str = key("3s", "a group without a sign of life for this long has left")


class Verb(NamedTuple):
    """A verb: its configuration, and a function, or MODULE:NAME of one, that is called with it.

    needs: keys of `further` in `run_verb`, passed as further arguments. inputs: whether files that
    the configuration names must exist on this machine. starts_ranks: whether the function also runs
    in each rank that it starts; ranks receive the composed configuration from their parent.
    """

    config: type
    function: str | Callable[..., int]
    needs: tuple[str, ...] = ()
    inputs: bool = True
    starts_ranks: bool = False


VERBS = {
    "train": Verb(TrainConfig, "fsdp_trainer.run.verb:train", ("words",), starts_ranks=True),
    "plan": Verb(PlanConfig, "fsdp_trainer.apps.plan.verb:plan", inputs=False),
    "rehearse": Verb(RehearseConfig, "fsdp_trainer.apps.rehearse.verb:rehearse_verb", inputs=False),
    "preview": Verb(PreviewConfig, "fsdp_trainer.apps.preview.preview:preview"),
    "prepare": Verb(
        PrepareConfig, "fsdp_trainer.run.prepare_verb:prepare", ("words",), starts_ranks=True
    ),
    # no check of inputs: doctor itself reports on which node something is missing
    "doctor": Verb(
        DoctorConfig, "fsdp_trainer.apps.doctor.doctor:doctor", ("words",), False, starts_ranks=True
    ),
    "export": Verb(ExportConfig, "fsdp_trainer.checkpoint.exports.verb:export"),
    "verify": Verb(VerifyConfig, "fsdp_trainer.apps.verify:verify"),
    "prove": Verb(ProveConfig, "fsdp_trainer.apps.prove.verb:prove", ("words",)),
    "convert": Verb(ConvertConfig, "fsdp_trainer.interop.convert.verb:convert_verb"),
    "generate": Verb(GenerateConfig, "fsdp_trainer.apps.generate:generate"),
    "chat": Verb(ChatConfig, "fsdp_trainer.apps.chat.verb:chat"),
    "evaluate": Verb(
        EvaluateConfig,
        "fsdp_trainer.apps.evaluate.verb:evaluate",
        ("words",),
        False,
        starts_ranks=True,
    ),
    "rewards": Verb(RewardsConfig, "fsdp_trainer.apps.rewards:rewards"),
    "tokenizer": Verb(TokenizerConfig, "fsdp_trainer.apps.tokenizers.verb:tokenizer"),
    "report": Verb(ReportConfig, "fsdp_trainer.apps.report.verb:report"),
    "recipes": Verb(RecipesConfig, "fsdp_trainer.config.document:recipes", ("config_dir",)),
    "config": Verb(
        ConfigConfig, "fsdp_trainer.config.document:explain", ("explained", "config_dir")
    ),
    "chain": Verb(
        ChainConfig, "fsdp_trainer.apps.chain.verb:chain", ("words of stages", "config_dir")
    ),
    "quickstart": Verb(QuickstartConfig, "fsdp_trainer.apps.quickstart.quickstart:quickstart"),
    "launch-files": Verb(
        LaunchFilesConfig,
        "fsdp_trainer.apps.launch_files.launch_files:launch_files",
        ("words",),
        inputs=False,
    ),
    "lighthouse": Verb(LighthouseConfig, "fsdp_trainer.apps.lighthouse:lighthouse"),
    "push": Verb(PushConfig, "fsdp_trainer.apps.push:push"),
}
"""In the order of `--help`."""
PRIMARY: dict[str, type] = {name: verb.config for name, verb in VERBS.items()}
PROGRAMS_OWN = frozenset(VERBS)


def add_verb(word: str) -> str | None:
    """Make a verb of the user's own known, and return its name; None if no code is named so.

    word: the name of an installed one, or FILE.py:NAME. Raises UserError if it cannot be used.
    """
    if why_no_part("verb", word):
        return None
    verb = usable_part("verb", word, Verb)
    name = word.rpartition(":")[2]
    if name in VERBS:
        reason = f"there is a verb {name}: give yours another name"
        raise UserError("your own verb cannot be used", word, reason)
    VERBS[name], PRIMARY[name] = verb, verb.config
    return name


def forget_added_verbs() -> None:
    """Leave the program's own verbs: another command line in this process may add others."""
    for name in VERBS.keys() - PROGRAMS_OWN:
        del VERBS[name], PRIMARY[name]
