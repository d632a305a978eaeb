"""`launch-files`, and the commands on all pages: what can be held of them without a cluster."""

import ast
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import yaml
from folders import REPO, TESTS, table
from world import read_json, wait_until

from fsdp_trainer.cli import VERBS
from fsdp_trainer.config.composing.compose import compose, options
from fsdp_trainer.config.composing.overrides import require_no_secrets
from fsdp_trainer.config.composing.source_words import as_source
from fsdp_trainer.config.composing.sweep_overrides import SweepLine

NASTY = [
    "+recipe=llama8b_sft", "data.path=[/shared/a.jsonl,\"/shared/it's $HOME (1), `b`.jsonl\"]",
    "data.fields={prompt: question, completion: 'an answer'}",
    "train.sample_prompts=['Say \"hi\" & go\\\\n', 'C:\\\\x; # no']",
    "launch.env={NCCL_DEBUG: INFO}", "optim.lr=2e-5",
]  # fmt: skip

NAMES = {"fsdp-trainer", "fsdp_trainer"}


def commands(path):
    """Every command line of the trainer in a page or the Dockerfile, with a value for each
    variable, but for blocks that show how one is refused."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".md":
        blocks = re.findall(r"(?m)^```[^\n]*\n(.*?)^```", text, re.S)
        own = re.findall(r"`(fsdp-trainer (?!VERB)[^`\n]+)`", path.read_text())
        text = "\n".join([*own, *(one for one in blocks if "in the configuration" not in one)])
    matches = []
    for line in text.splitlines():
        if re.search(r"-m fsdp_trainer |fsdp-trainer (?!-- |\[)", line):
            with_values = re.sub(r"\$\{\w+[^}]*\}|\$\w+", "value", line.lstrip("# "))
            matches.append(shlex.split(with_values, comments=True))
    return [words for words in matches if NAMES & {*words}]


def trainer_words(command):
    """Return what the trainer itself is given."""
    words = command[max(i for i, word in enumerate(command) if word in NAMES) + 1 :]
    return [*itertools.takewhile(lambda word: word not in (">", "|"), words)]


READING = ("export", "verify", "generate", "chat", "evaluate", "report", "convert", "push")
"""Verbs that read a `source`."""
PAGES = {
    REPO / "examples/launch/Dockerfile", *REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")
} - {REPO / "docs/mistakes.md"}  # fmt: skip


def test_every_command_line_of_the_pages_composes():
    lines = {tuple(trainer_words(c)) for page in PAGES for c in commands(page)}
    assert len(lines) > 150
    for words in sorted(lines):
        if words[0] == "-m":
            SweepLine(list(words[1:]))
        elif not {"-c", "-sc", "--help", "--config-dir", "config", "--version"} & {*words}:
            verb, more = (words[0], words[1:]) if words[0] in VERBS else ("train", words)
            compose(verb, with_source(verb, completed(verb, more)), inputs=False)


def completed(verb, words):
    """Return the words of a page, for a verb of training with what `…` and names stand for."""
    text = " ".join(words)
    words = [word.replace("=NAME", "=quickstart") for word in words if "…" not in word]
    if not options(verb):
        return words
    words = [
        re.sub(r"(objective.environment)=.*(py|ers).*", r"\1=user", w) for w in words if "=" in w
    ]
    added = ["objective.rewards=[exact]"] if "=grpo" in text and "rewards=" not in text else []
    added += [] if "recipe=" in text or "model" in text else ["model.init_from=FOLDER"]
    return [*words, *added] if "…" in text else words


def with_source(verb, words):
    """Return the words with the paths among them as `source`: the pages' folders do not exist."""
    paths = [word for word in words if not re.match(r"\w+=", word)] if verb in READING else []
    others = [word for word in words if word not in paths]
    return [*others, as_source(verb, paths, words)] if paths else others


