"""Transfer of the weights in training to a server that answers prompts."""

import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.web import RequestFailed
from fsdp_trainer.checkpoint.exports.adapter_export import export_adapter
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint
from fsdp_trainer.checkpoint.frozen_weights import Base
from fsdp_trainer.checkpoint.state import weights
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.paths import checkpoint_name
from fsdp_trainer.config.rules.rules_server import sends_adapter
from fsdp_trainer.config.schema import Adapter
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.rl.serving.policy_server import PolicyServer


@dataclass
class PolicyWeights:
    """Writes the weights to a folder that the server reads, and makes it load them.

    All ranks first write a checkpoint without optimizer state. Rank 0 then exports it and sends the
    requests to the server. This way weights of any sharding and any model family can be sent.
    """

    adapter: Adapter
    run_name: str
    folder: Path
    """The folder that the server reads: with complete weights, or with the adapters."""
    model: Decoder
    server: PolicyServer
    store: CheckpointStore
    served: str
    """Name of the model that the server was started with."""
    base: Base | None
    """Origin of the frozen weights."""
    dtypes: dict[str, str]
    """Number formats of all imported weights."""
    _sent_adapter: str = ""

    def send(self, step: int) -> str:
        """Send the weights. Returns the name of the served model that has them. Collective.

        step: optimizer steps done by these weights. Raises the same RunFailed or UserError on all
        ranks.
        """
        state = {
            "dtypes": self.dtypes,
            "frozen": asdict(self.base) if self.base else None,
            "data": None,
            "best_step": -1,
        }
        self.store.save(step, weights(self.model), state, time.perf_counter())
        phases.enter("export", step)
        outcome: tuple[str, Exception | None] = ("", None)
        checkpoint = self.store.folder / checkpoint_name(step)
        if dist.get_rank() == 0:
            outcome = self._hand_over(checkpoint, step)
            shutil.rmtree(checkpoint, ignore_errors=True)
        name, failure = gather(outcome)[0]
        if failure:
            raise failure
        return name

    def _hand_over(self, checkpoint: Path, step: int) -> tuple[str, Exception | None]:
        """Export and send the weights; return the name of the served model, or else the error."""
        try:
            if sends_adapter(self.adapter):
                return self._send_adapter(checkpoint, step), None
            return self._send_folder(checkpoint), None
        except UserError as error:
            return "", error
        except OSError as error:
            return "", RunFailed(f"cannot write the weights for the server: {error}")
        except RequestFailed as error:
            text = f"the server {self.server.url} does not take the weights: {error.args[0]}"
            return "", RunFailed(f"{text}\n{self._advice()}")

    def _send_adapter(self, checkpoint: Path, step: int) -> str:
        name = f"{self.run_name}-{step:08d}"
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        export_adapter(checkpoint, target)
        # the server may have an adapter of the same name from before a restart of the run
        for old in {name, self._sent_adapter} - {""}:
            with suppress(RequestFailed):
                self.server.unload_adapter(old)
        self.server.load_adapter(name, target.resolve())
        if self._sent_adapter and self._sent_adapter != name:
            shutil.rmtree(self.folder / self._sent_adapter, ignore_errors=True)
        self._sent_adapter = name
        return name

    def load_again(self, name: str) -> None:
        """Make a server that has lost an adapter, as by a restart, load it again.

        Not collective. Several ranks may do so at the same time: those that come later are refused.
        """
        with suppress(RequestFailed):
            self.server.load_adapter(name, (self.folder / name).resolve())

    def _send_folder(self, checkpoint: Path) -> str:
        export_checkpoint(checkpoint, self.folder)
        self.server.reload_weights()
        return self.served

    def _advice(self) -> str:
        if sends_adapter(self.adapter):
            return (
                "It takes adapters when started with  VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve"
                f" … --enable-lora --max-lora-rank {self.adapter.rank}\nand reads"
                f" {self.folder}, which must be on a disk of its own machine too"
            )
        return (
            "It reads its folder again when started with  VLLM_SERVER_DEV_MODE=1 vllm serve"
            f" {self.folder}"
        )
