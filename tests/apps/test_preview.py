"""The preview shows what the model sees, says what is wrong with the data, and what to do; train
says it in two lines."""

import io
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
from browser import browser_page, check_nothing_acts, settle
from folders import table
from image_models import make_image_folder, write_pictures
from rich.console import Console
from texts import SHARED, make_tokenizer, turn
from tokenizers import pre_tokenizers
from world import lines_of, split, write_json, write_lines

from fsdp_trainer.apps.preview import preview as previewing
from fsdp_trainer.apps.preview import preview_text
from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.data.order.mixture import OrderMaker
from fsdp_trainer.data.prepared_data import build_data, lossy
from fsdp_trainer.data.store import component_store
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

# What HTML, a terminal and a table of 80 columns could each stumble over
EVIL = (
    '</div></script><script>alert(1)</script><img src=x onerror=alert(1)>" onmouseover="x '
    "&amp; \x1b[2J\x07 \u202e<|im_end|>"
)


def ask(answer, question="q", **more):
    turns = turn("user", question), turn("assistant", answer, **more)
    return {"messages": [*turns]}


@pytest.fixture
def preview(tmp_path, program):
    """`preview(rows, *keys, code=0)`: what it prints; `preview.words`: the configuration's."""

    def run(rows, *keys, code=0, tokenizer="demo:bytes"):
        usual = {"tokenizer.path": tokenizer, "data.cache": tmp_path / "cache",
                 "batch.seq_len": 128}  # fmt: skip
        if rows is not None:
            usual["data.path"] = write_lines(tmp_path / "a.jsonl", rows)
        given = dict(key.split("=", 1) for key in split(keys))
        run.words = [f"{key}={value}" for key, value in (usual | given).items()]
        return program("preview", *run.words, code=code)

    return run


OPENS = """{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
BOS = "<|endoftext|>"
FINDINGS = table("apps/preview_findings.yaml")


def test_every_finding_has_a_case_here():
    of_images = {key for key in KINDS if key.startswith("images_")}  # in test_data_images.py
    of_images.add("no_first_token")
    assert FINDINGS.keys() | of_images == KINDS.keys()


@pytest.fixture(scope="module")
def of_words(tmp_path_factory):
    """A tokenizer with words in one token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    names = {"bos_token": BOS, "eos_token": "<|im_end|>"}
    make_tokenizer([BOS, "<|im_start|>", "<|im_end|>"]).save(f"{folder}/tokenizer.json")
    write_json(folder / "tokenizer_config.json", names)
    return folder


@pytest.fixture(scope="module")
def without_end(tmp_path_factory):
    """A tokenizer without end token and template."""
    folder = tmp_path_factory.mktemp("without_end")
    make_tokenizer(["<|im_start|>", "<|im_end|>"]).save(f"{folder}/tokenizer.json")
    return folder


def test_rows_as_json_have_stdout_for_themselves_and_warnings_go_to_stderr(tmp_path, program):
    make_tokenizer(["<|im_start|>", "<|im_end|>"]).save(f"{tmp_path}/tokenizer.json")
    other = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}
    write_json(tmp_path / "tokenizer_config.json", other)
    file = write_lines(tmp_path / "a.jsonl", [ask("a") | {"other": 1}, ask("b"), ask("a")])
    words = f"tokenizer.path={tmp_path} data.path={file} data.cache={tmp_path}/c"
    out = program(f"preview {words} preview.format=json preview.rows=1")
    (row,) = lines_of(out)
    assert row["row"] == 0
    assert f"warning: 1 duplicate of other samples ({file}:3)" in program.err
    assert f"{file}: columns not used: other" in program.err
    assert "'<|im_end|>' the id 9" in program.err, "which is not used"


