"""The report as one self-contained page: tables, charts, coloured examples and how everything was made.

The page loads nothing: CSS and SVG are inside, there is no script, and its content security policy forbids requests.
Every part whose data is missing is left out. The layout is in report.html.j2; this module turns rows into what it
shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deepspec.evaluation import report_parts as parts
from deepspec.evaluation.details import Details
from deepspec.evaluation.report import (
    AUTOREGRESSIVE,
    COLUMNS,
    ResultRow,
    common_ending,
    describe_conditions,
    flatten,
    row_flags,
    sort_rows,
)
from deepspec.evaluation.round_table import Rounds
from deepspec.files import write_atomically

REPORT_FILE = "report.html"
RoundsKey = parts.RoundsKey


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


class Section(NamedTuple):
    """A part of the page that another module fills.

    Attributes:
        title: heading.
        note: what it shows.
        charts: SVG texts.
        head: column names of its table.
        rows: cells.
    """

    title: str
    note: str
    charts: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class ReportInput(NamedTuple):
    """All that the page can show; everything but rows and provenance may be empty.

    Attributes:
        rows: rows of results.json.
        provenance: how they were made, nested as in results.json.
        rounds_by: rounds by (task, draft, temperature): adds intervals per position to the charts of each task.
        details: domains, paired differences, context and block lengths.
        curves: lines of metrics.jsonl by draft: "step", "loss" and "eval/acceptance_length" are drawn.
        examples: coloured answers.
        next_commands: (command, what it does).
        title: heading of the page.
        sections: further parts, after acceptance per position.
    """

    rows: Sequence[ResultRow]
    provenance: Mapping[str, Any]
    rounds_by: Mapping[RoundsKey, Rounds] = {}
    details: Details = Details()
    curves: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    examples: Sequence[Example] = ()
    next_commands: Sequence[tuple[str, str]] = ()
    title: str = "Speculative decoding, measured"
    sections: Sequence[Section] = ()


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
    rows, details = sort_rows(content.rows), content.details
    drafts = _draft_styles(content)
    return environment.get_template("report.html.j2").render(
        title=content.title,
        ending=ending,
        min_rounds=parts.MIN_ROUNDS,
        conditions=describe_conditions(rows, content.provenance),
        summary=parts.tiles(details.domains),
        flags=[flag for row in rows for flag in row_flags(row)],
        columns=[(name, unit) for name, unit in COLUMNS],
        table=parts.headline(rows),
        tau_charts=_safe(parts.tau_charts(rows, drafts)),
        domains=parts.domain_table(details.domains),
        pairs=parts.pair_table(details.pairs),
        contexts=parts.context_table(details.contexts),
        domain_charts=_safe(parts.domain_charts(details.domains, drafts)),
        acceptance_charts=_safe(parts.acceptance_charts(rows, drafts, content.rounds_by)),
        length_charts=_safe(parts.length_charts(details.lengths, drafts)),
        lengths=parts.length_table(details.lengths),
        latency_charts=_safe(parts.latency_charts(rows)),
        latency=parts.latency_table(rows),
        sections=[part._replace(charts=_safe(part.charts)) for part in content.sections],
        curve_charts=_safe(parts.curve_charts(content.curves, drafts)),
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
            details=content.details.renamed(lambda draft: draft.removesuffix(ending)),
            curves={draft.removesuffix(ending): lines for draft, lines in content.curves.items()},
            examples=[example._replace(draft=example.draft.removesuffix(ending)) for example in content.examples],
        ),
        ending,
    )


def _draft_styles(content: ReportInput) -> dict[str, int]:
    """One style per draft for the whole page, by first appearance."""
    names = [row.draft for row in content.rows if row.algorithm != AUTOREGRESSIVE]
    return {name: index for index, name in enumerate(dict.fromkeys([*names, *content.curves]))}
