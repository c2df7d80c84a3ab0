"""What an answers file holds, and what a training would make of it: lengths, shares, turns, truncation, padding.

The figures of a training come from its own loader over the first steps. The module knows no models.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from deepspec.config import DataConfig, OptimizerConfig
from deepspec.data.answer_rows import fit_sample
from deepspec.data.chat import TokenSample
from deepspec.data.kept_samples import SampleCounts
from deepspec.data.loader import BatchLimits, BatchLoader, distinct
from deepspec.data.packed import PackedSamples
from deepspec.data.prompts import read_rows
from deepspec.evaluation.charts import Bar, bar_chart, nice_ticks
from deepspec.files import write_atomically

# Padding differs little between steps, and each of them costs a copy of its tokens.
_MOST_STEPS = 16
_BINS = 14


class Turns(NamedTuple):
    """Generated turns of the rows of an answers file.

    Attributes:
        per_row: how many rows have so many.
        reasons: how many turns ended so.
    """

    per_row: Counter[int]
    reasons: Counter[str]


class Waste(NamedTuple):
    """Shares of a training's arithmetic that teach nothing.

    Attributes:
        padded_tokens: of the positions that the target and the draft run over.
        padded_anchors: of the blocks that the draft computes.
        steps: optimizer steps that this was measured over.
    """

    padded_tokens: float
    padded_anchors: float
    steps: int


class Statistics(NamedTuple):
    """Measured figures.

    Attributes:
        counts: rows and samples of the file at full length.
        lengths: [samples] tokens of each.
        answer_lengths: [samples] supervised tokens of each.
        turns: turns and how they ended.
        max_length: limit of the training.
        truncated: samples longer than it.
        lost_tokens: supervised tokens past the limit, or in samples that keep too few.
        dropped: samples that keep too few supervised tokens.
        waste: None where no sample is left.
    """

    counts: SampleCounts
    lengths: npt.NDArray[np.int64]
    answer_lengths: npt.NDArray[np.int64]
    turns: Turns
    max_length: int
    truncated: int
    lost_tokens: int
    dropped: int
    waste: Waste | None


def read_turns(path: Path) -> Turns:
    """Count the generated turns of an answers file; rows that are not readable are left out."""
    per_row: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for row in read_rows(path):
        if not isinstance(row.value, Mapping):
            continue
        ended = row.value.get("finish_reason")
        messages = row.value.get("messages")
        if isinstance(ended, list):
            per_row[len(ended)] += 1
            reasons.update(str(reason) for reason in ended)
        elif isinstance(messages, list):
            roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
            per_row[roles.count("assistant")] += 1
            reasons["not recorded"] += roles.count("assistant")
    return Turns(per_row, reasons)


def measure(
    samples: Sequence[TokenSample],
    counts: SampleCounts,
    turns: Turns,
    data: DataConfig,
    optimizer: OptimizerConfig,
    seed: int,
) -> Statistics:
    """Measure samples at full length against the limits of a training.

    Args:
        samples: all samples of the file.
        counts: what became of its rows.
        turns: of its rows.
        data: limits of the training.
        optimizer: sizes of its batches.
        seed: of its order.
    """
    fitting = (fit_sample(sample, data.max_length, data.min_answer_tokens) for sample in samples)
    kept = PackedSamples(sample for sample in fitting if sample is not None)
    answer_lengths = np.array([sum(sample.answer_mask) for sample in samples], dtype=np.int64)
    return Statistics(
        counts=counts,
        lengths=np.array([len(sample.input_ids) for sample in samples], dtype=np.int64),
        answer_lengths=answer_lengths,
        turns=turns,
        max_length=data.max_length,
        truncated=sum(len(sample.input_ids) > data.max_length for sample in samples),
        lost_tokens=int(answer_lengths.sum()) - sum(sum(sample.answer_mask) for sample in kept),
        dropped=len(samples) - len(kept),
        waste=_waste(kept, data, optimizer, seed) if kept else None,
    )


def _waste(samples: Sequence[TokenSample], data: DataConfig, optimizer: OptimizerConfig, seed: int) -> Waste:
    limits = BatchLimits(
        global_batch_size=optimizer.global_batch_size,
        micro_batch_size=optimizer.micro_batch_size,
        bucket_steps=data.bucket_steps,
        max_tokens=data.max_tokens_per_batch,
        max_anchors=data.max_anchors_per_batch,
    )
    loader = BatchLoader(samples, limits=limits, num_anchors=data.num_anchors, seed=seed, pad_token_id=0)
    steps = min(loader.steps_per_epoch, _MOST_STEPS)
    tokens = real_tokens = anchors = real_anchors = 0
    for step in itertools.islice(loader.steps(), steps):
        for batch in distinct(step.micro_batches):
            tokens += batch.input_ids.numel()
            real_tokens += int(batch.lengths.sum())
        for batch in step.micro_batches:
            anchors += batch.anchor_mask.numel()
            real_anchors += int(batch.anchor_mask.sum())
    return Waste(1 - real_tokens / max(tokens, 1), 1 - real_anchors / max(anchors, 1), steps)


def statistics_lines(found: Statistics) -> list[tuple[str, str]]:
    """Names and values, as the terminal and the page show them."""
    counts, total = found.counts, int(found.lengths.sum())
    turns = sum(found.turns.reasons.values())
    cut = found.turns.reasons["length"]
    lines = [
        ("rows", f"{counts.rows:,}, {counts.bad_rows:,} of them broken"),
        ("samples", f"{len(found.lengths):,}"),
        ("generated turns", f"{turns:,}, {turns / max(sum(found.turns.per_row.values()), 1):.2f} a row"),
        ("tokens", f"{total:,}"),
        ("supervised tokens", f"{found.answer_lengths.sum():,}, {found.answer_lengths.sum() / max(total, 1):.1%}"),
        ("length of a sample", _quantiles(found.lengths)),
        ("supervised of a sample", _quantiles(found.answer_lengths)),
        ("answers cut at max_new_tokens", f"{cut:,}, {cut / max(turns, 1):.1%}"),
        (
            f"longer than max_length {found.max_length:,}",
            f"{found.truncated:,} samples, {found.truncated / max(len(found.lengths), 1):.1%}",
        ),
        (
            "supervised tokens that the limits drop",
            f"{found.lost_tokens:,}, {found.lost_tokens / max(int(found.answer_lengths.sum()), 1):.1%}",
        ),
        ("samples with too few supervised tokens", f"{found.dropped:,}"),
    ]
    if found.waste is not None:
        lines += [
            ("padded positions", f"{found.waste.padded_tokens:.1%} of what is run, over {found.waste.steps} steps"),
            ("anchor rows without an anchor", f"{found.waste.padded_anchors:.1%} of what the draft computes"),
        ]
    return lines


def statistics_table(found: Statistics) -> Table:
    """The lines as a table for the terminal."""
    table = Table(show_header=False)
    for name, value in statistics_lines(found):
        table.add_row(name, value)
    return table


def write_page(path: Path, found: Statistics, answers: str) -> None:
    """Write one self-contained page with the figures and their histograms.

    Raises:
        OSError: the disk refuses it.
    """
    shares = 100 * found.answer_lengths / np.maximum(found.lengths, 1)
    charts = (
        _histogram(
            "Length of a sample", found.lengths, "samples by tokens", lambda low, high: f"{low:,.0f}-{high:,.0f}"
        ),
        _histogram(
            "Supervised tokens of a sample",
            found.answer_lengths,
            "samples by supervised tokens",
            lambda low, high: f"{low:,.0f}-{high:,.0f}",
        ),
        _histogram("Supervised share", shares, "samples by share", lambda low, high: f"{low:.0f}-{high:.0f} %"),
        _bars("Generated turns", {f"{turns}": count for turns, count in sorted(found.turns.per_row.items())}, "rows"),
        _bars("How turns ended", dict(found.turns.reasons.most_common()), "turns"),
    )
    environment = Environment(
        loader=PackageLoader("deepspec.data", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("stats.html.j2").render(
        answers=answers, lines=statistics_lines(found), charts=[Markup(chart) for chart in charts if chart]
    )
    write_atomically(path, [page])


def _quantiles(values: npt.NDArray[np.int64]) -> str:
    low, half, high = np.percentile(values, [5, 50, 95])
    return f"mean {values.mean():,.0f}, 5 % {low:,.0f}, median {half:,.0f}, 95 % {high:,.0f}, most {values.max():,}"


def _histogram(title: str, values: npt.NDArray[Any], unit: str, label: Callable[[float, float], str]) -> str:
    edges = nice_ticks(0.0, float(values.max()), _BINS)
    counted, _ = np.histogram(values, bins=edges)
    named = {
        label(low, high): int(count) for (low, high), count in zip(itertools.pairwise(edges), counted, strict=True)
    }
    return _bars(title, named, unit)


def _bars(title: str, counted: Mapping[str, int], unit: str) -> str:
    most: Iterable[int] = counted.values()
    bars = [Bar(name, [(unit, "s0", float(count))], f"{count:,}") for name, count in counted.items()]
    return bar_chart(title, bars, unit, float(max(most, default=0)))
