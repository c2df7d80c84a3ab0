"""A sweep: its jobs, and the folder where they report; it knows neither Hydra nor how a job is run.

The folder holds sweep.json (the plan), `jobs/<number>.json` (what became of a job, written by the job itself, which may
run on another machine) and `logs/<number>.txt` (its output, where jobs do not share one terminal).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from deepspec import console
from deepspec.config import EvalConfig, TrainConfig, quoted
from deepspec.errors import ConfigError, DataError
from deepspec.files import write_json
from deepspec.training.signals import StoppedByUserError, StoppedError

PLAN = "sweep.json"
STOPPED_STATUS = StoppedError.exit_status
INTERRUPTED_STATUS = StoppedByUserError.exit_status
_NAME_LENGTH, _VALUE_LENGTH = 120, 40

AnyConfig = TrainConfig | EvalConfig


class Job(NamedTuple):
    """One job of a sweep.

    Attributes:
        name: word for it in the sweep, also the name of its folder.
        overrides: words that it is started with.
        folder: where its results go.
        fingerprint: changes with the settings, and with the files that go in.
        num_devices: GPUs that it uses where there are any.
    """

    name: str
    overrides: list[str]
    folder: str
    fingerprint: str
    num_devices: int


class Record(NamedTuple):
    """What became of a job.

    Attributes:
        status: exit status of its process, negative for a signal.
        fingerprint: the job's, when it ran.
        seconds: that it took.
        host: machine that it ran on.
        reason: last line of its output, "" where it went to the terminal.
    """

    status: int
    fingerprint: str
    seconds: float
    host: str
    reason: str


class Sweep(NamedTuple):
    """A sweep as its folder holds it."""

    folder: Path
    kind: Literal["train", "eval"]
    jobs: list[Job]


def plan_sweep(
    kind: Literal["train", "eval"],
    jobs: Sequence[list[str]],
    configs: Sequence[AnyConfig],
    swept: Mapping[str, Sequence[str]],
    folder: Path | None,
) -> Sweep:
    """Give every job a name and a folder of its own.

    Args:
        kind: which main runs the jobs.
        jobs: overrides of each.
        configs: what they compose to.
        swept: the keys with several values, and the value of each job.
        folder: of the sweep; None names one by the jobs, so that the same command finds it again.

    Raises:
        ConfigError: two jobs are the same.
    """
    doubled = [" ".join(job) for job, count in _counted(jobs).items() if count > 1]
    if doubled:
        raise ConfigError(f"the sweep holds this job more than once: {doubled[0]}. Give each value once.")
    names = _names([_base_name(config) for config in configs], swept)
    key = hashlib.sha256(json.dumps([kind, jobs]).encode()).hexdigest()[:8]
    name = _shortened(_safe("-".join(swept) or "single")) + f"_{key}"
    first = configs[0]
    parent = Path(first.output_dir if isinstance(first, TrainConfig) else first.results_dir)
    folder = folder or parent / "sweeps" / name
    planned = []
    for job_name, overrides, config in zip(names, jobs, configs, strict=True):
        if isinstance(config, TrainConfig):
            place, word = Path(config.output_dir) / job_name, f"exp_name='{job_name}'"
            devices = 0 if config.engine.device == "cpu" else config.engine.num_processes
        else:
            place = Path(config.output_dir or folder.absolute() / "results") / job_name
            word = f"output_dir={quoted(place)}"
            devices = 0 if config.device == "cpu" else 1
        planned.append(Job(job_name, [*overrides, word], str(place.absolute()), _fingerprint(config), devices))
    return Sweep(folder.absolute(), kind, planned)


def write_plan(sweep: Sweep) -> None:
    """Write sweep.json.

    Raises:
        DataError: the disk refuses.
    """
    try:
        write_json(sweep.folder / PLAN, {"kind": sweep.kind, "jobs": [job._asdict() for job in sweep.jobs]})
    except OSError as error:
        raise DataError(
            f"cannot write {sweep.folder / PLAN}: {error.strerror}. Choose another output_dir or hydra.sweep.dir."
        ) from error


def read_sweep(folder: Path) -> Sweep:
    """Read sweep.json.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        content = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return Sweep(folder, content["kind"], [Job(**job) for job in content["jobs"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / PLAN} cannot be read ({error!r}). Start the sweep's command again.") from error


def read_record(sweep: Sweep, number: int) -> Record | None:
    """What a job reported last; None where it has not, or what it wrote is damaged."""
    try:
        return Record(**json.loads((sweep.folder / "jobs" / f"{number}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_finished(sweep: Sweep, number: int) -> bool:
    """Whether a job ended well with the present settings and files, and its results are still there."""
    job, record = sweep.jobs[number], read_record(sweep, number)
    results = "step_latest" if sweep.kind == "train" else "results.json"
    is_well = record is not None and record.status == 0 and record.fingerprint == job.fingerprint
    return is_well and (Path(job.folder) / results).exists()


def note_end(sweep: Sweep, number: int, status: int, seconds: float, reason: str) -> None:
    """Write down what became of a job; where that fails, the job's own results are what counts."""
    record = Record(status, sweep.jobs[number].fingerprint, seconds, platform.node(), reason)
    try:
        write_json(sweep.folder / "jobs" / f"{number}.json", record._asdict())
    except OSError as error:
        console.error(f"warning: cannot note the end of job {number} in {sweep.folder}: {error}")


def unfinished(sweep: Sweep) -> list[str]:
    """One line for each job that has not ended well: number, name, status, the last line of its output."""
    lines = []
    for number, job in enumerate(sweep.jobs):
        if is_finished(sweep, number):
            continue
        record = read_record(sweep, number)
        if record is None or record.fingerprint != job.fingerprint:
            lines.append(f"job {number}, {job.name}, has not reported its end")
        else:
            reason = f": {record.reason}" if record.reason else ""
            lines.append(f"job {number}, {job.name}, {describe_status(record.status)}{reason}")
    return lines


def exit_status(sweep: Sweep) -> int:
    """0 where all jobs ended well, else the status of the first that did not (1 for a signal or no report)."""
    for number in range(len(sweep.jobs)):
        if not is_finished(sweep, number):
            record = read_record(sweep, number)
            return record.status if record is not None and record.status > 0 else 1
    return 0


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    known = {0: "left no results", STOPPED_STATUS: "was stopped", INTERRUPTED_STATUS: "was interrupted"}
    return known.get(status, f"failed (status {status})")


def _counted(jobs: Sequence[list[str]]) -> dict[tuple[str, ...], int]:
    counts: dict[tuple[str, ...], int] = {}
    for job in jobs:
        counts[tuple(job)] = counts.get(tuple(job), 0) + 1
    return counts


def _base_name(config: AnyConfig) -> str:
    return config.run_name if isinstance(config, TrainConfig) else config.target.short_name


def _names(bases: Sequence[str], swept: Mapping[str, Sequence[str]]) -> list[str]:
    """The usual name of each job's results, and the swept values that it does not tell apart already."""
    names = list(bases)
    for key, values in swept.items():
        pairs = itertools.combinations(zip(values, bases, strict=True), 2)
        if all(one[0] == other[0] or one[1] != other[1] for one, other in pairs):
            continue
        leaf = key.lstrip("+").rpartition(".")[2]
        names = [f"{name}_{leaf}={_safe(value)}" for name, value in zip(names, values, strict=True)]
    names = [_shortened(name) for name in names]
    if len(set(names)) < len(names):  # values that differ only in what folder names cannot hold
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return names


def _safe(value: str) -> str:
    """A value as part of a folder name."""
    text = re.sub(r"[^A-Za-z0-9._=-]+", "_", value).strip("_.") or "none"
    # Of a long one, usually a path, the end says most.
    return text if len(text) <= _VALUE_LENGTH else f"{_hash(value)}_{text[9 - _VALUE_LENGTH :]}"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 9]}_{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _fingerprint(config: AnyConfig) -> str:
    """Changes with the settings and the files that the job reads, but not with where its results go."""
    if isinstance(config, TrainConfig):
        values = config.model_dump(mode="json", exclude={"exp_name", "output_dir", "logger"})
        files = [config.data.answers]
    else:
        values = config.model_dump(mode="json", exclude={"output_dir", "results_dir"})
        files = [*config.drafts, *(task.path for task in config.tasks if task.path is not None)]
    for file in files:
        try:
            found = os.stat(file)
        except OSError:
            continue
        values[f"file {file}"] = [os.path.realpath(file), found.st_mtime_ns, found.st_size]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
