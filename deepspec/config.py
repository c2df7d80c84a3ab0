"""From command-line words to a validated configuration: Hydra composes config/, config_schema.py checks it.

Besides command.py and the two mains no other module knows Hydra. After `compose_train` or `validate_train` no
DictConfig is left, and every complaint of Hydra, OmegaConf or pydantic has become one ConfigError that names the key,
the value and a way out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepspec.config_algorithms import (
    AlgorithmConfig,
    AnyAlgorithmConfig,
    BlockAlgorithmConfig,
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    Eagle3Losses,
    LossWeights,
    TokenLosses,
    default_position_decay,
)
from deepspec.config_base import Settings
from deepspec.config_data import DatasetConfig, FeaturesConfig, SelectionConfig, ServerConfig
from deepspec.config_eval import SamplingConfig, TaskConfig
from deepspec.config_schema import (
    CheckpointConfig,
    DataConfig,
    DataJobConfig,
    EngineConfig,
    EvalConfig,
    LoggerConfig,
    OptimizerConfig,
    PresetConfig,
    QuickstartConfig,
    TargetConfig,
    TrainConfig,
)
from deepspec.errors import ConfigError
from deepspec.lookup import nearest, unknown_name
from deepspec.overrides import expand_home, quoted

__all__ = [
    "AlgorithmConfig",
    "AnyAlgorithmConfig",
    "BlockAlgorithmConfig",
    "CheckpointConfig",
    "DFlashConfig",
    "DSparkConfig",
    "DataConfig",
    "DataJobConfig",
    "DatasetConfig",
    "Eagle3Config",
    "Eagle3Losses",
    "EngineConfig",
    "EvalConfig",
    "FeaturesConfig",
    "LoggerConfig",
    "LossWeights",
    "OptimizerConfig",
    "PresetConfig",
    "QuickstartConfig",
    "SamplingConfig",
    "SelectionConfig",
    "ServerConfig",
    "TargetConfig",
    "TaskConfig",
    "TokenLosses",
    "TrainConfig",
    "compose_data_job",
    "compose_eval",
    "compose_job",
    "compose_quickstart",
    "compose_train",
    "config_folder",
    "default_position_decay",
    "default_train_values",
    "eval_words",
    "expand_home",
    "quoted",
    "validate_eval",
    "validate_train",
]

AnySettings = TypeVar("AnySettings", bound=Settings)


def short_name(name_or_path: str) -> str:
    """Return a word for folder names made from the last part of a hub id or path."""
    return re.sub(r"[^a-z0-9]+", "_", name_or_path.rstrip("/").rsplit("/", 1)[-1].lower()).strip("_") or "target"


OmegaConf.register_new_resolver("short_name", short_name, replace=True)


def config_folder() -> Path:
    """Return the folder config/ of the checkout.

    Raises:
        ConfigError: the package was installed without its checkout.
    """
    folder = Path(__file__).resolve().parent.parent / "config"
    if not (folder / "train.yaml").is_file():
        raise ConfigError(
            f"{folder} does not exist: deepspec runs from a checkout, where config/ lies beside the package. "
            "Clone the repository and install it there with: pip install -e ."
        )
    return folder


def compose_train(overrides: Sequence[str]) -> TrainConfig:
    """Compose and check a training run from Hydra overrides such as `experiment=dspark_qwen3_4b`.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    return validate_train(_compose("train", overrides))


def compose_eval(overrides: Sequence[str]) -> EvalConfig:
    """Compose and check an evaluation from Hydra overrides such as `target=qwen3_4b suite=paper`.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    return validate_eval(_compose("eval", eval_words(overrides)))


def eval_words(words: Sequence[str]) -> list[str]:
    """Return the words of an evaluation with `engine`, the group of train.py's, as the key of its witness."""
    return [f"witness.{word}" if word.startswith("engine=") else word for word in words]


def compose_data_job(overrides: Sequence[str]) -> DataJobConfig:
    """Compose and check a `deepspec data` job.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    return _validated(DataJobConfig, _plain(_compose("data", overrides)))


def compose_quickstart(overrides: Sequence[str]) -> QuickstartConfig:
    """Compose and check a quickstart.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    return _validated(QuickstartConfig, _plain(_compose("quickstart", overrides)))


