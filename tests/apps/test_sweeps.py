"""`fsdp-trainer -m`: which jobs there are, what becomes of each, and that the same command goes
on."""

import fcntl
import itertools
import json
import math
import re
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import inject
import pytest
import yaml
from forked import Forked
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from tables import rows
from world import SMALL, Run, alive, read_lines, wait_until

from fsdp_trainer.apps.sweep import jobs as jobs_module
from fsdp_trainer.apps.sweep import sweep as sweeps
from fsdp_trainer.apps.sweep import sweep_backends
from fsdp_trainer.apps.sweep.jobs import JobToStart
from fsdp_trainer.apps.sweep.sweep_backends import OnThisNode
from fsdp_trainer.base.recorded import recorded
from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import CONF, compose, options
from fsdp_trainer.config.composing.sweep_overrides import Space, SweepLine
from fsdp_trainer.config.sweep_keys import Local, Optuna
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch import start as start_module

DEMO = ["model=tiny", "data.path=demo:backwards", "tokenizer.path=demo:bytes", "run.name=s"]


def jobs_of(*words, config_dir=None):
    """The overrides of each job of a command line."""
    lines = []
    SweepLine(list(words), config_dir).run(
        lambda batch: lines.extend(map(list, batch)) or [math.nan] * len(batch)
    )
    return lines


