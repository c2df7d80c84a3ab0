"""Metrics, TensorBoard and Weights & Biases: what they keep, and that no failure of theirs reaches the run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepspec.config import TrainConfig, compose_train
from deepspec.training import loggers, trackers
from deepspec.training.loggers import METRICS, RunLog, drop_lines_after

# tensorboard's own thread dies of its error, which is the point here.
DYING_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def make_config(*overrides: str) -> TrainConfig:
    return compose_train(["experiment=dspark_smollm2_135m", "exp_name=run", *overrides])


def line(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 1.0 / step,
        "acceptance@1": 0.5,
        "acceptance@2": 0.25,
        "acceptance@10": 0.125,
        "learning_rate": 1e-3,
        "tokens_per_second": 10.0,
    }


def log_lines(folder: Path, config: TrainConfig, steps: range) -> None:
    with RunLog(folder, config, first_step=steps.start - 1, total_steps=steps.stop) as log:
        for step in steps:
            log.advance()
            log.write(line(step))


def read_steps(folder: Path) -> list[int]:
    return [json.loads(text)["step"] for text in (folder / METRICS).read_text().splitlines()]


@contextlib.contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """What a full disk does, without one: the system refuses every write past this place of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_the_disk_refuses_follow_when_there_is_room_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path, make_config(), first_step=0, total_steps=9) as log:
        log.write(line(1))
        with files_no_longer_than((tmp_path / METRICS).stat().st_size + 20):
            log.write(line(2))
            log.write(line(3))
            assert read_steps(tmp_path) == [1]  # no half line
        log.write(line(4))
    assert read_steps(tmp_path) == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_lines_that_never_found_room_are_counted_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / METRICS).mkdir()  # a folder where the file should be
    log_lines(tmp_path, make_config(), range(1, 4))
    shown = capsys.readouterr().err
    assert shown.count("cannot be written") == 1
    assert f"3 lines are missing at the end of {tmp_path / METRICS}" in shown


def test_lines_after_the_checkpoint_and_a_cut_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text("".join(json.dumps(line(step)) + "\n" for step in (1, 2, 3)) + '{"step": 2, "lo')
    drop_lines_after(path, 2)
    assert read_steps(tmp_path) == [1, 2]


def test_tensorboard_holds_every_number_the_config_and_the_results(tmp_path: Path) -> None:
    log_lines(tmp_path, make_config("logger=tensorboard"), range(1, 4))
    log_lines(tmp_path, make_config("logger=tensorboard"), range(3, 5))  # resumed from step 2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [
        (step, pytest.approx(1.0 / step)) for step in (1, 2, 3, 4)
    ]
    assert "acceptance@2" in events.Tags()["scalars"]
    texts = {tag.split("/")[0] for tag in events.Tags()["tensors"]}
    assert texts == {"config", "provenance", "results"}


@DYING_THREAD
def test_a_disk_too_full_for_tensorboard_is_said_once_and_all_lines_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("logger=tensorboard")
    with files_no_longer_than(20_000), RunLog(tmp_path, config, first_step=0, total_steps=200) as log:
        for step in range(1, 200):
            log.write({"step": step, **{f"number {index}": 0.0 for index in range(20)}})
            assert read_steps(tmp_path) == [step]
            (tmp_path / METRICS).unlink()  # only the events may grow
    # TensorBoard's own thread dies a moment after it has told the log; what it leaves belongs to this test.
    for thread in threading.enumerate():
        if type(thread).__name__ == "_AsyncWriterThread" and thread.exception:
            thread.join(30)
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    assert 0 < events.stat().st_size <= 20_000
    assert capsys.readouterr().err.count("TensorBoard") == 1


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Weights & Biases as on a machine where nobody ever logged in."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    yield tmp_path
    with contextlib.suppress(ConnectionError):  # its service may have been killed
        wandb.teardown()


