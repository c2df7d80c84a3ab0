"""What simulated runs say together: means, intervals, gains of one way over another, a page and a table.

The module simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from deepspec import console
from deepspec.evaluation.charts import Series
from deepspec.scheduling.pages import Chart, Page, write_page
from deepspec.scheduling.serving import Outcome

Interval = tuple[float, float]
Value = Callable[[Outcome], float]

WORDS = {
    "autoregressive": "no draft",
    "mtp1": "the draft's first token only (like a one-token MTP head, which it is not)",
    "full": "all draft tokens",
    "fixed": "the window that is best for the load, the same for every request",
    "threshold": "up to the first slot below the threshold",
    "throughput": "Algorithm 1, one budget for the batch",
    "asynchronous": "budget from two rounds ago",
    "oracle": "exactly what will be accepted: a bound, no decoder can know it",
}
"""What each way to decode is called on the page."""


class Point(NamedTuple):
    """One way at one place of an axis: the runs of all repeats.

    Attributes:
        way: one of WORDS.
        x: the load, or the threshold.
        runs: one a repeat.
    """

    way: str
    x: float
    runs: list[Outcome]

    def mean(self, of: Value) -> float:
        """Mean over runs."""
        return float(np.mean([of(run) for run in self.runs]))

    def interval(self, of: Value) -> Interval:
        """Range of the middle 95 % of the runs."""
        return _middle([of(run) for run in self.runs])


def gains(points: Sequence[Point], over: str, way: str = "throughput") -> dict[float, tuple[float, Interval]]:
    """Throughput of a way over that of another by load: mean ratio and interval, run by run on the same draws."""
    by_key = {(point.way, point.x): point for point in points}
    found = {}
    for name, load in by_key:
        other = by_key.get((over, load))
        if name != way or other is None:
            continue
        pairs = zip(by_key[name, load].runs, other.runs, strict=True)
        ratios = [mine.throughput / theirs.throughput for mine, theirs in pairs]
        found[load] = (float(np.mean(ratios)), _middle(ratios))
    return found


def _middle(values: Sequence[float]) -> Interval:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def _throughput(run: Outcome) -> float:
    return run.throughput


def _user_speed(run: Outcome) -> float:
    return run.user_speed


def _budget(run: Outcome) -> float:
    return run.budget


def _yield(run: Outcome) -> float:
    return run.verified_yield


class Report(NamedTuple):
    """Everything that a simulation shows.

    Attributes:
        conditions: one line.
        load_word: what the loads count.
        repeats: runs of each point.
        points: ways under loads.
        over_thresholds: the threshold schedule with other thresholds.
        threshold_load: the load of these.
        provenance: how it was made.
    """

    conditions: str
    load_word: str
    repeats: int
    points: Sequence[Point]
    over_thresholds: Sequence[Point]
    threshold_load: float
    provenance: Mapping[str, Any]

    def show(self, folder: Path) -> None:
        """Write simulation.json and simulation.html into a folder and print the table."""
        head, rows = self._table()
        page = Page(
            title="Schedules under load, simulated",
            conditions=self.conditions,
            notes=[
                "Time comes from the cost curve, acceptance from recorded rounds. Intervals: middle 95 % of "
                f"{self.repeats} runs, each with the recorded conversations drawn anew.",
                *(f"{way}: {WORDS[way]}." for way in self._ways()),
            ],
            charts=self._charts(),
            tables=[
                ("All runs", head, rows),
                ("Throughput schedule over others", [self.load_word, "over", "gain", "95 %"], self._gain_rows()),
            ],
            provenance=self.provenance,
        )
        numbers = {
            "points": [_numbers(point, "load") for point in self.points],
            "thresholds": [_numbers(point, "threshold") for point in self.over_thresholds],
            "threshold_load": self.threshold_load,
        }
        write_page(folder, "simulation", page, numbers)
        table = Table(title=f"Simulated: {self.conditions}", box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
        for index, name in enumerate(head):
            table.add_column(name, justify="left" if index == 1 else "right")
        for index, row in enumerate(rows):
            is_new = index == 0 or row[0] != rows[index - 1][0]
            if is_new and index:
                table.add_section()
            table.add_row(row[0] if is_new else "", *row[1:])
        console.table(table)

    def _ways(self) -> list[str]:
        return list(dict.fromkeys(point.way for point in self.points))

    def _table(self) -> tuple[list[str], list[list[str]]]:
        head = [self.load_word, "way", "tok/s", "95 %", "tok/s of a user", "budget", "yield"]
        rows = [
            [
                f"{point.x:g}",
                point.way,
                f"{point.mean(_throughput):.1f}",
                _range(point.interval(_throughput)),
                f"{point.mean(_user_speed):.1f}",
                f"{point.mean(_budget):.2f}",
                f"{point.mean(_yield):.1%}",
            ]
            for point in self.points
        ]
        return head, rows

    def _gain_rows(self) -> list[list[str]]:
        return [
            [f"{load:g}", over, f"{ratio:.3f}x", _range(interval, 3)]
            for over in ("autoregressive", "full", "fixed", "threshold")
            for load, (ratio, interval) in gains(self.points, over).items()
        ]

    def _charts(self) -> list[Chart]:
        log_word = f"log2 of {self.load_word}"
        speed_word = "tokens per second of all requests"

        def log_load(point: Point) -> float:
            return math.log2(point.x)

        def user(point: Point) -> float:
            return point.mean(_user_speed)

        def threshold(point: Point) -> float:
            return point.x

        budget_word, yield_word = "draft tokens verified per request and round", "(accepted + 1) / (verified + 1)"
        loads, cuts = self.points, self.over_thresholds
        at = f"{self.threshold_load:g} {self.load_word}"
        charts = [
            Chart(
                "Throughput against the speed of one user",
                _series(loads, user, _throughput),
                "tokens per second of one request",
                speed_word,
            ),
            Chart("Throughput", _series(loads, log_load, _throughput), log_word, speed_word),
            Chart("Verification budget", _series(loads, log_load, _budget), log_word, budget_word),
            Chart("Verified yield", _series(loads, log_load, _yield), log_word, yield_word, True),
        ]
        if cuts:
            label = f"confidence threshold, {at}"
            charts += [
                Chart("Verified yield against threshold", _series(cuts, threshold, _yield), label, yield_word, True),
                Chart("Throughput against threshold", _series(cuts, threshold, _throughput), label, speed_word),
            ]
        return charts


def _series(points: Sequence[Point], x: Callable[[Point], float], y: Value) -> list[Series]:
    """One line for each way."""
    lines = []
    for style, way in enumerate(dict.fromkeys(point.way for point in points)):
        mine = [point for point in points if point.way == way]
        values = [_finite(point.mean(y)) for point in mine]
        intervals = [None if value is None else point.interval(y) for point, value in zip(mine, values, strict=True)]
        lines.append(
            Series(way, style, [(x(point), value) for point, value in zip(mine, values, strict=True)], intervals)
        )
    return lines


def _numbers(point: Point, axis: str) -> dict[str, Any]:
    return {
        "way": point.way,
        axis: point.x,
        "throughput": point.mean(_throughput),
        "throughput_interval": point.interval(_throughput),
        "user_speed": _finite(point.mean(_user_speed)),
        "budget": point.mean(_budget),
        "verified_yield": point.mean(_yield),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _range(interval: Interval, digits: int = 1) -> str:
    return f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
