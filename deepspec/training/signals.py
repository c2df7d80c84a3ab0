"""Signals that ask a run to stop: the first is remembered until the step is done and saved, a second ends at once.

Schedulers send SIGTERM or SIGUSR1 before they take a machine away, a terminal sends SIGINT. The exit status says that
the same command goes on from the checkpoint. It knows no training and no checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

from deepspec import console
from deepspec.errors import DeepSpecError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A scheduler may signal a process and its parent, which passes it on: within this time it is one request.
SAME_REQUEST_SECONDS = 2.0


class StoppedError(DeepSpecError):
    """The run was asked to stop and did, after a checkpoint; status 75 (EX_TEMPFAIL) asks a scheduler to requeue it."""

    exit_status: ClassVar[int] = 75


class StoppedByUserError(StoppedError):
    """The run was stopped from a terminal (SIGINT), which ends a sweep as well."""

    exit_status: ClassVar[int] = 128 + signal.SIGINT


class StopSignals:
    """Handles the signals while it is entered, in the main thread; elsewhere nothing changes.

    Attributes:
        requested: number of the first signal received, 0 for none.
    """

    def __init__(self) -> None:
        """Nothing is handled yet."""
        self.requested = 0
        self._received_at = 0.0
        self._waits_for_a_boundary = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StopSignals:
        """Take the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._stack.callback(reader.close)
        self._stack.callback(writer.close)
        # Python runs handlers between its own instructions only; a thread that reads the numbers can also end a
        # process whose main thread hangs in a collective.
        thread = threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(writer.send, b"\0")
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in SIGNALS:
            self._stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back to whoever had them."""
        self._stack.close()

    @contextlib.contextmanager
    def until_boundary(self) -> Iterator[None]:
        """Inside, a signal is only remembered; outside, where there is nothing to save, it ends the run."""
        self._waits_for_a_boundary = True
        try:
            yield
        finally:
            self._waits_for_a_boundary = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._waits_for_a_boundary:
            raise stop_error(number, "while there was nothing to save")

    def _watch(self, reader: socket.socket) -> None:
        while (number := reader.recv(1)[0]) != 0:
            if number in SIGNALS:
                self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._received_at = number, now
            if self._waits_for_a_boundary:
                console.info(f"{_name(number)}: stopping after this step and its checkpoint; once more ends at once")
        elif now - self._received_at >= SAME_REQUEST_SECONDS:
            console.error(f"{_name(number)} again: ending at once, without a checkpoint")
            os._exit(128 + number)


def stop_error(number: int, where: str) -> StoppedError:
    """The error that ends a run which was asked to stop.

    Args:
        number: the signal.
        where: how far it came.
    """
    kind = StoppedByUserError if number == signal.SIGINT else StoppedError
    return kind(f"stopped by {_name(number)} {where}. The same command continues (exit status {kind.exit_status}).")


@contextlib.contextmanager
def passed_on(path: Path) -> Iterator[None]:
    """Write each signal received by this process into a file, from which `pass_from` of its children takes it."""

    def write(number: int, frame: FrameType | None) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{int(number)}\n")

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, write) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_from(path: Path, already: int) -> int:
    """Send this process the signals of a file that `passed_on` writes, past those `already` sent; returns how many."""
    numbers = _passed(path)
    for number in numbers[already:]:
        os.kill(os.getpid(), number)
    return len(numbers)


def first_signal(path: Path) -> int:
    """The first signal in a file that `passed_on` writes, 0 for none."""
    return next(iter(_passed(path)), 0)


def _passed(path: Path) -> list[int]:
    return [int(number) for number in path.read_text(encoding="utf-8").split()] if path.exists() else []


def _name(number: int) -> str:
    return signal.Signals(number).name
