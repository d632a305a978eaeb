"""Budget of a step: the milliseconds that its bytes and operations need, predicted beside measured.

    python -m benchmarks.step_budget          # the table of docs/performance.md

For eight blocks of Llama-3.1-8B's shape on one GPU, in rows of 8,192 tokens of one document. Each
part is a number of operations or of bytes, counted from the code, divided by a rate of the card.
Measured are the results of `benchmarks.gpu` that are stored in benchmarks/results.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import RESULTS

ROW = 8192
HIDDEN, INNER, KEYS, VOCABULARY, BLOCKS = 4096, 14336, 1024, 128256, 8
BLOCK = 2 * HIDDEN**2 + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER + 2 * HIDDEN
TABLE = VOCABULARY * HIDDEN  # the embedding, and as many numbers in the head
PARAMETERS = BLOCKS * BLOCK + 2 * TABLE
PEAK = 989e12
"""FLOP/s of both cards by their data sheet, for `mfu_palm`."""


@dataclass(frozen=True)
class Card:
    """Rates that were measured: FLOP/s of products and of attention, bytes a second of memory."""

    name: str
    folder: str
    memory: float
    products: float = 690e12
    flash_2: float = 280e12
    cudnn: float = 500e12


@dataclass(frozen=True)
class Passes:
    """Bytes that the code moves outside of products, counted on a CPU by the operators' sizes.

    gathering, reducing: of FSDP2 on one rank, for each parameter and micro-batch. logit: for each
    logit. head: for each number of the head's weight and micro-batch, and chunk: for each chunk of
    so many tokens. elementwise: passes over the residual stream in a compiled block. clip, update:
    for each parameter and step.
    """

    attention: str = "flash_2"
    gathering: float = 20
    gathering_head: float = 10
    reducing: float = 22
    logit: float = 18
    head: float = 18
    chunk: float = 8
    chunk_tokens: int = 2048
    elementwise: float = 56
    clip: float = 12
    update: float = 28


MEASURED = Passes()
"""The code that was measured on an H100 on 2026-11-26."""
REPAIRED = replace(
    MEASURED, attention="cudnn", gathering=6, gathering_head=6, reducing=6, logit=8, head=2,
    chunk_tokens=4096, clip=8,
)  # fmt: skip
"""The code since then: cuDNN in compiled blocks, one cast of weights and one of gradients on one
rank, logits in bfloat16, and clipping in the optimizer's kernel."""
PLAIN = replace(MEASURED, attention="cudnn", gathering=6, gathering_head=6, reducing=6)
"""A script without FSDP, by autocast; Liger's head may differ from ours."""
H100 = Card("H100", "1x-nvidia-h100-80gb-hbm3", 3.0e12)
H200 = Card("H200", "1x-nvidia-h200", 4.2e12)
COLUMNS: dict[str, tuple[Card, Passes, int, str]] = {
    "H100, one row": (H100, MEASURED, 1, "bfloat16"),
    "H200, one row": (H200, MEASURED, 1, ""),
    "H200, four rows at once": (H200, MEASURED, 4, ""),
    "H200, one row, repaired": (H200, REPAIRED, 1, "bfloat16"),
    "H200, four rows, repaired": (H200, REPAIRED, 4, "bfloat16, four rows"),
    "H200, plain script, one row": (H200, PLAIN, 1, "Hugging Face, Liger, compiled"),
}
"""Card, code and rows of a step for each column, and the result that shows whether it is right."""


def seconds(card: Card, code: Passes, rows: int) -> dict[str, float]:
    """Return the seconds of each part of a step with `rows` rows in one micro-batch."""
    tokens = rows * ROW
    stream = 2 * tokens * HIDDEN  # bytes of the residual stream
    attention = 3.5 * 2 * HIDDEN * ROW * tokens * BLOCKS  # causal: backward is 2.5 forwards
    fsdp = code.gathering * BLOCKS * BLOCK + code.gathering_head * 2 * TABLE
    head = code.head + code.chunk * tokens / code.chunk_tokens
    parts = {
        "products of blocks": 6 * BLOCKS * BLOCK * tokens / card.products,
        "products of the head": 6 * TABLE * tokens / card.products,
        "attention": attention / getattr(card, code.attention),
        "FSDP2's casts and copies": (fsdp + code.reducing * PARAMETERS) / card.memory,
        "update": code.update * PARAMETERS / card.memory,
        "clipping": code.clip * PARAMETERS / card.memory,
        "head's gradient": head * TABLE / card.memory,
        "logits": code.logit * VOCABULARY * tokens / card.memory,
        "the rest of blocks": code.elementwise * stream * BLOCKS / card.memory,
        "embedding": (4 * stream + 2 * TABLE) / card.memory,
    }
    return parts | {"step": sum(parts.values())}


def speed(card: Card, code: Passes, rows: int) -> dict[str, float]:
    """Return the predicted tokens a second and MFU (`mfu_palm`)."""
    rate = rows * ROW / seconds(card, code, rows)["step"]
    operations = 6 * (BLOCKS * BLOCK + TABLE) + 12 * BLOCKS * HIDDEN * ROW  # of a token
    return {"tokens_per_second": rate, "mfu_palm": operations * rate / PEAK}


def predictions() -> dict[str, dict[str, Any]]:
    """Return what each column predicts: tokens_per_second and mfu_palm."""
    return {name: speed(*column[:3]) for name, column in COLUMNS.items()}


def measured(card: Card, way: str) -> dict[str, Any] | None:
    """Return the newest stored figures of a way to train on a card; None without any."""
    stored = [json.loads(path.read_text()) for path in (RESULTS / card.folder).glob("*.json")]
    each = [result["mfu"][way] for result in sorted(stored, key=lambda result: result["date"])
            if way in result.get("mfu", {})]  # fmt: skip
    return next((figures for figures in reversed(each) if "tokens_per_second" in figures), None)


def table() -> str:
    """Return the budget as a Markdown table: milliseconds, and predicted beside measured speed."""
    columns = [seconds(*column[:3]) for column in COLUMNS.values()]
    lines = [f"| milliseconds | {' | '.join(COLUMNS)} |", "|---" * (len(columns) + 1) + "|"]
    for part in columns[0]:
        lines.append(f"| {part} | " + " | ".join(f"{1e3 * c[part]:.1f}" for c in columns) + " |")
    shown: dict[str, list[str]] = {"predicted": [], "measured": []}
    for name, (card, *_, way) in COLUMNS.items():
        for row, figures in (
            ("predicted", predictions()[name]),
            ("measured", measured(card, way)),
        ):
            text = (
                "{tokens_per_second:,.0f} ({mfu_palm:.0%})".format_map(figures) if figures else "–"
            )
            shown[row].append(text)
    for row, texts in shown.items():
        lines.append(f"| {row}: tokens a second (MFU) | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
