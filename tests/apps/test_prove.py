"""A certificate is right on an honest run, and finds numbers that are planted wrongly."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import planted_faults
import pytest
import torch
from damaged_folders import (
    FOLDERS,
    HONEST,
    write_folders,
    wrong_in_folder,
    wrong_with,
)
from folders import table
from heads import write_classes
from image_models import make_image_folder, write_pictures
from texts import BYTES, talk, turn
from world import command, edit_json, read_json, write_json, write_lines
from zoo import HF, make_folder

from fsdp_trainer.apps.prove import run_certificate
from fsdp_trainer.apps.prove.certificate_text import certificate_lines
from fsdp_trainer.apps.prove.checks import (
    exports,
    layout,
    mask,
    other_program,
    packing,
    prompts,
    trained,
)
from fsdp_trainer.apps.prove.checks.mask import LearntWords
from fsdp_trainer.apps.prove.folders.head_numbers import embedding
from fsdp_trainer.apps.prove.proof import fewer_rows, runs
from fsdp_trainer.apps.prove.proof.certificate import Certificate, Checked, NotProved, compared
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.export_forms import Original
from fsdp_trainer.apps.prove.proof.folding import folded, folded_batch
from fsdp_trainer.apps.prove.proof.narrowing import SMALL, Narrowing
from fsdp_trainer.apps.prove.proof.promises import broken_promises
from fsdp_trainer.apps.prove.proof.recordings import BIAS, whole_tensors
from fsdp_trainer.apps.prove.proof.runs import ProofRun
from fsdp_trainer.apps.prove.proof.small_folder import add_head, write_small_folder
from fsdp_trainer.apps.prove.proof.trajectories import Trajectory, verdict
from fsdp_trainer.apps.prove.proof.written_rows import WrittenRow
from fsdp_trainer.apps.prove.twins.formulas import FORMULAS
from fsdp_trainer.apps.prove.twins.of_embeddings import COMPARED, StepLists
from fsdp_trainer.apps.report.read import read_run
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.methods import METHODS, ObjectiveChoice
from fsdp_trainer.config.schema import Batch, Sharding
from fsdp_trainer.data.records.conversations import Conversation
from fsdp_trainer.errors import UserError
from fsdp_trainer.extensions import CALLBACKS
from fsdp_trainer.launch.start import start_ranks
from fsdp_trainer.methods.contrast import StepTexts, loss_of_texts
from fsdp_trainer.models.config import POOLING, ModelConfig
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.models.moe import SigmoidRouter
from fsdp_trainer.planning.plan.plan_inputs import architecture

pytest.importorskip("transformers")

CASES = table("apps/prove_cases.yaml")
CONTEXT = {"max_position_embeddings": 256}


def train_in_worker(composed):
    """Train as one rank of the pool, with the recorder's callback. Returns the result."""
    CALLBACKS["recorder"] = import_module(runs.RECORDER).Recorder()
    try:
        return command(["train"], None, composed)
    finally:
        CALLBACKS.clear()


@pytest.fixture(scope="module")
def pool(world):
    """Ranks of the pool in place of new ones, and the evidence of the last proof, which stays."""
    last = []

    def start_ranks(cfg, words, **streams):
        own = {runs.FOLDER: runs.os.environ[runs.FOLDER]}
        results = world.call(cfg.launch.nproc_per_node, train_in_worker, cfg, env=own)
        streams["stdout"].write("".join(result.err for result in results))
        return max(result.code for result in results)

    def remembered(*given):
        last[:] = [Evidence(*given)]
        return last[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "start_ranks", start_ranks)
        patch.setattr(run_certificate, "Evidence", remembered)
        yield last


@pytest.fixture(scope="module")
def proof(pool, tmp_path_factory):
    """The output of `prove` for a run on a small folder, the run's folder, and its evidence."""
    place = tmp_path_factory.mktemp("proof")
    folder = make_folder(place / "hf", "qwen3", max_position_embeddings=256)
    with pytest.MonkeyPatch.context() as patch:
        own = SimpleNamespace(TemporaryDirectory=lambda prefix: scratch(place))
        patch.setattr(run_certificate, "tempfile", own)
        result = command(
            [
                "prove", *HF, f"model.init_from={folder}", f"run.root={place}", "batch.seq_len=128",
                "data.path=demo:backwards", "run.name=run", "format=json", "adapter=lora",
                "adapter.rank=4", "sharding.tensor=2", "plan.world_size=2",
                f"html={place / 'page.html'}",
            ],
            None,
        )  # fmt: skip
    return result, place, pool[0]


