"""Environments of other packages: programs that ask the model, and servers that it acts on."""

import json
import socket
import sys
import textwrap
import threading
from contextlib import suppress
from functools import partial

import pytest
import yaml
from texts import turn
from websockets.sync.server import serve
from world import wait_until

from fsdp_trainer.rl.environments import endpoint
from fsdp_trainer.rl.environments.known_environments import environment_problems, find_environment

ROW = {"messages": [turn("user", "2+1?")], "tools": None, "reference": "3"}
AGENT = """
import openai

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

def rollout(address, row):
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    assert client.models.list().data
    messages = [{"role": "system", "content": "Add."}, *row["messages"]]
    for i in range(2):
        answer = client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    streamed = client.chat.completions.create(model="any", messages=messages, stream=True,
                                              tools=[TOOL])
    last = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    return float(last == row["reference"])

async def asynchronous(address, row):
    return 0.5 if rollout(address, row) else 0.25

def forgetful(address, row):
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    for text in ("a", "b"):
        messages = [{"role": "user", "content": text}]
        client.chat.completions.create(model="any", messages=messages)

def once(address, row):
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="policy", messages=row["messages"])
    return f"{answer.choices[0].finish_reason}: {answer.choices[0].message.content}"

def silent(address, row):
    raise LookupError("no task")
"""


def call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


def says(content="", *calls):
    return {"role": "assistant", "content": content, **({"tool_calls": [*calls]} if calls else {})}


@pytest.fixture
def program(tmp_path):
    """Return a function that makes an environment of a function in AGENT."""
    (tmp_path / "agent.py").write_text(AGENT)

    def make(name):
        spec = find_environment({"name": "endpoint", "run": f"{tmp_path}/agent.py:{name}"})
        assert spec.rewards
        assert f"runs the code in {tmp_path}/agent.py" in spec.about
        return spec.make()

    return make


@pytest.mark.parametrize("name, reward", [("rollout", 1.0), ("asynchronous", 0.5)])
def test_a_program_that_asks_the_model_is_an_environment(program, name, reward):
    environment = program(name)
    messages, tools = environment.reset(ROW)
    assert [turn["role"] for turn in messages] == ["system", "user"]
    assert tools[0]["function"]["name"] == "add"
    messages = [*messages, says("", call("add", {"a": 2}))]
    new, is_over = environment.step(messages)
    assert (new, is_over) == (
        [{"role": "tool", "tool_call_id": "call00000", "content": "3"}],
        False,
    )
    with pytest.raises(ValueError, match="another answer to the same turns"):
        environment.step([*messages, *new, says("so")])
    environment.close()

    environment = program(name)
    messages, _ = environment.reset(ROW)
    messages = [*messages, says("", call("add", {"a": 2}))]
    messages += environment.step(messages)[0]
    messages.append(says("", call("add", {"a": 3})))
    messages += environment.step(messages)[0]
    assert environment.step([*messages, says("3")]) == ([], True)
    assert environment.reward(messages) == reward


def test_a_program_that_is_cut_off_is_told_so(program):
    import openai  # takes a second

    environment = program("rollout")
    environment.reset(ROW)
    with pytest.raises(openai.BadRequestError, match="no turn or no room is left") as caught:
        environment.reward([])
    assert caught.value.code == "context_length_exceeded"


def test_a_program_gets_an_answer_that_was_cut(program):
    environment = program("once")
    messages, _ = environment.reset(ROW)
    assert environment.reward([*messages, says("2+1 is")]) == "length: 2+1 is"


def test_a_program_that_changes_earlier_turns_or_asks_nothing_fails_its_rollout(program):
    environment = program("forgetful")
    messages, _ = environment.reset(ROW)
    with pytest.raises(ValueError, match="changed earlier turns"):
        environment.step([*messages, says("x")])
    with pytest.raises(RuntimeError, match="asked the model nothing: LookupError: no task"):
        program("silent").reset(ROW)


def first_line(address, path, length="0", body=b""):
    """Return the status with which a request is answered that sends only `body` of its content.

    [] if its connection is closed.
    """
    host, port = address.split("/")[2].split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection, suppress(ConnectionError):
        connection.sendall(head.encode() + body)
        return connection.makefile("rb").readline().split()[1:2]
    return []


def test_requests_of_strangers_cost_no_memory_and_no_thread(monkeypatch, capsys):
    monkeypatch.setattr(endpoint, "MOST_CONNECTIONS", 2)
    server, session = endpoint.Endpoint(), endpoint.Session()
    address = server.address(session)
    path = f"/{session.name}/v1/chat/completions"
    nested = b'{"messages":' + b"[" * 99_000 + b"]" * 99_000 + b"}"
    for words, status in {
        ("/unknown/v1/chat/completions", str(10**12)): b"404",
        ("/",): b"404",
        (path, str(10**12)): b"413",
        (path, "-1"): b"411",
        (path, "two"): b"411",
        (path, "2", b"{}"): b"400",
        (path, str(len(nested)), nested): b"400",
        (path, "18", b'{"messages": [[]]}'): b"400",
    }.items():
        # [] while the connections of earlier requests are not free yet
        answer = wait_until(partial(first_line, address, *words))
        assert answer == [status], words[:2]
    host, port = address.split("/")[2].split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(2)]
    wait_until(lambda: first_line(address, "/") == [])
    for connection in idle:
        connection.close()
    wait_until(lambda: first_line(address, "/") == [b"404"])
    assert capsys.readouterr() == ("", "")


