"""Signs that tell a turn of a conversation from a row of data."""

from collections.abc import Mapping
from typing import Any

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "chatbot": "assistant", "ai": "assistant", "bing": "assistant",
    "bard": "assistant", "claude": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool_response": "tool", "tool_result": "tool", "ipython": "tool",
}  # fmt: skip
ROLE_KEYS = ("role", "from", "speaker", "author")
TEXT_KEYS = ("content", "value", "text", "parts", "message")
"""Keys for the speaker (ROLE_KEYS) and the content (TEXT_KEYS) of a turn."""
CHATS = (
    "messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns", "contents",
    "data",
)  # fmt: skip


def role_key(turn: Mapping[str, Any]) -> str | None:
    return next((key for key in ROLE_KEYS if isinstance(turn.get(key), str)), None)


def is_turn(columns: Mapping[str, Any]) -> bool:
    """Return True if the columns are a single turn: a known role and a text."""
    role = str(columns.get(role_key(columns) or "")).strip().lower()
    return role in ROLES and any(isinstance(columns.get(key), str) for key in TEXT_KEYS)
