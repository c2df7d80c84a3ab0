"""Runs of two processes that are asked to stop, or of which one hangs or fails; run as a script it is a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tiny_runs import make_config, make_place, read_losses

from deepspec.command import one_line_errors
from deepspec.config import TrainConfig
from deepspec.training.checkpoint import latest_valid
from deepspec.training.launch import launch

ROOT = Path(__file__).parents[2]
# What a starved machine may take; a run that hangs is stopped by this, and none comes near it.
MOST_SECONDS = 120

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("stops"))


@contextmanager
def running(config: TrainConfig, *launcher: str) -> Iterator[subprocess.Popen[str]]:
    """The run in processes of its own."""
    words = config.run_dir.parent / f"{config.run_name}.json"
    words.write_text(config.model_dump_json())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, *launcher, __file__, str(words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            for one in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
                one.kill()
            process.kill()


def wait_for_checkpoint(config: TrainConfig) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not (config.run_dir / "step_latest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK") if "deepspec.training.launch" in process.cmdline() else None
    except psutil.Error:
        return None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_parent_saves_between_checkpoints_and_ends_with_its_status(
    place: Path, number: signal.Signals, status: int
) -> None:
    settings = ("optimizer.steps=100000", "checkpoint.every_steps=1000")
    config = make_config(place, f"stopped_{number.name}", *settings, processes=2)
    with running(config) as process:
        deadline = time.monotonic() + MOST_SECONDS
        while not (config.run_dir / "metrics.jsonl").exists() or not read_losses(config):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == status, errors
    assert f"stopped by {number.name} after step" in errors
    assert f"exit status {status}" in errors
    saved = latest_valid(config.run_dir)
    assert saved is not None
    step = int(saved.name.removeprefix("step_"))
    assert 1 <= step < 1000
    assert not list(config.run_dir.glob(".tmp_*"))


def test_a_process_that_hangs_ends_the_run_within_the_time_set_and_is_said(place: Path) -> None:
    settings = ("optimizer.steps=100000", "engine.timeout_seconds=3", "checkpoint.keep_last=2")
    config = make_config(place, "hangs", *settings, processes=2)
    with running(config) as process:
        wait_for_checkpoint(config)
        children = psutil.Process(process.pid).children(recursive=True)
        (hanging,) = [child for child in children if rank_of(child) == "1"]
        hanging.suspend()
        _, errors = process.communicate(timeout=MOST_SECONDS)
        assert not any(child.is_running() for child in children)
    assert process.returncode == 2
    assert "LostPeerError: process 0 of 2 lost the others" in errors
    assert "did not answer for 3 s (engine.timeout_seconds)" in errors
    assert "Process 1 did not end when asked to and was killed" in errors
    assert latest_valid(config.run_dir) is not None


def test_under_torchrun_the_others_say_why_a_process_failed(place: Path) -> None:
    config = make_config(place, "torchrun", f"data.answers={place / 'nowhere.jsonl'}", processes=2)
    with running(config, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2") as process:
        _, errors = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode != 0
    assert "DataError: data.answers: there is no file" in errors
    assert "LostPeerError: process 1 of 2 lost the others: process 0 failed: DataError: data.answers" in errors


if __name__ == "__main__":
    with one_line_errors():
        launch(TrainConfig.model_validate_json(Path(sys.argv[1]).read_text()))
