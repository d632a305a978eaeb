"""Imports of a start, and the end of a process."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from folders import REPO

NOT_ASKED_FOR = {
    "wandb", "transformers", "datasets", "pyarrow", "pandas", "tensorboard", "matplotlib",
    "sentencepiece", "huggingface_hub",
}  # fmt: skip
LOADS_EARLY = sys.platform == "linux" and "+cpu" in version("torch")
"""Elsewhere torch loads its libraries alone."""
TRAIN = """
import gc, re, sys, threading
from pathlib import Path
from fsdp_trainer.cli import main
from fsdp_trainer.base import torch_import

load, seen, is_loaded = torch_import.load_libtorch, [], threading.Event()

def libraries():
    return {*re.findall("/.*libtorch_cpu.so", Path("/proc/self/maps").read_text())}

def load_beside():
    seen.extend([libraries(), "torch" in sys.modules])
    load()
    seen.append(libraries())
    is_loaded.set()

torch_import.load_libtorch = load_beside
assert main(WORDS) == 0
assert gc.isenabled() and gc.get_freeze_count() > 0
import torch
assert torch.get_num_threads() == 1
assert not NOT_ASKED_FOR & sys.modules.keys()
if LOADS_EARLY:
    assert is_loaded.wait(60)
    before, has_torch, loaded = seen
    assert loaded == libraries() and not before and loaded and not has_torch
"""
START_RANKS = """
import sys
from fsdp_trainer.cli import main
from fsdp_trainer.launch import start

started = []
start.subprocess.Popen = lambda *args, **_: started.append(args)
start.RankProcesses.wait = lambda _: 0
assert main(WORDS) == 0 and len(started) == 2 and "torch" not in sys.modules
"""
ABORT = """
import atexit, os, sys, types

sys.modules[MODULE] = types.ModuleType(MODULE)
atexit.register(os.abort)
sys.argv = ["fsdp-trainer", "--version"]
from fsdp_trainer.__main__ import run
run()
"""


def python(program, **constants):
    """Run a program in a fresh process."""
    values = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", values + program]
    env["PYTHONPATH"] = str(REPO)
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture
def words(input_words, tmp_path):
    return [*input_words, f"run.root={tmp_path}", "run.name=run", "model=tiny"]


def test_training_imports_only_what_it_uses_and_torchs_library_while_python_imports(
    words, tmp_path
):
    words += [
        "batch.seq_len=64", "train.steps=1", "precision=fp32", "train.gc_every=null",
        "launch.env={OMP_NUM_THREADS: 1}",  # read where torch's library is loaded
    ]  # fmt: skip
    constants = {"NOT_ASKED_FOR": NOT_ASKED_FOR, "LOADS_EARLY": LOADS_EARLY}
    done = python(TRAIN, WORDS=words, **constants)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_process_that_starts_ranks_imports_no_torch(words):
    done = python(START_RANKS, WORDS=[*words, "launch.nproc_per_node=2"])
    assert done.returncode == 0, done.stderr


def test_what_aborts_at_the_interpreters_end_is_no_failure_of_a_command_that_is_done():
    for module, code in (("torch", 0), ("nothing", -6)):
        done = python(ABORT, MODULE=module)
        assert done.returncode == code, done.stderr
        assert code or done.stdout.startswith("fsdp-trainer ")


def test_a_tokenizer_too_large_for_the_model_is_refused_before_data_is_tokenized(train, tmp_path):
    cache = tmp_path / "cache"
    run = train("run", "model.vocab_size=100", f"data.cache={cache}", code=2)
    assert "model.vocab_size=100  the tokenizer has 260 tokens" in run.err
    assert not list(cache.glob("*"))
