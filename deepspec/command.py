"""What the mains and the command `deepspec` share: a check before anything starts, sweep jobs, errors as one line."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.types import RunMode

from deepspec.config import compose_eval, compose_train, expand_home
from deepspec.errors import ConfigError, DeepSpecError

# Overrides and exit status of each job of this process's sweep that failed; the jobs after it run all the same.
_failed_jobs: list[tuple[list[str], int]] = []
# Flags after which Hydra shows something and runs nothing, so that there is nothing to refuse.
SHOWING_FLAGS = ("help", "hydra_help", "shell_completion", "info")


def check_command_line(config_name: str, arguments: Sequence[str]) -> None:
    """Refuse a command line that cannot run, every job of a sweep included, before Hydra starts any of them.

    Args:
        config_name: `train` or `eval`.
        arguments: the words after the script's name.
    """
    options = vars(get_args_parser().parse_args(list(arguments)))
    if any(options[flag] for flag in SHOWING_FLAGS) or options["config_dir"] or options["config_name"]:
        return
    overrides = [word for word in options["overrides"] if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    check = {"train": compose_train, "eval": compose_eval}[config_name]
    for job in _sweep_jobs(overrides) if options["multirun"] else [overrides]:
        check(job)


def is_sweep_job() -> bool:
    """Whether the main is being called as one job of a `-m` sweep."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def run_in_own_process(script: str) -> None:
    """Run the present job of a sweep as `python <script> <its overrides>`.

    Hydra's basic launcher calls all jobs in one process, where Accelerate's singletons of one job would reach the next.
    """
    overrides = list(HydraConfig.get().overrides.task)
    finished = subprocess.run([sys.executable, script, *overrides], check=False)
    if finished.returncode in (130, -signal.SIGINT):
        raise SystemExit(130)
    if finished.returncode:
        _failed_jobs.append((overrides, finished.returncode))


def end_sweep() -> None:
    """Name the jobs of a sweep that failed, when all have run, and end with the status of the first."""
    for overrides, code in _failed_jobs:
        sys.stderr.write(f"this job of the sweep failed (status {code}): {' '.join(overrides)}\n")
    if _failed_jobs:
        raise SystemExit(_failed_jobs[0][1])


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line and status 2 on an error that the user can act on."""
    try:
        yield
    except DeepSpecError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from what was saved\n")
        raise SystemExit(130) from None


def _sweep_jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Yield the overrides of every job of a sweep; sweeps that only a plugin can expand are left to Hydra."""
    try:
        parsed = OverridesParser.create().parse_overrides(expand_home(overrides))
    except OverrideParseException as error:
        raise ConfigError(f"'{error.override}' cannot be read as key=value.") from error
    choices: list[list[str]] = []
    for word, override in zip(overrides, parsed, strict=True):
        if not override.is_sweep_override():
            choices.append([word])
        elif override.is_choice_sweep() or override.is_range_sweep():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    yield from (list(job) for job in itertools.product(*choices))
