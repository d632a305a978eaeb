"""The evaluation of a chain: lm-evaluation-harness tasks for each model, questions for the last."""

import json
import os
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.chain.stages import Chain, ChainStage, as_words
from fsdp_trainer.apps.evaluate.verb import evaluate
from fsdp_trainer.apps.generate import Speaker, device_of
from fsdp_trainer.base.text_files import text_lines
from fsdp_trainer.config.composing.compose import compose, config_flag
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.start import launcher, start_ranks

LONGEST_ANSWER = 64  # tokens


def run_tasks(planned: Chain, training: ChainStage) -> int:
    out = planned.folder_of("evaluation") / f"{training.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    launch = [
        word for word in planned.words_of(training) if word.startswith(("launch.", "launch="))
    ]
    settings = {
        "source": str(planned.folder_of(training.name)),
        "tasks": planned.cfg.tasks,
        "code": planned.cfg.code,
        "limit": planned.cfg.limit,
        "out": str(out),
    }
    words = [*as_words(settings), *launch]
    cfg = compose("evaluate", words, planned.config_dir, inputs=False)
    words = [*config_flag(planned.config_dir), *words]
    if launcher(os.environ) is None:
        return start_ranks(cfg, words, verb="evaluate")
    return evaluate(cfg, words)


def answer_questions(planned: Chain) -> None:
    questions = read_questions(Path(str(planned.cfg.questions)))
    speaker = Speaker.load(planned.folder_of(planned.trainings[-1].name), device_of("auto"))
    prompts = [speaker.ask(messages[:-1]) for messages in questions]
    answers = speaker.say_all(prompts, GenerateConfig(max_tokens=LONGEST_ANSWER))
    rows = []
    for messages, (answer,) in zip(questions, answers, strict=True):
        wanted = messages[-1]["content"].strip()
        row = {"question": messages[-2]["content"], "wanted": wanted, "answer": answer.strip()}
        rows.append({**row, "right": row["answer"] == wanted})
    file = planned.folder_of("evaluation") / "questions.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def read_questions(file: Path) -> list[list[dict[str, Any]]]:
    """Return the messages of each conversation in a file, of which the last is the answer.

    Raises UserError for a line that is not such a conversation.
    """
    questions = []
    for number, line in enumerate(text_lines(file), start=1):
        try:
            messages = json.loads(line)["messages"]
            is_answered = messages[-1]["role"] == "assistant" and len(messages) > 1
        except (ValueError, LookupError, TypeError):
            is_answered = False
        if not is_answered:
            reason = 'is no {"messages": […]} that ends with an assistant turn'
            raise UserError("a question cannot be asked", f"{file}:{number}", reason)
        questions.append(messages)
    return questions
