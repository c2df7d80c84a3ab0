"""`deepspec calibrate`: fit temperatures on half of the conversations, report on the other half, store them.

The fitting is in calibration.py; this module reads, reports and writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from deepspec import console
from deepspec.errors import DataError
from deepspec.evaluation.answers import weights_id
from deepspec.evaluation.charts import Series
from deepspec.interop.folder import draft_folder
from deepspec.runtime import provenance
from deepspec.scheduling.calibration import (
    Calibration,
    before_and_after,
    fit_temperatures,
    split,
    write_calibration,
)
from deepspec.scheduling.confidence import (
    Score,
    auc,
    calibration_error,
    conditional_scores,
    interval,
    prefix_scores,
    survivals,
)
from deepspec.scheduling.pages import Chart, Page, write_page
from deepspec.scheduling.records import (
    Recorded,
    Slots,
    full_only,
    one_draft,
    read_records,
    samplings_of,
    slots_of,
    source_of,
)
from deepspec.scheduling.settings import CalibrateConfig

_HEAD = ["rounds of", "slot", "ECE before", "ECE after", "AUC", "Brier before", "Brier after", "labels"]


def run_calibration(config: CalibrateConfig) -> Calibration:
    """Fit, report and store the temperatures of one draft.

    Raises:
        DataError: the records hold another draft or other weights of it, were cut by a schedule, or are too few.
    """
    records = full_only(read_records(config.records, config.draft))
    name = one_draft(records)
    folder = Path(config.output_dir) if config.output_dir else _checked_folder(records[0], name)
    source = source_of(records, config.confidence)
    slots = slots_of(records, source)
    to_fit, held_out = split(slots)
    if not held_out.any():
        raise DataError(
            f"{name} has rounds of one conversation only; half of the conversations are kept for the report. "
            "Evaluate at least two prompts, better some hundred."
        )
    fitted, reported = slots.rows(to_fit), slots.rows(held_out)
    temperatures = fit_temperatures(fitted)
    made_with = {
        **provenance(),
        "records": list(config.records),
        "sampling": samplings_of(records),
    }
    details: dict[str, Any] = {
        "fitted_to": {"rounds": len(fitted.logits), "prompts": len(np.unique(fitted.prompts))},
        "held_out": before_and_after(reported, temperatures),
        "held_out_by_domain": {
            domain: before_and_after(part, temperatures) for domain, part in by_domain(reported).items()
        },
        "held_out_intervals": ece_intervals(reported, temperatures),
        "made_with": made_with,
    }
    # What a reader will find: JSON knows no tuples.
    details = json.loads(json.dumps(details))
    calibration = Calibration(source=source, temperatures=temperatures, weights=records[0].weights, details=details)
    own, theirs = write_calibration(folder, calibration, ", ".join(sorted({one.task for one in records})))
    console.table(_table(name, source, reported, temperatures))
    low, high = details["held_out_intervals"]["auc"] or (float("nan"),) * 2
    console.info(f"AUC 95 % interval over conversations: [{low:.3f}, {high:.3f}]")
    console.info(
        f"temperatures: {', '.join(f'{value:.2f}' for value in temperatures)}   stored: {own}   SGLang: {theirs}"
    )
    write_page(folder, f"calibration_{source}_report", _page(name, source, reported, temperatures, details), details)
    return calibration


def _checked_folder(record: Recorded, name: str) -> Path:
    """The draft's folder; refused where it holds other weights now, beside which the temperatures would mislead."""
    folder = draft_folder(record.draft_path)
    if weights_id(folder) != record.weights:
        raise DataError(
            f"{folder} holds other weights now than those that the rounds of {name} were recorded with: training went "
            "on, or the folder was written anew. Evaluate the draft as it is now into another output_dir, or store the "
            "temperatures elsewhere (output_dir=FOLDER)."
        )
    return folder


