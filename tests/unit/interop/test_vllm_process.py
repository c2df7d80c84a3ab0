"""What can go wrong with a process of another environment; stand-ins speak the driver's protocol and fail."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepspec.errors import ConfigError, EngineError
from deepspec.interop import vllm_driver
from deepspec.interop.vllm_process import PYTHON_VARIABLE, Decoded, Vllm, decode, find_vllm

JOB: dict[str, Any] = {"speculative": {"method": "dspark"}, "requests": [{"id": "0", "prompt_ids": [1], "seed": 0}]}
ANSWER = {
    "kind": "answer",
    "id": "0",
    "output_ids": [5, 6, 7],
    "finish_reason": "length",
    "proposed": [4],
    "accepted": [1],
}


def stand_in(folder: Path, *behaviour: str) -> Vllm:
    """A program that takes the place of the other python: it reads the job and then behaves badly."""
    program = folder / "python"
    lines = [
        f"#!{sys.executable}",
        "import json, os, signal, subprocess, sys, time",
        "def say(**message): print(json.dumps(message), flush=True)",
        "job = json.loads(sys.stdin.readline())",
        "say(kind='ready', version='0', device='cpu')",
        f"answer = {ANSWER!r}",
        *behaviour,
    ]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return Vllm(str(program), "0", "cpu")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_without_an_environment_it_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(
        ConfigError, match=r"needs the python .*pip install vllm.*witness.python=.*DEEPSPEC_VLLM_PYTHON"
    ):
        find_vllm(None, 10)


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_python_that_is_not_there_is_named(by_variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(ConfigError, match=r"witness.python /nowhere/python is no program"):
        find_vllm(None if by_variable else "/nowhere/python", 10)


def test_an_environment_without_vllm_is_refused_with_its_own_words() -> None:
    with pytest.raises(ConfigError) as caught:
        find_vllm(sys.executable, 60)
    assert f"{sys.executable} cannot import vLLM" in str(caught.value)
    assert "No module named 'vllm'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_crash_keeps_what_was_answered_and_shows_the_last_lines(tmp_path: Path) -> None:
    vllm = stand_in(tmp_path, "say(**answer)", "sys.stderr.write('a\\n' * 999 + 'out of blocks\\n')", "sys.exit(3)")
    log = tmp_path / "folder" / "x.log"
    answers = decode(vllm, JOB, 30, log)
    assert next(answers) == Decoded("0", [5, 6, 7], "length", [4], [1])
    with pytest.raises(EngineError) as caught:
        next(answers)
    message = str(caught.value)
    assert message.startswith("vLLM ended with status 3. Its last lines: a | a |")
    assert "out of blocks" in message
    assert str(log) in message
    assert len(message) < 400
    assert log.read_text().endswith("out of blocks\n")


def test_a_killed_engine_is_said_to_be_killed(tmp_path: Path) -> None:
    vllm = stand_in(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(EngineError, match="vLLM ended with signal SIGKILL"):
        list(decode(vllm, JOB, 30, tmp_path / "x.log"))


def test_an_error_of_the_engine_is_one_line(tmp_path: Path) -> None:
    vllm = stand_in(tmp_path, "say(kind='error', text='ValueError: no\\n  room.')", "time.sleep(60)")
    with pytest.raises(EngineError, match=r"^vLLM failed: ValueError: no room\. All that it said is in"):
        list(decode(vllm, JOB, 30, tmp_path / "x.log"))


def test_a_silent_engine_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    vllm = stand_in(
        tmp_path,
        "child = subprocess.Popen(['sleep', '60'])",
        "sys.stderr.write(f'{os.getpid()} {child.pid}\\n'); sys.stderr.flush()",
        "say(kind='alive')",
        "time.sleep(60)",
    )
    log = tmp_path / "x.log"
    with pytest.raises(EngineError, match=r"said nothing for 1 s and was ended\..*witness\.timeout_seconds"):
        list(decode(vllm, JOB, 1, log))
    deadline = time.monotonic() + 10
    while any(map(is_running, map(int, log.read_text().split()))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, map(int, log.read_text().split())))


def test_signs_of_life_are_not_taken_for_silence(tmp_path: Path) -> None:
    vllm = stand_in(
        tmp_path, *["time.sleep(0.4); say(kind='alive')"] * 4, "say(**answer)", "say(kind='done')", "time.sleep(60)"
    )
    assert [one.id for one in decode(vllm, JOB, 1.2, tmp_path / "x.log")] == ["0"]


def test_words_that_are_no_message_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="said b'INFO hello"):
        list(decode(stand_in(tmp_path, "print('INFO hello', flush=True)"), JOB, 30, tmp_path / "x.log"))


def test_the_engine_ends_when_nobody_listens_any_more(tmp_path: Path) -> None:
    vllm = stand_in(tmp_path, "answer['id'] = str(os.getpid()); say(**answer)", "time.sleep(60)")
    answers = decode(vllm, JOB, 30, tmp_path / "x.log")
    pid = int(next(answers).id)
    assert is_running(pid)
    answers.close()
    assert not is_running(pid)


def test_the_driver_ends_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    """A killed evaluation must not leave an engine behind; this one hangs in its import."""
    (tmp_path / "vllm.py").write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, vllm_driver.__file__],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(b'{"device": "", "requests": []}\n')
    process.stdin.flush()
    time.sleep(0.3)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(10) != 0


def test_the_driver_needs_nothing_but_the_standard_library_and_vllm() -> None:
    tree = ast.parse(Path(vllm_driver.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)
    late = [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module"
        if isinstance(node.args[0], ast.Constant)
    ]
    assert {str(name).partition(".")[0] for name in late} == {"vllm", "triton"}
