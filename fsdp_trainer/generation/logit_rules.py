"""Changes of the next token's logits that depend on the tokens so far, such as penalties.

Repetition penalty, n-grams and the shortest answer are as in transformers' `generate`; frequency
and presence penalty and logit bias as in OpenAI's API, which counts only the answer's tokens.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from fsdp_trainer.generation.sampling import Sampling


def with_rules(
    logits: Tensor,
    texts: Sequence[tuple[list[int], list[int]]],
    sampling: Sampling,
    stop_ids: Collection[int],
) -> Tensor:
    """Return the logits by which tokens are chosen, [rows, vocabulary].

    texts: of each row, the tokens of its prompt and those of its answer so far.
    """
    if not sampling.changes_logits:
        return logits
    logits = logits.float()
    return torch.stack(
        [
            _with_rules(row, prompt, answer, sampling, stop_ids)
            for row, (prompt, answer) in zip(logits, texts, strict=True)
        ]
    )


def _with_rules(
    row: Tensor,
    prompt: list[int],
    answer: list[int],
    sampling: Sampling,
    stop_ids: Collection[int],
) -> Tensor:
    row = row.clone()
    if sampling.repetition_penalty != 1:
        tokens = _index(row, {*prompt, *answer})
        values, penalty = row[tokens], sampling.repetition_penalty
        row[tokens] = torch.where(values < 0, values * penalty, values / penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = Counter(answer)
        times = torch.tensor([*counts.values()], dtype=row.dtype, device=row.device)
        penalties = sampling.frequency_penalty * times + sampling.presence_penalty
        row[_index(row, counts)] -= penalties
    for token, bias in sampling.logit_bias:
        row[token] += bias
    banned = set(_ends_of_ngrams([*prompt, *answer], sampling.no_repeat_ngram))
    if len(answer) < sampling.min_tokens:
        banned |= {id for id in stop_ids if id < len(row)}
    if banned:
        row[_index(row, banned)] = float("-inf")
    return row


def _index(row: Tensor, tokens: Collection[int]) -> Tensor:
    return torch.tensor([*tokens], dtype=torch.int64, device=row.device)


def _ends_of_ngrams(tokens: list[int], size: int) -> Iterator[int]:
    """Yield the tokens that would end an n-gram which has been before. size: 0: none."""
    begin = tokens[len(tokens) - size + 1 :] if size else []
    for end in range(size - 1, len(tokens)) if size else ():
        if tokens[end - size + 1 : end] == begin:
            yield tokens[end]
