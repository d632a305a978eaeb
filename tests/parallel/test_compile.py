"""Compiled blocks: one graph, which outlives the process; and a run that goes on where there is no
compiler."""

import contextlib
from dataclasses import replace
from unittest.mock import patch

import inject
import pytest
import torch
import yaml
from stored import assert_near
from world import write_chats

NOWHERE = "/no/such/g++"


def compilations(run):
    """Return, for each compilation, when it was, how many graphs, and how many of them came from
    the cache."""
    return [(e["step"], e["during"], e["graphs"], e["cached"]) for e in run.event("compile")]


@contextlib.contextmanager
def no_code():
    """Let the compiler call torch's own kernels: to build others takes half a minute."""
    import torch._inductor.config as config

    with config.patch({"disable_cpp_codegen": True}):
        yield


WINDOWS = "model.family=gemma2 model.sliding_window=16 model.attn_logit_softcapping=30"


def test_all_blocks_share_a_graph_that_is_never_compiled_again(train, compiled, tmp_path):
    held_out = write_chats(tmp_path / "held_out.jsonl", 9, start=500)
    # micro-batches of other packings in each step, of them one with an empty row, and validation
    # twice
    how = [
        WINDOWS, f"batch.rows=5 batch.micro_rows=2 data.validation={held_out}",
        "train.validate_every=3 train.validate_first=false train.steps=6",
    ]  # fmt: skip
    run = train("run", *compiled, *how, seam=inject.no_kernels())
    # a block, the head's scores and their derivatives; without gradients a block is another graph,
    # scores are not
    assert [c[:3] for c in compilations(run)] == [(1, "training", 3), (3, "validation", 1)]
    assert "compiled again" not in run.out
    eager = train("eager", *how)
    assert_near(run, eager, loss=1e-5, grad_norm=1e-4)
    validations = [[event["loss"] for event in one.event("evaluation")] for one in (run, eager)]
    assert len(validations[0]) == 2
    assert validations[0] == pytest.approx(validations[1], rel=1e-5)


def test_what_was_compiled_outlives_the_run(train, tmp_path):
    how = "batch.rows=4 batch.micro_rows=2 schedule=constant model.attention=mask"
    tuned = "compile=enabled compile.mode=max-autotune-no-cudagraphs"
    run = train("run", how, tuned, "train.steps=1", seam=no_code)
    assert compilations(run) == [(1, "training", 3, 0)]
    assert list((tmp_path / ".compile").iterdir()), "kept beside the runs"
    resumed = train("run", how, tuned, "train.steps=2", seam=no_code)
    (_, trained) = compilations(resumed)
    # what the cache holds of the head knows a range of token numbers, and the first micro-batch now
    # may be out of it
    assert trained[:3] == (2, "training", 3)
    assert trained[3] in (2, 3)
    eager = train("eager", how, "train.steps=2")
    assert_near(resumed, eager, loss=1e-5)


def test_blocks_that_are_compiled_again_are_told(train, compiled):
    run = train(
        "run",
        *compiled,
        "train.steps=3",
        seam=inject.together(
            inject.setting("compile_backend", "eager"),
            inject.around("batch_read", another_shape_after_the_first),
        ),
    )
    assert [c[:2] for c in compilations(run)] == [(1, "training"), (2, "training")]
    assert "compiled again in step 2" in run.out


def another_shape_after_the_first(real, self, rows):
    micro_rows = 7 if hasattr(self, "read_before") else 6
    self.options, self.read_before = replace(self.options, micro_rows=micro_rows), True
    return real(self, rows)


@inject.fault
def compiler(path):
    """Let the last rank compile with another program."""
    import torch._inductor.config as config

    is_last = inject.this_rank("last")
    with config.patch({"cpp.cxx": (None, path)}) if is_last else contextlib.nullcontext():
        yield


def test_without_a_compiler_on_one_rank_all_train_without(train):
    how = "train.steps=3 batch.micro_rows=2"
    run = train("run", how, "compile=enabled", ranks=2, seam=compiler(NOWHERE))
    assert f"on rank 1 there is no C++ compiler ({NOWHERE}" in run.out
    assert "attend by documents" in run.out
    assert run["loss"] == train("eager", how, ranks=2)["loss"]
    assert not run.event("compile")
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["compile"]["enabled"] is True, (
        "recorded as asked"
    )


def test_without_a_compiler_there_is_no_budget(train):
    how = "compile=enabled activation_checkpoint=budget"
    run = train("run", how, seam=compiler(NOWHERE), code=2)
    assert "on rank 0 there is no C++ compiler" in run.err
    assert "activation_checkpoint=selective" in run.err


def test_what_the_compiler_throws_is_told_in_short(train, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho broken >&2\nexit 1\n')
    broken.chmod(0o755)
    how = "compile=enabled train.steps=1"
    run = train("run", how, seam=compiler(str(broken)), code=1)
    assert "the compiler gave up on a decoder block" in run.err
    assert "compile=disabled" in run.err
    assert len(run.err.splitlines()) < 5


def test_a_cache_that_cannot_be_written_is_refused(train, tmp_path):
    (tmp_path / "file").write_text("")
    cache = f"compile.cache={tmp_path / 'file' / 'cache'}"
    run = train("run", "compile=enabled", cache, code=2)
    assert "the compiler's cache cannot be used" in run.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_without_triton_a_gpu_trains_without_a_compiler(train):
    run = train("run", "compile=enabled train.steps=2 launch.device=cuda", seam=no_triton)
    assert "no Triton" in run.out
    assert len(run.metrics) == 2


@contextlib.contextmanager
def no_triton():
    with patch("torch.utils._triton.has_triton", lambda: False):
        yield
