"""Starting the processes of a run: one here, or several children; knows nothing of what they train.

`launch(config)` is what the entry points call. Under torchrun and accelerate launch (RANK and WORLD_SIZE are set), and
under srun with as many tasks as processes, this process is one of several already and trains at once. Else it starts
children: all `engine.num_processes`, or, as one of fewer srun tasks, its share of them.
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
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from deepspec import console, errors
from deepspec.config import TrainConfig
from deepspec.errors import ConfigError, DeepSpecError
from deepspec.limits import thread_settings
from deepspec.runtime import choose_device
from deepspec.training.guard import NonFiniteLossError
from deepspec.training.memory import NoMemoryError
from deepspec.training.peers import LostPeerError
from deepspec.training.signals import StoppedByUserError, StoppedError, first_signal, pass_from, passed_on, stop_error
from deepspec.training.slurm import SlurmStep, slurm_step

_FAILURE = "failure_{rank}.json"
_RESULT = "result.json"
_SIGNALS = "signals.txt"
_USER_ERROR = 2
# Children that have not ended so long after they were asked to are killed.
_SHUTDOWN_SECONDS = 10
_REBUILT = {
    error.__name__: error
    for error in (
        errors.CheckpointError,
        errors.ConfigError,
        errors.DataError,
        errors.TargetError,
        LostPeerError,
        NoMemoryError,
        NonFiniteLossError,
        StoppedByUserError,
        StoppedError,
    )
}


class ProcessError(DeepSpecError):
    """A process of the run ended before the run did."""


def launch(config: TrainConfig) -> Path:
    """Train with the configured engine and return the last checkpoint.

    Raises:
        ProcessError: a child process died; the others have been stopped.
        StoppedError: a signal asked for an end.
        DeepSpecError: whatever a process found wrong, as if it had run here.
    """
    step = None if "RANK" in os.environ else slurm_step()
    if step is not None and step.num_tasks == config.engine.num_processes:
        os.environ.update(step.variables())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ or world_size > 1:
        _check_processes(config, world_size)
        _check_devices(config, 1)
        try:
            return _train(config)
        finally:
            _leave_process_group()
    if config.engine.num_processes == 1 and step is None:
        return _train(config)
    return _launch_children(config, step)


def _train(config: TrainConfig) -> Path:
    # Late: a process that starts others needs nothing of it, and they begin seconds earlier.
    from deepspec.training.run import train

    return train(config)


def _check_processes(config: TrainConfig, started: int) -> None:
    """Refuse processes that the configuration does not know of."""
    wanted = config.engine.num_processes
    if config.engine.name == "single" and started > 1:
        raise ConfigError(f"engine is 'single', but {started} processes were started (WORLD_SIZE). Use engine=ddp.")
    if started != wanted:
        raise ConfigError(
            f"engine.num_processes is {wanted}, but {started} processes were started (WORLD_SIZE). "
            "Leave the key out, which takes the number that was started."
        )


def _launch_children(config: TrainConfig, step: SlurmStep | None) -> Path:
    """Start the processes of this machine, or of this task of a SLURM step, and wait for them."""
    count, tasks = config.engine.num_processes, 1 if step is None else step.num_tasks
    if count % tasks:
        raise ConfigError(
            f"engine.num_processes is {count}, but srun started {tasks} tasks. Use engine.num_processes={tasks}, where "
            "each task is one process, or a multiple of it, where each task starts its share."
        )
    count //= tasks
    _check_devices(config, count)
    with tempfile.TemporaryDirectory(prefix="deepspec_launch_") as name:
        folder = Path(name)
        (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
        settings = LaunchConfig(
            min_nodes=tasks,
            max_nodes=tasks,
            nproc_per_node=count,
            run_id=folder.name if step is None else step.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0" if step is None else f"{step.host}:{step.port}",
            max_restarts=0,
            monitor_interval=0.2,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            # The others are passed on to the children, which save and end by themselves.
            signals_to_handle="SIGHUP,SIGQUIT",
        )
        # Its own report of a failure is forty lines around the one that says why; ours follows below.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            with _child_environment(count), passed_on(folder / _SIGNALS):
                elastic_launch(settings, sys.executable)("-m", "deepspec.training.launch", name, str(os.getpid()))
        except ChildFailedError as failure:
            raise _reason(folder, failure, count) from None
        stops = [entry for entry in _written(folder) if issubclass(_REBUILT[entry["type"]], StoppedError)]
        if stops:
            raise _REBUILT[stops[0]["type"]](stops[0]["message"])
        return Path(json.loads((folder / _RESULT).read_text(encoding="utf-8")))


def _check_devices(config: TrainConfig, count: int) -> None:
    """Refuse processes that have no device here, before any of them is started."""
    is_cpu = choose_device(config.engine.device).type == "cpu"
    if config.engine.is_sharded and is_cpu:
        raise ConfigError(
            f"engine is '{config.engine.name}', which needs a GPU for each process, and torch {torch.__version__} sees "
            "none here: Accelerate would run another engine in its place. Use engine=ddp."
        )
    if not is_cpu and torch.cuda.device_count() < count:
        raise ConfigError(
            f"{count} processes are to run on this machine (engine.num_processes), but it has "
            f"{torch.cuda.device_count()} GPUs. Use engine.num_processes={torch.cuda.device_count()}."
        )


def _reason(folder: Path, failure: ChildFailedError, count: int) -> DeepSpecError:
    """The error that a child wrote down, or how it ended when it could not write."""
    # A process killed from outside writes nothing, and its peers then fail because it is gone; SIGTERM is our doing.
    killed = {rank: process for rank, process in failure.failures.items() if process.exitcode < 0}
    killed = {rank: process for rank, process in killed.items() if process.exitcode != -signal.SIGTERM}
    written = _written(folder)
    asked = first_signal(folder / _SIGNALS)
    if asked and not written:
        return stop_error(asked, "before a checkpoint could be written")
    first = min(written, key=lambda entry: float(entry["time"])) if written else None
    if first is not None and killed and time.time() - first["time"] >= _SHUTDOWN_SECONDS:
        ranks = ", ".join(str(rank) for rank in sorted(killed))
        first["message"] += f" Process {ranks} did not end when asked to and was killed."
        killed = {}
    if first is not None and not killed:
        if first["type"] in _REBUILT:
            return _REBUILT[first["type"]](first["message"])
        return ProcessError(f"process {first['rank']} of {count} failed: {first['type']}: {first['message']}")
    rank, process = next(iter(killed.items())) if killed else failure.get_first_failure()
    how = f"was killed by {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else "ended"
    is_killed = process.exitcode == -signal.SIGKILL  # as by the system when memory is short
    advice = " Out of memory is a common cause; try a smaller optimizer.micro_batch_size." if is_killed else ""
    return ProcessError(
        f"process {rank} of {count} {how} (exit code {process.exitcode}), and the others were stopped. "
        f"The same command continues from the last checkpoint.{advice}"
    )


def _written(folder: Path) -> list[dict[str, Any]]:
    """What children wrote down about how they ended."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(_FAILURE.format(rank="*")))]


