"""README, the pages in docs/ and their Chinese twins: sizes, links, commands, and the site."""

import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from folders import REPO

PAGES = sorted(
    chain(
        REPO.glob("*.md"),
        (REPO / "docs").glob("*.md"),
    )
)
TWINS = [("README.md", "README.zh-CN.md"), ("docs/index.md", "docs/index.zh-CN.md")]
BLOCK = re.compile(r"(?ms)^ *```[^\n]*\n(.*?)^ *```$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
SLUG_DROPS = re.compile(r"[^\w\- ]")


def without_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", without_blocks(page))
    return {SLUG_DROPS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    text = re.sub(r"`[^`\n]*`", "", without_blocks(page))
    return ["".join(groups) for groups in LINK.findall(text)]


def is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors(target)


def commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks without comments, and the commands in its text."""
    lines = "".join(BLOCK.findall(page.read_text())).splitlines()
    in_text = re.findall(r"`([^`\n]+)`", without_blocks(page))
    typed = [code for code in in_text if re.search(r"=|^(fsdp-trainer|make|torchrun) ", code)]
    return [re.sub(r" +#.*", "", line) for line in lines] + sorted(typed)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_fits_a_few_screens(name):
    lines = (REPO / name).read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    local = [link for link in links(page) if not re.match(r"https?:", link)]
    assert [link for link in local if is_broken(page, link)] == []


@pytest.mark.parametrize(("english", "chinese"), TWINS)
def test_both_languages_give_the_same_commands(english, chinese):
    assert commands(REPO / chinese) == commands(REPO / english)


def test_every_page_begins_with_what_it_is_for():
    def begins_with_text(page: Path) -> bool:
        title, empty, first = page.read_text().splitlines()[:3]
        return (
            title.startswith("# ")
            and not empty
            and first[:3] != "```"
            and first[:1] not in ("", *"|!#<")
        )

    pages = (REPO / "docs").glob("*.md")
    assert [page.name for page in pages if not begins_with_text(page)] == []


def test_the_picture_of_the_benchmark_is_the_measured_one():
    measured = REPO / "benchmarks/results/2-cpu-cores-intel-r-xeon-r-processor/scaling.svg"
    assert (REPO / "docs/pictures/scaling.svg").read_text() == measured.read_text()


def build(root: Path, site: Path) -> subprocess.CompletedProcess:
    """Build the site of a checkout, as `make docs` does."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, timeout=300, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.further
def test_the_site_is_built_and_fetches_nothing(tmp_path):
    built = build(REPO, tmp_path)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list((REPO / "docs").glob("*.md")))
    fetched = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*href=\"?https?:")
    assert [page.name for page in pages if fetched.search(page.read_text())] == []
    assert '<html lang="zh-CN"' in (tmp_path / "index.zh-CN.html").read_text()
    for page in (REPO / "docs").glob("*.md"):
        shown = (tmp_path / page.name).with_suffix(".html").read_text().count("<pre")
        assert shown == len(BLOCK.findall(page.read_text())), page.name


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tmp_path):
    """Two small pages are built as ours are."""
    settings, _, _ = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md, plan.md]\n")
    (tmp_path / "docs").mkdir()
    shutil.copy(REPO / "docs/hooks.py", tmp_path / "docs")
    (tmp_path / "docs/plan.md").write_text("# A plan\n\n[ours](index.md)\n")
    for links, codes in (
        ("[a page](plan.md) [a heading](plan.md#a-plan)", 0),
        ("[no page](missing.md) [no heading](plan.md#missing)", 1),
    ):
        (tmp_path / "docs/index.md").write_text(f"# Start\n\n{links}\n")
        built = build(tmp_path, tmp_path / "site")
        assert built.returncode == codes, built.stderr
    assert "missing.md" in built.stderr
    assert "#missing" in built.stderr


@pytest.mark.parametrize("picture", sorted((REPO / "docs/pictures").glob("*.svg")), ids=str)
def test_pictures_fetch_nothing(picture):
    assert "url(http" not in picture.read_text()
