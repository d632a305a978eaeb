"""The runs of which a step is taken, by name: overrides of a rehearsal on 8 GPUs.

Widths are those of published models, of which few blocks are taken: numbers of heads, head sizes
and alignments are the real ones.
"""

COMMON = [
    "plan.gpu=h100", "plan.world_size=8", "batch.seq_len=2048", "batch.rows=16",
    "batch.micro_rows=1",
]  # fmt: skip
BLOCKS = {"deepseek_v3": 4, "moonlight_16b_a3b": 3, "gemma3_4b": 6}
"""Blocks of models whose blocks differ, so that each kind is among them; others have 2."""


def of_model(name: str) -> list[str]:
    """Return the overrides that take a few blocks of a published model."""
    return [f"model={name}", f"model.num_hidden_layers={BLOCKS.get(name, 2)}"]


LLAMA, MIXTURE = of_model("llama3_8b"), of_model("qwen3_30b_a3b")
MODELS = [
    "llama3_8b", "llama3_2_1b", "mistral_7b", "mixtral_8x7b", "qwen2_5_7b", "qwen3_8b",
    "qwen3_30b_a3b", "qwen1_5_moe_a2_7b", "gemma2_9b", "gemma3_4b", "olmo2_7b", "olmoe_7b",
    "phi3_mini", "gpt_oss_20b", "deepseek_v3", "moonlight_16b_a3b",
]  # fmt: skip
CONFIGS = "build/no-gpu/configs"
"""Folder of configurations for transformers' classes."""
TRANSFORMERS = [
    "llama", "mixtral", "starcoder2", "cohere", "glm4", "granitemoe", "gpt_neox", "phimoe",
    "qwen2_5_vl",
]  # fmt: skip
"""Architectures that are computed by transformers' classes."""
LAYOUTS = {
    "hsdp": ["sharding=hsdp", "sharding.replicas=2"],
    "ddp": ["sharding=ddp"],
    "unsharded": ["sharding.accumulate=unsharded"],
    "no reshard": ["sharding.reshard_after_forward=false"],
    "tensor 2": ["sharding.tensor=2"],
    "tensor 8": ["sharding.tensor=8"],
    "context 4, ring": ["sharding.context=4", "sharding.context_method=ring"],
    "context 4, ring, packed": [
        "sharding.context=4", "sharding.context_method=ring", "objective=dpo",
    ],
    "context 4, ring, by flash": [
        "sharding.context=4", "sharding.context_method=ring", "model.attention_kernel=flash",
    ],
    "context 4, ring, window": [
        "sharding.context=4", "sharding.context_method=ring", "model.family=mistral",
        "model.sliding_window=512",
    ],
    "context 4, ulysses": ["sharding.context=4", "sharding.context_method=ulysses"],
    "context 4, gathered": ["sharding.context=4", "sharding.context_method=gathered"],
    "context 2, tensor 2": ["sharding.context=2", "sharding.tensor=2"],
    "pipeline 2, 1f1b": ["sharding.pipeline=2"],
    "pipeline 2, interleaved": [
        "model.num_hidden_layers=4", "sharding.pipeline=2",
        "sharding.pipeline_schedule=interleaved",
    ],
    "pipeline 2, zbv": [
        "model.num_hidden_layers=4", "sharding.pipeline=2", "sharding.pipeline_schedule=zbv",
    ],
    "pipeline 2, tensor 2, context 2": [
        "sharding.pipeline=2", "sharding.tensor=2", "sharding.context=2",
    ],
    "weights and states on the host": ["sharding.cpu_offload=true"],
    "a second copy": ["sharding.reshard_after_forward=4"],
    "messages in eight bits": ["sharding.quantize=both", "sharding.error_feedback=true"],
}  # fmt: skip
METHODS = {
    "dpo": ["objective=dpo"],
    "dpo, lora": ["objective=dpo", "adapter=lora"],
    "orpo": ["objective=orpo"],
    "simpo": ["objective=simpo"],
    "reward": ["objective=reward"],
    "grpo": ["objective=grpo", "objective.rewards=[exact]"],
    "embed": ["objective=embed"],
    "rerank": ["objective=rerank"],
    "classify, tensor 2": ["objective=classify", "objective.labels=[a,b,c]", "sharding.tensor=2"],
    "tag, lora": ["objective=tag", "objective.labels=[O,B-X,I-X]", "adapter=lora"],
}
EXPERTS = {
    "experts 8": ["sharding.expert=8"],
    "tensor 2, experts 4": ["sharding.tensor=2", "sharding.expert=4"],
    "pipeline 2, experts 2": ["sharding.pipeline=2", "sharding.expert=2"],
    "qlora, experts": ["adapter=qlora", "adapter.targets=[all,experts]"],
    "float8, experts": ["precision=fp8", "sharding.expert=8"],
}
"""Of a mixture of experts."""
RECIPES = {
    "distil": ["+recipe=qwen3_0_6b_distil", "compile=disabled"],
    "experts 4 of DeepSeek": [
        *of_model("deepseek_v3"), "sharding.expert=4", "activation_checkpoint=full",
    ],
    "MTP of DeepSeek": [*of_model("deepseek_v3"), "sharding.expert=8", "objective.mtp=0.3"],
}  # fmt: skip
OTHERS = {
    "lora": ["adapter=lora"],
    "dora": ["adapter=dora"],
    "qlora": ["adapter=qlora"],
    "lora, all matrices": ["adapter=lora", "adapter.targets=[all]"],
    "qlora, tensor 2": ["adapter=qlora", "sharding.tensor=2"],
    "recomputed": ["activation_checkpoint=full"],
    "selective": ["activation_checkpoint=selective"],
    "activations on the host": ["activation_checkpoint=full", "activation_checkpoint.offload=true"],
    "fp16": ["precision=fp16"],
    "fp32": ["precision=fp32"],
    "pure bf16": ["precision=pure_bf16"],
    "padded rows": ["data.packing=none", "data.pad_to_multiple=128"],
    "z loss, smoothing": ["loss.z_loss=1e-4", "loss.label_smoothing=0.1"],
    "clipped values": ["optim.grad_clip_value=1.0"],
    "frozen embeddings": ["train.freeze=[model.embed_tokens.weight]"],
}
OPTIMIZERS = [
    "adamw_8bit", "adamw_bf16", "muon", "normuon", "lion", "sgd", "lamb", "lars",
]  # fmt: skip
FLOAT8 = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
KERNELS = {
    "documents by flash": "aten::_scaled_dot_product_flash_attention",
    "mask by efficient": "aten::_scaled_dot_product_efficient_attention",
    "documents by math": "aten::bmm",
    "varlen by cudnn": CUDNN,
    "documents by cudnn": CUDNN,
    "context 4, ring": CUDNN,
    "context 4, ring, by flash": "aten::_flash_attention_forward",
    "context 4, ring, packed": "aten::_flash_attention_forward",
    "context 4, ring, window": "aten::_scaled_dot_product_efficient_attention",
    "compiled llama3_8b, varlen, whole rows": CUDNN,
    "compiled qwen2_5_7b, varlen, whole rows": CUDNN,
    "compiled qwen1_5_moe_a2_7b, varlen, whole rows": CUDNN,
}
"""Cases of attention, and the operator that computes it. Those of a step: a layout by a kernel."""
WAITING = {
    "weights and states on the host": "FSDP2 waits for each gradient that it copies to the host",
    "transformers phimoe": "transformers moves its factors of long rows in each forward",
}
"""Cases in which the host waits, and why nothing is done about it."""
SCORING = {
    "": (LLAMA, ["documents", "mask", "varlen", "flex"]),
    ", window": (
        [*of_model("mistral_7b"), "model.sliding_window=512"],
        ["documents", "mask", "varlen", "flex"],
    ),
    ", soft cap": (of_model("gemma2_9b"), ["documents", "mask", "flex"]),
    ", sinks": (of_model("gpt_oss_20b"), ["documents", "mask", "flex"]),
}  # fmt: skip
"""A model that scores in a special way, and the layouts of attention that can."""


