"""The verb `chat`: serve a page and OpenAI's API until Ctrl-C."""

import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from fsdp_trainer.apps.chat.requests import LOCAL_ADDRESSES, ChatDefaults
from fsdp_trainer.config.verbs import ChatConfig
from fsdp_trainer.errors import Problem, UserError

TOKEN = "FSDP_TRAINER_CHAT_TOKEN"
"""Environment variable in place of the key `token`, which everybody on the machine can read."""
GRACE_SECONDS = 10  # longest wait for connections to end after Ctrl-C


def chat(cfg: ChatConfig) -> int:
    """Serve a model until Ctrl-C. Returns the exit code."""
    cfg = replace(cfg, token=cfg.token or os.environ.get(TOKEN) or None)
    check(cfg)
    listening = listen(cfg)
    try:
        return serve(cfg, listening)
    finally:
        listening.close()


def check(cfg: ChatConfig) -> None:
    problems = []
    if cfg.host not in LOCAL_ADDRESSES and not cfg.token:
        reason = (
            "other machines could use the model: they need a token.\n"
            f"Use  token=SECRET  or the environment variable {TOKEN}, which clients send as their"
            " API key, or  host=127.0.0.1"
        )
        problems.append(Problem(f"host={cfg.host}", reason))
    if cfg.token is not None and (not cfg.token.isascii() or not cfg.token.strip()):
        problems.append(Problem("token", "should be letters and digits, as  token=a8f3k2"))
    if problems:
        raise UserError("the server cannot be started", problems)


def listen(cfg: ChatConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((cfg.host, cfg.port))
        listening.listen(128)  # connections wait here until the model is loaded
    except OSError as error:
        listening.close()
        reason = f"{error.strerror or error}. Use another one, or  port=0  for any that is free"
        raise UserError(
            "the server cannot be started", f"host={cfg.host} port={cfg.port}", reason
        ) from None
    return listening


def serve(cfg: ChatConfig, listening: socket.socket) -> int:
    # imported late: torch is slow to import, and a problem with the settings needs none of them
    import torch
    import uvicorn

    from fsdp_trainer.apps.chat.app import AnsweringModel, Served, make_app
    from fsdp_trainer.apps.chat.engine import Engine
    from fsdp_trainer.apps.chat.readings import ServedReader
    from fsdp_trainer.apps.generate import Speaker, device_of
    from fsdp_trainer.checkpoint.load import whole_config
    from fsdp_trainer.methods.text_reader import TextReader

    source = Path(str(cfg.source))
    loading = source, device_of(cfg.device), getattr(torch, cfg.dtype), cfg.implementation
    name = source.resolve().name
    about = name, cfg.token, int(time.time()), str(cfg.source)
    served: AnsweringModel
    if whole_config(source, cfg.implementation).predicts:
        engine = Engine(Speaker.load(*loading), cfg.rows)
        vocabulary = engine.speaker.model.config.vocab_size
        defaults = ChatDefaults(cfg.temperature, cfg.top_p, cfg.max_tokens, cfg.rows, vocabulary)
        served = Served(*about, engine, defaults)
    else:
        served = ServedReader(*about, TextReader.load(*loading))
    app = make_app(served)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )

    class Server(uvicorn.Server):
        """A server that ends all answers at a signal, before it waits for their connections."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            served.close()
            super().handle_exit(sig, frame)

    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    key = "?token=…" if cfg.token else ""
    print(f"{name} answers at  http://{shown}:{port}/{key}  ({served.offer})", flush=True)
    print("Ctrl-C ends it", flush=True)
    served.start()
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises it again once everything is closed
            Server(settings).run(sockets=[listening])
    finally:
        served.close()
        served.join()
    print("ended", flush=True)
    return 0