def scratch(place):
    """A folder for the runs of a proof, which is not deleted."""
    (place / "scratch").mkdir()
    return nullcontext(f"{place}/scratch")


def test_an_honest_run_has_nothing_that_differs(proof):
    result, place, _ = proof
    assert result.code == 0, result
    answer = json.loads(result.out)
    assert answer["ok"]
    assert not [check for check in answer["checks"] if not check["ok"]]
    assert {*answer} == {"checks", "not_proved", "ok"}
    assert {*answer["checks"][0]} == {"name", "difference", "limit", "ok", "detail"}
    assert {*answer["not_proved"][0]} == {"name", "command"}
    about = {check["name"].partition(":")[0] for check in answer["checks"]}
    assert about >= {*CASES["about"]}
    by_name = {check["name"]: check for check in answer["checks"]}
    assert "0 of 300 words of user" in by_name["the mask"]["detail"]
    assert "all equal" in (place / "page.html").read_text()


def test_ranks_of_a_proof_are_started_and_what_they_refuse_is_told(proof, monkeypatch):
    monkeypatch.setattr(runs, "start_ranks", start_ranks)
    known = proof[2].planned
    again = known.named("again").recorded()
    assert [line["loss"] for line in again.metrics] == [line["loss"] for line in known.metrics]
    cfg = replace(known.cfg, model=replace(known.cfg.model, init_from="nowhere"))
    with pytest.raises(UserError, match="the wrong run is refused") as refused:
        ProofRun(cfg, known.scratch).named("wrong").recorded()
    assert "nowhere" in refused.value.problems[0].reason


def test_the_report_of_a_run_shows_its_certificate_and_the_keys_that_differ(proof, tmp_path):
    _, place, _ = proof
    (tmp_path / "prove.json").write_text((place / "run/prove.json").read_text())
    (tmp_path / "config.yaml").write_text("optim: {lr: 0.5}\nrun: {name: other}\n")
    known = read_run(tmp_path, "run").certificate
    assert known.ok
    assert known.changed == ["optim.lr"]
    assert "all equal; with other values of optim.lr" in known.verdict
    (tmp_path / "prove.json").write_text("[]")
    damaged = read_run(tmp_path, "run")
    assert damaged.certificate is None
    assert "prove.json cannot be read" in damaged.remarks[0]


def test_a_difference_ends_with_code_3_and_says_what_to_do(monkeypatch, tmp_path):
    wrong = compared("layout: losses", float("nan"), 1e-5, "step 3", "leave it out")
    monkeypatch.setattr(run_certificate, "OF_A_RUN", [lambda evidence: [wrong]])
    result = command(["prove", "+recipe=quickstart", f"run.root={tmp_path}", "format=json"], None)
    assert result.code == 3
    (check,) = json.loads(result.out)["checks"]
    assert check["difference"] is None
    assert check["detail"] == "step 3. leave it out"


def test_a_certificate_lists_what_differs_and_what_is_left_to_prove():
    certificate = Certificate(about=["two ranks"])
    certificate.add([Checked("a", 0, 0, True, "right"), NotProved("NCCL", "torchrun …")])
    assert certificate.ok
    certificate.add([Checked("b", 2, 0, False, "x; y", "report it")])
    text = "\n".join(certificate_lines(certificate))
    for part in ("two ranks", "DIFFERS b", "2 wrong", "→ report it", "torchrun …", "1 DIFFER"):
        assert part in text
    assert not Certificate().ok, "nothing was compared"


# --- numbers that are planted wrongly -------------------------------------------------------------


