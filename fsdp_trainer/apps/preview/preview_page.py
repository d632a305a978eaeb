"""The content of a preview: rows for display, statistics and findings."""

from dataclasses import dataclass, field

from fsdp_trainer.data.store.findings import Finding
from fsdp_trainer.data.templates.chat_template import Template

SOURCE_COLUMNS = ("source", "samples", "tokens", "share", "supervised", "epochs")


@dataclass
class TextPiece:
    """A token, or several tokens that form one character only together."""

    text: str
    ids: list[int]
    weight: float
    """Loss weight as a target; 0 if it is context only."""
    special: bool
    picture: str = ""
    """A small picture as a data URL, if the tokens stand for an image."""
    label: str = ""
    """What is learnt of the token, if it is not the token itself."""

    def visible(self) -> str:
        return self.text.replace("\n", "↵\n") if self.weight or self.special else self.text


@dataclass
class ShownDocument:
    """A document of a row, or a complete sample."""

    where: str
    source: str
    pieces: list[TextPiece]
    next_label: int = -100
    """The target of the last position, if the document continues in another row."""
    reference: str | None = None
    """A line on the reference answer of a prompt, or on the label of a text."""

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def supervised(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if piece.weight)


@dataclass
class ShownRow:
    index: int
    documents: list[ShownDocument]
    padding: int

    @property
    def title(self) -> str:
        tokens, supervised = (
            sum(getattr(document, what) for document in self.documents)
            for what in ("tokens", "supervised")
        )
        n = len(self.documents)
        return (
            f"row {self.index}: {n} document{'s' * (n != 1)}, {tokens:,} tokens, {supervised:,}"
            f" supervised, {self.padding:,} padding"
        )


@dataclass
class Page:
    """Everything that a preview shows, independent of its output format.

    For a stream, only its first rows are known.
    """

    name: str
    files: list[str]
    template: Template
    rows: list[ShownRow]
    first: ShownDocument | None = None
    """The first sample, complete."""
    figures: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[tuple[str, int]] = field(default_factory=list)
    histogram: list[tuple[str, int]] = field(default_factory=list)
    """Number of samples by range of token counts."""
    sources: list[tuple[str, ...]] = field(default_factory=list)
    """Values of SOURCE_COLUMNS for each source, if there are several."""
    findings: list[Finding] = field(default_factory=list)
