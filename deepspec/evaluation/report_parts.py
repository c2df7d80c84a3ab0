"""Parts of the page: tables as rows of text, charts as SVG. They know results, not where a page shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspec.evaluation.charts import Bar, Series, bar_chart, line_chart
from deepspec.evaluation.details import ALL_DOMAINS, ContextRow, DomainRow, LengthRow, PairRow
from deepspec.evaluation.report import (
    ABSENT,
    AUTOREGRESSIVE,
    ResultRow,
    format_number,
    predicted_seconds_per_token,
    row_flags,
    table_cells,
    task_label,
)
from deepspec.evaluation.round_table import Rounds
from deepspec.evaluation.statistics import Interval, conditional_acceptance_ci95, macro_average

RoundsKey = tuple[str, str, float]
"""task, draft, temperature: as in the rows."""

MAX_CURVE_POINTS = 120
MIN_ROUNDS = 10  # a share of fewer rounds is noise, and would draw the eye
_TAU = "eval/acceptance_length"


def headline(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
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


def tiles(domains: Sequence[DomainRow]) -> list[list[dict[str, str]]]:
    """Per temperature and draft the mean over domains; the highest tau first."""
    summary = []
    for temperature in sorted({row.temperature for row in domains}):
        members = [row for row in domains if row.temperature == temperature]
        several = any(row.domain == ALL_DOMAINS for row in members)
        chosen = [row for row in members if row.domain == ALL_DOMAINS or not several]
        count = len({row.domain for row in members}) - several
        line = []
        for row in sorted(chosen, key=lambda row: -(row.acceptance_length or 0.0)):
            where = f"mean of {count} domains" if several else f"domain {row.domain}"
            line.append(
                {
                    "draft": row.draft,
                    "tau": format_number(row.acceptance_length),
                    "interval": interval_text(row.acceptance_length_ci95),
                    "speedup": format_number(row.speedup_over_autoregressive, 2, 1, "x"),
                    "tasks": f"{where}, {row.num_prompts} prompts, T={temperature:g}",
                }
            )
        summary.append(line)
    return summary


def domain_table(domains: Sequence[DomainRow]) -> list[dict[str, str]]:
    """One line a domain and draft."""
    return [
        {
            "domain": ("mean of domains" if row.domain == ALL_DOMAINS else row.domain)
            + temperature_text(row.temperature, (one.temperature for one in domains)),
            "draft": row.draft,
            "tau": format_number(row.acceptance_length),
            "interval": interval_text(row.acceptance_length_ci95),
            "speedup": format_number(row.speedup_over_autoregressive, 2, 1, "x"),
            "prompts": str(row.num_prompts),
            "tasks": ", ".join(dict.fromkeys(task.rpartition("/")[2] for task in row.tasks)),
        }
        for row in sorted(domains, key=lambda row: (row.temperature, row.domain == ALL_DOMAINS, row.domain))
    ]


def pair_table(pairs: Sequence[PairRow]) -> list[dict[str, str]]:
    """One line a pair of drafts and task; the mean over domains last."""
    return [
        {
            "task": ("mean of domains" if row.task is None else row.task)
            + temperature_text(row.temperature, (one.temperature for one in pairs)),
            "pair": f"{row.draft} - {row.other}",
            "difference": f"{row.difference:+.2f}",
            "interval": ABSENT if row.ci95 is None else f"[{row.ci95[0]:+.2f}, {row.ci95[1]:+.2f}]",
            "p": ABSENT if row.p_value is None else "< 0.001" if row.p_value < 0.001 else f"{row.p_value:.3f}",
            "prompts": str(row.num_prompts),
        }
        for row in sorted(pairs, key=lambda row: (row.temperature, row.task is None))
    ]


def context_table(contexts: Sequence[ContextRow]) -> dict[str, Any]:
    """Columns are the buckets of the context, lines the drafts on their tasks."""
    buckets = sorted({(row.low, row.high or math.inf) for row in contexts})
    if len(buckets) < 2:
        return {}
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in contexts:
        text = f"{row.acceptance_length:.2f} {interval_text(row.acceptance_length_ci95)}"
        label = row.task + temperature_text(row.temperature, (one.temperature for one in contexts))
        # Where few rounds began, a mean is noise.
        lines.setdefault((label, row.draft), {})[row.low] = text if row.rounds >= MIN_ROUNDS else ABSENT
    return {
        "buckets": [f"{low:,}+" if math.isinf(high) else f"{low:,}-{int(high) - 1:,}" for low, high in buckets],
        "lines": [
            {"task": task, "draft": draft, "cells": [cells.get(low, ABSENT) for low, _ in buckets]}
            for (task, draft), cells in lines.items()
        ],
    }


def domain_charts(domains: Sequence[DomainRow], drafts: Mapping[str, int]) -> list[str]:
    """Per domain a chart of conditional acceptance with intervals, the paper's figure 2."""
    charts = []
    groups: dict[tuple[str, float], list[DomainRow]] = {}
    for row in domains:
        groups.setdefault((row.domain, row.temperature), []).append(row)
    for (domain, temperature), members in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0] == "all")):
        series = []
        for row in members:
            reached = _reached(row.conditional_acceptance, row.rounds)
            points = [
                (float(k), share if reached[k - 1] >= MIN_ROUNDS else None)
                for k, share in enumerate(row.conditional_acceptance, start=1)
            ]
            series.append(Series(row.draft, drafts[row.draft], points, row.conditional_acceptance_ci95))
        name = "all domains" if domain == ALL_DOMAINS else domain
        title = f"{name}{temperature_text(temperature, (row.temperature for row in domains))}: conditional acceptance"
        y_label = "token k accepted, given that 1..k-1 were"
        charts.append(
            line_chart(title, series, "draft position k", y_label, (0.0, 1.0), is_share=True, is_integer_x=True)
        )
    return charts