@pytest.mark.parametrize("key", FINDINGS)
def test_what_is_wrong_is_told_with_its_place_and_its_fix(
    key, preview, of_words, without_end, tmp_path, monkeypatch
):
    finding = FINDINGS[key]
    severity, words = finding["severity"], finding.get("words", [])
    if "template" in finding:
        (tmp_path / "own.jinja").write_text(finding["template"])
        words = [f"data.template={tmp_path}/own.jinja"]
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    tokenizer = of_words if key in ("two_bos", "shared_token") else "demo:bytes"
    tokenizer = without_end if key == "no_end_token" else tokenizer
    labelled = [{"prompt": prompt, "completion": "a", "label": True} for prompt in "pr"]
    write_lines(tmp_path / "b.jsonl", labelled)
    if key == "no_other_prompt":  # a part of the data with one prompt
        monkeypatch.setattr(component_store, "SMALLEST", 60)
    out = preview(finding["rows"], *words, tokenizer=tokenizer)
    values = {"n": 1, "s": "", "are": "is", "seq_len": 128, "samples": 2, "times": "1.6"}
    values |= {"what": "sample", "room": "batch.seq_len=128"}
    text, fix = KINDS[key].text.format(**values), KINDS[key].fix
    assert fix or severity == "note" or key in ("too_long", "truncated", "empty")
    mark = f"{severity:<8}{text}\n        " + (f"→ {fix}\n        " if fix else "")
    described = re.split("\nwarning|\nnote", out[out.index(mark) :])[0]
    assert f"        {tmp_path}/a.jsonl:{finding['line']}" in described.splitlines()


def test_the_row_length_that_is_advised_holds_99_percent(preview):
    lengths = [*range(20, 119), 400, 300, 200, 190]
    out = preview([{"text": "x" * n} for n in lengths])
    advised = int(re.search(r"batch\.seq_len=(\d+) would", out)[1])
    tokens = np.array(lengths) + 1  # with eos
    assert np.mean(tokens <= advised) >= 0.99
    assert 300 < advised <= 320
    lost = 100 * tokens[tokens > 128].sum() / tokens.sum()
    assert f"{lost:.1f}% of the tokens are lost" in " ".join(out.split())
    out = preview([{"text": "x" * n} for n in [*range(20, 120), *range(20, 120), 400]])
    assert "more than 99% of the samples fit" in out


def test_a_source_that_ends_with_nothing_or_all_cut_is_named(preview, tmp_path):
    good = write_lines(tmp_path / "good.jsonl", [ask("x" * 5)])
    long = write_lines(tmp_path / "long.jsonl", [ask("x" * 500)])
    path = f"data.path=[{good},{long}]"
    assert "source long has no samples left" in preview(None, path)
    assert "every sample of source long is cut" in preview(None, path, "data.too_long=truncate")
    out = preview(None, path, "batch.seq_len=1024 train.steps=9")
    assert "nothing to warn about" in out
    assert "nothing dropped or cut, no duplicates" in out


