"""Answers of a vLLM server in place of the training ranks' own: the same steps, how weights get
there, and what happens when it is lost."""

import itertools
import shutil
import time
from contextlib import contextmanager
from unittest.mock import patch

import inject
import pytest
from named_runs import GRPO
from rollouts import with_environment
from stored import assert_near
from vllm_server import VllmServer

from fsdp_trainer.base import web
from fsdp_trainer.base.process import wait_until
from fsdp_trainer.base.web import RequestFailed
from fsdp_trainer.rl.serving.policy_server import read_completion

KEYS = [*GRPO, "objective.samples=2 batch.rows=2 batch.micro_rows=2"]


@contextmanager
def serving(ledger, folder):
    """A server of a copy of a small model."""
    shutil.copytree(ledger.run("plain").folder / "hf", folder)
    server = VllmServer(folder)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def served(ledger, tmp_path):
    with serving(ledger, tmp_path / "hf") as server:
        yield server


def words_for(served):
    place = f"objective.server={served.url} model.init_from={served.folder}"
    return [*KEYS, place, "tokenizer.path=demo:bytes"]


def with_adapter(served):
    return [*words_for(served), "adapter=lora optim.lr=0.05"]


@pytest.fixture(scope="module")
def adapted(ledger, world, tmp_path_factory):
    """A run whose server was sent its adapters, and that server."""
    folder = tmp_path_factory.mktemp("adapted")
    with serving(ledger, folder / "hf") as served:
        keys = [*with_adapter(served), f"data.cache={folder / 'cache'}"]
        yield world.train(folder / "run", *keys, ranks=2), served


def no_pause():
    """A seam: what fails is tried again at once."""
    return patch.object(web, "PAUSE_SECONDS", 0.0)


def test_a_server_is_sent_the_adapter_of_every_step_and_answers_with_it(adapted):
    run, served = adapted
    loaded = [body["lora_name"] for body in served.asked("/v1/load_lora_adapter")]
    assert loaded == [f"run-{step:08d}" for step in range(3)]
    models = [body["model"] for body in served.asked("/v1/completions")]
    assert models == sorted(models)
    assert [models.count(name) for name in loaded] == [4, 4, 4]
    assert run["staleness"] == [0, 0, 0]
    # the server computes with the numbers that are trained
    assert run["sampler_difference"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert list(served.parents) == loaded[-1:]
    assert not list((run.folder / "server").rglob("*.distcp"))
    seeds = {body["seed"] for body in served.asked("/v1/completions")}
    assert len(seeds) == 12
    first = served.asked("/v1/completions")[0]
    assert (first["top_p"], first["top_k"], first["repetition_penalty"]) == (1, -1, 1)


def test_a_server_reads_whole_weights_again_and_may_be_behind(ledger, served, train):
    keys = [*words_for(served), f"model.init_from={ledger.run('plain').folder / 'hf'}"]
    keys += [f"objective.server_folder={served.folder} objective.max_staleness=1"]
    run = train("run", *keys, "train.steps=4", ranks=2)
    assert len(served.asked("/collective_rpc")) == len(served.asked("/reset_prefix_cache")) == 2
    assert run["staleness"] == [0, 1, 0, 1]
    difference = run["sampler_difference"]
    assert difference[0] < 1e-5 > difference[2]
    assert difference[1] > 2e-5 < difference[3]


def test_a_server_that_is_lost_for_good_costs_a_restart(served, train, adapted):
    whole, _ = adapted
    keys = with_adapter(served)
    count = itertools.count()

    def is_lost_after_a_step(body):
        if next(count) == 4:
            served.failures["/v1/completions"] = None

    served.before = is_lost_after_a_step
    lost = train("run", *keys, ranks=2, code=1, seam=no_pause).err
    assert f"the server {served.url} answers no more prompts: HTTP 503" in lost
    assert "the same command resumes" in lost
    served.failures.clear()
    run = train("run", *keys, "train.steps=2", ranks=2)
    assert run["reward"] == pytest.approx(whole["reward"][:2])


def test_a_server_answers_for_a_coming_step_while_one_is_trained(served, train, tmp_path):
    trained = tmp_path / "trained"
    requests = []

    def wait_for_training(body):
        """Hold back what is asked for after the first step's answers until that step has begun."""
        requests.append(body)
        if len(requests) > 4:
            assert wait_until(trained.exists, 60)

    served.before = wait_for_training
    begun = inject.at("backward", trained.touch, rank=0, step=1)
    run = train("run", *with_adapter(served), "objective.ahead=1", ranks=2, seam=begun)
    assert run["staleness"] == [0, 1, 1]
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


def test_turns_of_a_server_that_fails_and_starts_again_are_those_of_one_that_does_not(
    ledger, train, tmp_path
):
    turns = [
        *with_environment(tmp_path, ECHO, "Echo"),
        "objective.max_new_tokens=8 objective.ahead=2 objective.round_tokens=6",
        "train.steps=4 sharding.tensor=2",
    ]
    runs = []
    for name in ("whole", "broken"):
        with serving(ledger, tmp_path / f"{name} hf") as served:
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
            runs.append(train(name, *with_adapter(served), *turns, ranks=2, seam=no_pause))
    whole, broken = runs
    assert max(whole["turns_max"]) > 1
    assert max(whole["grad_norm"]) > 0
    assert_near(broken, whole, "reward", "answer_tokens", "staleness", "loss", rel=1e-5)


def test_a_server_that_is_not_there_or_has_another_model_is_named(served, train):
    def refused(*more):
        return train("run", *with_adapter(served), *more, code=2, seam=no_pause).err

    said = refused("objective.server=http://127.0.0.1:1")
    assert "cannot be reached: [Errno 111] Connection refused" in said
    assert f"vllm serve {served.folder}" in said
    served.models = {"other/model": None}
    assert f"serves other/model, and this run trains {served.folder}" in refused()


def completion(**logprobs):
    return {"choices": [{"logprobs": logprobs or None, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "given",
    [
        None,
        {"choices": []},
        completion(),
        completion(tokens=["a"], token_logprobs=[0]),
        completion(tokens=[], token_logprobs=[]),
        completion(tokens=[1], token_logprobs=[None]),
    ],
)
def test_answers_without_tokens_or_their_probabilities_are_refused(given):
    with pytest.raises(RequestFailed, match="its answer"):
        read_completion(given)
