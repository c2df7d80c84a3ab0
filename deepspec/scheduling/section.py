"""The part of an evaluation's page that judges confidences: how far they mean what they say, before and after STS.

Temperatures are fitted to half of the conversations and judged on the other half; nothing is stored.
"""

from __future__ import annotations

from pathlib import Path

from deepspec.errors import DataError
from deepspec.evaluation.report_html import Section
from deepspec.scheduling.calibrate import ece_intervals, reliability
from deepspec.scheduling.calibration import fit_temperatures, split
from deepspec.scheduling.confidence import conditional_scores, prefix_scores
from deepspec.scheduling.pages import draw
from deepspec.scheduling.records import Recorded, Slots, read_records, slots_of, source_of

_NOTE = (
    "A draft's confidence c_k predicts that slot k is accepted given that all before it were; their products are "
    "compared with what was accepted, on half of the conversations. Before: as the draft says it (its head, or the "
    "largest probability of each slot where it has none). After: temperatures fitted to the other half. ECE: mean gap "
    "between prediction and frequency over 15 bins, AUC: how well the products rank, both with 95 % intervals over "
    "conversations. `deepspec calibrate` stores temperatures with a draft."
)
_HEAD = ["draft", "source", "ECE before", "ECE after", "AUC", "Brier before", "Brier after", "Brier of c_k", "rounds"]


def confidence_sections(folder: Path, temperature: float) -> list[Section]:
    """One section over all drafts of an evaluation, tasks together; none where no draft was measured.

    Args:
        folder: of an evaluation that verified all.
        temperature: for the heading.
    """
    try:
        records = read_records([str(folder)])
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
        rows.append([draft, source, *_cells(judged, temperatures)])
    return [Section(f"Confidence at temperature {temperature:g}", _NOTE, charts, _HEAD, rows)] if rows else []


def _fitted(slots: Slots) -> tuple[float, ...] | None:
    """Temperatures, or None for too few rounds: the section then says "before" only."""
    try:
        return fit_temperatures(slots)
    except DataError:
        return None


def _cells(slots: Slots, temperatures: tuple[float, ...] | None) -> list[str]:
    before = prefix_scores(slots)[-1]
    after = None if temperatures is None else prefix_scores(slots, temperatures)[-1]
    intervals = ece_intervals(slots, temperatures or (1.0,) * slots.logits.shape[1])

    def cell(value: float | None, name: str | None = None) -> str:
        if value is None:
            return "-"
        found = intervals[name] if name else None
        return f"{value:.3f}" + ("" if found is None else f" [{found[0]:.3f}, {found[1]:.3f}]")

    return [
        cell(before.ece, "ece_before"),
        cell(None if after is None else after.ece, "ece_after"),
        cell(before.auc if after is None else after.auc, "auc"),
        cell(before.brier),
        cell(None if after is None else after.brier),
        cell(conditional_scores(slots, temperatures)[-1].brier),
        str(len(slots.logits)),
    ]
