"""`deepspec sweep`: what a threshold, the number of draft tokens, or the draft's depth does to recorded rounds.

A block that was verified whole tells what every shorter verification of it would have accepted, so no model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from deepspec import console
from deepspec.algorithms.checkpoint import read_config
from deepspec.errors import ConfigError
from deepspec.evaluation.charts import Series
from deepspec.evaluation.report import common_ending
from deepspec.evaluation.statistics import emitted_within
from deepspec.runtime import provenance
from deepspec.scheduling.calibration import chosen_temperatures
from deepspec.scheduling.confidence import confidences
from deepspec.scheduling.cost import CostCurve, read_curve
from deepspec.scheduling.pages import Chart, Page, write_page
from deepspec.scheduling.records import Recorded, Slots, full_only, read_records, samplings_of, slots_of, source_of
from deepspec.scheduling.settings import SweepConfig

RESAMPLES = 1000
Interval = tuple[float, float]


class Line(NamedTuple):
    """One setting of a sweep.

    Attributes:
        draft: name of the draft.
        x: the setting: threshold, K or number of layers.
        kept: draft tokens verified per round.
        rejected: of them rejected.
        dropped: accepted ones among those that were not verified.
        tau: tokens per round.
        tau_interval: 95 % over conversations, None for fewer than two.
        verified_yield: (accepted + 1) / (verified + 1).
        ms_per_token: at batch 1, where a cost curve is given.
    """

    draft: str
    x: float
    kept: float
    rejected: float
    dropped: float
    tau: float
    tau_interval: Interval | None
    verified_yield: float
    ms_per_token: float | None


def run_sweep(config: SweepConfig) -> list[Line]:
    """Sweep, write sweep_<over>.json and .html, and print a table.

    Raises:
        DeepSpecError: the records cannot be used for this sweep.
    """
    records = full_only(read_records(config.records, config.draft))
    curve = None if config.curve is None else read_curve(config.curve)
    by_draft: dict[str, list[Recorded]] = {}
    for one in records:
        by_draft.setdefault(one.draft, []).append(one)
    lines: list[Line] = []
    for name, mine in by_draft.items():
        lines += _SWEEPS[config.over](name, mine, config, curve)
    if config.over == "depth" and len({line.x for line in lines}) < 2:
        raise ConfigError(
            f"records hold drafts of {lines[0].x:.0f} layers only ({', '.join(by_draft)}). A depth sweep compares "
            "drafts: train some with algorithm.num_layers=1,2,3,5 (python train.py -m ...) and evaluate them together."
        )
    _report(config, sorted(lines, key=lambda line: (line.draft, line.x)))
    return lines


def _threshold(name: str, records: list[Recorded], config: SweepConfig, curve: CostCurve | None) -> list[Line]:
    source = source_of(records, config.confidence)
    slots = slots_of(records, source)
    temperatures = chosen_temperatures(
        config.calibration, records[0].draft_path, source, records[0].weights, samplings_of(records)
    )
    found = confidences(slots.logits, temperatures)
    lines = []
    for threshold in config.thresholds:
        lengths = np.cumprod(found >= threshold, axis=1).sum(axis=1)
        lines.append(_line(name, threshold, slots, lengths, curve))
    return lines


def _k(name: str, records: list[Recorded], config: SweepConfig, curve: CostCurve | None) -> list[Line]:
    slots = slots_of(records, source_of(records, config.confidence))
    count, block = slots.logits.shape
    return [_line(name, k, slots, np.full(count, k), curve) for k in range(1, block + 1)]


def _depth(name: str, records: list[Recorded], config: SweepConfig, curve: CostCurve | None) -> list[Line]:
    slots = slots_of(records, source_of(records, config.confidence))
    layers = int(read_config(records[0].draft_path)["num_hidden_layers"])
    count, block = slots.logits.shape
    return [_line(name, layers, slots, np.full(count, block), curve)]


_SWEEPS: dict[str, Callable[[str, list[Recorded], SweepConfig, CostCurve | None], list[Line]]] = {
    "threshold": _threshold,
    "k": _k,
    "depth": _depth,
}


def _line(name: str, x: float, slots: Slots, lengths: Any, curve: CostCurve | None) -> Line:
    """What verification up to `lengths` [N] would have done to every round."""
    # An accepted stop token ends the block: nothing behind it is verified or counted.
    kept = np.minimum(lengths, slots.labelled.sum(axis=1))
    could = slots.accepted.sum(axis=1)
    accepted = np.minimum(could, kept)
    emitted = emitted_within(could, slots.emitted, kept)
    milliseconds = None
    if curve is not None:
        seconds = curve.draft_time(1) + np.array(
            [curve.beside_draft(1, 1 + int(n), 0, "even") for n in range(kept.max() + 1)]
        )
        milliseconds = float(1000 * seconds[kept].sum() / emitted.sum())
    return Line(
        draft=name,
        x=float(x),
        kept=float(kept.mean()),
        rejected=float((kept - accepted).mean()),
        dropped=float((could - accepted).mean()),
        tau=float(emitted.mean()),
        tau_interval=_interval(emitted, slots),
        verified_yield=float((accepted + 1).sum() / (kept + 1).sum()),
        ms_per_token=milliseconds,
    )


def _interval(emitted: Any, slots: Slots) -> Interval | None:
    """95 % bootstrap interval of the mean over conversations."""
    groups = np.unique(slots.prompts, return_inverse=True)[1]
    totals, counts = np.bincount(groups, emitted), np.bincount(groups)
    if len(counts) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    low, high = np.percentile(totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1), (2.5, 97.5))
    return float(low), float(high)


_X_LABELS = {
    "threshold": "confidence threshold",
    "k": "draft tokens verified per round (whole blocks are drafted)",
    "depth": "layers of the draft",
}


def _report(config: SweepConfig, lines: Sequence[Line]) -> None:
    drafts = list(dict.fromkeys(line.draft for line in lines))
    label = _X_LABELS[config.over]

    def series(value: Callable[[Line], float | None], has_intervals: bool = False) -> list[Series]:
        # Depth compares drafts with one point each: they form one line.
        groups = (
            {"drafts": list(lines)}
            if config.over == "depth"
            else {d: [x for x in lines if x.draft == d] for d in drafts}
        )
        return [
            Series(
                name,
                style,
                [(line.x, value(line)) for line in sorted(group, key=lambda line: line.x)],
                [line.tau_interval for line in sorted(group, key=lambda line: line.x)] if has_intervals else (),
            )
            for style, (name, group) in enumerate(groups.items())
        ]

    charts = [Chart("Tokens per round", series(lambda line: line.tau, True), label, "tau, bonus token included")]
    if config.over != "depth":
        charts += [
            Chart(
                "Verified yield",
                series(lambda line: line.verified_yield),
                label,
                "(accepted + 1) / (verified + 1)",
                True,
            ),
            Chart("Draft tokens kept", series(lambda line: line.kept), label, "draft tokens verified per round"),
            Chart("Rejected", series(lambda line: line.rejected), label, "verified and rejected per round"),
        ]
    if config.curve is not None:
        charts.append(Chart("Time a token", series(lambda line: line.ms_per_token), label, "ms per token at batch 1"))
    head = ["draft", label, "kept", "rejected", "accepted but cut off", "tau", "95 %", "verified yield", "ms/token"]
    ending = common_ending(drafts)
    rows = [
        [
            line.draft.removesuffix(ending),
            f"{line.x:g}",
            *(f"{value:.2f}" for value in (line.kept, line.rejected, line.dropped, line.tau)),
            "-" if line.tau_interval is None else f"[{line.tau_interval[0]:.2f}, {line.tau_interval[1]:.2f}]",
            f"{line.verified_yield:.1%}",
            "-" if line.ms_per_token is None else f"{line.ms_per_token:.1f}",
        ]
        for line in lines
    ]
    page = Page(
        title=f"Sweep over the {label}",
        conditions=f"records {', '.join(config.records)}",
        notes=[
            "Computed from rounds that were verified whole: a shorter verification accepts the same tokens up to its "
            "cut. The text of a real run goes other ways after a cut; its distribution does not change."
        ],
        charts=charts,
        tables=[("Numbers", head, rows)],
        provenance={**provenance(), "sweep": config.model_dump(mode="json")},
    )
    write_page(Path(config.output_dir), f"sweep_{config.over}", page, {"lines": [line._asdict() for line in lines]})
    table = Table(title=page.title, box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.table(table)