def test_each_kind_of_difference_of_two_trainings_is_named():
    weights = {"a": torch.ones(4, 2), "b": torch.zeros(3)}
    gradients = {1: {"a": torch.ones(4, 2), "b": torch.full((3,), 1e-9)}}
    one = Trajectory([1.0, 2.0], gradients, weights, {**weights, "a": torch.full((4, 2), 1.1)})
    assert not any(difference.value for difference in one.differences(one).values())
    changed = {1: {**gradients[1], "a": torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 1.01]])}}
    assert replace(one, gradients=changed).differences(one)["gradients"].value > 5e-3
    assert "a" in replace(one, gradients=changed).differences(one)["gradients"].where
    noise = {1: {**gradients[1], "b": torch.zeros(3)}}
    assert replace(one, gradients=noise).differences(one)["gradients"].value < 1e-4
    assert replace(one, losses=[1.0, 2.1]).differences(one)["losses"].where.startswith("step 2")
    assert replace(one, losses=[1.0]).differences(one)["losses"].value == float("inf")
    moved = replace(one, end={**one.end, "b": torch.full((3,), 0.01)})
    assert moved.differences(one)["weights"].value > 0.05
    padded = replace(one, end={**one.end, "b": torch.tensor([0.0, 0, 0, 1])})
    assert padded.differences(one)["weights"].where == "padding of b"
    renamed = replace(one, end={"a": one.end["a"]})
    assert "b" in renamed.differences(one)["weights"].where


SIGNS = {
    "a token more": lambda counts: (counts.sum() - 8 * (counts + torch.eye(8)[0])).sign(),
    "wrong sign": lambda counts: (8 * counts - counts.sum()).sign(),
    "wrong divisor": lambda counts: (counts.sum() - 16 * counts).sign(),
    "no sum over ranks": lambda counts: (counts.sum() - 8 * (counts + OF_OTHERS)).sign(),
}
OF_OTHERS = 12 * torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1])
"""By how much a rank's own counts may differ from half of all."""


@pytest.mark.parametrize("fault", SIGNS)
def test_routers_biases_may_differ_by_a_token_near_the_mean_and_not_by_another_rule(fault):
    router = SimpleNamespace(e_score_correction_bias=torch.zeros(8))
    other = torch.zeros(8)
    for step in range(10):
        counts = 400 + torch.arange(-8.0, 8.0, 2).roll(step)
        SigmoidRouter.move_bias(router, counts, 0.01, torch.tensor(False))
        other += 0.01 * SIGNS[fault](counts)
    start, end = ({BIAS: one} for one in (torch.zeros(8), router.e_score_correction_bias))
    one = Trajectory([1.0], {}, start, end, bias_speed=0.01)
    difference = replace(one, end={BIAS: other}).differences(one)["routers' biases"]
    is_equal = verdict("layout", "routers' biases", difference, 0.0, "", "").ok
    assert is_equal == (fault == "a token more")


def test_parts_of_ranks_are_joined_and_unequal_copies_are_named(tmp_path):
    whole = torch.arange(6.0).view(3, 2)
    for rank, (start, numbers) in enumerate([(0, whole[:2]), (1, whole[1:])]):
        torch.save({"w": (True, (3, 2), [start, 0], numbers)}, tmp_path / f"end.rank{rank}.pt")
    tensors, trained, unequal = whole_tensors(tmp_path, "end")
    assert torch.equal(tensors["w"], whole)
    assert trained == {"w": True}
    assert not unequal
    torch.save({"w": (True, (3, 2), [1, 0], whole[1:] + 1)}, tmp_path / "end.rank1.pt")
    assert "rank 1 holds other numbers of w" in whole_tensors(tmp_path, "end")[2][0]
    (tmp_path / "end.rank1.pt").unlink()
    assert whole_tensors(tmp_path, "end")[2] == ["no rank holds all of w"]


@pytest.mark.parametrize(
    "learnt, problem",
    CASES["learnt"].items(),
)
def test_the_mask_is_judged_by_the_words_of_roles(learnt, problem):
    turns = talk("how are you, my friend?", "fine, thank you")
    tokens = torch.tensor(BYTES.encode(learnt or "x")).numpy()
    weights = torch.full((len(tokens),), float(bool(learnt))).numpy()
    words = LearntWords(BYTES, "assistant")
    words.add(WrittenRow(Conversation(turns, None, ("f.jsonl", 7)), [(tokens, weights)]))
    assert bool(words.wrong) == bool(problem)
    assert not problem or any(f"f.jsonl:7: {problem}" in text for text in words.wrong)
    assert words.words == {"user": 5, "assistant": 3}


