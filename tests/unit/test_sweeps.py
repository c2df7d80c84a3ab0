"""Sweeps: names and folders of jobs, what is left to do, processes and GPUs of their own, refusals."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepspec.command import check_command_line
from deepspec.config import TrainConfig, compose_train
from deepspec.errors import ConfigError, DataError
from deepspec.job import own_gpus, run_process, visible_gpus
from deepspec.sweep import (
    Sweep,
    exit_status,
    is_finished,
    note_end,
    plan_sweep,
    read_sweep,
    unfinished,
    write_plan,
)

SMALL = "experiment=dspark_smollm2_135m"


@functools.cache
def composed() -> TrainConfig:
    return compose_train([SMALL])


def changed(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    values = config.model_dump(mode="json")
    for key, value in settings.items():
        place = values
        *parents, leaf = key.split(".")
        for parent in parents:
            place = place[parent]
        place[leaf] = value
    return TrainConfig.model_validate(values)


def plan(tmp_path: Path, swept: dict[str, list[Any]], folder: Path | None = None, **settings: Any) -> Sweep:
    """The sweep that `train.py -m <swept>` plans, without composing every job."""
    choices = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    configs = [changed(composed(), {"output_dir": str(tmp_path), **settings, **choice}) for choice in choices]
    jobs = [[f"{key}={value}" for key, value in choice.items()] for choice in choices]
    values = {key: [str(choice[key]) for choice in choices] for key in swept}
    return plan_sweep("train", jobs, configs, values, folder)


def command(kind: str, *words: str) -> Sweep:
    """The sweep that a command line plans."""
    sweep = check_command_line(kind, ["-m", *words])
    assert sweep is not None
    return sweep


def names(sweep: Sweep) -> list[str]:
    return [job.name for job in sweep.jobs]


def finish(sweep: Sweep, number: int, status: int = 0) -> None:
    """What a job leaves behind."""
    folder = Path(sweep.jobs[number].folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step_latest").mkdir(exist_ok=True)
    note_end(sweep, number, status, 1.0, "the last line")


def test_jobs_are_named_by_what_their_usual_names_do_not_tell_apart(tmp_path: Path) -> None:
    assert names(command("train", "algorithm=dspark,eagle3", "target=qwen3_4b", "seed=range(2)")) == [
        "dspark_block7_qwen3_4b_seed=0",
        "dspark_block7_qwen3_4b_seed=1",
        "eagle3_block7_qwen3_4b_seed=0",
        "eagle3_block7_qwen3_4b_seed=1",
    ]
    assert names(plan(tmp_path, {"seed": [0, 1], "optimizer.learning_rate": [0.001, 0.01]})) == [
        "dspark_block7_smollm2_135m_seed=0_learning_rate=0.001",
        "dspark_block7_smollm2_135m_seed=0_learning_rate=0.01",
        "dspark_block7_smollm2_135m_seed=1_learning_rate=0.001",
        "dspark_block7_smollm2_135m_seed=1_learning_rate=0.01",
    ]
    assert names(plan(tmp_path, {"algorithm.num_draft_tokens": [3, 5]})) == [
        "dspark_block3_smollm2_135m",
        "dspark_block5_smollm2_135m",
    ]


def test_a_name_that_is_given_stays_and_is_only_added_to_where_runs_would_share_a_folder(tmp_path: Path) -> None:
    assert names(plan(tmp_path, {"seed": [4, 5]}, exp_name="mine")) == ["mine_seed=4", "mine_seed=5"]
    assert names(command("train", SMALL, "exp_name='run${seed}'", "seed=4,5")) == ["run4", "run5"]


def test_every_job_of_any_sweep_has_a_folder_of_its_own(tmp_path: Path) -> None:
    sweep = plan(tmp_path, {"data.answers": ["/a b/c.jsonl", "/a_b/c.jsonl", "/a,b=[c].jsonl"], "seed": [0, 1]})
    folders = [Path(job.folder) for job in sweep.jobs]
    assert len(set(folders)) == 6
    assert {folder.parent for folder in folders} == {tmp_path}
    long = plan(tmp_path, {"data.answers": ["x" * 300, "x" * 301]})
    assert len({name[:120] for name in names(long)}) == 2


def test_the_same_command_finds_its_sweep_again_and_another_does_not(tmp_path: Path) -> None:
    one = plan(tmp_path, {"seed": [0, 1]})
    assert one.folder == plan(tmp_path, {"seed": [0, 1]}).folder
    assert one.folder != plan(tmp_path, {"seed": [0, 1, 2]}).folder
    assert one.folder.parent == tmp_path / "sweeps"
    assert command("train", SMALL, "seed=0,1", f"hydra.sweep.dir='{tmp_path}/here'").folder == tmp_path / "here"


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    sweep = plan(tmp_path, {"seed": [0, 1]})
    write_plan(sweep)
    assert read_sweep(sweep.folder) == sweep
    (sweep.folder / "sweep.json").write_text('{"kind": "train", "jobs": [{"na')
    with pytest.raises(DataError, match=r"sweep\.json cannot be read"):
        read_sweep(sweep.folder)


def test_jobs_that_did_not_end_well_are_named_with_what_they_said_last(tmp_path: Path) -> None:
    sweep = plan(tmp_path, {"seed": [0, 1, 2, 3]})
    finish(sweep, 0)
    finish(sweep, 1, status=2)
    finish(sweep, 2, status=-signal.SIGKILL)
    base = "dspark_block7_smollm2_135m_seed"
    assert unfinished(sweep) == [
        f"job 1, {base}=1, failed (status 2): the last line",
        f"job 2, {base}=2, was killed by SIGKILL: the last line",
        f"job 3, {base}=3, has not reported its end",
    ]
    assert exit_status(sweep) == 2
    for number in range(4):
        finish(sweep, number)
    assert (unfinished(sweep), exit_status(sweep)) == ([], 0)


def test_a_job_is_done_again_when_its_settings_its_data_or_its_results_are_not_what_they_were(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("{}\n")

    def again(**settings: Any) -> Sweep:
        return plan(tmp_path, {"data.answers": [str(answers)], "seed": [0, 1]}, **settings)

    finish(again(), 0)
    assert is_finished(again(), 0)
    assert is_finished(again(logger={**composed().logger.model_dump(), "every_steps": 3}), 0)
    assert not is_finished(again(seed=0, checkpoint={**composed().checkpoint.model_dump(), "every_steps": 3}), 0)
    answers.write_text("{}\n{}\n")
    assert not is_finished(again(), 0)
    finish(again(), 0)
    (Path(again().jobs[0].folder) / "step_latest").rmdir()
    assert not is_finished(again(), 0)


def test_evaluations_of_a_sweep_have_folders_of_their_own(tmp_path: Path) -> None:
    sweep = command("eval", "target=smollm2_135m", "sampling.temperature=0,0.5", f"results_dir={tmp_path}")
    assert [Path(job.folder).name for job in sweep.jobs] == [
        "smollm2_135m_temperature=0",
        "smollm2_135m_temperature=0.5",
    ]
    assert all(f"output_dir='{job.folder}'" in job.overrides for job in sweep.jobs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,0"], "more than once: .*seed=0"),
        (["seed=0,1", "optimizer.learning_rate=1,-1"], "optimizer.learning_rate: got -1"),
        (["seed=interval(0,1)"], "does not support sweep type"),
        (["seed=0,1", "hydra/launcher=submitit_slurm"], r"ends every job after an hour.*hydra\.launcher\.timeout_min"),
        (["seed=0,1", "hydra/sweeper=optuna"], "hydra/sweeper: only Hydra's basic sweeper"),
        (["seed=0,1", "--config-dir", "/tmp"], "a sweep reads the files in config/ only"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_its_first_job(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_command_line("train", ["-m", SMALL, *words])


def test_a_sweep_below_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="starts the processes of its jobs itself"):
        check_command_line("train", ["-m", SMALL, "seed=0,1"])


def test_a_job_runs_in_a_process_group_of_its_own_and_its_last_line_is_kept(tmp_path: Path) -> None:
    code = "import os; print(os.environ['WORD'], os.getpgid(0) == os.getpid()); print('the end'); raise SystemExit(3)"
    log = tmp_path / "logs" / "0.txt"
    ending = run_process([sys.executable, "-c", code], log=log, environment={"WORD": "hello"})
    assert (ending.status, ending.last_line, ending.was_stopped) == (3, "the end", False)
    assert "hello True" in log.read_text()


PARENT = """
import signal
import sys
from pathlib import Path
from deepspec.job import run_process
code = '''
import signal, sys, time
def leave(number, frame):
    print("saved after", signal.Signals(number).name)
    sys.exit(75)
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(one, leave)
print("ready", flush=True)
time.sleep(60)
'''
# A shell that started the tests in the background had SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
ending = run_process([sys.executable, "-c", code], log=Path(sys.argv[1]), environment={})
print(ending.status, ending.was_stopped, ending.last_line)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_a_sweep_reaches_its_job_which_may_save_before_the_sweep_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log.txt"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True)
    while not (log.is_file() and log.read_text().endswith("\nready\n")):
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(number)
    shown, _ = parent.communicate(timeout=30)
    assert f"saved after {number.name}" in log.read_text()
    if number != signal.SIGINT:  # Python's own way to end after Ctrl-C
        assert shown == f"75 True saved after {number.name}\n"


