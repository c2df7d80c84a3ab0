"""scripts/slurm/array.sh: which run a task is, and what becomes of a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from deepspec.config import config_folder

SCRIPT = config_folder().parent / "scripts" / "slurm" / "array.sh"
TRAIN = """#!/bin/bash
printf '%s\\n' "$@" >"$FOLDER/words"
[ "$*" = "${*/wait/}" ] && exit 0
trap 'sleep 0.3; touch "$FOLDER/saved"; exit 75' USR1
touch "$FOLDER/ready"
while true; do sleep 0.05; done
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A checkout whose training only notes its words, and a scheduler that notes what is requeued."""
    (tmp_path / "scripts" / "train").mkdir(parents=True)
    (tmp_path / "scripts" / "train" / "train.sh").write_text(TRAIN)
    (tmp_path / "train.py").touch()
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >"$FOLDER/requeued"\n')
    (tmp_path / "scontrol").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "FOLDER": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "77",
    }


def test_the_tasks_are_all_algorithms_and_seeds(tmp_path: Path, environment: dict[str, str]) -> None:
    found = []
    for task in range(4):
        settings = {"SLURM_ARRAY_TASK_ID": str(task), "SEEDS": "3 5", "ALGORITHMS": "dspark eagle3"}
        subprocess.run(["bash", str(SCRIPT), "target=qwen3_8b"], env=environment | settings, check=True, timeout=30)
        words = (tmp_path / "words").read_text().splitlines()
        assert words[:3] == ["engine=ddp", "engine.num_processes=8", "target=qwen3_8b"]
        found.append(tuple(words[3:5]))
    assert found == [
        ("algorithm=dspark", "seed=3"),
        ("algorithm=dspark", "seed=5"),
        ("algorithm=eagle3", "seed=3"),
        ("algorithm=eagle3", "seed=5"),
    ]
    assert not (tmp_path / "requeued").exists()


def test_a_task_beyond_the_last_and_a_wrong_folder_are_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    beyond = environment | {"SLURM_ARRAY_TASK_ID": "9"}
    refused = subprocess.run(["bash", str(SCRIPT)], env=beyond, capture_output=True, text=True, timeout=30)
    assert (refused.returncode, "use --array=0-8" in refused.stderr) == (2, True)
    elsewhere = environment | {"SLURM_SUBMIT_DIR": "/proc"}
    refused = subprocess.run(["bash", str(SCRIPT)], env=elsewhere, capture_output=True, text=True, timeout=30)
    assert (refused.returncode, "DEEPSPEC_CHECKOUT" in refused.stderr) == (2, True)


def test_a_task_whose_time_is_up_saves_and_is_requeued(tmp_path: Path, environment: dict[str, str]) -> None:
    task = subprocess.Popen(["bash", str(SCRIPT), "wait"], env=environment)
    while not (tmp_path / "ready").exists():
        assert task.poll() is None
        time.sleep(0.02)
    task.send_signal(signal.SIGUSR1)
    assert task.wait(30) == 0
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
