"""A stand-in for a vLLM server, with the same API, which samples from our model folders."""

import threading
from pathlib import Path

import torch
from json_server import JsonServer

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.generation.continuations import Continuation, Generation
from fsdp_trainer.generation.prompt_ranks import OneRank
from fsdp_trainer.generation.sampling import Sampling


class Refused(Exception):
    """An error response. args: status and message."""


class VllmServer(JsonServer):
    """A server of a model folder and of adapters for it.

    calls: (path, body) of each request, in order. failures: number of next requests to refuse with
    503, by path; None: all. before: called with the body of each request for an answer.
    """

    def __init__(self, folder):
        self.folder, self.calls, self.failures = Path(folder), [], {}
        self.before = lambda body: None
        self.name = str(folder)
        self.lock = threading.Lock()
        self.restart()
        super().__init__(self.answer)

    def restart(self):
        """Forget all adapters."""
        with self.lock:
            self.models = {self.name: load_model(self.folder)}
            self.parents = {}

    def asked(self, path):
        return [body for called, body in self.calls if called == path]

    def answer(self, path, body, _headers):
        if path == "/v1/completions":
            self.before(body)
        try:
            with self.lock:
                self.calls.append((path, body))
                remaining = self.failures.get(path, 0)
                if remaining is None or remaining > 0:
                    self.failures[path] = None if remaining is None else remaining - 1
                    raise Refused(503, "overloaded")
                return 200, getattr(self, path.strip("/").replace("/", "_"))(body)
        except Refused as refused:
            status, message = refused.args
            return status, {"error": {"message": message, "code": status}}

    def v1_models(self, body):
        cards = [
            {"id": name, "root": name, "parent": self.parents.get(name), "max_model_len": 64}
            for name in self.models
        ]
        return {"object": "list", "data": cards}

    def v1_load_lora_adapter(self, body):
        name = body["lora_name"]
        if name in self.models:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        self.models[name] = load_model(body["lora_path"])
        self.parents[name] = self.name
        return f"Success: LoRA adapter '{name}' added successfully."

    def v1_unload_lora_adapter(self, body):
        if body["lora_name"] not in self.parents:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        del self.models[body["lora_name"]], self.parents[body["lora_name"]]
        return "Success"

    def collective_rpc(self, body):
        assert body == {"method": "reload_weights"}
        self.models[self.name] = load_model(self.folder)
        return {"results": [None]}

    def reset_prefix_cache(self, body):
        return ""

    @torch.no_grad()
    def v1_completions(self, body):
        if body["model"] not in self.models:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        sampling = Sampling(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            seed=body["seed"],
            log_probabilities=True,
        )
        answer = Continuation(body["prompt"], sampling, 64 - len(body["prompt"]))
        model = self.models[body["model"]]
        for _ in Generation(model, sampling, torch.device("cpu")).run(
            [answer], body["stop_token_ids"], OneRank()
        ):
            pass
        tokens = answer.tokens + ([] if answer.stop is None else [answer.stop])
        given = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": answer.log_probabilities,
        }
        reason = "length" if answer.stop is None else "stop"
        return {"choices": [{"index": 0, "text": "", "logprobs": given, "finish_reason": reason}]}
