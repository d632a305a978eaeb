"""Learning from the model's own answers: prompts as data, losses as the papers write them, a second
model that answers stay near to, and what a plan counts."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from named_runs import GRPO
from recipe import planned
from refused import refusal
from small_decoder import small_decoder
from stored import assert_near, checkpoint
from texts import function, turn
from world import cli, read_lines, split

from fsdp_trainer.apps.quickstart import quickstart_rl, quickstart_search, quickstart_tools
from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.data.files.sources import Record
from fsdp_trainer.data.records.prompts import make_prompt_reader
from fsdp_trainer.methods.policy_gradient import RolloutForwardBackward
from fsdp_trainer.methods.reference_model import ReferenceModel
from fsdp_trainer.models.from_config.setup import WeightSource
from fsdp_trainer.rl.rollouts.rollout import EpisodeFacts, Rollout, decode_rollouts, encode_rollouts
from fsdp_trainer.rl.rollouts.sampler import SampledAnswer
from fsdp_trainer.rl.rounds.answers import PackedAnswers, advantages, turn_advantages
from fsdp_trainer.rl.rounds.rollout_source import turns_of_prompt
from fsdp_trainer.training.batches import Assembler, BatchOptions

TOOL = function("weather", parameters={})
ROWS = yaml.safe_load("""
- [{question: "1+1?", solution: "one, two", level: 3}, "1+1?", "one, two"]
- - messages: [{role: system, content: be brief}, {role: user, content: hi}]
    answer: 7
    id: a
  - hi
  - "7"
