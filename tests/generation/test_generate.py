"""Text from a model: greedy as transformers, sampled by seed, through the command line."""

import json
import shutil
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import ClassVar
from unittest.mock import Mock

import inject
import pytest
import torch
import transformers
from refused import refusal
from stored import assert_columns, checkpoint
from texts import turn
from transformers import AutoModelForCausalLM
from world import read_lines
from zoo import make_folder

from fsdp_trainer.apps.generate import Speaker, show, show_answers
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.generation import continuations, decoding, recorded_decoding
from fsdp_trainer.generation.continuations import generate_tokens, stream_tokens
from fsdp_trainer.generation.logit_rules import with_rules
from fsdp_trainer.generation.sampling import Sampling, choose, random_numbers
from fsdp_trainer.models import attention, attention_kernels
from fsdp_trainer.models.adapters.adapter_spec import AdapterSpec
from fsdp_trainer.models.adapters.adapters import adapter_parameters, add_adapters


@pytest.fixture(scope="module")
def run(ledger):
    return ledger.run("plain").folder


@pytest.fixture(scope="module")
def speaker(run):
    return Speaker.load(run)


def recomputed(model, prompt, count):
    """The likeliest tokens behind a prompt, each by a forward of the whole text."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_generation_is_that_of_transformers_and_of_full_recomputation(run, speaker):
    prompt = speaker.tokenizer.encode("<|im_start|>user\nabc")
    ours = list(stream_tokens(speaker.model, prompt, (), Sampling(max_tokens=40)))
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=40, **settings)
    assert len(ours) == 40
    assert ours == recomputed(speaker.model, prompt, 40) == theirs[0, len(prompt) :].tolist()


def test_generation_ends_at_a_stop_token_and_at_the_context(speaker):
    prompt = speaker.tokenizer.encode("abc")
    free = list(stream_tokens(speaker.model, prompt, (), Sampling(max_tokens=30)))
    stopped = list(stream_tokens(speaker.model, prompt, {free[5]}, Sampling(max_tokens=30)))
    assert stopped == free[: free.index(free[5])]
    long = prompt * 680
    room = speaker.model.config.max_position_embeddings - len(long)
    assert 0 < room < 50
    [[tokens]] = generate_tokens(speaker.model, [long], (), Sampling(max_tokens=10_000))
    assert len(tokens) == room
    full = (prompt * 700)[: speaker.model.config.max_position_embeddings]
    assert generate_tokens(speaker.model, [full], (), Sampling()) == [[[]]]


SAMPLING = Sampling(max_tokens=12, temperature=1.0, top_p=0.95, seed=3, samples=3)


def encoded(speaker, *texts):
    return [speaker.tokenizer.encode(text) for text in texts]


def test_samples_depend_on_seed_prompt_and_number_alone(speaker):
    prompts = encoded(speaker, "abc", "a longer prompt", "x")
    stop_ids = speaker.tokenizer.stop_ids
    together = generate_tokens(speaker.model, prompts, stop_ids, SAMPLING)
    assert all(len({tuple(answer) for answer in answers}) == 3 for answers in together)
    for rows in (1, 2, 5):
        assert generate_tokens(speaker.model, prompts, stop_ids, SAMPLING, rows=rows) == together
    for prompt, answers in zip(prompts[::-1], together[::-1], strict=True):
        assert generate_tokens(speaker.model, [prompt], stop_ids, SAMPLING) == [answers]
    [[first]] = generate_tokens(
        speaker.model, prompts[:1], stop_ids, Sampling(12, 1.0, 0.95, seed=3)
    )
    assert first == together[0][0]
    other = generate_tokens(speaker.model, prompts, stop_ids, Sampling(12, 1.0, 0.95, 4, 3))
    assert other != together


@contextmanager
def computed_tokens(model):
    """A list that gets the number of tokens of each forward."""
    sizes = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: sizes.append(inputs[0].numel())
    )
    try:
        yield sizes
    finally:
        hook.remove()


def test_cudnn_does_not_plan_each_length_of_a_prompt(speaker, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_chosen", ["cudnn"])
    monkeypatch.setattr(attention, "sdpa_kernel", pytest.fail)
    for prompts in (["abc"], ["abc", "x", "abcdefgh"]):
        assert generate_tokens(speaker.model, encoded(speaker, *prompts), (), Sampling(1))


def test_the_samples_of_a_prompt_share_its_prefill(speaker):
    prompts = encoded(speaker, "abcdef", "xyz")
    with computed_tokens(speaker.model) as sizes:
        generate_tokens(speaker.model, prompts, (), Sampling(4, 1.0, samples=5))
    assert sizes == [len(prompts[0]) + len(prompts[1]), 10, 10, 10]


def test_a_cache_shrinks_when_half_of_the_answers_are_done(speaker):
    model = speaker.model
    prompts = encoded(speaker, "a", "bb bb", "abcabc", "d d d d", "e", "fff")
    whole = generate_tokens(model, prompts, (), Sampling(max_tokens=24))
    stop_ids = {answers[0][2 * i] for i, answers in enumerate(whole[:5])}
    with computed_tokens(model) as sizes:
        stopped = generate_tokens(model, prompts, stop_ids, Sampling(max_tokens=24))
    for [answer], [free] in zip(stopped, whole, strict=True):
        ends = [i for i, token in enumerate(free) if token in stop_ids]
        assert answer == free[: ends[0] if ends else None]
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert sizes[-1] < 6


@pytest.fixture
def record_by(monkeypatch):
    """Return a function that replaces what records kernels on a GPU; a CPU records nothing."""

    def replace(record):
        failures, attempts = recorded_decoding._failures, recorded_decoding.ATTEMPTS
        can_record = lambda model, device: failures.get(model, 0) < attempts  # noqa: E731
        monkeypatch.setattr(recorded_decoding, "record", record)
        monkeypatch.setattr(continuations, "can_record", can_record)
        monkeypatch.setattr(decoding.Decoding, "is_worth_it", lambda *_: False)

    return replace


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3"])
def test_recorded_kernels_answer_as_those_that_are_launched_one_by_one(tmp_path, record_by, family):
    """Here recorded kernels are the function that a GPU records."""
    model = Speaker.load(make_folder(tmp_path / "hf", family)).model
    prompts = [[5, 6, 7], [9], list(range(20, 41)), [11, 12]]
    sampling = Sampling(40, 1.0, 0.95, samples=6, seed=1)
    usual = generate_tokens(model, prompts, range(10), sampling)
    used = []

    def record(compute, device):
        compute()
        used.append(device)
        return compute

    record_by(record)
    assert generate_tokens(model, prompts, range(10), sampling) == usual
    assert len(used) > 1


@pytest.mark.parametrize("fault", ["error", "wrong"])
def test_a_recording_that_fails_or_differs_is_tried_again_three_times(speaker, record_by, fault):
    prompts, sampling = encoded(speaker, "abc", "x"), Sampling(max_tokens=30)
    usual = generate_tokens(speaker.model, prompts, (), sampling)
    attempts = []

    def record(compute, device):
        attempts.append(device)
        if len(attempts) == 2:
            return compute
        if fault == "error":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return partial(setattr, compute.__self__, "logits", torch.zeros(2, 260))

    record_by(record)
    warning = "without a CUDA graph .1 of 3 attempts.: (operation not|its logits differ)"
    with pytest.warns(UserWarning, match=warning):
        assert generate_tokens(speaker.model, prompts, (), sampling) == usual
    assert generate_tokens(speaker.model, prompts, (), sampling) == usual
    with pytest.warns(UserWarning, match="3 of 3 attempts"):
        for _ in range(4):
            assert generate_tokens(speaker.model, prompts, (), sampling) == usual
    recorded_decoding._failures.clear()
    assert len(attempts) == 5


class FakeGraph:
    """A graph of a CPU: the computations between begin and end, computed again by a replay."""

    events: ClassVar[list] = []
    current = None

    def capture_begin(self, pool, capture_error_mode):
        self.calls, self.memory, FakeGraph.current = [], pool, self
        self.has_ended = False
        self.events.append((pool, capture_error_mode))

    def capture_end(self):
        FakeGraph.current = None
        if len(self.events) == 1:
            raise RuntimeError("capture was invalidated")
        self.has_ended = True

    def pool(self):
        if not self.has_ended:
            raise RuntimeError("no capture")
        return self.memory

    def replay(self):
        for call in self.calls:
            call()


def test_a_recording_empties_no_cache_and_the_next_one_uses_its_memory(
    speaker, record_by, monkeypatch
):
    prompts, sampling = encoded(speaker, "abc", "x"), Sampling(max_tokens=30)
    usual = generate_tokens(speaker.model, prompts, (), sampling)
    record_by(recorded_decoding.record)
    pools = iter("abc")
    for name, fake in {
        "Stream": lambda device: Mock(),
        "current_stream": lambda device: Mock(),
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": lambda: next(pools),
        "empty_cache": pytest.fail,
        "synchronize": pytest.fail,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    freed = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        stop = lambda device, pool: freed.append(pool)  # noqa: E731
        monkeypatch.setattr(torch._C, name, stop, raising=False)
    compute = recorded_decoding.RecordedDecoding.compute

    def noted(recorded):
        if FakeGraph.current:
            FakeGraph.current.calls.append(partial(compute, recorded))
        compute(recorded)

    monkeypatch.setattr(recorded_decoding.RecordedDecoding, "compute", noted)
    with pytest.warns(UserWarning, match="invalidated"):
        answers = [generate_tokens(speaker.model, prompts, (), sampling) for _ in range(3)]
    recorded_decoding.recorder.cache_clear()
    assert answers == [usual] * 3
    # the memory of the failed one is given up; other threads may allocate
    assert FakeGraph.events == [(pool, "thread_local") for pool in "abb"]
    assert freed == ["a", "a"]


def test_sampling_depends_on_the_number_and_keeps_to_the_nucleus():
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]])
    numbers = torch.linspace(0, 1, 201, dtype=torch.float64)[:-1, None]

    def shares(top_p, temperature=1.0):
        sampling = Sampling(temperature=temperature, top_p=top_p)
        tokens = choose(logits.expand(200, -1), numbers, sampling)
        return torch.bincount(tokens, minlength=4) / 200

    torch.testing.assert_close(shares(1.0), logits[0].softmax(-1), atol=0.01, rtol=0)
    nucleus = torch.cat([logits[0, :2].softmax(-1), torch.zeros(2)])
    torch.testing.assert_close(shares(0.9), nucleus, atol=0.01, rtol=0)
    assert shares(0.01).tolist() == [1, 0, 0, 0]
    assert shares(1.0, temperature=0).tolist() == [1, 0, 0, 0]
    assert (random_numbers(0, [1, 2], 0, 5)[:3] == random_numbers(0, [1, 2], 0, 3)).all()
    assert random_numbers(0, [1, 2], 1, 1) != random_numbers(0, [1, 2], 0, 1)


def by_transformers(logits, tokens, *processors):
    """The scores that transformers' processors make, [1, vocabulary]."""
    for processor in processors:
        logits = processor(torch.tensor([tokens]), logits)
    return logits