@pytest.fixture
def write(monkeypatch, tmp_path, program):
    """`write("slurm", *words, code=0)`: the text of the file; `write.said`: what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(kind, *words, code=0):
        run.said = program("launch-files", f"kind={kind}", *words, code=code)
        kinds = (".sbatch", ".yaml", ".sh", ".py")
        files = [file for file in tmp_path.rglob("*") if file.suffix in kinds]
        return files[0].read_text() if code == 0 else ""

    return run


def started(tmp_path, script, **env):
    """The configuration that a script's command composes.

    Stands for srun, docker and torchrun: they start their last words, torchrun -m's.
    """
    trainer = (
        f'"{sys.executable}" -c "import sys, json; json.dump(sys.argv[1:], '
        f"open('{tmp_path}/words', 'w'))\" \"$@\""
    )
    find = 'while [ "$1" != {} ]; do shift; done; shift\n'
    stubs = {
        "fsdp-trainer": trainer,
        "srun": '"${@:3}"',
        "docker": find.format("fsdp-trainer") + trainer,
        "torchrun": find.format("fsdp_trainer") + trainer,
    }
    env = {**with_stubs(tmp_path, stubs), "MASTER_ADDR": "a", "MASTER_PORT": "1",
           "HEAD": "node0", **env}  # fmt: skip
    subprocess.run(["bash", "-c", script], env=env, check=True, timeout=600)
    verb, *words = read_json(tmp_path / "words")
    return asdict(compose(verb, words, inputs=False))


def with_stubs(folder, stubs):
    """Return the environment of a Slurm job in which these scripts stand for commands."""
    (folder / "bin").mkdir()
    for name, body in stubs.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "7", "PATH": path}


def pod_of(job, kind):
    """Return what a Kubernetes job says about its master or its workers."""
    return job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]


def script_of(kind, text):
    """Return the shell commands in a file."""
    if kind == "ray":
        return ast.literal_eval(re.search(r"(?m)^COMMAND = (.*)$", text)[1])
    if kind == "trainjob":
        return [*yaml.safe_load_all(text)][1]["spec"]["trainer"]["args"][0]
    if kind == "kubernetes":
        return pod_of(yaml.safe_load(text), "Master")["containers"][0]["args"][0]
    return yaml.safe_load(text)["run"] if kind == "skypilot" else text


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "trainjob", "ray", "docker", "skypilot"])
def test_what_is_started_is_the_run_that_was_composed(write, tmp_path, kind):
    storage = ["claim=null"] if kind == "skypilot" else []
    text = write(kind, *NASTY, *storage, "nodes=1", "out=here")
    expected = asdict(compose("train", NASTY, inputs=False))
    assert started(tmp_path, script_of(kind, text)) == expected
    assert expected["run"]["name"] == "llama8b_sft"
    assert "here/" in write.said


@pytest.mark.parametrize("claim", ["123", "@disk", "a,b"])
def test_any_name_of_a_claim_is_a_text(write, claim):
    text = write("kubernetes", "+recipe=quickstart", f"claim='{claim}'")
    pod = pod_of(yaml.safe_load(text), "Master")
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": claim}


def test_nodes_in_containers_meet(write, tmp_path):
    launch = started(tmp_path, write("docker", "+recipe=quickstart", "nodes=3"))["launch"]
    assert (launch["nodes"], launch["rendezvous"]) == (3, "node0:29500")
    assert "HEAD" in write.said


def test_nodes_in_a_cloud_meet_at_the_first_one(write, tmp_path):
    words = ["+recipe=quickstart", "nodes=3", "claim=null", "setup=['export SAID=yes']"]
    task = yaml.safe_load(write("skypilot", *words))
    env = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6", "SKYPILOT_NODE_RANK": "1"}
    launch = started(tmp_path, task["run"], **env)["launch"]
    assert (launch["nodes"], launch["rendezvous"]) == (3, "10.0.0.4:29500")
    assert task["run"].startswith("export SAID=yes\n")
    assert task["workdir"] == "."


WRITTEN = table("apps/launch_files/words.yaml")
"""Words by the file that they write, which lies beside them as it should be."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_what_its_words_ask_for_to_the_letter(write, name):
    """`WRITE=1 pytest tests/apps/test_launch_files.py` writes the files anew: look at them."""
    expected = TESTS / "apps/launch_files" / name
    text = write(*WRITTEN[name]["words"])
    if os.environ.get("WRITE"):
        expected.write_text(text)
    assert text == expected.read_text()
    assert WRITTEN[name]["said"] in write.said


GROUPS = ["replicas.method=sync", "replicas.lighthouse=node0:29510", "launch.groups=3"]


