"""Schedules in the real batched decoder against what the simulator predicts of them, on the embedded target.

    python -m benchmarks.simulator DRAFT [--batches 1 4 8 16] [--repeats 6] [--temperature 1.0] [--work FOLDER] [--tiny]

Plays the steps of docs/scheduling.md with a draft of SmolLM2-135M, such as the quickstart's: decodes held-out prompts
in full, calibrates the confidences, profiles target and draft, and lets the evaluation compare the schedules under
load. All schedules take turns round by round, rounds of the profile among them, which say how fast the machine is
meanwhile; medians over repeats count. About half an hour on two cores; with --work a killed run continues there,
and the evaluation's page stays.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import results_folder, write_result
from deepspec.algorithms.checkpoint import algorithm_of, read_config
from deepspec.config import compose_eval, compose_job, quoted
from deepspec.evaluation.details import Details, GainRow, LoadRow
from deepspec.evaluation.evaluator import evaluate
from deepspec.scheduling.calibrate import run_calibration
from deepspec.scheduling.cost import read_curve
from deepspec.scheduling.profile import run_profile
from deepspec.scheduling.settings import CalibrateConfig, ProfileConfig

GOAL = 0.10
TARGET = ("target=smollm2_135m",)
TASK = ("task=held_out",)


def main(arguments: Sequence[str] | None = None) -> None:
    run(parse(arguments), TARGET, TASK)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="folder of a draft of SmolLM2-135M, such as the quickstart's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--simulated", type=int, nargs="+", default=[32])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=24, help="of the profile")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of every answer")
    parser.add_argument("--prompts", type=int, default=96, help="prompts of the evaluation")
    parser.add_argument("--work", type=Path, default=None, help="folder in which a killed run continues")
    parser.add_argument("--tiny", action="store_true", help="few prompts, no calibration: shows that it runs")
    parser.add_argument("--results")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.batches, chosen.simulated, chosen.repeats, chosen.tokens, chosen.prompts = [1, 2], [4], 2, 8, 4
        chosen.turns = 2
    return chosen


def run(chosen: argparse.Namespace, target: Sequence[str], task: Sequence[str]) -> None:
    """Play all steps on a target and a task, given as words of the command line, and write the result."""
    work = chosen.work or Path(tempfile.mkdtemp(prefix="deepspec-simulator-"))
    evaluation = [
        *target,
        *task,
        f"limit={chosen.prompts}",
        f"drafts=[{quoted(chosen.draft)}]",
        f"output_dir={quoted(work / 'eval')}",
        f"sampling.temperature={chosen.temperature}",
        f"max_new_tokens={chosen.tokens}",
        "latency_prompts=0",
        "device=cpu",
    ]
    evaluate(compose_eval(evaluation))
    confidence = "Confidence was not calibrated: too few prompts."
    if not chosen.tiny:
        words = [f"records=[{quoted(work / 'eval')}]", f"output_dir={quoted(work / 'calibration')}"]
        confidence = confidence_words(run_calibration(compose_job("calibrate", CalibrateConfig, words)).details)
    # A curve of an older version knows no rounds.
    if not (work / "curve.json").is_file() or not read_curve(work / "curve.json").rounds:
        run_profile(profile_config(chosen, target, work / "curve.json"))
    evaluation += [
        f"load.curve={quoted(work / 'curve.json')}",
        f"load.batches={chosen.batches}",
        f"load.simulated={chosen.simulated}",
        "load.schedules=[autoregressive,full,fixed,threshold,throughput,asynchronous]",
        f"load.repeats={chosen.repeats}",
        f"load.max_new_tokens={chosen.tokens}",
        f"load.calibration={'none' if chosen.tiny else quoted(work / 'calibration')}",
    ]
    found = evaluate(compose_eval(evaluation))
    assert found is not None, "this is the main process"
    path = write_result(
        "simulator",
        "Schedules, measured and simulated",
        report(found.results.details, confidence, chosen),
        torch.device("cpu"),
        folder=results_folder(chosen),
    )
    print(path)


def profile_config(chosen: argparse.Namespace, target: Sequence[str], output: Path) -> ProfileConfig:
    most = max(chosen.batches) * (1 + algorithm_of(read_config(chosen.draft)).num_draft_tokens)
    tokens = sorted({1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, most, *chosen.batches})
    requests = sorted({1, 2, *chosen.batches})
    words = [
        *target,
        f"draft={quoted(chosen.draft)}",
        f"tokens={[one for one in tokens if one <= most]}",
        "contexts=[96]",
        f"draft_requests={requests}",
        f"temperature={chosen.temperature}",
        f"repeats={chosen.turns}",
        "device=cpu",
        f"output={quoted(output)}",
    ]
    return compose_job("profile", ProfileConfig, words)


def report(details: Details, confidence: str, chosen: argparse.Namespace) -> str:
    return "\n\n".join(
        [
            confidence,
            loads_table(details.loads),
            pace_words(details.loads),
            gains_table(details.gains),
            f"Held-out prompts, answers of {chosen.tokens} tokens, stop tokens off, temperature "
            f"{chosen.temperature:g}; medians of {chosen.repeats} repeats with prompts of their own (four prompts at "
            "least, in batches one after the other), all schedules in turn round by round on the same prompts; tokens "
            f"per second of the rounds, prefill excluded, on {torch.get_num_threads()} threads. Predictions replay the "
            "rounds of full verification on the cost curve that was measured before on random tokens "
            f"({chosen.turns} turns); "
            "numbers of requests without a measurement are simulated from recorded conversations. Off by: median over "
            "repeats of predicted over measured on the same prompts. Brackets: 95 % of the median. Goal: predictions "
            f"within {GOAL:.0%}.",
        ]
    )


def pace_words(rows: Sequence[LoadRow]) -> str:
    """How fast the machine was while it decoded, and what the predictions would be without counting that."""
    paces = {row.requests: row.pace for row in rows if row.pace is not None}
    raw = [abs((1 + row.off) * (row.pace or 1.0) - 1) for row in rows if row.off is not None]
    found = ", ".join(f"{pace:.2f} at {requests}" for requests, pace in paces.items())
    return (
        "Pace: rounds of the profile, of every kind, played again in turn with the schedules, took so many times as "
        f"long as in the profile: {found}. Predicted times are lengthened by it, repeat by repeat; without that the "
        f"largest difference were {max(raw):.1%}, and {sum(one <= GOAL for one in raw)} of {len(raw)} within the goal."
    )


def confidence_words(details: dict[str, Any]) -> str:
    held_out, intervals = details["held_out"], details["held_out_intervals"]

    def words(value: float | None, key: str) -> str:
        found = intervals[key]
        return f"{value or 0:.3f}" + ("" if found is None else f" [{found[0]:.3f}, {found[1]:.3f}]")

    before, after = held_out["before"], held_out["after"]
    return (
        f"Confidence on {held_out['rounds']} rounds of {held_out['prompts']} conversations that were not fitted to: "
        f"ECE before {words(before['ece'], 'ece_before')}, after {words(after['ece'], 'ece_after')}, AUC "
        f"{words(after['auc'], 'auc')}."
    )


def loads_table(rows: Sequence[LoadRow]) -> str:
    lines = [
        "| requests | schedule | measured tok/s | predicted tok/s | off by | draft tokens verified |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    worst = 0.0
    for row in rows:
        worst = max(worst, abs(row.off or 0.0))
        cells = [
            f"{row.requests}",
            row.schedule,
            with_interval(row.throughput, row.throughput_ci95, 1),
            with_interval(row.simulated_throughput, row.simulated_throughput_ci95, 1),
            off_words(row),
            f"{row.budget:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    verdict = "kept" if worst <= GOAL else "missed"
    return "\n".join([*lines, "", f"Largest difference {worst:.1%}: the goal of {GOAL:.0%} is {verdict}."])


def off_words(row: LoadRow) -> str:
    if row.off is None:
        return "-"
    return f"{row.off:+.1%}" + ("" if row.off_ci95 is None else " [{:+.1%}, {:+.1%}]".format(*row.off_ci95))


def gains_table(rows: Sequence[GainRow]) -> str:
    lines = ["| requests | throughput over | measured | simulated |", "| ---: | --- | ---: | ---: |"]
    for row in rows:
        measured = with_interval(row.gain, row.gain_ci95, 2, "x")
        simulated = with_interval(row.simulated_gain, row.simulated_gain_ci95, 2, "x")
        lines.append(f"| {row.requests} | {row.over} | {measured} | {simulated} |")
    return "\n".join(lines)


def with_interval(value: float | None, interval: tuple[float, float] | None, digits: int, suffix: str = "") -> str:
    if value is None:
        return "-"
    found = "" if interval is None else f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
    return f"{value:.{digits}f}{suffix}{found}"


if __name__ == "__main__":
    main()