def test_settings_change_logits_and_samples_as_in_transformers():
    torch.manual_seed(0)
    logits = torch.randn(1, 8)
    prompt, answer = [1, 2, 3], [1, 2, 1]
    ban = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), 4, [5, 6])
    for settings, processor in [
        ({"repetition_penalty": 1.7}, transformers.RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.6}, transformers.RepetitionPenaltyLogitsProcessor(0.6)),
        ({"no_repeat_ngram": 2}, transformers.NoRepeatNGramLogitsProcessor(2)),
        ({"no_repeat_ngram": 1}, transformers.NoRepeatNGramLogitsProcessor(1)),
        ({"min_tokens": 4}, ban),
        ({"min_tokens": 3}, lambda _, scores: scores),
    ]:
        ours = with_rules(logits, [(prompt, answer)], Sampling(**settings), {5, 6})
        theirs = by_transformers(logits.clone(), prompt + answer, processor)
        torch.testing.assert_close(ours, theirs)
    counted = torch.tensor([0, 2.0, 1, 0, 0, 0, 0, 0])
    settings = Sampling(frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((7, 3.0),))
    ours = with_rules(logits, [(prompt, answer)], settings, ())[0]
    expected = logits[0] - 0.5 * counted - 0.25 * (counted > 0)
    expected[7] += 3
    torch.testing.assert_close(ours, expected)

    numbers = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1, None]
    for settings, warpers in [
        ({"top_k": 3}, [transformers.TopKLogitsWarper(3)]),
        ({"min_p": 0.3}, [transformers.MinPLogitsWarper(0.3)]),
        ({"top_k": 5, "top_p": 0.8, "min_p": 0.2}, [transformers.TopKLogitsWarper(5),
         transformers.TopPLogitsWarper(0.8), transformers.MinPLogitsWarper(0.2)]),
    ]:  # fmt: skip
        sampling = Sampling(temperature=1.0, **settings)
        drawn = choose(logits.expand(400, -1), numbers, sampling)
        theirs = by_transformers(logits.clone(), prompt, *warpers).softmax(-1)[0]
        shares = torch.bincount(drawn, minlength=8) / 400
        torch.testing.assert_close(shares, theirs, atol=0.01, rtol=0)