def read_wandb(folder: Path) -> list[Any]:
    """The records of an offline run: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, place, parts, records = path.read_bytes(), 7, b"", []
    while place < len(data):
        if 32768 - place % 32768 < 7:  # no room for a header: padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def history(records: list[Any], key: str) -> list[float]:
    found = []
    for record in records:
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        found += [json.loads(items[key])] if key in items else []
    return found


def test_wandb_offline_holds_curves_config_git_state_and_results_and_a_resumed_run_continues_the_same_run(
    tmp_path: Path, wandb_home: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config = make_config("logger=wandb", "logger.wandb_mode=offline", "logger.wandb_project=mine")
    log_lines(folder, config, range(1, 4))
    log_lines(folder, config, range(3, 6))
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    identity = (folder / "wandb_run_id").read_text()
    assert [run.name.rsplit("-", 1)[1] for run in runs] == [identity, identity]
    records = read_wandb(runs[0])
    assert history(records, "loss") == [1.0, 0.5, pytest.approx(1 / 3)]
    assert history(read_wandb(runs[1]), "step") == [3, 4, 5]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_id) == ("mine", "run", identity)
    values = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert values["optimizer"]["learning_rate"] == config.optimizer.learning_rate
    assert {"git", "hardware"} <= values["provenance"].keys()
    tables = {json.loads(path.read_text())["columns"][0]: path for path in (runs[0] / "files").rglob("*.table.json")}
    assert json.loads(tables["result"].read_text())["data"][1] == ["loss", pytest.approx(1 / 3)]
    assert json.loads(tables["slot"].read_text())["data"] == [[1, 0.5], [2, 0.25], [10, 0.125]]


def test_wandb_without_a_login_is_kept_offline_and_said_once(
    tmp_path: Path, wandb_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_lines(tmp_path, make_config("logger=wandb", "logger.wandb_mode=online"), range(1, 3))
    shown = capsys.readouterr().err
    assert shown.count("warning: Weights & Biases cannot be reached (No API key configured.") == 1
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert f"wandb sync {run}" in shown
    assert history(read_wandb(run), "loss") == [1.0, 0.5]


@pytest.mark.slow
def test_wandb_whose_server_does_not_answer_is_kept_offline(
    tmp_path: Path, wandb_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "_WANDB_START_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        log_lines(tmp_path, make_config("logger=wandb"), range(1, 3))
    assert capsys.readouterr().err.count("Weights & Biases cannot be reached") == 1
    assert read_steps(tmp_path) == [1, 2]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_wandb_without_a_folder_it_can_write_to_ends_no_run(
    tmp_path: Path, wandb_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DIR", "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    log_lines(tmp_path, make_config("logger=wandb", "logger.wandb_mode=offline"), range(1, 3))
    assert read_steps(tmp_path) == [1, 2]


def test_a_killed_wandb_is_said_once_and_the_run_goes_on(
    tmp_path: Path, wandb_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("logger=wandb", "logger.wandb_mode=offline")
    with RunLog(tmp_path, config, first_step=0, total_steps=9) as log:
        log.write(line(1))
        services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
        assert services
        for service in services:
            service.kill()
        psutil.wait_procs(services, timeout=10)
        for step in range(2, 6):
            log.write(line(step))
    assert read_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("Weights & Biases") == 1


class StuckTracker:
    """Never returns from its first line, as on a dead file system."""

    def write(self, step: int, line: Mapping[str, float]) -> None:
        threading.Event().wait()

    def close(self, last: Mapping[str, float], *, is_finished: bool) -> None:
        """Nothing comes here."""


@pytest.mark.parametrize("count", [5, 60])
def test_a_tracker_that_never_returns_holds_up_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    monkeypatch.setattr(loggers, "_MOST_WAITING", 20)
    monkeypatch.setattr(loggers, "_CLOSE_SECONDS", 0.2)
    with RunLog(tmp_path, make_config(), first_step=0, total_steps=99) as log:
        log._start("Stuck", StuckTracker)
        for step in range(1, count + 1):
            log.write(line(step))
    assert read_steps(tmp_path) == [*range(1, count + 1)]
    shown = capsys.readouterr().err
    said = "is switched off for the rest of this run: 20 lines wait for it" if count > 20 else "could not be closed"
    assert shown.count("Stuck") == shown.count(f"Stuck {said}") == 1


TALK = """
from deepspec import console
with console.progress("train", 1000, line_seconds=0.0) as bar:
    for number in range(1000):
        console.info("line " * 20)
        bar.advance(1, "status")
console.error("all 1000")
"""


@pytest.mark.parametrize("kind", ["closed pipe", "full disk"])
def test_a_run_whose_output_cannot_be_written_goes_on_to_its_end(kind: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", TALK]
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE if kind == "closed pipe" else full, stderr=subprocess.PIPE, text=True
        )
        if run.stdout is not None:
            run.stdout.readline()
            run.stdout.close()
        assert run.stderr is not None
        shown = run.stderr.read()
        run.stderr.close()
        assert run.wait(60) == 0
    assert "all 1000" in shown
    assert shown.count("nothing more is written to stdout") == 1