def by_domain(slots: Slots) -> dict[str, Slots]:
    """The rounds of each domain."""
    domains = np.array(slots.domains)
    return {str(name): slots.rows(domains[slots.prompts] == name) for name in sorted(set(slots.domains))}


def ece_intervals(slots: Slots, temperatures: Sequence[float]) -> dict[str, tuple[float, float] | None]:
    """95 % intervals over conversations of the calibration error before and after, and of the AUC."""

    def error(given: Sequence[float] | None, rows: Slots) -> float:
        predicted = survivals(rows.logits, given)[rows.labelled]
        return calibration_error(predicted, rows.accepted[rows.labelled])

    def ranking(rows: Slots) -> float | None:
        return auc(survivals(rows.logits, temperatures)[rows.labelled], rows.accepted[rows.labelled])

    return {
        "ece_before": interval(slots, lambda rows: error(None, rows)),
        "ece_after": interval(slots, lambda rows: error(temperatures, rows)),
        "auc": interval(slots, ranking),
    }


def score_rows(label: str, before: Sequence[Score], after: Sequence[Score]) -> list[list[str]]:
    """Cells of a table: one row a slot, the last for all of them."""
    rows = []
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        slot = "all" if index == len(before) - 1 else str(index + 1)
        numbers = (one.ece, other.ece, other.auc, one.brier, other.brier)
        rows.append([label, slot, *("-" if v is None else f"{v:.3f}" for v in numbers), str(one.number)])
    return rows


def _all_rows(slots: Slots, temperatures: Sequence[float]) -> list[list[str]]:
    rows = score_rows("all domains", prefix_scores(slots), prefix_scores(slots, temperatures))
    parts = by_domain(slots)
    for domain, part in parts.items() if len(parts) > 1 else ():
        rows += score_rows(domain, prefix_scores(part), prefix_scores(part, temperatures))[-1:]
    return rows


def _table(name: str, source: str, slots: Slots, temperatures: Sequence[float]) -> Table:
    table = Table(
        title=f"Confidence of {name} ({source}) on conversations that were not fitted to",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        show_edge=False,
    )
    for index, head in enumerate(_HEAD):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in _all_rows(slots, temperatures):
        table.add_row(*row)
    return table


def reliability(title: str, before: Score, after: Score) -> Chart:
    """The reliability diagram of a_k before and after calibration."""
    series = [
        Series(label, style, [(one.predicted, one.observed) for one in found.bins])
        for style, (label, found) in enumerate((("before", before), ("after", after)))
    ]
    return Chart(title, series, "predicted survival", "share accepted", True, True)


def _page(name: str, source: str, slots: Slots, temperatures: Sequence[float], details: dict[str, Any]) -> Page:
    before, after = prefix_scores(slots), prefix_scores(slots, temperatures)
    charts = [reliability("All slots", before[-1], after[-1])]
    charts += [reliability(f"Slot {k + 1}", before[k], after[k]) for k in range(len(before) - 1)]
    conditional = score_rows("all domains", conditional_scores(slots), conditional_scores(slots, temperatures))
    truth = "measured alpha_k" if np.isfinite(slots.overlap[slots.labelled]).all() else "acceptance"
    return Page(
        title=f"Confidence of {name}, before and after calibration",
        conditions=f"source {source}; fitted to {details['fitted_to']['rounds']} rounds, reported on "
        f"{details['held_out']['rounds']} rounds of other conversations",
        notes=[
            "Predicted survival of a slot: the product of the confidences up to it. Expected calibration error (ECE) "
            "over 15 bins; AUC: how well survivals rank; Brier: mean squared error.",
            f"Temperatures: {', '.join(f'{value:.2f}' for value in temperatures)}.",
        ],
        charts=charts,
        tables=[
            ("Survival a_k against accepted prefixes", _HEAD, _all_rows(slots, temperatures)),
            (f"Confidence c_k against {truth}, slots that were reached", _HEAD, conditional),
        ],
        provenance=details["made_with"],
    )
