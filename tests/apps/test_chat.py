"""The verb `chat`: OpenAI's interface and the page, on a server in this process and alone."""

import asyncio
import json
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from browser import browser_page, settle
from folders import table
from forked import Forked
from image_models import make_image_folder, write_pictures
from PIL import Image
from texts import make_tokenizer, turn
from world import wait_until
from zoo import make_folder

from fsdp_trainer.apps.chat.engine import AnswerText, ChatJob, Engine, first_stop, settled_text
from fsdp_trainer.apps.chat.requests import (
    BadRequest,
    ChatDefaults,
    read_request,
    read_text_request,
)
from fsdp_trainer.apps.generate import Asked
from fsdp_trainer.config.verbs import ChatConfig, GenerateConfig
from fsdp_trainer.data.records.messages import read_turns
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.evaluation.scoring import Ending, Scorer
from fsdp_trainer.generation import continuations
from fsdp_trainer.generation.continuations import Continuation, never
from fsdp_trainer.generation.sampling import Sampling

DEFAULTS = ChatDefaults(temperature=0.0, top_p=1.0, max_tokens=8, rows=4)
HI = [turn("user", "Hi")]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)
REQUESTS = table("apps/chat_requests.yaml")
LONG = 100_000  # tokens: up to the context


def test_a_text_ends_before_a_stop_string_and_holds_its_beginning_back():
    assert first_stop(["##", "b#"], "ab##c") == 1
    assert first_stop([], "abc") is None
    for text, given in {"ab": "ab", "a#": "a", "a##": "a#", "#a": "#a"}.items():
        assert settled_text(text, ["#b"]) == given
    assert settled_text("xyEN", ["END", "yEND"]) == "x"


def test_an_answer_ends_before_a_stop_string_of_several_tokens():
    tokenizer = TextTokenizer(make_tokenizer(), {}, set(), None)
    tokens = tokenizer.encode("one 世界 EN ENDS here")
    for stops, text in {("END",): "one 世界 EN ", (): "one 世界 EN ENDS here"}.items():
        sent = []
        job = ChatJob([1], Sampling(max_tokens=len(tokens)), list(stops), sent.append)
        continuation = Continuation(job.prompt, job.sampling, LONG)
        answer = AnswerText(job, 0, continuation, tokenizer)
        for token in tokens:
            continuation.add(token, (), never)
            answer.advance()
        assert "".join(piece.text for piece in sent) == text
        assert sent[-1].finish == ("stop" if stops else "length")
        assert len(sent) > 4


def test_newer_names_of_a_request_are_read():
    request = read_request(REQUESTS["newer"], DEFAULTS)
    assert (request.settings.sampling.max_tokens, request.settings.stops) == (3, ["a"])
    assert request.messages == [turn("system", "Be brief.")]


def test_each_setting_of_a_request_has_an_effect_or_is_refused_by_name():
    defaults = replace(DEFAULTS, vocabulary=320)
    plain = read_request({"messages": HI}, defaults)
    assert plain.settings.sampling.max_tokens == 8
    assert read_request({"messages": HI, **REQUESTS["neutral"]}, defaults) == plain
    for settings in REQUESTS["refused"]:
        [key] = settings
        with pytest.raises(BadRequest, match=key) as raised:
            read_request({"messages": HI, **settings}, defaults)
        assert raised.value.param == key
    for settings, said in (
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"logit_bias": {"9" * 5000: 1}}, "ids of tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
    ):
        with pytest.raises(BadRequest, match=said):
            read_request({"messages": HI, **settings}, defaults)
    for odd in REQUESTS["refused turns"]:
        with pytest.raises(BadRequest):
            read_request({"messages": [odd]}, defaults)
    for body in (*REQUESTS["refused texts"], {"prompt": ["a"] * 2049}):
        with pytest.raises(BadRequest):
            read_text_request(body, defaults)
    assert read_text_request({"prompt": [1, 2]}, defaults).prompts == [[1, 2]]