def test_promises_that_a_folder_does_not_keep_are_named(tmp_path):
    folder = make_folder(tmp_path / "hf", "qwen3")
    assert broken_promises(folder) == []
    edit_json(folder / "config.json", **CASES["broken"])
    text = "\n".join(broken_promises(folder))
    for key in ("num_hidden_layers=5", "vocab_size=7", "tie_word_embeddings", "own.py"):
        assert key in text


def test_logits_of_one_text_that_are_undefined_differ():
    texts, ones = [torch.tensor([0]), torch.tensor([1])], torch.ones(1, 2)
    original = Original(None, None, None, texts, [ones, ones], None)
    assert original.difference(lambda text: ones) == 0
    assert original.difference(lambda text: ones / (1 - text)) == float("inf")
    assert original.difference(lambda text: ones / ones.where(text == 0, torch.nan)) == float("inf")


@pytest.mark.parametrize("sharding, ranks, sizes", CASES["folded"])
def test_a_planned_layout_is_folded_to_few_ranks_that_can_be_arranged(sharding, ranks, sizes):
    planned = Layout(Sharding(**sharding), ranks, Batch(rows=512, micro_rows=4))
    small, count = folded(planned)
    batch = folded_batch(planned, small, count)
    layout = Layout(small, count, batch)
    assert count == sizes
    assert not layout.problem
    assert not layout.pipeline_problem
    assert batch.rows <= 64
    assert batch.micro_rows == 2


@pytest.mark.parametrize("recipe", ["deepseek_v3_sft", "gemma3_4b_sft", "chain_pretrain"])
def test_a_large_model_becomes_a_small_one_with_a_block_of_each_kind(recipe, tmp_path):
    words = [f"+recipe={recipe}", "tokenizer.path=demo:bytes", "plan.world_size=256"]
    model = Narrowing(compose("prove", [*words, "data.path=demo:backwards"]), tmp_path).model
    small = read_architecture(Path(model.init_from))
    assert small.first_k_dense_replace == (recipe == "deepseek_v3_sft") < small.num_hidden_layers
    assert small.parameters() < SMALL


@pytest.mark.parametrize("model", ["olmoe_7b", "olmo2_1b", "moonlight_16b_a3b", "qwen2_5_0_5b"])
def test_a_small_copy_of_transformers_class_has_the_shapes_of_ours(model, tmp_path):
    words = ["data.path=demo:backwards", "tokenizer.path=demo:bytes", "plan.world_size=8"]
    config, _ = architecture(compose("prove", [f"model={model}", *words]))
    write_small_folder(config, tmp_path / "small", vocabulary=300, blocks=2)
    assert read_model(tmp_path / "small").logits(torch.zeros(1, 4).long()).isfinite().all()


def test_a_small_copy_names_no_token_that_its_tokenizer_lacks(tmp_path):
    folder = make_folder(tmp_path / "hf", "qwen3")
    edit_json(folder / "config.json", pad_token_id=250, eos_token_id=7)
    write_small_folder(read_architecture(folder), tmp_path / "small", vocabulary=200, blocks=2)
    config = read_json(tmp_path / "small/config.json")
    assert (config.get("pad_token_id"), config["eos_token_id"]) == (None, 7)


def test_large_data_is_not_read_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(fewer_rows, "LARGE", 100)
    monkeypatch.setattr(fewer_rows, "ENOUGH", 60)
    write_lines(tmp_path / "texts.jsonl", [{"text": f"{i:09}"} for i in range(50)])
    (tmp_path / "small.txt").write_text("a short text")
    own = {"path": f"{tmp_path}/small.txt", "weight": 2}
    path = [{"path": f"{tmp_path}/texts.jsonl", "weight": 1}, own]
    (first, second), sentences = fewer_rows.fewer_rows(path, tmp_path / "out")
    assert second == own
    assert first["weight"] == 1
    (file,) = (tmp_path / "out/0").iterdir()
    assert file.read_text() == "".join(f'{{"text": "{i:09}"}}\n' for i in range(3))
    assert sentences == [f"3 rows of {path[0]['path']}"]
    assert fewer_rows.fewer_rows([own], tmp_path / "out") == ([], [])


