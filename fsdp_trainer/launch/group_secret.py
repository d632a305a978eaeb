"""The secret of the groups of ranks that share a run, by which they know each other."""

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from fsdp_trainer.base.process import wait_until
from fsdp_trainer.config.paths import LAG_SECONDS
from fsdp_trainer.errors import UserError

TOKEN = "FSDP_TRAINER_REPLICAS_TOKEN"
"""The environment variable with the secret. No record has its value."""
FILE = ".groups-secret"
"""The file in a run's folder with the secret, if the environment has none."""
DIGITS = 64


def secret_of_groups(run: Path) -> bytes:
    """Return the secret of the environment, or else that of the run's folder.

    The first rank of all groups makes the latter, which only its owner may read. Raises UserError.
    """
    if token := os.environ.get(TOKEN):
        return token.encode()
    file = run / FILE
    advice = f"Set  {TOKEN}  to the same secret in all groups"
    try:
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(descriptor, "w") as opened:
                opened.write(secrets.token_hex(DIGITS // 2))
        if wait_until(lambda: file.is_file() and file.stat().st_size == DIGITS, LAG_SECONDS):
            return file.read_bytes()
        reason = f"is not whole. Delete it, or:  {advice}"
    except OSError as error:
        reason = f"cannot be made or read ({error.strerror}). {advice}"
    raise UserError("the groups have no secret", str(file), reason)


def proof(secret: bytes, *parts: bytes) -> hmac.HMAC:
    """Return a keyed hash of the parts, which only those who know the secret can compute."""
    mac = hmac.new(secret, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac
