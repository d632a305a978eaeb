"""docs/mistakes.md: each command on it says what stands below it, and the command that follows is
taken.

`WRITE=1 pytest tests/config/test_mistakes.py` writes the page's messages anew.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import inject
import pytest
from folders import REPO, TESTS
from safetensors.torch import load_file, save_file
from texts import exchange_tokens
from world import SMALL, command, read_json, write_chats, write_json

from fsdp_trainer.base import web

PAGE = REPO / "docs/mistakes.md"
BLOCK = re.compile(r'(?ms)^```console(?: title="([^"\n]*)")?\n(.*?)^```$')
RIGHT = ("data.path=chats.jsonl", "tokenizer.path=demo:bytes")


def commands(block):
    """(command line, what it said) of a block of the page."""
    parts = (part.partition("\n") for part in re.split(r"(?m)^\$ ", block)[1:])
    return [(line, said.rstrip("\n")) for line, _, said in parts]


def words_of(line, base=()):
    """Return what the program is given; what is right, and left out on the page, is added."""
    words = shlex.split(
        line.replace("torchrun --nproc_per_node=8 -m fsdp_trainer", "fsdp-trainer")
    )[1:]
    if not words or {"export", "exprot", "preview", "report"} & {*words}:
        return words
    given = {word.split("=")[0] for word in words}
    if "model.init_from" in given:
        given.add("tokenizer.path")
    return [*words, *(word for word in [*base, *RIGHT] if word.split("=")[0] not in given)]


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """Return the folder where all commands are given: a model, a finished run, a locked one, data,
    and files with mistakes."""
    here = tmp_path_factory.mktemp("mistakes")
    chats = write_chats(here / "chats.jsonl", 40)
    usual = [f"data.path={chats}", "train.steps=1", "checkpoint.export_hf=true"]
    world.train(here / "runs/mine", "tokenizer.path=demo:bytes", *usual)
    for name in ("hf", "no_config", "no_tokenizer", "cut", "other", "other_words"):
        shutil.copytree(here / "runs/mine/hf", here / name)
    adapter = ["adapter=lora", "checkpoint.merge=true", f"model.init_from={here}/hf"]
    world.train(here / "runs/tuned", *adapter, *usual)
    weights = load_file(here / "hf/model.safetensors")
    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    save_file(doubled, here / "other/model.safetensors", {"format": "pt"})
    shutil.copytree(here / "runs/mine", here / "runs/large")
    exchange_tokens(here / "other_words/tokenizer.json")
    (here / "no_config/config.json").unlink()
    (here / "no_tokenizer/tokenizer.json").unlink()
    os.truncate(here / "cut/model.safetensors", 9_000)
    larger = read_json(here / "hf/tokenizer.json")
    added = larger["added_tokens"]
    added += [{**added[-1], "id": i, "content": f"<{i}>"} for i in range(260, 300)]
    write_json(here / "larger.json", larger)
    for name in ("chats(1).jsonl", "more.jsonl"):
        shutil.copy(here / "chats.jsonl", here / name)
    shutil.copytree(TESTS / "config/mistakes", here, dirs_exist_ok=True)
    for name in ("empty", "tok?v=1", "runs/locked"):
        (here / name).mkdir()
    (here / "lock.json").rename(here / "runs/locked/.lock")
    shutil.copy(here / "hf/tokenizer.json", here / "tok?v=1")
    shutil.copy(here / "hf/tokenizer.json", here)
    with (here / "runs/locked/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield here


SAY = """\
import io, json, os, sys
from contextlib import redirect_stderr
from fsdp_trainer.cli import VERBS, main, with_bare_words
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.composing.sweep_overrides import SweepLine
from fsdp_trainer.errors import UserError
from tests.ranks import composing
composing.keep()
told = []
for kind, words in json.loads(sys.stdin.read()):
    said, code = io.StringIO(), 0
    os.environ.update({"RANK": "0", "LOCAL_WORLD_SIZE": "8"} if kind == "torchrun" else {})
    try:
        with redirect_stderr(said):
            if kind != "taken":
                code = main(words)
            elif words[0] == "-m":
                SweepLine(words[1:])
            else:
                own, words = (words[1], words[2:]) if words[0] == "--config-dir" else (None, words)
                verb = words.pop(0) if words[0] in VERBS else "train"
                compose(verb, with_bare_words(verb, words), own)
    except UserError as error:
        code, said = 2, io.StringIO(str(error))
    os.environ.pop("RANK", None)
    told.append((code, said.getvalue().strip()))
