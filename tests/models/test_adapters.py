"""Training with adapters: what peft and autograd train, however it is sharded and computed."""

import contextlib
from functools import partial
from types import SimpleNamespace

import inject
import peft
import pytest
import torch
import transformers
import yaml
from layouts import of_all_stages
from plain import plain_training, shown
from tables import rows
from zoo import HF, make_folder

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.models.adapters.adapters import adapter_parameters
from fsdp_trainer.models.from_config.initialize import draw_part

STEPS, ROWS, LR, CLIP, DECAY = 3, 4, 3e-3, 0.5, 0.1
COMMON = [
    f"tokenizer.path=demo:bytes train.steps={STEPS} batch.rows={ROWS}",
    f"batch.micro_rows={ROWS} schedule=constant optim.lr={LR}",
    f"optim.weight_decay={DECAY} optim.grad_clip={CLIP} checkpoint.every=null",
    "adapter.rank=4 adapter.alpha=6",
]


@contextlib.contextmanager
def recorded(folder):
    """Begin with a random B, so that every path counts. Keep what is trained before step 1 and its
    gradients in it."""

    @torch.no_grad()
    def fill(real, model, *args):
        formats = real(model, *args)
        for name, parameter in adapter_parameters(model).items():
            if name.endswith("lora_B.weight"):
                part = local_slice(parameter)
                local_part(parameter).copy_(draw_part(7, name, part, parameter.shape, 0.05))
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        keep("start", adapter_parameters(model) | trained)
        return formats

    def keep_gradients():
        parameters = inject.trainer.runner.model.named_parameters()
        keep("gradients", {n: p.grad for n, p in parameters if p.grad is not None})

    def keep(name, tensors):
        whole = of_all_stages(tensors)
        if inject.this_rank(0):
            torch.save(whole, folder / f"{name}.pt")

    with (
        inject.around("fill", fill),
        inject.with_trainer(),
        inject.at("clip", keep_gradients, step=1),
    ):
        yield


@pytest.fixture
def train_adapters(train, tmp_path):
    """A training that begins with a random B: the run, its adapters then, its first gradients."""

    def start(name, *how, ranks=1, seam=contextlib.nullcontext):
        (tmp_path / f"{name}.kept").mkdir()
        seam = inject.together(partial(recorded, tmp_path / f"{name}.kept"), seam)
        run = train(name, *COMMON, *how, ranks=ranks, base=HF, seam=seam)
        saved = [torch.load(tmp_path / f"{name}.kept/{n}.pt") for n in ("start", "gradients")]
        return SimpleNamespace(run=run, start=saved[0], gradients=saved[1])

    return start


@pytest.fixture
def rows_of(world, inputs):
    """The rows of a training."""

    def preview(folder):
        data = [f"{key}={inputs[key]}" for key in ("data.path", "data.cache")]
        batch = f"batch.seq_len=64 batch.rows={ROWS} tokenizer.path=demo:bytes"
        return shown(world, STEPS * ROWS, f"model.init_from={folder}", *data, batch)

    return preview


WITH_PEFT = yaml.safe_load("""
dora beside biases: [llama biases, 2, adapter=dora, {use_dora: true}]
rslora by patterns, some ranks without a row:
- llama
- 3
- adapter=lora adapter.scaling=rslora adapter.targets=[q_proj,v_proj,down_proj]
  adapter.rank_pattern={layers.1.self_attn.q_proj:2,q_proj:8} adapter.alpha_pattern={down_proj:3}
  adapter.also=[head]
- use_rslora: true
  target_modules: [q_proj, v_proj, down_proj]
  rank_pattern: {layers.1.self_attn.q_proj: 2, q_proj: 8}
  alpha_pattern: {down_proj: 3}
  modules_to_save: [lm_head]
""")


@pytest.mark.parametrize("case", WITH_PEFT)
def test_losses_and_gradients_are_those_of_peft(train_adapters, rows_of, tmp_path, case):
    family, ranks, how, options = WITH_PEFT[case]
    folder = make_folder(tmp_path / "hf", family)
    ours = train_adapters("ours", how, f"model.init_from={folder}", ranks=ranks)
    losses, gradients = train_with_peft(folder, rows_of(folder), ours.start, **options)
    assert ours.run["loss"] == pytest.approx(losses, abs=1e-6, rel=0)
    assert losses[-1] < losses[0] - 0.05, "it must learn, else this shows little"
    assert_close(ours.gradients, gradients)


def assert_close(gradients, expected):
    """Every gradient is the expected one but for rounding."""
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        largest = expected[name].abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * largest)


