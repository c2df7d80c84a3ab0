"""What the mains and the command `deepspec` share: a check before anything starts, sweeps, errors as one line."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode

from deepspec import sweep as sweeps
from deepspec.config import compose_eval, compose_train, config_folder, eval_words, expand_home, quoted
from deepspec.errors import ConfigError, DeepSpecError
from deepspec.job import own_gpus, run_process
from deepspec.limits import available_cpus
from deepspec.sweep import AnyConfig, Sweep

# Flags after which Hydra shows something and runs nothing, so that there is nothing to refuse.
SHOWING_FLAGS = ("help", "hydra_help", "shell_completion", "info")
# Hydra itself is only told which jobs of the plan are left; their words are in the plan.
_JOB_KEY = "+sweep_job"
_COMPOSE: dict[str, Callable[[Sequence[str]], AnyConfig]] = {"train": compose_train, "eval": compose_eval}
_PLUGINS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
}
_MONTH_IN_MINUTES = 43_200

Kind = Literal["train", "eval"]


def run_main(kind: Kind, main: Callable[[], None]) -> None:
    """Run a main: check its command line, then one job, or all jobs of a sweep that have not ended well before.

    Args:
        kind: `train` or `eval`.
        main: its Hydra main, called with what is left of the command line.
    """
    with one_line_errors():
        words = expand_home(sys.argv[1:])
        sys.argv[1:] = eval_words(words) if kind == "eval" else words
        sweep = check_command_line(kind, sys.argv[1:])
        if sweep is not None:
            sweeps.write_plan(sweep)
    if sweep is None:
        main()
        return
    numbers = range(len(sweep.jobs))
    left = [number for number in numbers if not sweeps.is_finished(sweep, number)]
    sys.stdout.write(
        f"sweep of {len(numbers)} jobs, {len(numbers) - len(left)} of them finished before: {sweep.folder}\n"
    )
    sys.stdout.flush()
    try:
        if left:
            jobs = ",".join(map(str, left))
            sys.argv[1:] = ["-m", *_hydra_words(sys.argv[1:]), f"{_JOB_KEY}={jobs}"]
            sys.argv += [f"hydra.sweep.dir={quoted(sweep.folder)}"]
            main()
    finally:
        _end_sweep(sweep)
    if (status := sweeps.exit_status(sweep)) != 0:
        raise SystemExit(status)


def check_command_line(kind: Kind, arguments: Sequence[str]) -> Sweep | None:
    """Refuse a command line that cannot run, every job of a sweep included, before Hydra starts any of them.

    Args:
        kind: `train` or `eval`.
        arguments: the words after the script's name.

    Returns:
        The plan of a sweep, None where there is no sweep or nothing to refuse.
    """
    options = vars(get_args_parser().parse_args(list(arguments)))
    has_own_files = options["config_dir"] or options["config_name"] or options["config_path"]
    is_sweep = options["multirun"] or "hydra.mode=MULTIRUN" in options["overrides"]
    if any(options[flag] for flag in SHOWING_FLAGS) or (has_own_files and not is_sweep):
        return None
    overrides = [word for word in options["overrides"] if not _is_hydra_word(word)]
    if not is_sweep or options["cfg"]:
        for job in _sweep_jobs(kind, overrides)[0] if is_sweep else [overrides]:
            _COMPOSE[kind](job)
        return None
    if has_own_files:
        raise ConfigError(
            "a sweep reads the files in config/ only. Leave out --config-dir, --config-name, --config-path."
        )
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a sweep starts the processes of its jobs itself. Start it without torchrun or accelerate launch, with "
            "engine=ddp engine.num_processes=<number>."
        )
    hydra = dict(word.split("=", 1) for word in options["overrides"] if _is_hydra_word(word) and "=" in word)
    _check_hydra(hydra)
    jobs, swept = _sweep_jobs(kind, overrides)
    folder = hydra.get("hydra.sweep.dir")
    return sweeps.plan_sweep(
        kind, jobs, [_COMPOSE[kind](job) for job in jobs], swept, None if folder is None else Path(folder.strip("'\""))
    )


def is_sweep_job() -> bool:
    """Whether the main is being called as one job of a `-m` sweep."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def run_sweep_job(script: str) -> None:
    """Run the present job of a sweep as `python <script> <its overrides>`; its end is noted in the sweep's folder.

    A process of its own, whatever the launcher: Accelerate's singletons of one job would reach the next, and a job that
    dies takes no other with it.
    """
    hydra = HydraConfig.get()
    sweep = sweeps.read_sweep(Path(hydra.sweep.dir))
    (word,) = hydra.overrides.task
    number = int(word.partition("=")[2])
    launcher = str(hydra.runtime.choices["hydra/launcher"])
    # A job on several machines runs as one task on each; the first tells of its end.
    task = int(os.environ.get("SLURM_PROCID", "0")) if launcher == "submitit_slurm" else 0
    log = None if launcher == "basic" else sweep.folder / "logs" / (f"{number}_{task}.txt" if task else f"{number}.txt")
    wanted = {"WANDB_RUN_GROUP": sweep.folder.name}
    if launcher == "joblib":
        at_once = len(sweep.jobs) if hydra.launcher.n_jobs < 1 else min(hydra.launcher.n_jobs, len(sweep.jobs))
        wanted["OMP_NUM_THREADS"] = str(max(1, available_cpus() // at_once))
    environment = {key: value for key, value in wanted.items() if key not in os.environ}
    job = sweep.jobs[number]
    with own_gpus(job.num_devices if launcher in ("joblib", "submitit_local") else 0) as devices:
        ending = run_process([sys.executable, script, *job.overrides], log=log, environment={**environment, **devices})
    if task == 0:
        sweeps.note_end(sweep, number, ending.status, ending.seconds, ending.last_line)
    if ending.was_stopped or ending.status == sweeps.INTERRUPTED_STATUS:
        raise SystemExit(sweeps.STOPPED_STATUS if ending.was_stopped else ending.status)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line and the error's status on an error that the user can act on."""
    try:
        yield
    except DeepSpecError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from what was saved\n")
        raise SystemExit(130) from None


def _end_sweep(sweep: Sweep) -> None:
    """Show the table of a sweep and name the jobs that did not end well."""
    from deepspec.evaluation.compare import show_sweep

    try:
        with one_line_errors():
            show_sweep(sweep)
    finally:
        lines = sweeps.unfinished(sweep)
        if lines:
            sys.stderr.write("\n".join([*lines, "the same command runs these jobs again and no other", ""]))


def _is_hydra_word(word: str) -> bool:
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def _hydra_words(arguments: Sequence[str]) -> list[str]:
    """The words of a sweep's command line that speak to Hydra itself, with what its launchers need beside them."""
    words = [word for word in arguments if _is_hydra_word(word) and not word.startswith("hydra.sweep.dir=")]
    keys = {word.partition("=")[0] for word in words}
    if "hydra/launcher=submitit_local" in words and "hydra.launcher.timeout_min" not in keys:
        words.append(f"hydra.launcher.timeout_min={_MONTH_IN_MINUTES}")  # submitit would end every job after an hour
    return words


def _check_hydra(settings: dict[str, str]) -> None:
    launcher = settings.get("hydra/launcher", "basic")
    plugin = _PLUGINS.get(launcher)
    try:
        is_missing = plugin is not None and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None
    except ModuleNotFoundError:
        is_missing = True
    if is_missing:
        raise ConfigError(f"hydra/launcher={launcher} needs a plugin that is not installed: pip install -e '.[sweep]'")
    if launcher == "submitit_slurm" and "hydra.launcher.timeout_min" not in settings:
        raise ConfigError(
            "hydra/launcher=submitit_slurm ends every job after an hour unless told otherwise. Add "
            "hydra.launcher.timeout_min=<minutes>, at most what the partition allows."
        )
    other = [key for key in settings if key.startswith(("hydra/sweeper", "hydra.sweeper"))]
    if other:
        raise ConfigError(f"{other[0]}: only Hydra's basic sweeper is known here. Give the values as key=a,b,c.")


def _sweep_jobs(kind: Kind, overrides: Sequence[str]) -> tuple[list[list[str]], dict[str, list[str]]]:
    """The words of every job of a sweep, just as Hydra makes them, and the swept keys with the value of each job."""
    words = expand_home(overrides)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_folder()), job_name=kind):
            parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(words)
            (jobs,) = BasicSweeper.split_arguments(parsed, None)
    except OverrideParseException as error:
        raise ConfigError(f"'{error.override}' cannot be read as key=value.") from error
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    keys = list(dict.fromkeys(_key(override) for override in parsed if override.is_sweep_override()))
    values = [dict(word.split("=", 1) for word in job if "=" in word) for job in jobs]
    return jobs, {key: [job[key] for job in values] for key in keys}


def _key(override: Override) -> str:
    return str(override.get_key_element())
