"""README, the pages in docs/ and their Chinese twins: sizes, links, commands, and the site."""

import contextlib
import functools
import itertools
import re
import runpy
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import browser_page, settle
from folders import REPO
from tables import rows

from fsdp_trainer.cli import VERBS
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.version import __version__

PAGES = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
CHINESE = sorted(page for page in PAGES if page.name.endswith(".zh-CN.md"))
DOCS = REPO / "docs"
NAVIGATION = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
_, TUTORIALS, HOW_TO, _ = re.split(r"(?m)^  - (?:Tutorials|How-to|Explanation):$", NAVIGATION)
BLOCK = re.compile(r"(?ms)^ *```[^\n]*\n(.*?)^ *```$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
SLUG_DROPS = re.compile(r"[^\w\- ]")


def files(navigation):
    """Return the pages of a part of the navigation."""
    return re.findall(r"\S+\.md", navigation)


def without_blocks(page):
    return BLOCK.sub("", page.read_text())


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", without_blocks(page))
    return {SLUG_DROPS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def links(page):
    """Return the targets of a page's links and pictures."""
    text = re.sub(r"`[^`\n]*`", "", without_blocks(page))
    return ["".join(groups) for groups in LINK.findall(text)]


def is_broken(page, link):
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


def commands(page):
    """Return the lines of a page's blocks without comments, and the code in its text."""
    lines = "".join(BLOCK.findall(page.read_text())).splitlines()
    in_text = re.findall(r"`([^`\n]+)`", without_blocks(page))
    return [re.sub(r" +#.*", "", line) for line in lines] + sorted(in_text)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_fits_a_few_screens(name):
    lines = (REPO / name).read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_every_link_leads_to_a_file_and_a_heading():
    local = [(page, link) for page in PAGES for link in links(page) if "://" not in link]
    assert len(local) > 100
    assert [(page.name, link) for page, link in local if is_broken(page, link)] == []


def test_old_addresses_lead_to_a_page_and_a_heading():
    hooks = runpy.run_path(f"{DOCS}/hooks.py")
    new = {*hooks["MOVED"].values()}
    for page, sections in hooks["MOVED_SECTIONS"].items():
        assert not anchors(DOCS / page.replace(".html", ".md")) & {*sections}
        new |= {*sections.values()}
    targets = [address.replace(".html", ".md") for address in new]
    assert [target for target in targets if is_broken(DOCS / "index.md", target)] == []


def tables(page):
    """Return the number of rows of each table of a page."""
    lines = without_blocks(page).splitlines()
    grouped = itertools.groupby(lines, key=lambda line: line.startswith("|"))
    return [len([*rows]) for is_table, rows in grouped if is_table]


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_both_languages_give_the_same_commands_and_rows(chinese):
    english = chinese.with_name(chinese.name.replace(".zh-CN", ""))
    assert commands(chinese) == commands(english)
    assert tables(chinese) == tables(english)


def test_the_start_page_and_the_tutorials_are_in_both_languages():
    english = ["README.md", "index.md", *files(TUTORIALS)]
    assert len(english) == 8
    assert {page.name.replace(".zh-CN", "") for page in CHINESE} == {*english}


def by_hand(text):
    """Return the words of a page without the tables that the program writes."""
    return re.sub(r"(?s)<!-- table -->.*<!-- end of table -->", "", text).split()


@pytest.mark.parametrize("name", files(HOW_TO))
def test_a_how_to_page_is_short(name):
    assert len(by_hand(without_blocks(DOCS / name))) <= 700


def test_all_pages_by_hand_can_be_read():
    written = {DOCS / "configuration.md", DOCS / "mistakes.md", *CHINESE}
    pages = {*DOCS.glob("*.md"), REPO / "README.md", REPO / "CONTRIBUTING.md"} - written
    assert sum(len(by_hand(page.read_text())) for page in pages) <= 50_000


def test_every_page_begins_with_what_it_is_for():
    def begins_with_text(page):
        title, empty, first = page.read_text().splitlines()[:3]
        begins = bool(first) and first[0] not in "|!#<" and not first.startswith("```")
        return title.startswith("# ") and not empty and begins

    pages = (REPO / "docs").glob("*.md")
    assert [page.name for page in pages if not begins_with_text(page)] == []


def test_the_picture_of_the_benchmark_is_the_measured_one():
    measured = REPO / "benchmarks/results/2-cpu-cores-intel-r-xeon-r-processor/scaling.svg"
    assert (REPO / "docs/pictures/scaling.svg").read_text() == measured.read_text()


EXPECTED = dict(
    rows("""
out of memory → out-of-memory
learning rate → learning-rate
warmup → learning-rate
resume → checkpoints
model card → share
push → share
lora → adapters
tokenizer → tokenizers
dpo → preferences
grpo → reinforcement
images → images
many nodes → launching
slurm → clusters
checkpoint → checkpoints
evaluate → evaluation
hang → watchdog
sweep → sweeps
float8 → precision
muon → optimizers
distillation → distillation
batch size → command-line
gradient accumulation → command-line
csv → data
nan loss → anomalies
validation loss → evaluation
continue training → checkpoints
gguf → checkpoints
qlora → adapters
early stopping → checkpoints
multi gpu → launching
seed → command-line
gradient clipping → sharding
sequence length → command-line
mixed precision → precision
hyperparameter search → sweeps
profiler → profiles
throughput → performance
custom loss → extending
custom dataset → data
llama.cpp → checkpoints
quantization → formats
perplexity → evaluation
cpu offload → offload
weight decay → optimizers
disk full → checkpoints
epochs → command-line
data mixing → mixtures
full fine-tuning → recipes
""")
)
"""The page that a search of the site should show first."""


def site(folder):
    """Return the site's folder: that of `make docs`, or `folder` if a source is newer."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    sources = (file for file in DOCS.rglob("*.*") if "__pycache__" not in file.parts)
    newest = max(file.stat().st_mtime for file in (REPO / "mkdocs.yml", *sources))
    last = REPO / "build/site/search/search_index.json"
    if last.exists() and last.stat().st_mtime > newest:
        return last.parents[1]
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    return folder


def test_a_search_of_the_site_finds_the_page_that_one_expects_first(tmp_path):
    results = ".md-search-result__item > a"
    first = {}
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, contextlib.ExitStack() as stack:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = f"http://127.0.0.1:{server.server_port}"
        page = stack.enter_context(browser_page(address))
        page.goto(f"{address}/index.html")
        for query in EXPECTED:
            for text in ("", query):
                page.fill(".md-search__input", text)
                page.press(".md-search__input", "End")  # the page listens to keys
                settle(lambda text=text: bool(page.query_selector(results)) == bool(text), page)
            link = page.get_attribute(results, "href")
            first[query] = link.partition("?")[0].rpartition("/")[2].removesuffix(".html")
        assert first == EXPECTED
        page.goto(f"{address}/seeing.html#profiles")
        settle(lambda: page.url.endswith("/profiles.html"), page)


def test_the_changelog_begins_with_this_version():
    text = (REPO / "CHANGELOG.md").read_text()
    releases = re.split(r"(?m)^## ", text)[1:]
    assert next(one.split()[0] for one in releases if one[:10] != "Unreleased") == __version__
    assert [one for one in releases if one.count("\n- ") > 5 and one[:10] != "Unreleased"] == []
    assert len(text.split()) <= 4000


def test_pictures_fetch_nothing():
    pictures = list((REPO / "docs/pictures").glob("*.svg"))
    assert pictures
    assert [picture.name for picture in pictures if "url(http" in picture.read_text()] == []


def test_no_page_has_a_tag_that_is_meant_as_text():
    known = re.compile(r"<(?!/?(?:picture|source|img|sup|sub)\b|!--|https?:)[a-z]\w*>")
    texts = {page: re.sub(r"`[^`\n]*`", "", without_blocks(page)) for page in PAGES}
    assert [(page.name, tag) for page, text in texts.items() for tag in known.findall(text)] == []


def test_every_page_that_the_program_names_exists():
    files = [
        file for name in ("fsdp_trainer", "conf", "recipes") for file in (REPO / name).rglob("*")
    ]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".yaml")]
    named = {link for text in texts for link in re.findall(r"docs/[\w/-]+\.md(?:#[\w-]+)?", text)}
    assert len(named) > 20
    assert [link for link in named if is_broken(REPO / "README.md", link)] == []


NO_KEYS = {"data.fingerprint", "run.model", "run.rank", "optim.learning_rate"}
"""What a resume may be allowed, what a callback's run has, and a mistake that is shown."""


def test_keys_targets_and_extras_that_a_page_names_exist():
    keys = {key for verb in VERBS for key in flatten(PRIMARY[verb])} | NO_KEYS
    groups = "|".join({key.partition(".")[0] for key in keys if "." in key})
    known = {
        f"make {name}" for name in re.findall(r"(?m)^([\w-]+):", (REPO / "Makefile").read_text())
    }
    known |= {
        f"[{name}]"
        for name in re.findall(r"(?m)^(\w+) = \[", (REPO / "pyproject.toml").read_text())
    }
    wrong = set()
    for page in {*PAGES} - {REPO / "CHANGELOG.md", REPO / "docs/mistakes.md"}:
        text = page.read_text()
        code = "\n".join([*re.findall(r"`[^`\n]+`", without_blocks(page)), *BLOCK.findall(text)])
        named = re.findall(
            rf"(?<![\w./-])(?:{groups})\.[a-z_]+(?==)|(?<=`)(?:{groups})\.[a-z_]+(?=`)", code
        )
        files = ("json", "model", "sh", "bin", "npy", "py")
        wrong |= {(page.name, key) for key in named if key not in keys and not key.endswith(files)}
        named = re.findall(r"(?m)^`?(make [\w-]+)", code)
        named += re.findall(r"fsdp_trainer(\[[a-z]+\])", code)
        wrong |= {(page.name, name) for name in named if name not in known}
    assert wrong == set()


def test_a_site_like_ours_fetches_nothing_and_a_broken_link_fails_its_build(tmp_path):
    """Three small pages are built as ours are."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    settings, _, _ = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")
    pages = tmp_path / "docs"
    pages.mkdir()
    shutil.copy(REPO / "docs/hooks.py", pages)
    nav = "\nnav: [index.md, index.zh-CN.md, plan.md, reference/one.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings + nav)
    (pages / "plan.md").write_text("# A plan\n\n[ours](index.md)\n\n```\nmake test\n```\n")
    (pages / "index.zh-CN.md").write_text("# Start\n\n[a page](plan.md)\n")
    (pages / "reference").mkdir()
    (pages / "reference/one.md").write_text("# One\n\n[a plan](../plan.md)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", "site"]
    for targets, codes in (
        ("[a page](plan.md) [a heading](plan.md#a-plan) [no page](../LICENSE)", 0),
        ("[no page](missing.md) [no heading](plan.md#missing)", 1),
    ):
        (pages / "index.md").write_text(f"# Start\n\n{targets}\n")
        built = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert built.returncode == codes, built.stderr
    assert "missing.md" in built.stderr
    assert "#missing" in built.stderr
    site = {page.name: page.read_text() for page in (tmp_path / "site").glob("*.html")}
    fetched = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*href=\"?https?:")
    assert [name for name, text in site.items() if fetched.search(text)] == []
    assert '<html lang="zh-CN"' in site["index.zh-CN.html"]
    assert site["plan.html"].count("<pre") == 1
    assert 'href="../plan.html"' in (tmp_path / "site/reference/one.html").read_text()
