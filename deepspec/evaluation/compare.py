"""`deepspec compare`: training runs and evaluations of several folders in one table each.

Rows of evaluations are only put side by side where what they were measured with is alike. It reads files, and neither
measures nor trains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspec import console
from deepspec.errors import ConfigError, DataError
from deepspec.evaluation.report import (
    AUTOREGRESSIVE,
    RESULTS_FILE,
    ResultRow,
    Results,
    flatten,
    markdown_table,
    read_results,
    render_table,
)
from deepspec.files import write_atomically, write_json
from deepspec.lookup import nearest
from deepspec.sweep import PLAN, Sweep, read_sweep
from deepspec.training.runs import TrainingRun, is_run, read_run, training_markdown, training_rows, training_table

COMPARISON = "comparison"
_OPTIONS = ("allow_different", "output")
# What a number depends on beside the draft.
_CONDITIONS = (
    "target.name_or_path",
    "target.revision",
    "target.dtype",
    "target.enable_thinking",
    "target.system_prompt",
    "target_weights",
    "template_hash",
    "sampling",
    "max_new_tokens",
    "schedule",
    "prompts_hash",
)
_SPEED_CONDITIONS = (
    "device",
    "hardware.machine",
    "hardware.processor",
    "hardware.cpus",
    "hardware.threads",
    "hardware.gpus",
)
_DEPTH = 3


class Source(NamedTuple):
    """One results.json and a short name for where it came from."""

    name: str
    results: Results


class Comparison(NamedTuple):
    """Everything that is compared.

    Attributes:
        runs: training runs.
        rows: rows of all evaluations.
        differences: conditions in which the evaluations differ: value of each source.
        provenance: of the first evaluation.
    """

    runs: list[TrainingRun]
    rows: list[ResultRow]
    differences: dict[str, dict[str, str]]
    provenance: dict[str, Any]


def compare_command(words: Sequence[str]) -> None:
    """Run `deepspec compare <folder>... [output=<folder>] [allow_different=true]`.

    Raises:
        ConfigError: a word cannot be understood.
        DataError: a folder holds nothing to compare, or the evaluations are not alike.
    """
    options = {key: value for key, _, value in (word.partition("=") for word in words) if key in _OPTIONS}
    folders = [Path(word).expanduser() for word in words if word.partition("=")[0] not in _OPTIONS]
    if not folders:
        raise ConfigError("give the folders to compare: deepspec compare <run, sweep or evaluation folder>...")
    for folder in folders:
        key = str(folder).partition("=")[0]
        if not folder.exists() and "/" not in key and nearest(key, _OPTIONS):
            raise ConfigError(f"'{folder}' is neither a folder nor an option.{nearest(key, _OPTIONS)}")
    choice = options.get("allow_different", "false").lower()
    if choice not in ("true", "false"):
        raise ConfigError(f"allow_different: got {choice!r}; valid: true, false.")
    common = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    output = Path(options["output"]).expanduser() if "output" in options else common
    comparison = compare(folders, allow_different=choice == "true")
    show(comparison)
    for path in write(comparison, output if not output.is_file() else output.parent):
        console.info(f"written: {path}")


def show_sweep(sweep: Sweep) -> None:
    """Show and write what the jobs of a sweep have brought so far; they may differ in anything."""
    folders = [Path(job.folder) for job in sweep.jobs if _kinds(Path(job.folder))]
    if folders:
        comparison = compare(folders, allow_different=True)
        show(comparison)
        console.info(f"written: {', '.join(str(path) for path in write(comparison, sweep.folder))}")


def compare(folders: Sequence[Path], *, allow_different: bool) -> Comparison:
    """Read everything in the folders.

    Args:
        folders: of runs, checkpoints, sweeps, evaluations, or folders of these.
        allow_different: put evaluations side by side that are not alike; what differs is then part of the task's name.

    Raises:
        DataError: a folder holds nothing to compare, or the evaluations are not alike.
    """
    found: list[Path] = []
    for folder in folders:
        here = _find(folder, _DEPTH)
        if not here:
            raise DataError(
                f"{folder} holds neither a training run, nor a sweep, nor the {RESULTS_FILE} of an evaluation."
                if folder.exists()
                else f"{folder} does not exist."
            )
        found += here
    found = list(dict.fromkeys(path.resolve() for path in found))
    runs = [read_run(path) for path in found if path.name != RESULTS_FILE]
    files = [path for path in found if path.name == RESULTS_FILE]
    sources = [Source(name, read_results(path)) for name, path in zip(_short_names(files), files, strict=True)]
    differences = find_differences(sources)
    if differences and not allow_different:
        shown = "\n".join(
            f"  {key}: " + ", ".join(f"{value} ({name})" for name, value in values.items())
            for key, values in differences.items()
        )
        raise DataError(
            f"these evaluations were not made alike:\n{shown}\nMeasure them under the same conditions, or add "
            "allow_different=true to see them side by side all the same."
        )
    return Comparison(runs, merge(sources, differences), differences, sources[0].results.provenance if sources else {})


def find_differences(sources: Sequence[Source]) -> dict[str, dict[str, str]]:
    """Conditions in which sources differ; those of speed count where a row has one, those of prompts by task."""
    flats = {source.name: flatten(source.results.provenance) for source in sources}
    is_timed = any(row.seconds_per_token is not None for source in sources for row in source.results.rows)
    wanted = _CONDITIONS + (_SPEED_CONDITIONS if is_timed else ())
    keys = [
        key
        for key in dict.fromkeys(key for flat in flats.values() for key in flat)
        if any(key == one or key.startswith(f"{one}.") for one in wanted)
    ]
    differences = {}
    for key in keys:
        is_of_task = key.startswith("prompts_hash.")
        values = {name: flat.get(key, "-") for name, flat in flats.items() if key in flat or not is_of_task}
        if len(set(values.values())) > 1:
            differences[key] = values
    return differences


def merge(sources: Sequence[Source], differences: Mapping[str, Mapping[str, str]]) -> list[ResultRow]:
    """The rows of all sources; of equal plain decodings the first timed one, drafts of one name told apart."""
    labelled: list[tuple[str, ResultRow]] = []
    for source in sources:
        for row in source.results.rows:
            parts = []
            for key, values in differences.items():
                is_here = not key.startswith("prompts_hash.") or key.partition(".")[2] == row.task
                if source.name in values and is_here and key != "sampling.temperature":
                    word = "schedule" if key == "schedule.name" else key.rpartition(".")[2]
                    parts.append(f"{word}={values[source.name]}")
            label = f"{row.task} [{', '.join(parts)}]" if parts else row.task
            labelled.append((source.name, row.model_copy(update={"task": label})))
    groups: dict[tuple[str, float, str], list[tuple[str, ResultRow]]] = {}
    for name, row in labelled:
        groups.setdefault((row.task, row.temperature, row.draft), []).append((name, row))
    rows: list[ResultRow] = []
    for group in groups.values():
        if group[0][1].algorithm == AUTOREGRESSIVE:
            timed = [row for _, row in group if row.seconds_per_token is not None]
            rows.append((timed or [group[0][1]])[0])
        elif len(group) == 1:
            rows.append(group[0][1])
        else:
            rows += [row.model_copy(update={"draft": f"{row.draft} ({name})"}) for name, row in group]
    return rows


def show(comparison: Comparison) -> None:
    """Print the tables."""
    if comparison.runs:
        console.table(training_table(comparison.runs))
    if comparison.rows:
        console.table(render_table(comparison.rows, comparison.provenance))
        for key, values in comparison.differences.items():
            console.info(f"unlike: {key}: " + ", ".join(f"{value} ({name})" for name, value in values.items()))


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the tables as comparison.md and comparison.json.

    Raises:
        DataError: the disk refuses.
    """
    parts = [training_markdown(comparison.runs)] if comparison.runs else []
    parts += [markdown_table(comparison.rows)] if comparison.rows else []
    content = {
        "runs": training_rows(comparison.runs),
        "rows": [row.model_dump(mode="json") for row in comparison.rows],
        "differences": comparison.differences,
    }
    paths = [folder / f"{COMPARISON}.md", folder / f"{COMPARISON}.json"]
    try:
        write_atomically(paths[0], ["\n".join(parts)])
        write_json(paths[1], content)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to ({error.strerror}). Give another place: output=<folder>."
        ) from error
    return paths


def _kinds(folder: Path) -> list[Path]:
    """What a folder is: itself for a run, its results file for an evaluation, the jobs' places for a sweep."""
    if folder.name == RESULTS_FILE and folder.is_file():
        return [folder]
    if (folder / PLAN).is_file():
        return [path for job in read_sweep(folder).jobs for path in _kinds(Path(job.folder))]
    if (folder / RESULTS_FILE).is_file():
        return [folder / RESULTS_FILE]
    if is_run(folder):
        return [folder]
    is_checkpoint = folder.name.startswith("step_") and is_run(folder.absolute().parent)
    return [folder.absolute().parent] if is_checkpoint else []


def _find(folder: Path, depth: int) -> list[Path]:
    """What a folder is, or what the folders in it are."""
    found = _kinds(folder)
    if found or depth == 0 or not folder.is_dir():
        return found
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "step_")))
    return [one for path in inside for one in _find(path, depth - 1)]


def _short_names(files: Sequence[Path]) -> list[str]:
    """The last parts of the folders' paths, as many as tell them apart."""
    parts = [file.parent.parts for file in files]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names if files else []
