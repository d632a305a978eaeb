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

FORMATS = (
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "tokens",
    "segments",
    "unpaired",
)  # fmt: skip
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
        "patterns of parameter names that are not trained, as `model.layers.[0-3].*`: "
        "they have no gradient, no optimizer state and no place in checkpoints; of a model that"
        " reads images also its parts: vision, projector, language",
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
        [], "what to ask the model at each validation; its answers go to samples.jsonl"
    )
    sample_tokens: int = key(
        64,
        "longest answer to them, in tokens; sharded weights are gathered once for all if they"
        " fit, else for each",
        minimum=1,
    )
    sample_raw: bool = key(
        False, "continue sample_prompts as plain text, without the chat template"
    )
    time_limit: str | None = key(
        None,
        "commit a checkpoint and exit 75 within this long, as far as the longest step and"
        " save so far tell: `90s`, `30m`, `1h30m` or plain seconds; null: no limit",
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
        "optimizer steps between Python's garbage collections, so that all ranks pause in the"
        " same step; null: whenever Python likes",
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
        "what a loss or gradient norm far above the steps before leads to: `warn`; `skip`: no"
        " update in that step; `rewind`: back to the checkpoint before, and on past these"
        " rows",
        choices=("ignore", "warn", "skip", "rewind"),
    )
    spike_score: float = key(
        10.0,
        "how far above the median that is, in robust standard deviations (median absolute"
        " deviation)",
        above=0,
    )
    spike_window: int = key(
        128,
        "previous steps that a step is compared with; none is judged until half of them exist",
        minimum=4,
    )
    rewind_margin: int = key(
        1,
        "on_spike=rewind: steps before and after the spike's whose rows are left out too;"
        " PaLM: 100",
        minimum=0,
    )
    max_rewinds: int = key(
        5, "on_spike=rewind: spikes beyond these many stop the run with exit code 1", minimum=1
    )
    check_every: int | None = key(
        None,
        "look for silent data corruption every so many steps: compute a micro-batch twice,"
        " compare copies of weights bit by bit, also before a checkpoint; null: never",
        minimum=1,
    )
    deterministic: bool = key(
        False,
        "on a GPU, take kernels that give the same bits every time, so that a resumed run"
        " ends with "
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
        "weight of logsumexp² of each token's logits, which keeps them from drifting; PaLM: 1e-4",
        minimum=0,
    )
    load_balancing: float = key(
        0.0,
        "of a model with experts: weight of a loss that draws tokens to experts with few, see"
        " docs/experts.md; Mixtral: 0.001, OLMoE: 0.01",
        minimum=0,
    )
    router_z_loss: float = key(
        0.0,
        "of a model with experts: weight of logsumexp² of the routers' logits; ST-MoE: 1e-3",
        minimum=0,
    )
    bias_update_speed: float = key(
        0.0,
        "deepseek_v3: no loss, but what each step adds to the bias of a router's experts with fewer"
        " tokens than the mean, and takes from those with more; DeepSeek-V3: 0.001",
        minimum=0,
    )
    chunk_mib: int | None = key(
        None,
        "MiB of logits that exist at once; few make small matrix products; null: those of 256"
        " tokens on a CPU, of 4096 on a GPU, there of 2048 in float32",
        minimum=1,
    )


@dataclass
class Evaluation:
    """The tasks that the model in training is evaluated on, as the verb evaluate has them."""

    tasks: str | list[str] = key(
        [],
        "names of lm-evaluation-harness's tasks, or paths of their YAML files or of folders with"
        " some; paths of YAML files with an environment; `core`: DCLM's 22 tasks",
    )
    code: list[str] = key(
        [], "Python files that the files of tasks may run, as FILE.py; typed, never in a file"
    )
    core_data: str | None = key(
        None, "of the task `core`: a folder with core.yaml, eval_data/ and eval_meta_data.csv"
    )
    limit: int | None = key(None, "only the first so many items of each task; null: all", minimum=1)
    fewshot: int | None = key(
        None, "examples before each question; null: as the task says", minimum=0
    )
    chat: bool = key(False, "ask through the chat template, examples as turns before")
    rows: int = key(32, "requests that a rank computes at the same time", minimum=1)


