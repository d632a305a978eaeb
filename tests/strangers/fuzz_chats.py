"""Random chats over many chat templates: nothing but the answers may be learnt, and all of them.

Each text of a chat has a mark of its own. Reported with its number: a context's mark among what is
learnt, an answer's that is missing or learnt twice, another text than transformers renders, another
mask than the template's own `{% generation %}` gives, and a traceback. `make fuzz` takes others.
"""

import json
import random
import re
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2
from random_templates import random_template
from texts import (
    SPECIAL,
    in_transformers,
    learnt_in_transformers,
    make_tokenizer,
    read_row,
    samples_of,
    supervised_texts,
)
from tokenizers import AddedToken, Tokenizer
from world import write_json

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.conversations import Conversation, turns_of
from fsdp_trainer.data.records.preference_records import Preference
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens

MARK = re.compile(r"m\d+x[a-z]+q")
SPECIAL_TEXT = re.compile(
    r"<[|｜][^<>{}'\"\n]{1,40}?[|｜]>|</?s>|</?(?:start|end)_of_\w+>|<(?:bos|eos|start)>|<turn\|>"
    r"|<\|turn>|<seed:\w+>|\[/?[A-Z_]{2,}\]|\]~b\]|\[e~\[|<SPECIAL_\d+>|<end_of_sentence>"
)
"""What is a special token in some published template."""
FRAGMENTS = ("<|im_start|>", "<|im_end|>\n", "</s>", "<think>", "{{ x }}", "{% if %}", "assistant")
SPACES = ("", "", "", "", "", " ", "\n", "🎉", "\n\n", "é ")
LOST = {
    "text": "text_left_out",
    "reasoning": "reasoning_left_out",
    "call": "calls_left_out",
}
RIGHT, WRONG = "right", "wrong"
REASON = 90
"""Characters of a refusal by which they are counted."""
CONTEXT = re.compile("x(user|system|result|tool)q")
LONG = 1 << 20
"""Tokens of a row: no chat is cut."""
PER_TEMPLATE = 12
"""Chats in turn for one template, whose compilation takes longer than a chat."""


class Writer:
    """Writes the texts of a chat, each with a mark of its own."""

    def __init__(self, chance, controls):
        """controls: whether texts may hold special tokens and fragments of templates."""
        self.chance, self.controls, self.count = chance, controls, 0

    def text(self, kind):
        self.count += 1
        around = [self.chance.choice(SPACES) for _ in range(2)]
        if self.controls and self.chance.random() < 0.2:
            around[self.chance.randrange(2)] = self.chance.choice(FRAGMENTS)
        return f"{around[0]}m{self.count}x{kind}q{around[1]}"

    def content(self, kind):
        draw = self.chance.random()
        if draw < 0.05:
            return ""
        if draw < 0.15:
            return [{"type": "text", "text": self.text(kind)} for _ in range(2)]
        return self.text(kind)

    def call(self):
        arguments = {"key": self.text("call"), "number": 3}
        if self.chance.random() < 0.3:
            arguments = json.dumps(arguments)
        call = {"function": {"name": "look", "arguments": arguments}}
        if self.chance.random() < 0.5:
            call |= {"type": "function", "id": self.chance.choice(("c1", "abcDEF123"))}
        return call

    def answer(self):
        chance = self.chance
        turn = {"role": "assistant", "content": self.content("text")}
        if chance.random() < 0.25:
            key = chance.choice(("reasoning_content", "reasoning", "thinking"))
            turn[key] = self.text("reasoning")
        elif chance.random() < 0.1 and isinstance(turn["content"], str):
            turn["content"] = f"<think>\n{self.text('reasoning')}\n</think>\n\n{turn['content']}"
        results = []
        if chance.random() < 0.25:
            turn["tool_calls"] = [self.call() for _ in range(chance.choice((1, 1, 2)))]
            if chance.random() < 0.5:
                turn["content"] = chance.choice(("", None))
            results = [{"role": "tool", "content": self.content("result")}]
            results *= len(turn["tool_calls"])
        draw = chance.random()
        if draw < 0.15:
            turn |= chance.choice(({"weight": 0}, {"train": False}, {"weight": 0.5}))
        return [turn, *results]

    def chat(self):
        chance = self.chance
        turns = []
        if chance.random() < 0.4:
            role = chance.choice(("system", "system", "developer"))
            turns.append({"role": role, "content": self.content("system")})
        for number in range(chance.choice((1, 1, 2, 3))):
            questions = chance.choice((1, 1, 1, 1, 2)) if number or chance.random() < 0.85 else 0
            turns += [{"role": "user", "content": self.content("user")} for _ in range(questions)]
            turns += self.answer()
        if turns[-1]["role"] == "tool" or chance.random() < 0.1:
            turns += self.answer()[:1]
        row = {"messages": turns}
        if chance.random() < 0.3:
            properties = {"key": {"type": "string", "description": self.text("tool")}}
            parameters = {"type": "object", "properties": properties}
            function = {"name": "look", "description": self.text("tool"), "parameters": parameters}
            row["tools"] = [{"type": "function", "function": function}]
        return row


