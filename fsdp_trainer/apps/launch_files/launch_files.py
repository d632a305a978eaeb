"""The command `launch-files`: writes a file that starts the composed run.

For Slurm, Kubernetes, Ray, Docker or SkyPilot. Needs no torch.
"""

import math
import re
import shlex
from dataclasses import Field, fields
from pathlib import Path

import jinja2

from fsdp_trainer.config.check import Report
from fsdp_trainer.config.composing.overrides import quoted, require_no_secrets
from fsdp_trainer.config.data_files import entries
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.input_checks import require_training_inputs
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.verbs import LaunchFiles, LaunchFilesConfig
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.errors import Problem, UserError

KINDS = table_beside(__file__)
FILES, START, ONLY = KINDS["files"], KINDS["start"], KINDS["only"]
NAME = r"[\w.,:@/+-]+"
WRITTEN = {"partition": NAME, "account": NAME, "claim": NAME, "gpu": NAME, "out": r"[^\n\r]+"}
"""Keys copied into a file unquoted, and the text they may have.

A line break in one of them would begin a new command.
"""
UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]")
"""Characters that YAML takes for the end of a line or refuses, and control characters."""


def launch_files(cfg: LaunchFilesConfig, words: list[str]) -> int:
    """Write the file of `cfg.kind`. words: the overrides that `cfg` was composed from.

    Raises UserError for settings that this kind of job cannot have, or if the file cannot be
    written.
    """
    kind = checked(cfg)
    _check_characters(words)
    require_no_secrets(words)
    name = re.sub(r"[^\w.-]+", "-", str(cfg.run.name))
    file = Path(cfg.out or f"launch/{name}") / FILES[kind]
    text = render(cfg, kind, name, file, words)
    try:
        if file.exists() and file.read_text() != text:
            reason = (
                "is there with other contents, perhaps your own changes: delete it, or write"
                " elsewhere with  out=FOLDER"
            )
            raise UserError("nothing was written", str(file), reason)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except (OSError, UnicodeError) as error:  # UnicodeError: an argument that is no text
        raise UserError("nothing was written", f"out={file.parent}", str(error)) from None
    path, folder = (shlex.quote(str(each)) for each in (file, file.parent))
    print(f"wrote  {file}\nstart  {START[kind].format(path, folder=folder)}")
    if kind == "docker" and cfg.nodes > 1:
        print("on every node, with HEAD=NAME of one of them in the environment")
    world = f"plan.world_size={cfg.nodes * ranks_of_node(cfg)}"
    line = shlex.join(["fsdp-trainer", "prove", *training_words(words), world])
    print(f"before that, here or on a laptop, a small copy of it:\n       {line}")
    return 0


def training_words(words: list[str]) -> list[str]:
    own = {*(f.name for f in fields(LaunchFiles)), "run.name", "launch.groups"}
    return [word for word in words if word.lstrip("+").partition("=")[0] not in own]


def ranks_of_node(cfg: LaunchFilesConfig) -> int:
    given = cfg.launch.nproc_per_node
    return max(1, cfg.gpus_per_node) if given == "auto" else given


def checked(cfg: LaunchFilesConfig) -> str:
    """Check the settings and return the kind. Raises UserError with all that are in conflict."""
    report = Report({}, [], set())
    require_training_inputs(cfg, report)
    if cfg.kind is None:
        report.add("kind", None, f"say for what:  {'  '.join(f'kind={kind}' for kind in FILES)}")
    for f in fields(LaunchFiles):
        _check_field(cfg, f, report)
    if cfg.kind in ("kubernetes", "trainjob", "ray") and cfg.claim is None:
        reason = "name one: all nodes must see the runs' folder, e.g.  claim=shared"
        report.add("claim", None, reason)
    _check_launch(cfg, report)
    if cfg.checkpoint.resume != "auto" and cfg.kind != "docker":
        reason = (
            "the job is started again after a fault, and must resume then. Leave it out; weights"
            " to begin with are  model.init_from=…"
        )
        report.add("checkpoint.resume", cfg.checkpoint.resume, reason)
    try:
        parse_duration(cfg.time)
    except ValueError as error:
        report.add("time", cfg.time, str(error))
    report.close()
    return str(cfg.kind)


