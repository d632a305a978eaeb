"""Learning from the model's own answers: prompts as data, the same answers on any ranks, losses as
the papers write them, and a run that goes on in the middle."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from recipe import planned

from fsdp_trainer.apps.quickstart import quickstart_rl
from fsdp_trainer.cli import main
from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.data.files.sources import Record
from fsdp_trainer.data.records.prompts import make_prompt_reader
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.answers import (
    ADVANTAGE,
    SAMPLED,
    PackedAnswers,
    advantages,
    step_weight,
    token_weight,
)
from fsdp_trainer.methods.policy_gradient import REFERENCE, PolicyGradient, RolloutForwardBackward
from fsdp_trainer.methods.reference_model import ReferenceModel
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.head import Scores
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.models.setup import WeightSource
from fsdp_trainer.rollouts.rollout import Rollout, decode_rollouts, encode_rollouts
from fsdp_trainer.rollouts.sampler import SampledAnswer
from fsdp_trainer.training.batches import Assembler

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
ROWS = [
    ({"question": "1+1?", "solution": "one, two", "level": 3}, "1+1?", "one, two"),
    ({"messages": TURNS, "answer": 7, "id": "a"}, "hi", "7"),
    ({"prompt": "Sort [2, 1]", "tests": ["f([2, 1]) == [1, 2]"]}, "Sort [2, 1]", None),
    ({"prompt": "p", "chosen": "good", "rejected": "bad"}, "p", "good"),
    ({"prompt": "Rain?", "tools": [TOOL]}, "Rain?", None),
]


@pytest.mark.parametrize("columns, prompt, reference", ROWS, ids=lambda x: None)
def test_rows_of_many_formats_are_prompts_and_keep_their_columns(columns, prompt, reference):
    reader = make_prompt_reader(columns, "auto", None, "f")
    stored = json.loads(reader.read(Record(columns, ("f", 1))).as_json)
    messages = columns.get("messages", [{"role": "user", "content": prompt}])
    wanted = {"prompt": prompt, "reference": reference, "row": columns, "messages": messages}
    assert stored == wanted | {"tools": columns.get("tools")}


def test_a_prompt_without_an_answer_keeps_its_system_text_and_tools():
    columns = {"q": "Rain?", "sys": "be brief", "functions": json.dumps([TOOL])}
    fields = {"prompt": "q", "system": "sys", "tools": "functions"}
    question = make_prompt_reader(columns, "auto", fields, "f").read(Record(columns, ("f", 1)))
    assert question.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Rain?"},
    ]
    assert question.tools == [TOOL]


def test_text_without_a_prompt_is_refused():
    with pytest.raises(UserError, match="the data cannot be used"):
        make_prompt_reader({"text": "once"}, "auto", None, "f")


@pytest.mark.slow
def test_preview_shows_prompts_with_their_references(capsys, tmp_path):
    keys = ["objective=grpo", "objective.rewards=[exact]", "data.path=demo:sums"]
    place = ["tokenizer.path=demo:bytes", f"data.cache={tmp_path}", "preview.rows=2"]
    assert main(["preview", *keys, *place]) == 0
    said = capsys.readouterr().out
    assert said.count("reference answer: ") == 2
    assert "assistant" in said
    assert "[[" not in said.split("row 0")[1], "nothing of a prompt is learnt"


# --- the loss -------------------------------------------------------------------------------------


def rollout(row, sample, prompt, answer, reward, finished=True):
    chosen = -0.1 * np.arange(1, answer + 1, dtype=np.float32)
    tokens = [100 + row * 10 + sample] * answer
    answered = SampledAnswer(tokens, chosen.tolist(), finished, 3)
    return Rollout(row, sample, [row + 1] * prompt, answered, reward, [reward])


ROLLOUTS = [
    rollout(4, 0, 3, 5, 1.0),
    rollout(4, 1, 3, 2, 0.0),
    rollout(5, 0, 6, 4, 0.5, finished=False),
    rollout(5, 1, 6, 9, 0.5),
]


def packed(**options):
    choice = ObjectiveChoice(name="grpo", samples=2, max_new_tokens=16, **options)
    return PackedAnswers(choice, 24, ROLLOUTS, np.square, lambda row: [f"f:{row}"]), choice


def test_answers_are_packed_behind_their_prompts_and_each_token_knows_its_advantage():
    answers, _ = packed(weighting="dr_grpo")
    rows = answers.read_rows(range(len(answers)))
    placed = []
    for row, documents in enumerate(rows.documents):
        for start, end in pairwise(np.cumsum([0, *documents])):
            tokens, labels = rows.tokens[row, start:end], rows.labels[row, start:end]
            learnt = labels != -100
            assert (labels[learnt] == tokens[1:][learnt[:-1]]).all()
            assert not learnt[-1]
            columns = [rows.columns[name][row, start:end][learnt] for name in (ADVANTAGE, SAMPLED)]
            placed.append((int(tokens[-1]), int(learnt.sum()), *(c.tolist() for c in columns)))
    wanted = [
        (r.answer.tokens[0], len(r.answer.tokens), [a] * len(r.answer.tokens), pytest.approx(p))
        for r, a in zip(ROLLOUTS, [0.5, -0.5, 0, 0], strict=True)
        for p in [r.answer.log_probabilities]
    ]
    assert sorted(placed) == wanted
    again, open_ones = decode_rollouts(encode_rollouts(ROLLOUTS))
    assert not open_ones
    assert again == [
        Rollout(r.row, r.sample, r.prompt, again.answer, r.reward, r.scores)
        for r, again in zip(ROLLOUTS, again, strict=True)
    ]


def textbook(cfg, current, old, advantage, mask, reference, cap=None):
    """The loss of [answers, length] tokens, as trl's GRPOTrainer has it."""
    change = current - (current.detach() if old is None else old)
    if cfg.surrogate == "gspo":
        mean = (change * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        change = mean.expand_as(change)
    ratio = change.exp()
    if cfg.surrogate == "cispo":
        weight = ratio.detach().clamp(max=min(cap or 1e9, 1 + cfg.clip_high))
        loss = -weight * advantage[:, None] * current
        return (loss * mask).sum() / mask.sum()
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    ratio = ratio if cap is None else ratio.clamp(max=cap)
    loss = -torch.min(ratio * advantage[:, None], clipped * advantage[:, None])
    loss = loss + cfg.kl * ((reference - current).exp() - (reference - current) - 1)
    if cfg.weighting == "grpo":
        return ((loss * mask).sum(1) / mask.sum(1)).mean()
    if cfg.weighting == "dapo":
        return (loss * mask).sum() / mask.sum()
    return (loss * mask).sum() / (len(mask) * cfg.max_new_tokens)


@pytest.mark.parametrize("weighting", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("kl", [0.0, 0.04])
def test_losses_and_derivatives_are_the_papers(weighting, updates, kl):
    torch.manual_seed(0)
    cfg = ObjectiveChoice(
        name="grpo", weighting=weighting, updates=updates, kl=kl, max_new_tokens=12
    )
    lengths = torch.tensor([3, 11, 1, 7])
    mask = (torch.arange(11) < lengths[:, None]).float()
    current, old, reference = (-torch.rand(4, 11) * 3 for _ in range(3))
    old = current + 0.4 * torch.randn(4, 11) if updates > 1 else None
    rewards = np.array([[1.0, 0.0], [0.25, 1.0]])
    gain = torch.from_numpy(advantages(cfg, rewards).ravel()).float()
    expected_scores = current.clone().requires_grad_()
    cap = cfg.importance_cap if updates > 1 else None
    expected = textbook(cfg, expected_scores, old, gain, mask, reference, cap)
    expected.backward()

    chosen = mask.bool()
    weights = torch.cat([torch.full((n,), token_weight(cfg, n)) for n in lengths.tolist()])
    weights = weights / step_weight(cfg, int(lengths.sum()), 4)
    columns = {
        ADVANTAGE: gain[:, None].expand(4, 11)[chosen],
        SAMPLED: (current if old is None else old)[chosen],
        REFERENCE: reference[chosen],
    }
    scores = current[chosen].clone().requires_grad_()
    objective = PolicyGradient(weights, columns, cfg)
    parts = (slice(0, 8), slice(8, 22))  # as the head's chunks
    values = [objective(Scores(scores[part], scores[part] * 0), part) for part in parts]
    value = torch.stack(values).sum()
    value.backward()
    assert value.item() == pytest.approx(expected.item(), abs=3e-7)
    assert scores.grad == pytest.approx(expected_scores.grad[chosen], abs=1e-7)


TINY = {
    "vocab_size": 200, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip


def decoder(seed):
    model = Decoder(ModelConfig(**TINY))
    initialize_weights(model, seed)
    return model


def answer_scores(model, temperature):
    """[answers, longest] log-probabilities of ROLLOUTS, one after the other, from whole logits in
    float64."""
    longest = max(len(one.answer.tokens) for one in ROLLOUTS)
    scores = torch.zeros(len(ROLLOUTS), longest, dtype=torch.float64)
    for i, one in enumerate(ROLLOUTS):
        tokens, count = torch.tensor([*one.prompt, *one.answer.tokens]), len(one.answer.tokens)
        logits = model.logits(tokens[None])[0, -count - 1 : -1].double() / temperature
        scores[i, :count] = logits.log_softmax(-1).gather(1, tokens[-count:, None])[:, 0]
    return scores


@pytest.mark.parametrize(
    "options",
    [
        {"weighting": "dapo", "kl": 0.1, "temperature": 1.5},
        {"weighting": "grpo", "updates": 2, "importance_cap": 50.0},
        {"weighting": "dr_grpo", "kl": 0.1, "updates": 2, "clip_high": 0.28},
        {"weighting": "grpo", "surrogate": "gspo", "updates": 2, "clip_high": 0.3},
        {"weighting": "grpo", "surrogate": "gspo"},
        {"weighting": "dapo", "surrogate": "cispo", "updates": 2, "clip_high": 0.1},
        {"weighting": "dapo", "surrogate": "cispo"},
    ],
    ids=lambda options: f"{options['weighting']} {options.get('surrogate', '')}",
)
def test_every_gradient_is_that_of_whole_logits(options):
    answers, cfg = packed(**options)
    model, other = decoder(1), decoder(2)
    for one in (model, other):
        one.lm_head.temperature = cfg.temperature
        one.lm_head.chunk_mib = 1 / 64
    device = torch.device("cpu")
    rows = Assembler(24, 1, len(answers), 0, 1, device, number_documents=cfg.compares_answers)
    batch = rows.assemble(answers.read_rows(range(len(answers))))
    reference = ReferenceModel(other, WeightSource(), stays_gathered=True) if cfg.kl else None
    parts = (model, *[None] * 6)
    step = RolloutForwardBackward(*parts, choice=cfg, reference=reference)
    result = step.compute(answers.plan(1, 0, 2, {}), batch)

    whole = decoder(1)
    tokens = [len(one.answer.tokens) for one in ROLLOUTS]
    mask = torch.arange(max(tokens)) < torch.tensor(tokens)[:, None]
    old = torch.zeros(mask.shape, dtype=torch.float64)
    for row, one in zip(old, ROLLOUTS, strict=True):
        row[: len(one.answer.tokens)] = torch.tensor(one.answer.log_probabilities)
    gain = torch.from_numpy(advantages(cfg, np.array([[1.0, 0.0], [0.5, 0.5]])).ravel())
    current = answer_scores(whole, cfg.temperature)
    with torch.no_grad():
        far = answer_scores(other, cfg.temperature)
    several = cfg.updates > 1
    cap = cfg.importance_cap if several else None
    loss = textbook(cfg, current, old if several else None, gain, mask, far, cap)
    loss.backward()
    assert result.loss.item() == pytest.approx(loss.item(), rel=2e-6, abs=1e-7)
    exact = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        error = (parameter.grad - exact[name].grad).norm() / exact[name].grad.norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("keys", [{"server": "http://localhost"}, {"ahead": 1}])
def test_tokens_that_were_sampled_elsewhere_have_truncated_weights(keys):
    cfg = ObjectiveChoice(name="grpo", importance_cap=2.0, **keys)
    columns = {
        ADVANTAGE: torch.ones(3),
        SAMPLED: torch.tensor([-1.0, -5.0, -1.5]),
        REFERENCE: torch.zeros(3),
    }
    scores = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    objective = PolicyGradient(torch.ones(3), columns, cfg)
    objective(Scores(scores, scores), slice(0, 3)).backward()
    assert scores.grad.tolist() == pytest.approx([-1.0, -2.0, -(np.exp(-0.5))])


def test_groups_of_equal_rewards_teach_nothing():
    cfg = ObjectiveChoice(name="grpo")
    gains = advantages(cfg, np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 0.5]]))
    assert gains[0].tolist() == [0, 0, 0]
    assert gains[1] == pytest.approx([-1, 1, 0], rel=1e-3)


