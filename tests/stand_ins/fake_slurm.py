"""Stand-ins for Slurm's commands on one machine.

`install(folder)` returns a PATH with sbatch, srun, sacct and scancel, which all run this file.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel")
HERE = Path(
    os.environ.get("FAKE_SLURM", ".")
)  # holds JOB.state, JOB.pid, JOB.tasks and JOB.script; while `hold` exists, no job begins


def install(folder):
    """Return environment variables for a Slurm whose queue is kept in `folder`."""
    (folder / "bin").mkdir(parents=True)
    for name in COMMANDS:
        (folder / "bin" / name).write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n'
        )
        (folder / "bin" / name).chmod(0o755)
    return {"FAKE_SLURM": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def states(folder):
    """Return the states of all jobs, by id."""
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.state"))}


def sbatch(script):
    job = str(1000 + len(list(HERE.glob("*.script"))))
    (HERE / f"{job}.script").write_text(Path(script).read_text())
    say(job, "PENDING")
    nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen([sys.executable, __file__, "run", job], start_new_session=True, **nowhere)
    print(f"Submitted batch job {job}")
    return 0


def run(job):
    """Run a job as slurmctld does, until it has ended."""
    nodes = re.search(r"--nodes=(\d+)", (HERE / f"{job}.script").read_text())
    while (HERE / "hold").exists():
        if (HERE / f"{job}.state").read_text() == "CANCELLED":
            return 0
        time.sleep(0.02)
    env = {
        "SLURM_CPUS_PER_TASK": "1",
        **os.environ,
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NAME": "job",
        "SLURM_NNODES": nodes[1] if nodes else "1",
    }
    script = ["bash", HERE / f"{job}.script"]
    batch = subprocess.Popen(script, env=env, start_new_session=True)
    (HERE / f"{job}.pid").write_text(str(batch.pid))
    say(job, "RUNNING")
    code = batch.wait()
    say(job, "COMPLETED" if code == 0 else "CANCELLED" if code < 0 else "FAILED")
    return 0


def srun(*words):
    """Run the step's tasks, one per node, all on this machine. Signals are forwarded to them."""
    while words[0].startswith("-"):
        words = words[2 if words[0] == "--output" else 1 :]
    count, job = os.environ["SLURM_NNODES"], os.environ["SLURM_JOB_ID"]
    step = {
        "SLURM_STEP_NUM_TASKS": count,
        "SLURM_STEP_NUM_NODES": count,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": "0",
    }
    tasks = [
        subprocess.Popen(
            words, env={**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_NODEID": str(i)}
        )
        for i in range(int(count))
    ]
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signum, lambda number, _: [task.send_signal(number) for task in tasks])
    (HERE / f"{job}.tasks").write_text(" ".join(str(task.pid) for task in tasks))
    return max(task.wait() for task in tasks)


def sacct(*words):
    wanted = [words[i + 1] for i, word in enumerate(words) if word == "-j"]
    print("JobID|State|NodeList")
    for job, state in states(HERE).items():
        if job in wanted:
            print(f"{job}|{state}|here")
    return 0


def scancel(*words):
    *how, job = words
    with suppress(ProcessLookupError, FileNotFoundError):
        if how:
            for pid in (HERE / f"{job}.tasks").read_text().split():
                os.kill(int(pid), getattr(signal, f"SIG{how[0].partition('=')[2]}"))
            return 0
        say(job, "CANCELLED")
        os.killpg(int((HERE / f"{job}.pid").read_text()), signal.SIGKILL)
    return 0


def say(job, state):
    partial = HERE / f"{job}.partial"
    partial.write_text(state)
    partial.replace(HERE / f"{job}.state")


if __name__ == "__main__":
    sys.exit(
        {f.__name__: f for f in (sbatch, run, srun, sacct, scancel)}[sys.argv[1]](*sys.argv[2:])
    )
