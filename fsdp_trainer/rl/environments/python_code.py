"""The environment `python`: a tool that runs Python, confined, with a state between its calls."""

import secrets
import tempfile
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.environments.environment import Start, ToolEnvironment, tool
from fsdp_trainer.rl.rewards.code import NOT_CONFINED, run_confined
from fsdp_trainer.rl.rewards.sandbox import UNPROTECTED


@dataclass
class Python(ToolEnvironment):
    """A tool that runs Python code and answers with what it prints, or with its last value.

    Names are kept between calls: earlier code of the rollout that raised nothing is run again,
    without its output. Each call is a process, confined as that of the reward `code`.
    """

    name: ClassVar[str] = "python"
    tools: ClassVar[tuple[dict[str, Any], ...]] = (
        tool(
            "python",
            "Runs Python code and returns what it prints. Names are kept between calls.",
            code="Python source",
        ),
    )
    cpu_seconds: int = key(4, "processor time that a call may take", minimum=1)
    seconds: float = key(20.0, "time until a call is ended, whatever it does", above=0)
    memory_mib: int = key(512, "MiB of addresses that a call may use", minimum=64)
    earlier: list[str] = field(default_factory=list)

    def reset(self, row: dict[str, Any]) -> Start:
        self.earlier = []
        return super().reset(row)

    def call(self, /, code: Any = None, **others: Any) -> str:
        """Return what the code prints and the last line of an error. Raises UserError."""
        if others or code is None:
            return "error: python takes one argument, code"
        token = secrets.token_hex(16)
        job = {
            "earlier": self.earlier,
            "cell": str(code),
            "cpu_seconds": self.cpu_seconds,
            "memory_mib": self.memory_mib,
        }
        with tempfile.TemporaryDirectory(prefix="fsdp_trainer_python_") as folder:
            verdict = run_confined(job, [token], folder, self.seconds)
        if verdict == UNPROTECTED:
            raise UserError("Python cannot be run", "python", NOT_CONFINED)
        given, _, rest = verdict.partition(" ")
        if given != token:
            return f"error: the code was ended: at most {self.cpu_seconds} s, {self.memory_mib} MiB"
        raised, _, printed = rest.partition(" ")
        if raised == "0":
            self.earlier.append(str(code))
        return printed or "(no output)"