# --- runs -----------------------------------------------------------------------------------------

GRPO = [
    "objective=grpo",
    'objective.rewards=[{name: regex, pattern: "[a-z]"},{name: length, max: 4, unit: tokens}]',
    "data.path=demo:sums", "tokenizer.path=demo:bytes", "objective.max_new_tokens=6",
    "objective.samples=4", "batch.rows=4", "batch.micro_rows=2", "train.steps=3",
    "schedule=constant",
]  # fmt: skip
FIGURES = ["loss", "reward", "reward/length", "answer_tokens", "entropy", "grad_norm"]


def said(run):
    lines = (run.folder / "samples.jsonl").read_text().splitlines()
    return [(line["step"], line["text"], line["reward"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_any_ranks_make_the_same_answers_and_learn_the_same(world, tmp_path):
    layouts = [(1, []), (4, ["sharding=hsdp", "sharding.replicas=2"])]
    layouts += [(2, ["sharding.tensor=2"]), (2, ["sharding.context=2"])]
    first, *others = [
        world.train(tmp_path / f"{i}", *GRPO, f"data.cache={tmp_path / 'c'}", *more, ranks=ranks)
        for i, (ranks, more) in enumerate(layouts)
    ]
    assert first.metrics[-1]["sampler_difference"] < 1e-5
    assert min(first.column("reward_std")) > 0 < min(first.column("grad_norm"))
    assert 0 < first.metrics[0]["truncated_share"] <= 1
    for run in others:
        assert said(run) == said(first)
        for name in FIGURES:
            assert run.column(name) == pytest.approx(first.column(name), rel=2e-4, abs=2e-6), name


@pytest.mark.slow
def test_a_run_goes_on_amid_answers_that_were_made_together(world, tmp_path):
    keys = [*GRPO, "objective.updates=2", "train.steps=4", f"data.cache={tmp_path / 'c'}"]
    keys += ["checkpoint.every=1", "checkpoint.keep=9", "objective.weighting=dr_grpo"]
    whole = world.train(tmp_path / "whole", *keys)
    assert whole.column("staleness") == [0, 1, 0, 1]
    middle = whole.folder / "checkpoints" / "step-00000003"
    rest = world.train(tmp_path / "rest", *keys, f"checkpoint.resume={middle}", ranks=2)
    assert said(rest) == [one for one in said(whole) if one[0] == 4]
    for name in (*FIGURES, "staleness"):
        expected = whole.column(name)[3:]
        assert rest.column(name) == pytest.approx(expected, rel=2e-4, abs=2e-6), name


@pytest.mark.slow
def test_the_base_of_adapters_is_what_the_divergence_is_from(world, tmp_path):
    keys = [*GRPO, "adapter=lora", "objective.kl=0.1", f"data.cache={tmp_path / 'c'}"]
    run = world.train(tmp_path / "run", *keys, "optim.lr=0.1", "objective.temperature=1.5")
    assert run.column("kl")[0] == 0
    assert run.column("kl")[-1] > 0
    assert run.column("sampler_difference") == pytest.approx([0, 0, 0], abs=1e-5)


@pytest.fixture(scope="module")
def model(world, tmp_path_factory):
    """A folder of a small model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    words = ["data.path=demo:sums", "tokenizer.path=demo:bytes", "train.steps=1"]
    world.train(folder / "run", *words, "checkpoint.export_hf=true")
    return folder / "run/hf"


@pytest.mark.slow
@pytest.mark.further
def test_a_second_model_is_what_the_divergence_is_from_and_stays_what_it_was(
    world, model, tmp_path
):
    keys = [*GRPO, "objective.kl=0.1", f"data.cache={tmp_path / 'c'}", "optim.lr=0.05"]
    keys += [f"model.init_from={model}", "checkpoint.every=2", "checkpoint.keep=9"]
    start = world.train(tmp_path / "start", *keys)
    assert "from start; kl 0.1" in start.out
    assert start.column("kl")[0] == 0
    assert start.column("kl")[-1] > 0
    shared = world.train(tmp_path / "shared", *keys, "sharding.tensor=2", ranks=2)
    assert shared.column("kl") == pytest.approx(start.column("kl"), rel=2e-3, abs=1e-6)

    lora = [*keys, "adapter=lora", "train.steps=2"]  # whose base is the same
    based = world.train(tmp_path / "based", *lora)
    in_memory = world.train(tmp_path / "beside", *lora, f"objective.reference={model}", ranks=2)
    for name in ("kl", "loss"):
        expected = based.column(name)
        assert in_memory.column(name) == pytest.approx(expected, rel=1e-4, abs=1e-7), name

    resumed = [*keys, f"checkpoint.resume={start.folder / 'checkpoints' / 'step-00000002'}"]
    rest = world.train(tmp_path / "rest", *resumed)
    for name in ("kl", *FIGURES):
        assert rest.column(name) == start.column(name)[2:]
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    moved_rest = world.train(tmp_path / "moved", *resumed, f"model.init_from={moved}")
    assert moved_rest.column("kl") == rest.column("kl")
    resumed += [f"model.init_from={start.folder}"]
    said = world.train(tmp_path / "other", *resumed, code=2).err
    assert "the reference is another one" in said

    other_folder = [*lora, f"objective.reference={moved}", f"model.init_from={moved}"]
    other_folder += [f"checkpoint.resume={in_memory.folder}", "train.steps=3"]
    assert len(world.train(tmp_path / "next", *other_folder, ranks=2).metrics) == 1
    other_folder[-4] = f"objective.reference={start.folder}"
    said = world.train(tmp_path / "another", *other_folder, ranks=2, code=2).err
    assert "the reference is another one" in said


@pytest.mark.slow
@pytest.mark.further
def test_a_reference_of_random_weights_is_divided_over_matrices_and_rows(world, tmp_path):
    keys = [*GRPO, "objective.kl=0.1", f"data.cache={tmp_path / 'c'}", "train.steps=2"]
    alone = world.train(tmp_path / "alone", *keys)
    layout = ["sharding.tensor=2", "sharding.context=2"]
    divided = world.train(tmp_path / "divided", *keys, *layout, ranks=4)
    for name in ("loss", "kl", "grad_norm"):
        expected = alone.column(name)
        assert divided.column(name) == pytest.approx(expected, rel=2e-4, abs=2e-6), name


REFUSED = {
    "objective.rewards=[]": "objective.rewards=[exact]",
    "sharding.pipeline=2": "sharding.pipeline=1",
    "data.streaming=true": "data.streaming=false",
    "data.packing=best_fit": "Leave it out",
    "data.too_long=truncate": "data.too_long=drop",
    "data.validation=demo:backwards/heldout": "data.validation=null",
    "batch.seq_len=200": "batch.seq_len=512",
    "loss.z_loss=0.1": "objective=sft",
    "sharding.expert=2": "sharding.expert=1",
    "objective.kl=0.1": "",
    "objective.beta=0.2": "objective=dpo",
}


@pytest.mark.slow
def test_what_answers_cannot_do_is_refused_before_anything_starts(capsys):
    keys = ["data.path=demo:sums", "tokenizer.path=demo:bytes", "objective=grpo"]
    assert main([*keys, *REFUSED]) == 2
    message = capsys.readouterr().err
    for named in REFUSED.values():
        assert named in message


MISUSED = [
    (["objective.samples=4"], "objective=grpo"),
    (["objective=grpo", "objective.kl=0.1", "objective.reference=none"], "objective.kl=0"),
    (["objective=grpo", "objective.reference=nowhere"], "objective.kl=0.01"),
    (["objective=grpo", "objective.kl=1", "objective.reference=nowhere"], "there is no such"),
]


@pytest.mark.parametrize(("typed", "named"), MISUSED, ids=lambda x: None)
def test_keys_of_answers_count_only_with_what_they_are_for(capsys, typed, named):
    keys = ["data.path=demo:sums", "tokenizer.path=demo:bytes", "objective.rewards=[exact]"]
    assert main([*keys, *typed]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.further
def test_the_quickstart_of_rewards_trains_twice_and_compares_rewards(
    world, tmp_path, monkeypatch, capsys
):
    def start_ranks(_cfg, words):
        return world.command("train", *words)[0].code

    monkeypatch.setattr(quickstart_rl, "start_ranks", start_ranks)
    assert main(["quickstart", "task=sums", "steps=3", f"root={tmp_path}"]) == 0
    assert "reward in the first third" in capsys.readouterr().out
    assert (tmp_path / "sums-rewarded" / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_plan_counts_what_answers_take_and_the_rows_that_they_fill():
    keys = ["model=qwen3_0_6b", "model.vocab_size=151936", "objective=grpo", "plan.world_size=8"]
    keys += ["objective.rewards=[exact]", "objective.max_new_tokens=768", "plan.gpu=h100"]
    plan = planned(*keys, "batch.rows=64", "batch.seq_len=2048", "tokenizer.path=demo:bytes")
    rollouts = plan.rollouts
    assert (rollouts.answers, rollouts.at_once, plan.rows) == (512, 64, 256)
    # 28 blocks × 8 kv heads × 128 channels × keys and values × 2 bytes, for 1,024 tokens
    assert rollouts.cache == 64 * 1024 * 28 * 8 * 128 * 2 * 2
    assert rollouts.weights == pytest.approx(2 * 596_049_920)
    assert 0.5 < rollouts.seconds[0] < 10
    # 768 tokens, 28 blocks, and 1.2 ms to launch the kernels of one
    assert rollouts.seconds[1] == pytest.approx(768 * 28 * 1.2e-3)
    assert planned(*keys[:2], "plan.world_size=8", "plan.gpu=h100").rollouts is None

    on_ranks = ["launch.rollout_ranks=2", "batch.rows=64", "batch.seq_len=2048"]
    of_own = planned(*keys, *on_ranks, "precision.master_dtype=float32")
    assert (of_own.rollouts.ranks, of_own.rollouts.at_once) == (2, 64)
    assert of_own.rollouts.seconds[0] == pytest.approx(4 * rollouts.seconds[0])
    assert of_own.rollouts.stored == pytest.approx(4 * 596_049_920 / 2)

    near = planned(*keys, "batch.rows=64", "batch.seq_len=2048", "objective.kl=0.01")
    more = near.memory.peak.total - plan.memory.peak.total
    assert more == pytest.approx(2 * 596_049_920 / 8, rel=0.05), "a shard of a second model"
    assert near.fast.compute > 1.2 * plan.fast.compute
    assert planned(*keys, "objective.kl=0.01", "adapter=lora").fast.forwards > 0
