"""Our decoder as a model of lm-evaluation-harness, which has the tasks. Import it late.

Every rank runs the whole harness, as if it were alone, and hands the same requests to this class;
only what the model computes is shared out, and every rank gets all results.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.distributed import gather, to_device
from fsdp_trainer.generation.cache import Prompts
from fsdp_trainer.generation.generate import generate_tokens
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.decoder import Decoder

BATCH_TOKENS = 4096
"""Tokens of a forward; a longer request is computed alone."""
DEFAULT_ANSWER = 256
"""Tokens that a task may generate if it does not say, as in lm-evaluation-harness."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class HarnessModel(TemplateLM):
    """A whole model on each rank, with its tokenizer and chat template.

    rows: requests that are computed at the same time.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextTokenizer,
        template: Template,
        rows: int,
        device: torch.device,
    ):
        super().__init__()
        self.model = model
        self.text_tokenizer = tokenizer
        self.published = tokenizer.as_published()
        self.template = template
        self.rows = rows
        self.own_device = device

    # --- the harness asks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        eos = self.text_tokenizer.eos_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: bos, else eos, as HFLM's."""
        tokenizer = self.text_tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        return 0 if first is None else first

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.model.config.max_position_embeddings

    @property
    def tokenizer_name(self) -> str:
        """A name by which the harness tells its caches apart."""
        return self.text_tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's name, for the record."""
        return self.template.name if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text."""
        if add_generation_prompt:
            return self.template.ask(chat_history)
        return self.template.render(self.template.adapt(chat_history, None))

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text, with bos where the published tokenizer adds it."""
        special = add_special_tokens
        if special is None:
            bos = self.text_tokenizer.bos_token
            special = not (bos and string.startswith(bos))
        return self.published.encode(string, add_special_tokens=special).ids

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows that begin with the prefix token."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            parts = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            windows += [(None, *part) for part in parts]
            counts.append(len(parts))
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        ends = np.cumsum([0, *counts])
        return [sum(scores[ends[i] : ends[i + 1]]) for i in range(len(counts))]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Return what the model says to each request."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for numbers in groups.values():
            options = requests[numbers[0]].args[1]
            prompts = [requests[i].args[0] for i in numbers]
            for i, text in zip(numbers, self.answers(prompts, options), strict=True):
                texts[i] = text
        return texts

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether each token
        of it is the likeliest.

        requests: (texts, tokens of the context, tokens of the continuation).
        """
        longest = self.max_length + 1
        inputs = [tuple((before + after)[-longest:]) for _, before, after in requests]
        counts = [min(len(after), self.max_length) for _, _, after in requests]
        pairs = [*zip(inputs, counts, strict=True)]
        return shared_out(pairs, lambda own: self.scores(own), weight=lambda pair: len(pair[0]))

    # --- the model answers

    def answers(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        """Return the continuations of prompts with the same options."""
        given = normalize_gen_kwargs(options, DEFAULT_ANSWER)
        until = handle_stop_sequences(given.get("until"), eos=self.text_tokenizer.eos_token)
        room = self.max_length - given["max_gen_toks"]
        sampling = Sampling(
            max_tokens=given["max_gen_toks"],
            temperature=given["temperature"] if given.get("do_sample") else 0.0,
            top_p=given.get("top_p", 1.0),
        )
        decode = self.text_tokenizer.decode

        def is_over(tokens: list[int]) -> bool:
            text = decode(tokens)
            return any(stop and stop in text for stop in until)

        def generate(own: Sequence[list[int]]) -> list[str]:
            answers = generate_tokens(
                self.model,
                list(own),
                self.text_tokenizer.stop_ids,
                sampling,
                rows=self.rows,
                device=self.own_device,
                is_over=is_over,
            )
            return [decode(tokens) for [tokens] in answers]

        tokens = [self.tok_encode(prompt)[-max(room, 1) :] for prompt in prompts]
        texts = shared_out(tokens, generate, weight=len)
        return [postprocess_generated_text(text, until, None) for text in texts]

    def scores(self, pairs: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of the last tokens of each text.

        pairs: all tokens of a text, and how many at its end count. Texts that differ in the last
        token alone share their computation.
        """
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i][0]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for batch in self.batches([pairs[i][0] for i in order]):
            numbers = [order[i] for i in batch]
            found = self.score_batch([pairs[i] for i in numbers])
            for i, result in zip(numbers, found, strict=True):
                results[i] = result
        return results

    def batches(self, texts: list[tuple[int, ...]]) -> list[list[int]]:
        """Return numbers of texts that are computed at the same time."""
        batches: list[list[int]] = []
        size = 0
        for number, text in enumerate(texts):
            full = not batches or len(batches[-1]) == self.rows or size + len(text) > BATCH_TOKENS
            if full:
                batches.append([])
                size = 0
            batches[-1].append(number)
            size += len(text)
        return batches

    @torch.no_grad()
    def score_batch(self, pairs: list[tuple[tuple[int, ...], int]]) -> list[tuple[float, bool]]:
        """Do what `scores` does, in one forward over texts packed into one row."""
        device = self.own_device
        different = list(dict.fromkeys(tokens[:-1] for tokens, _ in pairs))
        lengths = [len(tokens) for tokens in different]
        starts = dict(zip(different, np.cumsum([0, *lengths]), strict=False))
        index = []
        for tokens, count in pairs:
            end = starts[tokens[:-1]] + len(tokens) - 1
            index.append(np.arange(end - count, end))
        packed = np.concatenate([np.array(tokens, np.int64) for tokens in different])
        positions = np.concatenate([np.arange(length) for length in lengths])
        logits = self.model.next_logits(
            to_device(packed[None], device),
            to_device(positions[None], device),
            Prompts(lengths, device),
            to_device(np.concatenate(index), device),
        )
        targets = np.concatenate([np.array(tokens[len(tokens) - n :]) for tokens, n in pairs])
        target = to_device(targets.astype(np.int64), device)[:, None]
        likelihood = logits.float().log_softmax(-1).gather(1, target)[:, 0]
        greedy = logits.argmax(-1) == target[:, 0]
        counts = [count for _, count in pairs]
        sums = [part.sum().item() for part in likelihood.cpu().split(counts)]
        all_greedy = [bool(part.all()) for part in greedy.cpu().split(counts)]
        return list(zip(sums, all_greedy, strict=True))


def shared_out(
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], Sequence[Result]],
    weight: Callable[[Item], int],
) -> list[Result]:
    """Return the work's result for each item, of which every rank computes a share. Collective.

    weight: of an item; every rank gets items of about the same weights.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(work(items)) if items else []
    ranks = dist.get_world_size()
    order = sorted(range(len(items)), key=lambda i: -weight(items[i]))
    own = order[dist.get_rank() :: ranks]
    shares = gather(list(work([items[i] for i in own])) if own else [])
    results: list[Any] = [None] * len(items)
    for rank, share in enumerate(shares):
        for i, result in zip(order[rank::ranks], share, strict=True):
            results[i] = result
    return results