# --- methods beside other programs ----------------------------------------------------------------

TWINS = CASES["twins"]


@pytest.mark.parametrize("data", TWINS)
def test_methods_are_compared_with_other_programs(pool, monkeypatch, tmp_path, data):
    with_head = [trained.check, exports.check] if data == "classes.jsonl" else []
    monkeypatch.setattr(run_certificate, "OF_A_RUN", [other_program.check, *with_head])
    model, *words = TWINS[data].split()
    kind = model.removeprefix("model=")
    write = make_image_folder if kind == "llava" else partial(make_folder, **CONTEXT)
    write(tmp_path / "hf", kind)
    if kind == "deepseek_v3":
        (space,) = BYTES.encode(" ")  # a row that transformers does not train
        own = {"num_nextn_predict_layers": 1, "pad_token_id": space}
        edit_json(tmp_path / "hf/config.json", **own)
        add_head(tmp_path / "hf")
    write_lines(
        tmp_path / "stream.jsonl", [{"text": f"{i} birds. " * (1 + i % 4)} for i in range(60)]
    )
    write_classes(tmp_path)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"{i}+1=", "answer": i} for i in range(20)])
    shown = [{"type": "image", "image": name} for name in write_pictures(tmp_path, 3)]
    questions = [[shown[i % 3], {"type": "text", "text": str(i)}] for i in range(12)]
    rows = [
        {
            "prompt": [turn("user", parts)],
            "completion": [turn("assistant", "no.")],
            "label": i % 3 > 0,
        }
        for i, parts in enumerate(questions)
    ]
    write_lines(tmp_path / "verdicts.jsonl", rows)
    place = [f"model.init_from={tmp_path / 'hf'}", f"run.root={tmp_path}", "run.name=run"]
    place += [f"data.path={tmp_path / data}", "batch.seq_len=128", "plan.world_size=2"]
    result = command(["prove", *HF, *place, "format=json", *words], None)
    assert result.code == 0, result
    answer = json.loads(result.out)
    kinds = [check["name"].partition(": ")[2] for check in answer["checks"]]
    if with_head:
        assert kinds[4:] == ["", "", "", "names", "promises", "logits", "names", "logits"]
    moved = ["routers' biases"] * (kind == "deepseek_v3")
    assert kinds[: 4 + len(moved)] == ["losses", "gradients", "last gradients", "weights", *moved]
    assert {*FORMULAS} == {*METHODS}


@pytest.mark.parametrize(
    "comparison, margin", [*((name, None) for name in COMPARED), ("infonce", -0.2)]
)
def test_embeddings_have_the_losses_of_their_formulas(comparison, margin):
    """Texts that are the same, and queries with several answers, or without other documents."""
    sizes, seed = [(2, 1), (1, 0), (1, 3)], torch.Generator().manual_seed(0)
    kinds = [kind for good, bad in sizes for kind in (0, *[1] * good, *[2] * bad)]
    vectors = torch.nn.functional.normalize(
        torch.randn(len(kinds), 8, dtype=torch.float64, generator=seed), dim=1
    )
    scores = torch.rand(len(kinds), dtype=torch.float64, generator=seed)
    same = [*range(len(kinds))]
    same[2], same[8] = same[5], same[1]
    own = {"symmetric": True, "temperature": 0.3, "false_negatives": margin}
    choice = ObjectiveChoice(comparison=comparison, **own)
    given = StepTexts(vectors, torch.tensor(kinds), scores, torch.tensor(same).double(), 3)
    starts = [i for i, kind in enumerate(kinds) if kind == 0]
    ends = zip(starts, [*starts[1:], len(kinds)], strict=True)
    lists = {first: [*range(first + 1, last)] for first, last in ends}
    good = {query: [i for i in own if kinds[i] == 1] for query, own in lists.items()}
    tokens = [[one] for one in same]
    texts = StepLists(vectors @ vectors.T, scores, lists, good, tokens, 0.3, True, margin)
    loss = torch.stack(COMPARED[comparison](texts)).mean()
    assert loss.item() == pytest.approx(loss_of_texts(given, choice).item() / len(sizes))


