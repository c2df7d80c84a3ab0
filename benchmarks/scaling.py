"""How the time of our train step grows with anchors, sequence length, vocabulary and K, one at a time.

    python -m benchmarks.scaling [--tiny]

Seconds are fitted by x ** e; e = 1 is linear. Fixed costs (optimizer, overhead) push e below 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from benchmarks import cases
from benchmarks.train_step import Step


class Point(NamedTuple):
    """One size of a step."""

    anchors: int = 32
    answer: int = 300
    vocab: int = 8192
    num_draft_tokens: int = 7


SWEEPS = {
    "anchors": (16, 32, 64, 128),
    "answer": (150, 300, 600, 1200),
    "vocab": (8192, 16384, 49152, 151936),
    "num_draft_tokens": (3, 7, 15),
}
TINY_SWEEPS = {"anchors": (2, 4), "vocab": (320, 640)}
WORDS = {"anchors": "anchors", "answer": "answer tokens", "vocab": "vocabulary", "num_draft_tokens": "K"}
SEQUENCES = 4
# Longer steps vary little and are taken twice.
SLOW_SECONDS = 1.5


def measure(shape: cases.Shape, point: Point, repeats: int) -> tuple[int, float]:
    """Supervised positions and median seconds of a step."""
    target = cases.make_target(shape._replace(vocab=point.vocab))
    draft = cases.make_draft(target, num_draft_tokens=point.num_draft_tokens)
    step = Step(draft, [cases.make_batch(target, [point.answer] * SEQUENCES, point.anchors)], point.anchors)
    first = cases.seconds(step.ours, step.device)
    return step.positions, median(
        cases.seconds(step.ours, step.device) for _ in range(min(repeats, 2) if first > SLOW_SECONDS else repeats)
    )


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Slope of log(time) over log(size), by least squares."""
    xs, ys = [math.log(size) for size in sizes], [math.log(time) for time in times]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How the time of a train step grows with its sizes.")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", type=cases.Path, default=None, help="folder of the result file")
    chosen = parser.parse_args(arguments)
    shape, sweeps = (cases.TINY, TINY_SWEEPS) if chosen.tiny else (cases.SMOLLM2, SWEEPS)
    base, repeats = (Point(4, 20, 320), 1) if chosen.tiny else (Point(), 3)
    torch.set_num_threads(1)
    rows, slopes = [], []
    for field, values in sweeps.items():
        found = [measure(shape, base._replace(**{field: value}), repeats) for value in values]
        for value, (positions, time) in zip(values, found, strict=True):
            rows.append([f"{WORDS[field]} {value}", positions, f"{time:.3f}", f"{1e3 * time / positions:.3f}"])
        slopes.append([WORDS[field], f"{exponent(values, [time for _, time in found]):.2f}"])
        print(slopes[-1], rows[-len(values) :], flush=True)
    text = [
        f"One thread, bf16, {SEQUENCES} sequences, otherwise {base.anchors} anchors, answers of {base.answer} tokens, "
        f"vocabulary {base.vocab}, K {base.num_draft_tokens}, hidden size {shape.hidden}.",
        cases.table(["step", "positions", "seconds", "ms per position"], rows),
        "Exponents e of seconds ~ x ** e (no worse than linear: at most 1):",
        cases.table(["x", "e"], slopes),
    ]
    device = torch.device("cpu")
    print(
        cases.write_result(
            "scaling", "Scaling of the train step", "\n\n".join(text), device, folder=cases.results_folder(chosen)
        )
    )


if __name__ == "__main__":
    main()
