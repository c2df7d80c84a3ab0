"""Results as files and tables: the schema of results.json, its reader and writer, the terminal and Markdown tables.

It knows how results are stored and shown, not how they are measured. The page is in report_html.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from rich import box
from rich.table import Table
from rich.text import Text

from deepspec.errors import DataError
from deepspec.evaluation.details import ALL_DOMAINS, Details, DomainRow
from deepspec.files import write_json

SCHEMA = 1
RESULTS_FILE = "results.json"
AUTOREGRESSIVE = "autoregressive"
LATENCY_TOLERANCE = 0.05
ABSENT = "-"

Provenance = Mapping[str, Any]


class ResultRow(BaseModel):
    """One draft on one task at one temperature.

    Attributes:
        task: name of the task.
        draft: name of the draft; `autoregressive` for plain decoding by the target.
        algorithm: algorithm of the draft; `autoregressive` for plain decoding.
        domain: domain of the task, "" where it has none.
        temperature: sampling temperature of target and draft.
        num_prompts: prompts decoded.
        rounds: rounds over all prompts.
        acceptance_length: tau, bonus token included; 1 for plain decoding.
        acceptance_length_ci95: bootstrap interval over prompts; None for a single prompt.
        survival: K values, position 1 first; empty for plain decoding. Its length is read as K.
        conditional_acceptance: K values, position 1 first.
        acceptance_rate: accepted / proposed.
        verified_yield: (accepted + 1) / (proposed + 1).
        tokens_per_second: emitted tokens per second of the pass without timers.
        seconds_draft_per_round: T_draft, from the pass with timers.
        seconds_verify_per_round: T_verify, from the pass with timers.
        median_seconds_draft: median of the rounds whose mean is T_draft.
        median_seconds_verify: likewise.
        overhead_seconds_per_round: of the pass without timers, what T_draft and T_verify do not explain.
        seconds_per_token: measured latency, from the pass without timers, prefill excluded.
        latency_acceptance_length: tau of the prompts of the latency passes, where they are fewer than num_prompts.
        speedup_over_autoregressive: of the same run; 1 for plain decoding.
        peak_memory_bytes: while one prompt was decoded at batch 1, weights of target and all drafts included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str
    draft: str
    algorithm: str
    domain: str = ""
    temperature: float
    num_prompts: int
    rounds: int
    acceptance_length: float | None
    acceptance_length_ci95: tuple[float, float] | None
    survival: tuple[float | None, ...]
    conditional_acceptance: tuple[float | None, ...]
    acceptance_rate: float | None
    verified_yield: float | None = None
    tokens_per_second: float | None = None
    seconds_draft_per_round: float | None = None
    seconds_verify_per_round: float | None = None
    median_seconds_draft: float | None = None
    median_seconds_verify: float | None = None
    overhead_seconds_per_round: float | None = None
    seconds_per_token: float | None = None
    latency_acceptance_length: float | None = None
    speedup_over_autoregressive: float | None = None
    peak_memory_bytes: int | None = None


class Results(NamedTuple):
    """What results.json holds."""

    rows: list[ResultRow]
    provenance: dict[str, Any]
    details: Details = Details()


def write_results(
    folder: Path, rows: Sequence[ResultRow], provenance: Provenance, details: Details | None = None
) -> Path:
    """Write results.json into the folder, atomically, and return its path.

    Args:
        folder: made where it does not exist.
        rows: rows of the table, in any order.
        provenance: how the numbers were made; JSON values only.
        details: what is said beside the rows.
    """
    content = {
        "schema": SCHEMA,
        "provenance": dict(provenance),
        "rows": [row.model_dump(mode="json") for row in sort_rows(rows)],
        "details": (details or Details()).model_dump(mode="json"),
    }
    path = folder / RESULTS_FILE
    write_json(path, content)
    return path


