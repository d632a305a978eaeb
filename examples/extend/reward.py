"""A reward: answers that say a word.

    fsdp-trainer rewards data.path=questions.jsonl \
        'objective.rewards=[{name: reward.py:says, word: because}]'

from this folder. `fsdp-trainer rewards` scores the data's own answers, without training.
"""


def says(attempts, word="please"):
    """Return 1 for each attempt whose answer has the word, else 0.

    attempts: objects with prompt, answer, row, reference, tokens and finished.
    """
    return [float(word in attempt.answer) for attempt in attempts]
