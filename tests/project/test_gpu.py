"""A GPU gives the same numbers, and no step waits for the host."""

import gzip
import json
import pickle
import warnings
from functools import partial
from importlib.metadata import version
from threading import Event, Thread

import inject
import pytest
import torch
from combinations import write_shown
from image_models import make_image_folder
from other_models import make_other_folder
from pairs import write_labelled, write_pairs
from stored import assert_bitwise_equal, newest, stored
from world import read_lines, write_chats
from zoo import make_folder

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.base import phases
from fsdp_trainer.generation import continuations
from fsdp_trainer.generation.continuations import generate_tokens
from fsdp_trainer.generation.sampling import Sampling

TORCH, TRANSFORMERS = (
    tuple(map(int, each.split(".")[:2])) for each in (torch.__version__, version("transformers"))
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


BFLOAT16 = "precision.param_dtype=bfloat16"


def assert_goes_on_bitwise(train, *how, steps=(3, 6), timeout=600):
    """Raise AssertionError unless a run that is stopped ends as one that is not; return that."""
    some, all_of_them = (f"train.steps={count}" for count in steps)
    common = ["schedule=constant", "launch.device=cuda", f"checkpoint.every={steps[0]}", *how]
    train("again", *common, some, timeout=timeout)
    again, whole = (train(n, *common, all_of_them, timeout=timeout) for n in ("again", "whole"))
    assert_bitwise_equal(stored(newest(again)), stored(newest(whole)))
    return whole


def assert_near_the_cpu(train, *how, near=2e-3, **options):
    """Raise AssertionError unless losses on a GPU are near those on a CPU."""
    steps = ["train.steps=5", "schedule=constant", *how]
    cpu, gpu = (
        train(device, *steps, f"launch.device={device}", **options) for device in ("cpu", "cuda")
    )
    assert gpu["loss"] == pytest.approx(cpu["loss"], rel=near)


def needs_torch(minor, word):
    """Return a word for versions of torch from 2.`minor` on."""
    old = pytest.mark.skipif((2, minor) > TORCH, reason=f"needs torch 2.{minor}")
    return pytest.param(word, marks=old)


@pytest.mark.parametrize(
    "how",
    [
        "",
        "sharding.accumulate=unsharded",
        "activation_checkpoint=full",
        "activation_checkpoint=selective",
        "compile=enabled activation_checkpoint=budget",
        "model.attention=mask",
        "model.attention=flex",
        "model.attention=flex compile=enabled",
        "compile=enabled",
        "sharding.cpu_offload=true",
        "sharding.messages=registered",
        needs_torch(12, "sharding.messages=symmetric"),
        needs_torch(13, "sharding.separate_reduce_scatter=true"),
        needs_torch(13, "sharding.reduce_scatter_buffers=2"),
        "data.prefetch=0",
    ],
)
def test_a_bf16_run_is_near_fp32_on_the_cpu(train, how):
    # FlexAttention has no kernel for narrower heads
    common = ["train.steps=10", "schedule=constant", "batch.micro_rows=2", "model.head_dim=16"]
    cpu = train("cpu", *common, "launch.device=cpu")
    common += ["launch.device=cuda", *how.split()]
    gpu = train("gpu", *common, BFLOAT16, timeout=300)
    exact = train("exact", *common, timeout=300)
    assert gpu["loss"] == pytest.approx(cpu["loss"], rel=0.02)
    assert exact["loss"] == pytest.approx(cpu["loss"], rel=2e-3)
    assert gpu["step"] == list(range(1, 11))
    assert all(line["memory_gib"] > 0 for line in gpu.metrics)


LARGE = "model.hidden_size=256 batch.seq_len=512"
OFFLOADED = f"activation_checkpoint.offload=true {LARGE}"
"""With tensors that are large enough to be moved."""


@pytest.mark.parametrize(
    "how",
    ["", "activation_checkpoint=full", "activation_checkpoint=selective", "compile=enabled"],
)
def test_activations_in_host_memory_change_nothing(train, how):
    common = ["train.steps=5", "model.num_hidden_layers=4", "launch.device=cuda", *how.split()]
    plain = train("plain", *common, LARGE, timeout=300)
    offloaded = train("offloaded", *common, OFFLOADED, timeout=300)
    for name in ("loss", "grad_norm"):
        assert offloaded[name] == pytest.approx(plain[name], rel=1e-5)


def test_a_run_goes_on_bitwise(train):
    assert_goes_on_bitwise(train, BFLOAT16)


@pytest.mark.parametrize("layout", ["varlen", "documents", "mask", "flex"])
def test_a_deterministic_run_goes_on_bitwise_over_long_documents(train, tmp_path, layout):
    letters = [chr(97 + i % 26) for i in range(1900)]
    path = tmp_path / "long.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "".join(letters[i:] + letters[:i])}) + "\n" for i in range(40))
    )
    data = f"data.path={path} batch.seq_len=2048 batch.rows=2 batch.micro_rows=1"
    model = f"model.head_dim=64 model.max_position_embeddings=2048 model.attention={layout}"
    assert_goes_on_bitwise(train, data, model, BFLOAT16, "train.deterministic=true")


