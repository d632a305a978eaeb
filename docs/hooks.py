"""Hooks of mkdocs: what the site needs beyond the pages as GitHub shows them."""

import json
import re
from pathlib import Path

OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)\s]+)\)")
COMMANDS = re.compile(
    r"^```\n(?=(?:#[^\n]*\n)*(?:\w+=\S+ )*(?:fsdp-trainer|torchrun|make|pip|hf|python|export) )",
    re.MULTILINE,
)
"""The beginning of a block of commands that names no language."""
LISTS = ("configuration.md", "mistakes.md")
"""Pages that have every word; a search shows them last, as it does the other language."""
MOVED = {"what-works.html": "reference/support.html"}
"""New address of each page that is gone."""
MOVED_SECTIONS = {
    "checkpoints.html": {
        "gguf": "checkpoints.html#gguf-for-llamacpp-and-ollama",
        "when-it-cannot-be-written": "checkpoints.html#a-full-disk-when-it-cannot-be-written",
    },
    "command-line.html": {
        "verbs": "reference/commands.html#verbs",
        "extras": "reference/commands.html#extras",
    },
    "data.html": {"mixtures": "mixtures.html"},
    "formats.html": {"compressed-for-vllm": "formats.html#quantization-for-vllm"},
    "from-nothing-to-chat.html": {
        "one-number-for-a-model-modeldepth": "depth.html",
        "a-ladder-of-sizes": "depth.html#a-ladder-of-sizes",
    },
    "heads.html": {"layouts": "reference/support.html"},
    "how-plan-works.html": {"bytes-on-the-wire": "how-plan-works.html#messages"},
    "index.html": {
        "install": "first-run.html#install",
        "fine-tune-on-my-chats": "tour.html",
        "train-an-adapter-on-one-gpu": "adapters.html",
        "learn-from-preferences": "preferences.html",
        "train-with-rewards": "first-rewards.html",
        "pretrain": "from-nothing-to-chat.html",
        "train-70b-on-8-nodes": "launching.html",
        "will-it-fit": "plan.html",
    },
    "launching.html": {
        "slurm": "clusters.html#slurm",
        "docker-and-kubernetes": "clusters.html",
        "skypilot": "clusters.html",
        "sweeps": "clusters.html#sweeps",
    },
    "seeing.html": {
        "profiles": "profiles.html",
        "where-the-time-goes": "profiles.html",
        "out-of-memory": "out-of-memory.html",
        "trackers": "trackers.html",
    },
    "sharding.html": {"precision": "precision.html", "compile": "compile.html"},
    "tour.html": {"7-try-several-values": "sweeps.html", "9-check-the-cluster": "doctor.html"},
}
"""New addresses of sections that are on another page now."""
FOLLOW = "<script>{{const to = {0}[location.hash.slice(1)]; if (to) location.replace(to)}}</script>"
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><title>Moved</title>'
    '<meta http-equiv="refresh" content="0; url={0}"><a href="{0}">This page has moved</a>\n'
)


def is_chinese(page) -> bool:
    return ".zh-CN." in page.file.src_uri


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the page for the site, which holds the pages alone.

    Links out of docs/ become paths. Blocks of commands are coloured, and wrapped by site.css.
    """
    if is_chinese(page) or page.file.src_uri in LISTS:
        page.meta["search"] = {"boost": 0.1}
    if "/" not in page.file.src_uri:  # below reference/ such links lead to the other pages
        markdown = OUTSIDE.sub(r"\1 (`\2`)", markdown)
    return COMMANDS.sub("```bash\n", markdown)


def on_post_page(output: str, page, config) -> str:
    """Return the page with its language in `<html lang>`, and a script for its moved sections.

    By the language browsers choose fonts.
    """
    moved = MOVED_SECTIONS.get(page.file.dest_uri)
    if moved:
        output = output.replace("</head>", FOLLOW.format(json.dumps(moved)) + "</head>", 1)
    if is_chinese(page):
        return output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output


def on_post_build(config) -> None:
    """Let old addresses lead to the new ones."""
    for old, new in MOVED.items():
        path = Path(config["site_dir"]) / old
        if not path.exists():
            path.write_text(REDIRECT.format(new))
