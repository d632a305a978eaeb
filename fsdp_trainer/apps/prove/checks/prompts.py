"""Chat, evaluation and transformers render the prompts that training has seen."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, counted_wrong
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.written_rows import WrittenRow, written_rows
from fsdp_trainer.data.records.conversations import Conversation
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.records.preference_records import Preference
from fsdp_trainer.errors import UserError

MOST = 20
"""Conversations that are rendered."""
ADVICE = (
    "the model is asked otherwise than it was trained: give the same data.template to both, and"
    " see what  fsdp-trainer preview …  warns of"
)
Render = Callable[[list[Message]], list[int]]


def check(evidence: Evidence) -> Iterator[Checked | NotProved]:
    """Compare the tokens before an answer with those that others ask with."""
    method = evidence.small.plain.objective.method
    if method.samples or method.scores:
        return
    conversations = [*questions(written_rows(evidence))][:MOST]
    if not conversations:
        return  # texts, or rows that are rendered by their own rules
    folder = evidence.plain.checkpoints[-1]
    speaker = Speaker.load(folder)
    yield compared_prompts(
        "chat", lambda turns: speaker.encode(speaker.ask(turns).text), conversations
    )
    yield of_evaluation(evidence, speaker, conversations)
    yield of_transformers(evidence, folder / "hf", conversations)


def questions(rows: list[WrittenRow]) -> Iterator[tuple[list[Message], list[int]]]:
    for row in rows:
        written, (tokens, _) = row.written, row.samples[-1]
        if isinstance(written, Preference):
            *before, last = [*written.prompt, *written.chosen]
            tokens = row.samples[0][0]
        elif isinstance(written, Conversation):
            *before, last = written.messages
        else:
            continue
        if written.tools:
            continue
        plain = [{"role": turn["role"], "content": turn["content"]} for turn in before]
        if not before or last["role"] != "assistant" or plain != [only_text(t) for t in before]:
            continue
        yield plain, tokens.tolist()


def only_text(turn: Message) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name != "weight"}


def compared_prompts(
    name: str, render: Render, conversations: list[tuple[list[Message], list[int]]]
) -> Checked | NotProved:
    """Return the comparison of a program's prompts with the beginnings of training's tokens."""
    wrong = []
    try:
        for turns, tokens in conversations:
            prompt = render(turns)
            if tokens[: len(prompt)] != prompt:
                wrong.append(f"{turns[-1]['content'][:60]!r} begins otherwise")
    except UserError as error:
        wrong.append(f"{error.title}: {error.problems[0].reason}")
    right = f"{len(conversations)} prompts begin as the samples of training, token by token"
    return counted_wrong(f"prompts: {name}", wrong, right, ADVICE)


def of_evaluation(
    evidence: Evidence, speaker: Speaker, conversations: list[tuple[list[Message], list[int]]]
) -> Checked | NotProved:
    name = "prompts: evaluation"
    try:
        from fsdp_trainer.evaluation.harness import HarnessModel
        from fsdp_trainer.evaluation.scoring import Scorer
    except ImportError:
        return NotProved(name, f"pip install 'fsdp_trainer[eval]' ; {evidence.command('')}")
    model = HarnessModel(
        Scorer(speaker.model, 1, torch.device("cpu")), speaker.tokenizer, speaker.template
    )

    def render(turns: list[Message]) -> list[int]:
        return model.tok_encode(model.apply_chat_template(turns))

    return compared_prompts("evaluation", render, conversations)


def of_transformers(
    evidence: Evidence, folder: Path, conversations: list[tuple[list[Message], list[int]]]
) -> Checked | NotProved:
    name = "prompts: transformers and vLLM"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return NotProved(name, f"pip install 'fsdp_trainer[hf]' ; {evidence.command('')}")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(turns: list[Message]) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return compared_prompts("transformers and vLLM", render, conversations)
