"""Our decoder as a model of lm-evaluation-harness, which has the tasks. Import it late.

Every rank runs the complete harness as if it were alone, and passes the same requests to this
class. Only the model's computation is divided among the ranks, and every rank gets all results.
"""

from collections import Counter
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.evaluation.scoring import Ending, Scorer
from fsdp_trainer.generation.sampling import Sampling

DEFAULT_ANSWER = 256
UNFINISHED_TOKENS = 8  # more than an incomplete character or a special token can take
"""Tokens that a task may generate by default, as in lm-evaluation-harness."""


class HarnessModel(TemplateLM):
    """A model with its tokenizer and chat template."""

    def __init__(self, scorer: Scorer, tokenizer: TextTokenizer, template: Template):
        super().__init__()
        self.scorer = scorer
        self.text_tokenizer = tokenizer
        self.published = tokenizer.as_published()
        self.template = template

    # --- interface of the harness

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        eos = self.text_tokenizer.eos_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: bos, else eos, as in the harness's HFLM."""
        tokenizer = self.text_tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        return 0 if first is None else first

    @property
    def max_length(self) -> int:
        """Length of the model's context in tokens."""
        return self.scorer.context

    @property
    def tokenizer_name(self) -> str:
        """A name by which the harness distinguishes its caches."""
        return self.text_tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's name, which the harness records."""
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
        """Return the tokens of a text, with bos if the published tokenizer adds it."""
        special = add_special_tokens
        if special is None:
            bos = self.text_tokenizer.bos_token
            special = not (bos and string.startswith(bos))
        return self.published.encode(string, add_special_tokens=special).ids

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of complete texts, in windows that start with the prefix."""
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
        """Return the text that the model generates for each request.

        A task with `repeats` sends each request several times; each time is another sample.
        """
        groups: dict[tuple[str, int], list[int]] = {}
        repeats: Counter[str] = Counter()
        for i, request in enumerate(requests):
            repeated = repr(request.args)
            groups.setdefault((repr(request.args[1]), repeats[repeated]), []).append(i)
            repeats[repeated] += 1
        texts = [""] * len(requests)
        for (_, sample), numbers in groups.items():
            options = requests[numbers[0]].args[1]
            prompts = [requests[i].args[0] for i in numbers]
            for i, text in zip(numbers, self.answers(prompts, options, sample), strict=True):
                texts[i] = text
        return texts

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request (log-likelihood of its continuation, True if that is greedy).

        A continuation is greedy if each of its tokens is the likeliest. requests: (texts, tokens of
        the context, tokens of the continuation).
        """
        longest = self.max_length + 1
        endings = [
            Ending(tuple((before + after)[-longest:]), min(len(after), self.max_length))
            for _, before, after in requests
        ]
        return [(score.total, score.is_greedy) for score in self.scorer.likelihoods(endings)]

    # --- generation

    def answers(self, prompts: list[str], options: dict[str, Any], seed: int = 0) -> list[str]:
        """Return the continuations of prompts that have the same generation options.

        As in the harness's HFLM, the beginning of a prompt is left out to make room for the longest
        answer. If that has no room, half of the context is for the prompt.
        """
        given = normalize_gen_kwargs(options, DEFAULT_ANSWER)
        until = handle_stop_sequences(given.get("until"), eos=self.text_tokenizer.eos_token)
        room = self.max_length - given["max_gen_toks"]
        room = room if room > 0 else max(1, self.max_length // 2)
        sampling = Sampling(
            max_tokens=given["max_gen_toks"],
            temperature=given.get("temperature", 1.0) if given.get("do_sample") else 0.0,
            top_p=given.get("top_p", 1.0),
            seed=seed,
        )
        decode = self.text_tokenizer.decode
        # tokens of which the end of an answer is decoded; a stop string has at most one per byte
        longest = max((len(stop.encode()) for stop in until), default=0) + UNFINISHED_TOKENS

        def has_stop(tokens: list[int]) -> bool:
            text = decode(tokens)
            return any(stop and stop in text for stop in until)

        def is_over(tokens: list[int]) -> bool:
            return has_stop(tokens[-longest:]) and has_stop(tokens)

        tokens = [self.tok_encode(prompt)[-room:] for prompt in prompts]
        stop_ids = self.text_tokenizer.stop_ids
        answers = self.scorer.continuations(tokens, stop_ids, sampling, is_over)
        return [postprocess_generated_text(decode(answer), until, None) for answer in answers]