def compose_job(config_name: str, kind: type[AnySettings], overrides: Sequence[str]) -> AnySettings:
    """Compose config/<config_name>.yaml and check it as `kind`.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    return _validated(kind, _plain(_compose(config_name, overrides)))


def default_train_values(algorithm: str) -> dict[str, Any]:
    """Return what config/ says for a run of an algorithm without an experiment; works inside a Hydra main as well."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        return compose_train([f"algorithm={algorithm}"]).model_dump(mode="json")
    finally:
        GlobalHydra.instance().hydra = outer


def validate_train(composed: DictConfig) -> TrainConfig:
    """Check what Hydra composed for train.py and return it as plain immutable values."""
    return _validated(TrainConfig, _plain(composed))


def validate_eval(composed: DictConfig) -> EvalConfig:
    """Check what Hydra composed for eval.py; `task` replaces the suite where a name or a path is given."""
    values, defaults = _plain(composed), _task_defaults()
    # Either may have been deleted with ~task or ~suite.
    task, suite = values.pop("task", defaults), values.pop("suite", {})
    if task["name"] is None and task["path"] is None:
        unused = [key for key, value in task.items() if value != defaults[key]]
        if unused:
            raise ConfigError(
                f"task.{unused[0]} is {task[unused[0]]!r}, but no task is chosen. "
                "Add task=<name> or task.path=<file>.jsonl."
            )
        tasks = _suite_tasks(suite)
    else:
        if task["name"] is None:
            task["name"] = Path(str(task["path"])).stem
        tasks = [task]
    # They hold for every task of a suite.
    limit, first_turn_only = values.pop("limit", None), values.pop("first_turn_only", False)
    if limit is not None:
        tasks = [{**task, "limit": limit} for task in tasks]
    if first_turn_only:
        tasks = [{**task, "first_turn_only": first_turn_only} for task in tasks]
    return _validated(EvalConfig, {**values, "tasks": tasks})


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    folder = str(config_folder())
    overrides = expand_home(overrides)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=folder, job_name=config_name):
            return compose(config_name, overrides)
    except MissingConfigException as error:
        missing, choices = error.missing_cfg_file, error.options
        if missing is None or choices is None:
            raise ConfigError(_one_line(error)) from error
        group, _, name = missing.rpartition("/")
        raise unknown_name(group, name, choices) from error
    except OverrideParseException as error:
        raise ConfigError(
            f"'{error.override}' cannot be read as key=value. "
            "Put values with spaces, commas, '=' or brackets in quotes of their own: 'key=\"value\"'."
        ) from error
    # Hydra raises ValueError for a group that is set to null or to a number.
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _composition_error(config_name, overrides, error) from error


def _composition_error(config_name: str, overrides: Sequence[str], error: Exception) -> ConfigError:
    """Name the nearest valid key where Hydra says that a key is not in struct, else shorten Hydra's own words."""
    text = _one_line(error)
    if text.startswith("Config group override must be"):
        words = ", ".join(word for word in overrides if word.endswith("=null")) or text
        return ConfigError(f"{words}: a group needs one of its choices. python {config_name}.py --help lists them.")
    several = re.match(r"Ambiguous value for argument '([^=]+)=(.*?)'", text)
    if several:
        key, values = several.groups()
        return ConfigError(f"{key} has several values: {values}. Add -m to run them one after another, or give one.")
    key_found = re.search(r"Could not (?:override|delete from config\.|append to config\.) '?([\w./@-]+)", text)
    if key_found is None:
        return ConfigError(text)
    path = key_found.group(1)
    known = _known_keys(config_name, [word for word in overrides if word.lstrip("+~").partition("=")[0] != path])
    return ConfigError(text) if path in known else _unknown_key(path, known)