@contextlib.contextmanager
def _child_environment(count: int) -> Iterator[None]:
    """Share the cores among the children."""
    added = thread_settings(count)
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _follow(parent: int, signals: Path) -> None:
    """Take signals from the parent, and end soon after it, even if killed with -9: an orphan would keep the folder."""

    def watch() -> None:
        passed = 0
        while os.getppid() == parent:
            passed = pass_from(signals, passed)
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_child(folder: Path, parent: int) -> int:
    """Train as one of several processes; a failure is written down for the parent to raise."""
    _follow(parent, folder / _SIGNALS)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    try:
        config = TrainConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
        checkpoint = _train(config)
        if local_rank == 0:
            (folder / _RESULT).write_text(json.dumps(str(checkpoint)), encoding="utf-8")
        return 0
    except Exception as failure:
        is_user_error = isinstance(failure, DeepSpecError)
        if not is_user_error:
            console.error(f"process {rank}:\n{traceback.format_exc()}")
        entry = {"rank": rank, "type": type(failure).__name__, "message": str(failure), "time": time.time()}
        (folder / _FAILURE.format(rank=rank)).write_text(json.dumps(entry), encoding="utf-8")
        if isinstance(failure, StoppedError):
            return 0  # a failure would have the others ended at once
        return _USER_ERROR if is_user_error else 1


if __name__ == "__main__":
    code = _run_child(Path(sys.argv[1]), int(sys.argv[2]))
    # Files are closed and the processes have met at the end of the run. What is left is the clean-up of the process
    # group, which can hang: in gloo's destructors while a peer is gone, or after a failure in waiting for the others.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