COMPILED = {
    "llama3_8b": ["varlen", "documents", "mask", "flex"],
    "gemma2_9b": ["flex", "documents"],
    "gpt_oss_20b": ["flex", "documents"],
    "gemma3_4b": ["varlen"],
    "olmo2_7b": ["varlen"],
    "phi3_mini": ["varlen"],
    "qwen2_5_7b": ["varlen"],
    "qwen3_30b_a3b": ["varlen"],
    "qwen1_5_moe_a2_7b": ["varlen"],
    "mixtral_8x7b": ["varlen"],
    "deepseek_v3": ["documents", "mask"],
}
"""Models of which a block is compiled, with these layouts of attention."""


def compiled_cases() -> dict[str, list[str]]:
    """Return the overrides of every block that is compiled, by name."""
    cases = {
        f"compiled {model}, {layout}": [*COMMON, *of_model(model), f"model.attention={layout}"]
        for model, layouts in COMPILED.items()
        for layout in layouts
    }
    whole = [name for name in KERNELS if name.startswith("compiled")]
    by_cudnn = "model.attention_kernel=cudnn"
    return cases | {name: [*cases[name.removesuffix(", whole rows")], by_cudnn] for name in whole}


def steps() -> dict[str, list[str]]:
    """Return the overrides of every step, by its name."""
    cases = {f"model {name}": of_model(name) for name in MODELS}
    for name in TRANSFORMERS:
        source = [f"model.init_from={CONFIGS}/{name}", "model.implementation=transformers"]
        cases[f"transformers {name}"] = source
    for name, (model, layouts) in SCORING.items():
        cases |= {f"{one}{name}": [*model, f"model.attention={one}"] for one in layouts}
    for name in filter(lambda one: " by " in one and "," not in one, KERNELS):
        layout, kernel = name.split(" by ")
        chosen = [f"model.attention={layout}", f"model.attention_kernel={kernel}"]
        cases[name] = [*LLAMA, *chosen]
    for name in OPTIMIZERS:
        cases[f"optim {name}"] = [*LLAMA, f"optim={name}"]
    for recipe in FLOAT8:
        cases[f"float8 {recipe}"] = [*LLAMA, "precision=fp8", f"precision.float8={recipe}"]
    cases["float8 tensorwise, tensor 2"] = [*LLAMA, "precision=fp8", "sharding.tensor=2"]
    for name, words in (LAYOUTS | METHODS | OTHERS).items():
        cases[name] = [*LLAMA, *words]
    cases |= {name: [*MIXTURE, *words] for name, words in EXPERTS.items()} | RECIPES
    return {name: [*COMMON, *words] for name, words in cases.items()}
