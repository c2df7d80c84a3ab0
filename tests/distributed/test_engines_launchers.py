"""Every way to start two processes leads to the losses of one: torchrun, accelerate launch, srun, train.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny_runs import make_config, make_place, read_losses, words_for

from deepspec.training.launch import launch

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_place(tmp_path_factory.mktemp("launchers"))
    launch(make_config(place, "single"))
    return place


def words(place: Path, name: str, *overrides: str) -> list[str]:
    """A run on several processes that does not say how many unless told to."""
    return [*(word for word in words_for(place, name, processes=2) if "num_processes" not in word), *overrides]


def run(commands: list[list[str]], *environments: Mapping[str, str]) -> None:
    """Run commands side by side, each with its own variables; all must succeed."""
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env={**common, **own}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command, own in zip(commands, environments, strict=True)
    ]
    outputs = [process.communicate(timeout=200)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)


def task(number: int, per_node: str, local: int, node: int) -> dict[str, str]:
    """What srun tells one of two tasks."""
    variables = {
        "JOB_ID": str(os.getpid()),
        "STEP_ID": "0",
        "STEP_NUM_TASKS": "2",
        "STEP_TASKS_PER_NODE": per_node,
        "STEP_NODELIST": "localhost",
        "PROCID": str(number),
        "LOCALID": str(local),
        "NODEID": str(node),
    }
    return {f"SLURM_{key}": value for key, value in variables.items()}


def assert_same_losses(place: Path, name: str) -> None:
    one, two = make_config(place, "single"), make_config(place, name, processes=2)
    for single, double in zip(read_losses(one), read_losses(two), strict=True):
        assert single == pytest.approx(double, rel=1e-4, abs=1e-6, nan_ok=True)


def test_torchrun(place: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", TRAIN]
    run([[sys.executable, *start, *words(place, "torchrun")]], {})
    assert_same_losses(place, "torchrun")


def test_accelerate_launch_whatever_its_own_settings_say(place: Path) -> None:
    start = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    own = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "4", "--dynamo_backend", "no"]
    run([[sys.executable, *start, *own, TRAIN, *words(place, "accelerate")]], {"ACCELERATE_USE_CPU": "true"})
    assert_same_losses(place, "accelerate")


def test_srun_with_one_task_for_each_process(place: Path) -> None:
    command = [sys.executable, TRAIN, *words(place, "tasks", "engine.num_processes=2")]
    run([command, command], task(0, "2", 0, 0), task(1, "2", 1, 0))
    assert_same_losses(place, "tasks")


def test_srun_with_one_task_on_each_of_two_machines(place: Path) -> None:
    command = [sys.executable, TRAIN, *words(place, "machines", "engine.num_processes=4")]
    run([command, command], task(0, "1(x2)", 0, 0), task(1, "1(x2)", 0, 1))
    assert_same_losses(place, "machines")


def test_train_sh_starts_the_processes_itself(place: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "train" / "train.sh"), *words(place, "script", "engine.num_processes=2")]
    run([command], {})
    assert_same_losses(place, "script")