@dataclass
class Case:
    """A template with a tokenizer that has its special tokens."""

    name: str
    source: str
    tokenizer: TextTokenizer
    template: Template


@lru_cache(1)
def plain_backend():
    """Return a byte-level tokenizer without special tokens, as JSON."""
    return make_tokenizer([]).to_str()


def case_of(name, source, folder):
    """Return a template as a case. folder: where the tokenizer may be written."""
    backend = Tokenizer.from_str(plain_backend())
    names = dict.fromkeys([*SPECIAL.values(), *SPECIAL_TEXT.findall(source)])
    for role in ("user", "human", "question", "assistant", "model", "system", "tool"):
        names |= {text: None for text in (f"<|{role}|>", f"<{role}>") if text in source}
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    backend.save(f"{folder}/tokenizer.json")
    write_json(folder / "tokenizer_config.json", SPECIAL)
    tokenizer = load_tokenizer(str(folder))
    template = Template(name, source, tokenizer.special, today=date.today())
    return Case(name, source, tokenizer, template)


def wrongs(case, row, plain):
    """Yield what is wrong with what is learnt of a row; RecordError if it is refused.

    plain: the texts hold no control strings, and the text itself is compared too.
    """
    conversation = read_row(row)
    samples, builder = samples_of(case.tokenizer, conversation, case.template, seq_len=LONG)
    learnt = [text for sample in samples for text in supervised_texts(case.tokenizer, sample)]
    turns = turns_of(conversation)
    if isinstance(conversation, Preference):  # the prompt's answers are context
        turns = [turn | {"weight": 0} for turn in conversation.prompt] + turns[
            len(conversation.prompt) :
        ]
    yield from wrong_marks(turns, learnt, builder)
    if not builder.counts["no_end"]:
        for text in learnt:
            if not text.rstrip().endswith(tuple(case.tokenizer.special_tokens)):
                yield f"an answer without its end: {text[-60:]!r}"
    if plain and isinstance(conversation, Conversation):
        yield from differences(case, conversation, samples, builder)


def wrong_marks(turns, learnt, builder):
    """Yield marks of the context that are learnt, and those of answers that are not, or twice."""
    marks = Counter(MARK.findall("".join(learnt)))
    yield from (f"context is learnt: {mark}" for mark in marks if CONTEXT.search(mark))
    for message in turns:
        is_learnt = message["role"] == "assistant" and message.get("weight", 1.0) > 0
        for mark in MARK.findall(json.dumps(message)):
            kind = mark.partition("x")[2].removesuffix("q")
            if marks[mark] > is_learnt:
                yield f"learnt {marks[mark]} times, not {int(is_learnt)}: {mark}"
            if is_learnt and not marks[mark] and LOST[kind] not in builder.counts:
                yield f"not learnt: {mark}"


def pair_of(row, writer):
    """Return a chat as a pair of answers to its last question; as it is if it ends otherwise."""
    *before, last = row["messages"]
    if last["role"] != "assistant" or not any(turn["role"] == "user" for turn in before):
        return row
    last.pop("weight", None)
    last.pop("train", None)
    other = {"role": "assistant", "content": writer.text("text")}
    sides = {"prompt": before, "chosen": [last], "rejected": [other]}
    return {name: value for name, value in row.items() if name != "messages"} | sides