def keep_other_results(folder: Path, rows: Sequence[ResultRow], page: str) -> Path | None:
    """Rename results that tell of drafts which `rows` leave out, since their timings stand nowhere else.

    Args:
        folder: where results.json may lie.
        rows: what will be written there next.
        page: file name of the page beside it, which is renamed with it.

    Returns:
        The new path, or None where nothing had to be kept.
    """
    try:
        earlier = {row.draft for row in read_results(folder).rows}
    except DataError:  # none, or damaged
        return None
    if earlier <= {row.draft for row in rows}:
        return None
    numbers = itertools.count(1)
    path = folder / RESULTS_FILE
    kept = next(name for number in numbers if not (name := path.with_stem(f"{path.stem}-{number}")).exists())
    if (folder / page).is_file():
        (folder / page).rename(folder / f"{Path(page).stem}{kept.stem.removeprefix(path.stem)}.html")
    path.rename(kept)
    return kept


def read_results(path: Path) -> Results:
    """Read a results.json, given itself or its folder.

    Raises:
        DataError: the file is missing, is not JSON, has another schema, or a row is malformed.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file} does not exist. Pass the output folder of an evaluation.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise DataError(f"{file} is not JSON ({problem}). Run the evaluation again.") from problem
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA:
        raise DataError(f"{file} has schema {found!r}, this version reads {SCHEMA}. Run the evaluation again.")
    if not isinstance(content.get("rows", []), list) or not isinstance(content.get("provenance", {}), dict):
        raise DataError(f"{file} is damaged: its rows or provenance are of another kind. Run the evaluation again.")
    rows = []
    for index, row in enumerate(content.get("rows", [])):
        try:
            rows.append(ResultRow.model_validate(row))
        except ValidationError as problem:
            first = problem.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise DataError(
                f"{file} row {index}: '{place}' {first['msg']} (is {first['input']!r}). Run the evaluation again."
            ) from problem
    try:
        # Results of the first versions have none.
        details = Details.model_validate(content.get("details", {}))
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{file}: 'details.{place}' {first['msg']}. Run the evaluation again.") from problem
    return Results(rows, dict(content.get("provenance", {})), details)


def sort_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows grouped by task and temperature in order of first appearance, plain decoding first in each."""
    groups = {key: index for index, key in enumerate(dict.fromkeys((row.task, row.temperature) for row in rows))}
    return sorted(rows, key=lambda row: (groups[row.task, row.temperature], row.algorithm != AUTOREGRESSIVE))


def check_speedup_bound(speedup: float | None, num_draft_tokens: int) -> str | None:
    """Return what is wrong with a speed-up above K + 1, else None.

    One target forward yields at most K + 1 tokens: a larger speed-up means that the two sides were not measured alike.
    """
    if speedup is None or speedup <= num_draft_tokens + 1:
        return None
    return f"speed-up {speedup:.2f}x is above the bound K + 1 = {num_draft_tokens + 1}: the measurement is wrong"


def predicted_seconds_per_token(row: ResultRow) -> float | None:
    """Return L = (T_draft + T_verify) / tau, with the tau of the prompts that were timed."""
    tau = row.latency_acceptance_length or row.acceptance_length
    if row.seconds_verify_per_round is None or not tau:
        return None
    return ((row.seconds_draft_per_round or 0.0) + row.seconds_verify_per_round) / tau


def row_flags(row: ResultRow) -> list[str]:
    """Return what a reader must know before believing the row; empty for a sound one."""
    flags = []
    num_draft_tokens = len(row.survival)
    if (problem := check_speedup_bound(row.speedup_over_autoregressive, num_draft_tokens)) is not None:
        flags.append(problem)
    if row.acceptance_length is not None and row.acceptance_length > num_draft_tokens + 1:
        flags.append(f"acceptance length {row.acceptance_length:.2f} is above K + 1 = {num_draft_tokens + 1}")
    predicted = predicted_seconds_per_token(row)
    if predicted is not None and row.seconds_per_token:
        deviation = predicted / row.seconds_per_token - 1
        if abs(deviation) > LATENCY_TOLERANCE:
            flags.append(
                f"(T_draft + T_verify) / tau is {deviation:+.0%} off the measured latency (tolerance "
                f"{LATENCY_TOLERANCE:.0%})"
            )
    return [f"{row.task}, {row.draft}: {flag}" for flag in flags]


