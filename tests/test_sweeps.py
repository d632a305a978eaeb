"""`fsdp-trainer -m`: which jobs there are, what becomes of each, and that the same command goes on."""

import fcntl
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from world import SMALL, Run, alive, end, killed_once, ranks_below, read_lines, wait_until

from fsdp_trainer.cli import main
from fsdp_trainer.config.compose import CONF, compose, options
from fsdp_trainer.config.sweep import SweepLine
from fsdp_trainer.launch import sweep as sweeps

DEMO = ["model=tiny", "data.path=demo:backwards", "tokenizer.path=demo:bytes", "run.name=s"]


def jobs_of(*words: str, config_dir: str | None = None) -> list[list[str]]:
    """The overrides of each job of a command line."""
    found: list[list[str]] = []
    SweepLine(list(words), config_dir).run(lambda batch: found.extend(map(list, batch)) or [math.nan] * len(batch))
    return found


@pytest.fixture
def sweep(monkeypatch, tmp_path, capsys):
    """`sweep(*words, code=0)`: the command line in an empty folder, with ranks that write a run's files and end as `endings[lr]` says."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)

    def compose_once(verb, words, config_dir):
        checked[next(w for w in words if w.startswith("run.name="))] = cfg = compose(verb, words, config_dir)
        return cfg

    def ranks(launch, words, received):
        cfg = checked[next(w for w in words if w.startswith("run.name="))]
        folder, code = Path(cfg.run.root) / cfg.run.name, run.endings.get(cfg.optim.lr, 0)
        run.trained.append((cfg, words))
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg)))
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "loss": 5.0}) + "\n" + json.dumps({"step": 2, "loss": cfg.optim.lr}) + "\n"
        )
        (folder / "events.jsonl").write_text(
            json.dumps({"event": "end", "time": time.time() + 1, "reason": "told", "exit_code": code}) + "\n"
        )
        if code == "signal":
            received.append(signal.SIGTERM)
            return 1
        return code

    def run(*words, code=0):
        run.trained.clear()
        assert main(["-m", *DEMO, *words]) == code
        run.said = capsys.readouterr()
        return read_lines(tmp_path / "runs/s/sweep.jsonl")

    checked: dict = {}
    run.endings, run.trained = {}, []
    monkeypatch.setattr(sweeps, "compose", compose_once)
    monkeypatch.setattr(sweeps, "start_ranks", ranks)
    return run


def states(lines):
    return [line["state"] for line in lines]


# --- which jobs ------------------------------------------------------------------------------------------------------------------------


def test_values_become_jobs_in_every_way_of_writing_them():
    swept = {
        "optim.lr=1e-5,3e-5": ["optim.lr=1e-05", "optim.lr=3e-05"],
        "run.seed=range(1,4)": ["run.seed=1", "run.seed=2", "run.seed=3"],
        "batch.rows=choice(1,2)": ["batch.rows=1", "batch.rows=2"],
        "sharding=fsdp,ddp": ["sharding=fsdp", "sharding=ddp"],
        "++optim.eps=1,2": ["optim.eps=1", "optim.eps=2"],
        "model=glob(llama3_2*)": ["model=llama3_2_1b", "model=llama3_2_3b"],
        "data.path=[a,b],c": ["data.path=[a,b]", "data.path=c"],
        "data.validation=[a,b]": ["data.validation=[a,b]"],
        "+recipe=quickstart,llama8b_sft": ["+recipe=quickstart", "+recipe=llama8b_sft"],
    }
    jobs = jobs_of("train.steps=2", *swept)
    assert jobs == [["train.steps=2", *values] for values in itertools.product(*swept.values())]


@pytest.mark.parametrize("name", options("train")["sweep"])
def test_every_sweep_is_listed_and_composes(name, capsys):
    params = yaml.safe_load((CONF / "sweep" / f"{name}.yaml").read_text())["hydra"]["sweeper"]["params"]
    jobs = jobs_of("+recipe=quickstart", f"+sweep={name}")
    assert len(jobs) == 4 * (name == "finetune_lr") + 4 and all(len(job) == 1 + len(params) for job in jobs)
    for job in (jobs[0], jobs[-1]):
        compose("train", job)
    assert main(["--help"]) == 0 and re.search(rf"(?m)^  {name} +[A-Z].*[.?]$", capsys.readouterr().out)


def test_the_command_line_wins_over_a_sweep_and_a_folder_adds_its_own(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/mine.yaml").write_text('# @package _global_\nhydra: {sweeper: {params: {optim.lr: "1,2", run.seed: "5,6"}}}\n')
    assert jobs_of("+sweep=mine", "optim.lr=3", config_dir=str(tmp_path)) == [["optim.lr=3", "run.seed=5"], ["optim.lr=3", "run.seed=6"]]


def test_a_sweep_that_is_wrong_itself_is_refused(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/bare.yaml").write_text("hydra: {sweeper: {params: {optim.lr: '1,2'}}}\n")
    (tmp_path / "sweep/fixed.yaml").write_text("# @package _global_\noptim: {lr: 3}\n")
    (tmp_path / "sweep/place.yaml").write_text("# @package _global_\nhydra: {sweeper: {params: {run.name: 'a,b'}}}\n")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/broken.yaml").write_text("a: [1\nb: }")
    wrong = {
        "optim.lr=interval(1,2)": "no end of values",
        "run.name=a,b": "it takes one value",
        "hydra/launcher=basic": "hydra/launcher=local",
        "hydra/sweeper=optuna": "Could not find 'hydra/sweeper/optuna'",
        "hydra.sweep.dir=x": "hydra.* is closed",
        "hydra.launcher.n_jobs=2": "takes no parameters: launch.*",
        "hydra.sweeper.params={run.name: c}": "key=a,b",
        "hydra.sweeper.max_batch_size.x=1": "Error merging override",
        "run.root=${nothing}": "Interpolation key 'nothing' not found",
        "+recipe=broken": "expected ',' or ']'",
        "+sweep=place": "it takes one value",
        "+sweep=lrr": "Did you mean  +sweep=lr ?",
        "sweep=lr": "write  +sweep=lr",
        "+sweep=bare": "# @package _global_",
        "+sweep=fixed": "as  optim.lr: 3",
        "optim.lr=[1,2": "cannot be read",
    }
    for word, said in wrong.items():
        assert main(["-m", "--config-dir", str(tmp_path), *DEMO, word]) == 2
        assert said in capsys.readouterr().err, word
    for argv, said in {
        ("-m", "preview", *DEMO): "only training is swept", ("-m", "preview", "--config-dir", "."): "fsdp-trainer preview --config-dir .", ("-m", "--cfg", "job", *DEMO): "leave one of them out",
        ("+sweep=lr", *DEMO): "fsdp-trainer -m +sweep=lr", ("optim.lr=1,2", *DEMO): "fsdp-trainer -m",
    }.items():  # fmt: skip
        assert main(list(argv)) == 2
        assert said in capsys.readouterr().err, argv


COPY = "_target_: shutil.copyfile, src: victim, dst: copied"
INTERPOLATED = f"""'${{oc.create:${{oc.decode:"{{{COPY}}}"}}}}'"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (f"launcher: {{x: {INTERPOLATED}}}", "takes no parameters"),
        (f"sweeper: {{x: {INTERPOLATED}}}", "write the value itself"),
        (f"sweeper: {{params: {{a: [{INTERPOLATED}]}}}}", "write the value itself"),
        (f"sweeper: {{x: {{{COPY}}}}}", "_target_ is refused"),
        ("sweeper: {custom_search_space: shutil.copyfile}", "names a function"),
    ],
)
def test_neither_a_recipe_nor_the_command_line_runs_code(tmp_path, monkeypatch, capsys, settings, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").touch()
    (tmp_path / "own/recipe").mkdir(parents=True)
    (tmp_path / "own/recipe/innocent.yaml").write_text(f"# @package _global_\nhydra: {{{settings}}}\n")
    node, value = settings.split(": ", 1)
    key, value = value[1:-1].split(": ", 1)
    escaped = value.strip("'").replace('"', '\\"')
    typed = [f"hydra.{node}.{key}={value}"] if "$" not in value else [f'hydra.{node}.{key}="{escaped}"'] if key == "x" else []
    for words in (["--config-dir", "own", "+recipe=innocent"], typed):
        assert not words or main(["-m", *words, *DEMO, "run.seed=1,2"]) == 2
        assert not words or said in capsys.readouterr().err
    assert not (tmp_path / "copied").exists()


def test_what_a_sweeper_brings_along_makes_no_objects_either(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").touch()
    basic = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper", "max_batch_size": None}
    code = {"_target_": "shutil.copyfile", "src": "victim", "dst": "copied"}
    ConfigStore.instance().store("brings_code", {**basic, "params": {"x": code}}, "hydra/sweeper")
    assert main(["-m", *DEMO, "run.seed=1,2", "hydra/sweeper=brings_code"]) == 2
    assert "hydra.sweeper" in capsys.readouterr().err and not (tmp_path / "copied").exists()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "8"}, "without torchrun:"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "0"}, "without srun:"),
    ],
)
def test_a_sweep_inside_a_launcher_is_refused_with_the_command_to_type(sweep, monkeypatch, env, said):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert sweep("optim.lr=1,2", code=2) == [] and not sweep.trained
    assert said in sweep.said.err and f"fsdp-trainer -m {' '.join(DEMO)} optim.lr=1,2 launch.nproc_per_node=8" in sweep.said.err
    sweep("--config-dir", "own", "optim.lr=1,2", code=2)
    assert "fsdp-trainer -m --config-dir own " in sweep.said.err