def _unknown_key(path: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a key that does not exist: what its section has, and what was probably meant."""
    parent, _, leaf = path.rpartition(".")
    section = f"{parent}." if parent else ""
    siblings = sorted(key.removeprefix(section) for key in known if key.rpartition(".")[0] == parent)
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    alike = nearest(leaf, siblings)
    if alike:
        hint = alike.replace("'", f"'{section}", 1)
    else:
        short = [key for key in known if key.startswith(section) and _initials(key) == leaf]
        meant = leaves.get(leaf) or (short[0] if short else None)
        hint = f" Did you mean '{meant}'?" if meant else ""
    listed = f" {parent or 'The configuration'} has: {', '.join(siblings)}." if siblings else ""
    return ConfigError(f"{path}: there is no such key.{listed}{hint}")


def _initials(key: str) -> str:
    return "".join(word[:1] for word in key.rpartition(".")[2].split("_"))


def _known_keys(config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return all dotted keys and groups of the configuration that the other overrides select."""
    folder = config_folder()
    with initialize_config_dir(version_base="1.3", config_dir=str(folder), job_name=config_name):
        try:
            composed = compose(config_name, list(overrides))
        except (HydraException, OmegaConfBaseException, ValueError):
            composed = compose(config_name)
    keys = _dotted_keys(OmegaConf.to_container(composed, resolve=False))
    groups = ["experiment", "debug"] if config_name == "train" else []
    return keys + groups


def _dotted_keys(values: Any, prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _dotted_keys(value, f"{prefix}{key}.")
    return keys


def _plain(composed: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        path = str(error.full_key or "")
        if "Missing mandatory value" in str(error):
            raise ConfigError(f"{path} must be given: {path}=<value>.") from error
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _task_defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = _load(config_folder() / "eval.yaml")["task"]
    return defaults


def _load(file: Path) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _suite_tasks(suite: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the task files that a suite names."""
    for key in suite:
        if key != "tasks":
            raise _unknown_key(f"suite.{key}", ["suite.tasks"])
    names = suite.get("tasks")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"suite.tasks is {names!r}; it must be a list of task names, such as [gsm8k, mbpp].")
    files = {file.stem: file for file in sorted((config_folder() / "task").glob("*.yaml"))}
    for name in names:
        if name not in files:
            raise unknown_name("task", str(name), files)
    return [_load(files[name]) for name in names]


def _validated(kind: type[AnySettings], values: dict[str, Any]) -> AnySettings:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        # pydantic counts only valid items of a tuple, so one wrong task would be called a missing one as well.
        named = [problem for problem in problems if problem["type"] != "too_short" or not problem["input"]]
        raise ConfigError("; ".join(_explain(problem, values) for problem in named or problems)) from error


def _explain(problem: ErrorDetails, values: dict[str, Any]) -> str:
    """Turn one complaint of pydantic into: key path, value given, what is valid."""
    location: list[int | str] = list(problem["loc"])
    # A discriminated union puts its name into the path, where no user wrote it.
    if len(location) > 1 and location[0] in ("algorithm", "schedule") and location[1] == values[location[0]]["name"]:
        del location[1]
    # A single task was written as task.<key>, those of a suite come from their own files.
    if location[0:2] == ["tasks", 0] and len(values["tasks"]) == 1:
        location[0:2] = ["task"]
    path = ".".join(str(part) for part in location)
    given, kind, context = problem["input"], problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        known = _dotted_keys({**values, "task": values["tasks"][0]} if "tasks" in values else values)
        return str(_unknown_key(path, [key for key in known if key != path]))
    if kind == "missing":
        return f"{path}: must be given."
    if kind == "literal_error":
        choices = re.findall(r"'([^']+)'", str(context["expected"]))
        return f"{path}: got {given!r}; valid: {context['expected']}.{nearest(str(given), choices)}"
    if kind == "union_tag_not_found":
        return f"{path}.name: must be given."
    if kind == "union_tag_invalid":
        choices = re.findall(r"'([^']+)'", str(context["expected_tags"]))
        name = given["name"]
        return f"{path}.name: got {name!r}; valid: {', '.join(choices)}.{nearest(str(name), choices)}"
    if kind == "value_error":
        shown = "" if isinstance(given, (dict, Settings)) else f" {given}"
        return f"{path}{shown}: {context['error']}" if path else str(context["error"])
    message = re.sub(r"^\w+ should ", "", problem["msg"]).replace("a valid tuple", "a list, such as [a,b]")
    return f"{path}: got {given!r}; it should {message}."


def _one_line(error: Exception) -> str:
    cause = f" {error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return " ".join(f"{error}{cause}".split())