def _check_launch(cfg: LaunchFilesConfig, report: Report) -> None:
    if cfg.launch.hosts:
        reason = "the files say where nodes run. How many there are is  nodes=2"
        report.add("launch.hosts", cfg.launch.hosts, reason)
    if cfg.launch.nodes > 1:
        count = cfg.launch.nodes
        reason = f"the files contain the rendezvous. Set the number of nodes with  nodes={count}"
        report.add("launch.nodes", count, reason)
    if cfg.launch.groups > 1 and cfg.kind in ("docker", "skypilot", "ray"):
        reason = "the file starts one group. Write one for each, with its  replicas.id  and  out"
        report.add("launch.groups", cfg.launch.groups, reason)


def _check_characters(words: list[str]) -> None:
    """Raise UserError for overrides with characters that cannot be written into a file."""
    matches = ((word, UNWRITABLE.search(word)) for word in words)
    problems = [
        Problem(repr(word), f"has the character U+{ord(match[0]):04X}, which the file cannot hold")
        for word, match in matches
        if match
    ]
    if problems:
        raise UserError("nothing was written", problems)


def _check_field(cfg: LaunchFilesConfig, f: Field, report: Report) -> None:
    value = getattr(cfg, f.name)
    if cfg.kind not in (None, *ONLY.get(f.name, FILES)) and value != default_of(f):
        kinds = "  or  ".join(f"kind={kind}" for kind in ONLY[f.name])
        report.add(f.name, value, f"only counts with  {kinds}")
    if value is not None and f.name in WRITTEN and not re.fullmatch(WRITTEN[f.name], value):
        reason = "must be a name, of letters, digits and  _ . , : @ / + -"
        report.add(f.name, value, "must be one line" if f.name == "out" else reason)


def render(cfg: LaunchFilesConfig, kind: str, name: str, file: Path, words: list[str]) -> str:
    """Return the text of the file.

    name: the run's name without special characters; file: path of the file; words: overrides.
    """
    trained = training_words(words)
    given = {f.name: getattr(cfg, f.name) for f in fields(LaunchFiles)}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    run = map(shlex.quote, [*trained, f"run.name={quoted(str(cfg.run.name))}"])
    rendezvous = f' launch.nodes={cfg.nodes} launch.rendezvous="$HEAD:29500"'
    start = f"exec fsdp-trainer train {' '.join(run)}{rendezvous if cfg.nodes > 1 else ''}"
    return environment.get_template(f"{FILES[kind]}.jinja").render(
        **given,
        command="\n".join([*cfg.setup, start]),
        name=name,
        dns_name=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "run",
        file=file,
        words=" \\\n    ".join(
            map(shlex.quote, [*trained, f"run.name={quoted(str(cfg.run.name))}"])
        ),
        image_word=shlex.quote(cfg.image),
        own_image=cfg.image != LaunchFiles.image,
        minutes=math.ceil(parse_duration(cfg.time) / 60),
        cpus_per_node=cfg.cpus_per_gpu * max(1, cfg.gpus_per_node),
        ranks=ranks_of_node(cfg),
        groups=cfg.launch.groups,
        mounts="".join(f" -v {shlex.quote(f'{folder}:{folder}')}" for folder in outside(cfg)),
    )


def outside(cfg: LaunchFilesConfig) -> list[str]:
    """Return the folders with an absolute path that the run reads or writes.

    For a file, its folder is returned. Folders inside another one of the list are left out.
    """
    data = [
        entry.path for where in (cfg.data.path, cfg.data.validation) for entry in entries(where)
    ]
    named = [
        cfg.run.root,
        cfg.data.cache,
        cfg.compile.cache,
        cfg.model.init_from,
        cfg.tokenizer.path,
        *data,
    ]
    paths = [Path(path) for path in named if path and path.startswith("/")]
    folders = {
        next(
            (p for p in (path, *path.parents) if not (p.suffix or re.search(r"[*?[]", str(p)))),
            path,
        )
        for path in paths
    }
    return sorted(str(folder) for folder in folders if not folders & {*folder.parents})
