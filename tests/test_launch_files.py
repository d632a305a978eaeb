"""The files in examples/launch and the commands in docs/launching.md and docs/sweeps.md: what can be held of them without a cluster."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from fsdp_trainer.cli import VERBS
from fsdp_trainer.config.compose import compose
from fsdp_trainer.config.sweep import SweepLine

REPO = Path(__file__).parents[1]
FILES = REPO / "examples/launch"
SCRIPTS = sorted([*FILES.glob("*.sh"), *FILES.glob("*.sbatch")])
TEXTS = [*SCRIPTS, FILES / "pytorchjob.yaml", FILES / "Dockerfile", REPO / "docs/launching.md", REPO / "docs/sweeps.md"]


def commands(path: Path) -> list[list[str]]:
    """Every command line of the trainer in a file, launcher and all, with a value for each variable."""
    text = path.read_text().replace("\\\n", " ")
    lines = [
        line.lstrip("# ").strip() for line in text.splitlines() if re.search(r"-m fsdp_trainer |(^|[^`\w-])fsdp-trainer (?!-- )", line)
    ]
    if path.suffix == ".md":  # prose speaks of commands, blocks give them
        blocks = "\n".join(re.findall(r"(?m)^```\n(.*?)^```", text, re.S))
        lines = [line for line in blocks.splitlines() if re.search(r"-m fsdp_trainer |fsdp-trainer ", line)]
    values = [re.sub(r"\$\{\w+[^}]*\}|\$\w+", "value", line).replace('"$@"', "").removesuffix("&") for line in lines]
    return [[word for word in shlex.split(line, comments=True) if word != "$@"] for line in values]


def trainer_words(command: list[str]) -> list[str]:
    """What the trainer itself is given."""
    start = command.index("-m") + 2 if "fsdp_trainer" in command and command[command.index("fsdp_trainer") - 1] == "-m" else -1
    return command[start:] if start > 0 else command[command.index("fsdp-trainer") + 1 :]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_line_composes(path):
    found = [trainer_words(command) for command in commands(path)]
    assert found
    for words in found:
        words = [word for word in words if not word.startswith("optim.lr=2e-5")]
        if words[:1] == ["-m"]:
            SweepLine(words[1:])
        elif words != ["--help"]:
            verb = words.pop(0) if words[0] in VERBS else "train"
            compose(verb, words, inputs=False)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""


def directives(path: Path) -> dict[str, str]:
    found = re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text())
    assert len(found) == path.read_text().count("#SBATCH")
    return dict(found)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.sbatch")), ids=lambda path: path.name)
def test_sbatch_directives_agree_with_the_command(path):
    told, text = directives(path), path.read_text()
    (command,) = [words for words in commands(path) if words[0] == "srun"]
    if "torchrun" in command:
        assert told["ntasks-per-node"] == "1" and f"--nproc_per_node={told['gpus-per-node']}" in command
        assert "--nnodes=value" in command and "--rdzv-backend=c10d" in command and "SIGUSR1" in text
        shutdown = int(re.search(r"--shutdown-timeout=(\d+)", text)[1])
    else:
        assert told["ntasks-per-node"] == told["gpus-per-node"] and "--kill-on-bad-exit=0" in command
        shutdown = 0
    warning = re.fullmatch(r"B:USR1@(\d+)", told["signal"])
    assert shutdown < int(warning[1]) and {"requeue", "open-mode", "time", "nodes"} <= set(told)


@pytest.fixture
def batch(tmp_path):
    """Run a batch script with an srun that stops in order on SIGUSR1 and an scontrol that writes down what it is told."""

    def run(name: str, send: bool) -> tuple[int, str]:
        events = f'mkdir -p {tmp_path}/runs/job && echo \'{{"event": "end", "exit_code": 75}}\' > {tmp_path}/runs/job/events.jsonl'
        torchrun = "torchrun" in name
        stop = f"{events}; exit {1 if torchrun else 75}"
        stubs = {
            "srun": f"trap '{stop.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}' USR1\ntouch {tmp_path}/started\n"
            + ("while :; do sleep 0.05; done" if send else "exit 3"),
            "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
        }
        (tmp_path / "bin").mkdir()
        for stub, body in stubs.items():
            (tmp_path / "bin" / stub).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (tmp_path / "bin" / stub).chmod(0o755)
        (tmp_path / "script").write_text((FILES / name).read_text().replace("/shared", str(tmp_path)))
        slurm = {
            "SLURM_JOB_NAME": "job",
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_CPUS_PER_TASK": "2",
        }
        env = {**os.environ, **slurm, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        process = subprocess.Popen(["bash", tmp_path / "script"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while send and not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2 * send)
        if send:
            process.send_signal(signal.SIGUSR1)
        code = process.wait(timeout=20)
        told = (tmp_path / "scontrol").read_text() if (tmp_path / "scontrol").exists() else ""
        return code, told

    return run


@pytest.mark.parametrize("name", ["slurm_torchrun.sbatch", "slurm_srun.sbatch"])
def test_a_batch_script_requeues_a_run_that_stopped_in_order(batch, name):
    code, told = batch(name, send=True)
    assert code == 0 and "requeue 7" in told


@pytest.mark.parametrize("name", ["slurm_torchrun.sbatch", "slurm_srun.sbatch"])
def test_a_batch_script_does_not_requeue_a_run_that_failed(batch, name):
    code, told = batch(name, send=False)
    assert code == 3 and "requeue" not in told


def test_the_kubernetes_job_is_whole():
    job = yaml.safe_load((FILES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1 and {r["restartPolicy"] for r in replicas.values()} == {"OnFailure"}
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        (script,) = container["args"]
        assert container["name"] == "pytorch" and container["command"] == ["bash", "-c"] and script.startswith("exec torchrun ")
        assert subprocess.run(["bash", "-nc", script], capture_output=True, text=True).stderr == ""
        assert f"--nnodes={sum(r['replicas'] for r in replicas.values())} " in script
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert f"--nproc_per_node={gpus} " in script and job["spec"]["nprocPerNode"] == str(gpus)
        assert int(re.search(r"--shutdown-timeout=(\d+)", script)[1]) < pod["terminationGracePeriodSeconds"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]} and {"/dev/shm", "/shared"} == set(mounts.values())


def test_the_dockerfile_copies_what_the_wheel_is_made_of():
    text = re.sub(r"\\\n", " ", (FILES / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {name for name, _ in lines} <= {"FROM", "WORKDIR", "COPY", "RUN", "CMD"} and lines[0][0] == "FROM"
    stages = [rest.split()[-1] for name, rest in lines if name == "FROM" and " AS " in rest]
    copied = [rest.split() for name, rest in lines if name == "COPY"]
    assert all(words[0].removeprefix("--from=") in stages for words in copied if words[0].startswith("--"))
    sources = {source for words in copied if not words[0].startswith("--") for source in words[:-1]}
    assert all((REPO / source).exists() for source in sources)
    build = re.search(r"only-include = \[(.*)\]", (REPO / "pyproject.toml").read_text())[1]
    assert set(re.findall(r'"(\w+)"', build)) | {"recipes", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"} == sources