def test_jobs_side_by_side_hold_different_gpus_and_wait_where_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,GPU-af/1")
    assert visible_gpus() == ["2", "3", "GPU-af/1"]
    third: list[dict[str, str]] = []

    def wait_for_two() -> None:
        with own_gpus(2) as devices:
            third.append(devices)

    with own_gpus(2) as first:
        assert first == {"CUDA_VISIBLE_DEVICES": "2,3"}
        with own_gpus(1) as second:
            assert second == {"CUDA_VISIBLE_DEVICES": "GPU-af/1"}
        waiting = threading.Thread(target=wait_for_two)
        waiting.start()
        time.sleep(0.2)
        assert third == []
    waiting.join(30)
    assert third == [{"CUDA_VISIBLE_DEVICES": "2,3"}]
    with own_gpus(0) as none, own_gpus(4) as too_many:
        assert (none, too_many) == ({}, {})


def test_the_plan_of_a_sweep_that_cannot_be_written_is_refused_with_a_way_out(tmp_path: Path) -> None:
    sweep = plan(tmp_path, {"seed": [0, 1]}, Path("/proc/deepspec"))
    with pytest.raises(DataError, match=r"cannot write /proc/deepspec/sweep\.json"):
        write_plan(sweep)


def test_what_is_written_is_json_that_others_can_read(tmp_path: Path) -> None:
    sweep = plan(tmp_path, {"seed": [0, 1]})
    write_plan(sweep)
    finish(sweep, 1)
    jobs = json.loads((sweep.folder / "sweep.json").read_text())["jobs"]
    assert [job["name"] for job in jobs] == names(sweep)
    assert json.loads((sweep.folder / "jobs" / "1.json").read_text())["host"] == os.uname().nodename
