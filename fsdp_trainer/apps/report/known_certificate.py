"""The certificate of a run, which `prove` writes into the run's folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.paths import CERTIFICATE

NOT_COMPARED = {"run", "launch", "logging", "checkpoint", "evaluation", "profile"}
"""Groups of keys that decide no numbers."""


@dataclass(frozen=True)
class KnownCertificate:
    """A certificate as it is shown.

    checks, not_proved: as in the JSON of `prove`. changed: keys that the run had otherwise than the
    configuration that was proved.
    """

    ok: bool
    checks: list[Json]
    not_proved: list[Json]
    changed: list[str]

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        wrong = sum(not check["ok"] for check in self.checks)
        result = f"{len(self.checks)} checks, " + (f"{wrong} differ" if wrong else "all equal")
        other = f"; with other values of {' '.join(self.changed)}" if self.changed else ""
        return f"{result}{other}"


def read_certificate(
    folder: Path, configuration: Json, remark: Callable[[str], None]
) -> KnownCertificate | None:
    """Return the certificate in a run's folder; None if there is none.

    configuration: the run's, by dotted key. remark: called with why a file cannot be read.
    """
    try:
        content = json.loads((folder / CERTIFICATE).read_text(encoding="utf-8"))
        keys = content["keys"]
        checks = [
            {"name": c["name"], "ok": c["ok"], "detail": c["detail"]} for c in content["checks"]
        ]
        not_proved = [{"name": c["name"], "command": c["command"]} for c in content["not_proved"]]
        changed = sorted(
            key
            for key in keys.keys() & configuration.keys()
            if keys[key] != configuration[key] and key.partition(".")[0] not in NOT_COMPARED
        )
        return KnownCertificate(bool(content["ok"]), checks, not_proved, changed)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        remark(f"{CERTIFICATE} cannot be read: {error}")
        return None
