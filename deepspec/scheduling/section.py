"""Parts of an evaluation's page: how far confidences mean what they say, and what schedules gain under load.

For the first, temperatures are fitted to half of the conversations and judged on the other half; nothing is stored. The
second shows rows that load.py has made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from deepspec.errors import DataError
from deepspec.evaluation.charts import Series
from deepspec.evaluation.details import GainRow, LoadRow
from deepspec.evaluation.report import ABSENT
from deepspec.evaluation.report_html import Section
from deepspec.evaluation.statistics import Interval
from deepspec.scheduling.calibrate import ece_intervals, reliability
from deepspec.scheduling.calibration import fit_temperatures, split
from deepspec.scheduling.confidence import Score, conditional_scores, prefix_scores
from deepspec.scheduling.outcomes import WORDS
from deepspec.scheduling.pages import Chart, draw
from deepspec.scheduling.records import Recorded, Slots, read_records, slots_of, source_of

_NOTE = (
    "A draft's confidence c_k predicts that slot k is accepted given that all before it were; their products are "
    "compared with what was accepted, on half of the conversations. Before: as the draft says it (its head, or the "
    "largest probability of each slot where it has none). After: temperatures fitted to the other half. ECE: mean gap "
    "between prediction and frequency over 15 bins, AUC: how well the products rank, both with 95 % intervals over "
    "conversations. `deepspec calibrate` stores temperatures with a draft."
)
_LOAD_HEAD = ["requests", "schedule", "tok/s", "95 %", "simulated", "95 %", "off by", "pace", "draft tokens verified"]
_GAIN_HEAD = ["requests", "throughput over", "measured", "95 %", "simulated", "95 %"]
_HEAD = [
    "draft",
    "source",
    "slot",
    "ECE before",
    "ECE after",
    "AUC",
    "Brier before",
    "Brier after",
    "Brier of c_k",
    "labels",
]


def confidence_sections(folder: Path, temperature: float, drafts: Sequence[str]) -> list[Section]:
    """One section over all drafts of an evaluation, tasks together; none where no draft was measured.

    Args:
        folder: of an evaluation that verified all.
        temperature: for the heading.
        drafts: their names; the folder may hold rounds of others too.
    """
    try:
        records = [one for one in read_records([str(folder)]) if one.draft in drafts]
    except DataError:  # plain decoding only
        return []
    groups: dict[str, list[Recorded]] = {}
    for one in records:
        groups.setdefault(one.draft, []).append(one)
    charts: list[str] = []
    rows: list[list[str]] = []
    for draft, members in groups.items():
        source = source_of(members, "auto")
        slots = slots_of(members, source)
        to_fit, held_out = split(slots)
        if not held_out.any():
            continue
        judged = slots.rows(held_out)
        temperatures = _fitted(slots.rows(to_fit))
        before = prefix_scores(judged)[-1]
        after = before if temperatures is None else prefix_scores(judged, temperatures)[-1]
        charts.append(draw(reliability(draft, before, after)))
        rows += _rows(draft, source, judged, temperatures)
    return [Section(f"Confidence at temperature {temperature:g}", _NOTE, charts, _HEAD, rows)] if rows else []


def _fitted(slots: Slots) -> tuple[float, ...] | None:
    """Temperatures, or None for too few rounds: the section then says "before" only."""
    try:
        return fit_temperatures(slots)
    except DataError:
        return None


def _rows(draft: str, source: str, slots: Slots, temperatures: tuple[float, ...] | None) -> list[list[str]]:
    """A line over all slots, with intervals, and one for each slot."""
    before = prefix_scores(slots)
    after: Sequence[Score | None] = [None] * len(before)
    if temperatures is not None:
        after = prefix_scores(slots, temperatures)
    conditional = conditional_scores(slots, temperatures)
    intervals = ece_intervals(slots, temperatures or (1.0,) * slots.logits.shape[1])
    rows = []
    for index, (old, new, step) in enumerate(zip(before, after, conditional, strict=True)):
        is_last = index == len(before) - 1
        values: list[tuple[float | None, str | None]] = [
            (old.ece, "ece_before"),
            (None if new is None else new.ece, "ece_after"),
            (old.auc if new is None else new.auc, "auc"),
            (old.brier, None),
            (None if new is None else new.brier, None),
            (step.brier, None),
        ]
        cells = [_cell(value, intervals[name] if name is not None and is_last else None) for value, name in values]
        rows.append([draft, source, "all" if is_last else str(index + 1), *cells, str(old.number)])
    return [rows[-1], *rows[:-1]]


def _cell(value: float | None, interval: Interval | None) -> str:
    text = _number(value, 3)
    return text if value is None or interval is None else f"{text} {_range(interval, 3)}"


def load_sections(loads: Sequence[LoadRow], gains: Sequence[GainRow], tokens: int) -> list[Section]:
    """Schedules with several requests in flight, and what the throughput schedule gains; none where nothing was played.

    Args:
        loads: of one draft at one temperature.
        gains: likewise.
        tokens: new tokens of every answer.
    """
    if not loads:
        return []
    of = f"{loads[0].draft}, temperature {loads[0].temperature:g}"
    ways = list(dict.fromkeys(row.schedule for row in loads))
    note = (
        f"{of}. Tokens per second of all requests, prefill excluded: decoded for real, all schedules in turn round by "
        f"round on the same prompts, answers of {tokens} tokens without stop tokens; simulated on the cost curve from "
        "the rounds of full verification, on the same prompts or, where nothing was decoded, on recorded ones drawn "
        "anew. Pace: how many times as long as in the profile its own rounds took, in turn with the others; simulated "
        "times are lengthened by it. Medians over repeats with prompts of their own (off by: of each repeat's ratio); "
        "the intervals hold the median with 95 %, six repeats at least. "
        f"{'; '.join(f'{way}: {WORDS[way]}' for way in ways)}."
    )
    speeds = [
        [
            str(row.requests),
            row.schedule,
            _number(row.throughput, 1),
            _range(row.throughput_ci95, 1),
            _number(row.simulated_throughput, 1),
            _range(row.simulated_throughput_ci95, 1),
            ABSENT if row.off is None else f"{row.off:+.1%}",
            ABSENT if row.pace is None else f"{row.pace:.2f}",
            f"{row.budget:.2f}",
        ]
        for row in loads
    ]
    sections = [Section("Schedules under load", note, [draw(_speed_chart(loads))], _LOAD_HEAD, speeds)]
    if gains:
        cells = [
            [
                str(row.requests),
                row.over,
                _number(row.gain, 3, "x"),
                _range(row.gain_ci95, 3),
                _number(row.simulated_gain, 3, "x"),
                _range(row.simulated_gain_ci95, 3),
            ]
            for row in gains
        ]
        charts = [draw(_gain_chart(gains, is_measured)) for is_measured in (True, False)]
        note = f"{of}. Tokens per second of the throughput schedule over those of the others, repeat by repeat."
        sections.append(Section("Gain of the throughput schedule", note, charts, _GAIN_HEAD, cells))
    return sections


def load_table(loads: Sequence[LoadRow]) -> Table:
    """Tokens per second of all requests under each schedule, a line for each load; * where it was only simulated."""
    ways = list(dict.fromkeys(row.schedule for row in loads))
    groups: dict[tuple[str, float, int], dict[str, LoadRow]] = {}
    for row in loads:
        groups.setdefault((row.draft, row.temperature, row.requests), {})[row.schedule] = row
    table = Table(title="tokens per second of all requests (*: simulated on the cost curve, not decoded)")
    for name in ("draft", "T", "requests", *ways):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for (draft, temperature, requests), by_way in groups.items():
        table.add_row(draft, f"{temperature:g}", str(requests), *(_speed(by_way.get(way)) for way in ways))
    return table


def _speed(row: LoadRow | None) -> str:
    if row is None:
        return ABSENT
    return f"{row.simulated_throughput:,.1f}*" if row.throughput is None else f"{row.throughput:,.1f}"


def _speed_chart(loads: Sequence[LoadRow]) -> Chart:
    def series(way: str, style: int) -> Series:
        rows = [row for row in loads if row.schedule == way]
        points = [(math.log2(row.requests), row.simulated_throughput) for row in rows]
        return Series(way, style, points, [row.simulated_throughput_ci95 for row in rows])

    lines = [series(way, style) for style, way in enumerate(dict.fromkeys(row.schedule for row in loads))]
    return Chart("Throughput, simulated", lines, "log2 of requests in flight", "tokens per second of all requests")


def _gain_chart(gains: Sequence[GainRow], is_measured: bool) -> Chart:
    def series(over: str, style: int) -> Series:
        rows = [row for row in gains if row.over == over and (row.gain is not None or not is_measured)]
        points = [(math.log2(row.requests), row.gain if is_measured else row.simulated_gain) for row in rows]
        intervals = [row.gain_ci95 if is_measured else row.simulated_gain_ci95 for row in rows]
        return Series(f"over {over}", style, points, intervals)

    # Over plain decoding the gain is many times that over other schedules, and would flatten their lines.
    others = [over for over in dict.fromkeys(row.over for row in gains) if over != "autoregressive"]
    lines = [series(over, style) for style, over in enumerate(others)]
    title = f"Gain, {'measured' if is_measured else 'simulated'}"
    return Chart(title, lines, "log2 of requests in flight", "tokens per second over those of others")


def _number(value: float | None, digits: int, suffix: str = "") -> str:
    return ABSENT if value is None else f"{value:.{digits}f}{suffix}"


def _range(interval: Interval | None, digits: int) -> str:
    return ABSENT if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