def test_a_mixture_is_shown_by_its_shares_and_its_findings_by_component(preview, tmp_path):
    b = write_lines(tmp_path / "b.jsonl", [ask("b" * n) for n in (5, 5, 6, 7, 500)])
    c = write_lines(tmp_path / "c.jsonl", [ask("c" * n) for n in range(40)])
    how = [f"data.path=[{{path: {b}, weight: 0.25}},{{path: {c}, weight: 0.75}}]"]
    how += ["batch.micro_rows=1"]
    out = preview(None, *how, "train.steps=3 batch.rows=8 data.packing=none")
    described = [line.split() for line in out.splitlines()]
    lines = {words[0]: words for words in described if words[:1] in (["b"], ["c"])}
    assert [float(lines[name][3].rstrip("%")) for name in "bc"] == pytest.approx([25, 75], abs=1)
    cfg = compose("preview", preview.words)
    rows = OrderMaker.of(cfg).training(cfg.data, build_data(cfg)[2]).taken(3 * 8)
    assert [lines[name][5] for name in "bc"] == [f"{rows[0] / 4:.2f}", f"{rows[1] / 40:.2f}"]
    assert sum(rows) == 24
    assert "warning b: 1 sample dropped: longer than" in out
    assert f"{b}:5" in out
    assert " c: 1 " not in out
    assert "warning b is seen" in preview(None, *how, "train.steps=30 batch.rows=8")
    out = preview(None, *how, "train.epochs=2 schedule.warmup_steps=20")
    assert re.search(r"steps +\d+ of 32 rows, 2.00 epochs", out)
    assert "the warm-up takes 20 steps" in out
    assert "no model learns" not in out
    typed = preview(None, *how, "train.steps=20 schedule.warmup_steps=20 optim.lr=1e5")
    assert "the learning rate only rises, to" in typed
    assert "the learning rate is 100000: with adamw no model learns above 0.1" in typed
    better = re.search(r"batch.rows=\d+", out)[0]
    assert "warm-up" not in preview(None, *how, "train.epochs=2 schedule.warmup=0.1", better)
    assert "is seen" not in preview(None, *how, "train.steps=1 batch.rows=4")


def test_a_template_without_marks_is_a_note_only(preview, tmp_path):
    (tmp_path / "own.jinja").write_text(OPENS.replace("<think>\n", ""))
    out = preview([ask("a")], f"data.template={tmp_path}/own.jinja train.steps=9")
    assert "note    the chat template does not mark" in out
    assert "warning" not in out
    assert "does not mark" not in preview([ask("a")])
    assert "does not mark" not in preview([{"text": "a"}], f"data.template={tmp_path}/own.jinja")


def test_a_tokenizer_larger_than_the_model_is_refused_and_a_smaller_one_noted(preview):
    assert "model.vocab_size=260" in preview([ask("a")], "model.vocab_size=100", code=2)
    for size, kind in ("300", "note"), ("4,096", "warning"):
        noted = f"{kind} +the model has {size} tokens, the tokenizer 260"
        assert re.search(noted, preview([ask("a")], f"model.vocab_size={size.replace(',', '')}"))


@pytest.mark.parametrize("verb", ["preview", "train"])
def test_data_without_a_supervised_token_is_refused(verb, world, tmp_path):
    rows = [ask("a", weight=0), ask("b" * 500)]
    nothing = write_lines(tmp_path / "nothing.jsonl", rows)
    some = write_lines(tmp_path / "some.jsonl", [ask("a")])
    how = f"tokenizer.path=demo:bytes run.root={tmp_path} model=tiny batch.seq_len=64"
    for keys in (
        [f"data.path={nothing}"],
        [f"data.path=[{{path: {some}, weight: 0.5}},{{path: {nothing}, weight: 0.5}}]"],
        [f"data.path={some}", f"data.validation={nothing}"],
    ):
        (result,) = world.command(verb, how, *keys, code=2)
        for part in (
            "no token", "there is nothing to learn", "nothing.jsonl:1",
            "1 sample dropped: without a supervised token", "longer than batch.seq_len=64",
        ):  # fmt: skip
            assert part in result.err
        assert "Traceback" not in result.err


def test_train_says_what_it_trains_on_and_every_warning(train, tmp_path):
    rows = [ask("a"), ask("b"), ask("b"), ask("c" * 200), ask("d", "<|im_end|>")]
    words = [f"data.path={write_lines(tmp_path / 'a.jsonl', rows)}", "batch.seq_len=128"]
    run = train("run", *words, "train.steps=1 data.max_lost=1")
    lines = [line for line in run.out.splitlines() if line.startswith("data ")]
    assert re.search(
        r"4 samples, \d+ tokens, \d+\.\d% supervised, longest \d+; 1 row an epoch, \d+\.\d% full",
        lines[0],
    )
    assert "1 dropped (1 too long)" in lines[1]
    assert "1 duplicate kept" in lines[1]
    assert "warning: 1 conversation or document with special tokens in their own text" in lines[2]
    assert "remove them from the data" in lines[3]
    for text in ("1 sample dropped", "1 duplicate of other"):
        assert sum(f"warning: {text}" in line for line in lines) == 1


