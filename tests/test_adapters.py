"""Training with adapters: what peft and autograd train, however it is sharded and computed."""

import contextlib
import json
from functools import partial

import inject
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from zoo import HF, make_folder

from fsdp_trainer.distributed import local_part, local_slice
from fsdp_trainer.models.adapters import adapter_parameters
from fsdp_trainer.models.initialize import draw_part

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

STEPS, ROWS, LR, CLIP, DECAY = 5, 6, 3e-3, 0.5, 0.1
COMMON = [
    "tokenizer.path=demo:bytes",
    f"train.steps={STEPS}",
    "schedule=constant",
    f"optim.lr={LR}",
    f"optim.weight_decay={DECAY}",
    f"optim.grad_clip={CLIP}",
    "checkpoint.every=null",
    "adapter.rank=4",
    "adapter.alpha=6",
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
        keep("start", {n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
        return formats

    def keep_gradients():
        parameters = inject.trainer.model.named_parameters()
        keep("gradients", {n: p.grad for n, p in parameters if p.grad is not None})

    def keep(name, tensors):
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
        if inject.this_rank(0):
            torch.save({n: t.clone() for n, t in whole.items()}, folder / f"{name}.pt")

    with (
        inject.around("fill", fill),
        inject.with_trainer(),
        inject.at("clip", keep_gradients, step=1),
    ):
        yield


@pytest.fixture
def train_adapters(train, tmp_path):
    """A training that begins with a random B; gives the run, what it began with, and the gradients
    of its first step."""

    def start(name, *how, ranks=1):
        (tmp_path / f"{name}.kept").mkdir()
        seam = partial(recorded, tmp_path / f"{name}.kept")
        run = train(name, *COMMON, *how, ranks=ranks, base=HF, seam=seam)
        kept = [torch.load(tmp_path / f"{name}.kept" / f"{n}.pt") for n in ("start", "gradients")]
        return run, *kept

    return start


@pytest.fixture
def shown(world, inputs):
    """The rows of a training."""

    def preview(folder):
        data = [f"{key}={inputs[key]}" for key in ("data.path", "data.cache")]
        batch = ["batch.seq_len=64", f"batch.rows={ROWS}", "tokenizer.path=demo:bytes"]
        count = ["preview.format=json", f"preview.rows={STEPS * ROWS}"]
        how = [f"model.init_from={folder}", *data, *batch, *count]
        return [json.loads(line) for line in world.command("preview", *how)[0].out.splitlines()]

    return preview


KINDS = {
    "lora": (["adapter=lora"], {}),
    "rslora": (["adapter=lora", "adapter.scaling=rslora"], {"use_rslora": True}),
    "dora": (["adapter=dora"], {"use_dora": True}),
}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("lora", 1),
        ("dora", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("lora", 2), ("lora", 4), ("rslora", 1), ("rslora", 2), ("rslora", 4)]
        ),
        *(pytest.param("dora", ranks, marks=pytest.mark.slow) for ranks in (1, 4)),
    ],
)
def test_losses_and_gradients_are_those_of_peft(train_adapters, shown, tmp_path, kind, ranks):
    folder = make_folder(tmp_path / "hf")
    how, options = KINDS[kind]
    run, start, gradients = train_adapters("ours", *how, f"model.init_from={folder}", ranks=ranks)
    peft_options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}
    losses, expected = train_with_peft(folder, shown(folder), start, **peft_options)
    assert run.column("loss") == pytest.approx(losses, abs=1e-6, rel=0)
    assert losses[-1] < losses[0] - 0.05, "it must learn, else this shows little"
    assert_close(gradients, expected)


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
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).train()
    trained = {our_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            if "magnitude" in name:
                torch.testing.assert_close(parameter, start[name])
            parameter.copy_(start[name])
    return plain_training(lambda tokens: model(tokens).logits, trained, rows)


def our_name(name):
    """Return our name of a parameter of peft's."""
    return (
        name.removeprefix("base_model.model.")
        .replace(".default.weight", ".weight")
        .replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        .replace(".modules_to_save.weight", ".weight")
    )


def plain_training(logits, trained, rows):
    """AdamW on the mean of all supervised tokens, one document at a time."""
    decayed = [p for p in trained.values() if p.ndim >= 2]
    others = [p for p in trained.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, first = [], {}
    for step in range(STEPS):
        batch = rows[step * ROWS : (step + 1) * ROWS]
        count = sum(label != -100 for row in batch for label in row["labels"])
        loss = 0.0
        for tokens, labels in documents(batch):
            scores = logits(tokens[None])[0]
            nll = F.cross_entropy(scores, labels, reduction="sum", ignore_index=-100) / count
            nll.backward()
            loss += nll.item()
        losses.append(loss)
        first = first or {name: p.grad.clone() for name, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def documents(rows):
    """Yield tokens and labels of each document."""
    for row in rows:
        begin = 0
        for length in row["documents"]:
            part = slice(begin, begin + length)
            yield torch.tensor(row["tokens"][part]), torch.tensor(row["labels"][part])
            begin += length