assert "torch" not in sys.modules
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def without_ranks(folder):
    """Return what each command said that needs no ranks, by command line: all in one process, which
    must not import torch."""
    lines = [
        (line, "torchrun" if line.startswith("torchrun") else "refused" if i == 0 else "taken")
        for how, block in BLOCK.findall(PAGE.read_text())
        for i, (line, _) in enumerate(commands(block))
        if not how
    ]
    given = json.dumps([(kind, words_of(line)) for line, kind in lines])
    env = {**os.environ, "PYTHONPATH": str(REPO), "HOME": str(folder)}
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", SAY], input=given, **how)
    assert done.returncode == 0, done.stderr
    return dict(zip((line for line, _ in lines), json.loads(done.stdout), strict=True))


@contextlib.contextmanager
def in_folder(folder, how):
    """A rank's process there, with what the block says of the machine."""

    def no_network(*args, **options):
        raise ConnectionError("Name or service not known")

    def read_only(*args, **options):
        raise OSError(30, "Read-only file system", "/mnt/archive/run")

    patches = {
        "no network": lambda: patch("huggingface_hub.snapshot_download", no_network),
        "24 GiB": inject.around("device_memory", lambda *_: 24 * 2**30),
        "read-only": lambda: patch("pathlib.Path.mkdir", read_only),
    }
    before = Path.cwd()
    os.chdir(folder)
    try:
        machine = patches.get(how.partition(", ")[2], contextlib.nullcontext)()
        with machine, patch.object(web, "PAUSE_SECONDS", 0.0):  # servers that are not there
            yield
    finally:
        os.chdir(before)


def give(lines, folder, how):
    """One rank's command line."""
    with in_folder(folder, how):
        line = lines[int(os.environ["RANK"])]
        no_sizes = "fsdp-trainer model" in line
        small = [word for word in SMALL if not (no_sizes and word.startswith("model"))]
        return command(words_of(line, [*small, "train.steps=1"]), None)


@pytest.fixture(scope="module")
def said(world, folder, without_ranks):
    """(exit code of each rank, message) of every command, by block and line."""
    messages = {}
    for how, block in BLOCK.findall(PAGE.read_text()):
        lines = [line for line, _ in commands(block)]
        if how.startswith("2"):  # a line for each rank
            results = world.call(2, give, lines, folder, how)
            messages[how, lines[0]] = [t.code for t in results], results[0].err.strip()
            messages[how, lines[1]] = [0], ""
            continue
        for line in lines:
            if how:
                (result,) = world.call(1, give, [line], folder, how)
                code, message = result.code, result.err.strip()
            else:
                code, message = without_ranks[line]
            messages[how, line] = [code], message
    return messages


def test_every_mistake_says_what_the_page_shows(said, folder):
    def as_said(block):
        how, shown = block[1] or "", ""
        for line, _ in commands(block[2]):
            text = said[how, line][1].replace(str(folder), "/home/me")
            text = text.replace(socket.gethostname(), "node-a")
            shown += f"$ {line}\n" + (f"{text}\n" if text else "")
        title = f' title="{how}"' if how else ""
        return f"```console{title}\n{shown}```"

    page = PAGE.read_text()
    written = BLOCK.sub(as_said, page)
    if os.environ.get("WRITE"):
        PAGE.write_text(written)
    assert written == page


def test_each_is_refused_with_2_and_what_follows_is_what_was_said_and_is_taken(said):
    for how, block in BLOCK.findall(PAGE.read_text()):
        (line, _), *then = commands(block)
        codes, message = said[how, line]
        assert set(codes) == {2}, line
        assert "Traceback" not in message, line
        for fixed, _ in then if not how.startswith("2") else []:
            assert said[how, fixed] == ([0], ""), fixed
            for word in set(shlex.split(fixed)) - set(shlex.split(line)) - {"-m"}:
                if not word.startswith("run.name="):
                    assert word in message or shlex.quote(word) in message, (
                        f"{line}: nobody said {word}"
                    )
