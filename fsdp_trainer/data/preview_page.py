"""The content of a preview: rows for people, figures and findings."""

from dataclasses import dataclass, field

from fsdp_trainer.data.findings import Finding
from fsdp_trainer.data.templates import Template

SOURCE_COLUMNS = ("source", "samples", "tokens", "share", "supervised", "epochs")


@dataclass
class TextPiece:
    """A token, or those that only together are a character."""

    text: str
    ids: list[int]
    weight: float
    """Its weight as a target; 0: it is context only."""
    special: bool

    def visible(self) -> str:
        """The text; line ends are made visible if it is learnt or special."""
        return self.text.replace("\n", "↵\n") if self.weight or self.special else self.text


@dataclass
class ShownDocument:
    """A document of a row, or a whole sample."""

    where: str
    source: str
    pieces: list[TextPiece]
    next_label: int = -100
    """The target of the last position, where the document goes on in another row."""
    reference: str | None = None
    """Of a prompt: the answer that the model's own are compared with."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def supervised(self) -> int:
        """The number of its tokens that are learnt."""
        return sum(len(piece.ids) for piece in self.pieces if piece.weight)


@dataclass
class ShownRow:
    """A row of training."""

    index: int
    documents: list[ShownDocument]
    padding: int

    @property
    def title(self) -> str:
        """Return a line on its content."""
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
    """Everything that a preview shows, but for how it looks.

    A stream is not known beyond its rows.
    """

    name: str
    files: list[str]
    template: Template
    rows: list[ShownRow]
    first: ShownDocument | None = None
    """A whole sample."""
    figures: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[tuple[str, int]] = field(default_factory=list)
    histogram: list[tuple[str, int]] = field(default_factory=list)
    """Samples by their number of tokens."""
    sources: list[tuple[str, ...]] = field(default_factory=list)
    """A line of SOURCE_COLUMNS for each, if there are several."""
    findings: list[Finding] = field(default_factory=list)