def test_other_machines_need_a_token_which_may_come_from_the_environment(
    tmp_path, monkeypatch, program
):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    everywhere = f"source={tmp_path}", "host=0.0.0.0"
    monkeypatch.setenv("FSDP_TRAINER_CHAT_TOKEN", "")
    message = program("chat", *everywhere, code=2)
    assert "they need a token" in message
    assert "token=SECRET" in message
    assert message.count("fsdp-trainer:") == 1
    tokens = []
    monkeypatch.setattr(
        "fsdp_trainer.apps.chat.verb.serve", lambda cfg, _: tokens.append(cfg.token) or 0
    )
    program("chat", f"source={tmp_path}", "port=0")
    monkeypatch.setenv("FSDP_TRAINER_CHAT_TOKEN", "s3cret")
    program("chat", *everywhere, "port=0")
    assert tokens == [None, "s3cret"]


class ChatServer:
    """A server in this process."""

    def __init__(self, folder, token=None):
        import uvicorn

        from fsdp_trainer.apps.chat.app import Served, make_app
        from fsdp_trainer.apps.chat.verb import listen
        from fsdp_trainer.apps.generate import Speaker

        self.engine, self.token = Engine(Speaker.load(folder), rows=4), token
        self.socket = listen(ChatConfig(port=0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        app = make_app(Served("model", token, 0, "", self.engine, DEFAULTS))
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.engine.start()
        self.thread.start()

    def create(self, messages=HI, **settings):
        """Ask for an answer by OpenAI's client."""
        create = self.client().chat.completions.create
        return create(model="model", messages=messages, **settings)

    def client(self):
        openai = pytest.importorskip("openai")
        key = self.token or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def close(self):
        self.engine.close()
        self.server.should_exit = True
        self.engine.join()
        self.thread.join()
        self.socket.close()

    def status(self, path="/", body=None, **headers):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request) as response:
                return response.status
        except urllib.error.HTTPError as error:
            assert json.load(error)["error"]["message"]
            return error.code


@contextmanager
def served(folder, token=None):
    server = ChatServer(folder, token)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("chat") / "model"
    make_folder(folder, max_position_embeddings=16384, vocab_size=320, eos_token_id=None)
    for file in (*folder.glob("tokenizer*"), *folder.glob("*.jinja")):
        file.unlink()
    # one without a token that ends an answer: a long one lasts until the test ends it
    TextTokenizer(make_tokenizer(("<|x|>",)), {}, set(), TEMPLATE).save(folder)
    assert not load_tokenizer(folder).stop_ids
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def image_server(tmp_path_factory):
    folder = make_image_folder(tmp_path_factory.mktemp("images") / "model", "qwen2_5_vl")
    with served(folder) as server:
        yield server


def test_openais_client_gets_the_answers_of_generate(server, folder, program):
    reply = program("generate", folder, "prompt=Hi", "max_tokens=8", "format=json")
    text = json.loads(reply)["text"]
    assert [model.id for model in server.client().models.list()] == ["model"]
    create = server.create
    whole = create()
    [choice] = whole.choices
    assert choice.message.content == text
    assert choice.finish_reason == "length"
    speaker = server.engine.speaker
    prompt = speaker.encode(speaker.ask(HI).text)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 8)
    usage = {"include_usage": True}
    chunks = list(create(stream=True, stream_options=usage))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    middle = next(letter for letter in text[2:] if letter != "\ufffd")
    stopped = create(stop=[middle, "never"])
    assert stopped.choices[0].message.content == text[: text.index(middle)]
    assert stopped.choices[0].finish_reason == "stop"


def test_seeds_and_samples_give_the_same_answers_alone_and_together(server):
    def texts(seed):
        answer = server.create(n=3, seed=seed, temperature=1.5, top_p=0.9)
        return [choice.message.content for choice in answer.choices]

    alone = [texts(seed) for seed in range(4)]
    assert len({text for some in alone for text in some}) == 12
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(texts, range(4)))
    assert together == alone
    assert texts(None) != texts(None)


def test_a_short_answer_overtakes_a_long_one_and_a_closed_stream_ends(server):
    long = server.create(stream=True, max_tokens=LONG, seed=1)
    next(iter(long))
    assert server.create(max_tokens=2).usage.completion_tokens == 2
    assert not server.engine.is_idle
    long.close()
    wait_until(lambda: server.engine.is_idle)


def test_a_client_that_goes_away_ends_its_answer(server):
    import socket

    body = json.dumps({"messages": HI, "max_tokens": LONG, "temperature": 0.5}).encode()
    with socket.create_connection(server.socket.getsockname()) as connection:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: not server.engine.is_idle)
    wait_until(lambda: server.engine.is_idle)


