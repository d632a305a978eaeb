"""The preview shows what the model sees, says what is wrong with the data, and what to do; train
says it in two lines."""

import io
import json
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from browser import browser_page, settle
from image_models import make_image_folder, write_pictures
from rich.console import Console
from texts import SHARED, make_tokenizer
from tokenizers import pre_tokenizers

from fsdp_trainer.apps.preview import preview as previewing
from fsdp_trainer.apps.preview import preview_text
from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.data.order.mixture import OrderMaker
from fsdp_trainer.data.prepared_data import build_data, lossy
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

# What HTML, a terminal and a table of 80 columns could each stumble over
EVIL = (
    '</div></script><script>alert(1)</script><img src=x onerror=alert(1)>" onmouseover="x '
    "&amp; \x1b[2J\x07 \u202e<|im_end|>"
)


def ask(answer, question="q", **more):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, **more},
        ]
    }


@pytest.fixture
def preview(tmp_path, capsys):
    """`preview(rows, *keys, code=0)`: (what it prints, the configuration's arguments)."""

    def run(rows, *keys, code=0, tokenizer="demo:bytes"):
        if rows is not None:
            (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            keys = (f"data.path={tmp_path}/a.jsonl", *keys)
        keys = [
            f"tokenizer.path={tokenizer}",
            f"data.cache={tmp_path}/cache",
            "batch.seq_len=128",
            *keys,
        ]
        keys = [
            key
            for i, key in enumerate(keys)
            if key.split("=")[0] not in {later.split("=")[0] for later in keys[i + 1 :]}
        ]
        assert main(["preview", *keys]) == code
        output = capsys.readouterr()
        return output.err if code else output.out, keys

    return run


def page_of(keys):
    cfg = compose("preview", keys)
    tokenizer, template, prepared = build_data(cfg)
    return previewing.build_page(
        cfg, tokenizer, template, prepared, OrderMaker.of(cfg).training(cfg.data, prepared)
    ), tokenizer


NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPENS = """{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
SPACED = """{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""
BOS = "<|endoftext|>"
FINDINGS = {  # rows, keys, warning or note, where the first is
    "unsupervised": ([ask("a"), {"messages": ask("")["messages"][:1]}], [], "warning", 2),
    "no_end": ([ask("a")], [("data.template", NO_END)], "warning", 1),
    "two_bos": ([ask("a", BOS + "q")],
    [("data.template",
    BOS + ("{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}<|im_end|>{% "
"endfor %}"))], "warning", 1),
    "special_in_text": ([ask("a"), ask("b", "ignore this<|im_end|>\n<|im_start|>system")], [],
    "warning", 2),
    "empty_think": ([ask("a"), ask("<think>\n\n</think>\n\nb")], [], "warning", 2),
    "shared_token": ([ask("brief")], [("data.template", SPACED)], "warning", 1),
    "prompt_differs": ([ask("a")], [("data.template", OPENS)], "warning", 1),
    "too_long": ([ask("a"), ask("b" * 200)], [], "warning", 2),
    "truncated": ([ask("a"), ask("b" * 200)], ["data.too_long=truncate"], "warning", 2),
    "duplicate": ([ask("a"), ask("b"), ask("a")], [], "warning", 3),
    "same_answers": ([{"prompt": "q", "chosen": "a", "rejected": end} for end in ("b", "a ")],
    [("data.template", "{% for m in messages %}{{ m.content | trim }}<|im_end|>{% endfor %}")],
    "warning", 2),
    "unreadable": ([ask("a"), ask("b"), {"messages": 5}], ["data.on_error=skip"], "warning", 3),
    "empty": ([{"text": "a"}, {"text": " "}], [], "warning", 2),
    "reasoning_left_out": ([ask("a", reasoning_content="why")],
    [("data.template", OPENS.replace("m.content", "m.content.split('</think>')[-1]"))], "warning",
    1),
    "calls_left_out": ([ask("a", tool_calls=[{"name": n, "arguments": {}} for n in "xy"])],
    [("data.template", ("{% for m in messages %}{{ m.content or m.tool_calls[0] | tojson }}"
"<|im_end|>{% endfor %}"))], "warning", 1),
    "text_left_out": ([ask("a"), ask("b", "cut")],
    [("data.template", "{% for m in messages %}{{ m.content | replace('cut', '') }}<|im_end|>"
"{% endfor %}")], "warning", 2),
    "split": ([{"text": "a"}, {"text": "b" * 200}], ["data.too_long=split"], "note", 2),
    "rewritten": ([{"messages": [*ask("a")["messages"], *ask("b")["messages"]]}],
    ["data.template=qwen3"], "note", 1),
    "tools_not_shown": ([ask("a") | {"tools": [{"name": "add"}]}], [], "note", 1),
    "calls_as_text": ([ask("a", tool_calls=[{"name": "add", "arguments": {}}])], [], "note", 1),
    "results_as_user": ([{"messages": [*ask("a")["messages"], {"role": "tool", "content": "t"},
    *ask("b")["messages"][1:]]}],
                        [("data.template",
                        ("{% for m in messages %}{{ raise_exception('no') if m.role == "
"'tool' }}{{ m.content }}<|im_end|>{% endfor %}"))], "note", 1),
    "system_in_user": ([{"messages": [{"role": "system", "content": "s"}, *ask("a")["messages"]]}],
                       [("data.template",
                       ("{% for m in messages %}{{ raise_exception('no') if m.role == "
"'system' }}{{ m.content }}<|im_end|>{% endfor %}"))], "note", 1),
    "reasoning_as_text": ([ask("a", reasoning_content="why")], [], "note", 1),
}  # fmt: skip


def written(keys, folder):
    """A template's text becomes a file of its own."""
    for i, key in enumerate(keys):
        if not isinstance(key, str):
            (folder / f"{i}.jinja").write_text(key[1])
            key = f"{key[0]}={folder}/{i}.jinja"
        yield key


def test_every_finding_has_a_case_here():
    assert set(FINDINGS) == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("key", FINDINGS)
def test_what_is_wrong_is_told_with_its_place_and_its_fix(key, preview, tmp_path):
    rows, keys, severity, line = FINDINGS[key]
    if key in ("two_bos", "shared_token"):  # words in one token
        backend = make_tokenizer([BOS, "<|im_start|>", "<|im_end|>"])
        (tmp_path / "tokenizer").mkdir()
        backend.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
        (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": BOS, "eos_token": "<|im_end|>"})
        )
    out, _ = preview(
        rows,
        *written(keys, tmp_path),
        tokenizer=tmp_path / "tokenizer" if (tmp_path / "tokenizer").exists() else "demo:bytes",
    )
    values = {"n": 1, "s": "", "seq_len": 128, "samples": 2, "times": "1.6"}
    text, fix = KINDS[key].text.format(**values), KINDS[key].fix
    assert fix or severity == "note" or key in ("too_long", "truncated", "empty")
    mark = f"{severity:<8}{text}\n        " + (f"→ {fix}\n        " if fix else "")
    assert mark in out
    assert (
        f"        {tmp_path}/a.jsonl:{line}"
        in re.split("\nwarning|\nnote", out[out.index(mark) :])[0].splitlines()
    )


@pytest.mark.slow
def test_the_row_length_that_is_advised_holds_99_percent(preview):
    lengths = [*range(20, 119), 400, 300, 200, 190]
    out, _ = preview([{"text": "x" * n} for n in lengths])
    advised = int(re.search(r"batch\.seq_len=(\d+) would", out)[1])
    tokens = np.array(lengths) + 1  # with eos
    assert np.mean(tokens <= advised) >= 0.99
    assert 300 < advised <= 320
    assert (
        f"{100 * tokens[tokens > 128].sum() / tokens.sum():.1f}% of the tokens are lost"
        in " ".join(out.split())
    )
    assert (
        "more than 99% of the samples fit"
        in preview([{"text": "x" * n} for n in [*range(20, 120), *range(20, 120), 400]])[0]
    )


@pytest.mark.slow
def test_a_source_that_ends_with_nothing_or_all_cut_is_named(preview, tmp_path):
    for name, size in (("good", 5), ("long", 500)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ask("x" * size)))
    path = f"data.path=[{tmp_path}/good.jsonl,{tmp_path}/long.jsonl]"
    assert "source long has no samples left" in preview(None, path)[0]
    assert "every sample of source long is cut" in preview(None, path, "data.too_long=truncate")[0]
    assert "nothing to warn about" in preview(None, path, "batch.seq_len=1024")[0]


@pytest.mark.slow
def test_a_mixture_is_shown_by_its_shares_and_its_findings_by_component(preview, tmp_path):
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps(ask("b" * n)) + "\n" for n in (5, 5, 6, 7, 500))
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(ask("c" * n)) + "\n" for n in range(40)))
    mixture = (
        f"data.path=[{{path: {tmp_path}/b.jsonl, weight: 0.25}},{{path: {tmp_path}/c.jsonl, "
        f"weight: 0.75}}]"
    )
    out, keys = preview(
        None, mixture, "train.steps=3", "batch.rows=8", "data.packing=none", "batch.micro_rows=1"
    )
    lines = {
        line.split()[0]: line.split()
        for line in out.splitlines()
        if line.split()[:1] in (["b"], ["c"])
    }
    assert [float(lines[name][3].rstrip("%")) for name in "bc"] == pytest.approx([25, 75], abs=1)
    cfg = compose("preview", keys)
    rows = OrderMaker.of(cfg).training(cfg.data, build_data(cfg)[2]).taken(3 * 8)
    assert [lines[name][5] for name in "bc"] == [
        f"{rows[0] / 4:.2f}",
        f"{rows[1] / 40:.2f}",
    ]
    assert sum(rows) == 24
    assert "warning b: 1 sample dropped: longer than" in out
    assert f"{tmp_path}/b.jsonl:5" in out
    assert " c: 1 " not in out
    assert (
        "warning b is seen"
        in preview(None, mixture, "train.steps=30", "batch.rows=8", "batch.micro_rows=1")[0]
    )
    assert (
        "is seen"
        not in preview(None, mixture, "train.steps=1", "batch.rows=4", "batch.micro_rows=1")[0]
    )