WINDOWS = "model.family=mistral model.sliding_window=32"
GEMMA = "model.family=gemma2 model.sliding_window=32 model.attn_logit_softcapping=50.0"


def refuse_to_wait():
    first = phases.training.step == 1  # lazy initialisation may wait
    torch.cuda.set_sync_debug_mode("default" if first else "error")


NO_WAITING = inject.together(
    inject.at(None, refuse_to_wait),
    inject.after("update", partial(torch.cuda.set_sync_debug_mode, "default")),
)
"""Any host synchronisation from the beginning of a step to the end of its update is an error."""


@pytest.mark.parametrize(
    "how",
    [
        "",
        "activation_checkpoint=selective",
        "activation_checkpoint=full",
        f"activation_checkpoint=full {OFFLOADED}",
        "optim=adamw_bf16",
        "precision.master_dtype=bfloat16",
        "optim=adamw_8bit model.hidden_size=64 model.intermediate_size=128",
        "loss.z_loss=1e-4 loss.label_smoothing=0.1",
        "optim.grad_clip_value=1.0",
        *(
            f"model.attention={layout} activation_checkpoint=full model.head_dim=16"
            for layout in ("documents", "mask", "varlen", "flex")
        ),
        *(
            f"model.attention={layout} {GEMMA} model.head_dim=16"
            for layout in ("documents", "mask", "flex")
        ),
        f"model.attention=varlen {WINDOWS}",
        "data.prefetch=0",
        "compile=enabled",
        # FSDP2 waits for the gradients of a step's second micro-batch: there is one
        "sharding.cpu_offload=true batch.micro_rows=6",
        f"{GEMMA} model.final_logit_softcapping=20",
        "model.tie_word_embeddings=false",
    ],
)
def test_no_step_waits_for_the_host(train, how):
    common = ["train.steps=5", "launch.device=cuda", BFLOAT16, "batch.micro_rows=2"]
    run = train("run", *common, *how.split(), seam=NO_WAITING)
    assert run["step"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_adds_up_its_gradient_in_float32_over_many_chunks(compiled):
    from textbook import make, textbook

    from fsdp_trainer.training.objective import CrossEntropy

    head, hidden, targets, weights = make(dtype=torch.bfloat16)
    _, nll, grad_hidden, grad_weight = textbook(head, hidden, targets, weights, z_loss=1e-2)
    head.cuda()
    if compiled:
        head.compile_chunks()
    on_gpu = hidden.detach().cuda().requires_grad_()
    value, scores = head(on_gpu, targets.cuda(), CrossEntropy(weights.cuda(), z_loss=1e-2))
    value.backward()
    assert torch.allclose(-scores.log_probability.cpu().double(), nll, rtol=0.02, atol=0.05)
    for ours, exact in ((on_gpu.grad, grad_hidden), (head.weight.grad, grad_weight)):
        assert ours.dtype == torch.bfloat16
        assert (ours.cpu().double() - exact).norm() < 0.01 * exact.norm()


def test_no_step_of_several_sources_waits_for_the_host(train, tmp_path):
    data = [
        write_chats(tmp_path / f"{name}.jsonl", 40, start)
        for name, start in (("one", 0), ("two", 200))
    ]
    how = "train.steps=5 launch.device=cuda batch.micro_rows=2"
    run = train("run", f"data.path=[{','.join(map(str, data))}]", how, seam=NO_WAITING)
    assert len(run.metrics[-1]["loss_by_source"]) == 2


def test_micro_batches_made_ahead_are_those_made_on_the_spot(train):
    how = ["train.steps=30", "launch.device=cuda", "batch.micro_rows=1"]
    how += ["sharding.accumulate=sharded"]
    runs = [train(f"ahead{depth}", *how, f"data.prefetch={depth}") for depth in (0, 1, 4)]
    assert runs[0]["loss"] == runs[1]["loss"] == runs[2]["loss"]


def test_a_bad_step_of_an_offloaded_run_is_skipped(train):
    run = train(
        "run",
        "train.steps=3 launch.device=cuda sharding.cpu_offload=true",
        seam=inject.bad_gradient(2, 4, 5, 6, 7, 8),
    )
    assert [e["step"] for e in run.event("skipped")] == [2]


def test_a_profile_has_the_devices_kernels_and_a_snapshot_of_its_memory(train):
    run = train("run", "train.steps=3 launch.device=cuda profile.steps=2-3 profile.memory=true")
    trace, snapshot = (
        run.folder / "profile" / f"steps-2-3-rank-0.{kind}" for kind in ("json.gz", "pickle")
    )
    with gzip.open(trace) as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    assert pickle.loads(snapshot.read_bytes())["device_traces"]


def test_samples_change_nothing_of_training(train):
    how = ["train.steps=6", "launch.device=cuda", BFLOAT16]
    run = train(
        "run", *how, "train.sample_prompts=[aaa] train.validate_every=2 train.sample_tokens=8"
    )
    assert run["loss"] == train("plain", *how)["loss"]
    assert len(read_lines(run.folder / "samples.jsonl")) == 3


def test_a_model_that_the_gpu_cannot_hold_is_refused(train):
    run = train(
        "run", "model=llama3_70b", base=["checkpoint.every=null", "launch.device=cuda"], code=2
    )
    assert "on the GPU" in run.err
    assert "68.5 G × 8 B" in run.err


@pytest.mark.parametrize(
    "how", ["optim=adamw_bf16", "optim=adamw_8bit", "precision.master_dtype=bfloat16"]
)
def test_moments_and_weights_in_fewer_bits_go_on_bitwise_and_near_the_cpus(train, how):
    common = [how, "model.hidden_size=64", "model.intermediate_size=128"]
    whole = assert_goes_on_bitwise(train, *common)
    cpu = train("cpu", *common, "schedule=constant launch.device=cpu train.steps=6")
    assert whole["loss"] == pytest.approx(cpu["loss"], rel=0.02)


def test_rounding_bits_are_those_of_the_cpu():
    from fsdp_trainer.optim.stochastic_rounding import element_numbers, key_of, random_bits

    part, shape = (
        (slice(12345, 12345 + (1 << 10)), slice(0, 1 << 10)),
        torch.Size((1 << 20, 1 << 10)),
    )
    on = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        numbers = element_numbers(part, shape, 0, 1 << 20, device)
        on.append(random_bits(key_of(3, "w"), torch.tensor(9.0, device=device), numbers).cpu())
    assert torch.equal(*on)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs float8 matrix products",
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_is_near_bfloat16_and_goes_on(train, recipe):
    pytest.importorskip("torchao")
    common = [
        "model.hidden_size=2304", "model.intermediate_size=4352", "model.num_hidden_layers=1",
        "model.head_dim=128", "model.initializer_range=0.02", "optim.lr=1e-4", "schedule=constant",
        "launch.device=cuda", BFLOAT16, "compile=enabled", "checkpoint.every=3",
    ]  # fmt: skip
    exact = train("exact", *common, "train.steps=6", timeout=300)
    common.append(f"precision.float8={recipe}")
    train("run", *common, "train.steps=3", timeout=300)
    run = train("run", *common, "train.steps=6", timeout=300)
    assert run["loss"] == pytest.approx(exact["loss"], rel=0.05)
    assert run["step"] == [1, 2, 3, 4, 5, 6]


ELSEWHERE = [
    "optim.offload=cpu",
    "optim.offload=disk",
    "optim.offload=disk sharding.cpu_offload=true",
]


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_elsewhere_train_as_on_the_gpu_and_go_on_bitwise(train, how, dtype):
    common = f"precision.param_dtype={dtype} batch.micro_rows=2"
    whole = assert_goes_on_bitwise(train, common, how)
    device = train("device", common, "launch.device=cuda schedule=constant train.steps=6")
    tolerance = 1e-4 if dtype == "float32" else 0.01
    for name in ("loss", "grad_norm"):
        assert whole[name] == pytest.approx(device[name], rel=tolerance)


@pytest.mark.parametrize("how", ["activation_checkpoint=full", "compile=enabled"])
def test_states_on_the_host_go_with_recomputation_and_compilation(train, how):
    common = ["train.steps=5", "launch.device=cuda", "schedule=constant", how]
    device = train("device", *common, timeout=300)
    host = train("host", *common, "optim.offload=cpu", timeout=300)
    assert host["loss"] == pytest.approx(device["loss"], rel=1e-4)


METHODS = {
    "dpo": (write_pairs, []),
    "orpo": (write_pairs, []),
    "reward": (write_pairs, []),
    "kto": (write_labelled, []),
    "dpo, adapters": (write_pairs, ["adapter=lora"]),
    "dpo, states on the host": (write_pairs, ["optim.offload=cpu"]),
}


@pytest.mark.parametrize(("write", "how"), METHODS.values(), ids=METHODS.keys())
def test_preferences_are_learnt_as_on_a_cpu(train, tmp_path, request, write, how):
    method = request.node.callspec.id.split(",")[0]
    rows = write(tmp_path / "rows.jsonl")
    assert_near_the_cpu(train, f"objective={method} data.path={rows}", *how)


OF_A_FOLDER = [
    "model.implementation=transformers", "precision=fp32", "batch.micro_rows=1",
    "checkpoint.every=null", "launch.watchdog=false",
]  # fmt: skip
"""Overrides in place of those that shape a tiny model."""


@pytest.mark.parametrize("kind", ["gpt2", "granitemoe", "qwen3_next", "cohere2"])
def test_modules_of_transformers_train_as_on_a_cpu(train, tmp_path, kind):
    folder = make_other_folder(tmp_path / kind, kind)
    how = f"model.init_from={folder} batch.seq_len=64 batch.rows=4"
    assert_near_the_cpu(train, how, base=OF_A_FOLDER, timeout=300)


@pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="needs transformers 5.23")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_images_train_as_on_a_cpu(train, tmp_path, kind):
    write_shown(tmp_path, 6)
    folder = make_image_folder(tmp_path / kind, kind)
    how = [f"model.init_from={folder}", f"data.path={tmp_path}/images.jsonl"]
    how += ["batch.seq_len=160", "batch.rows=2"]
    assert_near_the_cpu(train, *how, base=OF_A_FOLDER, timeout=300)