# --- what becomes of them --------------------------------------------------------------------------------------------------------------


def test_each_job_has_a_stable_folder_and_a_line(sweep, tmp_path):
    lines = sweep("optim.lr=2,1", "train.steps=2")
    assert states(lines) == ["finished"] * 2 and [line["objective"] for line in lines] == [2.0, 1.0]
    assert [(Path(c.run.root), c.run.name, c.optim.lr) for c, _ in sweep.trained] == [(Path("runs/s/jobs"), line["job"], lr) for line, lr in zip(lines, (2, 1), strict=True)]  # fmt: skip
    assert {words[-1] for _, words in sweep.trained} == {'data.cache="runs/.data"'}, "tokenised once"
    assert lines[0]["overrides"] == ["model=tiny", "data.path=demo:backwards", "tokenizer.path=demo:bytes", "optim.lr=2", "train.steps=2"]
    assert sorted(p.name for p in (tmp_path / "runs/s").iterdir()) == ["jobs", "sweep.jsonl"], "nothing of Hydra's"
    table = sweep.said.out[sweep.said.out.index("job  ") :].splitlines()
    assert table[0].split() == ["job", "overrides", "objective", "state", "seconds"]
    assert table[1].startswith(f"{lines[0]['job']}  optim.lr=2  2.0000     finished") and table[3].startswith(
        f"lowest objective: {lines[1]['folder']}"
    )
    again = sweep("train.steps=2", "optim.lr=1,2")
    assert (
        states(again) == ["skipped"] * 2 and not sweep.trained and [line["job"] for line in again] == [line["job"] for line in lines][::-1]
    )


