"""Our decoder as a model of lm-evaluation-harness, which has the tasks. Import it late.

Every rank runs the complete harness as if it were alone, and passes the same requests to this
class. Only the model's computation is divided among the ranks, and every rank gets all results.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.media.kinds import READ
from fsdp_trainer.data.media.media import SampleMedium
from fsdp_trainer.data.records.row_kinds import ROW_KINDS
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.generation_settings import read_settings
from fsdp_trainer.evaluation.scoring import Ending, Prompt, Scorer
from fsdp_trainer.models.config import ONLY_TEXT

KIND = ROW_KINDS[READ.name]
"""The kind of media that tasks show."""

UNFINISHED_TOKENS = 8  # more than an incomplete character or a special token can take
MOST_REPEATS = 1 << 20
"""Distance between the seeds of tasks, within which each repeat has its own."""


class ShownText(NamedTuple):
    """A text in which the marks of media are replaced by their tokens, and the media."""

    text: str
    media: tuple[SampleMedium, ...] = ()


class HarnessModel(TemplateLM):
    """A model with its tokenizer and chat template.

    data_files: by the name of a task, the file whose folder the paths of its media begin at.
    defaults: settings of generation that hold where a task has none.
    """

    MULTIMODAL = True
    """The harness passes media. A model that reads only text refuses them itself."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: TextTokenizer,
        template: Template,
        data_files: Mapping[str, str] = MappingProxyType({}),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__()
        self.defaults = defaults
        self.data_files = data_files
        self.scorer = scorer
        self.text_tokenizer = tokenizer
        self.published = tokenizer.as_published()
        self.template = template

    # --- interface of the harness

    @property
    def eot_token_id(self) -> int:
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
        return self.scorer.context

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template.name if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, which without the prompt ends within its last turn.

        As in the harness's HFLM, a template that has no system turn shows none.
        """
        if self.template.for_record(None).forms.system == "user":
            chat_history = [turn for turn in chat_history if turn["role"] != "system"]
        reader = self.scorer.media
        mark = "" if reader is None else reader.processor.mark
        if reader is not None:
            chat_history = [KIND.marked(turn) for turn in chat_history]
        render = self.template.ask if add_generation_prompt else self.template.continued
        try:
            return render(chat_history, mark)
        except RecordError as error:
            raise UserError("a task cannot be run", "chat=true", str(error)) from None

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        special = add_special_tokens
        if special is None:
            bos = self.text_tokenizer.bos_token
            special = not (bos and string.startswith(bos))
        return self.published.encode(string, add_special_tokens=special).ids

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        shown = [i for i, request in enumerate(requests) if len(request.args) > 2]
        if not shown:
            return super().loglikelihood(requests, disable_tqdm)
        others = [i for i, request in enumerate(requests) if len(request.args) == 2]
        scores = dict(
            zip(others, super().loglikelihood([requests[i] for i in others]), strict=True)
        )
        endings = [self.ending_with_media(requests[i]) for i in shown]
        for i, score in zip(shown, self.scorer.likelihoods(endings), strict=True):
            scores[i] = score.total, score.is_greedy
        return [scores[i] for i in range(len(requests))]

    def ending_with_media(self, request: Any) -> Ending:
        context, continuation, _ = request.args
        whole = self.with_media(request, context)
        before, after = self._encode_pair(whole.text, continuation)
        self.require_room(request, len(before) + len(after))
        return Ending((*before, *after), len(after), whole.media)

    def with_media(self, request: Any, text: str) -> ShownText:
        """Return a request's text with its media. Raises UserError, which names the item."""
        if len(request.args) < 3:
            return ShownText(text)
        reader = self.scorer.media
        name = f"{request.task_name}, item {request.doc_id}"
        try:
            if reader is None:
                raise RecordError(f"has {KIND.kind}s, {ONLY_TEXT}")
            media = KIND.read_all(as_files(request.args[2]["visual"]))
            files = reader.find(media, self.data_files.get(str(request.task_name), ""))
            token = str(self.text_tokenizer.backend.id_to_token(reader.processor.token))
            marked = text.replace(KIND.mark, reader.processor.mark)
            if files and reader.processor.mark not in marked:
                raise RecordError(f"has no {KIND.mark} in its text, where an {KIND.kind} stands")
            whole = reader.expand(marked, files, token, is_whole=True)
        except RecordError as error:
            raise UserError("a task cannot be run", [Problem(name, str(error))]) from None
        return ShownText(whole.text, whole.media)

    def require_room(self, request: Any, length: int) -> None:
        """Raise UserError if a text with media is longer than the context: it cannot be cut."""
        if length > self.max_length:
            reason = f"has {length:,} tokens with its {KIND.kind}s, the context {self.max_length:,}"
            name = f"{request.task_name}, item {request.doc_id}"
            raise UserError("a task cannot be run", name, reason)

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
        groups: dict[tuple[str, int, bool], list[int]] = {}
        repeats: Counter[str] = Counter()
        for i, request in enumerate(requests):
            repeated = repr(request.args)
            kind = repr(request.args[1]), repeats[repeated], len(request.args) > 2
            groups.setdefault(kind, []).append(i)
            repeats[repeated] += 1
        texts = [""] * len(requests)
        for (_, sample, _), numbers in groups.items():
            first = requests[numbers[0]]
            options = {**self.defaults, **first.args[1]}
            prompts = [self.with_media(requests[i], requests[i].args[0]) for i in numbers]
            answers = self.answers(str(first.task_name), prompts, options, sample)
            for i, text in zip(numbers, answers, strict=True):
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

    def answers(
        self, task: str, prompts: list[ShownText], options: dict[str, Any], sample: int
    ) -> list[str]:
        """Return a sample of the answers to a task's prompts that have the same options.

        As in the harness's HFLM, the beginning of a prompt is left out to make room for the longest
        answer. If that has no room, half of the context is for the prompt.
        """
        settings = read_settings(task, options)
        until = handle_stop_sequences(settings.until, eos=self.text_tokenizer.eos_token)
        sampling = replace(settings.sampling, seed=settings.sampling.seed * MOST_REPEATS + sample)
        room = self.max_length - sampling.max_tokens
        room = room if room > 0 else max(1, self.max_length // 2)
        decode = self.text_tokenizer.decode
        # tokens of which the end of an answer is decoded; a stop string has at most one per byte
        longest = max((len(stop.encode()) for stop in until), default=0) + UNFINISHED_TOKENS

        def has_stop(tokens: list[int]) -> bool:
            text = decode(tokens)
            return any(stop and stop in text for stop in until)

        def is_over(tokens: list[int]) -> bool:
            return has_stop(tokens[-longest:]) and has_stop(tokens)

        shortened = [Prompt(self.tok_encode(text)[-room:], media) for text, media in prompts]
        stop_ids = self.text_tokenizer.stop_ids
        answers = self.scorer.continuations(shortened, stop_ids, sampling, is_over)
        return [postprocess_generated_text(decode(answer), until, None) for answer in answers]


def as_files(visual: Any) -> Any:
    """Return what doc_to_image gives, with Pillow's images as the bytes of files."""
    if isinstance(visual, list):
        return [as_files(each) for each in visual]
    if not hasattr(visual, "tobytes"):
        return visual
    file = BytesIO()
    form = "TIFF" if visual.mode[0] in "IF" else "PNG"  # numbers of more than 8 bits
    is_kept = form == "TIFF" or visual.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
    shown = visual if is_kept else visual.convert("RGB")
    shown.save(file, form, exif=visual.getexif())
    return file.getvalue()
