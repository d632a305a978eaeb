"""A preview in the terminal, by rich. Without colour (a pipe, NO_COLOR) what is learnt stands in [[ ]]."""

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_trainer.data.findings import Finding
from fsdp_trainer.data.preview_page import SOURCE_COLUMNS, Page, ShownDocument, TextPiece
from fsdp_trainer.observe.terminal import Terminal

BAR = 30  # characters of the longest bar


def show(page: Page, console: Console | None = None) -> None:
    """Print it."""
    console = console or Terminal()
    colour = console.color_system is not None and not console.no_color
    heading(console, "data")
    for line in page.files:
        console.print(line, soft_wrap=True)
    figures = Table.grid(padding=(0, 2))
    for name, value in page.figures:
        figures.add_row(Text(name, "dim"), value)
    if page.figures:
        console.print(figures)
    if page.histogram:
        heading(console, "lengths in tokens")
        console.print("  ".join(f"{name} {tokens:,}" for name, tokens in page.lengths))
        console.print(bars(page.histogram))
    if page.sources:
        table = Table(*SOURCE_COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1))
        for column in table.columns[1:]:
            column.justify = "right"
        for source in page.sources:
            table.add_row(*source)
        console.print(table)
    heading(console, "what the model sees")
    console.print(
        legend()
        if colour
        else "what is learnt stands in [[ ]]; behind it the weight, where that is not 1"
    )
    if page.first:
        heading(
            console,
            f"first sample, as the template ({page.template.name}) renders it: {page.first.where}",
        )
        console.print(body(page.first, colour), soft_wrap=True)
    for row in page.rows:
        heading(console, row.title)
        for i, document in enumerate(row.documents):
            if i or len(row.documents) > 1:
                console.print(Text(edge(document, i, len(row.documents)), "dim"), soft_wrap=True)
            console.print(body(document, colour), soft_wrap=True)
    if page.findings or page.figures:  # of a stream only some are known
        heading(console, "findings" if page.findings else "nothing to warn about")
    for finding in page.findings:
        console.print(told(finding), soft_wrap=True)  # so that a place can be copied


def heading(console: Console, title: str) -> None:
    """A line that begins a part."""
    console.print()
    console.print(Text(title, "bold"), soft_wrap=True)


def edge(document: ShownDocument, i: int, of: int) -> str:
    """The line above a document of a row."""
    source = f", {document.source}" if document.source else ""
    return f"──── {i + 1} of {of}: {document.where}{source}, {document.tokens:,} tokens, {document.supervised:,} supervised"


def bars(histogram: list[tuple[str, int]]) -> Table:
    """A bar for each range of lengths."""
    table, most = Table.grid(padding=(0, 2)), max(n for _, n in histogram)
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, n in histogram:
        table.add_row(name, f"{n:,}", Text("█" * round(BAR * n / most) or "▏" * bool(n), "green"))
    return table


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(("learnt", style(1, False)), "  ", ("learnt with another weight", style(0.5, False)), "  ", ("context", style(0, False)), "  ", ("special", style(0, True)), "  ", ("special, learnt", style(1, True)))  # fmt: skip


def style(weight: float, special: bool) -> str:
    """How a token looks."""
    learnt = "black on green" if weight == 1 else "black on yellow" if weight else ""
    return f"bold {learnt}" if special and learnt else "cyan" if special else learnt or "default"


def body(document: ShownDocument, colour: bool) -> Text:
    """The text of a document."""

    def kind(piece: TextPiece) -> tuple[float, bool]:
        return piece.weight, colour and piece.special

    text = Text()
    for (weight, special), pieces in groupby(document.pieces, kind):
        if colour:
            text.append("".join(piece.visible() for piece in pieces), style(weight, special))
        else:
            run = "".join(piece.text for piece in pieces)
            text.append(f"[[{run}]]" + (f"×{weight:g}" if weight != 1 else "") if weight else run)
    return text


def told(finding: Finding) -> Text:
    """What was found, its fix, and where it was found first."""
    mark = ("warning ", "bold yellow") if finding.is_warning else ("note    ", "dim")
    below = [(f"→ {finding.fix}", "")] * bool(finding.fix) + [
        (place, "dim") for place in finding.places
    ]
    return Text.assemble(
        mark, finding.text, *((f"\n        {line}", style) for line, style in below)
    )