LONG = Sampling(max_tokens=20)
"""Long enough that copies of weights are made for it."""


def test_answers_follow_weights_that_have_changed_and_adapters_since_the_last_ones(run):
    model = Speaker.load(run).model
    prompts = [[5, 6, 7], [8, 9]]
    generator = torch.Generator().manual_seed(0)
    before = generate_tokens(model, prompts, (), LONG)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    after = generate_tokens(model, prompts, (), LONG)
    assert after == [[recomputed(model, prompt, 20)] for prompt in prompts]
    assert list(stream_tokens(model, prompts[0], (), LONG)) == after[0][0]

    names = ("self_attn.k_proj", "mlp.down_proj")
    layers = {f"model.layers.0.{name}": (4, 64.0) for name in names}
    add_adapters(model, AdapterSpec("lora", "standard", "fp32", layers), torch.float32)
    for matrix in adapter_parameters(model).values():
        torch.nn.init.normal_(matrix, 0, 0.2, generator=generator)
    adapted = generate_tokens(model, prompts, (), LONG)
    assert adapted == [[recomputed(model, prompt, 20)] for prompt in prompts]
    assert before != after != adapted


def test_one_answer_of_several_threads_is_that_of_the_model(run, monkeypatch):
    monkeypatch.setattr(decoding, "PACKED_FROM", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # what decides the layout
    packed = []
    pack = decoding.pack_weight
    monkeypatch.setattr(decoding, "pack_weight", lambda weight: packed.append(1) or pack(weight))
    model = Speaker.load(run).model
    prompt = [5, 6, 7]
    assert generate_tokens(model, [prompt], (), LONG) == [[recomputed(model, prompt, 20)]]
    assert packed


@pytest.fixture
def generate(world):
    """Return a function that runs the verb and returns what it prints, or its error."""

    def say(source, *words, code=0):
        [result] = world.command("generate", f"source={source}", *words, code=code)
        return result.err if code else result.out

    return say


def test_the_command_answers_many_prompts_with_several_samples(run, generate, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"prompt": "b, c"}\n\n{"prompt": "d"}\n')
    words = [f"prompt=['aaa','b, c'] prompts={tmp_path}/more.jsonl max_tokens=9"]
    words += ["samples=2 temperature=1"]
    lines = [json.loads(line) for line in generate(run, *words, "format=json").splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [
        (prompt, sample) for prompt in ("aaa", "b, c", "b, c", "d") for sample in (0, 1)
    ]
    assert lines[2:4] == lines[4:6]
    assert lines[0]["text"] != lines[1]["text"]
    text = generate(run, *words)
    assert text.startswith(f"> aaa\n{lines[0]['text']}\n{lines[1]['text']}\n\n> b, c\n")


def test_the_command_answers_the_same_from_run_and_checkpoint(run, generate):
    words = "prompt=abc max_tokens=20"
    said = generate(run, words)
    assert said.endswith("\n")
    assert generate(sorted((run / "checkpoints").glob("step-*"))[-1], words) == said
    raw = [words, "raw=true temperature=1 seed=1"]
    assert generate(run, *raw) == generate(run, *raw) != said


def test_a_prompt_without_tokens_or_without_room_is_refused(speaker):
    assert "prompt is empty" in refusal(speaker.encode, "")
    assert "prompt is too long" in refusal(speaker.encode, "abc" * 1000)


def test_a_system_turn_reaches_a_template_that_knows_none(run):
    speaker = Speaker.load(run)
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    speaker.template = type(speaker.template)("refusing", refusing, speaker.tokenizer.special)
    lines = []
    speaker.say = lambda prompt, cfg: lines.append(prompt.text) or iter(())
    turns = [turn("system", "be brief"), turn("user", "hi")]
    list(speaker.answer(turns, GenerateConfig()))
    assert lines == ["be brief\n\nhi"]


ASKED = (
    "train.steps=4 train.validate_every=2 train.sample_prompts=[aaa,'b c']"
    " train.sample_tokens=9 checkpoint.every=2 checkpoint.keep=9"
)
COMPILED = "compile=enabled model.num_hidden_layers=1"
RAW = (
    "model.tie_word_embeddings=false train.sample_raw=true activation_checkpoint=selective"
    " sharding.blocks_per_unit=2"
)


@pytest.mark.parametrize(
    "ranks, how",
    [
        (2, RAW),
        (1, "sharding.cpu_offload=true"),
        (1, COMPILED),
    ],
    ids=["raw, in units of blocks", "offloaded", "compiled"],
)
def test_samples_in_training_are_what_generate_says_of_the_checkpoint_and_change_nothing(
    train, compiled, ranks, how
):
    options, more = {"ranks": ranks}, []
    if how == COMPILED:
        more, options["seam"] = compiled[1:], inject.no_kernels()
    plain = train("plain", "train.steps=4", how, *more, **options)
    run = train("run", ASKED, how, *more, **options)
    assert_columns(run, plain, "loss", "grad_norm")
    samples = read_lines(run.folder / "samples.jsonl")
    assert [(line["step"], line["prompt"]) for line in samples] == [
        (step, prompt) for step in (2, 4) for prompt in ("aaa", "b c")
    ]
    for line in samples:
        speaker = Speaker.load(checkpoint(run, line["step"]))
        prompt = line["prompt"]
        if how != RAW:
            prompt = speaker.template.ask([turn("user", prompt)])
        tokens, stop_ids = speaker.tokenizer.encode(prompt), speaker.tokenizer.stop_ids
        answer = stream_tokens(speaker.model, tokens, stop_ids, Sampling(max_tokens=9))
        assert line["text"] == speaker.tokenizer.decode(list(answer))
    assert any(line["text"] for line in samples)
    assert "sample aaa →" in run.out


def test_a_resume_cuts_the_samples_of_steps_that_it_does_again(train):
    run = train("run", ASKED)
    before = read_lines(run.folder / "samples.jsonl")
    shutil.rmtree(checkpoint(run, 4))
    again = train("run", ASKED)
    assert again.event("resume")[0]["step"] == 2
    after = read_lines(run.folder / "samples.jsonl")
    assert [line["step"] for line in after] == [2, 2, 4, 4]
    assert after[:2] == before[:2]


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_answer_cannot_command_the_terminal(capsys, form):
    show_answers("a\x1b[31m", ["\x1b]0;title\x07\u009b\u202eb\tc\n"], form)
    assert show(iter(["\x1b", "[2J", "ü"])) == "\x1b[2Jü"
    said = capsys.readouterr().out
    assert r"\u001b]0;title\u0007\u009b\u202eb" in said
    assert r"\u001b[2Jü" in said
    assert not set(said) & set("\x1b\x07\u009b\u202e")
    if form == "json":
        line = json.loads(said.splitlines()[0])
        assert line["text"] == "\x1b]0;title\x07\u009b\u202eb\tc\n"
