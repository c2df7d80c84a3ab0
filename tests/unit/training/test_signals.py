"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspec.command import one_line_errors
from deepspec.training import signals
from deepspec.training.signals import (
    SIGNALS,
    StoppedByUserError,
    StoppedError,
    StopSignals,
    first_signal,
    pass_from,
    passed_on,
    stop_error,
)


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # the suite's time limit ends what never comes
        time.sleep(0.001)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_training_a_signal_is_only_remembered(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in SIGNALS}
    with StopSignals() as stop, stop.until_boundary():
        assert stop.requested == 0
        os.kill(os.getpid(), number)
        wait_until(lambda: stop.requested == number)
    assert {one: signal.getsignal(one) for one in SIGNALS} == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_before_training_a_signal_ends_the_run_with_its_status(number: signal.Signals, status: int) -> None:
    def be_signalled() -> None:
        with one_line_errors(), StopSignals() as stop:
            os.kill(os.getpid(), number)
            wait_until(lambda: stop.requested == number)
            time.sleep(0.1)  # a handler runs between two instructions; it has run long before this ends

    with pytest.raises(SystemExit) as ended:
        be_signalled()
    assert ended.value.code == status


def test_the_same_request_from_two_senders_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 1000.0)
    with StopSignals() as stop, stop.until_boundary():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stop.requested != 0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        assert stop.requested == signal.SIGTERM


def test_a_second_signal_ends_even_a_process_that_hangs_outside_python() -> None:
    code = (
        "import hashlib; from deepspec.training import signals\n"
        "signals.SAME_REQUEST_SECONDS = 0.05\n"
        "with signals.StopSignals() as stop, stop.until_boundary():\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert "stopping after this step" in process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ending at once" in errors


def test_in_a_thread_nothing_is_handled() -> None:
    found: list[object] = []

    def look() -> None:
        with StopSignals():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_signals_are_passed_on_through_a_file_each_once(tmp_path: Path) -> None:
    path = tmp_path / "signals.txt"
    assert first_signal(path) == 0
    with passed_on(path):
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: first_signal(path) == signal.SIGUSR1)
    with StopSignals() as stop, stop.until_boundary():
        assert pass_from(path, 0) == 1
        wait_until(lambda: stop.requested == signal.SIGUSR1)
        assert pass_from(path, 1) == 1


def test_the_error_says_by_what_where_and_how_it_goes_on() -> None:
    error = stop_error(signal.SIGUSR1, "after step 7")
    assert type(error) is StoppedError
    assert str(error) == "stopped by SIGUSR1 after step 7. The same command continues (exit status 75)."
    assert isinstance(stop_error(signal.SIGINT, ""), StoppedByUserError)