# --- faults that are planted in this program, of which the runs are shared ------------------------

PLANTED = {
    "leak between documents": (packing, "packed = alone"),
    "wrong mask": (mask, "the mask"),
    "template that differs in chat": (prompts, "prompts: chat"),
    "dropped gradient of one rank": (layout, "layout: gradients"),
}
"""The module of the check that names a fault, and the check's name."""


@pytest.mark.parametrize("name", PLANTED)
def test_faults_planted_in_runs_are_named(proof, name, monkeypatch, tmp_path):
    known = proof[2]
    data = replace(known.small.plain.data, cache=str(tmp_path))  # it is tokenized again
    small = replace(known.small, plain=replace(known.small.plain, data=data))
    again = Evidence(small, [], known.scratch, lambda line: None)
    again.__dict__ |= {"plain": known.plain, "planned": known.planned}
    for place, function in planted_faults.CHANGED:
        monkeypatch.setattr(place, function, getattr(place, function))
    if name in planted_faults.PLANTS:
        planted_faults.PLANTS[name]()
    else:
        drop_half_of_gradients(known.planned, monkeypatch)
    module, check = PLANTED[name]
    wrong = [one for one in module.check(again) if not getattr(one, "ok", True)]
    assert any(check in one.name for one in wrong)
    assert all(one.advice and one.detail for one in wrong)


def drop_half_of_gradients(planned, monkeypatch):
    """Let one of two ranks have recorded no gradient of a matrix whose rows they share."""
    read = ProofRun.gradients

    def dropped(run, step):
        gradients = read(run, step)
        first = next(iter(gradients))
        gradients[first][len(gradients[first]) // 2 :] *= run is not planned
        return gradients

    monkeypatch.setattr(ProofRun, "gradients", dropped)


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Honest folders."""
    pytest.importorskip("peft")
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("gguf")
    place = tmp_path_factory.mktemp("folders")
    write_folders(place)
    return place


@pytest.mark.parametrize("source, reference", HONEST)
def test_a_certificate_says_nothing_of_honest_folders(folders, source, reference):
    assert wrong_in_folder(folders / source, folders / reference) == []


@pytest.mark.parametrize("name", FOLDERS)
def test_faults_planted_in_folders_are_named(folders, name):
    fault = FOLDERS[name]
    assert fault.check in wrong_with(fault, folders)


@pytest.mark.parametrize(
    "chosen", [{"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True}], ids=["new", "old"]
)
def test_an_embedding_is_what_the_folders_pooling_says(tmp_path, chosen):
    (tmp_path / POOLING).parent.mkdir()
    write_json(tmp_path / POOLING, chosen)
    states = torch.randn(3, 8)
    vector = embedding(states, tmp_path, ModelConfig(pooling="last"))
    assert torch.allclose(vector, torch.nn.functional.normalize(states.mean(0), dim=0))


def test_an_adapter_that_only_a_pickle_holds_is_not_called_torn(folders, tmp_path):
    shutil.copytree(folders / "adapter", tmp_path / "adapter")
    weights = tmp_path / "adapter/adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    said = command(["prove", f"source={tmp_path}/adapter", "format=json"], None)
    assert "which may run code" in said.out + said.err


def test_a_reference_that_is_no_folder_of_a_model_is_refused(folders, tmp_path, program):
    (tmp_path / "config.json").write_text("[]")
    words = [f"source={folders}/base", f"reference={tmp_path}"]
    assert "not a JSON object" in program("prove", *words, code=2)


def test_a_strangers_configuration_is_read_with_bounds(folders, tmp_path):
    shutil.copytree(folders / "base", tmp_path / "base")
    edit_json(tmp_path / "base/config.json", **CASES["strange"])
    assert "promises" in wrong_in_folder(tmp_path / "base", None)
