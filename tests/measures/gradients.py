"""Gradients of all parameters after a packed micro-batch, compared with those of transformers."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from transformers.core_model_loading import revert_weight_conversion

from fsdp_trainer.checkpoint.huggingface import tensor_parts
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.training.objective import CrossEntropy

LENGTHS = [[5, 1, 17, 9], [40], [3, 3]]
"""Of the documents in each row of ROW tokens."""
ROW, VOCABULARY = 40, 97
INDEX = torch.tensor([0, 3, 7, 25, 50, 79, 80, 84])
TARGETS = torch.tensor([1, 96, 5, 5, 0, 7, 3, 2])
WEIGHTS = torch.tensor([1, 0.5, 1, 1, 2, 1, 1, 1])


def random_tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def positions_of(lengths, row):
    return torch.stack(
        [
            F.pad(torch.cat([torch.arange(n) for n in lens]), (0, row - sum(lens)))
            for lens in lengths
        ]
    )


def documents(tokens):
    """Yield the row of each document, its slice of it, and its tokens as a row of their own."""
    for i, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            yield i, part, tokens[i : i + 1, part]
            start += length


def packed_batch():
    tokens = random_tokens(len(LENGTHS), ROW)
    layout = LAYOUTS["documents"](LENGTHS, ROW, torch.device("cpu"))
    return MicroBatch(tokens, positions_of(LENGTHS, ROW), layout, INDEX, TARGETS, WEIGHTS)


def learnt_documents():
    """Yield the tokens of each document of the packed batch as a row of their own, and the place in
    it, target and weight of each of its scored positions."""
    for i, part, alone in documents(packed_batch().tokens):
        scored = zip((INDEX - i * ROW).tolist(), TARGETS, WEIGHTS, strict=True)
        yield (
            alone,
            [(at - part.start, *rest) for at, *rest in scored if part.start <= at < part.stop],
        )


def assert_near(gradients, wanted, tolerance=1e-4):
    """Raise AssertionError if a gradient differs, which `gradients` has in parts."""
    for name, parts in gradients.items():
        error = (torch.cat(parts).view_as(wanted[name]) - wanted[name]).abs().max()
        assert error <= tolerance * max(1, wanted[name].abs().max()), name


def assert_gradients_are_those_of(theirs, ours, tolerance=1e-4):
    """Raise AssertionError if a gradient of ours differs. Theirs get each document by itself."""
    ours.zero_grad()
    ours(packed_batch(), CrossEntropy(WEIGHTS)).value.backward()
    theirs.zero_grad()
    loss = torch.zeros(())
    for alone, scored in learnt_documents():
        logits = theirs(alone).logits[0]
        for place, target, weight in scored:
            loss = loss + weight * F.cross_entropy(logits[place], target)
    loss.backward()
    wanted, gradients = gradients_of(theirs), stored_gradients(ours)
    assert gradients.keys() == wanted.keys(), "every parameter has one of ours"
    assert_near(gradients, wanted, tolerance)


def gradients_of(theirs):
    """Return their gradients by the names of a folder's tensors, which they fuse in memory."""
    given = {n: zero_if_none(p) for n, p in theirs.named_parameters()}
    return revert_weight_conversion(theirs, given)


def stored_gradients(ours):
    """Return the parts of our gradients by the names of a folder's tensors."""
    parameters, parts = dict(ours.named_parameters()), defaultdict(list)
    transposed = getattr(ours, "transposed_weights", ())
    for part in tensor_parts(ours, ours.config.vocab_size):
        if part.parameter not in parameters:
            continue  # a buffer
        gradient = zero_if_none(parameters[part.parameter])
        gradient = gradient.T if part.parameter in transposed else gradient
        matrix = gradient.flatten(0, 1) if gradient.ndim > 2 else gradient
        parts[part.tensor].append(matrix[part.parameter_row :][: part.rows])
    return parts


def zero_if_none(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