def flatten(values: Provenance, prefix: str = "") -> dict[str, str]:
    """Return nested values as one level of dotted keys and text, in their order."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        elif isinstance(value, (list, tuple)):
            flat[name] = ", ".join(str(part) for part in value) or ABSENT
        else:
            flat[name] = ABSENT if value is None else str(value)
    return flat


def describe_conditions(rows: Sequence[ResultRow], provenance: Provenance | None) -> str:
    """Return in one line how the rows were made: target, temperature, batch size, dtype, prompts.

    From the provenance it reads the keys target (or target.name_or_path), batch_size and dtype at any depth.
    """
    flat = flatten(provenance or {})
    parts = []
    target = flat.get("target") or flat.get("target.short_name") or flat.get("target.name_or_path")
    if target:
        parts.append(f"target {target}")
    temperatures = sorted({row.temperature for row in rows})
    if temperatures:
        parts.append("temperature " + ", ".join(f"{value:g}" for value in temperatures))
    for label, key in (("batch size", "batch_size"), ("dtype", "dtype")):
        found = dict.fromkeys(value for name, value in flat.items() if name.rpartition(".")[2] == key)
        if found:
            parts.append(f"{label} {', '.join(found)}")
    prompts = dict.fromkeys(row.num_prompts for row in rows)
    if len(prompts) == 1:
        parts.append(f"{next(iter(prompts))} prompts per task")
    return ", ".join(parts)


def headline(results: Results) -> list[str]:
    """Return for each draft the one line that a paper needs: tau with its interval, speed-up, and over what."""
    lines = []
    target = describe_conditions([], results.provenance).partition(",")[0]
    for draft, temperature in dict.fromkeys((row.draft, row.temperature) for row in results.details.domains):
        rows = [row for row in results.details.domains if (row.draft, row.temperature) == (draft, temperature)]
        row = next((row for row in rows if row.domain == ALL_DOMAINS), rows[0])
        lines.append(f"{draft}: {_in_words(row, len(rows) - 1)}, temperature {temperature:g}, {target}")
    return lines


def _in_words(row: DomainRow, num_domains: int) -> str:
    interval = row.acceptance_length_ci95
    tau = f"tau {format_number(row.acceptance_length)}"
    tau += "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    tau += f" (accepted {format_number((row.acceptance_length or 1.0) - 1)} + 1)"
    speedup = row.speedup_over_autoregressive
    timed = "" if speedup is None else f", {speedup:.2f}x plain decoding at batch 1"
    over = f"mean of {num_domains} domains" if row.domain == ALL_DOMAINS else f"domain {row.domain}"
    return f"{tau} tokens per target pass{timed}; {over}, {row.num_prompts} prompts, {row.rounds} rounds"


COLUMNS = (
    ("Task", ""),
    ("Draft", ""),
    ("tau", "[95 %]"),
    ("tau-1", ""),
    ("acc.", "rate"),
    ("tok/s", ""),
    ("T_draft", "ms"),
    ("T_verify", "ms"),
    ("ms/", "token"),
    ("speed-up", ""),
)
_FIRST_TIMING_COLUMN = 5
_MIN_WIDTHS = {0: 10, 1: 10, 2: 11, 9: 5}  # of the columns that may fold, so that the others stay whole at 80


def table_cells(rows: Sequence[ResultRow]) -> list[list[str]]:
    """Return the text of every cell, rows in the order of `sort_rows`, columns in that of COLUMNS."""
    is_mixed = len({row.temperature for row in rows}) > 1
    return [_cells(row, is_mixed) for row in sort_rows(rows)]


def render_table(rows: Sequence[ResultRow], provenance: Provenance | None = None) -> Table:
    """Return the table for the terminal; its title says how it was made, its caption what to doubt."""
    ordered = sort_rows(rows)
    ending = common_ending([row.draft for row in ordered if row.algorithm != AUTOREGRESSIVE])
    notes = ["tau: tokens per target pass, bonus included, 95 % interval over prompts; tau-1: accepted drafts."]
    notes += [f"Draft names end in {ending}."] if ending else []
    notes += [f"! {flag}" for row in ordered for flag in row_flags(row)]
    table = Table(
        title=Text("Speculative decoding: " + describe_conditions(rows, provenance)),
        caption=Text("\n".join(notes)),
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    shown = _shown_columns(rows)
    for index in shown:
        name, unit = COLUMNS[index]
        # Names fold and intervals take a second line, so that all numbers stay whole in 80 columns.
        table.add_column(
            Text(f"{name}\n{unit}" if unit else name.replace("-up", "\n-up")),
            justify="left" if index < 2 else "right",
            overflow="fold",
            no_wrap=2 < index < len(COLUMNS) - 1,
            min_width=_MIN_WIDTHS.get(index),
        )
    previous = None
    for row, cells in zip(ordered, table_cells(rows), strict=True):
        group = (row.task, row.temperature)
        if group != previous and previous is not None:
            table.add_section()
        names = ["" if group == previous else cells[0], cells[1].removesuffix(ending)]
        style = "dim" if row.algorithm == AUTOREGRESSIVE else "red" if row_flags(row) else ""
        table.add_row(*(Text([*names, *cells[2:]][index]) for index in shown), style=style)
        previous = group
    return table


def markdown_table(rows: Sequence[ResultRow]) -> str:
    """Return the table in Markdown, for a README or an issue; flagged rows are listed below it."""
    shown = _shown_columns(rows)
    header = [f"{name} {unit}".strip().replace("/ ", "/") for name, unit in (COLUMNS[index] for index in shown)]
    lines = [header, ["---" if index < 2 else "---:" for index in shown]]
    lines += [[cells[index].replace("|", "\\|") for index in shown] for cells in table_cells(rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    flags = [flag for row in sort_rows(rows) for flag in row_flags(row)]
    return text + "".join(f"\n\n**Check:** {flag}" for flag in flags) + "\n"


def format_number(value: float | None, digits: int = 2, scale: float = 1.0, suffix: str = "") -> str:
    """Return the value times `scale` with a fixed number of digits, or a dash where it is absent."""
    return ABSENT if value is None else f"{value * scale:.{digits}f}{suffix}"


def task_label(row: ResultRow, is_mixed: bool) -> str:
    """Return the task's name, with the temperature where the rows have several."""
    return f"{row.task} T={row.temperature:g}" if is_mixed else row.task


