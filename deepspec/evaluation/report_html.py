"""The report as one self-contained page: tables, charts, coloured examples and how everything was made.

The page loads nothing: CSS and SVG are inside, there is no script, and its content security policy forbids requests.
Every part whose data is missing is left out. The layout is in report.html.j2; this module turns rows into what it
shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deepspec.decoding.rounds import Round
from deepspec.evaluation.charts import Bar, Series, bar_chart, line_chart
from deepspec.evaluation.report import (
    ABSENT,
    AUTOREGRESSIVE,
    COLUMNS,
    ResultRow,
    common_ending,
    describe_conditions,
    flatten,
    format_number,
    predicted_seconds_per_token,
    row_flags,
    sort_rows,
    table_cells,
    task_label,
)
from deepspec.evaluation.statistics import (
    Interval,
    conditional_acceptance_ci95,
    group_by_prompt,
    macro_average,
    paired_difference,
)
from deepspec.files import write_atomically

REPORT_FILE = "report.html"
MAX_CURVE_POINTS = 120
MIN_PROMPTS = 10
MIN_ROUNDS = 10  # a share of fewer rounds is noise, and would draw the eye

RoundsKey = tuple[str, str, float]
"""task, draft, temperature: as in the rows."""


class Example(NamedTuple):
    """A generated answer whose tokens show where they came from.

    Attributes:
        draft: name of the draft.
        prompt: text of the prompt.
        segments: (text, kind) in order; kind is accepted, bonus, rejected or plain.
        task: name of the task, "" where it does not matter.
    """

    draft: str
    prompt: str
    segments: Sequence[tuple[str, str]]
    task: str = ""


class ReportInput(NamedTuple):
    """All that the page can show; everything but rows and provenance may be empty.

    Attributes:
        rows: rows of results.json.
        provenance: how they were made, nested as in results.json.
        rounds_by: round records by (task, draft, temperature): adds intervals per position and paired differences.
        curves: lines of metrics.jsonl by draft: "step", "loss" and any "eval/..." key are drawn.
        examples: coloured answers.
        next_commands: (command, what it does).
        title: heading of the page.
    """

    rows: Sequence[ResultRow]
    provenance: Mapping[str, Any]
    rounds_by: Mapping[RoundsKey, Sequence[Round]] = {}
    curves: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    examples: Sequence[Example] = ()
    next_commands: Sequence[tuple[str, str]] = ()
    title: str = "Speculative decoding, measured"


def write_report(path: Path, content: ReportInput) -> Path:
    """Write the page, atomically, and return its path.

    Args:
        path: file to write, or a folder in which it is called report.html.
        content: what to show.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    write_atomically(file, [render_page(content)])
    return file


