"""Starting the processes of a run: one here, or several children; knows nothing of what they train.

`launch(config)` is what the entry points call. Under torchrun, SLURM or accelerate launch (RANK and WORLD_SIZE are set)
this process is one of several already and trains at once; else engine=ddp starts `engine.num_processes` children.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from deepspec import console, errors
from deepspec.config import TrainConfig
from deepspec.errors import ConfigError, DeepSpecError
from deepspec.runtime import available_cpus, choose_device
from deepspec.training.guard import NonFiniteLossError
from deepspec.training.trainer import train

_FAILURE = "failure_{rank}.json"
_RESULT = "result.json"
_USER_ERROR = 2
_REBUILT = {
    error.__name__: error
    for error in (
        errors.CheckpointError,
        errors.ConfigError,
        errors.DataError,
        errors.TargetError,
        NonFiniteLossError,
    )
}


class ProcessError(DeepSpecError):
    """A process of the run ended before the run did."""


def launch(config: TrainConfig) -> Path:
    """Train with the configured engine and return the last checkpoint.

    Raises:
        ProcessError: a child process died; the others have been stopped.
        DeepSpecError: whatever a process found wrong, as if it had run here.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ or world_size > 1:
        if config.engine.name == "single" and world_size > 1:
            raise ConfigError(
                f"engine is 'single', but {world_size} processes were started (WORLD_SIZE). Use engine=ddp."
            )
        try:
            return train(config)
        finally:
            _leave_process_group()
    if config.engine.num_processes == 1:
        return train(config)
    return _launch_children(config)


def _launch_children(config: TrainConfig) -> Path:
    count = config.engine.num_processes
    if choose_device(config.engine.device).type == "cuda" and torch.cuda.device_count() < count:
        raise ConfigError(
            f"engine.num_processes is {count}, but this machine has {torch.cuda.device_count()} GPUs. "
            f"Use engine.num_processes={torch.cuda.device_count()}."
        )
    with tempfile.TemporaryDirectory(prefix="deepspec_launch_") as name:
        folder = Path(name)
        (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.2,
            shutdown_timeout=10,
        )
        # Its own report of a failure is forty lines around the one that says why; ours follows below.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            with _child_environment(count):
                elastic_launch(settings, sys.executable)("-m", "deepspec.training.launch", name, str(os.getpid()))
        except ChildFailedError as failure:
            raise _reason(folder, failure, count) from None
        return Path(json.loads((folder / _RESULT).read_text(encoding="utf-8")))


def _reason(folder: Path, failure: ChildFailedError, count: int) -> DeepSpecError:
    """The error that a child wrote down, or how it ended when it could not write."""
    # A process killed from outside writes nothing, and its peers then fail because it is gone; SIGTERM is our doing.
    killed = {rank: process for rank, process in failure.failures.items() if process.exitcode < 0}
    killed = {rank: process for rank, process in killed.items() if process.exitcode != -signal.SIGTERM}
    written = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(_FAILURE.format(rank="*"))]
    if written and not killed:
        first = min(written, key=lambda entry: float(entry["time"]))
        if first["type"] in _REBUILT:
            return _REBUILT[first["type"]](first["message"])
        return ProcessError(f"process {first['rank']} of {count} failed: {first['type']}: {first['message']}")
    rank, process = next(iter(killed.items())) if killed else failure.get_first_failure()
    how = f"was killed by {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else "ended"
    advice = " Out of memory is a common cause; try a smaller optimizer.micro_batch_size." if killed else ""
    return ProcessError(
        f"process {rank} of {count} {how} (exit code {process.exitcode}), and the others were stopped. "
        f"The same command continues from the last checkpoint.{advice}"
    )


@contextlib.contextmanager
def _child_environment(count: int) -> Iterator[None]:
    """Share the cores among the children; torch reads these variables when it is imported."""
    wanted = {"OMP_NUM_THREADS": str(max(1, available_cpus() // count)), "OMP_WAIT_POLICY": "PASSIVE"}
    added = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end_with(parent: int) -> None:
    """End this process soon after its parent is gone, even one killed with -9: an orphan would keep the run folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_child(folder: Path, parent: int) -> int:
    """Train as one of several processes; a failure is written down for the parent to raise."""
    _end_with(parent)
    rank = int(os.environ["RANK"])
    try:
        config = TrainConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
        checkpoint = train(config)
        if rank == 0:
            (folder / _RESULT).write_text(json.dumps(str(checkpoint)), encoding="utf-8")
        return 0
    except Exception as failure:
        is_user_error = isinstance(failure, DeepSpecError)
        if not is_user_error:
            console.error(f"process {rank}:\n{traceback.format_exc()}")
        entry = {"rank": rank, "type": type(failure).__name__, "message": str(failure), "time": time.time()}
        (folder / _FAILURE.format(rank=rank)).write_text(json.dumps(entry), encoding="utf-8")
        return _USER_ERROR if is_user_error else 1


if __name__ == "__main__":
    code = _run_child(Path(sys.argv[1]), int(sys.argv[2]))
    # Files are closed and the processes have met at the end of the run. What is left is the clean-up of the process
    # group, which can hang: in gloo's destructors while a peer is gone, or after a failure in waiting for the others.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