def common_ending(names: Sequence[str]) -> str:
    """Return the longest ending "_..." that all of several different names share, such as _block7_qwen3_4b, or ""."""
    different = list(dict.fromkeys(names))
    if len(different) < 2:
        return ""
    endings = (different[0][start:] for start, letter in enumerate(different[0]) if letter == "_" and start > 0)
    return next((end for end in endings if all(name.endswith(end) and name != end for name in different)), "")


def _shown_columns(rows: Sequence[ResultRow]) -> list[int]:
    """Leave the timing columns out where nothing was timed."""
    is_timed = any(row.tokens_per_second is not None or row.seconds_per_token is not None for row in rows)
    return list(range(len(COLUMNS) if is_timed else _FIRST_TIMING_COLUMN))


def _cells(row: ResultRow, is_mixed: bool) -> list[str]:
    is_plain = row.algorithm == AUTOREGRESSIVE
    tau = format_number(row.acceptance_length)
    if row.acceptance_length_ci95 is not None and not is_plain:
        low, high = row.acceptance_length_ci95
        tau += f" [{low:.2f},{high:.2f}]"
    drafts = None if row.acceptance_length is None or is_plain else row.acceptance_length - 1
    mark = " (!)" if check_speedup_bound(row.speedup_over_autoregressive, len(row.survival)) else ""
    return [
        task_label(row, is_mixed),
        AUTOREGRESSIVE if is_plain else row.draft,
        tau,
        format_number(drafts),
        format_number(None if is_plain else row.acceptance_rate, 1, 100, "%"),
        format_number(row.tokens_per_second, 1),
        format_number(None if is_plain else row.seconds_draft_per_round, 1, 1000),
        format_number(row.seconds_verify_per_round, 1, 1000),
        format_number(row.seconds_per_token, 1, 1000),
        format_number(row.speedup_over_autoregressive, 2, 1, "x") + mark,
    ]
