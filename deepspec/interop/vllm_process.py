"""vLLM in a process of its own environment: is it there, and what does it make of these prompts and this draft?

vLLM pins another torch than this package has, so it is never imported here; vllm_driver.py runs under the other python.
The module knows how to start, watch and end that process, and nothing of evaluations.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from deepspec.errors import ConfigError, EngineError
from deepspec.interop import vllm_driver

PYTHON_VARIABLE = "DEEPSPEC_VLLM_PYTHON"
_INSTALL = (
    "Make one with: python -m venv vllm_env && vllm_env/bin/pip install vllm (docs/witness.md says how without a GPU), "
    f"then witness.python=vllm_env/bin/python or {PYTHON_VARIABLE}."
)
_LAST_LINES = 6
# Those of a launcher of ours would make vLLM a member of our group of processes.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class Vllm(NamedTuple):
    """An environment that has vLLM.

    Attributes:
        python: its interpreter.
        version: of vLLM.
        device: what it runs on, such as cpu or cuda.
    """

    python: str
    version: str
    device: str


class Decoded(NamedTuple):
    """One prompt as vLLM answered it.

    Attributes:
        id: of the request.
        output_ids: the answer; a stop token that ended it is its last.
        finish_reason: stop or length.
        proposed: draft tokens of each round.
        accepted: of these, as vLLM counts them: also what stood behind an accepted stop token.
    """

    id: str
    output_ids: list[int]
    finish_reason: str
    proposed: list[int]
    accepted: list[int]


def find_vllm(python: str | None, timeout_seconds: float) -> Vllm:
    """Ask an environment for its vLLM.

    Args:
        python: its interpreter; None takes that of DEEPSPEC_VLLM_PYTHON.
        timeout_seconds: for the import.

    Raises:
        ConfigError: there is no such interpreter, or it has no vLLM that can be imported.
    """
    named = python or os.environ.get(PYTHON_VARIABLE)
    if not named:
        raise ConfigError(f"engine=vllm needs the python of an environment that has vLLM. {_INSTALL}")
    found = shutil.which(os.path.expanduser(named))
    if found is None:
        raise ConfigError(f"witness.python {named} is no program that can be run. {_INSTALL}")
    job: dict[str, Any] = {"device": "", "requests": []}
    with tempfile.TemporaryFile() as log:
        try:
            ready, *_ = _messages(found, job, timeout_seconds, log)
        except EngineError as error:
            raise ConfigError(f"{found} cannot import vLLM: {error} {_INSTALL}") from error
    return Vllm(found, ready["version"], ready["device"])


def decode(vllm: Vllm, job: dict[str, Any], timeout_seconds: float, log: Path) -> Iterator[Decoded]:
    """Decode prompts with a draft, yielding each as it finishes.

    Args:
        vllm: the environment.
        job: what vllm_driver.py reads, less the device.
        timeout_seconds: longest silence that is believed to be work.
        log: file for what vLLM prints.

    Raises:
        EngineError: vLLM refused, crashed or said nothing for too long; its process has ended. The message has its
            last lines.
    """
    with contextlib.ExitStack() as stack:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(log.open("a+b"))
        except OSError as error:
            raise EngineError(f"{log} cannot be written ({error.strerror}). Free some space.") from error
        messages = _messages(vllm.python, {**job, "device": vllm.device}, timeout_seconds, file)
        stack.enter_context(contextlib.closing(messages))
        try:
            for message in messages:
                if message["kind"] == "answer":
                    yield Decoded(**{key: message[key] for key in Decoded._fields})
        except EngineError as error:
            raise EngineError(f"{error} All that it said is in {log}.") from error


def _messages(
    python: str, job: dict[str, Any], timeout_seconds: float, log: IO[bytes]
) -> Generator[dict[str, Any], None, None]:
    """Run the driver and yield its messages up to `done`; whatever happens, its process has ended afterwards."""
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    try:
        process = subprocess.Popen(
            # -I: neither our own variables for Python nor the modules beside the driver are any of its business.
            [python, "-I", vllm_driver.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"{python} cannot be started ({error.strerror}).") from error
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[bytes | None] = queue.Queue()
    # Threads, since neither reading nor writing may outlast the time that is allowed.
    threads = [
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True),
        threading.Thread(target=_write, args=(process.stdin, job), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        while True:
            try:
                line = lines.get(timeout=timeout_seconds)
            except queue.Empty:
                raise EngineError(
                    f"vLLM said nothing for {timeout_seconds:g} s and was ended.{_tail(log)} "
                    "Raise witness.timeout_seconds if that is how long it may take."
                ) from None
            if line is None:
                raise EngineError(f"vLLM ended with {_status(process.wait())}.{_tail(log)}")
            message = _parse(line)
            if message["kind"] == "done":
                return
            if message["kind"] == "error":
                raise EngineError(f"vLLM failed: {_one_line(message['text'])}.{_tail(log)}")
            yield message
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for thread in threads:
            thread.join()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()


def _read(source: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def _write(sink: IO[bytes], job: dict[str, Any]) -> None:
    # It stays open: the driver ends when it is closed, by us or by our end.
    with contextlib.suppress(BrokenPipeError):
        sink.write(json.dumps(job).encode() + b"\n")
        sink.flush()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise EngineError(f"vLLM's driver said {line[:200]!r}, which is no message.") from error
    if not isinstance(message, dict) or "kind" not in message:
        raise EngineError(f"vLLM's driver said {line[:200]!r}, which is no message.")
    return message


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


def _tail(log: IO[bytes]) -> str:
    """The last lines that it printed, for a message; its traceback ends there."""
    log.flush()
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 8192))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f" Its last lines: {' | '.join(lines[-_LAST_LINES:])}." if lines else ""
