"""A row's values by meaning, for the readers of all formats."""

from dataclasses import dataclass
from typing import Any

from fsdp_trainer.data.files.turns_and_rows import TEXT_KEYS
from fsdp_trainer.data.records.media import media_in
from fsdp_trainer.data.records.messages import Message, content_of, text_of, tools_of
from fsdp_trainer.data.records.record_formats import MEDIA_MEANINGS, parsed


@dataclass
class Values:
    """A row's values by meaning, with the names of their columns for messages."""

    by_meaning: dict[str, Any]
    columns: dict[str, str]
    where: tuple[str, int]

    def __getitem__(self, meaning: str) -> Any:
        return self.by_meaning[meaning]

    def name(self, meaning: str) -> str:
        return self.columns.get(meaning, meaning)

    def text(self, meaning: str) -> str:
        """Return a value that must be a string; RecordError otherwise."""
        return text_of(self[meaning], self.name(meaning))

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Return the turns after the row's system text, unless they already begin with it."""
        value = self.by_meaning.get("system")
        if not value:
            return messages
        text = content_of(_system_text(value), {}, f"{self.name('system')!r}").text
        system = {"role": "system", "content": text}
        return messages if messages[:1] == [system] else [system, *messages]

    def with_media(self, messages: list[Message]) -> list[Message]:
        """Return the turns with the media of the row's columns. RecordError if numbers differ."""
        for meaning, kind in MEDIA_MEANINGS.items():
            value = self.by_meaning.get(meaning)
            items = [] if value in (None, "") else kind.read_all(parsed(value))
            is_marked = meaning in self.columns and any(kind.mark in m["content"] for m in messages)
            if items or is_marked or kind.next in media_in(messages):
                messages = kind.placed(messages, items)
        return messages

    def tools(self) -> list[dict] | None:
        return tools_of(self.by_meaning.get("tools"), self.name("tools"))


def _system_text(value: Any) -> Any:
    """Return the content of a system text that is a turn, or parts (Bedrock, Gemini)."""
    if isinstance(value, dict):
        return next((value[key] for key in TEXT_KEYS if key in value), value)
    return value
