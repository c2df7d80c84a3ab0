"""Schedules in the real batched decoder against what the simulator predicts of them, on the embedded target.

    python -m benchmarks.simulator DRAFT [--batches 1 4 8 16] [--repeats 3] [--temperature 1.0] [--tiny]

Measures the cost curve and the draft, decodes held-out prompts under every schedule in turn, simulates the same from
the rounds of full verification, and judges the confidences. Takes about 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.cases import results_folder, write_result
from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import load_draft, read_config
from deepspec.config import compose_data_job, compose_eval, compose_job
from deepspec.data.chat import render_prompt
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Confidence
from deepspec.evaluation.tasks import load_task
from deepspec.runtime import choose_device
from deepspec.scheduling.calibrate import ece_intervals
from deepspec.scheduling.calibration import fit_temperatures, split
from deepspec.scheduling.confidence import prefix_scores
from deepspec.scheduling.cost import CostCurve
from deepspec.scheduling.profile import measure
from deepspec.scheduling.records import Recorded, Slots, slots_of, source_of
from deepspec.scheduling.serving import Conversation, Load, Outcome, Way, conversations_of, simulate
from deepspec.scheduling.settings import ProfileConfig, SimulateConfig
from deepspec.scheduling.simulate import make_way
from deepspec.targets.base import Target

WAYS = ("autoregressive", "full", "fixed", "threshold", "throughput", "asynchronous")
GOAL = 0.10


class Run(NamedTuple):
    """One way at one batch size: measured and simulated tokens per second, one number a repeat."""

    way: str
    batch: int
    measured: list[float]
    simulated: list[float]
    budget: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="folder of a draft of SmolLM2-135M, such as the quickstart's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of every answer")
    parser.add_argument("--records", type=int, default=96, help="prompts decoded in full for calibration")
    parser.add_argument("--tiny", action="store_true", help="two prompts, few tokens: shows that it runs")
    parser.add_argument("--results")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.batches, chosen.repeats, chosen.tokens, chosen.records = [1, 2], 2, 8, 4
    target = Target.load(
        compose_data_job(["target=smollm2_135m"]).target,
        choose_device("cpu"),
        read_config(chosen.draft)["target_layer_ids"],
    )
    draft = load_draft(chosen.draft, target)
    # Answers of one length: what ends early would make the load of every repeat another one.
    target.stop_token_ids = ()
    write_result(
        "simulator",
        "Schedules, measured and simulated",
        report(target, draft, chosen),
        target.device,
        folder=results_folder(chosen),
    )


def report(target: Target, draft: DraftModel, chosen: argparse.Namespace) -> str:
    sampling = Sampling(temperature=chosen.temperature)
    requests = held_out(target, chosen.records + max(chosen.batches) * chosen.repeats)
    curve = measure(profile_config(chosen, draft), target, draft).curve
    console.info("decoding in full for calibration")
    recorded = recorded_of(decode(target, draft, None, requests[: chosen.records], sampling, chosen.tokens, 16))
    source = source_of([recorded], "auto")
    slots = slots_of([recorded], source)
    to_fit, rest = split(slots)
    temperatures = None if chosen.tiny else fit_temperatures(slots.rows(to_fit))
    confidence = Confidence(source, temperatures)
    measured_on = requests[chosen.records :]
    config = simulate_config(chosen)
    runs = []
    for batch in chosen.batches:
        runs += compare(target, draft, curve, confidence, config, measured_on, sampling, batch, chosen)
    return "\n\n".join(
        [
            confidence_words(slots.rows(rest), temperatures, source),
            table_of(runs),
            gains_of(runs),
            f"Answers of {chosen.tokens} tokens, stop tokens off, temperature {chosen.temperature:g}; {chosen.repeats} "
            "repeats with prompts of their own, all ways in turn on the same prompts; tokens per second of the rounds, "
            "prefill excluded. Predictions replay the rounds of full verification on the measured cost curve. Goal: "
            f"within {GOAL:.0%}.",
        ]
    )


def held_out(target: Target, count: int) -> list[Request]:
    """Prompts on topics that no training prompt has."""
    task = compose_eval(["target=smollm2_135m", "task=held_out", f"task.limit={count}"]).tasks[0]
    found = load_task(task)
    rendered = [
        render_prompt(target.tokenizer, [Message("user", one.turns[0])], enable_thinking=False) for one in found
    ]
    return [Request(one.id, ids) for one, ids in zip(found, rendered, strict=True)]


def profile_config(chosen: argparse.Namespace, draft: DraftModel) -> ProfileConfig:
    most = max(chosen.batches) * (draft.num_draft_tokens + 1)
    tokens = sorted({1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, most, *chosen.batches})
    batches = sorted({1, 2, *chosen.batches})
    return compose_job(
        "profile",
        ProfileConfig,
        [
            f"tokens=[{','.join(str(one) for one in tokens if one <= most)}]",
            "contexts=[96]",
            f"draft_requests=[{','.join(map(str, batches))}]",
            f"temperature={chosen.temperature}",
            f"repeats={2 if chosen.tiny else 7}",
            "device=cpu",
        ],
    )


def simulate_config(chosen: argparse.Namespace) -> SimulateConfig:
    return compose_job("simulate", SimulateConfig, ["records=[none]", "curve=none", "lookup=linear"])


def decode(
    target: Target,
    draft: DraftModel | None,
    schedule: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    tokens: int,
    batch: int,
) -> list[Finished]:
    found = generate(
        target, draft, requests, sampling, max_new_tokens=tokens, batch_size=batch, schedule=schedule, timers=False
    )
    return list(found)


def recorded_of(answers: Sequence[Finished]) -> Recorded:
    rounds = {answer.prompt_id: answer.rounds for answer in answers}
    domains = {name: name.split("/")[1] if name.count("/") > 1 else "" for name in rounds}
    return Recorded("held_out", "draft", "", "", domains, rounds, {})


def compare(
    target: Target,
    draft: DraftModel,
    curve: CostCurve,
    confidence: Confidence,
    config: SimulateConfig,
    requests: Sequence[Request],
    sampling: Sampling,
    batch: int,
    chosen: argparse.Namespace,
) -> list[Run]:
    """All ways in turn, repeat by repeat; every repeat has prompts of its own."""
    runs: dict[str, Run] = {}
    for repeat in range(chosen.repeats):
        console.info(f"batch {batch}, repeat {repeat + 1} of {chosen.repeats}")
        mine = requests[repeat * batch : (repeat + 1) * batch]
        whole = decode(target, draft, None, mine, sampling, chosen.tokens, batch)
        conversations = conversations_of([recorded_of(whole)])
        for name in WAYS:
            way = make_way(name, config, curve, confidence, conversations, batch)
            gc.collect()
            model = None if way.schedule is None else draft
            answers = decode(target, model, way.schedule, mine, sampling, chosen.tokens, batch)
            run = runs.setdefault(name, Run(name, batch, [], [], 0.0))
            run.measured.append(speed(answers))
            found = replayed(conversations, curve, way, batch, chosen.tokens)
            run.simulated.append(found.throughput)
            runs[name] = run._replace(budget=run.budget + found.budget / chosen.repeats)
    return list(runs.values())


def speed(answers: Sequence[Finished]) -> float:
    """Tokens per second of the rounds; all requests were admitted together, so the slowest took the whole time."""
    tokens = sum(one.emitted for answer in answers for one in answer.rounds)
    return tokens / max(answer.seconds for answer in answers)


def replayed(conversations: Sequence[Conversation], curve: CostCurve, way: Way, batch: int, tokens: int) -> Outcome:
    return simulate(conversations, curve, way, Load(batch, max_new_tokens=tokens, is_replay=True), 1, seed=0)


def confidence_words(slots: Slots, temperatures: tuple[float, ...] | None, source: str) -> str:
    before, after = prefix_scores(slots)[-1], prefix_scores(slots, temperatures)[-1]
    intervals = ece_intervals(slots, temperatures or (1.0,) * slots.logits.shape[1])

    def words(value: float | None, key: str) -> str:
        found = intervals[key]
        return f"{value or 0:.3f}" + ("" if found is None else f" [{found[0]:.3f}, {found[1]:.3f}]")

    return (
        f"Confidence ({source}), {len(slots.logits)} rounds of conversations that were not fitted to: ECE before "
        f"{words(before.ece, 'ece_before')}, after {words(after.ece, 'ece_after')}, AUC {words(after.auc, 'auc')}."
    )


def table_of(runs: Sequence[Run]) -> str:
    lines = [
        "| batch | schedule | measured tok/s | predicted tok/s | off by | draft tokens verified |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    worst = 0.0
    for run in runs:
        measured, simulated = float(np.mean(run.measured)), float(np.mean(run.simulated))
        off = simulated / measured - 1
        worst = max(worst, abs(off))
        spread = f"{measured:.1f} [{min(run.measured):.1f}, {max(run.measured):.1f}]"
        lines.append(f"| {run.batch} | {run.way} | {spread} | {simulated:.1f} | {off:+.1%} | {run.budget:.2f} |")
    verdict = "kept" if worst <= GOAL else "missed"
    return "\n".join([*lines, "", f"Largest difference {worst:.1%}: the goal of {GOAL:.0%} is {verdict}."])


def gains_of(runs: Sequence[Run]) -> str:
    """Throughput schedule over the others: mean of the paired ratios and their range over repeats."""
    by_key = {(run.batch, run.way): run for run in runs}
    lines = ["| batch | throughput over | measured | simulated |", "| ---: | --- | ---: | ---: |"]
    for batch in dict.fromkeys(run.batch for run in runs):
        mine = by_key[batch, "throughput"]
        for other in ("autoregressive", "full", "fixed", "threshold"):
            theirs = by_key[batch, other]
            cells = []
            for one, two in ((mine.measured, theirs.measured), (mine.simulated, theirs.simulated)):
                ratios = [a / b for a, b in zip(one, two, strict=True)]
                cells.append(f"{np.mean(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]")
            lines.append(f"| {batch} | {other} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
