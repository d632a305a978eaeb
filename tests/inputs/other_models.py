"""Small models of architectures that the decoder does not know, made by transformers."""

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo import MODELS

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

OTHERS = MODELS["others"]
"""Sizes by model_type."""
COMMON = OTHERS["olmo"]
"""Sizes that most of them have."""


RUN = [
    "precision=fp32", "schedule=constant", "schedule.warmup_steps=0", "checkpoint.export_hf=true",
    "checkpoint.every=null", "launch.watchdog=false",
]  # fmt: skip
"""Overrides of a run that is compared with transformers."""
ADAMW = ["optim.lr=1e-3", "optim.eps=1e-5", "optim.weight_decay=0.1", "optim.grad_clip=null"]
"""The optimizer of `adamw_steps`."""
SGD = ["optim=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.grad_clip=null"]


def make_other(kind, **options):
    """Return transformers' model of a model_type, in float32."""
    config = CONFIG_MAPPING[kind](**OTHERS.get(kind, {}) | options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and kind != "mamba":
            parameter.data.mul_(3)  # so that attention and experts matter
    return model.eval()


def make_other_folder(folder, kind, **options):
    """Write a model of transformers and a tokenizer; return the folder."""
    make_other(kind, **options).save_pretrained(folder)
    load_tokenizer("demo:bytes").save(folder)
    return folder


def adamw_steps(model, loss_of, count):
    """Return the losses of some steps of torch's AdamW.

    loss_of: returns the loss of the model.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)
    losses = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def log_probabilities(model, inputs):
    """Return the log-probability of each token of a document but the first."""
    scores = model(**inputs).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


def loss_of(model, samples):
    """Return the mean negative log-likelihood of all supervised tokens, each sample alone.

    samples: (the model's inputs, which tokens are supervised).
    """
    total = sum((log_probabilities(model, inputs) * mask[1:]).sum() for inputs, mask in samples)
    return -total / sum(mask[1:].sum() for _, mask in samples)