def reply(message, secret):
    """Return the kind and the data of what the game says to a message."""
    data = message["data"]
    if message["type"] == "reset":
        observation = {"text": "guess", "metadata": {}}
        return "observation", {"observation": observation, "reward": None, "done": False}
    if "number" not in data:
        return "error", {"message": "out of order", "code": "EXECUTION_ERROR"}
    if not isinstance(data["number"], int):
        invalid = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
        return "error", invalid | {"errors": ["int"]}
    is_right = data["number"] == secret
    observation = {"text": str(is_right)}
    return "observation", {
        "observation": observation,
        "reward": 2.0 * is_right - 1,
        "done": is_right,
    }


@pytest.fixture
def server():
    """Return the address of a server of OpenEnv's protocol, a game of guessing the seed."""

    def play(connection):
        secret = 1
        for message in map(json.loads, connection):
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                secret = message["data"].get("seed", 1)
            kind, data = reply(message, secret)
            connection.send(json.dumps({"type": kind, "data": data}))

    def schema(connection, request):
        if request.path == "/schema":
            number = {"type": "integer"}
            action = {"properties": {"number": number, "metadata": {}}, "required": ["number"]}
            return connection.respond(200, json.dumps({"action": action}))
        return None

    with serve(play, "127.0.0.1", 0, process_request=schema) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"


def test_a_server_of_openenv_is_acted_on_by_a_tool_and_rewards_each_turn(server):
    spec = find_environment({"name": "openenv", "url": server})
    assert spec.rewards
    environment = spec.make()
    messages, [tool] = environment.reset({**ROW, "seed": 4})
    assert messages == [turn("user", "2+1?\n\nguess")]
    assert tool["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
    messages.append(says("", call("act", {"number": 3}), call("act", {"number": "x"})))
    new, is_over = environment.step(messages)
    said = [turn["content"] for turn in new]
    assert said == ["False", "error: the arguments do not fit: ['int']"]
    assert not is_over
    messages += [*new, says("", call("act", {"number": 4}))]
    assert environment.step(messages)[1]
    assert environment.reward(messages) == [-1.0, 1.0]
    with pytest.raises(RuntimeError, match="refuses step: out of order"):
        environment.step([*messages, says("", call("act", {}))])
    environment.close()


def test_a_server_of_openenv_is_acted_on_by_text(server):
    environment = find_environment({"name": "openenv", "url": server, "text": "number"}).make()
    messages, tools = environment.reset(ROW)
    assert tools is None
    new, is_over = environment.step([*messages, says("no number")])
    assert new == [turn("user", "error: the arguments do not fit: ['int']")]
    assert not is_over
    assert environment.reward([*messages, says("no number")]) == [0.0]
    environment.close()


VERIFIERS = """
import openai, types
class EvalClientConfig:
    def __init__(self, base_url, api_key_var): self.base_url = base_url
class ModelContext:
    def __init__(self, model, client): self.model, self.client = model, client
class SingleAgentEnvConfig:
    def __init__(self, taskset, agent): self.taskset, self.agent = taskset, agent
class SingleAgentEnv:
    def __init__(self, config):
        assert config.taskset == {"id": "sums"}
        assert config.agent["runtime"] == {"type": "subprocess"}
        self.taskset = [f"{i}+1?" for i in range(4)]
    def serving(self):
        return Serving()
    async def run_episode(self, task, context):
        client = openai.AsyncOpenAI(base_url=context.client.base_url, api_key="none", max_retries=0)
        messages = [{"role": "user", "content": task}]
        answer = await client.chat.completions.create(model=context.model, messages=messages)
        is_right = answer.choices[0].message.content == str(eval(task.strip("?")))
        trace = types.SimpleNamespace(reward=float(is_right), errors=[])
        return types.SimpleNamespace(ok=task != "3+1?", traces=[trace],
                                     errors=[types.SimpleNamespace(message="no task")])
class Serving:
    async def __aenter__(self): return self
    async def __aexit__(self, *_): return False
"""


@pytest.fixture
def verifiers(tmp_path, monkeypatch):
    """A package with the part of verifiers' interface that is called."""
    files = ("__init__", "v1/__init__", "v1/clients", "v1/configs/__init__", "v1/configs/client")
    files += ("v1/envs/__init__", "v1/envs/single_agent/__init__", "v1/envs/single_agent/env")
    for name in files:
        file = tmp_path / f"verifiers/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("from stand_in import *\n")
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(VERIFIERS))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("verifiers", "stand_in")]:
        del sys.modules[name]


def test_a_task_of_verifiers_asks_the_model_and_rewards_it(verifiers):
    spec = find_environment({"name": "verifiers", "taskset": "sums"})
    assert spec.rewards
    for number, said, reward in ((2, "3", 1.0), (1, "3", 0.0)):
        environment = spec.make()
        messages, _ = environment.reset({**ROW, "task": number})
        assert messages == [turn("user", f"{number}+1?")]
        assert environment.step([*messages, says(said)]) == ([], True)
        assert environment.reward(messages) == reward
    environment = spec.make()
    messages, _ = environment.reset({**ROW, "task": 3})
    environment.step([*messages, says("4")])
    with pytest.raises(RuntimeError, match="no task"):
        environment.reward(messages)


@pytest.mark.parametrize(
    "entry, named",
    yaml.safe_load("""
- [endpoint, 'run: my_agent.py:rollout']
- [{name: endpoint, run: agent}, 'is no FILE.py:FUNCTION']
- [{name: endpoint, run: 'nowhere.py:f'}, nowhere.py is no file]
- [openenv, 'url: http://localhost:8000']
- [verifiers, 'taskset: my_taskset']
- [{name: verifiers, taskset: sums}, pip install verifiers uv]
"""),
)
def test_what_is_missing_is_named(entry, named):
    assert named in " ".join(environment_problems(entry))
