"""What is said of a process that died without a word."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from deepspec.training import launch


@pytest.mark.parametrize(
    ("number", "is_memory"), [(signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGABRT, False)]
)
def test_memory_is_named_only_for_the_signal_that_a_system_without_memory_sends(
    tmp_path: Path, number: signal.Signals, is_memory: bool
) -> None:
    died = ProcessFailure(local_rank=1, pid=1, exitcode=-number, error_file="")
    message = str(launch._reason(tmp_path, ChildFailedError("run", {1: died}), 2))
    assert f"process 1 of 2 was killed by {number.name} (exit code {-number})" in message
    assert ("Out of memory" in message) == is_memory