@pytest.mark.parametrize("how", [[], ["optim.offload=cpu"], ["adapter=lora"]], ids=str)
def test_rewards_train_and_go_on_bitwise(train, how):
    grpo = [
        "objective=grpo", 'objective.rewards=[{name: regex, pattern: "[a-z]"}]',
        "data.path=demo:sums", "objective.max_new_tokens=6", "objective.samples=4",
        "batch.rows=4", "batch.micro_rows=2",
    ]  # fmt: skip
    assert_goes_on_bitwise(train, *grpo, *how, steps=(2, 4), timeout=300)


def test_recorded_kernels_answer_as_those_that_are_launched_one_by_one(tmp_path, monkeypatch):
    model = Speaker.load(make_folder(tmp_path / "hf", "qwen3")).model.cuda()
    prompts = [[5, 6, 7], [9], list(range(20, 41)), [11, 12]]
    sampling = Sampling(40, 1.0, 0.95, samples=6, seed=1)
    replays = []
    real = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), real(graph))
    )
    done = Event()

    def prepare_batches():
        for size in range(10**6, 10**8, 1000):  # each needs new memory
            torch.ones(size).pin_memory().to("cuda", non_blocking=True)
            if done.is_set():
                return

    thread = Thread(target=prepare_batches)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded = generate_tokens(model, prompts, range(10), sampling)
    done.set()
    thread.join()
    assert len(set(map(id, replays))) > 1
    monkeypatch.setattr(continuations, "can_record", lambda model, device: False)
    assert generate_tokens(model, prompts, range(10), sampling) == recorded
