"""Run jobs in processes of their own and kill them, and compare what they leave with an undisturbed run.

The processes are forked from a server that has torch loaded, so that a kill after milliseconds meets the job itself.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["deepspec.evaluation.evaluator", "deepspec.data.regenerate", "deepspec.training.run", "chat_targets", "fault_jobs"]
)


def start(job: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a job of an importable module."""
    # The server imports what it preloads before it learns this process's path.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    process = _context.Process(target=job, args=arguments)
    process.start()
    return process


def kill_after(process: BaseProcess, is_due: Callable[[], bool], extra_seconds: float = 0.0) -> bool:
    """Send SIGKILL a little after a condition holds; whether the job was still running."""
    deadline = time.monotonic() + 60
    while process.is_alive() and not is_due() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(extra_seconds)
    was_alive = process.is_alive()
    process.kill()
    process.join()
    return was_alive


def finish(process: BaseProcess) -> None:
    """Wait for a job that must succeed."""
    process.join(120)
    assert process.exitcode == 0, f"exit status {process.exitcode}"


def lines(path: Path) -> int:
    """Whole lines of a file, 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