- [{prompt: "Sort [2, 1]", tests: ["f([2, 1]) == [1, 2]"]}, "Sort [2, 1]", null]
- [{prompt: p, chosen: good, rejected: bad}, p, good]
- [{prompt: "Rain?", tools: [{type: function, function: {name: weather}}]}, "Rain?", null]
""")


@pytest.mark.parametrize("columns, prompt, reference", ROWS, ids=lambda x: None)
def test_rows_of_many_formats_are_prompts_and_keep_their_columns(columns, prompt, reference):
    reader = make_prompt_reader(columns, "auto", None, "f")
    stored = json.loads(reader.read(Record(columns, ("f", 1))).as_json)
    messages = columns.get("messages", [turn("user", prompt)])
    wanted = {"prompt": prompt, "reference": reference, "row": columns, "messages": messages}
    assert stored == wanted | {"tools": columns.get("tools")}


def test_a_prompt_without_an_answer_keeps_its_system_text_and_tools():
    columns = {"q": "Rain?", "sys": "be brief", "functions": json.dumps([TOOL])}
    fields = {"prompt": "q", "system": "sys", "tools": "functions"}
    question = make_prompt_reader(columns, "auto", fields, "f").read(Record(columns, ("f", 1)))
    assert question.messages == [
        turn("system", "be brief"),
        turn("user", "Rain?"),
    ]
    assert question.tools == [TOOL]


def test_text_without_a_prompt_is_refused():
    assert "the data cannot be used" in refusal(
        make_prompt_reader, {"text": "once"}, "auto", None, "f"
    )


def test_preview_shows_prompts_with_their_references(tmp_path):
    keys = "objective=grpo objective.rewards=[exact] data.path=demo:sums"
    place = f"tokenizer.path=demo:bytes data.cache={tmp_path} preview.rows=2"
    said = cli("preview", keys, place).out
    assert said.count("reference answer: ") == 2
    assert "assistant" in said
    assert "[[" not in said.split("row 0")[1], "nothing of a prompt is learnt"


# --- the loss -------------------------------------------------------------------------------------


def rollout(row, sample, prompt, turns, reward, by_turn=(), finished=True):
    """Return a rollout with random tokens. turns: lengths, the model's and the environment's."""
    generator = np.random.default_rng(10 * row + sample)
    tokens = generator.integers(0, 200, sum(turns)).tolist()
    own = np.concatenate([np.full(n, i % 2 == 0) for i, n in enumerate(turns)])
    chosen = np.where(own, -generator.random(len(own)), 0).astype(np.float32).tolist()
    several = tuple(turns) if len(turns) > 1 else ()
    failure = "step: lost" if math.isnan(reward) else None
    facts = EpisodeFacts(sample, 0.5, failure) if several or failure else None
    answer = SampledAnswer(tokens, chosen, finished, 3, several)
    return Rollout(row, sample, [row + 1] * prompt, answer, reward, [reward], tuple(by_turn), facts)


ROLLOUTS = yaml.safe_load("""
# row, sample, tokens of the prompt, of turns, the reward, rewards of turns, whether it is finished
answers:
- [4, 0, 3, [5], 1.0]
- [4, 1, 3, [2], 0.0]
- [5, 0, 6, [4], 0.5, [], false]
- [5, 1, 6, [9], 0.5]
- [6, 0, 4, [3], 0.0]
- [6, 1, 4, [6], 0.3]
episodes:
- [4, 0, 3, [5, 2, 4], 1.0, [0.2, 0.8]]
- [4, 1, 3, [2], 0.0]
- [5, 0, 6, [3, 4, 2, 1, 2], 0.5]
- [5, 1, 6, [9, 2, 1], .nan]
- [6, 0, 6, [4], 0.0]
- [6, 1, 6, [4, 3, 2], 0.7]
""")
ANSWERS, EPISODES = ([rollout(*each) for each in ROLLOUTS[kind]] for kind in ROLLOUTS)
"""Two rollouts of each of three prompts. Of one prompt one has failed, and nothing is learnt."""


def packed(rollouts, **options):
    choice = ObjectiveChoice(name="grpo", samples=2, max_new_tokens=16, **options)
    return PackedAnswers(choice, 24, rollouts, np.square, lambda row: [f"f:{row}"]), choice


@pytest.mark.parametrize("rollouts", [ANSWERS, EPISODES], ids=["answers", "episodes"])
def test_rollouts_survive_a_checkpoint(rollouts):
    again, open_ones = decode_rollouts(encode_rollouts(rollouts))
    assert not open_ones
    for one, other in zip(rollouts, again, strict=True):
        assert (other.row, other.sample, other.prompt) == (one.row, one.sample, one.prompt)
        assert (other.answer, other.episode) == (one.answer, one.episode)
        assert (other.turn_rewards, other.is_used) == (one.turn_rewards, one.is_used)
        assert other.scores == pytest.approx(one.scores, nan_ok=True)


def test_answers_are_compared_with_the_others_of_their_prompt():
    rewards = np.array([[1.0, 1.0, 1.0], [0.0, 0.4, 0.2]])
    gains = advantages(ObjectiveChoice(name="grpo"), rewards)
    assert gains[0].tolist() == [0, 0, 0], "equal ones teach nothing"
    assert gains[1] == pytest.approx([-1, 1, 0], rel=1e-3)
    centred = advantages(ObjectiveChoice(name="grpo", weighting="dr_grpo"), rewards)
    assert centred[1] == pytest.approx([-0.2, 0.2, 0])


def test_rewards_of_turns_are_normalised_in_the_group_and_discounted():
    cfg = ObjectiveChoice(name="grpo", samples=3, discount=0.5)
    group = [
        rollout(1, 0, 3, [2, 1, 2, 1, 2], 6.0, (1.0, 2.0, 3.0)),
        rollout(1, 1, 3, [2, 1, 2], 4.0, (0.0, 4.0)),
        rollout(1, 2, 3, [2], math.nan),
    ]
    every = np.array([1.0, 2.0, 3.0, 0.0, 4.0])
    n = (every - every.mean()) / (every.std(ddof=1) + 1e-4)
    first, second, failed = turn_advantages(cfg, group)
    assert first == pytest.approx([n[0] + 0.5 * (n[1] + 0.5 * n[2]), n[1] + 0.5 * n[2], n[2]])
    assert second == pytest.approx([n[3] + 0.5 * n[4], n[4]])
    assert failed.tolist() == [0]


def test_one_reward_counts_for_all_turns_and_a_failed_rollout_for_none():
    cfg = ObjectiveChoice(name="grpo", samples=3)
    group = [rollout(1, i, 3, [2, 1, 2], r) for i, r in enumerate((1.0, math.nan, 3.0))]
    first, failed, last = turn_advantages(cfg, group)
    assert first == pytest.approx([-(0.5**0.5)] * 2, rel=1e-3)
    assert last == pytest.approx([0.5**0.5] * 2, rel=1e-3)
    assert failed.tolist() == [0, 0]
    alone = [rollout(1, i, 3, [2], r) for i, r in enumerate((1.0, math.nan, math.nan))]
    assert [gain.tolist() for gain in turn_advantages(cfg, alone)] == [[0]] * 3


def textbook(cfg, current, old, advantage, mask, reference):
    """The loss of [answers, length] tokens, as trl's GRPOTrainer has it."""
    cap = cfg.importance_cap if cfg.updates > 1 else math.inf
    change = current - (old if cfg.updates > 1 else current.detach())
    if cfg.surrogate == "gspo":
        mean = (change * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        change = mean.expand_as(change)
    ratio = change.exp()
    if cfg.surrogate == "cispo":
        weight = ratio.detach().clamp(max=min(cap, 1 + cfg.clip_high))
        loss = -weight * advantage * current
        return (loss * mask).sum() / mask.sum()
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = -torch.min(ratio.clamp(max=cap) * advantage, clipped * advantage)
    if (cfg.server or cfg.ahead) and cfg.updates == 1:  # truncated importance sampling
        loss = loss * (current.detach() - old).exp().clamp(max=cfg.importance_cap)
    loss = loss + cfg.kl * ((reference - current).exp() - (reference - current) - 1)
    if cfg.weighting == "grpo":
        return ((loss * mask).sum(1) / mask.sum(1)).mean()
    if cfg.weighting == "dapo":
        return (loss * mask).sum() / mask.sum()
    return (loss * mask).sum() / (len(mask) * cfg.max_new_tokens)


def token_scores(model, rollouts, temperature):
    """[rollouts, longest] log-probabilities of their tokens, from whole logits in float64."""
    scores = torch.zeros(len(rollouts), 16, dtype=torch.float64)
    for i, one in enumerate(rollouts):
        tokens, count = torch.tensor([*one.prompt, *one.answer.tokens]), len(one.answer.tokens)
        logits = model.logits(tokens[None])[0, -count - 1 : -1] / temperature
        scores[i, :count] = logits.log_softmax(-1).gather(1, tokens[-count:, None])[:, 0]
    return scores


def by_token(answers):
    """Return of each token of the used rollouts: is it the model's, its log-probability, and its
    advantage."""
    mask, old, gain = torch.zeros(3, len(ANSWERS), 16, dtype=torch.float64)
    for i, one in enumerate(answers.rollouts):
        old[i, : len(one.answer.tokens)] = torch.tensor(one.answer.log_probabilities)
        for own, advantage in zip(one.answer.own_turns, answers.advantages[i], strict=True):
            mask[i, own] = 1
            gain[i, own] = advantage
    return mask, old, gain


OPTIONS = yaml.safe_load("""
- {weighting: dapo, kl: 0.1, temperature: 1.5}
- {weighting: dapo, updates: 2, clip_high: 0.3}
- {weighting: grpo, updates: 2, importance_cap: 50.0}
- {weighting: grpo, kl: 0.04, updates: 2, clip_high: 0.3}
- {weighting: dr_grpo, kl: 0.1, updates: 2, clip_high: 0.28}
- {weighting: dr_grpo}
- {weighting: dapo, surrogate: cispo, updates: 2, clip_high: 0.1}
- {weighting: dapo, surrogate: cispo}
- {weighting: dapo, importance_cap: 2.0, server: "http://localhost"}
- {weighting: grpo, importance_cap: 1.2, ahead: 1, kl: 0.04}
""")
GSPO = yaml.safe_load("""
- {weighting: grpo, surrogate: gspo, updates: 2, clip_high: 0.3}
- {weighting: grpo, surrogate: gspo}
""")
"""Its ratio is one of an answer, so all tokens of an answer have the same advantage."""


@pytest.mark.parametrize(
    "rollouts, options",
    [(ANSWERS, each) for each in OPTIONS + GSPO] + [(EPISODES, each) for each in OPTIONS],
    ids=lambda given: " ".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_every_gradient_is_that_of_whole_logits_in_float64(rollouts, options):
    answers, cfg = packed(rollouts, **options)
    model, other = small_decoder(1), small_decoder(2)
    for one in (model, other):
        one.lm_head.temperature = cfg.temperature
        one.lm_head.chunk_mib = 1 / 64
    device = torch.device("cpu")
    rows = Assembler(
        24, 1, BatchOptions(len(answers), 0, 1, device, number_documents=cfg.compares_answers)
    )
    batch = rows.assemble(answers.read_rows(range(len(answers))))
    reference = ReferenceModel(other, WeightSource(), stays_gathered=True) if cfg.kl else None
    step = RolloutForwardBackward(model, *[None] * 6, choice=cfg, reference=reference)
    result = step.compute(answers.plan(1, 0, 2, {}), batch)

    exact, far = small_decoder(1).double(), small_decoder(2).double()
    current = token_scores(exact, rollouts, cfg.temperature)
    with torch.no_grad():
        near = token_scores(far, rollouts, cfg.temperature)
    mask, old, gain = by_token(answers)
    used = torch.tensor([one.is_used for one in rollouts])
    loss = textbook(cfg, *(each[used] for each in (current, old, gain, mask, near)))
    loss.backward()
    assert result.loss.item() == pytest.approx(loss.item(), rel=2e-6, abs=1e-7)
    wanted = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        error = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert error < 1e-5, name


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_learns_from_its_answers_and_a_report_shows_them(ledger, tmp_path):
    run = ledger.run("grpo")
    assert run.metrics[-1]["sampler_difference"] < 1e-5
    assert min(run["reward_std"]) > 0 < min(run["grad_norm"])
    assert 0 < run.metrics[0]["truncated_share"] <= 1
    page = tmp_path / "page.html"
    cli("report", f"source={run.folder} out={page}")
    said = read_lines(run.folder / "samples.jsonl")[-1]
    for part in ("What the model said", "reward/regex", f'data-v="{said["reward"]}"'):
        assert part in page.read_text()
    question, opening = said["prompt_turns"]
    assert question.endswith("<|im_end|>")
    assert opening.startswith("<|im_start|>")


def test_a_question_is_a_turn_of_its_own_where_only_answers_end_in_a_stop_token():
    texts = ["<s>[INST] a[/INST]", " b", "</s>", "[INST] c[/INST]", "<｜User｜>a<｜Assistant｜>b"]
    tokenizer = SimpleNamespace(stop_ids={2}, decode=lambda ids, skip_special: "".join(
        texts[i] for i in ids))  # fmt: skip
    assert turns_of_prompt([0, 1, 2, 3], tokenizer) == [texts[0], "b</s>", texts[3]]
    assert turns_of_prompt([4], tokenizer) == ["<｜User｜>a", "<｜Assistant｜>b"]


def test_a_second_model_is_what_the_divergence_is_from_and_stays_what_it_was(
    ledger, train, tmp_path
):
    model = ledger.run("plain").folder / "hf"
    keys = [*GRPO, f"model.init_from={model} objective.kl=0.1 optim.lr=0.05"]
    start = train("start", *keys, "checkpoint.every=2 checkpoint.keep=9")
    assert "from start; kl 0.1" in start.out
    assert start["kl"][0] == 0
    assert start["kl"][-1] > 0

    lora = [*keys, "adapter=lora objective.temperature=1.5 train.steps=2"]  # whose base is the same
    based = train("based", *lora)
    assert based["sampler_difference"] == pytest.approx([0, 0], abs=1e-5)
    in_memory = train("beside", *lora, f"objective.reference={model}", ranks=2)
    assert_near(in_memory, based, "kl", "loss", rel=1e-4, abs=1e-7)

    moved = shutil.copytree(model, tmp_path / "elsewhere")
    resumed = [*keys, f"checkpoint.resume={checkpoint(start, 2)}"]
    rest = train("moved", *resumed, f"model.init_from={moved}")
    for name in ("kl", "loss", "reward", "grad_norm"):
        assert rest[name] == start[name][2:]
    other = f"model.init_from={start.folder}"
    assert "the reference is another one" in train("other", *resumed, other, code=2).err
    next_step = [*lora, f"objective.reference={start.folder} train.steps=3"]
    said = train("beside", *next_step, ranks=2, code=2).err
    assert "the reference is another one" in said


@pytest.fixture
def quickstart(world, tmp_path, monkeypatch):
    """Return a function that trains as the verb does, in this pool of ranks, and what it says."""

    def say(*words):
        return cli("quickstart", *words, f"root={tmp_path}").out

    def start_ranks(_cfg, words):
        return world.command("train", *words)[0].code

    monkeypatch.setattr(quickstart_rl, "start_ranks", start_ranks)
    for task in (quickstart_tools, quickstart_search):
        monkeypatch.setattr(task, "ROWS", 60)
    return say


def test_the_quickstart_of_rewards_trains_twice_and_compares_rewards(quickstart, tmp_path):
    assert "reward in the first third" in quickstart("task=sums steps=3")
    assert (tmp_path / "sums-rewarded/hf/model.safetensors").is_file()


def test_the_quickstart_of_tools_trains_twice_and_asks_the_exported_model(quickstart, tmp_path):
    said = quickstart("task=tools steps=2 questions=4")
    assert "before rewards: 0 of 4 held-out sums right" in said
    assert "asked of the exported folder" in said
    rows = read_lines(tmp_path / "tools-data/chats.jsonl")
    assert any("tool_calls" in turn for row in rows for turn in row["messages"])


def test_the_quickstart_of_search_asks_the_exported_model_for_held_out_answers(
    quickstart, tmp_path
):
    said = quickstart("task=search steps=2 questions=4")
    assert "before training: " in said
    assert "of 4, by the exported folder, e.g. '" in said
    pairs = {tuple(row.values()) for row in read_lines(tmp_path / "search-data/questions.jsonl")}
    assert len(pairs) == 60
    assert not pairs & {quickstart_search.pair(60 + i) for i in range(4)}


def test_a_plan_counts_what_answers_take_and_the_rows_that_they_fill():
    model = split(["model=qwen3_0_6b model.vocab_size=151936 plan.world_size=8 plan.gpu=h100"])
    grpo = "tokenizer.path=demo:bytes objective=grpo objective.rewards=[exact]"
    keys = split([*model, grpo, "objective.max_new_tokens=768 batch.rows=64 batch.seq_len=2048"])
    plan = planned(*keys)
    rollouts = plan.rollouts
    assert (rollouts.answers, rollouts.at_once, plan.rows) == (512, 64, 256)
    # 28 blocks × 8 kv heads × 128 channels × keys and values × 2 bytes, for 1,024 tokens
    assert rollouts.cache == 64 * 1024 * 28 * 8 * 128 * 2 * 2
    assert rollouts.weights == pytest.approx(2 * 596_049_920)
    assert 0.5 < rollouts.seconds[0] < 10
    # 768 tokens, 28 blocks, and 1.2 ms to launch the kernels of one
    assert rollouts.seconds[1] == pytest.approx(768 * 28 * 1.2e-3)
    assert planned(*model).rollouts is None

    of_own = planned(*keys, "launch.rollout_ranks=2", "precision.master_dtype=float32").rollouts
    assert (of_own.ranks, of_own.at_once) == (2, 64)
    assert of_own.seconds[0] == pytest.approx(4 * rollouts.seconds[0])
    assert of_own.stored == pytest.approx(4 * 596_049_920 / 2)

    near = planned(*keys, "objective.kl=0.01")
    more = near.memory.peak.total - plan.memory.peak.total
    gathered = 2 * 596_049_920
    assert more == pytest.approx(gathered / 8 + gathered, rel=0.05), "and of this size it stays"
    assert near.fast.forwards > 0.2 * plan.fast.compute
    assert planned(*keys, "objective.kl=0.01", "adapter=lora").fast.forwards > 0

    turns = planned(*keys, "objective.environment=calculator", "objective.turns=2").rollouts
    assert turns.seconds[1] == pytest.approx(2 * rollouts.seconds[1])
    assert turns.cache == pytest.approx(rollouts.cache * (256 + 2 * 768) / 1024)
