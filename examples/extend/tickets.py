"""A row format: tickets of a help desk, as conversations.

    fsdp-trainer +recipe=quickstart data.path=tickets.jsonl data.format=tickets.py:conversation

from this folder. A row may have any columns; what is returned must be a row of a format that the
program detects: messages, prompt and completion, text, chosen and rejected …
"""


def conversation(row):
    """Called with each row. An exception is reported with the row's place, as other bad rows."""
    turns = [{"role": "user", "content": f"{row['subject']}\n\n{row['body']}"}]
    for note in row["notes"]:
        role = "assistant" if note["by"] == "staff" else "user"
        turns.append({"role": role, "content": note["text"]})
    return {"messages": turns}
