"""Training runs side by side: what their folders tell, without loading torch or a checkpoint's tensors."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from deepspec.errors import DataError
from deepspec.training.loggers import METRICS, read_lines

CONFIG, PROVENANCE = "config.json", "provenance.json"
_LATEST_STATE = Path("step_latest") / "training_state.json"
# Settings that decide nothing about what is learned, or that other columns show.
_NOT_SHOWN = ("exp_name", "output_dir", "logger.", "checkpoint.", "engine.")
# Settings of one algorithm or target mean nothing beside those of another: compared only where these are the same.
_OWNERS = {"algorithm.": "algorithm.name", "target.": "target.name_or_path"}
_COLUMNS = ("run", "algorithm", "settings", "steps", "loss", "losses", "acceptance by slot", "tau", "minutes")
_ABSENT = "-"


class TrainingRun(NamedTuple):
    """What a run folder tells.

    Attributes:
        name: of the run.
        folder: its folder.
        config: its settings as one level of dotted keys.
        steps: optimizer steps that its metrics or its last checkpoint reach.
        planned_steps: of the whole run; None where no checkpoint says how many its epochs have.
        losses: last logged mean of the weighted sum, `loss`, and of each loss.
        acceptance: last logged mean of each slot, the first slot first; a teacher-forced proxy.
        tau: acceptance length of the last evaluation during training, None where there was none.
        seconds: of the steps that were taken in this folder.
    """

    name: str
    folder: str
    config: dict[str, Any]
    steps: int
    planned_steps: int | None
    losses: dict[str, float]
    acceptance: list[float]
    tau: float | None
    seconds: float


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a training run."""
    return (folder / CONFIG).is_file() and ((folder / METRICS).is_file() or (folder / _LATEST_STATE).is_file())


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """What provenance.json of a run folder says of each process that took steps of the run, the first one first.

    Each entry has `step`, from which on it took them.
    """
    try:
        starts = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    # Runs of before kept only the last start, without its step.
    starts = starts if isinstance(starts, list) else []
    return [start for start in starts if isinstance(start, dict) and isinstance(start.get("step"), int)]


def read_run(folder: Path) -> TrainingRun:
    """Read what a run folder tells; lines of metrics that a kill cut in two are left out.

    Raises:
        DataError: its config.json is missing or damaged.
    """
    try:
        config = _flat(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / CONFIG} cannot be read ({error!r}). Give the folder of a training run.") from error
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((folder / _LATEST_STATE).read_text(encoding="utf-8"))
    last: dict[str, Any] = {}
    tau, seconds, before = None, 0.0, _first_step(folder)
    for line in read_lines(folder / METRICS):
        seconds += (line.get("seconds_per_step") or 0.0) * (line["step"] - before)
        before = line["step"]
        tau = line.get("eval/acceptance_length", tau)
        last = {**last, **line}
    slots = sorted((int(key[11:]), value) for key, value in last.items() if key.startswith("acceptance@"))
    planned = config.get("optimizer.steps")
    if planned is None:
        planned = state.get("planned_steps")
    return TrainingRun(
        name=folder.name,
        folder=str(folder),
        config=config,
        steps=max(state.get("step", 0), last.get("step", 0)),
        planned_steps=planned,
        losses={key.removeprefix("loss/"): value for key, value in last.items() if key.partition("/")[0] == "loss"},
        acceptance=[value for _, value in slots],
        tau=tau,
        seconds=seconds,
    )


def _first_step(folder: Path) -> int:
    """The step that a run began from: not 0 where it went on from the checkpoint of another."""
    starts = read_starts(folder)
    return int(starts[0]["step"]) if starts else 0


def different_settings(runs: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """Of each run, the settings in which it differs from another one of the same algorithm and target."""
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.config) if not key.startswith(_NOT_SHOWN)]
    shown: list[dict[str, Any]] = [{} for _ in runs]
    for key in keys:
        owner = next((name for prefix, name in _OWNERS.items() if key.startswith(prefix) and key != name), None)
        groups: dict[Any, set[str]] = {}
        for run in runs:
            groups.setdefault(None if owner is None else run.config.get(owner), set()).add(str(run.config.get(key)))
        if key != "algorithm.name" and any(len(values) > 1 for values in groups.values()):
            for run, settings in zip(runs, shown, strict=True):
                if key in run.config:
                    settings[key] = run.config[key]
    return shown


def training_table(runs: Sequence[TrainingRun]) -> Table:
    """The table for the terminal."""
    table = Table(
        title=Text("Training runs"),
        caption=Text(
            "Losses and acceptance are means since the log line before the last; losses of unlike weights do not "
            "compare. Acceptance is sum min(p, q) on teacher-forced blocks, no tau."
        ),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        show_edge=False,
    )
    cells = _cells(runs)
    shown = _shown(cells)
    for index in shown:
        table.add_column(_COLUMNS[index], justify="left" if index < 3 else "right", overflow="fold")
    for row in cells:
        table.add_row(*(Text(row[index]) for index in shown))
    return table


def training_markdown(runs: Sequence[TrainingRun]) -> str:
    """The table in Markdown."""
    cells = _cells(runs)
    shown = _shown(cells)
    lines = [[_COLUMNS[index] for index in shown], ["---" if index < 3 else "---:" for index in shown]]
    lines += [[row[index].replace("|", "\\|") for index in shown] for row in cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def training_rows(runs: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """The table as JSON values, each row with the settings in which it differs."""
    rows = []
    for run, settings in zip(runs, different_settings(runs), strict=True):
        row = {**run._asdict(), "algorithm": run.config.get("algorithm.name"), "settings": settings}
        del row["config"]
        rows.append(row)
    return rows


def _cells(runs: Sequence[TrainingRun]) -> list[list[str]]:
    cells = []
    for run, settings in zip(runs, different_settings(runs), strict=True):
        parts = [f"{key.rpartition('.')[2]}={_text(value)}" for key, value in settings.items()]
        cells.append(
            [
                run.name,
                str(run.config.get("algorithm.name", _ABSENT)),
                ", ".join(parts) or _ABSENT,
                f"{run.steps:,}" if run.steps == run.planned_steps else f"{run.steps:,} of {run.planned_steps or '?'}",
                _text(run.losses.get("loss")),
                _losses(run.losses) or _ABSENT,
                " ".join(f"{value:.2f}" for value in run.acceptance) or _ABSENT,
                _text(run.tau, 2),
                f"{run.seconds / 60:.1f}",
            ]
        )
    return cells


def _losses(losses: Mapping[str, float]) -> str:
    """Each loss with its value, those of several steps (`soft_ce_0`, `soft_ce_1`, ...) as one list."""
    grouped: dict[str, list[str]] = {}
    for name, value in losses.items():
        if name != "loss":
            grouped.setdefault(re.sub(r"_\d+$", "", name), []).append(_text(value, 3))
    return ", ".join(f"{name} {' '.join(values)}" for name, values in grouped.items())


def _shown(cells: Sequence[Sequence[str]]) -> list[int]:
    """Columns that say something: settings where some differ, tau where it was measured."""
    return [index for index in range(len(_COLUMNS)) if index < 2 or any(row[index] != _ABSENT for row in cells)]


def _text(value: Any, digits: int = 4) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, float):
        return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.{digits}g}"
    return str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
