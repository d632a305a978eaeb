"""A preview in the terminal. Without colour (pipe, NO_COLOR), [[ ]] marks supervised text."""

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_trainer.apps.preview.preview_page import SOURCE_COLUMNS, Page, ShownDocument, TextPiece
from fsdp_trainer.data.store.findings import Finding
from fsdp_trainer.observe.terminal import DATA, Terminal

BAR = 30  # characters of the longest bar
PLAIN_LEGEND = "supervised text is in [[ ]], followed by its weight if that is not 1"


def show_rows(page: Page, console: Console, colour: bool) -> None:
    for row in page.rows:
        heading(console, row.title)
        for i, document in enumerate(row.documents):
            if len(row.documents) > 1:
                console.print(Text(edge(document, i, len(row.documents)), "dim"), soft_wrap=True)
            console.print(body(document, colour), soft_wrap=True)
            if document.reference is not None:
                console.print(Text(document.reference, "italic cyan"))


def show(page: Page, console: Console | None = None) -> None:
    console = console or Terminal()
    colour = console.color_system is not None and not console.no_color
    show_data(page, console)
    heading(console, "what the model sees")
    console.print(legend() if colour else PLAIN_LEGEND)
    if page.first:
        title = f"first sample, as the template ({page.template.name}) renders it"
        heading(console, f"{title}: {page.first.where}")
        console.print(body(page.first, colour), soft_wrap=True)
    show_rows(page, console, colour)
    if page.findings or page.figures:  # only some findings are known for a stream
        heading(console, "findings" if page.findings else "nothing to warn about")
    for finding in page.findings:
        console.print(finding_text(finding), soft_wrap=True)  # so that a place can be copied


def show_data(page: Page, console: Console) -> None:
    heading(console, "data")
    for line in page.files:
        console.print(line, soft_wrap=True)
    if page.figures:
        figures = Table.grid(padding=(0, 2))
        for name, value in page.figures:
            figures.add_row(Text(name, "dim"), value)
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


def heading(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold"), soft_wrap=True)


def edge(document: ShownDocument, i: int, count: int) -> str:
    source = f", {document.source}" if document.source else ""
    tokens = f"{document.tokens:,} tokens, {document.supervised:,} supervised"
    return f"──── {i + 1} of {count}: {document.where}{source}, {tokens}"


def bars(histogram: list[tuple[str, int]]) -> Table:
    table, longest = Table.grid(padding=(0, 2)), max(n for _, n in histogram)
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, n in histogram:
        bar = "█" * round(BAR * n / longest) or "▏" * bool(n)
        table.add_row(name, f"{n:,}", Text(bar, "green"))
    return table


def legend() -> Text:
    parts = [
        ("supervised", style(1, False)),
        ("supervised with another weight", style(0.5, False)),
        ("context", style(0, False)),
        ("special", style(0, True)),
        ("special, supervised", style(1, True)),
    ]
    return Text("  ").join(Text(*part) for part in parts)


def style(weight: float, special: bool) -> str:
    learnt = "black on green" if weight == 1 else "black on yellow" if weight else ""
    return f"bold {learnt}" if special and learnt else "cyan" if special else learnt or "default"


def body(document: ShownDocument, colour: bool) -> Text:
    def kind(piece: TextPiece) -> tuple[float, bool, str, int]:
        return piece.weight, colour and piece.special, piece.label, id(piece) * bool(piece.label)

    text = Text()
    for (weight, special, label, _), pieces in groupby(document.pieces, kind):
        if colour:
            text.append("".join(piece.visible() for piece in pieces), style(weight, special))
        else:
            run = "".join(piece.text for piece in pieces)
            text.append(f"[[{run}]]" + (f"×{weight:g}" if weight != 1 else "") if weight else run)
        if label:
            text.append(f"⟨{label}⟩", "bold magenta")
    text.stylize(DATA)
    return text


def finding_text(finding: Finding) -> Text:
    mark = ("warning ", "bold yellow") if finding.is_warning else ("note    ", "dim")
    below = [(f"→ {finding.fix}", "")] * bool(finding.fix) + [
        (place, "dim") for place in finding.places
    ]
    return Text.assemble(
        mark, finding.text, *((f"\n        {line}", style) for line, style in below)
    )