def _reached(shares: Sequence[float | None], rounds: int) -> list[float]:
    """About how many rounds came to each position."""
    reached = [float(rounds)]
    for share in shares:
        reached.append(reached[-1] * (share or 0.0))
    return reached


def acceptance_charts(
    rows: Sequence[ResultRow], drafts: Mapping[str, int], rounds_by: Mapping[RoundsKey, Rounds]
) -> list[str]:
    """Per task a chart of conditional acceptance (with intervals where there are rounds) and one of survival."""
    charts = []
    for label, members in _by_task(rows, has_plain=False).items():
        conditional, survived = [], []
        for row in members:
            style = drafts[row.draft]
            rounds = rounds_by.get((row.task, row.draft, row.temperature))
            intervals: Sequence[Interval | None] = ()
            if rounds is not None:
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


def tau_charts(rows: Sequence[ResultRow], drafts: Mapping[str, int]) -> list[str]:
    """Per task a chart of tau with intervals; all share one scale."""
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


def length_charts(lengths: Sequence[LengthRow], drafts: Mapping[str, int]) -> list[str]:
    """Per temperature: tau over the number of draft tokens, every task weighing the same."""
    lengths = [row for row in lengths if row.acceptance_length is not None]
    charts = []
    for temperature in sorted({row.temperature for row in lengths}):
        here = [row for row in lengths if row.temperature == temperature]
        series = []
        for draft in dict.fromkeys(row.draft for row in here):
            taus: dict[int, list[float | None]] = {}
            for row in here:
                if row.draft == draft:
                    taus.setdefault(row.length, []).append(row.acceptance_length)
            points = [(0.0, 1.0), *((float(length), macro_average(found)) for length, found in sorted(taus.items()))]
            series.append(Series(draft, drafts[draft], points))
        title = "tau over K" + temperature_text(temperature, (row.temperature for row in lengths))
        charts.append(
            line_chart(title, series, "draft tokens verified (K)", "tokens per target pass", is_integer_x=True)
        )
    return charts


def length_table(lengths: Sequence[LengthRow]) -> list[dict[str, str]]:
    """The lengths that were timed."""
    return [
        {
            "task": row.task + temperature_text(row.temperature, (one.temperature for one in lengths)),
            "draft": row.draft,
            "length": str(row.length),
            "estimate": format_number(row.acceptance_length),
            "tau": format_number(row.measured_acceptance_length),
            "t_draft": format_number(row.seconds_draft_per_round, 1, 1000),
            "t_verify": format_number(row.seconds_verify_per_round, 1, 1000),
            "measured": format_number(row.seconds_per_token, 1, 1000),
            "speedup": format_number(row.speedup_over_autoregressive, 2, 1, "x"),
        }
        for row in lengths
        if row.seconds_per_token is not None
    ]


def curve_charts(curves: Mapping[str, Sequence[Mapping[str, Any]]], drafts: Mapping[str, int]) -> list[str]:
    """Loss and acceptance length over the steps of the trainings."""
    charts = []
    for key in ("loss", _TAU):
        series = []
        for draft, lines in curves.items():
            points = _thinned([(line["step"], line[key]) for line in lines if "step" in line and key in line])
            if points:
                series.append(Series(draft, drafts[draft], points))
        title = "training loss" if key == "loss" else "acceptance length during training"
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


def latency_charts(rows: Sequence[ResultRow]) -> list[str]:
    """Per task the milliseconds a token that draft, verification and the rest take."""
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


def latency_table(rows: Sequence[ResultRow]) -> list[dict[str, str]]:
    """The numbers behind the latency charts, one line a row."""
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
                "overhead": format_number(row.overhead_seconds_per_round, 1, 1000),
                "memory": format_number(row.peak_memory_bytes, 2, 1 / 2**30),
                "deviation": f"{predicted / row.seconds_per_token - 1:+.1%}",
            }
        )
    return lines


def interval_text(interval: Interval | None) -> str:
    """An interval in brackets, nothing where there is none."""
    return "" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def temperature_text(temperature: float, others: Iterable[float]) -> str:
    """The temperature behind a name, where there are several."""
    return f" T={temperature:g}" if len(set(others)) > 1 else ""


def _is_mixed(rows: Sequence[ResultRow]) -> bool:
    return len({row.temperature for row in rows}) > 1


def _by_task(rows: Sequence[ResultRow], has_plain: bool) -> dict[str, list[ResultRow]]:
    """Rows by heading (task and, where they differ, temperature), with or without plain decoding."""
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        if has_plain or row.algorithm != AUTOREGRESSIVE:
            groups.setdefault(task_label(row, _is_mixed(rows)), []).append(row)
    return groups
