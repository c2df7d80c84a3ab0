"""One job in a process and a process group of its own, on GPUs of its own; it knows nothing of what the job does."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

# A stopped job finishes its step and saves before it ends.
_STOP_SECONDS = 600.0


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
        status: exit status, negative for a signal.
        seconds: that it ran.
        last_line: of its output, "" where that went to the terminal.
        was_stopped: whether this process was asked to stop meanwhile.
    """

    status: int
    seconds: float
    last_line: str
    was_stopped: bool


def run_process(words: Sequence[str], *, log: Path | None, environment: Mapping[str, str]) -> Ending:
    """Run a program to its end; signals that ask this process to stop are passed on to it.

    Args:
        words: the program and its arguments.
        log: file that its output is added to, None for this terminal.
        environment: variables to set beside the present ones.

    Raises:
        BaseException: whatever ended this process (Ctrl-C, a launcher); the program has ended before.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"env": {**os.environ, **environment}, "start_new_session": True}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(log.open("ab"))
            file.write(f"$ {' '.join(words)}\n".encode())
            file.flush()
            options |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        signals = stack.enter_context(_PassedSignals())
        process = subprocess.Popen(words, **options)
        try:
            signals.pass_to(process)
            status = process.wait()
        except BaseException as reason:
            _stop(process, signal.SIGINT if isinstance(reason, KeyboardInterrupt) else signal.SIGTERM)
            raise
    return Ending(status, time.monotonic() - started, "" if log is None else _last_line(log), bool(signals.received))


@contextlib.contextmanager
def own_gpus(count: int) -> Iterator[dict[str, str]]:
    """Wait for GPUs of this machine that no other job holds, and keep them while entered.

    Jobs that run side by side would otherwise all take the first one. The locks go with the process that holds them.

    Yields:
        The variable that shows a process only these GPUs; nothing where the machine has fewer.
    """
    gpus = visible_gpus() if count else []
    if not count or count > len(gpus):
        yield {}
        return
    folder = Path(tempfile.gettempdir()) / f"deepspec_gpus_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        with contextlib.ExitStack() as held:
            free: list[str] = []
            for gpu in gpus:
                if len(free) < count:
                    with contextlib.suppress(Timeout):
                        name = re.sub(r"[^A-Za-z0-9-]", "_", gpu)
                        held.enter_context(FileLock(folder / f"{name}.lock").acquire(blocking=False))
                        free.append(gpu)
            if len(free) == count:
                yield {"CUDA_VISIBLE_DEVICES": ",".join(free)}
                return
        time.sleep(random.uniform(0.5, 2.0))  # so that two that wait for several do not keep meeting


def visible_gpus() -> list[str]:
    """Names of the GPUs that a new process would see, without asking torch: CUDA_VISIBLE_DEVICES, or the driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() and not name.strip().startswith("-")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


class _PassedSignals:
    """Hands SIGTERM and SIGUSR1 on to a process, those that came before it started as well.

    Attributes:
        received: numbers of those that came.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _PassedSignals:
        # Only the main thread may; a launcher that uses others has its own way to end its jobs.
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._pass_on) for one in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *error: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def pass_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self.received:
            process.send_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._process is not None:
            self._process.send_signal(number)


def _stop(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
