"""Several processes decode one evaluation: the same answers as one, whichever of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eval_places import Place

from deepspec.config import config_folder
from deepspec.evaluation.evaluator import evaluate

pytestmark = pytest.mark.distributed
ROOT = config_folder().parent


class Runs:
    """A place with many prompts, its evaluation by one process, and commands for more."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder)
        # Enough that a second process has loaded its models before the first is through.
        rows = [{"id": f"q{index}", "turns": [f"why {index}? " + "so " * (index % 7)]} for index in range(240)]
        rows += [{"id": f"d{index}", "turns": [f"first {index}", "then?"]} for index in range(4)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.words = ["max_new_tokens=60", "latency_prompts=0", "batch_size=2", "target.dtype=float32"]
        self.started: list[subprocess.Popen[str]] = []
        self.alone = folder / "alone"
        evaluate(self.place.words(*self.words, output=self.alone))

    def command(self, output: Path, *words: str) -> list[str]:
        config = self.place.words(*self.words, output=output)
        return [
            str(ROOT / "eval.py"),
            "target=auto",
            f"target.name_or_path={config.target.name_or_path}",
            "target.dtype=float32",
            "target.layers=[0,1,3]",
            "target.mask_token_id=4",
            f"drafts=[{','.join(config.drafts)}]",
            f"task.path={self.place.folder / 'prompts.jsonl'}",
            f"output_dir={output}",
            "device=cpu",
            *self.words,
            *words,
        ]

    def start(self, output: Path, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *self.command(output, *words)],
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self.started.append(process)
        return process


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("processes"))


@pytest.fixture
def runs(places: Runs) -> Iterator[Runs]:
    """A test that fails leaves no process behind to trouble the next ones."""
    yield places
    for process in places.started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    places.started.clear()


def answers(output: Path) -> dict[tuple[str, str], Any]:
    """Output and accepted counts of every request; a request twice would be a prompt decoded twice."""
    found = {}
    for path in sorted((output / "rounds").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = (path.stem, row["request_id"])
            assert key not in found
            found[key] = (row["output_ids"], [one["accepted"] for one in row["rounds"]])
    return found


def numbers(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "results.json").read_text())["rows"]


def finished(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return errors


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def rows_in(output: Path, pattern: str) -> int:
    """Rows written so far; a file of a running evaluation may be gone between its listing and its reading."""
    count = 0
    for path in output.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            count += path.read_bytes().count(b"\n")
    return count


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns when `what` holds; fails where the process ends or two minutes pass before."""
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None, "it ended before it came to this"
        assert time.monotonic() < deadline, "it did not come to this in time"
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_give_what_one_gives_and_both_work(runs: Runs, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "num_processes=2")
    wait_for(lambda: rows_in(tmp_path, "parts/*.1.jsonl") > 0, process)
    finished(process)
    assert answers(tmp_path) == answers(runs.alone)
    assert numbers(tmp_path) == numbers(runs.alone)
    assert not list(tmp_path.glob("parts/*"))


@pytest.mark.slow
def test_torchrun_gives_what_one_process_gives(runs: Runs, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, *runs.command(tmp_path)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path) == answers(runs.alone)
    assert numbers(tmp_path) == numbers(runs.alone)
    assert done.stdout.count("results: ") == 1


@pytest.mark.slow
def test_a_process_killed_in_the_middle_costs_only_what_it_had_not_finished(runs: Runs, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "num_processes=2")
    wait_for(lambda: rows_in(tmp_path, "parts/*.jsonl") > 0, process)
    (member,) = children(process)
    os.kill(member, signal.SIGKILL)
    errors = finished(process)
    assert "process 1 of 2 ended (exit code -9)" in errors
    assert answers(tmp_path) == answers(runs.alone)


@pytest.mark.slow
def test_the_main_process_killed_with_9_leaves_no_orphan_and_continues(runs: Runs, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "num_processes=2")
    wait_for(lambda: rows_in(tmp_path, "parts/*.jsonl") > 0 and rows_in(tmp_path, "rounds/*.jsonl") > 0, process)
    (member,) = children(process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{member}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{member}").exists()
    before = answers_on_disk(tmp_path)
    assert before
    finished(runs.start(tmp_path, "num_processes=2"))
    after = answers(tmp_path)
    assert after == answers(runs.alone)
    assert before.items() <= after.items()


def answers_on_disk(output: Path) -> dict[tuple[str, str], Any]:
    """What a killed evaluation has kept, in the journals of all processes."""
    found = {}
    for path in [*(output / "rounds").glob("*.jsonl"), *(output / "parts").glob("*.jsonl")]:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = (path.stem.removesuffix(".1"), row["request_id"])
            found[key] = (row["output_ids"], [one["accepted"] for one in row["rounds"]])
    return found


@pytest.mark.slow
def test_a_setting_that_every_process_refuses_is_said_once(runs: Runs, tmp_path: Path) -> None:
    process = runs.start(tmp_path / "out", "num_processes=2", "memory_gib=1.0e-6")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.count("memory_gib 1e-06 does not hold one request") == 1
    assert not (tmp_path / "out").exists()
