"""The verb `push`: an export, with its model card, to the Hugging Face hub."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.config.paths import ADAPTER_CONFIG, is_hub_id
from fsdp_trainer.config.verbs import PushConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError

ENDINGS = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt", ".md", ".py")
"""Of the files that exports consist of. Others, such as pickles, are not pushed."""
WEIGHTS = (".safetensors", ".safetensors.index.json")
TEXTS = (".json", ".jinja", ".txt", ".md", ".py")
SCANNED_BYTES = 2**24
"""Of each file of weights that are searched for secrets; text is at their beginning alone."""
SECRETS = {
    "a token of the hub": rb"\bhf_[A-Za-z0-9]{30,}",
    "an API key": rb"\b(sk-[\w-]{20,}|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}|gh[pousr]_\w{36})",
    "a key of AWS": rb"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "an address with a password": rb"://[\w.%+~-]*:[!#-.0-?A-~]+@",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
SECRET_NAME = re.compile(r"(?i)token(?!iz)|secret|password|api_?key|credential")
WHOLE = rb"(?<![\w.])%s(?![\w-])"
"""Pattern of a path that is not a part of a longer name."""
SHORTEST_SECRET = 12  # characters of a variable's value that are looked for
TITLE = "nothing was pushed"


def push(cfg: PushConfig) -> int:
    """Run the verb: `source=` a run or an export, `to=` the repository. Returns the exit code."""
    repo = repository(cfg.to)
    folder = pushed_folder(cfg.source)
    files = {file.relative_to(folder).as_posix(): file for file in files_of(folder)}
    contents: dict[str, str | bytes] = {name: str(file) for name, file in files.items()}
    contents |= with_base(folder, cfg.base)
    refuse_secrets(contents, folder)
    for name in files:
        print(f"  {name:34} {files[name].stat().st_size:15,} bytes")
    print(f"pushed {folder} to {send(repo, contents, cfg.private)}")
    return 0


def repository(name: str | None) -> str:
    if name is None:
        raise UserError(TITLE, "to", "is missing: a repository, as  to=org/name")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]{0,95}", name):
        raise UserError(TITLE, f"to={name}", "is no repository, which is  org/name")
    return name


def pushed_folder(source: str | None) -> Path:
    """Return the export that `source` names: a run's hf/, else its adapter/, or a folder itself.

    Raises UserError if it has both, or none.
    """
    if source is None:
        text = "is missing: a run or an export, as  fsdp-trainer push runs/x to=org/name"
        raise UserError(TITLE, "source", text)
    folder = Path(source).expanduser()
    candidates = [folder, folder / "hf", folder / "adapter"]
    exports = [each for each in candidates if is_export(each)]
    if not exports:
        text = (
            "is neither an export nor a run with one. Write it:"
            f"  fsdp-trainer export {source} out={folder.name}-hf"
        )
        raise UserError(TITLE, f"source={source}", text)
    if len(exports) > 1 and exports[0] != folder:
        text = f"has a whole model and an adapter: say which,  {exports[0]}  or  {exports[1]}"
        raise UserError(TITLE, f"source={source}", text)
    return exports[0]


def is_export(folder: Path) -> bool:
    names = ("config.json", ADAPTER_CONFIG)
    has_weights = any(folder.glob("*.safetensors"))
    return has_weights and any((folder / name).is_file() for name in names)


def files_of(folder: Path) -> Iterator[Path]:
    problems = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if is_hidden or (file.is_dir() and not file.is_symlink()):
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            problems.append(Problem(str(file), f"is a link out of the folder: {file.resolve()}"))
        elif file.suffix not in ENDINGS or not file.is_file():
            text = f"is no file of an export, which end in {' '.join(ENDINGS)}: move it away"
            problems.append(Problem(str(file), text))
        else:
            yield file
    if problems:
        raise UserError(TITLE, problems)


def with_base(folder: Path, base: str | None) -> dict[str, bytes]:
    """Return the files of an adapter that change for its base model to be found by others.

    Raises UserError if it names a folder of this machine and `base` gives no repository.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        if base:
            raise UserError(TITLE, f"base={base}", "only counts for an adapter")
        return {}
    config = read_object(folder / ADAPTER_CONFIG, TITLE)
    named = str(config.get("base_model_name_or_path") or "")
    if base is None:
        if is_hub_id(named):
            return {}
        text = (
            f"its base model is {named or 'nowhere'}, which nobody else has.\n"
            "Name it on the hub,  base=org/name ; a base of your own is pushed first"
        )
        raise UserError(TITLE, str(folder / ADAPTER_CONFIG), text)
    config["base_model_name_or_path"] = repository(base)
    changed = {ADAPTER_CONFIG: json.dumps(config, indent=2).encode()}
    card = folder / "README.md"
    if card.is_file():
        text = re.sub(r"(?m)^base_model:.*\n", "", card.read_text(encoding="utf-8"), count=1)
        changed[card.name] = text.replace("---\n", f"---\nbase_model: {base}\n", 1).encode()
    return changed


