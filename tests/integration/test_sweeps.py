"""Whole sweeps of tiny runs over every launcher: a failed job ends nothing, a rerun does what is left."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import make_place, save_answers, words_for

from deepspec.config import config_folder

ROOT = config_folder().parent
pytestmark = pytest.mark.slow
LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": [],
    "submitit_slurm": ["hydra.launcher.timeout_min=10"],
}
# A SLURM of one machine: runs each task of an array at once, under an id that no other job has, and knows of no end.
SBATCH = """#!/bin/bash
script="$1"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "${last:-0}"); do
    (
        export SLURM_JOB_ID=$(($$ * 10 + task)) SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1
        export SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=localhost
        [ -z "$last" ] || export SLURM_ARRAY_JOB_ID=$$ SLURM_ARRAY_TASK_ID=$task
        bash "$script" >/dev/null 2>&1
    ) >/dev/null 2>&1 &
done
echo "Submitted batch job $$"
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do
    case "$1" in --output | --error) shift ;; esac
    shift
done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
while [ $# -gt 0 ]; do
    [ "$1" != -j ] || for task in 0 1 2 3; do echo "$2_$task|RUNNING|localhost"; done
    shift
done
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("sweeps"))
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        path = folder / "slurm" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return folder


def words(place: Path, output: Path, *overrides: str) -> list[str]:
    """Short runs; the sweep names them, and may choose their algorithm."""
    usual = [word for word in words_for(place, "unnamed") if not word.startswith(("algorithm=", "exp_name="))]
    return [*usual, f"output_dir={output}", "optimizer.steps=2", *overrides]


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    path = f"{place / 'slurm'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=place,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sweep(place: Path, *arguments: str) -> tuple[int, str, list[str]]:
    process = start(place, *arguments)
    shown, problems = process.communicate(timeout=280)
    return process.returncode, shown, [line for line in problems.splitlines() if line.startswith(("job ", "Traceback"))]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failed_job_is_named_the_others_run_and_a_rerun_does_only_what_is_left(
    place: Path, tmp_path: Path, launcher: str
) -> None:
    plugin = {"basic": "hydra"}.get(launcher, f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    if importlib.util.find_spec(plugin) is None:
        pytest.skip(f"{launcher} is not installed: pip install -e '.[sweep]'")
    late = tmp_path / "late.jsonl"
    command = [
        "-m",
        *words(place, tmp_path),
        f"data.answers={late},{place / 'answers.jsonl'}",
        "algorithm=dspark,eagle3",
        f"hydra/launcher={launcher}",
        *LAUNCHERS[launcher],
    ]
    status, shown, problems = sweep(place, *command)
    assert "sweep of 4 jobs, 0 of them finished before" in shown
    assert status == 2, problems
    assert [line.split(", ")[0] for line in problems] == ["job 0", "job 1"]
    assert "late.jsonl, failed (status 2)" in problems[0]
    if launcher != "basic":
        assert f"there is no file {late}" in problems[0]
    (folder,) = (tmp_path / "sweeps").iterdir()
    runs = json.loads((folder / "comparison.json").read_text())["runs"]
    assert [(run["algorithm"], run["steps"], run["planned_steps"]) for run in runs] == [
        ("dspark", 2, 2),
        ("eagle3", 2, 2),
    ]

    finished = {path: path.stat().st_mtime_ns for run in runs for path in Path(run["folder"]).rglob("*")}
    save_answers(late)
    status, shown, problems = sweep(place, *command)
    assert (status, problems) == (0, [])
    assert "sweep of 4 jobs, 2 of them finished before" in shown
    assert len(json.loads((folder / "comparison.json").read_text())["runs"]) == 4
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    status, shown, problems = sweep(place, *command)
    assert (status, problems) == (0, [])
    assert "sweep of 4 jobs, 4 of them finished before" in shown


def test_an_interrupted_sweep_ends_its_job_with_a_checkpoint_and_the_same_command_goes_on(
    place: Path, tmp_path: Path
) -> None:
    command = ["-m", *words(place, tmp_path, "optimizer.steps=400"), "seed=0,1", "checkpoint.every_steps=1000"]
    process = start(place, *command)
    metrics = tmp_path / "dspark_block7_smollm2_135m_seed=0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, problems = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert "job 0, dspark_block7_smollm2_135m_seed=0, was stopped" in problems
    assert "job 1, dspark_block7_smollm2_135m_seed=1, has not reported its end" in problems
    (checkpoint,) = metrics.parent.glob("step_[0-9]*")
    assert 3 < int(checkpoint.name.removeprefix("step_")) < 400
    assert not (tmp_path / "dspark_block7_smollm2_135m_seed=1").exists()