def test_a_run_that_would_lose_most_of_its_tokens_does_not_start(train, tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [ask("a"), ask("c" * 100), ask("d" * 100)])
    how = ["run", f"data.path={file}", "train.steps=1"]
    refused = train(*how, code=2)
    assert "2 dropped (2 too long)" in refused.err
    share = re.search(r"data\.max_lost=(0\.\d+)  to accept it", refused.err)[1]
    assert not refused.folder.exists()
    assert train(*how, f"data.max_lost={share}")["step"] == [1]


def test_a_tokenizer_that_loses_text_is_named(preview, tmp_path):
    backend = make_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.save(f"{tmp_path}/tokenizer.json")
    (warning,) = lossy(load_tokenizer(str(tmp_path)))
    assert "'Nataliasold48clips" in warning
    assert not lossy(load_tokenizer("demo:bytes"))


OF_METHODS = table("apps/preview_methods.yaml")


@pytest.mark.parametrize("method", OF_METHODS)
def test_what_preview_shows_is_what_each_method_trains_on(preview, method):
    row = OF_METHODS[method]
    rows = [row | ({"prompt": f"q{i}"} if "prompt" in row else {}) for i in range(4)]
    keys = [f"objective={method}", "preview.rows=4", "preview.format=json"]
    keys += ["batch.seq_len=256", "model=tiny"]
    keys += (
        ["objective.rewards=[number]", "objective.max_new_tokens=64"] if method == "grpo" else []
    )
    out = preview(rows, *keys)
    trained = [word for word in preview.words if not word.startswith("preview.")]
    cfg = compose("train", [*trained, "run.name=r"])
    order = OrderMaker.of(cfg).training(cfg.data, build_data(cfg)[2])
    shown = lines_of(out)
    for i, row in enumerate(shown):
        read = order.read(i)
        count = sum(read.documents)
        assert row["documents"] == read.documents
        assert row["tokens"] == read.tokens[:count].tolist()
        assert row["labels"] == read.labels[:count].tolist()


class Closed(io.StringIO):
    def write(self, _):
        raise BrokenPipeError


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path, monkeypatch, capsys, form):
    monkeypatch.setattr(sys, "stdout", Closed())
    words = f"data.path=demo:backwards tokenizer.path=demo:bytes data.cache={tmp_path}"
    assert main(f"preview {words} batch.seq_len=64 preview.format={form}".split()) == 0
    # a busy machine takes so long to prepare that its progress is shown
    assert all(line.startswith("data ") for line in capsys.readouterr().err.splitlines())


def test_a_page_that_is_a_folder_is_refused(preview, tmp_path):
    assert f"preview.html={tmp_path}" in preview([ask("a")], f"preview.html={tmp_path}", code=2)


