"""The configuration: one dataclass per group, one documented field per key.

The text of a field is the comment in `conf/`, the line in `docs/configuration.md`, the answer of
`fsdp-trainer config key=…` and a part of every error about it. The docstring of a group's class is
in `docs/configuration.md` too. This file imports nothing heavy, so that mistakes are reported
before torch is imported.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_trainer.config.keys import key
from fsdp_trainer.config.methods import ObjectiveChoice, SecondModel, second_model
from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.config.parts.optimizers import Optim
from fsdp_trainer.config.parts.own_parts import BUILT_IN
from fsdp_trainer.config.parts.schedules import SHAPES

FORMATS = ("auto", *BUILT_IN["format"])
CORE_FILES = ("core.yaml", "eval_data", "eval_meta_data.csv")
"""Files that the folder of core_data must contain."""
NEEDS_NCCL = "is memory of NCCL's, which GPUs communicate by; gloo on a CPU has none"


@dataclass
class Run:
    """The folder of a run.

    It is the same on every rank and at every restart: it has no time stamp.
    """

    name: str | None = key(None, "the run lives in root/name; null: the recipe's name, else `run`")
    root: str = key("runs", "folder that holds the runs")
    seed: int = key(
        0, "the only source of randomness: weights at the start, data order, sampling", minimum=0
    )
    overwrite: bool = key(False, "with checkpoint.resume=never: delete what a used folder holds")


@dataclass
class Batch:
    """The size of one optimizer step, independent of the number of ranks."""

    seq_len: int = key(1024, "tokens in a packed row", minimum=16)
    rows: int = key(
        32, "rows per optimizer step, over the whole world; with objective=grpo prompts", minimum=1
    )
    micro_rows: int = key(
        1, "rows per rank and forward; the rest of a step is gradient accumulation", minimum=1
    )
    across_epochs: bool = key(
        True,
        "fill the last step of an epoch with rows of the next one; false: it has only the rows that"
        " are left, as in transformers",
    )


@dataclass
class Train:
    """The length of training, and the work between its steps."""

    steps: int | None = key(None, "total optimizer steps; null: train.epochs decides", minimum=0)
    epochs: int | None = key(
        None,
        "passes over the data, the last partial step included; null: train.steps decides"
        " (both null: 1 epoch)",
        minimum=1,
    )
    tokens_per_parameter: float = key(
        12.0,
        "with model.depth, which sets train.steps by it: tokens for each weight of the blocks'"
        " matrices and the head; Chinchilla: 20",
        above=0,
    )
    freeze: list[str] = key(
        [],
        "patterns of names of parameters that are frozen, as `model.layers.[0-3].*`: they have "
        "no gradient and no optimizer state and are in no checkpoint; of a model that reads "
        "images also its parts: vision, projector, language",
    )
    validate_every: int | float | None = key(
        None,
        "optimizer steps between validations, and between samples; below 1: this share of all"
        " steps, rounded up; null: only at the end",
        above=0,
    )
    evaluate_every: int | None = key(
        None,
        "optimizer steps between evaluations on evaluation.tasks; null: only at the end",
        minimum=1,
    )
    validate_first: bool | None = key(
        None,
        "validate before the first step too: how good the model was; null: where there is"
        " data.validation",
    )
    sample_prompts: list[str] = key(
        [], "prompts that the model answers at each validation; the answers go to samples.jsonl"
    )
    sample_tokens: int = key(
        64,
        "most tokens of such an answer",
        minimum=1,
    )
    sample_raw: bool = key(
        False, "continue sample_prompts as plain text, without the chat template"
    )
    time_limit: str | None = key(
        None,
        "commit a checkpoint and exit 75 before this time is over, estimated from the longest "
        "step and save: `90s`, `30m`, `1h30m` or plain seconds; null: no limit",
    )
    early_stop: int | None = key(
        None,
        "end after this many validations in a row without a lower loss, with exit code 0;"
        " null: train to the end",
        minimum=1,
    )
    early_stop_delta: float = key(
        0.0, "how much lower a validation loss must be to count for train.early_stop", minimum=0
    )
    gc_every: int | None = key(
        100,
        "optimizer steps between Python's garbage collections, so that all ranks pause in the "
        "same step; null: automatic garbage collection",
        minimum=1,
    )
    max_skipped: int = key(
        10,
        "steps skipped in a row for a non-finite loss or gradient before the run stops with"
        " exit code 1",
        minimum=1,
    )
    on_spike: str = key(
        "warn",
        "what to do on a spike of the loss or the gradient norm. `warn`; `skip`: no update in "
        "that step; `rewind`: back to the checkpoint before, then on without these rows",
        choices=("ignore", "warn", "skip", "rewind"),
    )
    spike_score: float = key(
        10.0,
        "a spike is this many robust standard deviations (median absolute deviation) above the "
        "median of the previous steps",
        above=0,
    )
    spike_window: int = key(
        128,
        "number of previous steps that a step is compared with; detection starts when half of "
        "them exist",
        minimum=4,
    )
    rewind_margin: int = key(
        1,
        "on_spike=rewind: number of steps before and after the spike whose rows are left out "
        "too; PaLM: 100",
        minimum=0,
    )
    max_rewinds: int = key(
        5, "on_spike=rewind: more spikes than this stop the run with exit code 1", minimum=1
    )
    check_every: int | None = key(
        None,
        "look for silent data corruption every so many steps: compute a micro-batch twice,"
        " compare copies of weights bit by bit, also before a checkpoint; null: never",
        minimum=1,
    )
    deterministic: bool = key(
        False,
        "on a GPU, use kernels with the same result every time, so that a resumed run ends with "
        "bitwise the same weights; slower, above all attention's backward",
    )


@dataclass
class Loss:
    """The minimised sum: cross-entropy, and what may be added.

    `loss` in metrics.jsonl stays the plain negative log-likelihood.
    """

    label_smoothing: float = key(
        0.0, "share of each target that is spread evenly over the vocabulary", minimum=0, maximum=1
    )
    z_loss: float = key(
        0.0,
        "coefficient of the z-loss, logsumexp² of each token's logits, which keeps them from "
        "drifting; PaLM: 1e-4",
        minimum=0,
    )
    load_balancing: float = key(
        0.0,
        "coefficient of the load-balancing auxiliary loss of a mixture of experts, see "
        "docs/experts.md; Mixtral: 0.001, OLMoE: 0.01",
        minimum=0,
    )
    router_z_loss: float = key(
        0.0,
        "coefficient of the z-loss of the routers of a mixture of experts; ST-MoE: 1e-3",
        minimum=0,
    )
    bias_update_speed: float = key(
        0.0,
        "deepseek_v3: step size of the routers' bias, which balances the experts without an "
        "auxiliary loss; DeepSeek-V3: 0.001",
        minimum=0,
    )
    chunk_mib: int | None = key(
        None,
        "MiB of logits that exist at once; less memory makes smaller matrix products; null: the "
        "logits of 256 tokens on a CPU, of 4096 on a GPU, there of 2048 in float32",
        minimum=1,
    )


@dataclass
class Evaluation:
    """The tasks that the model in training is evaluated on, as the verb evaluate has them."""

    tasks: str | list[str] = key(
        [],
        "names of lm-evaluation-harness's tasks, or paths of their YAML files or of folders with "
        "some; paths of YAML files with an environment; `core`: DCLM's 22 tasks; of models that"
        " embed or rank texts: files of queries with documents, folders in BEIR's form, mteb:NAME",
    )
    code: list[str] = key(
        [],
        "Python files that the files of tasks may run, as FILE.py; only allowed on the command "
        "line",
    )
    core_data: str | None = key(
        None, "for the task `core`: a folder with core.yaml, eval_data/ and eval_meta_data.csv"
    )
    limit: int | None = key(
        None, "evaluate only this many items of each task; null: all", minimum=1
    )
    fewshot: int | None = key(
        None, "number of examples before each question; null: as the task says", minimum=0
    )
    chat: bool = key(False, "ask through the chat template, with the examples as earlier turns")
    rows: int = key(32, "number of requests that a rank computes at the same time", minimum=1)


@dataclass
class Profile:
    """Records of where time and memory go, for a few steps.

    A table of the steps' phases, and traces for Perfetto or chrome://tracing, in the run's profile/
    folder.
    """

    steps: str | None = key(
        None,
        "the optimizer steps to record, both ends included: `10..12`, or one; the first steps "
        "are slower than the rest; null: none",
    )
    ranks: list[int] | None = key(
        None, "the ranks that write a profile; null: those of the first node, 8 at most", minimum=0
    )
    memory: bool = key(
        False,
        "on a GPU also write a snapshot of every allocation, for pytorch.org/memory_viz; without "
        "profile.steps: of the whole run, written when it runs out of memory",
    )


@dataclass
class Model:
    """The architecture, and where its weights come from.

    Keys left null come from init_from's config.json, else from the tiny model.
    """

    name: str = key(
        "auto",
        "label of the named size; `auto`: the architecture of init_from, or of the tiny model "
        "without it",
    )
    init_from: str | None = key(
        None,
        "weights at the start: a Hugging Face folder or hub id, a run or a checkpoint, weights of"
        " another tool (docs/formats.md); null: random",
    )
    implementation: str = key(
        "auto",
        "`native`: this decoder; `transformers`: transformers' own class (extra hf); `auto`: this"
        " decoder where it knows the model_type of init_from, else transformers' class",
        choices=("auto", "native", "transformers"),
    )
    trust_remote_code: bool = key(
        False, "run Python code that comes with the folder of init_from: only if you trust it"
    )
    depth: int | None = key(
        None,
        "number of blocks of a new model; width, heads, batch, steps and optim.lr follow by "
        "nanochat's rules unless they are set; null: nothing follows",
        minimum=1,
    )
    family: str | None = key(
        None,
        "model family, as model_type in config.json",
        choices=tuple(FAMILIES),
        part="family",
    )
    vocab_size: int | None = key(
        None,
        "rows of the embedding; null: the tokenizer's number of tokens (random weights) or "
        "config.json's; more than config.json's: the new rows start as the mean of the others",
        minimum=1,
    )
    vocab_multiple: int = key(
        1,
        "pad the embedding's rows to a multiple of this, e.g. 64 × ranks, for even shards; the "
        "padding is in no loss and no export",
        minimum=1,
    )
    hidden_size: int | None = key(None, "width of the residual stream", minimum=1)
    intermediate_size: int | None = key(None, "width of the feed-forward layer", minimum=1)
    num_hidden_layers: int | None = key(None, "number of decoder blocks", minimum=1)
    num_attention_heads: int | None = key(None, "number of query heads", minimum=1)
    num_key_value_heads: int | None = key(
        None,
        "number of key and value heads; fewer than query heads is grouped-query attention",
        minimum=1,
    )
    head_dim: int | None = key(
        None, "channels per head; null: hidden_size / num_attention_heads", minimum=2
    )
    max_position_embeddings: int | None = key(
        None, "longest context in tokens; batch.seq_len may not exceed it", minimum=1
    )
    attention_direction: str | None = key(
        None,
        "`bidirectional`: tokens also attend to later ones of their text, of a model whose head"
        " gives texts numbers; null: as init_from's config.json, else `causal`",
        choices=("causal", "bidirectional"),
    )
    rope_theta: float | None = key(None, "base of the rotary position embedding", above=0)
    rope_scaling: dict[str, Any] | None = key(
        None,
        "longer context: {rope_type: llama3, factor, low_freq_factor, high_freq_factor,"
        " original_max_position_embeddings}, {rope_type: yarn, factor,"
        " original_max_position_embeddings}, linear or longrope",
    )
    rope_local_theta: float | None = key(
        None, "gemma3_text: base of the rotary embedding in blocks with a window", above=0
    )
    partial_rotary_factor: float | None = key(
        None, "share of each head's channels that is rotated; null: all", above=0, maximum=1
    )
    rms_norm_eps: float | None = key(None, "epsilon of RMSNorm, added to the mean square", above=0)
    tie_word_embeddings: bool | None = key(None, "embedding and output head share one matrix")
    attention_bias: bool | None = key(
        None, "query, key, value and output projections have a bias; qwen2's first three always do"
    )
    mlp_bias: bool | None = key(None, "llama: feed-forward projections have a bias")
    sliding_window: int | None = key(
        None,
        "number of tokens that a token attends to, itself included, in the blocks with a window; "
        "null: all before it",
        minimum=1,
    )
    query_pre_attn_scalar: float | None = key(
        None, "gemma: attention scores are divided by the root of this; null: head_dim", above=0
    )
    attn_logit_softcapping: float | None = key(
        None, "gemma2: soft limit on attention scores", above=0
    )
    final_logit_softcapping: float | None = key(None, "gemma2: soft limit on logits", above=0)
    num_experts: int | None = key(None, "number of experts in each MoE layer", minimum=1)
    num_experts_per_tok: int | None = key(
        None, "number of experts that each token is routed to", minimum=1
    )
    moe_intermediate_size: int | None = key(
        None, "width of an expert's feed-forward layer", minimum=1
    )
    shared_expert_intermediate_size: int | None = key(
        None, "qwen2_moe: width of the shared expert's feed-forward layer", minimum=1
    )
    norm_topk_prob: bool | None = key(
        None, "normalise the weights of a token's experts to a sum of 1"
    )
    mlp_only_layers: list[int] | None = key(
        None, "indices of the layers, from 0, that are dense in place of MoE", minimum=0
    )
    decoder_sparse_step: int | None = key(
        None, "every n-th layer is an MoE layer, the others are dense", minimum=1
    )
    first_k_dense_replace: int | None = key(
        None,
        "deepseek_v3: number of leading dense layers",
        minimum=0,
    )
    n_shared_experts: int | None = key(None, "deepseek_v3: number of shared experts", minimum=0)
    n_group: int | None = key(None, "deepseek_v3: number of groups of experts", minimum=1)
    topk_group: int | None = key(
        None, "deepseek_v3: number of groups that a token's experts are chosen from", minimum=1
    )
    routed_scaling_factor: float | None = key(
        None, "deepseek_v3: factor of the weights of a token's experts", above=0
    )
    q_lora_rank: int | None = key(
        None,
        "deepseek_v3: rank of the compressed queries; null: queries are not compressed",
        minimum=1,
    )
    kv_lora_rank: int | None = key(
        None,
        "deepseek_v3: rank of the compressed keys and values",
        minimum=1,
    )
    qk_nope_head_dim: int | None = key(
        None,
        "deepseek_v3: channels of a head's queries and keys without rotary embedding",
        minimum=1,
    )
    qk_rope_head_dim: int | None = key(
        None,
        "deepseek_v3: channels of a head's queries and keys with rotary embedding; all heads "
        "share those of keys",
        minimum=2,
    )
    v_head_dim: int | None = key(None, "deepseek_v3: channels of a head's values", minimum=1)
    rope_interleave: bool | None = key(
        None, "deepseek_v3: channels 2i and 2i + 1 are rotated together, not i and i + half"
    )
    initializer_range: float | None = key(None, "standard deviation of random weights", above=0)
    initializer: str = key(
        "plain",
        "standard deviation of the random weights of output projections. `plain`: as of all "
        "others; `depth`: divided by √(2 · blocks); `layer`: by √(2 · the block's number)",
        choices=("plain", "depth", "layer"),
    )
    attention: str = key(
        "auto",
        "`documents`: kernel calls shared by documents of similar length; `mask`: one masked "
        "call per row, whose cost grows with the square of its length; `varlen`, `flex`: one "
        "call over all documents (GPU); `auto` chooses by GPU, model and rows, and says why",
        choices=("auto", "documents", "mask", "varlen", "flex"),
    )
    attention_kernel: str = key(
        "auto",
        "on a GPU, the kernel that is tried first; fa3, fa4: FlashAttention 3 and 4, where "
        "installed; `auto`: cuDNN on Hopper, FlashAttention elsewhere",
        choices=("auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"),
    )


@dataclass
class Data:
    """The data to train on."""

    path: str | list[str | dict[str, Any]] | None = key(
        None,
        "a file, folder, glob or URL, or a list of them, also with weights: [{path: a.jsonl, "
        "weight: 0.7}, {path: b.jsonl, weight: 0.3}]; `demo:backwards` is a small task that is "
        "generated",
    )
    format: str = key(
        "auto",
        "format of the rows; `auto` detects it and says so",
        choices=FORMATS,
        part="format",
    )
    fields: dict[str, Any] | None = key(
        None,
        "the meaning of columns, e.g. {prompt: question, completion: answer}; null: detected",
    )
    prompts: dict[str, str] | None = key(
        None,
        "objective=embed: texts before each query and each document, as {query: 'query: ',"
        " document: 'passage: '}; exports name them; null: none",
    )
    step_separator: str = key(
        "\n",
        "objective=tag: the text after each step of an answer whose steps have labels; the last "
        "token of it is read",
    )
    end_of_text: str | int | None = key(
        None,
        "the token, or its number, between documents of a token file that does not list them; "
        "null: the tokenizer's end token",
    )
    template: str | None = key(
        None,
        "chat template: chatml, gemma, llama2, llama3, mistral, olmo2, phi3, phi4, qwen2, qwen3,"
        " plain, none (prompt and answer alone, as they are), or a .jinja file; null: the "
        "tokenizer's own, else plain",
    )
    template_args: dict[str, Any] | None = key(
        None,
        "further arguments of the template, e.g. {enable_thinking: true}; they become defaults "
        "of the exported template; null: none",
    )
    template_date: str | None = key(
        None,
        "the date that a template with today's date gets, e.g. 2025-01-31; null: always 2024-07-26",
    )
    loss_on: str = key(
        "assistant",
        "the supervised turns: every assistant turn, everything, or the last assistant turn",
        choices=("assistant", "all", "last"),
    )
    too_long: str = key(
        "drop",
        "what to do with samples longer than batch.seq_len: `drop`; `truncate`: cut at the end; "
        "`split`: into pieces, without loss of a token (text, tokens)",
        choices=("drop", "truncate", "split"),
    )
    max_lost: float = key(
        0.2,
        "largest share of the tokens that may be dropped or cut for their length; a run that"
        " would lose more stops before it starts",
        minimum=0,
        maximum=1,
    )
    on_error: str = key(
        "fail",
        "what to do with a row that cannot be read: `fail`: stop and name it; `skip`: leave it "
        "out and count it",
        choices=("fail", "skip"),
    )
    packing: str = key(
        "best_fit",
        "`best_fit`: rows are filled with whole samples, which do not attend to each other; "
        "`none`: one sample a row, padded; `stream`: texts one after another, cut where a row "
        "ends",
        choices=("best_fit", "none", "stream"),
    )
    pad_to_multiple: int | None = key(
        None,
        "packing=none: a micro-batch is as long as its longest sample, up to the next"
        " multiple of this; null: batch.seq_len",
        minimum=1,
    )
    shuffle: bool = key(True, "a new order every epoch, from run.seed")
    validation: float | str | list[str | dict[str, Any]] | None = key(
        None,
        "a path like data.path, or a share of the samples such as 0.02, chosen by their"
        " content; null: none",
    )
    cache: str | None = key(
        None, "folder for tokenized data, shared by all ranks and runs; null: run.root/.data"
    )
    streaming: bool = key(
        False,
        "for data too large to store: rows are tokenized and packed while training reads them, "
        "and not stored; needs train.steps",
    )
    workers: int | None = key(
        None,
        "number of processes that tokenize, with data.streaming for each rank, and that load "
        "images for each rank; null: one for each core; 1: none besides this one",
        minimum=1,
    )
    prefetch: int | None = key(
        None,
        "number of micro-batches that a thread prepares and copies to the device ahead; 0: no "
        "thread; null: 2 on a GPU, 0 on a CPU",
        minimum=0,
    )


@dataclass
class Tokenizer:
    """Text to tokens."""

    path: str | None = key(
        None,
        "a tokenizer.json, a .model of SentencePiece or tiktoken, or a folder with either or "
        "with vocab.json and merges.txt; `demo:bytes` is built in; null: model.init_from's",
    )
    add_tokens: list[str] = key(
        [],
        "special tokens to add, e.g. ['<|im_start|>','<|im_end|>'] for data.template=chatml; the "
        "model's vocabulary grows with them",
    )


@dataclass
class Adapter:
    """Small matrices that are trained in addition to the model's frozen weights.

    LoRA, DoRA; QLoRA: on weights of 4 bits.
    """

    name: str = key(
        "none",
        "`lora`: W + scale · B·A for each adapted matrix W; `dora`: with a trained norm for each "
        "row of that sum; `none`: all weights are trained",
        choices=("none", "lora", "dora"),
    )
    rank: int = key(16, "rows of A and columns of B", minimum=1)
    alpha: float = key(32.0, "the scale of B·A times the rank", above=0)
    scaling: str = key(
        "standard",
        "scale of B·A: `standard`: alpha ÷ rank; `rslora`: alpha ÷ √rank, for high ranks",
        choices=("standard", "rslora"),
    )
    targets: str | list[str] = key(
        "all",
        "adapted linear layers: `all` of the blocks, or names as [q_proj,v_proj], or patterns"
        " as ['model.layers.[0-3].*']; [all,experts]: also the experts' matrices; [all,vision,"
        "projector]: also those of a model's tower for images",
    )
    also: list[str] = key(
        [],
        "modules that are trained in full beside the adapters: head, embedding, norms, or names "
        "and patterns",
    )
    base: str = key(
        "auto",
        "number format of the frozen weights: `auto`: precision.param_dtype; `nf4`: the blocks' "
        "matrices in 4 bits, all else as with auto",
        choices=("auto", "bf16", "fp32", "nf4"),
    )
    rank_pattern: dict[str, int] = key(
        {}, "other ranks for some of the targets, by name or pattern, as {down_proj: 8}"
    )
    alpha_pattern: dict[str, float] = key({}, "other alphas for some of the targets")
    init_from: str | None = key(
        None,
        "a PEFT folder, or a run with an adapter, to start from; it decides kind, rank,"
        " alpha, scaling and targets",
    )

    @property
    def has_base(self) -> bool:
        """True if the model without its adapters is the one that the run begins with.

        It is another one with DoRA's magnitudes, with modules in `also`, and with adapters that the
        run begins with: switching the adapters off does not undo them.
        """
        return self.name == "lora" and not (self.also or self.init_from)


COMPARED_GROUPS = (
    "model",
    "adapter",
    "data",
    "tokenizer",
    "batch",
    "loss",
    "objective",
    "optim",
    "schedule",
)
"""Groups of keys that define the training; a resume may change only keys in allow_changes."""


@dataclass
class Sharding:
    """The distribution of parameters, gradients and optimizer state over ranks."""

    strategy: str = key(
        "fsdp",
        "`fsdp`: fully_shard over all ranks; `hsdp`: shard within groups, replicate across"
        " them; `ddp`: every rank holds all",
        choices=("fsdp", "hsdp", "ddp"),
    )
    replicas: int = key(1, "hsdp: how many groups; must divide the number of ranks", minimum=1)
    tensor: int = key(
        1,
        "size of tensor and sequence parallelism: ranks that split each block's heads and "
        "feed-forward channels, and the tokens between blocks; neighbours, inside a node",
        minimum=1,
    )
    context: int = key(
        1,
        "size of context parallelism: ranks that split each row's tokens, for long rows; "
        "neighbours, inside a node if possible",
        minimum=1,
    )
    expert: int = key(
        1,
        "size of expert parallelism: ranks that divide the experts among them; tokens reach them "
        "by all-to-all; divides shard × context × tensor; neighbours, inside a node",
        minimum=1,
    )
    context_method: str = key(
        "auto",
        "method of context parallelism. `ulysses`: all-to-all over heads; `gathered`: all-gather "
        "of keys and values; `ring`: keys and values are passed around; `auto`: ulysses where "
        "the heads divide, else gathered, from 32,768 tokens a row on ring",
        choices=("auto", "ulysses", "gathered", "ring"),
    )
    pipeline: int = key(
        1,
        "number of pipeline stages; the outermost dimension, between nodes (torch 2.13)",
        minimum=1,
    )
    pipeline_schedule: str = key(
        "1f1b",
        "order of the micro-batches in a pipeline. `1f1b`; `gpipe`: all forwards, then all "
        "backwards; `interleaved`: two stages a rank, half the idle time, twice the messages; "
        "`zbv`, `dualpipev`: two stages a rank, with the gradients of weights in idle time",
        choices=("1f1b", "gpipe", "interleaved", "zbv", "dualpipev"),
    )
    reshard_after_forward: bool | int | Literal["auto"] = key(
        "auto",
        "free a unit's gathered parameters after forward and gather again in backward;"
        " a number: keep a second copy of the blocks, divided among that many neighbouring ranks,"
        " and gather from it; `auto`: true, but false in a pipeline, with ddp, and without"
        " cpu_offload on one rank and for models of at most 2 GiB in precision.param_dtype",
        minimum=2,
    )
    blocks_per_unit: int = key(
        1, "decoder blocks gathered together: larger messages, more memory", minimum=1
    )
    prefetch: int = key(
        1,
        "number of units gathered ahead of the one that computes; 0: FSDP2's own order",
        minimum=0,
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and optimizer state in host memory")
    accumulate: str = key(
        "sharded",
        "gradients between micro-batches. `sharded`: reduced after each (hsdp's all-reduce waits "
        "for the last); `unsharded`: reduced once, but every rank holds the whole gradient",
        choices=("sharded", "unsharded"),
    )
    messages: str = key(
        "ordinary",
        "memory for gathered and reduced messages: `ordinary`; `registered` with"
        " NCCL, which may then skip a copy; `symmetric`, the same address on all GPUs"
        " (torch 2.12)",
        choices=("ordinary", "registered", "symmetric"),
    )
    quantize: str = key(
        "none",
        "send fully_shard's messages as 8-bit numbers with a scale for every 256: `weights` in "
        "all-gathers, `gradients` in reduce-scatters, or `both`; not exact",
        choices=("none", "weights", "gradients", "both"),
    )
    error_feedback: bool = key(
        False,
        "quantize=gradients or both: add the quantisation error to the next message; every rank "
        "keeps as much as the whole gradient in float32, and a resume begins without it",
    )
    separate_reduce_scatter: bool = key(
        False,
        "reduce gradients over a process group of their own, so that backward's all-gathers do "
        "not wait for them (torch 2.13)",
    )
    reduce_scatter_buffers: int = key(
        1,
        "number of gradient reductions that run at the same time; 2 lets backward continue while "
        "one is late, and keeps one more in memory (torch 2.13)",
        minimum=1,
    )


@dataclass
class Replicas:
    """Groups of ranks that share a run's steps, and may leave and join while the others go on.

    Each group is a launch of the same command with another replicas.id. See docs/replicas.md.
    """

    method: str = key(
        "none",
        "`none`: all ranks are one group; `sync`: the groups divide the rows of each step and "
        "sum their gradients; `diloco`: each group trains alone, and every replicas.every steps "
        "they average their changes",
        choices=("none", "sync", "diloco"),
    )
    id: int = key(0, "index of this group; unique", minimum=0)
    lighthouse: str | None = key(
        None, "address of the  fsdp-trainer lighthouse  where the groups find each other: HOST:PORT"
    )
    min: int = key(
        1, "smallest number of groups that train; with fewer, those present wait", minimum=1
    )
    every: int = key(50, "diloco: optimizer steps between two averages", minimum=1)
    outer_lr: float = key(0.7, "diloco: learning rate of the outer step", above=0)
    outer_momentum: float = key(
        0.9, "diloco: Nesterov momentum of the outer step", minimum=0, maximum=1
    )
    fragments: int = key(
        1,
        "diloco: number of parts of the model, each averaged at another step of every `every`; "
        "1: all at once",
        minimum=1,
    )
    delay: int = key(
        0,
        "diloco: number of steps that are computed while a fragment's average is on its way",
        minimum=0,
    )
    mixing: float = key(
        0.0,
        "diloco: share of a group's own weights that stays in the average",
        minimum=0,
        maximum=1,
    )
    quantize: bool = key(False, "diloco: exchange the changes as 8-bit numbers")


@dataclass
class ActivationCheckpoint:
    """Trade compute for activation memory."""

    mode: str = key(
        "none",
        "what backward computes again. `full`: whole blocks; `selective`: all but "
        "activation_checkpoint.save; `budget`: what the compiler finds cheapest",
        choices=("none", "full", "selective", "budget"),
    )
    every: int = key(
        1,
        "full and selective: only every n-th block is computed again",
        minimum=1,
        used_by=("full", "selective"),
    )
    save: list[str] = key(
        ["attention", "second_matmul"],
        "selective: results that are kept; second_matmul keeps every second matrix product of"
        " a block",
        choices=("attention", "matmul", "second_matmul"),
        used_by=("selective",),
    )
    budget: float = key(
        0.5,
        "budget: share of the activations that a compiled block keeps; 0 is like full, 1 like none",
        minimum=0,
        maximum=1,
        used_by=("budget",),
    )
    offload: bool = key(
        False,
        "move the activations that blocks keep for backward to pinned host memory, and back "
        "before they are needed",
    )


@dataclass
class Precision:
    """Number formats of compute, reduction and the stored weights."""

    param_dtype: str = key(
        "bfloat16",
        "number format of forward, backward and the all-gather; float16: for GPUs without "
        "bfloat16 (V100, T4), with a loss scale",
        choices=("bfloat16", "float32", "float16"),
    )
    reduce_dtype: str = key(
        "float32", "number format of the gradients' reduce-scatter", choices=("float32", "bfloat16")
    )
    master_dtype: str = key(
        "float32",
        "number format of sharded weights, gradients and optimizer state",
        choices=("float32", "bfloat16"),
    )
    loss_scale: float = key(
        65536.0,
        "float16: loss scale at the start, so that small gradients are not 0; halved where a "
        "gradient is not finite, and that step is skipped",
        minimum=1,
    )
    loss_scale_steps: int = key(
        2000,
        "float16: steps in a row with finite gradients after which the loss scale doubles",
        minimum=1,
    )
    float8: str | None = key(
        None,
        "matrix products of large linear layers in float8 on GPUs that have it (extra: ao): one "
        "scale for a matrix, or for each row; the last computes weight gradients in bfloat16; "
        "null: none",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    )


@dataclass
class Compile:
    """torch.compile, block by block."""

    enabled: bool = key(
        False,
        "compile each decoder block; without a C++ compiler (CPU) or Triton and a C compiler"
        " (GPU) the run prints a warning and continues",
    )
    mode: str = key(
        "default",
        "`max-autotune-no-cudagraphs` also times variants of each kernel first, which takes"
        " minutes; the others record CUDA graphs, which sharded weights do not allow",
        choices=("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"),
    )
    cache: str | None = key(
        None,
        "folder of compiled kernels, shared by ranks, restarts and runs; null: "
        "TORCHINDUCTOR_CACHE_DIR, else run.root/.compile",
    )


@dataclass
class Schedule:
    """The learning rate over the run, as a share of optim.lr."""

    name: str = key("cosine", "shape after the warm-up", choices=tuple(SHAPES), part="schedule")
    warmup_steps: int = key(
        0,
        "number of warm-up steps, with a linear rise of the rate; schedule.warmup is a share of "
        "all steps",
        minimum=0,
    )
    warmup: float = key(
        0.0,
        "warm-up as a share of all steps, rounded up, in place of warmup_steps",
        minimum=0,
        maximum=1,
    )
    from_zero: bool = key(
        False,
        "the first step of a warm-up has a rate of 0, and the first after it the peak, as in"
        " transformers; false: the first one moves, and the last has the peak",
    )
    min_ratio: float = key(
        0.0, "share of optim.lr that linear, cosine and wsd end at", minimum=0, maximum=1
    )
    decay_share: float = key(
        0.2, "wsd: share of the run that the final decay takes", minimum=0, maximum=1
    )


@dataclass
class Checkpoint:
    """Committed by rename; MANIFEST.json holds the size and checksum of every file."""

    every: int | float | None = key(
        500,
        "optimizer steps between checkpoints; below 1: this share of all steps, rounded up; one is"
        " always written at the end; null: only then",
        above=0,
    )
    keep: int = key(
        2, "number of committed checkpoints that stay; older ones are deleted", minimum=1
    )
    best: bool = key(
        False,
        "also save at every new lowest validation loss, and keep that checkpoint besides the"
        " newest; checkpoints/best names it",
    )
    mode: str = key(
        "sync",
        "`sync`: training waits for the write; `async`: only for a copy in host memory, which a "
        "thread writes",
        choices=("sync", "async"),
    )
    patience: str = key(
        "10m",
        "how long saving the last checkpoint of a run is repeated where it fails, as on a full "
        "disk; and how long a run's end waits for a next file to reach its mirror",
    )
    mirror: str | None = key(
        None,
        "also upload checkpoints to this place, e.g. s3://bucket/runs, in the background; a machine"
        " that lacks them resumes from there; null: not",
    )
    make_room: bool = key(
        False, "delete the oldest checkpoint where there is no space for the last one"
    )
    export_hf: bool = key(
        False,
        "also write the run's hf/ folder at the end, of a run with an adapter adapter/: of"
        " the newest checkpoint, or with checkpoint.best the best one",
    )
    export_dtype: str | None = key(
        None,
        "number format of that export; null: as the weights were imported, else"
        " precision.param_dtype",
        choices=("float32", "bfloat16", "float16"),
    )
    merge: bool = key(
        False,
        "of a run with an adapter: also write hf/, the model with the adapter merged into it",
    )
    resume: str = key(
        "auto",
        "`auto`: resume from the newest good checkpoint if model, data and optimizer are the same;"
        " `never`; or a path",
    )
    allow_changes: list[str] = key(
        [], "keys that may differ from the checkpoint's, e.g. [optim.lr]"
    )


@dataclass
class Logging:
    """The records that a run writes."""

    every: int | None = key(
        None,
        "optimizer steps between writes, in which each step has its own line; null: 1 on a CPU, "
        "10 on a GPU",
        minimum=1,
    )
    wandb: str = key(
        "disabled",
        "Weights & Biases; a restarted run continues in the same one",
        choices=("online", "offline", "disabled"),
    )
    project: str = key("fsdp_trainer", "the project, or experiment, of all trackers")
    tensorboard: bool = key(
        False, "write TensorBoard events to the run folder (extra: tensorboard)"
    )
    mlflow: bool = key(
        False,
        "log to MLflow, where MLFLOW_TRACKING_URI says, else in the run's folder (extra: mlflow)",
    )
    trackio: bool = key(
        False,
        "log to Trackio, on this machine or where its TRACKIO_… variables say (extra: trackio)",
    )
    comet: str = key(
        "disabled",
        "Comet; offline: archives in the run's folder, for `comet upload` (extra: comet)",
        choices=("online", "offline", "disabled"),
    )
    swanlab: str = key(
        "disabled",
        "SwanLab; offline: folders in the run's folder, for `swanlab sync` (extra: swanlab)",
        choices=("online", "offline", "disabled"),
    )
    trackers: list[str] = key(
        [],
        "trackers of your own: FILE.py:NAME, the name of a registered one, or of an installed"
        " package's; typed, never in a file",
    )
    command: str | None = key(
        None,
        "a program that gets the lines of metrics.jsonl and events.jsonl on its standard input; "
        "only allowed on the command line",
    )
    stragglers: str | None = key(
        "60s",
        "how often to compare the time of ranks outside collectives, and name the slowest; null: "
        "never",
    )


@dataclass
class Launch:
    """The start of ranks, and their waits.

    Under torchrun, or in an srun step of several tasks, the launcher decides the number of ranks.
    """

    nproc_per_node: int | Literal["auto"] = key(
        "auto",
        "ranks to start when no launcher did; `auto`: ranks_per_gpu for every visible GPU, else 1",
        minimum=1,
    )
    ranks_per_gpu: int = key(
        1,
        "ranks that share a GPU, to try a layout of several where there are fewer GPUs; slow, and"
        " needs NCCL 2.30",
        minimum=1,
    )
    rollout_ranks: int = key(
        0,
        "grpo: number of ranks, the last ones, that only generate answers while the others "
        "train; 0: all do both in turn",
        minimum=0,
    )
    groups: int = key(
        1,
        "with replicas.method: number of groups of nproc_per_node ranks to start on this "
        "machine, and a lighthouse for them; to try groups out",
        minimum=1,
    )
    nodes: int = key(
        1,
        "number of nodes that run this command, each with its own ranks; set by Slurm under srun",
        minimum=1,
    )
    rendezvous: str | None = key(
        None, "address where the nodes meet: `HOST:PORT` of one of them, the same on all"
    )
    hosts: str | list[str] | None = key(
        None,
        "start the nodes of all these hosts from here, over ssh: [node0,node1], also"
        " `user@name` and `name:port`; "
        "or a file with lines such as `node0 slots=8`. The first has rank 0",
    )
    device: str = key(
        "auto", "`auto`: cuda where there is one, else cpu", choices=("auto", "cpu", "cuda")
    )
    timeout: str = key(
        "30m", "longest wait in a collective, and for all nodes to join, before the run stops"
    )
    slurm_time_limit: bool = key(
        True, "in a Slurm job, stop as with train.time_limit before the job is over"
    )
    data_timeout: str = key(
        "24h",
        "longest time without progress of data preparation, downloads or a stream's files before "
        "the waiting ranks stop",
    )
    watchdog: bool = key(
        True,
        "a process on each node finds ranks that died, were stopped or make no progress, saves "
        "their stacks and kills them",
    )
    stall: str = key(
        "10s",
        "longest time without progress of all ranks of a node before the one that holds them up "
        "is killed; at least 5 times the phase's median",
    )
    env: dict[str, str] = key(
        {},
        "environment variables of the ranks, e.g. {NCCL_DEBUG: INFO}; variables that are set "
        "already are kept",
    )


@dataclass
class TrainConfig:
    """Trains, on as many ranks as a launcher made, or starts its own."""

    run: Run = field(default_factory=Run)
    batch: Batch = field(default_factory=Batch)
    train: Train = field(default_factory=Train)
    loss: Loss = field(default_factory=Loss)
    evaluation: Evaluation = field(default_factory=Evaluation)
    profile: Profile = field(default_factory=Profile)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    adapter: Adapter = field(default_factory=Adapter)
    objective: ObjectiveChoice = field(default_factory=ObjectiveChoice)
    sharding: Sharding = field(default_factory=Sharding)
    replicas: Replicas = field(default_factory=Replicas)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    precision: Precision = field(default_factory=Precision)
    compile: Compile = field(default_factory=Compile)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    launch: Launch = field(default_factory=Launch)

    @property
    def second_model(self) -> SecondModel | None:
        """The frozen model beside the one in training; None: there is none."""
        return second_model(self.objective, self.adapter.has_base)

    def of_group(self, number: int, lighthouse: str) -> "TrainConfig":
        """Return the configuration of one of the groups that launch.groups starts."""
        return replace(
            self,
            launch=replace(self.launch, groups=1),
            replicas=replace(self.replicas, id=number, lighthouse=lighthouse),
        )


GROUPS = (
    "model",
    "data",
    "tokenizer",
    "adapter",
    "objective",
    "sharding",
    "activation_checkpoint",
    "precision",
    "compile",
    "optim",
    "schedule",
    "checkpoint",
    "logging",
    "launch",
)
SELECTORS = {
    "model": "name",
    "adapter": "name",
    "objective": "name",
    "sharding": "strategy",
    "activation_checkpoint": "mode",
    "precision": "param_dtype",
    "optim": "name",
    "schedule": "name",
    "checkpoint": "mode",
    "compile": "enabled",
}