def differences(case, row, samples, builder):
    """Yield how samples differ from transformers: in their texts, or in the template's own mask."""
    messages = case.template.adapt(row.messages, row.tools)
    theirs = in_transformers(case.tokenizer, case.source)

    def rendered(count, is_prompt=False):
        options = {"tools": row.tools, "tokenize": False, "add_generation_prompt": is_prompt}
        return theirs.apply_chat_template(messages[:count], **options)

    try:
        whole = rendered(len(messages))
    except jinja2.TemplateError:  # transformers drops a content of null, which some templates need
        return
    texts = [case.tokenizer.decode(s.tokens.tolist(), skip_special=False) for s in samples]
    for sample, text in zip(samples, texts, strict=True):
        last = MARK.findall("".join(supervised_texts(case.tokenizer, sample)))[-1:]
        k = next((k for k, m in enumerate(messages) if last and last[0] in json.dumps(m)), None)
        if text == whole or k is None or case.template.for_record(row.tools).forms.system != "turn":
            continue
        if not rendered(k + 1).startswith(text) and not text.startswith(rendered(k, True)):
            yield f"other text: {text[-200:]!r} {whole[-200:]!r}"
    is_marked = "generation %}" in case.source and "<think>\n{% endif %}{# #}" not in case.source
    yield from wrong_prompt(case, row, messages, rendered)
    if is_marked and texts == [whole] and not any("weight" in m for m in messages):
        _, mask = learnt_in_transformers(theirs, messages, row.tools)
        own = (samples[0].weights > 0).astype(int).tolist()
        if own[1:] != mask[1:] and not excused(builder):  # nothing precedes the first token
            yield f"other mask, {[*builder.counts]}: {supervised_texts(case.tokenizer, samples[0])}"


def wrong_prompt(case, row, messages, rendered):
    """Yield how the prompt of the last answer differs from transformers, in text and tokens."""
    k = max(k for k, message in enumerate(messages) if message["role"] == "assistant")
    try:
        prompt = rendered(k, True) if k else ""
    except jinja2.TemplateError:  # as of a system turn alone
        return
    if not k:
        return
    if prompt != case.template.render(messages[:k], row.tools, True):
        yield f"other prompt: {prompt[-200:]!r}"
    if len(messages) == len(row.messages):  # else a system turn is part of the next one
        tokens = TurnTokens(case.template, case.tokenizer).prompt(row.messages[:k], row.tools)
        if tokens != case.tokenizer.encode(prompt):
            yield f"other tokens of a prompt: {case.tokenizer.decode(tokens)[-200:]!r}"


def excused(builder):
    """Return True if the mask may differ from the template's own: a warning says so."""
    return any(builder.counts[key] for key in ("no_end", "shared_token"))


def templates(seed, given):
    """Yield names and texts of templates, without an end: random ones between those given."""
    number = 0
    while True:
        for name, source in given.items():
            yield name, source
            number += 1
            yield f"random {number}", random_template(random.Random(f"{seed} template {number}"))


def cases(seed, count, given):
    """Yield the numbers of chats, and the template of each. given: templates beside random ones."""
    sources = templates(seed, given)
    with TemporaryDirectory() as folder:
        for first in range(0, count, PER_TEMPLATE):
            case = case_of(*next(sources), Path(folder))
            for number in range(first, min(first + PER_TEMPLATE, count)):
                yield number, case


def chat_of(seed, number):
    """Return a chat by its number, and whether its texts hold no control strings."""
    chance = random.Random(f"{seed} chat {number}")
    plain = chance.random() < 0.6
    writer = Writer(chance, not plain)
    row = writer.chat()
    if chance.random() < 0.15:
        row = pair_of(row, writer)
    return row, plain


def outcome(case, seed, number):
    """Return what became of one chat: right, refused or wrong, which is printed."""
    row, plain = chat_of(seed, number)
    try:
        problems = list(wrongs(case, row, plain))
    except RecordError as refusal:
        return f"refused: {str(refusal).splitlines()[0][:REASON]}"
    except Exception:
        problems = [traceback.format_exc()]
    for problem in problems:
        print(f"{seed} {number} {case.name}: {problem}", flush=True)
    return WRONG if problems else RIGHT
