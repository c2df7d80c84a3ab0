"""What calibrate, simulate and sweep show: one self-contained page of charts and tables, and the same numbers as JSON.

The module knows layout, not meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deepspec import console
from deepspec.errors import DataError
from deepspec.evaluation.charts import Series, line_chart
from deepspec.evaluation.report import flatten
from deepspec.files import write_atomically, write_json


class Chart(NamedTuple):
    """A line chart; `is_share` shows y in per cent, `diagonal` adds the line y = x."""

    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    is_share: bool = False
    diagonal: bool = False


class Page(NamedTuple):
    """Everything that a page shows.

    Attributes:
        title: heading.
        conditions: one line under it.
        notes: paragraphs.
        charts: drawn in order.
        tables: (heading, column names, rows of cells).
        provenance: how it was made.
    """

    title: str
    conditions: str
    notes: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
    provenance: Mapping[str, Any]


def write_page(folder: Path, name: str, page: Page, numbers: Mapping[str, Any]) -> None:
    """Write `<name>.html` and `<name>.json` into a folder.

    Raises:
        DataError: the disk refuses them.
    """
    try:
        write_json(folder / f"{name}.json", {"schema": 1, "provenance": dict(page.provenance), **numbers})
        write_atomically(folder / f"{name}.html", [render(page)])
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}). Choose another output_dir.") from error
    console.info(f"numbers: {folder / name}.json   page: {folder / name}.html")


def render(page: Page) -> str:
    """The page as text."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("deepspec.scheduling", "."), PackageLoader("deepspec.evaluation", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = [Markup(drawn) for drawn in map(draw, page.charts) if drawn]
    template = environment.get_template("page.html.j2")
    return template.render(page=page, charts=charts, provenance=flatten(page.provenance))


def draw(chart: Chart) -> str:
    """One chart as SVG, an empty text where there is nothing to draw."""
    series = [
        line._replace(
            points=[(x, y) for x, y in line.points if math.isfinite(x)],
            intervals=[
                interval
                for (x, _), interval in zip(line.points, line.intervals or [None] * len(line.points), strict=True)
                if math.isfinite(x)
            ],
        )
        for line in chart.series
    ]
    if chart.diagonal:
        series.append(Series("perfect", len(series), [(0.0, 0.0), (1.0, 1.0)]))
    y_range = (0.0, 1.0) if chart.diagonal else None
    return line_chart(chart.title, series, chart.x_label, chart.y_label, y_range, chart.is_share)