@pytest.mark.slow
def test_a_failure_is_recorded_and_the_others_go_on(sweep):
    sweep.endings = {2.0: 1, 3.0: 75}
    lines = sweep("optim.lr=abc,1,2,3", code=1)
    assert states(lines) == ["refused", "finished", "failed", "stopped"]
    assert [line["objective"] for line in lines] == [None, 1.0, None, None], "what failed has no result, whatever its last loss"
    assert [line["exit_code"] for line in lines] == [2, 0, 1, 75] and "must be a number" in lines[0]["reason"]
    assert sweep.said.err.count("must be a number") == 1
    sweep.endings = {}
    assert states(sweep("optim.lr=abc,1,2,3", code=1)) == ["refused", "skipped", "finished", "finished"]
    assert [c.optim.lr for c, _ in sweep.trained] == [2.0, 3.0]


@pytest.mark.slow
def test_a_time_limit_stops_a_job_and_the_sweep_exits_75(sweep):
    sweep.endings = {1.0: 75}
    assert states(sweep("optim.lr=1,2", code=75)) == ["stopped", "finished"] and "the same command goes on" in sweep.said.out


def test_a_folder_with_a_backslash_is_where_the_jobs_train_and_are_found(sweep, tmp_path):
    sweep('run.root="ba\\ck"', "optim.lr=1")
    assert sweep.trained[0][0].run.root == "ba\\ck/s/jobs" and "1.0000     finished" in sweep.said.out
    assert (tmp_path / "ba\\ck/s/sweep.jsonl").exists()


def test_a_signal_keeps_the_remaining_jobs_from_starting(sweep):
    sweep.endings = {1.0: "signal"}
    assert states(sweep("optim.lr=1,2", code=75)) == ["stopped", "waiting"] and len(sweep.trained) == 1


def test_a_mistake_of_all_jobs_is_told_once_and_starts_nothing(sweep, tmp_path):
    assert sweep("optim.learning_rate=1,2", "batch.row=3", code=2) == [] and not list(tmp_path.iterdir())
    assert sweep.said.err.count("there is no such key") == 2 and "Did you mean  optim.lr=1 ?" in sweep.said.err
    assert sweep("optim.lr=a,b", code=2) == [] and "optim.lr=a,b" in sweep.said.err
    assert sweep("sharding=fsdp,nope", "optim.lr=-1", code=2) == []
    assert "optim.lr=-1" in sweep.said.err and "sharding has" not in sweep.said.err


def test_an_option_that_is_not_there_refuses_its_jobs_only(sweep):
    assert states(sweep("sharding=fsdp,nope", code=1)) == ["finished", "refused"]