def train_with_peft(folder, rows, start, **options):
    """Losses, and the gradients of the first step by our names. start: of our training."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).train()
    trained = {our_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            if "magnitude" in name:
                torch.testing.assert_close(parameter, start[name])
            parameter.copy_(start[name])
    return losses_and_gradients(lambda tokens: model(tokens).logits, trained, rows)


def our_name(name):
    """Return our name of a parameter of peft's."""
    return (
        name.removeprefix("base_model.model.")
        .replace(".default.weight", ".weight")
        .replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        .replace(".modules_to_save.weight", ".weight")
    )


def losses_and_gradients(logits, trained, rows):
    losses, _, first = plain_training(logits, trained, rows, [LR] * STEPS, CLIP, DECAY)
    return losses, first


def train_merged(folder, rows, start, names, scale):
    """Losses, and the gradients of the first step, by autograd through W + scale · B·A.

    names: what is trained.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    given = {name: tensor.clone().requires_grad_(name in names) for name, tensor in start.items()}
    base = {name: p.detach() for name, p in model.named_parameters()}
    fused = dict(FAMILIES[model.config.model_type].fused)

    def logits(tokens):
        weights = {name: merged(name, given, base, scale, fused) for name in base}
        return torch.func.functional_call(model, weights, (tokens,)).logits

    return losses_and_gradients(logits, {name: given[name] for name in names}, rows)


def merged(name, given, base, scale, fused):
    """Return a parameter of transformers' with the given ones in it."""
    if name in given:
        return given[name]
    layer = name.removesuffix(".weight")
    parts = next((fused[whole] for whole in fused if layer.endswith(whole)), None)
    layers = [f"{layer.rpartition('.')[0]}.{part}" for part in parts] if parts else [layer]
    if f"{layers[0]}.lora_A.weight" not in given:
        return base[name]
    pairs = [(given[f"{n}.lora_B.weight"], given[f"{n}.lora_A.weight"]) for n in layers]
    total = base[name] + scale * torch.cat([b @ a for b, a in pairs])
    if f"{layers[0]}.lora_magnitude_vector" not in given:
        return total
    magnitude = torch.cat([given[f"{n}.lora_magnitude_vector"] for n in layers])
    return magnitude[:, None] * total / total.detach().norm(dim=1, keepdim=True)


MERGED = rows("""
# parts of a fused matrix, two ranks without a row
phi3 → 4 → adapter=dora adapter.rank=2
# a tied head and norms in full
llama tied → 2 → adapter=lora adapter.also=[head,norms]
# modules in full by patterns
qwen2 window → 2 → adapter=lora adapter.also=[embedding,'model.layers.1.*norm',lm_head]
  adapter.targets=[q_proj,'model.layers.0.mlp.*']
llama → 1 → adapter=dora adapter.targets=[q_proj,down_proj] activation_checkpoint=budget
  compile=enabled
# some frozen
gemma3 long → 2 → adapter=lora train.freeze=['model.layers.1.*','*.0.*.lora_B.*']
""")


@pytest.mark.parametrize("family, ranks, how", MERGED)
def test_losses_and_gradients_are_those_through_merged_weights(
    train_adapters, rows_of, tmp_path, compiled, family, ranks, how
):
    more, seam = [], contextlib.nullcontext
    if "compile=" in how:
        more, seam = compiled[1:], inject.no_kernels()
    folder = make_folder(tmp_path / "hf", family)
    rank = 2 if "adapter.rank=2" in how else 4
    more = [*more, f"model.init_from={folder}"]
    ours = train_adapters("ours", how, *more, ranks=int(ranks), seam=seam)
    trained = list(ours.gradients)
    losses, gradients = train_merged(folder, rows_of(folder), ours.start, trained, 6 / rank)
    assert ours.run["loss"] == pytest.approx(losses, abs=2e-6, rel=0)
    assert_close(ours.gradients, gradients)
    assert "compiled again" not in ours.run.out


def test_adapters_beside_float8_products(train_adapters, tmp_path):
    pytest.importorskip("torchao")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = make_folder(tmp_path / "hf", **sizes)
    common = f"adapter=dora model.init_from={folder} precision.param_dtype=bfloat16"
    exact = train_adapters("exact", common)
    run = train_adapters(
        "run", common, "precision.float8=rowwise", ranks=2, seam=inject.emulated_float8()
    )
    assert run.run["loss"] == pytest.approx(exact.run["loss"], rel=0.03)
    assert run.run["loss"] != exact.run["loss"]
    assert run.gradients.keys() == exact.gradients.keys()