@pytest.fixture
def sweep(enter, monkeypatch, tmp_path, capsys):
    """`sweep(*words, code=0)`: the command line in an empty folder, with ranks that write a run's
    files and end as `endings[lr]` says."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)

    class Here(OnThisNode):
        def start(self, job):
            cfg, words, output = job
            run.trained.append((cfg, words))
            if isinstance(ending := run.endings.get(cfg.optim.lr, 0), Exception):
                raise ending
            started = FakeJob(output.parent, cfg, ending, run.losses(cfg))
            self.running.append(started)
            return started

    def run(*words, code=0):
        run.trained.clear()
        assert main(["-m", *DEMO, *words]) == code
        run.said = capsys.readouterr()
        return read_lines(tmp_path / "runs/s/sweep.jsonl")

    run.endings, run.trained, run.losses = {}, [], lambda cfg: [5.0, cfg.optim.lr]
    monkeypatch.setitem(sweeps.SWEEP_BACKENDS, "local", Here)
    for name in ("sweep_look_seconds", "sweep_read_seconds", "sweep_tell_seconds"):
        enter(inject.setting(name, 0))
    return run


class FakeJob:
    """Writes a run's files, one loss at each look, and ends as told: with an exit code, by a signal
    (its negative number), by having the sweep signalled, or never by itself."""

    devices = ()

    def __init__(self, folder, cfg, code, losses):
        self.folder, self.code, self.losses = folder, code, list(losses)
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(cfg)))
        (folder / "metrics.jsonl").write_text("")
        self.step = 0

    def poll(self):
        if self.losses:
            self.step += 1
            line = {"step": self.step, "loss": self.losses.pop(0), "step_seconds": 0.5}
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return None
        if self.code == "signal":
            self.code = 1
            signal.raise_signal(signal.SIGTERM)
        if self.code == "never":
            return None
        if self.code >= 0:
            end = {"event": "end", "reason": "told", "exit_code": self.code}
            end["time"] = time.time() + 1
            (self.folder / "events.jsonl").write_text(json.dumps(end) + "\n")
        return self.code

    def signal(self, signum):
        self.code, self.losses = 75 if self.code == "never" else self.code, []


def states(lines):
    return [line["state"] for line in lines]


# --- which jobs ---------------------------------------------------------------------------------


SWEPT = """
optim.lr=1e-5,3e-5 → optim.lr=1e-05 optim.lr=3e-05
run.seed=range(1,4) → run.seed=1 run.seed=2 run.seed=3
batch.rows=choice(1,2) → batch.rows=1 batch.rows=2
sharding=fsdp,ddp → sharding=fsdp sharding=ddp
++optim.eps=1,2 → optim.eps=1 optim.eps=2
model=glob(llama3_2*) → model=llama3_2_1b model=llama3_2_3b
data.path=[a,b],c → data.path=[a,b] data.path=c
data.validation=[a,b] → data.validation=[a,b]
+recipe=quickstart,llama8b_sft → +recipe=quickstart +recipe=llama8b_sft
"""


def test_values_become_jobs_in_every_way_of_writing_them():
    swept = {typed: words.split() for typed, words in rows(SWEPT)}
    jobs = jobs_of("train.steps=2", *swept)
    assert jobs == [["train.steps=2", *values] for values in itertools.product(*swept.values())]


def test_every_sweep_is_listed_and_composes(program):
    listed = program("--help")
    for name in options("train")["sweep"]:
        assert re.search(rf"(?m)^  {name} +[A-Z].*[.?]$", listed)
        body = yaml.safe_load((CONF / "sweep" / f"{name}.yaml").read_text())
        others = ["+recipe=quickstart", *(["adapter=lora"] if name == "lora" else [])]
        jobs = jobs_of(*others, f"+sweep={name}")
        assert len(jobs) == {"finetune_lr": 8, "lora": 12}.get(name, 4)
        values = len(body["hydra"]["sweeper"]["params"])
        assert {len(job) for job in jobs} == {len(others) + values}
        for job in (jobs[0], jobs[-1]):
            compose("train", job)


def test_a_recipes_file_is_swept_and_its_mistakes_are_told(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 2}\n")
    expected = [[f"+recipe={file}", f"optim.lr={lr}"] for lr in (1, 2)]
    assert jobs_of(str(file), "optim.lr=1,2") == expected
    file.write_text("defaults:\n  - precision: fp32\n")
    with pytest.raises(UserError, match="override /precision: fp32"):
        jobs_of(str(file), "optim.lr=1,2")


def test_the_command_line_wins_over_a_sweep_and_a_folder_adds_its_own(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/mine.yaml").write_text(
        '# @package _global_\nhydra: {sweeper: {params: {optim.lr: "1,2", run.seed: "5,6"}}}\n'
    )
    expected = [["optim.lr=3", f"run.seed={seed}"] for seed in (5, 6)]
    assert jobs_of("+sweep=mine", "optim.lr=3", config_dir=str(tmp_path)) == expected


OPTUNA = ["hydra/sweeper=optuna", "optim.lr=tag(log,interval(1e-4,1))"]


def test_without_optuna_a_search_says_what_to_install(sweep, enter):
    enter(inject.around("sweep_extra", lambda *_: None))
    assert sweep(*OPTUNA, code=2) == []
    assert "pip install 'fsdp_trainer[optuna]'" in sweep.said.err


def test_no_sweeper_runs_code(tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").touch()
    basic = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}
    code = {"_target_": "shutil.copyfile", "src": "victim", "dst": "copied"}
    brings = {**basic, "max_batch_size": None, "params": {"x": code}}
    ConfigStore.instance().store("brings_code", brings, "hydra/sweeper")
    said = program("-m", "hydra/sweeper=brings_code", *DEMO, "run.seed=1,2", code=2)
    assert "hydra.sweeper" in said
    assert not (tmp_path / "copied").exists()


def test_a_sweep_inside_srun_is_refused_with_the_command_to_type(sweep, monkeypatch):
    for name, value in (("NUM_TASKS", "8"), ("TASKS_PER_NODE", "8(x2)")):
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert sweep("optim.lr=1,2", code=2) == []
    assert not sweep.trained
    assert "without srun:" in sweep.said.err
    command = f"fsdp-trainer -m {' '.join(DEMO)} optim.lr=1,2 launch.nproc_per_node=8"
    assert command in sweep.said.err
    sweep("--config-dir", "own", "optim.lr=1,2", code=2)
    assert "fsdp-trainer -m --config-dir own " in sweep.said.err


# --- what becomes of them -----------------------------------------------------------------------


def test_each_job_has_a_stable_folder_and_a_line(sweep, tmp_path):
    lines = sweep("optim.lr=2,1", "train.steps=2")
    assert states(lines) == ["finished"] * 2
    assert [line["objective"] for line in lines] == [2.0, 1.0]
    assert [(Path(c.run.root), c.run.name, c.optim.lr) for c, _ in sweep.trained] == [
        (Path("runs/s/jobs"), f"lr-{lr}_{line['job']}", lr)
        for line, lr in zip(lines, (2, 1), strict=True)
    ]
    cache = 'data.cache="runs/.data"'
    assert {words[-1] for _, words in sweep.trained} == {cache}, "tokenized once"
    assert lines[0]["overrides"] == [*DEMO[:-1], "optim.lr=2", "train.steps=2"]
    files = sorted(path.name for path in (tmp_path / "runs/s").iterdir())
    assert files == ["jobs", "sweep.jsonl"], "nothing of Hydra's"
    table = sweep.said.out[sweep.said.out.index("job  ") :].splitlines()
    assert table[0].split() == ["job", "overrides", "objective", "state", "seconds"]
    assert table[1].startswith(f"{lines[0]['job']}  optim.lr=2  2.0000     finished")
    assert table[3].startswith(f"lowest objective: {lines[1]['folder']}")
    reports = [f"  fsdp-trainer report {name}" for name in ("runs/s", lines[1]["folder"])]
    assert table[4:] == ["next:", *reports]
    again = sweep("train.steps=2", "optim.lr=1,2")
    assert states(again) == ["skipped"] * 2
    assert not sweep.trained
    assert [line["job"] for line in again] == [line["job"] for line in lines][::-1]


def test_a_time_limit_or_another_recipe_is_not_taken_for_finished(sweep, tmp_path):
    recipe = tmp_path / "own/recipe/mine.yaml"
    recipe.parent.mkdir(parents=True)
    command = ["--config-dir", "own", "+recipe=mine", "optim.lr=1,2"]
    recipe.write_text("batch: {rows: 4}\n")
    sweep.endings = {1.0: 75}
    assert states(sweep(*command, code=75)) == ["stopped", "finished"]
    assert "the same command resumes" in sweep.said.out
    sweep.endings = {}
    for count, trained in ((4, 1), (4, 0), (8, 2)):
        recipe.write_text(f"batch: {{rows: {count}}}\n")
        sweep(*command)
        assert len(sweep.trained) == trained


def test_a_job_is_finished_whose_record_has_the_environments_values(tmp_path, monkeypatch):
    """Records of earlier versions have them."""
    monkeypatch.setenv("MINE", "https://me:pw@host/a?key=SECRET")
    cfg = compose("train", [*DEMO, "launch.env={K: '${oc.env:MINE}'}"])
    (tmp_path / "events.jsonl").write_text('{"event": "end", "exit_code": 0}\n')
    for stored, is_finished in ((recorded(cfg), True), (asdict(cfg), True), ("a", False)):
        (tmp_path / "config.yaml").write_text(yaml.dump(json.loads(json.dumps(stored))))
        assert jobs_module.finished(tmp_path, cfg) == is_finished


def test_a_failure_is_recorded_and_the_others_go_on(sweep):
    sweep.endings = {2.0: -signal.SIGKILL, 3.0: 75}
    lines = sweep("optim.lr=abc,1,2,3", code=1)
    assert states(lines) == ["refused", "finished", "failed", "stopped"]
    # what failed has no result, whatever its last loss
    assert [line["objective"] for line in lines] == [None, 1.0, None, None]
    assert [line["exit_code"] for line in lines] == [2, 0, 1, 75]
    assert "must be a number" in lines[0]["reason"]
    assert sweep.said.err.count("must be a number") == 1
    assert lines[2]["reason"] == "ended without a message"
    assert f"job {lines[2]['job']} was killed by SIGKILL" in sweep.said.err
    sweep.endings = {
        2.0: RunFailed("Slurm refuses the job: no such partition"),
        3.0: OSError(28, "No space left on device"),
    }
    lines = sweep("optim.lr=abc,1,2,3", code=1)
    assert states(lines) == ["refused", "skipped", "failed", "failed"]
    assert sweep.said.err.count("cannot be started") == 2
    assert lines[2]["reason"] == "cannot be started: Slurm refuses the job: no such partition"
    assert "No space" in lines[3]["reason"]
    sweep.endings = {}
    lines = sweep("optim.lr=abc,1,2,3", code=1)
    assert states(lines) == ["refused", "skipped", "finished", "finished"]
    assert [c.optim.lr for c, _ in sweep.trained] == [2.0, 3.0]


def test_a_folder_with_a_backslash_is_where_the_jobs_train_and_are_found(sweep, tmp_path):
    sweep('run.root="ba\\ck"', "optim.lr=1")
    assert sweep.trained[0][0].run.root == "ba\\ck/s/jobs"
    assert "1.0000     finished" in sweep.said.out
    assert (tmp_path / "ba\\ck/s/sweep.jsonl").exists()


def test_a_signal_ends_the_jobs_that_run_and_keeps_the_others_from_starting(sweep):
    sweep.endings = {1.0: "signal", 2.0: "never"}
    lines = sweep("optim.lr=1,2,3", "hydra.launcher.jobs=2", code=75)
    assert states(lines) == ["stopped", "stopped", "waiting"]
    assert len(sweep.trained) == 2


def test_a_signal_ends_the_check_of_many_jobs(sweep, enter):
    def check(_real, _self, job, _overrides):
        checked.append(job)
        if len(checked) == 2:
            signal.raise_signal(signal.SIGTERM)

    checked = []
    enter(inject.around("check_job", check))
    assert sweep("run.seed=range(0,1000)", code=75) == []
    assert len(checked) == 2
    assert not sweep.trained


def test_a_mistake_of_all_jobs_is_told_and_not_that_of_some(sweep):
    assert sweep("sharding=fsdp,nope", "optim.lr=-1", code=2) == []
    assert "optim.lr=-1" in sweep.said.err
    assert "sharding has" not in sweep.said.err


def test_an_option_that_is_not_there_refuses_its_jobs_only(sweep):
    assert states(sweep("sharding=fsdp,nope", code=1)) == ["finished", "refused"]


def test_jobs_with_equal_overrides_are_one(sweep):
    assert len(sweep("optim.lr=1e-3,0.001,1e-3")) == 1
    assert len(sweep.trained) == 1


def test_jobs_of_earlier_commands_keep_their_lines(sweep):
    first = sweep("optim.lr=1,2")
    third = sweeps.job_id([*DEMO, "run.root=elsewhere", "optim.lr=3"])
    jobs = [line["job"] for line in sweep("optim.lr=2,3")]
    assert jobs == [first[0]["job"], first[1]["job"], third]


def test_a_jobs_folder_is_named_by_its_values_and_one_of_before_is_found_again(sweep, tmp_path):
    first, second = sweep("optim.lr=1,2", "+recipe=quickstart,llama8b_sft")[::3]
    assert Path(first["folder"]).name == f"lr-1_recipe-quickstart_{first['job']}"
    earlier = tmp_path / "runs/s/jobs" / second["job"]  # as versions before named it
    Path(second["folder"]).rename(earlier)
    folders = [line["folder"] for line in sweep("optim.lr=1,2", "+recipe=quickstart,llama8b_sft")]
    assert folders[::3] == [first["folder"], "runs/s/jobs/" + second["job"]]
    assert sweep.trained[-1][0].run.name == second["job"]
    odd = ["data.path=[my data/é b.jsonl,c]", "model.init_from=https://u:secret@h/x?sig=secret"]
    name = jobs_module.job_folder(tmp_path, "0", [*odd, f"run.x={'y' * 300}"]).name
    assert re.fullmatch(r"path-b.jsonl-c_init_from-x_x-y+_0", name)
    assert len(name) <= jobs_module.LONGEST_NAME + len("_0")


def test_two_sweeps_do_not_run_in_one_folder(sweep, tmp_path):
    sweep("optim.lr=1")
    with (tmp_path / "runs/s/jobs/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sweep("optim.lr=1", code=2)
    assert "another sweep runs there" in sweep.said.err


def test_to_overwrite_a_run_leaves_a_sweep_of_the_same_name_alone(train, tmp_path):
    (tmp_path / "run/jobs/038723f4").mkdir(parents=True)
    train("run", "train.steps=1", "checkpoint.resume=never")
    train("run", "train.steps=1", "checkpoint.resume=never", "run.overwrite=true")
    assert (tmp_path / "run/jobs/038723f4").is_dir()


# --- side by side, and chosen ones --------------------------------------------------------------


def test_jobs_side_by_side_divide_the_devices(monkeypatch, tmp_path):
    started, codes, signals = [], {}, []

    def popen(words, env, **more):
        started.append(env)
        number = len(started)
        return SimpleNamespace(poll=lambda: codes.get(number), send_signal=signals.append)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,3,5,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for module in (sweep_backends, start_module):
        # torch's count: a name that it does not know ends the list
        monkeypatch.setattr(module, "gpus", lambda launch: 4)
    monkeypatch.setattr(sweep_backends, "cores", lambda: 32)
    monkeypatch.setattr(sweep_backends.subprocess, "Popen", popen)
    cfg = compose("train", [*DEMO, "launch.nproc_per_node=2"])
    place = OnThisNode(Local(), cfg.launch)
    assert (place.at_once, place.world(cfg.launch)) == (2, 2)
    for number in (1, 2, 3):
        assert place.has_room(cfg.launch)
        place.start(JobToStart(cfg, [], tmp_path / f"{number}/output.log"))
        if number == 2:
            assert not place.has_room(cfg.launch)
            codes[1] = 1
    place.running[0].signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM]
    devices = [env["CUDA_VISIBLE_DEVICES"] for env in started]
    assert devices == ["GPU-a,GPU-b", "3,5", "GPU-a,GPU-b"]
    assert started[0]["OMP_NUM_THREADS"] == "8"
    assert (tmp_path / "2/output.log").exists()
    cfg.launch.nproc_per_node = "auto"
    assert OnThisNode(Local(), compose("train", DEMO).launch).at_once == 1
    assert OnThisNode(Local(jobs=4), cfg.launch).world(cfg.launch) == 1


def test_a_job_that_fails_leaves_those_beside_it_alone_and_each_is_told_on(sweep):
    sweep.endings, sweep.losses = {2.0: 1}, lambda cfg: [cfg.optim.lr] * 9
    lines = sweep("optim.lr=1,2,3,4", "hydra.launcher.jobs=2", code=1)
    assert states(lines) == ["finished", "failed", "finished", "finished"]
    assert re.search(r"optim.lr=1  step \d  loss 1.0000", sweep.said.out)
    assert "see runs/s/jobs/" in sweep.said.err


def test_what_a_validation_adds_to_the_last_line_is_read(tmp_path):
    file, first = tmp_path / "metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0'
    file.write_text(first + "}\n")
    progress = jobs_module.JobProgress(str(tmp_path))
    assert [line["step"] for line in progress.lines()] == [1, 2]
    file.write_text(first + ', "validation_loss": 3.0}\n{"step": 3, "lo')
    assert [line.get("validation_loss") for line in progress.lines()] == [3.0]


def test_optuna_chooses_as_if_it_had_never_been_stopped(sweep, tmp_path, monkeypatch):
    command = [
        *OPTUNA,
        "sharding=fsdp,ddp",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.startup_trials=2",
        "hydra.sweeper.seed=7",
    ]
    whole = [line["overrides"] for line in sweep(*command)]
    assert len({tuple(words) for words in whole}) == 3
    assert len({words[-1] for words in whole}) == 2
    best = min(sweep.trained, key=lambda started: started[0].optim.lr)[0]
    assert f"lowest objective: runs/s/jobs/{best.run.name}" in sweep.said.out
    # n_trials counts in all
    assert states(sweep(*command)) == ["finished"] * 3
    assert not sweep.trained
    assert sweep.said.out.count("finished") == 3

    monkeypatch.chdir(tmp_path / "runs")  # another folder, and stopped in its third job
    sweep.endings = {float(whole[2][-2].partition("=")[2]): "signal"}
    assert main(["-m", *DEMO, *command]) == 75
    assert states(read_lines(Path("runs/s/sweep.jsonl"))) == ["finished", "finished", "stopped"]
    sweep.endings = {}
    assert main(["-m", *DEMO, *command]) == 0
    assert [line["overrides"] for line in read_lines(Path("runs/s/sweep.jsonl"))] == whole
    rates = [float(words[-2].partition("=")[2]) for words in (*whole, whole[2])]
    assert [cfg.optim.lr for cfg, _ in sweep.trained] == rates


def test_a_journal_that_was_cut_is_gone_on_with_and_one_that_is_none_is_told(tmp_path):
    study_module = pytest.importorskip("fsdp_trainer.apps.sweep.study")
    journal = tmp_path / "optuna.journal"
    parsed = OverridesParser.create().parse_override(OPTUNA[1])
    space = Space([], {"optim.lr": parsed}, {"optim.lr": False})

    def study():
        opened = study_module.Study(Optuna(n_trials=3), space)
        opened.open(tmp_path)
        return opened

    study().ask(2)
    known = study().jobs()
    journal.write_bytes(journal.read_bytes()[:-7])
    Path(f"{journal}.lock").symlink_to(journal)
    began = time.monotonic()
    assert len(study().ask(3)) == 3
    assert time.monotonic() - began < 20, "optuna waits for a lock of the dead for half a minute"
    assert study().jobs()[:2] == known
    assert len(study().jobs()) == 3
    journal.write_text("other\n" * 3)
    with pytest.raises(UserError, match="Move it away"):
        study()


def test_a_job_that_others_beat_is_ended_early(sweep):
    sweep.endings = {2.0: "never"}
    sweep.losses = lambda cfg: [cfg.optim.lr] * 40
    words = ["optim.lr=range(0.5,2.5,0.5)", "hydra/sweeper=optuna", "hydra.launcher.jobs=1"]
    search = ["n_trials=6", "pruner=median", "startup_trials=1", "sampler=random"]
    lines = sweep(*words, *(f"hydra.sweeper.{word}" for word in search))
    (pruned,) = (line for line in lines if line["state"] == "pruned")
    assert (pruned["overrides"][-1], pruned["objective"]) == ("optim.lr=2", 2.0)
    assert "pruner=median" in pruned["reason"]


def test_what_is_refused_or_failed_has_no_result_for_optuna(sweep):
    sweep.endings = {2.0: 1}
    words = [
        "hydra/sweeper=optuna",
        "optim.lr=-1,1,2",
        "hydra.sweeper.n_trials=8",
        "hydra.sweeper.sampler=random",
    ]
    ends = {line["overrides"][-1]: line["state"] for line in sweep(*words, code=1)}
    assert ends == {"optim.lr=-1": "refused", "optim.lr=1": "finished", "optim.lr=2": "failed"}
    sweep.endings = {}
    assert "finished" in states(sweep(*words))
    assert {cfg.optim.lr for cfg, _ in sweep.trained} == {2.0}, "only what failed is tried again"


def test_what_does_not_fit_is_not_started(sweep, enter):
    lines = sweep("batch.micro_rows=1,1024", "hydra.launcher.memory_gib=8", "precision=fp32")
    assert states(lines) == ["finished", "does not fit"]
    assert [c.batch.micro_rows for c, _ in sweep.trained] == [1]
    reason = lines[1]["reason"]
    assert re.match(
        r"needs at least \d+\.\d+ of 8.00 GiB on each of 1 rank: try  batch.micro_rows=", reason
    )
    assert reason in sweep.said.err
    enter(inject.around("job_fits", lambda *_: "too large"))
    # and nothing is finished
    assert states(sweep("batch.micro_rows=1024", code=1))[-1] == "does not fit"


# --- with real ranks ----------------------------------------------------------------------------


def wait_once(reached):
    if not reached.exists():
        reached.touch()
        time.sleep(600)


def test_a_killed_sweep_leaves_no_rank_and_the_same_command_goes_on(input_words, train, tmp_path):
    words = [*SMALL, *input_words, "run.name=s"]
    words += ["optim.lr=3e-3", "train.steps=8", "checkpoint.every=5", "hydra.launcher.jobs=2"]
    reached = tmp_path / "reached"
    seam = inject.at(None, partial(wait_once, reached), step=7)

    def start(log):
        command = [sys.executable, "-m", "fsdp_trainer", "-m", *words]
        return Forked(command, tmp_path / log, cwd=tmp_path, seam=seam)

    def saved():
        folders = (tmp_path / "runs/s/jobs").glob("*")
        return reached.exists() and any(Run(folder).event("checkpoint") for folder in folders)

    first = start("first")
    try:
        wait_until(saved, first)
        (rank,) = first.children  # with one rank, the job's process is the rank
    finally:
        first.kill()
        first.wait()
    wait_until(lambda: not alive(rank))
    second = start("second")
    assert second.wait() == 0, second.said
    (line,) = read_lines(tmp_path / "runs/s/sweep.jsonl")
    run = Run(tmp_path / line["folder"])
    assert "100%" not in second.said
    log = (run.folder / "output.log").read_text()
    assert "8/8 100%" in log
    assert "fsdp-trainer chat" not in log
    assert run.event("resume")[0]["step"] == 5
    assert run["step"] == list(range(1, 9))
    whole = train("whole", "optim.lr=3e-3", "train.steps=8")["loss"]
    assert run["loss"] == whole, "as if it had never been killed"
    assert (line["state"], line["objective"]) == ("finished", whole[-1])