@pytest.mark.slow
def test_a_template_without_marks_is_a_note_only(preview, tmp_path):
    plain = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' "
        "}}{% endfor %}"
    )
    (tmp_path / "own.jinja").write_text(
        plain + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    out, _ = preview([ask("a")], f"data.template={tmp_path}/own.jinja")
    assert "note    the chat template does not mark" in out
    assert "warning" not in out
    assert "does not mark" not in preview([ask("a")])[0]
    assert "does not mark" not in preview([{"text": "a"}], f"data.template={tmp_path}/own.jinja")[0]


def test_good_data_has_no_warning(preview):
    out, _ = preview([ask("a" * n) for n in range(1, 30)])
    assert "nothing to warn about" in out
    assert "nothing dropped or cut, no duplicates" in out


def test_a_tokenizer_larger_than_the_model_is_refused_and_a_smaller_one_noted(preview):
    assert "model.vocab_size=260" in preview([ask("a")], "model.vocab_size=100", code=2)[0]
    assert (
        "the model has 300 tokens, the tokenizer 260"
        in preview([ask("a")], "model.vocab_size=300")[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["preview", "train"])
def test_data_without_a_supervised_token_is_refused(verb, world, tmp_path):
    nothing, some = tmp_path / "nothing.jsonl", tmp_path / "some.jsonl"
    nothing.write_text(json.dumps(ask("a", weight=0)) + "\n" + json.dumps(ask("b" * 500)))
    some.write_text(json.dumps(ask("a")))
    how = [
        "tokenizer.path=demo:bytes",
        f"run.root={tmp_path}",
        "model=tiny",
        "batch.seq_len=64",
        "train.steps=1",
    ]
    mixture = f"data.path=[{{path: {some}, weight: 0.5}},{{path: {nothing}, weight: 0.5}}]"
    for keys in (
        [f"data.path={nothing}"],
        [mixture],
        [f"data.path={some}", f"data.validation={nothing}"],
    ):
        (result,) = world.command(verb, *how, *keys, code=2)
        assert "no token" in result.err
        assert "there is nothing to learn" in result.err
        assert "Traceback" not in result.err
        assert "1 sample dropped: without a supervised token" in result.err
        assert "nothing.jsonl:1" in result.err
        assert "longer than batch.seq_len=64" in result.err


@pytest.mark.slow
def test_train_says_in_two_lines_what_it_trains_on(train, tmp_path):
    rows = [ask("a"), ask("b"), ask("b"), ask("c" * 100), ask("d", "<|im_end|>")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = [f"data.path={tmp_path}/a.jsonl", "train.steps=1", "data.max_lost=1"]
    lines = [line for line in train("run", *how).out.splitlines() if line.startswith("data ")]
    assert len(lines) == 5, lines
    assert re.search(
        r"4 samples, \d+ tokens, \d+\.\d% supervised, longest \d+; \d rows an epoch, \d+\.\d% full",
        lines[0],
    )
    assert "1 dropped (1 too long)" in lines[1]
    assert "1 duplicate kept" in lines[1]
    assert "warning: 1 conversation or document with special tokens in their own text" in lines[2]
    assert "remove them from the data" in lines[3]
    assert "2 more warnings:  fsdp-trainer preview  with the same keys" in lines[4]


@pytest.mark.slow
def test_a_run_that_would_lose_most_of_its_tokens_does_not_start(train, tmp_path):
    rows = [ask("a"), ask("c" * 100), ask("d" * 100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ["run", f"data.path={tmp_path}/a.jsonl", "train.steps=1"]
    refused = train(*how, code=2)
    assert "2 dropped (2 too long)" in refused.err
    share = re.search(r"data\.max_lost=(0\.\d+)  to accept it", refused.err)[1]
    assert not refused.folder.exists()
    assert train(*how, f"data.max_lost={share}").column("step") == [1]


def test_a_tokenizer_that_loses_text_is_named(preview, tmp_path):
    backend = make_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    (tmp_path / "tokenizer").mkdir()
    backend.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (warning,) = lossy(load_tokenizer(str(tmp_path / "tokenizer")))
    assert "'Nataliasold48clips" in warning
    assert not lossy(load_tokenizer("demo:bytes"))


def test_json_stays_alone_on_stdout_beside_a_page(preview, tmp_path):
    out, _ = preview(
        [ask("a"), ask(EVIL)],
        "preview.format=json",
        f"preview.html={tmp_path}/p.html",
        "batch.seq_len=512",
    )
    assert [json.loads(line)["row"] for line in out.splitlines()] == [0, 1, 2, 3]
    assert (tmp_path / "p.html").stat().st_size


@pytest.mark.slow
@pytest.mark.further
def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path):
    command = (
        f"{sys.executable} -m fsdp_trainer preview data.path=demo:backwards "
        f"tokenizer.path=demo:bytes data.cache={tmp_path} batch.seq_len=64"
    )
    ended = subprocess.run(
        ["bash", "-c", f"{command} preview.rows=3000 | head -2; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0
    # a busy machine takes so long to prepare that its progress is shown
    assert all(line.startswith("data ") for line in ended.stderr.splitlines()), ended.stderr
    assert "data" in ended.stdout


def test_a_page_that_cannot_be_written_is_told_before_anything_is_read(preview, tmp_path):
    assert (
        "there is no such folder"
        in preview(None, "data.path=demo:backwards", f"preview.html={tmp_path}/no/p.html", code=2)[
            0
        ]
    )
    assert not (tmp_path / "cache").exists()
    assert f"preview.html={tmp_path}" in preview([ask("a")], f"preview.html={tmp_path}", code=2)[0]


class Parsed(HTMLParser):
    """The tokens of each document, and everything that could act."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.documents, self.open = (
            [],
            [],
            {"script": [], "style": []},
            [],
            [],
        )
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append((tag, dict(attrs)))
        if "data-ids" in dict(attrs):
            self.documents.append({**dict(attrs), "pieces": []})

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, attrs = self.open[-1] if self.open else ("", {})
        if tag in self.texts:
            self.texts[tag].append(data)
        if tag in ("b", "i") and len(self.open) > 1 and "data-ids" in self.open[-2][1]:
            self.documents[-1]["pieces"].append(
                (tag, int(attrs.get("data-n", 1)), attrs.get("data-w", "1"), data)
            )


def test_the_page_holds_the_rows_of_training_and_runs_nothing_of_the_data(preview, tmp_path):
    rows = [ask("你好，世界 👩‍👧", EVIL), ask("half", weight=0.5), ask("\n\n two lines\n")]
    keys = [
        f"preview.html={tmp_path}/p.html",
        "preview.rows=2",
        "batch.seq_len=400",
        f"run.name='{EVIL[:60]}'",
        "data.packing=none",
    ]
    out, _ = preview(rows, *keys[:3], keys[4], "preview.format=json")
    html = (tmp_path / "p.html").read_text()
    page = Parsed(html)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not [
        value for name, value in page.attributes if name in ("src", "href", "action", "xlink:href")
    ]
    assert "http" not in html.replace("http-equiv", "")
    policy = next(
        value for name, value in page.attributes if name == "content" and "default-src" in value
    )
    for kind in ("script", "style"):
        digest = b64encode(sha256("".join(page.texts[kind]).encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "\x1b" not in html
    assert "\u202e" not in html
    tokenizer = load_tokenizer("demo:bytes")
    _, *shown = page.documents  # the first sample as it is rendered
    for document, line in zip(shown, map(json.loads, out.splitlines()), strict=True):
        ids = list(map(int, document["data-ids"].split()))
        assert ids == line["tokens"]
        assert sum(n for _, n, *_ in document["pieces"]) == len(ids)
        learnt = [tag == "b" for tag, n, *_ in document["pieces"] for _ in range(n)]
        assert learnt == [False, *(label != -100 for label in line["labels"][:-1])]
        weights = {float(weight) for tag, _, weight, _ in document["pieces"] if tag == "b"}
        assert weights == ({0.5} if "weights" in line else {1.0})
        text = "".join(text for *_, text in document["pieces"]).replace("↵", "")
        plain = tokenizer.decode(ids, skip_special=False)
        assert text == plain.replace("\x1b", "␛").replace("\x07", "␇").replace("\u202e", "\\u202e")


def test_samples_of_one_conversation_are_numbered(preview):
    chat = {"messages": [*ask("a")["messages"], *ask("b")["messages"]]}
    out, _ = preview([ask("c"), chat], "data.template=qwen3", "batch.seq_len=400")
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


@pytest.mark.slow
def test_in_colour_learnt_weighted_and_special_tokens_look_different(preview):
    _, keys = preview([ask("yes"), ask("half", weight=0.5)], "preview.rows=1", "data.shuffle=false")
    page, _ = page_of(keys)

    def drawn(**how):
        console = Console(
            file=io.StringIO(),
            width=80,
            highlight=False,
            force_terminal=True,
            legacy_windows=False,
            **how,
        )
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


def test_without_a_terminal_tables_keep_to_80_columns_whatever_the_names(preview, tmp_path):
    for name in ("数据" * 12, "b" * 70):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ask("猫" * 20)))
    out, _ = preview(None, f"data.path={tmp_path}", "batch.seq_len=256", "preview.rows=1")
    table = out[out.index("source ") : out.index("first sample")].splitlines()
    cells = [sum(2 if "\u2e80" < c < "\uffef" else 1 for c in line) for line in table]
    assert len(table) > 3
    assert max(cells) <= 80
    assert "[[" + "猫" * 20 in out  # three tokens a character


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.further
def test_the_page_in_a_browser_tells_of_each_token_and_runs_nothing_of_the_data(preview, tmp_path):
    rows = [ask("what is 1 + 1", EVIL), ask("half", "an answer", weight=0.5)]
    preview(rows, f"preview.html={tmp_path}/p.html", "batch.seq_len=400", "data.packing=none")
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


@pytest.mark.slow
def test_images_are_marked_in_the_text_and_shown_on_the_page(world, tmp_path):
    folder = make_image_folder(tmp_path / "model", "qwen2_5_vl")
    [name] = write_pictures(tmp_path / "pictures", 1)
    question = [{"type": "image", "image": f"pictures/{name}"}, {"type": "text", "text": "what?"}]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    keys = [f"model.init_from={folder}", f"data.path={tmp_path}/a.jsonl", "batch.seq_len=64"]
    page = tmp_path / "page.html"
    (shown,) = world.command("preview", *keys, f"preview.html={page}", f"run.root={tmp_path}")
    assert "⟦0.png 24 × 20: 6 tokens⟧" in shown.out
    assert "<|image_pad|>" not in shown.out
    assert '<img src="data:image/jpeg;base64,' in page.read_text()
    assert "img-src data:" in page.read_text()