def test_a_batch_script_for_groups_is_an_array_with_one_job_a_group(write, tmp_path):
    script = write("slurm", *NASTY, *GROUPS, "nodes=2")
    assert re.search(r"(?m)^#SBATCH --array=0-2$", script)
    cfg = started(tmp_path, script, SLURM_ARRAY_TASK_ID="2")
    assert (cfg["replicas"]["id"], cfg["launch"]["groups"]) == (2, 1)


def lacking(name, tree, fields):
    """Return what a tree has and the model of this name lacks, with those of the models within."""
    lacks = [f"{name}.{key}" for key in tree.keys() - fields[name].keys()]
    for key, value in tree.items():
        if inner := fields[name].get(key):
            parts = value if isinstance(value, list) else [value]
            lacks += [each for part in parts for each in lacking(inner, part, fields)]
    return lacks


TRAINJOB = table("inputs/trainjob_fields.yaml")
PYTORCHJOB = TRAINJOB | table("inputs/pytorchjob_fields.yaml")


def test_a_file_for_kubernetes_has_a_job_for_each_group(write):
    jobs = [*yaml.safe_load_all(write("kubernetes", *NASTY, *GROUPS, "nodes=2"))]
    assert len({job["metadata"]["name"] for job in jobs}) == 3
    for i, job in enumerate(jobs):
        assert lacking("KubeflowOrgV1PyTorchJob", job, PYTORCHJOB) == []
        (container,) = pod_of(job, "Worker")["containers"]
        assert container["args"][0].split()[-1] == f"replicas.id={i}"


def test_the_copy_of_the_schema_of_trainjobs_is_the_packages():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for name, copied in TRAINJOB.items():
        fields = getattr(models, name).model_fields
        assert {field.alias or key for key, field in fields.items()} == copied.keys(), name


