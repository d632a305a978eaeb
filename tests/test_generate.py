"""Text from a model: greedy as transformers, sampled by seed, through the command line."""

import shutil

import pytest
import torch
from world import read_lines

from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.generate import Speaker
from fsdp_trainer.models.decoding import continue_tokens, sample


@pytest.fixture(scope="module")
def run(world, inputs, tmp_path_factory):
    return world.train(
        tmp_path_factory.mktemp("generate") / "run",
        *(f"{k}={v}" for k, v in inputs.items()),
        "train.steps=5",
        "checkpoint.export_hf=true",
    ).folder


def test_greedy_generation_is_that_of_transformers_and_of_full_recomputation(run):
    transformers = pytest.importorskip("transformers")
    speaker = Speaker.load(run)
    prompt = speaker.tokenizer.encode("<|im_start|>user\nabc")
    ours = list(continue_tokens(speaker.model, prompt, set(), GenerateConfig(max_tokens=40)))
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    theirs = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    again = list(prompt)
    for _ in range(40):
        again.append(int(speaker.model.logits(torch.tensor([again]))[0, -1].argmax()))
    assert len(ours) == 40
    assert ours == again[len(prompt) :] == theirs


def test_generation_ends_at_a_stop_token_and_at_the_context(run):
    speaker = Speaker.load(run)
    prompt = speaker.tokenizer.encode("abc")
    free = list(continue_tokens(speaker.model, prompt, set(), GenerateConfig(max_tokens=30)))
    assert (
        list(continue_tokens(speaker.model, prompt, {free[5]}, GenerateConfig(max_tokens=30)))
        == free[: free.index(free[5])]
    )
    room = speaker.model.config.max_position_embeddings - 2000
    assert (
        len(
            list(
                continue_tokens(
                    speaker.model, prompt * 700, set(), GenerateConfig(max_tokens=10_000)
                )
            )
        )
        < room
    )


def test_sampling_depends_on_the_seed_and_keeps_to_the_nucleus():
    logits = torch.tensor([2.0, 1.0, 0.0, -9.0])
    draws = [sample(logits, 1.0, 0.9, torch.Generator().manual_seed(i)) for i in range(200)]
    assert set(draws) == {0, 1, 2} - ({2} if torch.softmax(logits, -1)[:2].sum() >= 0.9 else set())
    assert draws == [sample(logits, 1.0, 0.9, torch.Generator().manual_seed(i)) for i in range(200)]
    assert {sample(logits, 1.0, 0.01, torch.Generator().manual_seed(i)) for i in range(50)} == {0}
    assert sample(logits, 0, 1.0, torch.Generator()) == 0


def test_the_command_answers_the_same_from_run_checkpoint_and_export(run, world):
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    said = [
        world.command("generate", f"source={source}", "prompt=abc", "max_tokens=20")[0].out
        for source in (run, checkpoint)
    ]
    assert said[0] == said[1]
    assert said[0].endswith("\n")
    raw = world.command(
        "generate",
        f"source={run}",
        "prompt=abc",
        "raw=true",
        "max_tokens=20",
        "temperature=1",
        "seed=1",
    )[0].out
    assert (
        raw
        == world.command(
            "generate",
            f"source={run}",
            "prompt=abc",
            "raw=true",
            "max_tokens=20",
            "temperature=1",
            "seed=1",
        )[0].out
        != said[0]
    )


def test_no_source_and_a_wrong_one_are_refused(world, tmp_path):
    assert "source" in world.command("generate", "prompt=x", code=2)[0].err
    assert (
        "source" in world.command("generate", f"source={tmp_path}/none", "prompt=x", code=2)[0].err
    )
    assert world.command("generate", f"source={tmp_path}", "prompt=x", code=2)[0].err


def test_a_system_turn_reaches_a_template_that_knows_none(run):
    speaker = Speaker.load(run)
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ "
        "messages[0].content }}"
    )
    speaker.template = type(speaker.template)("refusing", refusing, speaker.tokenizer.special)
    told = []
    speaker.say = lambda text, cfg: told.append(text) or iter(())
    list(
        speaker.answer(
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            GenerateConfig(),
        )
    )
    assert told == ["be brief\n\nhi"]


ASKED = [
    "train.validate_every=4",
    "train.sample_prompts=[aaa,'b c']",
    "train.sample_tokens=9",
    "checkpoint.every=4",
    "checkpoint.keep=9",
]


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, []),
        pytest.param(
            2,
            [
                "model.tie_word_embeddings=false",
                "train.sample_raw=true",
                "activation_checkpoint=selective",
                "sharding.blocks_per_unit=2",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(1, ["sharding.cpu_offload=true"], marks=pytest.mark.slow),
        pytest.param(
            4,
            ["sharding=hsdp", "sharding.replicas=2", "activation_checkpoint=full"],
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ["compile=enabled"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_samples_in_training_are_what_generate_says_of_the_checkpoint_and_change_nothing(
    train, compiled, ranks, how
):
    how = compiled if "compile=enabled" in how else how
    plain = train("plain", "train.steps=12", *how, ranks=ranks, timeout=400)
    run = train("run", "train.steps=12", *ASKED, *how, ranks=ranks, timeout=400)
    assert run.column("loss") == plain.column("loss")
    assert run.column("grad_norm") == plain.column("grad_norm")
    taken = read_lines(run.folder / "samples.jsonl")
    assert [(line["step"], line["prompt"]) for line in taken] == [
        (step, prompt) for step in (4, 8, 12) for prompt in ("aaa", "b c")
    ]
    for line in taken:
        speaker = Speaker.load(run.folder / "checkpoints" / f"step-{line['step']:08}")
        prompt = (
            line["prompt"]
            if "train.sample_raw=true" in how
            else speaker.template.ask([{"role": "user", "content": line["prompt"]}])
        )
        tokens = continue_tokens(
            speaker.model,
            speaker.tokenizer.encode(prompt),
            speaker.tokenizer.stop_ids,
            GenerateConfig(max_tokens=9),
        )
        assert line["text"] == speaker.tokenizer.decode(list(tokens))
    assert any(line["text"] for line in taken)
    assert "sample aaa →" in run.out


def test_a_resume_cuts_the_samples_of_steps_that_it_does_again(train):
    run = train("run", "train.steps=8", *ASKED)
    before = read_lines(run.folder / "samples.jsonl")
    shutil.rmtree(run.folder / "checkpoints" / "step-00000008")
    again = train("run", "train.steps=8", *ASKED, ranks=2)
    assert again.event("resume")[0]["step"] == 4
    assert [line["step"] for line in read_lines(run.folder / "samples.jsonl")] == [4, 4, 8, 8]
    assert read_lines(run.folder / "samples.jsonl")[:2] == before[:2]