def test_jobs_with_equal_overrides_are_one(sweep):
    assert len(sweep("optim.lr=1e-3,0.001,1e-3")) == 1 and len(sweep.trained) == 1


@pytest.mark.slow
def test_a_recipe_that_has_changed_is_not_taken_for_finished(sweep, tmp_path):
    recipe = tmp_path / "own/recipe/mine.yaml"
    recipe.parent.mkdir(parents=True)
    for rows, trained in ((4, 2), (4, 0), (8, 2)):
        recipe.write_text(f"# @package _global_\nbatch: {{rows: {rows}}}\n")
        sweep("--config-dir", "own", "+recipe=mine", "optim.lr=1,2")
        assert len(sweep.trained) == trained


@pytest.mark.slow
def test_jobs_of_earlier_commands_keep_their_lines(sweep):
    first = sweep("optim.lr=1,2")
    assert [line["job"] for line in sweep("optim.lr=2,3")] == [
        first[0]["job"],
        first[1]["job"],
        sweeps.job_id([*DEMO, "run.root=elsewhere", "optim.lr=3"]),
    ]


@pytest.mark.slow
def test_two_sweeps_do_not_run_in_one_folder(sweep, tmp_path):
    sweep("optim.lr=1")
    with (tmp_path / "runs/s/jobs/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sweep("optim.lr=1", code=2)
    assert "another sweep runs there" in sweep.said.err


@pytest.mark.slow
def test_to_overwrite_a_run_leaves_a_sweep_of_the_same_name_alone(train, tmp_path):
    (tmp_path / "run/jobs/038723f4").mkdir(parents=True)
    train("run", "train.steps=1", "checkpoint.resume=never")
    train("run", "train.steps=1", "checkpoint.resume=never", "run.overwrite=true")
    assert (tmp_path / "run/jobs/038723f4").is_dir()


# --- with real ranks -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(inputs, tmp_path):
    """Start a sweep over learning rates as a process of its own."""

    processes = []

    def run(*words, env=None):
        words = [sys.executable, "-m", "fsdp_trainer", "-m", *SMALL, *(f"{k}={v}" for k, v in inputs.items()), "run.name=s", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        processes.append(subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    end(processes)


@pytest.mark.slow
def test_one_bad_value_and_one_killed_job_and_the_same_command_finishes(start, train, tmp_path):
    command, env = ["optim.lr=3e-3,abc,1e-3", "train.steps=8", "checkpoint.every=5"], killed_once(tmp_path / "seam", 0, 7)
    process = start(*command, env=env)
    out, err = process.communicate(timeout=150)
    lines = read_lines(tmp_path / "runs/s/sweep.jsonl")
    assert process.returncode == 1 and states(lines) == ["failed", "refused", "finished"], out + err
    assert lines[0]["reason"] == "ended without a word"
    process = start(*command, env=env)
    out, err = process.communicate(timeout=150)
    lines = read_lines(tmp_path / "runs/s/sweep.jsonl")
    assert process.returncode == 1 and states(lines) == ["finished", "refused", "skipped"], out + err
    run = Run(tmp_path / lines[0]["folder"])
    assert run.event("resume")[0]["step"] == 5 and run.column("step") == list(range(1, 9))
    assert run.column("loss") == train("whole", "optim.lr=3e-3", "train.steps=8").column("loss"), "as if it had never been killed"
    assert lines[0]["objective"] == run.column("loss")[-1]


@pytest.mark.slow
def test_sigterm_stops_the_running_job_in_order_and_starts_no_other(start, tmp_path):
    process = start("optim.lr=1e-3,2e-3", "train.steps=100000")
    (metrics,) = wait_until(lambda: list((tmp_path / "runs/s/jobs").glob("*/metrics.jsonl")), process)
    process.terminate()
    out, err = process.communicate(timeout=150)
    assert process.returncode == 75 and "the same command goes on" in out, out + err
    assert states(read_lines(tmp_path / "runs/s/sweep.jsonl")) == ["stopped", "waiting"]
    assert Run(metrics.parent).checkpoints and len(list((tmp_path / "runs/s/jobs").glob("*/"))) == 1


@pytest.mark.slow
def test_ranks_do_not_outlive_a_sweep_that_was_killed(start, tmp_path):
    process = start("optim.lr=1e-3", "train.steps=100000")
    wait_until(lambda: list((tmp_path / "runs/s/jobs").glob("*/metrics.jsonl")), process)
    rank = ranks_below(process.pid)["0"]
    process.kill()
    process.wait()
    wait_until(lambda: not alive(rank))