def test_a_client_that_goes_away_while_it_sends_its_request_is_no_error():
    pytest.importorskip("starlette")
    from fsdp_trainer.apps.chat.app import complete, make_app

    path, sent = "/v1/completions", []
    answers = {path: partial(complete, served=None, read=read_text_request)}
    about = {"name": "model", "created": 0, "token": None, "refuse": None}
    app = make_app(SimpleNamespace(answers=answers, **about))

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": path}
    asyncio.run(app(scope | {"headers": [(b"host", b"127.0.0.1")]}, receive, send))
    assert sent[0] == 499


def test_a_long_conversation_does_not_hold_up_other_clients(server, monkeypatch):
    arrived, goes_on = threading.Event(), threading.Event()
    encode = server.engine.speaker.encode

    def encode_slowly(text):
        arrived.set()
        assert goes_on.wait(60)
        return encode(text)

    monkeypatch.setattr(server.engine.speaker, "encode", encode_slowly)
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": HI, "max_tokens": 1}
        long = pool.submit(server.status, "/v1/chat/completions", body)
        assert arrived.wait(60)
        try:
            assert server.status("/v1/models") == 200
        finally:
            goes_on.set()
        assert long.result() == 200


def test_requests_that_cannot_be_answered_get_a_message(server):
    for path, body, headers, status in REQUESTS["statuses"]:
        assert server.status(path, body, **headers) == status, (path, body, headers)
    for text in ("x" * 16384 * 101, "xyz" * 20_000):
        long = {"messages": [turn("user", text)]}
        assert server.status("/v1/chat/completions", long) == 400
    with urllib.request.urlopen(f"{server.url}/v1/models/") as response:
        assert json.load(response)["object"] == "list"


def test_a_token_is_asked_for_on_every_path(folder):
    with served(folder, token="s3cret") as server:
        for path in ("/", "/v1/models"):
            assert server.status(path) == 401
            assert server.status(path, Authorization="Bearer wrong") == 401
            assert server.status(f"{path}?token=s3cret", Host="gpu-node") == 200
        assert server.status("/v1/chat/completions", {"messages": HI}) == 401
        assert server.create().choices


def test_the_page_streams_stops_answers_again_and_takes_images_for_a_model_that_reads_them(
    server, image_server, tmp_path
):
    with browser_page(served="http://127.0.0.1:") as page:
        page.goto(server.url)
        assert page.title() == "model: chat"
        assert page.locator("#add").is_hidden()
        status, answers = page.locator("#status"), page.locator(".turn.assistant")
        done = page.locator(".busy").count
        page.keyboard.type("Hi <b>you</b>")
        page.keyboard.press("Enter")
        settle(lambda: "8 tokens" in status.inner_text(), page)
        assert page.locator(".turn.user").inner_text() == "Hi <b>you</b>"
        first = answers.inner_text()
        assert first
        page.locator("summary").click()
        page.locator("#temperature").fill("2")
        page.locator("#again").click()
        settle(lambda: done() == 0 and answers.inner_text() != first, page)
        assert answers.count() == 1
        page.locator("#max_tokens").fill("16000")
        page.locator("#text").fill("and now?")
        page.keyboard.press("Enter")
        settle(lambda: answers.count() == 2 and len(answers.last.inner_text()) > 3, page)
        page.keyboard.press("Escape")
        settle(lambda: status.inner_text() == "stopped", page)
        settle(lambda: server.engine.is_idle, page)
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        color = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(color)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(color) != light
        page.locator("#new").click()
        assert answers.count() == 0

        page.goto(image_server.url)
        page.locator("#file").set_input_files(str(tmp_path / write_pictures(tmp_path, 1)[0]))
        page.locator("#images img").wait_for()
        page.locator("#text").fill("what is it?")
        page.locator("#send").click()
        page.locator(".turn.user img").wait_for()
        settle(lambda: "tokens in" in status.inner_text(), page)
        assert answers.count() == 1


def test_sampling_settings_of_a_request_change_its_answer(server):
    def text(**settings):
        body = {"temperature": 0, "max_tokens": 12, **settings}
        return server.create(extra_body=body).choices[0].message.content

    plain = text()
    speaker = server.engine.speaker
    again = speaker.encode(plain)[0]
    for settings in (
        {"repetition_penalty": 9}, {"frequency_penalty": 2}, {"presence_penalty": 2},
        {"logit_bias": {str(again): -100}}, {"stop_token_ids": [again]},
    ):  # fmt: skip
        assert text(**settings) != plain, settings
    assert text(temperature=5, top_k=1) == text(temperature=5, min_p=1) == plain
    assert text(stop=[plain[0]], min_tokens=3)[:1] == plain[0] != text(stop=[plain[0]])[:1]