def test_a_trainjob_has_only_fields_of_its_schema_and_says_what_is_started_again(write):
    groups = [*NASTY, *GROUPS, "nodes=2", "restarts=5", "gpus_per_node=4", "image=r.io/x:1"]
    documents = [*yaml.safe_load_all(write("trainjob", *groups))]
    assert [each["kind"] for each in documents] == ["TrainingRuntime", "TrainJob"] * 3
    for i, (runtime, job) in enumerate(zip(documents[::2], documents[1::2], strict=True)):
        for each in (runtime, job):
            assert each["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
            assert lacking(f"TrainerV1alpha1{each['kind']}", each, TRAINJOB) == []
        assert runtime["metadata"]["name"] == job["spec"]["runtimeRef"]["name"]
        trainer, spec = job["spec"]["trainer"], runtime["spec"]["template"]["spec"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
        assert trainer["args"][0].rstrip().endswith('launch.rendezvous="$PET_MASTER_ADDR:29500"')
        assert f"replicas.id={i}" in trainer["args"][0]
        assert spec["failurePolicy"]["maxRestarts"] == 5
        job = spec["replicatedJobs"][0]["template"]["spec"]
        rules = job["podFailurePolicy"]["rules"]
        actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules[:2]}
        assert actions == {75: "Ignore", 2: "FailJob"}
        assert job["template"]["spec"]["restartPolicy"] == "Never"


class FakeRay:
    """Stands for ray and its modules: methods of actors are called at once, in this process."""

    class exceptions:
        RayError = RuntimeError

    class Actor:
        """An actor's class, and an actor: `options` and methods are called by `remote`."""

        def __init__(self, kind):
            self.kind = kind

        def options(self, **options):
            return SimpleNamespace(remote=lambda: FakeRay.Actor(self.kind()))

        def __getattr__(self, name):
            return SimpleNamespace(remote=getattr(self.kind, name))

    util = SimpleNamespace(get_node_ip_address=lambda: "node0")
    init = kill = remove_placement_group = PlacementGroupSchedulingStrategy = lambda *_: None
    remote = lambda **options: FakeRay.Actor  # noqa: E731
    get = lambda value: value  # noqa: E731
    wait = lambda values, timeout: (values, [])  # noqa: E731

    def placement_group(bundles, strategy):
        return SimpleNamespace(ready=lambda: None)


@pytest.mark.parametrize(
    "codes, starts, code",
    yaml.safe_load("""
- [[0], 1, 0]
- [[75, 1, 75, 0], 4, 0]
- [[2], 1, 2]
- [[1, 1, 0], 2, 1]
"""),
)
def test_a_job_of_ray_starts_again_what_failed_or_stopped_in_order(
    write, tmp_path, monkeypatch, codes, starts, code
):
    modules = ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")
    for module in modules:
        monkeypatch.setitem(sys.modules, module, FakeRay)
    claim = f"claim={str(tmp_path)[1:]}"
    text = write("ray", "+recipe=quickstart", claim, "nodes=2", "gpus_per_node=0", "restarts=1")
    assert "ray job submit --working-dir launch/quickstart" in write.said
    cases = "\n".join(f"{i}) exit {each};;" for i, each in enumerate(codes, start=1))
    stub = f'echo "$HEAD" >> starts\ncase $(( ($(wc -l < starts) + 1) / 2 )) in\n{cases}\nesac'
    monkeypatch.setenv("PATH", with_stubs(tmp_path, {"fsdp-trainer": stub})["PATH"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        exec(compile(text, "ray_job.py", "exec"), {"__name__": "__main__"})
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == code
    assert (tmp_path / "starts").read_text() == "node0\n" * 2 * starts  # both nodes each time


def test_own_changes_are_not_written_over(write, tmp_path):
    write("slurm", "+recipe=quickstart")
    write("slurm", "+recipe=quickstart")  # the same again
    (file,) = tmp_path.rglob("*.sbatch")
    file.write_text("mine")
    write("slurm", "+recipe=quickstart", code=2)
    assert "out=" in write.said
    assert file.read_text() == "mine"


ENDS = table("apps/launch_files/ends.yaml")


@pytest.mark.parametrize("end", ENDS)
def test_a_batch_script_starts_again_what_failed_and_requeues_what_stopped_in_order(
    write, tmp_path, end
):
    script = write("slurm", "+recipe=quickstart", "restarts=2")
    does, code, message = ENDS[end]["starts"], ENDS[end]["code"], ENDS[end]["told"]
    cases = "\n".join(f"{i}) {body};;" for i, body in enumerate(does, start=1))
    stubs = {
        "srun": f"cd {tmp_path}; echo >> starts\ncase $(wc -l < starts) in\n{cases}\nesac",
        "scontrol": f'echo "$@" >> {tmp_path}/told',
    }
    process = subprocess.Popen(["bash", "-c", script], env=with_stubs(tmp_path, stubs))
    if end == "its time is up":
        wait_until((tmp_path / "waits").exists, process)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(600) == code
    assert (tmp_path / "starts").read_text().count("\n") == len(does)
    (tmp_path / "told").touch()
    assert (tmp_path / "told").read_text() == message


def test_the_dockerfile_copies_what_the_wheel_is_made_of():
    text = re.sub(r"\\\n", " ", (REPO / "examples/launch/Dockerfile").read_text())
    lines = re.findall(r"(?m)^([^#\s]\S*) +(.*)$", text)
    assert {name for name, _ in lines} <= {"FROM", "WORKDIR", "COPY", "RUN", "CMD"}
    assert lines[0][0] == "FROM"
    stages = {rest.split()[-1] for name, rest in lines if name == "FROM" and " AS " in rest}
    sources = set()
    for first, *rest in (rest.split() for name, rest in lines if name == "COPY"):
        if first.startswith("--"):
            assert first.removeprefix("--from=") in stages
        else:
            sources |= {first, *rest[:-1]}
    assert all((REPO / source).exists() for source in sources)
    build = re.search(r"only-include = \[(.*)\]", (REPO / "pyproject.toml").read_text())[1]
    others = {"recipes", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert sources == {*re.findall(r'"(\w+)"', build), *others}


def test_a_signature_is_written_into_no_file(write):
    usual = ["data=pretrain", "tokenizer.path=demo:bytes", "model=tiny"]
    write("docker", *usual, 'data.path="https://host/a.txt?sig=SECRET"', code=2)
    assert "${oc.env:NAME}" in write.said
    assert "SECRET" not in write.said
    require_no_secrets(["data.path=https://host/a.txt?dl=1#L3"])
    assert "${oc.env:MINE,a}" in write("docker", *usual, "data.path=${oc.env:MINE,a}")