def render_page(content: ReportInput) -> str:
    """Return the page as text."""
    environment = Environment(
        loader=PackageLoader("deepspec.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    content, ending = _with_short_names(content)
    rows = sort_rows(content.rows)
    drafts = _draft_styles(content)
    return environment.get_template("report.html.j2").render(
        title=content.title,
        ending=ending,
        min_rounds=MIN_ROUNDS,
        conditions=describe_conditions(rows, content.provenance),
        summary=_means(rows),
        flags=[flag for row in rows for flag in row_flags(row)],
        columns=[(name, unit) for name, unit in COLUMNS],
        table=_headline(rows),
        acceptance_charts=_safe(_acceptance_charts(rows, drafts, content.rounds_by)),
        tau_charts=_safe(_tau_charts(rows, drafts)),
        pairs=_paired_rows(content.rounds_by),
        curve_charts=_safe(_curve_charts(content.curves, drafts)),
        latency_charts=_safe(_latency_charts(rows)),
        latency=_latency_table(rows),
        examples=content.examples,
        next_commands=content.next_commands,
        provenance=flatten(content.provenance),
    )


def _safe(charts: Sequence[str]) -> list[Markup]:
    """Charts escape their own texts; empty ones (nothing to draw) go."""
    return [Markup(chart) for chart in charts if chart]


def _with_short_names(content: ReportInput) -> tuple[ReportInput, str]:
    """The same content without the ending that all draft names share, and that ending."""
    names = [row.draft for row in content.rows if row.algorithm != AUTOREGRESSIVE]
    ending = common_ending([*names, *content.curves])
    return (
        content._replace(
            rows=[row.model_copy(update={"draft": row.draft.removesuffix(ending)}) for row in content.rows],
            rounds_by={
                (task, draft.removesuffix(ending), temperature): rounds
                for (task, draft, temperature), rounds in content.rounds_by.items()
            },
            curves={draft.removesuffix(ending): lines for draft, lines in content.curves.items()},
            examples=[example._replace(draft=example.draft.removesuffix(ending)) for example in content.examples],
        ),
        ending,
    )


def _draft_styles(content: ReportInput) -> dict[str, int]:
    """One style per draft for the whole page, by first appearance."""
    names = [row.draft for row in content.rows if row.algorithm != AUTOREGRESSIVE]
    return {name: index for index, name in enumerate(dict.fromkeys([*names, *content.curves]))}


def _is_mixed(rows: Sequence[ResultRow]) -> bool:
    return len({row.temperature for row in rows}) > 1


def _by_task(rows: Sequence[ResultRow], has_plain: bool) -> dict[str, list[ResultRow]]:
    """Rows by heading (task and, where they differ, temperature), with or without plain decoding."""
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        if has_plain or row.algorithm != AUTOREGRESSIVE:
            groups.setdefault(task_label(row, _is_mixed(rows)), []).append(row)
    return groups


def _headline(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Cells of the table with the CSS class of each row; the first of a task starts a group."""
    lines: list[dict[str, Any]] = []
    previous = ""
    for row, cells in zip(rows, table_cells(rows), strict=True):
        classes = ["first"] if cells[0] != previous else []
        classes += ["plain"] if row.algorithm == AUTOREGRESSIVE else []
        classes += ["flagged"] if row_flags(row) else []
        shown = [cells[0] if cells[0] != previous else "", *cells[1:]]
        lines.append({"css": " ".join(classes), "cells": shown, "prompts": row.num_prompts, "rounds": row.rounds})
        previous = cells[0]
    return lines


def _means(rows: Sequence[ResultRow]) -> list[list[dict[str, str]]]:
    """Per temperature and draft: means over tasks, each task weighing the same; the highest tau first."""
    groups: dict[float, dict[str, list[ResultRow]]] = {}
    for row in rows:
        if row.algorithm != AUTOREGRESSIVE:
            groups.setdefault(row.temperature, {}).setdefault(row.draft, []).append(row)
    summary = []
    for temperature, members in sorted(groups.items()):
        taus = {draft: macro_average(row.acceptance_length for row in part) for draft, part in members.items()}
        tiles = []
        for draft in sorted(members, key=lambda name: -(taus[name] or 0.0)):
            number = len(members[draft])
            speedup = macro_average(row.speedup_over_autoregressive for row in members[draft])
            tiles.append(
                {
                    "draft": draft,
                    "tau": format_number(taus[draft]),
                    "speedup": format_number(speedup, 2, 1, "x"),
                    "tasks": ("1 task" if number == 1 else f"mean of {number} tasks") + f", T={temperature:g}",
                }
            )
        summary.append(tiles)
    return summary


def _acceptance_charts(
    rows: Sequence[ResultRow], drafts: Mapping[str, int], rounds_by: Mapping[RoundsKey, Sequence[Round]]
) -> list[str]:
    """Per task a chart of conditional acceptance (with intervals where there are rounds) and one of survival."""
    charts = []
    for label, members in _by_task(rows, has_plain=False).items():
        conditional, survived = [], []
        for row in members:
            style = drafts[row.draft]
            rounds = rounds_by.get((row.task, row.draft, row.temperature), ())
            intervals: Sequence[Interval | None] = ()
            if rounds:
                intervals = conditional_acceptance_ci95(rounds, len(row.conditional_acceptance))
            reached = [1.0, *(share or 0.0 for share in row.survival)]
            points = [
                (float(k), share if row.rounds * reached[k - 1] >= MIN_ROUNDS else None)
                for k, share in enumerate(row.conditional_acceptance, start=1)
            ]
            conditional.append(Series(row.draft, style, points, intervals))
            points = [(float(k), share) for k, share in enumerate(row.survival, start=1)]
            survived.append(Series(row.draft, style, points))
        x_label = "draft position k"
        for name, series, y_label in (
            ("conditional acceptance", conditional, "token k accepted, given that 1..k-1 were"),
            ("survival", survived, "rounds with at least k tokens accepted"),
        ):
            title = f"{label}: {name}"
            charts.append(line_chart(title, series, x_label, y_label, (0.0, 1.0), is_share=True, is_integer_x=True))
    return charts


def _tau_charts(rows: Sequence[ResultRow], drafts: Mapping[str, int]) -> list[str]:
    ends = [row.acceptance_length_ci95[1] for row in rows if row.acceptance_length_ci95 is not None]
    x_max = max([1.0, *ends, *(row.acceptance_length for row in rows if row.acceptance_length is not None)])
    charts = []
    for label, members in _by_task(rows, has_plain=False).items():
        bars = [
            Bar(
                row.draft,
                [("tau", f"s{drafts[row.draft] % 6}", row.acceptance_length)],
                format_number(row.acceptance_length),
                row.acceptance_length_ci95,
            )
            for row in members
            if row.acceptance_length is not None
        ]
        charts.append(bar_chart(label, bars, "tokens per target pass (tau)", x_max, (1.0, "plain decoding")))
    return charts


def _paired_rows(rounds_by: Mapping[RoundsKey, Sequence[Round]]) -> list[dict[str, str]]:
    """Differences between every two drafts that decoded the same prompts of a task."""
    groups: dict[tuple[str, float], dict[str, dict[str, list[Round]]]] = {}
    for (task, draft, temperature), rounds in rounds_by.items():
        if rounds and draft != AUTOREGRESSIVE:
            groups.setdefault((task, temperature), {})[draft] = group_by_prompt(rounds)
    is_mixed = len({temperature for _, temperature in groups}) > 1
    lines = []
    for (task, temperature), members in groups.items():
        for (name_a, rounds_a), (name_b, rounds_b) in combinations(members.items(), 2):
            common = rounds_a.keys() & rounds_b.keys()
            if not common:
                continue
            result = paired_difference(
                {prompt: rounds_a[prompt] for prompt in common}, {prompt: rounds_b[prompt] for prompt in common}
            )
            interval = result.ci95
            # Resampling a handful of prompts says nothing about others.
            p_value = result.p_value if result.num_prompts >= MIN_PROMPTS else None
            lines.append(
                {
                    "task": f"{task} T={temperature:g}" if is_mixed else task,
                    "pair": f"{name_a} - {name_b}",
                    "difference": f"{result.difference:+.2f}",
                    "interval": ABSENT if interval is None else f"[{interval[0]:+.2f}, {interval[1]:+.2f}]",
                    "p": ABSENT if p_value is None else "< 0.001" if p_value < 0.001 else f"{p_value:.3f}",
                    "prompts": str(result.num_prompts),
                }
            )
    return lines


def _curve_charts(curves: Mapping[str, Sequence[Mapping[str, Any]]], drafts: Mapping[str, int]) -> list[str]:
    keys = dict.fromkeys(key for lines in curves.values() for line in lines for key in line if key.startswith("eval/"))
    charts = []
    for key in ("loss", *keys):
        series = []
        for draft, lines in curves.items():
            points = _thinned([(line["step"], line[key]) for line in lines if "step" in line and key in line])
            if points:
                series.append(Series(draft, drafts[draft], points))
        title = "training loss" if key == "loss" else key.removeprefix("eval/").replace("_", " ") + " during training"
        charts.append(line_chart(title, series, "optimizer step", key))
    return charts


def _thinned(points: Sequence[tuple[Any, Any]]) -> list[tuple[float, float | None]]:
    """Means over equal runs of steps, so that a long noisy curve stays readable; values that are not finite go."""
    numbers = [(float(x), float(y)) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y)]
    size = math.ceil(len(numbers) / MAX_CURVE_POINTS) if numbers else 1
    means: list[tuple[float, float | None]] = []
    for start in range(0, len(numbers), size):
        part = numbers[start : start + size]
        means.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return means


def _latency_parts(row: ResultRow) -> tuple[float, float, float] | None:
    """Milliseconds per token of draft, verification and the rest of the measured latency; None where not timed."""
    predicted = predicted_seconds_per_token(row)
    if predicted is None or row.seconds_verify_per_round is None:
        return None
    draft_seconds = row.seconds_draft_per_round or 0.0
    share = draft_seconds / (draft_seconds + row.seconds_verify_per_round) if predicted else 0.0
    overhead = 0.0 if row.seconds_per_token is None else row.seconds_per_token - predicted
    return 1000 * predicted * share, 1000 * predicted * (1 - share), 1000 * overhead


def _latency_charts(rows: Sequence[ResultRow]) -> list[str]:
    totals = [sum(parts[:2]) for parts in map(_latency_parts, rows) if parts is not None]
    measured = [1000 * row.seconds_per_token for row in rows if row.seconds_per_token is not None]
    x_max = max([*totals, *measured], default=0.0)
    charts = []
    for label, members in _by_task(rows, has_plain=True).items():
        bars = []
        for row in members:
            parts = _latency_parts(row)
            if parts is None or not x_max:
                continue
            names = (("draft", "p0"), ("verification", "p1"), ("overhead", "p2"))
            marker = None if row.seconds_per_token is None else 1000 * row.seconds_per_token
            pieces = [(name, css, max(0.0, value)) for (name, css), value in zip(names, parts, strict=True)]
            bars.append(Bar(row.draft, pieces, format_number(marker or sum(parts), 1), None, marker))
        legend = (("draft", "p0"), ("verification", "p1"), ("overhead", "p2"))
        charts.append(bar_chart(label, bars, "ms per token", x_max, None, legend, "measured, timers off"))
    return charts


def _latency_table(rows: Sequence[ResultRow]) -> list[dict[str, str]]:
    lines = []
    for row in rows:
        parts = _latency_parts(row)
        if parts is None or row.seconds_per_token is None:
            continue
        predicted = predicted_seconds_per_token(row) or 0.0
        is_plain = row.algorithm == AUTOREGRESSIVE
        lines.append(
            {
                "task": task_label(row, _is_mixed(rows)),
                "draft": row.draft,
                "t_draft": ABSENT if is_plain else format_number(row.seconds_draft_per_round, 1, 1000),
                "t_verify": format_number(row.seconds_verify_per_round, 1, 1000),
                "tau": format_number(row.latency_acceptance_length or row.acceptance_length),
                "predicted": format_number(predicted, 1, 1000),
                "measured": format_number(row.seconds_per_token, 1, 1000),
                "deviation": f"{predicted / row.seconds_per_token - 1:+.1%}",
            }
        )
    return lines
