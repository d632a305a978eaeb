"""Imports of a start, and the end of a process."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from folders import REPO

NOT_ASKED_FOR = (
    "wandb",
    "transformers",
    "datasets",
    "pyarrow",
    "pandas",
    "tensorboard",
    "matplotlib",
    "sentencepiece",
    "huggingface_hub",
)


def python(code: str) -> str:
    """Return the last line that `code` prints in a fresh process."""
    env = {
        **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        "PYTHONPATH": str(REPO),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


@pytest.mark.slow
def test_training_imports_only_what_it_uses(inputs, tmp_path):
    words = [f"{key}={value}" for key, value in inputs.items()] + [
        f"run.root={tmp_path}",
        "model=tiny",
        "batch.seq_len=64",
        "train.steps=1",
        "launch.env={OMP_NUM_THREADS: 1}",  # read where torch's library is loaded
    ]
    output = python(
        "import gc, json, sys\nfrom fsdp_trainer.cli import main\n"
        f"assert main({[*words, 'precision=fp32', 'run.name=run', 'train.gc_every=null']}) == 0\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 0\n"
        "import torch\nassert torch.get_num_threads() == 1\n"
        "print(json.dumps([name for name in sys.modules if '.' not in name]))"
    )
    imported = json.loads(output)
    assert "torch" in imported
    assert not set(NOT_ASKED_FOR) & set(imported)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_process_that_starts_ranks_imports_no_torch(inputs, tmp_path):
    words = [f"{key}={value}" for key, value in inputs.items()] + [
        f"run.root={tmp_path}",
        "model=tiny",
        "launch.nproc_per_node=2",
    ]
    python(
        "import sys\nfrom fsdp_trainer.cli import main\nfrom fsdp_trainer.launch import "
        "start\nstarted = []\n"
        "start.subprocess.Popen = lambda *args, **_: "
        "started.append(args)\nstart.RankProcesses.wait = lambda _: 0\n"
        f"assert main({words}) == 0 and len(started) == 2 and 'torch' not in sys.modules"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or "+cpu" not in version("torch"),
    reason="elsewhere torch loads its libraries alone",
)
def test_torchs_library_is_loaded_while_python_imports_and_before_torch_looks_for_it():
    python(
        "import re, sys\nfrom pathlib import Path\nfrom fsdp_trainer.run.verb import "
        "load_libtorch, import_run_rank\n"
        "loaded = lambda: re.findall('/.*libtorch_cpu.so', Path('/proc/self/maps').read_text())\n"
        "assert not loaded()\nload_libtorch()\nassert loaded() and 'torch' not in "
        "sys.modules\nbefore = set(loaded())\n"
        "import_run_rank()\nimport torch\nassert set(loaded()) == before and "
        "torch.arange(4).sum() == 6"
    )


@pytest.mark.slow
def test_what_aborts_at_the_interpreters_end_is_no_failure_of_a_command_that_is_done():
    for module, code in (("torch", 0), ("nothing", -6)):
        command = (
            f"import atexit, os, sys, types\nsys.modules['{module}'] = "
            f"types.ModuleType('{module}')\natexit.register(os.abort)\n"
            "sys.argv = ['fsdp-trainer', '--version']\nfrom fsdp_trainer.__main__ import run\nrun()"
        )
        done = subprocess.run(
            [sys.executable, "-c", command], cwd=REPO, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stderr
        assert code or done.stdout.startswith("fsdp-trainer ")


def test_a_tokenizer_too_large_for_the_model_is_refused_before_data_is_tokenized(train, tmp_path):
    cache = tmp_path / "cache"
    run = train("run", "model.vocab_size=100", f"data.cache={cache}", code=2)
    assert "model.vocab_size=100  the tokenizer has 260 tokens" in run.err
    assert not list(cache.glob("*"))