def test_the_page_holds_the_rows_of_training_and_runs_nothing_of_the_data(preview, tmp_path):
    rows = [ask("你好，世界 👩‍👧", EVIL), ask("half", weight=0.5), ask("\n\n two lines\n")]
    keys = f"preview.html={tmp_path}/p.html batch.seq_len=400 data.packing=none"
    out = preview(rows, keys, "preview.rows=2 preview.format=json")
    html = (tmp_path / "p.html").read_text()
    page = check_nothing_acts(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "http" not in html.replace("http-equiv", "")
    assert "\x1b" not in html
    assert "\u202e" not in html
    tokenizer = load_tokenizer("demo:bytes")
    pieces_by_ids = {}
    for (*_, (_, outer), (tag, inner)), text in (pair for pair in page.texts if len(pair[0]) > 1):
        if tag in ("b", "i") and "data-ids" in outer:
            piece = tag, int(inner.get("data-n", 1)), float(inner.get("data-w", 1)), text
            pieces_by_ids.setdefault(outer["data-ids"], []).append(piece)
    # the first sample, as it is rendered, is before the rows
    _, *shown = pieces_by_ids.items()
    for (listed, pieces), line in zip(shown, lines_of(out), strict=True):
        ids = list(map(int, listed.split()))
        assert ids == line["tokens"]
        assert sum(n for _, n, *_ in pieces) == len(ids)
        learnt = [tag == "b" for tag, n, *_ in pieces for _ in range(n)]
        assert learnt == [False, *(label != -100 for label in line["labels"][:-1])]
        weights = {weight for tag, _, weight, _ in pieces if tag == "b"}
        assert weights == ({0.5} if "weights" in line else {1.0})
        text = "".join(text for *_, text in pieces).replace("↵", "")
        plain = tokenizer.decode(ids, skip_special=False)
        assert text == plain.replace("\x1b", "␛").replace("\x07", "␇").replace("\u202e", "\\u202e")


def test_samples_of_one_conversation_are_numbered(preview):
    chat = {"messages": [*ask("a")["messages"], *ask("b")["messages"]]}
    out = preview([ask("c"), chat], "data.template=qwen3 batch.seq_len=400")
    assert "a.jsonl:2 (sample 1 of 2)" in out
    assert "a.jsonl:2 (sample 2 of 2)" in out
    assert "a.jsonl:1 (" not in out


def test_the_page_shows_every_template_that_rows_are_rendered_with(preview, tmp_path):
    tokenizer, folder = load_tokenizer("demo:bytes"), tmp_path / "tokenizer"
    tools = f"{tokenizer.chat_template}{{# tools #}}"
    tokenizer.save(folder, {"default": tokenizer.chat_template, "tool_use": tools})
    preview([ask("a")], f"preview.html={tmp_path}/p.html", tokenizer=folder)
    html = (tmp_path / "p.html").read_text()
    assert "The template: tokenizer&#39;s own, default" in html
    assert "The template: tokenizer&#39;s own, tool_use" in html
    assert "{# tools #}" in html


def test_what_the_model_sees_is_shown_whole_but_for_control_characters(preview):
    said = preview([ask("at http://h/a?key=abcdef\x1b[31m#b")], "preview.rows=1")
    assert "http://h/a?key=abcdef␛[31m#b" in said


def test_in_colour_learnt_weighted_and_special_tokens_look_different(preview):
    preview([ask("yes"), ask("half", weight=0.5)], "preview.rows=1 data.shuffle=false")
    cfg = compose("preview", preview.words)
    tokenizer, template, prepared = build_data(cfg)
    order = OrderMaker.of(cfg).training(cfg.data, prepared)
    page = previewing.build_page(cfg, tokenizer, template, prepared, order, [])

    def drawn(**how):
        plain = {"width": 80, "highlight": False, "legacy_windows": False}
        console = Console(file=io.StringIO(), force_terminal=True, **plain, **how)
        preview_text.show(page, console)
        return console.file.getvalue()

    coloured = drawn(color_system="standard")
    assert "\x1b[30;42myes\x1b[0m\x1b[1;30;42m<|im_end|>" in coloured
    assert "\x1b[30;43mhalf" in coloured
    assert "\x1b[36m<|im_start|>" in coloured
    assert "[[" not in coloured
    without = drawn(no_color=True, color_system="standard")
    assert "[[yes<|im_end|>]]" in without
    assert "[[half<|im_end|>]]×0.5" in without


@pytest.mark.parametrize("columns", [80, 120])
def test_without_a_terminal_tables_keep_to_their_columns_whatever_the_names(
    preview, tmp_path, monkeypatch, columns
):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns == 80:
        monkeypatch.setenv("COLUMNS", "80")
    for name in ("数据" * 12, "b" * 70):
        write_lines(tmp_path / f"{name}.jsonl", [ask("猫" * 20)])
    out = preview(None, f"data.path={tmp_path} batch.seq_len=256 preview.rows=1")
    table = out[out.index("source ") : out.index("first sample")].splitlines()
    cells = [sum(2 if "\u2e80" < c < "\uffef" else 1 for c in line) for line in table]
    assert len(table) > 3
    assert max(cells) <= columns
    assert "[[" + "猫" * 20 in out  # three tokens a character


def test_pieces_join_to_the_text_for_tokenizers_that_strip_spaces(tmp_path):
    """SentencePiece's decoder drops the space at the beginning, and falls back to bytes."""
    path = SHARED / "llama2_tokenizer.model"
    if not path.exists():
        pytest.skip("needs a real tokenizer, which is not shipped")
    tokenizer = load_tokenizer(str(path))
    for text in ("Hello  world \n x", "猫 𝒳 é </s> tail"):
        ids = np.array(tokenizer.encode(text))
        pieces = previewing.TokenTexts(tokenizer).of(ids, np.ones(len(ids)))
        assert "".join(piece.text for piece in pieces).strip() == text.strip()
        assert [id for piece in pieces for id in piece.ids] == ids.tolist()
        assert all(a.text or b.text for a, b in pairwise(pieces))


def test_half_a_character_is_shown_as_its_token():
    tokenizer = load_tokenizer("demo:bytes")
    ids = np.array(tokenizer.encode("é"))
    (whole,) = previewing.TokenTexts(tokenizer).of(ids, np.ones(2))
    assert (whole.text, whole.ids) == ("é", ids.tolist())
    halves = previewing.TokenTexts(tokenizer).of(ids, np.array([0, 1]))
    assert [piece.ids for piece in halves] == [[ids[0]], [ids[1]]]
    assert all("\ufffd" not in piece.text for piece in halves)


def test_the_page_in_a_browser_tells_of_each_token_and_runs_nothing_of_the_data(preview, tmp_path):
    rows = [ask("what is 1 + 1", EVIL), ask("half", "an answer", weight=0.5)]
    preview(rows, f"preview.html={tmp_path}/p.html batch.seq_len=400 data.packing=none")
    with browser_page() as page:
        page.goto(f"file://{tmp_path}/p.html")
        about = page.locator("#about")
        idle = about.inner_text()
        learnt = page.locator(".document .text > b").first
        learnt.hover()
        settle(lambda: about.inner_text() != idle, page)
        assert "supervised with weight 1" in about.inner_text()
        page.locator(".document .text > b[data-w='0.5']").first.hover()
        settle(lambda: "supervised with weight 0.5" in about.inner_text(), page)
        page.locator(".document .text > i").first.hover()
        settle(lambda: "context" in about.inner_text(), page)
        assert page.locator("script").count() == 1
        page.set_viewport_size({"width": 390, "height": 800})
        settle(lambda: page.evaluate("document.documentElement.clientWidth") <= 390, page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_images_are_marked_in_the_text_and_shown_on_the_page(world, tmp_path):
    folder = make_image_folder(tmp_path / "model", "qwen2_5_vl")
    [name] = write_pictures(tmp_path / "pictures", 1)
    question = [{"type": "image", "image": f"pictures/{name}"}, {"type": "text", "text": "what?"}]
    file = write_lines(tmp_path / "a.jsonl", [ask("a", question)])
    keys = f"model.init_from={folder} data.path={file} batch.seq_len=64"
    page = tmp_path / "page.html"
    (shown,) = world.command("preview", keys, f"preview.html={page}", f"run.root={tmp_path}")
    assert "⟦0.png 24 × 20: 6 tokens⟧" in shown.out
    assert "<|image_pad|>" not in shown.out
    assert '<img src="data:image/jpeg;base64,' in page.read_text()
    assert "img-src data:" in page.read_text()
