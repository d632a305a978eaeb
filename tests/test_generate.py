"""Text from a model: greedy as transformers, sampled by seed, through the command line."""

import pytest
import torch

from fsdp_trainer.config.schema import GenerateConfig
from fsdp_trainer.generate import Speaker, continue_tokens, sample


@pytest.fixture(scope="module")
def run(world, inputs, tmp_path_factory):
    return world.train(
        tmp_path_factory.mktemp("generate") / "run", *(f"{k}={v}" for k, v in inputs.items()), "train.steps=5", "checkpoint.export_hf=true"
    ).folder


def test_greedy_generation_is_that_of_transformers_and_of_full_recomputation(run):
    transformers = pytest.importorskip("transformers")
    speaker = Speaker.load(run)
    prompt = speaker.tokenizer.encode("<|im_start|>user\nabc")
    ours = list(continue_tokens(speaker.model, prompt, set(), GenerateConfig(max_tokens=40)))
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()
    again = list(prompt)
    for _ in range(40):
        again.append(int(speaker.model.logits(torch.tensor([again]))[0, -1].argmax()))
    assert len(ours) == 40 and ours == again[len(prompt) :] == theirs


def test_generation_ends_at_a_stop_token_and_at_the_context(run):
    speaker = Speaker.load(run)
    prompt = speaker.tokenizer.encode("abc")
    free = list(continue_tokens(speaker.model, prompt, set(), GenerateConfig(max_tokens=30)))
    assert list(continue_tokens(speaker.model, prompt, {free[5]}, GenerateConfig(max_tokens=30))) == free[: free.index(free[5])]
    room = speaker.model.config.max_position_embeddings - 2000
    assert len(list(continue_tokens(speaker.model, prompt * 700, set(), GenerateConfig(max_tokens=10_000)))) < room


def test_sampling_depends_on_the_seed_and_keeps_to_the_nucleus():
    logits = torch.tensor([2.0, 1.0, 0.0, -9.0])
    draws = [sample(logits, 1.0, 0.9, torch.Generator().manual_seed(i)) for i in range(200)]
    assert set(draws) == {0, 1, 2} - ({2} if torch.softmax(logits, -1)[:2].sum() >= 0.9 else set())
    assert draws == [sample(logits, 1.0, 0.9, torch.Generator().manual_seed(i)) for i in range(200)]
    assert {sample(logits, 1.0, 0.01, torch.Generator().manual_seed(i)) for i in range(50)} == {0}
    assert sample(logits, 0, 1.0, torch.Generator()) == 0


def test_the_command_answers_the_same_from_run_checkpoint_and_export(run, world):
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    said = [world.command("generate", f"source={source}", "prompt=abc", "max_tokens=20")[0].out for source in (run, checkpoint)]
    assert said[0] == said[1] and said[0].endswith("\n")
    raw = world.command("generate", f"source={run}", "prompt=abc", "raw=true", "max_tokens=20", "temperature=1", "seed=1")[0].out
    assert (
        raw
        == world.command("generate", f"source={run}", "prompt=abc", "raw=true", "max_tokens=20", "temperature=1", "seed=1")[0].out
        != said[0]
    )


def test_no_source_and_a_wrong_one_are_refused(world, tmp_path):
    assert "source" in world.command("generate", "prompt=x", code=2)[0].err
    assert "source" in world.command("generate", f"source={tmp_path}/none", "prompt=x", code=2)[0].err
    assert world.command("generate", f"source={tmp_path}", "prompt=x", code=2)[0].err


def test_a_system_turn_reaches_a_template_that_knows_none(run):
    speaker = Speaker.load(run)
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    speaker.template = type(speaker.template)("refusing", refusing, speaker.tokenizer.special)
    told = []
    speaker.say = lambda text, cfg: told.append(text) or iter(())
    list(speaker.answer([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], GenerateConfig()))
    assert told == ["be brief\n\nhi"]
