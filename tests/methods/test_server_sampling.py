"""Answers of a vLLM server in place of the training ranks' own: the same steps, how weights get
there, and what happens when it is lost."""

import functools
import itertools
import shutil
import time
from contextlib import contextmanager
from unittest.mock import patch

import inject
import pytest
from vllm_server import VllmServer
from world import SMALL

from fsdp_trainer.base import web
from fsdp_trainer.base.process import wait_until
from fsdp_trainer.base.web import RequestFailed
from fsdp_trainer.cli import main
from fsdp_trainer.methods.serving.policy_server import read_completion

GRPO = [
    "objective=grpo", 'objective.rewards=[{name: regex, pattern: "[a-z]"}]', "data.path=demo:sums",
    "tokenizer.path=demo:bytes", "objective.max_new_tokens=6", "objective.samples=2",
    "batch.rows=2", "batch.micro_rows=2", "train.steps=3", "schedule=constant",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(world, tmp_path_factory):
    """A folder of a small model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    words = ["data.path=demo:sums", "tokenizer.path=demo:bytes", "train.steps=1"]
    world.train(folder / "run", *words, "checkpoint.export_hf=true")
    return folder / "run/hf"


@pytest.fixture
def served(model, tmp_path):
    """A server of a copy of the model."""
    with serving(model, tmp_path / "hf") as server:
        yield server


@contextmanager
def serving(model, folder):
    shutil.copytree(model, folder)
    server = VllmServer(folder)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def words(model, served):
    return words_for(served, model)


def words_for(served, model):
    return [*GRPO, f"model.init_from={served.folder}", f"data.cache={model.parent / 'cache'}"]


@pytest.fixture(scope="module")
def adapted(world, model, tmp_path_factory):
    """A run whose server was sent its adapters, and that server."""
    folder = tmp_path_factory.mktemp("adapted")
    with serving(model, folder / "hf") as served:
        keys = [*words_for(served, model), "adapter=lora", f"objective.server={served.url}"]
        yield world.train(folder / "run", *keys, "optim.lr=0.05", ranks=2), served


def no_pause():
    """A seam: what fails is tried again at once."""
    return patch.object(web, "PAUSE_SECONDS", 0.0)


@pytest.mark.slow
def test_a_server_is_sent_the_adapter_of_every_step_and_answers_with_it(adapted):
    run, served = adapted
    loaded = [body["lora_name"] for body in served.asked("/v1/load_lora_adapter")]
    assert loaded == [f"run-{step:08d}" for step in range(3)]
    models = [body["model"] for body in served.asked("/v1/completions")]
    assert models == sorted(models)
    assert [models.count(name) for name in loaded] == [4, 4, 4]
    assert run.column("staleness") == [0, 0, 0]
    # the server computes with the numbers that are trained
    assert run.column("sampler_difference") == pytest.approx([0, 0, 0], abs=1e-4)
    assert list(served.parents) == loaded[-1:]
    assert not list((run.folder / "server").rglob("*.distcp"))
    seeds = {body["seed"] for body in served.asked("/v1/completions")}
    assert len(seeds) == 12
    first = served.asked("/v1/completions")[0]
    assert (first["top_p"], first["top_k"], first["repetition_penalty"]) == (1, -1, 1)


@pytest.mark.slow
@pytest.mark.further
def test_a_server_reads_whole_weights_again_and_may_be_behind(
    world, served, words, model, tmp_path
):
    keys = [*words, f"model.init_from={model}", f"objective.server={served.url}"]
    keys += [f"objective.server_folder={served.folder}", "objective.max_staleness=1"]
    run = world.train(tmp_path / "run", *keys, "train.steps=4", ranks=2)
    assert len(served.asked("/collective_rpc")) == len(served.asked("/reset_prefix_cache")) == 2
    assert run.column("staleness") == [0, 1, 0, 1]
    difference = run.column("sampler_difference")
    assert difference[0] < 1e-5 > difference[2]
    assert difference[1] > 2e-5 < difference[3]


@pytest.mark.slow
@pytest.mark.further
def test_a_server_that_is_lost_for_a_moment_costs_nothing_and_for_good_a_restart(
    world, served, words, adapted, tmp_path
):
    whole, _ = adapted
    keys = [*words, "adapter=lora", f"objective.server={served.url}", "optim.lr=0.05"]
    served.failures["/v1/completions"] = 3
    place = [f"run.root={tmp_path}", "run.name=run"]
    run = world.train(tmp_path / "run", *keys, "train.steps=1", ranks=2, seam=no_pause)
    assert run.column("reward") == whole.column("reward")[:1]
    served.failures["/v1/completions"] = None
    lost = world.command("train", *SMALL, *place, *keys, ranks=2, code=1, seam=no_pause)
    assert f"the server {served.url} answers no more prompts: HTTP 503" in lost[0].err
    assert "the same command resumes" in lost[0].err
    served.failures.clear()
    run = world.train(tmp_path / "run", *keys, "train.steps=2", ranks=2)
    assert run.column("reward") == pytest.approx(whole.column("reward")[:2])


def touch(file):
    file.touch()


@pytest.mark.slow
def test_a_server_answers_for_a_coming_step_while_one_is_trained(world, served, words, tmp_path):
    trained = tmp_path / "trained"
    requests = []

    def wait_for_training(body):
        """Hold back what is asked for after the first step's answers until that step has begun."""
        requests.append(body)
        if len(requests) > 4:
            assert wait_until(trained.exists, 60)

    served.before = wait_for_training
    keys = [*words, "adapter=lora", f"objective.server={served.url}", "objective.ahead=1"]
    begun = inject.at("backward", functools.partial(touch, trained), rank=0, step=1)
    run = world.train(tmp_path / "run", *keys, ranks=2, seam=begun)
    assert run.column("staleness") == [0, 1, 1]
    models = [body["model"] for body in served.asked("/v1/completions")]
    assert [models.count(f"run-{step:08d}") for step in range(3)] == [8, 4, 0]


ECHO = """
class Echo:
    def reset(self, row):
        return row["messages"], None
    def step(self, messages):
        count = sum(turn["role"] == "assistant" for turn in messages)
        return [{"role": "user", "content": "b"}], count >= 3
    def reward(self, messages):
        return float(len(messages[-2]["content"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["sharding.tensor=2"]], ids=["", "tensor"])
@pytest.mark.further
def test_turns_of_a_server_that_fails_and_starts_again_are_those_of_one_that_does_not(
    world, model, tmp_path, layout
):
    file = tmp_path / "echo.py"
    file.write_text(ECHO)
    turns = [f"objective.environment={file}:Echo", "objective.rewards=[]", "batch.seq_len=64"]
    turns += ["objective.max_new_tokens=8", "objective.ahead=2", "objective.round_tokens=6"]
    runs = []
    for name in ("whole", "broken"):
        with serving(model, tmp_path / name / "hf") as served:
            keys = [*words_for(served, model), *turns, *layout, "adapter=lora", "optim.lr=0.05"]
            keys += [f"objective.server={served.url}", "train.steps=4"]
            count = itertools.count()

            def disturb(body, served=served, count=count):
                number = next(count)
                if number % 7 == 3:
                    served.failures["/v1/completions"] = 1
                if number % 11 == 5:
                    served.restart()
                time.sleep(0.01 * (number % 3))

            if name == "broken":
                served.before = disturb
            runs.append(world.train(tmp_path / name / "run", *keys, ranks=2, seam=no_pause))
    whole, broken = runs
    assert max(whole.column("turns_max")) > 1
    assert max(whole.column("grad_norm")) > 0
    for column in ("reward", "answer_tokens", "staleness", "loss"):
        assert broken.column(column) == pytest.approx(whole.column(column), rel=1e-5), column


REFUSED = {
    "objective.server=localhost": "objective.server=http://localhost:8000",
    "objective.server=http://me:secret@host": "VLLM_API_KEY",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_an_address_that_is_none_is_refused(capsys, typed):
    keys = ["data.path=demo:sums", "tokenizer.path=demo:bytes", "objective=grpo"]
    assert main([*keys, "objective.rewards=[exact]", "adapter=lora", typed]) == 2
    assert REFUSED[typed] in capsys.readouterr().err


def test_whole_weights_need_a_folder_of_their_own(capsys, tmp_path):
    (tmp_path / "data").mkdir()
    keys = ["data.path=demo:sums", "tokenizer.path=demo:bytes", "objective=grpo"]
    keys += ["objective.rewards=[exact]", "objective.server=http://localhost:1"]
    assert main(keys) == 2
    assert "objective.server_folder=FOLDER" in capsys.readouterr().err
    assert main([*keys, f"objective.server_folder={tmp_path}"]) == 2
    assert "holds something else than a model" in capsys.readouterr().err
    assert main([*keys[:-1], "objective.max_staleness=2"]) == 2
    assert "only counts with  objective.server=URL" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_is_not_there_or_has_another_model_is_named(world, served, words, tmp_path):
    place = [f"run.root={tmp_path}", "run.name=run", "adapter=lora"]

    def refused(*more):
        results = world.command("train", *SMALL, *words, *place, *more, code=2, seam=no_pause)
        return results[0].err

    said = refused("objective.server=http://127.0.0.1:1")
    assert "cannot be reached: [Errno 111] Connection refused" in said
    assert f"vllm serve {served.folder}" in said
    served.models = {"other/model": None}
    said = refused(f"objective.server={served.url}")
    assert f"serves other/model, and this run trains {served.folder}" in said


@pytest.mark.parametrize(
    "given",
    [
        None,
        {"choices": []},
        {"choices": [{"logprobs": None, "finish_reason": "stop"}]},
        {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [0]}, "finish_reason": "x"}]},
        {"choices": [{"logprobs": {"tokens": [], "token_logprobs": []}, "finish_reason": "x"}]},
        {
            "choices": [
                {"logprobs": {"tokens": [1], "token_logprobs": [None]}, "finish_reason": "x"}
            ]
        },
    ],
)
def test_answers_without_tokens_or_their_probabilities_are_refused(given):
    with pytest.raises(RequestFailed, match="its answer"):
        read_completion(given)


def test_tokens_are_read_as_numbers():
    given = {"tokens": ["token_id:5", "token_id:2"], "token_logprobs": [-0.5, -1]}
    answer = read_completion({"choices": [{"logprobs": given, "finish_reason": "stop"}]})
    assert (answer.tokens, answer.log_probabilities, answer.finished) == ([5, 2], [-0.5, -1], True)
