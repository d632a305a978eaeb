"""An environment: a question is asked again until the answer has the row's number.

    fsdp-trainer +recipe=quickstart objective=grpo objective.environment=again.py:Again

from this folder, with questions as data. `fsdp-trainer preview` shows a row's first turns.
"""


class Again:
    def __init__(self, tries=3):
        self.tries = tries

    def reset(self, row):
        self.answer = str(row["reference"])
        return row["messages"], None

    def step(self, messages):
        self.tries -= 1
        is_right = self.answer in messages[-1]["content"]
        return [{"role": "user", "content": "Try again."}], is_right or not self.tries

    def reward(self, messages):
        return float(self.answer in messages[-1]["content"])