@dataclass
class Profile:
    """Records of where time and memory go, for a few steps.

    A table of the steps' phases, and traces for Perfetto or chrome://tracing, in the run's profile/
    folder.
    """

    steps: str | None = key(
        None,
        "which optimizer steps, both included: `10..12`, or one; the first ones are slower"
        " than the rest; null: none",
    )
    ranks: list[int] | None = key(
        None, "which ranks write one; null: those of the first node, 8 at most", minimum=0
    )
    memory: bool = key(
        False,
        "on a GPU also a snapshot of every allocation, for pytorch.org/memory_viz; without"
        " steps: of the whole run, written where it runs out of memory",
    )


@dataclass
class Model:
    """The architecture, and where its weights come from.

    Keys left null come from init_from's config.json, else from the tiny model.
    """

    name: str = key(
        "auto",
        "label of the named size; `auto`: the architecture of init_from, without one the tiny"
        " model's",
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
        "blocks of a new model; width, heads, batch, steps and optim.lr follow by nanochat's rules,"
        " but for those that are set; null: nothing follows",
        minimum=1,
    )
    family: str | None = key(
        None,
        "which family of config.json this is",
        choices=(
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "qwen2_moe",
            "mixtral",
            "olmoe",
            "deepseek_v3",
            "gpt_oss",
            "gemma2",
            "gemma3_text",
            "olmo2",
            "phi3",
        ),
    )
    vocab_size: int | None = key(
        None,
        "tokens that the embedding knows; null: the tokenizer's (random weights) or"
        " config.json's; more than config.json's: new ones start as the mean of the others",
        minimum=1,
    )
    vocab_multiple: int = key(
        1,
        "pad the embedding's rows to a multiple of this, e.g. 64 × ranks: even shards; the"
        " padding is in no loss and no export",
        minimum=1,
    )
    hidden_size: int | None = key(None, "width of the residual stream", minimum=1)
    intermediate_size: int | None = key(None, "width of the feed-forward layer", minimum=1)
    num_hidden_layers: int | None = key(None, "decoder blocks", minimum=1)
    num_attention_heads: int | None = key(None, "query heads", minimum=1)
    num_key_value_heads: int | None = key(
        None, "key and value heads; fewer than query heads is grouped-query attention", minimum=1
    )
    head_dim: int | None = key(
        None, "channels per head; null: hidden_size / num_attention_heads", minimum=2
    )
    max_position_embeddings: int | None = key(
        None, "longest context in tokens; batch.seq_len may not exceed it", minimum=1
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
    rms_norm_eps: float | None = key(None, "added to the mean square under the root", above=0)
    tie_word_embeddings: bool | None = key(None, "embedding and output head share one matrix")
    attention_bias: bool | None = key(
        None, "query, key, value and output projections have a bias; qwen2's first three always do"
    )
    mlp_bias: bool | None = key(None, "llama: feed-forward projections have a bias")
    sliding_window: int | None = key(
        None,
        "tokens that a token sees, itself included, in the blocks of a family with windows;"
        " null: all before it",
        minimum=1,
    )
    query_pre_attn_scalar: float | None = key(
        None, "gemma: attention scores are divided by its root; null: head_dim", above=0
    )
    attn_logit_softcapping: float | None = key(
        None, "gemma2: soft limit on attention scores", above=0
    )
    final_logit_softcapping: float | None = key(None, "gemma2: soft limit on logits", above=0)
    num_experts: int | None = key(
        None, "feed-forwards side by side in a block, of which a token meets a few", minimum=1
    )
    num_experts_per_tok: int | None = key(None, "experts that each token is sent to", minimum=1)
    moe_intermediate_size: int | None = key(None, "width of an expert", minimum=1)
    shared_expert_intermediate_size: int | None = key(
        None, "qwen2_moe: width of what every token meets besides its experts", minimum=1
    )
    norm_topk_prob: bool | None = key(
        None, "the weights of a token's experts are divided by their sum"
    )
    mlp_only_layers: list[int] | None = key(
        None, "blocks with a dense feed-forward in place of experts, from 0", minimum=0
    )
    decoder_sparse_step: int | None = key(
        None, "every so many-th block has experts, the others a dense feed-forward", minimum=1
    )
    first_k_dense_replace: int | None = key(
        None,
        "deepseek_v3: blocks in front with a dense feed-forward, not experts",
        minimum=0,
    )
    n_shared_experts: int | None = key(
        None, "deepseek_v3: what every token meets besides is as wide as so many experts", minimum=0
    )
    n_group: int | None = key(None, "deepseek_v3: groups that the experts are in", minimum=1)
    topk_group: int | None = key(
        None, "deepseek_v3: groups that a token's experts are chosen from", minimum=1
    )
    routed_scaling_factor: float | None = key(
        None, "deepseek_v3: multiplies the weights of a token's experts", above=0
    )
    q_lora_rank: int | None = key(
        None,
        "deepseek_v3: width of the vector that queries are made of; null: of the whole state",
        minimum=1,
    )
    kv_lora_rank: int | None = key(
        None,
        "deepseek_v3: width of the vector that keys and values are made of",
        minimum=1,
    )
    qk_nope_head_dim: int | None = key(
        None, "deepseek_v3: channels of a head's queries and keys that are not rotated", minimum=1
    )
    qk_rope_head_dim: int | None = key(
        None, "deepseek_v3: channels that are rotated; of keys all heads share them", minimum=2
    )
    v_head_dim: int | None = key(None, "deepseek_v3: channels of a head's values", minimum=1)
    rope_interleave: bool | None = key(
        None, "deepseek_v3: channels 2i and 2i + 1 are rotated together, not i and i + half"
    )
    initializer_range: float | None = key(None, "standard deviation of random weights", above=0)
    initializer: str = key(
        "plain",
        "random weights of what adds to the residual stream: as all others, divided by √(2 ·"
        " blocks), or by √(2 · the block's own number)",
        choices=("plain", "depth", "layer"),
    )
    attention: str = key(
        "auto",
        "`documents`: kernel calls shared by documents of similar length; `mask`: one call per"
        " row under a block mask, cost by row²; `varlen`, `flex`: one call over all documents"
        " (GPU); `auto` picks by GPU, model and rows, and says why",
        choices=("auto", "documents", "mask", "varlen", "flex"),
    )
    attention_kernel: str = key(
        "auto",
        "on a GPU, which kernel is tried first; fa3, fa4: FlashAttention 3 and 4, where"
        " installed; `auto`: cuDNN on Hopper, FlashAttention elsewhere",
        choices=("auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"),
    )


@dataclass
class Data:
    """The data to train on."""

    path: str | list[str | dict[str, Any]] | None = key(
        None,
        "a file, folder, glob, or a list of them, perhaps a mixture: [{path: a.jsonl, weight:"
        " 0.7}, {path: b.jsonl, weight: 0.3}]; `demo:backwards` is a small task generated on"
        " the spot",
    )
    format: str = key(
        "auto",
        "how rows are read; `auto` finds it out and says so",
        choices=FORMATS,
    )
    fields: dict[str, Any] | None = key(
        None,
        "which columns mean what, e.g. {prompt: question, completion: answer}; null: found out",
    )
    end_of_text: str | int | None = key(
        None,
        "the token, or its number, between documents of a token file that does not list them;"
        " null: the tokenizer's end token",
    )
    template: str | None = key(
        None,
        "chat template: chatml, gemma, llama2, llama3, mistral, olmo2, phi3, phi4, qwen2, qwen3,"
        " plain, or a .jinja file; null: the tokenizer's own, else plain",
    )
    template_args: dict[str, Any] | None = key(
        None,
        "more arguments of the template, e.g. {enable_thinking: true}; the exported"
        " template has them as its defaults; null: none",
    )
    template_date: str | None = key(
        None,
        "the date for a template that writes today's, e.g. 2025-01-31; null:"
        " 2024-07-26, on any day",
    )
    loss_on: str = key(
        "assistant",
        "which turns are supervised: every assistant turn, everything, or the last assistant turn",
        choices=("assistant", "all", "last"),
    )
    too_long: str = key(
        "drop",
        "samples longer than batch.seq_len: leave out, cut at the end, or split into pieces,"
        " no token lost (text, tokens)",
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
        "a row that cannot be read: stop and name it, or leave it out and count it",
        choices=("fail", "skip"),
    )
    packing: str = key(
        "best_fit",
        "fill rows with whole samples that never see each other; `none`: one sample a row,"
        " padded; `stream`: texts one after another, cut where a row ends",
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
        "for data too large to store: rows are tokenized and packed while training reads"
        " them, nothing is kept; needs train.steps",
    )
    workers: int | None = key(
        None,
        "processes that tokenize, of each rank with data.streaming, and that load images, of each"
        " rank; null: one for each core that may be used; 1: none besides this one",
        minimum=1,
    )
    prefetch: int | None = key(
        None,
        "micro-batches that a thread assembles and copies to the device ahead; 0: none, no"
        " thread; null: 2 on a GPU, 0 on a CPU",
        minimum=0,
    )


@dataclass
class Tokenizer:
    """Text to tokens."""

    path: str | None = key(
        None,
        "a tokenizer.json, a .model of SentencePiece or tiktoken, or a folder with either or"
        " with vocab.json and merges.txt; `demo:bytes` is made on the spot; null:"
        " model.init_from's",
    )
    add_tokens: list[str] = key(
        [],
        "special tokens that it lacks, e.g. ['<|im_start|>','<|im_end|>'] for"
        " data.template=chatml; the model's vocabulary grows with them",
    )


@dataclass
class Adapter:
    """Small matrices that are trained in addition to the model's frozen weights.

    LoRA, DoRA; QLoRA: on weights of 4 bits.
    """

    name: str = key(
        "none",
        "`lora`: W + scale · B·A for each adapted matrix W; `dora`: with a trained length for"
        " each row of that sum; `none`: all weights are trained",
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
        "modules that are trained in full besides: head, embedding, norms, or names and patterns",
    )
    base: str = key(
        "auto",
        "number format in which frozen weights are kept: `auto`: precision.param_dtype;"
        " `nf4`: the blocks' matrices in 4 bits, all else as with auto",
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
        "ranks that split each block's heads and feed-forward channels, and the rows' tokens"
        " between blocks; neighbours, inside a node",
        minimum=1,
    )
    context: int = key(
        1,
        "ranks that split each row's tokens, for rows too long for one; neighbours, inside a node "
        "if they can be",
        minimum=1,
    )
    expert: int = key(
        1,
        "ranks that divide the experts of a mixture among them; tokens go to them by all-to-all;"
        " divides shard × context × tensor; neighbours, inside a node",
        minimum=1,
    )
    context_method: str = key(
        "auto",
        "how ranks that split rows attend to them. `ulysses`: with some heads each, by all-to-all; "
        "`gathered`: with the queries of their tokens each, to everyone's keys and values; "
        "`ring`: to those of one rank after the other, merged; "
        "`auto`: ulysses where the heads divide, else gathered, of rows from 32,768 tokens on ring",
        choices=("auto", "ulysses", "gathered", "ring"),
    )
    pipeline: int = key(
        1,
        "ranks among which the blocks are divided, one stage after the other; the outermost"
        " dimension, between nodes (torch 2.13)",
        minimum=1,
    )
    pipeline_schedule: str = key(
        "1f1b",
        "order of the micro-batches in a pipeline. `1f1b`; `gpipe`: all forwards, then all"
        " backwards; `interleaved`: two stages a rank, half the idle time, twice the messages;"
        " `zbv`, `dualpipev`: two stages a rank, and the gradients of weights fill idle time",
        choices=("1f1b", "gpipe", "interleaved", "zbv", "dualpipev"),
    )
    reshard_after_forward: bool | int | Literal["auto"] = key(
        "auto",
        "free a unit's gathered parameters after forward and gather again in backward;"
        " a number: keep a second copy of the blocks, divided among that many neighbouring ranks,"
        " and gather from it; `auto`: true, but false in a pipeline, with ddp, and on one rank"
        " without cpu_offload",
        minimum=2,
    )
    blocks_per_unit: int = key(
        1, "decoder blocks gathered together: larger messages, more memory", minimum=1
    )
    prefetch: int = key(
        1, "units gathered ahead of the one that computes; 0: FSDP2's own order", minimum=0
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and optimizer state in host memory")
    accumulate: str = key(
        "sharded",
        "between micro-batches: `sharded` reduces each one's gradient (hsdp's all-reduce"
        " waits for the last); `unsharded` reduces once, but every rank holds the whole"
        " gradient",
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
        "send messages of fully_shard in 8-bit numbers with a scale for every 256: `weights` that"
        " are gathered, `gradients` that are reduced, `both`; not exact",
        choices=("none", "weights", "gradients", "both"),
    )
    error_feedback: bool = key(
        False,
        "quantize=gradients or both: add what encoding has cut off to the next message; every rank"
        " keeps as much as the whole gradient in float32, and a resume begins without it",
    )
    separate_reduce_scatter: bool = key(
        False,
        "reduce gradients over a process group of their own, so that backward's all-gathers"
        " need not wait for them (torch 2.13)",
    )
    reduce_scatter_buffers: int = key(
        1,
        "gradient reductions running at a time; 2 lets backward continue while one is late,"
        " and keeps one more in memory (torch 2.13)",
        minimum=1,
    )


@dataclass
class Replicas:
    """Groups of ranks that share a run's steps, and may leave and join while the others go on.

    Each group is a launch of the same command with another replicas.id. See docs/replicas.md.
    """

    method: str = key(
        "none",
        "`none`: all ranks are one group; `sync`: the groups divide the rows of each step and sum"
        " their gradients; `diloco`: each group trains by itself, and every so many steps they"
        " average what they have changed",
        choices=("none", "sync", "diloco"),
    )
    id: int = key(0, "number of this group, another one for each", minimum=0)
    lighthouse: str | None = key(
        None, "where the groups find each other: HOST:PORT of  fsdp-trainer lighthouse"
    )
    min: int = key(1, "with fewer groups than this, those present wait", minimum=1)
    every: int = key(50, "diloco: optimizer steps between two averages", minimum=1)
    outer_lr: float = key(0.7, "diloco: learning rate of the outer step", above=0)
    outer_momentum: float = key(
        0.9, "diloco: Nesterov momentum of the outer step", minimum=0, maximum=1
    )
    fragments: int = key(
        1,
        "diloco: parts of the model, each averaged at another step of every `every`; 1: all at"
        " once",
        minimum=1,
    )
    delay: int = key(0, "diloco: steps that go on while a part's average is on its way", minimum=0)
    mixing: float = key(
        0.0,
        "diloco: share of a group's own weights that stays in the average",
        minimum=0,
        maximum=1,
    )
    quantize: bool = key(False, "diloco: exchange what has changed as 8-bit numbers")


@dataclass
class ActivationCheckpoint:
    """Trade compute for activation memory."""

    mode: str = key(
        "none",
        "what backward computes again. `full`: whole blocks; `selective`: what"
        " activation_checkpoint.save does not keep; `budget`: what the compiler finds"
        " cheapest",
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
        "what blocks keep for backward goes to pinned host memory, and comes back before it"
        " is needed",
    )


@dataclass
class Precision:
    """Number formats of compute, reduction and the stored weights."""

    param_dtype: str = key(
        "bfloat16",
        "forward and backward, and the all-gather; float16: for GPUs without bfloat16 (V100, T4),"
        " with a loss scale",
        choices=("bfloat16", "float32", "float16"),
    )
    reduce_dtype: str = key(
        "float32", "the gradients' reduce-scatter", choices=("float32", "bfloat16")
    )
    master_dtype: str = key(
        "float32", "sharded weights, gradients and optimizer state", choices=("float32", "bfloat16")
    )
    loss_scale: float = key(
        65536.0,
        "float16: factor of the loss in backward, so that small gradients are not 0, at the start;"
        " halved where a gradient is not finite, and that step is skipped",
        minimum=1,
    )
    loss_scale_steps: int = key(
        2000, "float16: steps in a row without such a gradient that double it", minimum=1
    )
    float8: str | None = key(
        None,
        "matrix products of large linear layers in float8 on GPUs that can (extra: ao): one"
        " scale for a matrix, or for each row; the last computes weight gradients in"
        " bfloat16; null: none",
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
        "folder for what was compiled, shared by ranks, restarts and runs; null:"
        " TORCHINDUCTOR_CACHE_DIR, else run.root/.compile",
    )


WHOLE_MATRICES = ("muon", "lamb", "lars")
"""Optimizers whose update of a number depends on others of its matrix."""


@dataclass
class Optim:
    """The optimizer. Weight decay never applies to norms and biases."""

    name: str = key(
        "adamw",
        "which optimizer; `muon`: for the matrices of the blocks, and AdamW for all else",
        choices=("adamw", "muon", "lion", "sgd", "lamb", "lars"),
    )
    implementation: str = key(
        "auto",
        "torch's `fused` kernel; or its `foreach`, one operation at a time over all"
        " parameters and a wait for the device each step; `auto`: fused, or this program's"
        " own where torch lacks the number formats",
        choices=("auto", "fused", "foreach"),
        used_by=("adamw", "muon"),
    )
    init_from: str | None = key(
        None,
        "folder of another tool's checkpoint, whose AdamW states and step the run continues from:"
        " torchtitan's, FSDP's, accelerate's or DeepSpeed's. Weights: model.init_from",
        used_by=("adamw",),
    )
    state_dtype: str | None = key(
        None,
        "number format of the moments; `8bit`: blocks of up to 256 numbers share a scale;"
        " null: precision.master_dtype",
        choices=("float32", "bfloat16", "8bit"),
    )
    offload: str = key(
        "none",
        "where moments and the weights in precision.master_dtype are kept: `none`: on the device;"
        " `cpu`: in host memory, where the update runs; `disk`: in files, updated a part at a time."
        " With both the device keeps weights in precision.param_dtype",
        choices=("none", "cpu", "disk"),
    )
    offload_path: str | None = key(
        None, "offload=disk: folder of the files, on a local disk; null: the run's own folder"
    )
    rounding: str = key(
        "stochastic",
        "of weights and mean squares that are kept in bfloat16: `stochastic` is right on"
        " average, `nearest` loses updates below 1/256 of a number",
        choices=("stochastic", "nearest"),
    )
    lr: float = key(1e-5, "peak learning rate", minimum=0)
    weight_decay: float = key(0.0, "decoupled weight decay", minimum=0)
    betas: list[float] = key(
        [0.9, 0.95],
        "decay of the running mean and mean square; lion: of the mean as used in the update, and as"
        " stored",
        minimum=0,
        maximum=1,
        used_by=("adamw", "muon", "lion", "lamb"),
    )
    eps: float = key(
        1e-8, "added to the root of the mean square", above=0, used_by=("adamw", "muon", "lamb")
    )
    momentum: float = key(
        0.95,
        "muon, sgd: decay of the running sum of gradients; lars: of that of steps",
        minimum=0,
        maximum=1,
        used_by=("muon", "sgd", "lars"),
    )
    nesterov: bool = key(
        True, "muon, sgd: look ahead by the gradient of this step", used_by=("muon", "sgd")
    )
    trust_coefficient: float = key(
        0.001,
        "lars: share of its norm that a parameter moves in a step, at lr=1 and without momentum",
        above=0,
        used_by=("lars",),
    )
    ns_steps: int = key(
        5,
        "muon: steps of Newton-Schulz, which makes updates orthogonal",
        minimum=1,
        used_by=("muon",),
    )
    ns_dtype: str = key(
        "bfloat16",
        "muon: number format of Newton-Schulz and of the messages to and from the rank that"
        " computes it; in `float32` weights do not depend on the number of ranks",
        choices=("bfloat16", "float32"),
        used_by=("muon",),
    )
    normuon: bool = key(
        False,
        "muon: divide each row of an orthogonal update by the root of its running mean square"
        " (NorMuon), so that all neurons move as far",
        used_by=("muon",),
    )
    normuon_beta: float = key(
        0.95, "NorMuon: decay of that running mean square", minimum=0, maximum=1, used_by=("muon",)
    )
    ns_coefficients: str = key(
        "quintic",
        "muon: polynomials of Newton-Schulz; `quintic`: Keller Jordan's, the same in each step;"
        " `polar_express`: one for each step, closer to orthogonal",
        choices=("quintic", "polar_express"),
        used_by=("muon",),
    )
    scale: str = key(
        "adamw",
        "muon: factor of an orthogonal update. `adamw`: 0.2 · √max(rows, columns), for the lr"
        " and weight decay of AdamW (Moonlight); `keller`: √max(1, rows / columns), for an lr"
        " of about 0.02",
        choices=("adamw", "keller"),
        used_by=("muon",),
    )
    lr_scaling: str | None = key(
        None,
        "scale lr with the batch: by (batch.rows × batch.seq_len / lr_batch_tokens), its root"
        " (the usual rule for Adam), or not (null)",
        choices=("sqrt", "linear"),
    )
    lr_batch_tokens: int | None = key(
        None, "the batch size, in tokens of a step, for which lr is given", minimum=1
    )
    grad_clip: float | None = key(1.0, "largest global gradient norm; null: off", above=0)
    grad_clip_value: float | None = key(
        None,
        "largest absolute value of a gradient's element, applied before the norm; null: off",
        above=0,
    )


@dataclass
class Schedule:
    """The learning rate over the run, as a share of optim.lr."""

    name: str = key(
        "cosine", "shape after the warm-up", choices=("constant", "linear", "cosine", "wsd")
    )
    warmup_steps: int = key(
        0, "linear rise from 0, in steps; schedule.warmup is a share of all", minimum=0
    )
    warmup: float = key(
        0.0,
        "the rise as a share of all steps, rounded up, in place of warmup_steps",
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
    keep: int = key(2, "how many committed checkpoints stay; older ones are deleted", minimum=1)
    best: bool = key(
        False,
        "also save at every new lowest validation loss, and keep that checkpoint besides the"
        " newest; checkpoints/best names it",
    )
    mode: str = key(
        "sync",
        "`sync`: training waits for the write; `async`: only for a copy in host memory, which"
        " a thread writes",
        choices=("sync", "async"),
    )
    patience: str = key(
        "10m",
        "how long the last checkpoint of a run is tried again where it cannot be written, as"
        " on a full disk",
    )
    make_room: bool = key(
        False, "delete the oldest checkpoint where there is no room for the last one"
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
        "optimizer steps between writes; each step has its own line all the same; null: 1 on"
        " CPU, 10 on GPU",
        minimum=1,
    )
    wandb: str = key(
        "disabled",
        "Weights & Biases; a restarted run continues in the same one",
        choices=("online", "offline", "disabled"),
    )
    project: str = key("fsdp_trainer", "Weights & Biases project")
    tensorboard: bool = key(
        False, "write TensorBoard events to the run folder (extra: tensorboard)"
    )
    mlflow: bool = key(
        False,
        "log to MLflow, where MLFLOW_TRACKING_URI says, else in the run's folder (extra: mlflow)",
    )
    command: str | None = key(
        None,
        "a program that gets the lines of metrics.jsonl and events.jsonl on its standard"
        " input; typed, never in a file",
    )
    stragglers: str | None = key(
        "60s",
        "how often to compare what ranks do outside collectives, and name one that the others"
        " wait for; null: never",
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
        "grpo: how many of the ranks, the last ones, only generate answers while the others train;"
        " 0: all do both in turn",
        minimum=0,
    )
    groups: int = key(
        1,
        "with replicas.method: groups of nproc_per_node ranks to start on this machine, and a"
        " lighthouse for them; to try them out",
        minimum=1,
    )
    nodes: int = key(
        1,
        "how many nodes are given the same command; each starts its own ranks. Slurm says so"
        " itself",
        minimum=1,
    )
    rendezvous: str | None = key(
        None, "where they meet: `HOST:PORT` of one of them, the same on all"
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
        "30m", "longest wait in a collective, and for all nodes to come, before the run is given up"
    )
    slurm_time_limit: bool = key(
        True, "in a Slurm job, stop as with train.time_limit before the job is over"
    )
    data_timeout: str = key(
        "24h",
        "longest silence in which the other ranks wait for data preparation and downloads,"
        " where tokenizing gives signs of life, and for the files of a stream",
    )
    watchdog: bool = key(
        True,
        "a process on each node finds ranks that died, were stopped or make no progress, keeps"
        " their stacks and kills them",
    )
    stall: str = key(
        "10s",
        "how long no rank of a node may get on before the one that holds them up is killed;"
        " never less than 5 times the phase's median",
    )
    env: dict[str, str] = key(
        {},
        "environment variables of the ranks; what the environment sets already stays, e.g."
        " {NCCL_DEBUG: INFO}",
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