def searched(name: str, content: str | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    with Path(content).open("rb") as file:
        return file.read(-1 if name.endswith(TEXTS) else SCANNED_BYTES)


def refuse_secrets(contents: dict[str, str | bytes], folder: Path) -> None:
    """Raise UserError for files with secrets, or with paths of this machine.

    contents: see `send`.
    """
    own = {
        f"the value of {name} of the environment": either_way(value)
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET and not os.path.exists(value)
    }
    # a vocabulary has tokens such as /data and /home
    parent = folder.resolve().parent
    place = parent if len(parent.parts) > 2 else folder.resolve()
    places = {"a path of this machine": WHOLE % either_way(str(place))}
    if len(Path.home().parts) > 1:
        places["a path of your home"] = WHOLE % either_way(str(Path.home())) + rb"/\w"
    problems = []
    for name, content in contents.items():
        text = searched(name, content)
        looked_for = SECRETS | own | (places if name.endswith(TEXTS) else {})
        reasons = [what for what, pattern in looked_for.items() if re.search(pattern, text)]
        problems += [Problem(name, f"holds {what}: take it out") for what in reasons]
    if problems:
        raise UserError(TITLE, problems)


def either_way(text: str) -> bytes:
    """Return a pattern for a text, as it is and as JSON writes it."""
    written = os.fsencode(text), json.dumps(text)[1:-1].encode()
    return b"(?:%s|%s)" % tuple(map(re.escape, written))


def send(repo: str, contents: dict[str, str | bytes], private: bool) -> str:
    """Create the repository if there is none, and upload the files in one commit.

    contents: the path or the bytes of each file, by its name there. Returns the address, and who
    can read it. A file that a broken upload has sent is not sent again by the next. Raises
    UserError and RunFailed.
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        text = "needs the hub's own client:  pip install 'fsdp_trainer[hub]'"
        raise UserError(TITLE, f"to={repo}", text) from None
    api = HfApi(library_name="fsdp_trainer")
    url = str(ask_hub(repo, lambda: api.create_repo(repo, private=private, exist_ok=True)))
    there = ask_hub(repo, lambda: api.model_info(repo))
    if private and not there.private:
        text = "exists and everybody can read it. Use  private=false  to push there"
        raise UserError(TITLE, f"to={repo}", text)
    old = {file.rfilename for file in there.siblings or ()} - contents.keys()
    if weights := sorted(name for name in old if name.endswith(WEIGHTS) and "/" not in name):
        text = (
            f"has other weights, which may be loaded in place of these: {', '.join(weights)}.\n"
            "Delete them there, or use another name"
        )
        raise UserError(TITLE, f"to={repo}", text)
    files = [CommitOperationAdd(name, content) for name, content in contents.items()]
    message = "A model trained with fsdp_trainer"
    ask_hub(repo, lambda: api.create_commit(repo, files, commit_message=message))
    return f"{url}, {'private' if there.private else 'public'}"


def ask_hub(repo: str, request: Callable[[], Any]) -> Any:
    """Return the answer of the hub. Raises UserError if it refuses, RunFailed if it is gone."""
    try:
        return request()
    except Exception as error:  # of the hub's client, of the network under it, of the card's form
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = safe(next(iter(str(error).strip().splitlines()), type(error).__name__)).rstrip(".")
        if status in (401, 403):
            text += "\nLog in by  hf auth login  with a token that may write there"
        if (status or 500) < 500 or isinstance(error, ValueError):
            raise UserError(TITLE, f"to={repo}", text) from None
        again = "Type the same again to go on: what has arrived is not sent again"
        raise RunFailed(f"the upload to {repo} broke off: {text}.\n{again}") from None