def test_a_turn_goes_on_where_it_ends(server):
    speaker = server.engine.speaker
    turns = [*HI, turn("assistant", "The answer ")]
    begun = speaker.template.continued(turns)
    assert begun == "user: Hi\nassistant: The answer "
    expected = "".join(speaker.say(Asked(begun), GenerateConfig(max_tokens=8)))
    answer = server.create(turns, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens == len(speaker.encode(begun))


def test_text_completions_give_the_likelihoods_that_lm_eval_reads(server, monkeypatch):
    monkeypatch.setattr(continuations, "AT_ONCE", 4)
    client, speaker = server.client().completions, server.engine.speaker
    prompts = [speaker.encode(text) for text in ("one question: an answer", "another 世界")]
    scorer = Scorer(speaker.model, 4, torch.device("cpu"))
    expected = scorer.likelihoods([Ending(tuple(tokens), len(tokens) - 3) for tokens in prompts])
    body = {"model": "model", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    answer = client.create(prompt=prompts, **body)
    for choice, score in zip(answer.choices, expected, strict=True):
        own = choice.logprobs.token_logprobs[3:-1]
        assert sum(own) == pytest.approx(score.total, rel=1e-5)
        best = [max(top.values()) for top in choice.logprobs.top_logprobs[3:-1]]
        assert (own == best) == score.is_greedy
        assert choice.logprobs.token_logprobs[0] is None
    settings = {**body, "prompt": ["one", "two"], "max_tokens": 4, "logprobs": None}
    whole = [choice.text for choice in client.create(**settings, n=2).choices]
    pieces = [""] * 4
    for chunk in client.create(**settings, n=2, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == whole
    assert [text[:3] for text in whole] == ["one", "one", "two", "two"]


def test_log_probabilities_of_a_turn_are_those_of_its_tokens(server):
    answer = server.create(logprobs=True, top_logprobs=2, max_tokens=6, temperature=0)
    content = answer.choices[0].logprobs.content
    written = b"".join(bytes(one.bytes) for one in content)
    assert written.decode(errors="replace") == answer.choices[0].message.content
    assert len(content) == 6
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)


def test_an_image_of_a_request_is_answered_as_by_generate(image_server, tmp_path):
    [name] = write_pictures(tmp_path, 1)
    content = b64encode((tmp_path / name).read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    question = [turn("user", [part, {"type": "text", "text": "what is it?"}])]
    answer = image_server.create(question, max_tokens=8)
    speaker = image_server.engine.speaker
    expected = speaker.answer(read_turns(question), GenerateConfig(max_tokens=8))
    assert answer.choices[0].message.content == "".join(expected)
    part["image_url"]["url"] = f"{tmp_path}/{name}"
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="should be a data URL"):
        image_server.create(question)
    Image.new("RGB", (1, 300)).save(tmp_path / "thin.png")
    broken = {"thin.png": "1 × 300 pixels is refused", name: "cannot be decoded"}
    for file, reason in broken.items():
        content = b64encode((tmp_path / file).read_bytes()[: 99 if file == name else None])
        part["image_url"]["url"] = f"data:image/png;base64,{content.decode()}"
        with pytest.raises(openai.BadRequestError, match=reason):
            image_server.create(question)


def test_ctrl_c_ends_the_server_and_its_streams(folder, tmp_path):
    command = [sys.executable, "-m", "fsdp_trainer", "chat", f"source={folder}", "port=0"]
    body = json.dumps({"messages": HI, "stream": True, "max_tokens": LONG}).encode()
    process = Forked(command, tmp_path / "log")
    try:
        wait_until(lambda: "Ctrl-C ends it\n" in process.said, process)
        url = re.search(r"http://\S+", process.said)[0]
        with urllib.request.urlopen(f"{url}v1/chat/completions", data=body) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            assert b"closing" in stream.read()
        assert process.wait() == 0
        assert process.said.endswith("Ctrl-C ends it\nended\n")
    finally:
        process.kill()
