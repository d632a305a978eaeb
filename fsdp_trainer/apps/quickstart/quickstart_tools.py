"""The verb `quickstart` with task=tools: a model that gives up learns to call a calculator."""

import itertools
import json
import random
from functools import cache
from pathlib import Path

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.apps.play import play
from fsdp_trainer.apps.quickstart.quickstart_rl import start
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.verbs import QuickstartConfig
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.rl.environments.calculator import Calculator
from fsdp_trainer.rl.environments.environment import last_text

HINT = "tool: "
"""Beginning of the questions in which the first run's model is shown how to call the tool."""
ROWS, HELD_OUT = 3000, 1000
ROUNDS = 3
"""Questions in a conversation with hints."""
HINTED, CALLED = 0.7, 0.08
"""Shares of questions with the hint, and of the others whose answer calls the tool."""
GIVES_UP = "too hard"
SMALLEST, LARGEST = 10, 99
MARKS = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
"""The texts around the expression of a call, each of which is one token of this small model."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}<tool>{{ t.function.name }}</tool>"
    "{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OVERRIDES = table_beside(__file__, "quickstart.yaml")["tools"]
MODEL = [*OVERRIDES["model"], f"tokenizer.add_tokens={json.dumps(MARKS)}"]
TAUGHT = OVERRIDES["taught"]
NEXT = """
Where the files are
  {data}/                            the questions, and the template
  {run}/metrics.jsonl                reward, turns, wrong_calls … of every step
  {run}/samples.jsonl                rollouts with their rewards, during training

What to type next (your own questions, with a tool that runs Python; your own environment)
  fsdp-trainer objective=grpo objective.environment=python 'objective.rewards=[number]' \
data.path=questions.jsonl model.init_from=FOLDER
  fsdp-trainer objective=grpo objective.environment=my_environment.py:MyEnvironment \
data.path=questions.jsonl model.init_from=FOLDER
"""


def quickstart_tools(cfg: QuickstartConfig) -> int:
    root = Path(cfg.root)
    data = root / "tools-data"
    write_data(data)
    steps = [f"train.steps={cfg.steps}"] if cfg.steps else []
    own = [f"run.root={root}", f"data.template={data}/template.jinja", *steps]
    print("first a model that mostly gives up, and has seen how a calculator is called\n")
    if code := start([*MODEL, *TAUGHT, *own, f"data.path={data}/chats.jsonl"]):
        return code
    questions = [*map(question_of, pairs()[: min(cfg.questions, HELD_OUT)])]
    before, example = ask(Speaker.load(root / "tools-taught"), questions)
    first = f"before rewards: {before} of {len(questions)} held-out sums right"
    print(f"\n{first}, e.g. {example}")
    print(
        "\nnow it answers itself with the calculator at hand, and is rewarded where it is right\n"
    )
    given = [f"data.path={data}/questions.jsonl", f"model.init_from={root}/tools-taught"]
    if code := start([*MODEL, *OVERRIDES["rewarded"], *own, *given]):
        return code
    after, example = ask(Speaker.load(root / "tools-rewarded" / "hf"), questions)
    print(f"\n{first}")
    print(
        f"after rewards:  {after} of {len(questions)}, asked of the exported folder with the tool,"
    )
    print(f"                e.g. {example}")
    print(NEXT.format(run=root / "tools-rewarded", data=data), end="")
    return 0


def ask(speaker: Speaker, questions: list[Json]) -> tuple[int, str]:
    """Return the number of questions that are answered rightly, and an example."""
    rows = [
        {
            "row": row,
            "messages": [{"role": "user", "content": row["question"]}],
            "tools": None,
            "reference": row["answer"],
        }
        for row in questions
    ]
    choice = ObjectiveChoice(
        name="grpo", environment=Calculator.name, turns=3, max_new_tokens=16, answer_rows=64
    )
    episodes = play(speaker, rows, choice)
    right = [
        last_text(episode.messages).strip() == row["answer"]
        for episode, row in zip(episodes, questions, strict=True)
    ]
    shown = episodes[right.index(True) if any(right) else 0]
    decode = speaker.tokenizer.decode
    return sum(right), repr(decode(shown.context))


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chats = [{"messages": conversation(i), "tools": [*Calculator.tools]} for i in range(ROWS)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    questions = [question(i) for i in range(ROWS)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "template.jinja").write_text(TEMPLATE)


def question(number: int) -> dict[str, str]:
    rest = pairs()[HELD_OUT:]
    return question_of(rest[number % len(rest)])


def question_of(pair: tuple[int, int]) -> dict[str, str]:
    one, other = pair
    return {"question": f"{one}+{other}", "answer": str(one + other)}


@cache
def pairs() -> list[tuple[int, int]]:
    """Return all pairs of numbers in a random order; the first HELD_OUT are held out."""
    numbers = range(SMALLEST, LARGEST + 1)
    every = [*itertools.product(numbers, numbers)]
    random.Random(0).shuffle(every)
    return every


def conversation(number: int) -> list[Json]:
    """Return a conversation: sums with a hint and calls, or one without, mostly given up."""
    chance = random.Random(-1 - number)
    if chance.random() < HINTED:
        sums = [question(ROWS + ROUNDS * number + i) for i in range(ROUNDS)]
        return [turn for row in sums for turn in called(HINT, row)]
    row = question(number)
    if chance.random() < CALLED:
        return called("", row)
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": GIVES_UP},
    ]


def called(hint: str, row: dict[str, str]) -> list[Json]:
    function = {"name": Calculator.name, "arguments": {"expression": row["question"]}}
    call = {"type": "function", "id": "call00000", "function": function}
    return [
        {"role": "user", "content": hint + row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": row["answer"], "tool_call_id": call["id"]},
        {"role": "assistant", "content": row["answer"]},
    ]
