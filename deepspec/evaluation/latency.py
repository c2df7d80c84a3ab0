"""Latency at batch 1: the parts of a round from an instrumented pass, the real time a token from a second pass.

Drafts, shorter blocks and plain decoding take turns prompt by prompt, and the two passes round by round, so that a
machine that slows down slows all of them. The prefill is excluded. Every timing goes into a journal, from which all
numbers follow; prompts that are in it are not timed again. The module knows nothing of tasks or reports.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.data.journal import open_journal
from deepspec.decoding.decoder import Finished, Request, generate_by_round
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Schedule
from deepspec.evaluation.memory import PeakMemory
from deepspec.evaluation.report import AUTOREGRESSIVE
from deepspec.runtime import available_cpus, processor_name, thread_words
from deepspec.scheduling.schedules import schedule_id
from deepspec.targets.base import Target

_WARM_UP_TOKENS = 16


class Way(NamedTuple):
    """One way of decoding that is timed.

    Attributes:
        draft: name of the draft, `autoregressive` for plain decoding.
        length: most tokens of a block that are verified; None for what the draft's schedule says.
        weights: `weights_id` of the draft, "" for plain decoding.
        model: the draft, None for plain decoding.
        schedule: how blocks are cut; None verifies all.
    """

    draft: str
    length: int | None
    weights: str
    model: DraftModel | None
    schedule: Schedule | None

    @property
    def key(self) -> str:
        """Word for it in records."""
        return self.draft if self.length is None else f"{self.draft}:{self.length}"

    @property
    def identity(self) -> tuple[str, str]:
        """What its timings depend on: the weights and the schedule's content."""
        return self.weights, schedule_id(self.schedule)


class Latency(NamedTuple):
    """Timings of one way of decoding.

    Attributes:
        num_prompts: timed prompts.
        rounds: rounds of one pass over them.
        acceptance_length: tau of these prompts, which is that of L = (T_draft + T_verify) / tau.
        seconds_draft_per_round: T_draft, mean over the rounds of the instrumented pass.
        seconds_verify_per_round: T_verify, likewise.
        median_seconds_draft: median over the same rounds.
        median_seconds_verify: likewise.
        seconds_per_token: of the pass with timers off.
        speedup: plain decoding's seconds per token over these, median over prompts of the paired ratio.
        peak_memory_bytes: the most over the prompts, weights included; None where the system does not say.
    """

    num_prompts: int
    rounds: int
    acceptance_length: float
    seconds_draft_per_round: float
    seconds_verify_per_round: float
    median_seconds_draft: float
    median_seconds_verify: float
    seconds_per_token: float
    speedup: float
    peak_memory_bytes: int | None

    @property
    def overhead_per_round(self) -> float:
        """Seconds of a round of the pass without timers that T_draft and T_verify do not explain; may be negative."""
        parts = self.seconds_draft_per_round + self.seconds_verify_per_round
        return self.seconds_per_token * self.acceptance_length - parts

    def columns(self) -> dict[str, Any]:
        """The columns of a result row that are timings."""
        return {
            "tokens_per_second": 1.0 / self.seconds_per_token,
            "seconds_draft_per_round": self.seconds_draft_per_round,
            "seconds_verify_per_round": self.seconds_verify_per_round,
            "median_seconds_draft": self.median_seconds_draft,
            "median_seconds_verify": self.median_seconds_verify,
            "overhead_seconds_per_round": self.overhead_per_round,
            "seconds_per_token": self.seconds_per_token,
            "latency_acceptance_length": self.acceptance_length,
            "speedup_over_autoregressive": self.speedup,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


class Timing(NamedTuple):
    """One prompt decoded one way, as the journal keeps it.

    Attributes:
        rounds: (tokens emitted, seconds of the draft, seconds of the verification) of the instrumented pass.
        tokens: emitted by the rounds of the pass without timers.
        seconds: that pass took, prefill excluded.
        peak_memory_bytes: of both.
    """

    rounds: list[tuple[int, float, float]]
    tokens: int
    seconds: float
    peak_memory_bytes: int | None


def measure_latency(
    target: Target,
    ways: Sequence[Way],
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    path: Path,
    task: str,
) -> dict[str, Latency]:
    """Time every way on the same prompts, one request at a time.

    Args:
        target: the target.
        ways: plain decoding among them: it is the baseline.
        requests: prompts to time; none gives an empty result.
        sampling: warpers.
        max_new_tokens: per prompt.
        seed: of the draws.
        path: journal of the timings.
        task: word for the progress bar.

    Returns:
        Latency by `Way.key`; ways without a round are left out.

    Raises:
        DataError: the journal cannot be written, or is damaged.
    """
    if not requests:
        return {}
    machine = describe_machine(target.device)
    timed: dict[str, dict[str, Timing]] = {}
    with open_journal(path) as journal:
        for row in journal.rows:
            found = timings_of(row, {way.key: way.identity for way in ways}, machine)
            if found is not None:
                timed[row["request_id"]] = found
        left = [request for request in requests if request.prompt_id not in timed]
        with console.progress(
            f"{task}: latency at batch 1", total=len(requests), done=len(requests) - len(left)
        ) as bar:
            if left:
                for way in ways:
                    _decode_twice(target, way, left[0], sampling, min(_WARM_UP_TOKENS, max_new_tokens), seed)
            for request in left:
                found = {}
                for way in ways:
                    peak = PeakMemory(target.device)
                    passes = _decode_twice(target, way, request, sampling, max_new_tokens, seed)
                    found[way.key] = _timing(*passes, peak.read())
                journal.append(_to_row(request.prompt_id, machine, ways, found))
                timed[request.prompt_id] = found
                bar.advance(1)
    chosen = [timed[request.prompt_id] for request in requests]
    return latencies([way.key for way in ways], chosen)


def latencies(keys: Sequence[str], timed: Sequence[Mapping[str, Timing]]) -> dict[str, Latency]:
    """Put the timings of prompts together; a way without a round is left out.

    Args:
        keys: of the ways, `autoregressive` among them.
        timed: for each prompt the timing of every way.
    """
    baseline = [_seconds_per_token([one[AUTOREGRESSIVE]]) for one in timed]
    found = {key: _latency([one[key] for one in timed], baseline) for key in keys}
    return {key: latency for key, latency in found.items() if latency is not None}


def timings_of(
    row: Mapping[str, Any], identities: Mapping[str, tuple[str, str]], machine: str
) -> dict[str, Timing] | None:
    """The timings in a row of the journal; None where it lacks a way, or is of another identity or machine.

    Args:
        row: of the journal.
        identities: `Way.identity` of every way, by `Way.key`.
        machine: what they must have been measured on.
    """
    ways = row.get("ways", {})
    found = {key: (ways.get(key, {}).get("weights"), ways.get(key, {}).get("schedule_id", "")) for key in identities}
    if row.get("machine") != machine or found != identities:
        return None
    return {
        key: Timing(
            [tuple(one) for one in ways[key]["rounds"]],
            ways[key]["tokens"],
            ways[key]["seconds"],
            ways[key]["peak_memory_bytes"],
        )
        for key in identities
    }


def describe_machine(device: torch.device) -> str:
    """What timings of two processes must have in common to be comparable."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {available_cpus()} CPUs, {thread_words()}"


def _decode_twice(
    target: Target, way: Way, request: Request, sampling: Sampling, limit: int, seed: int
) -> tuple[Finished, Finished, float]:
    """The answers with and without timers, and the seconds of the rounds without; rounds of the two take turns."""
    options: dict[str, Any] = {"max_new_tokens": limit, "seed": seed, "schedule": way.schedule}
    turns = [
        generate_by_round(target, way.model, [request], sampling, timers=timers, **options) for timers in (True, False)
    ]
    finished, seconds, order = [next(prefill) for prefill in turns], [0.0, 0.0], (0, 1)
    while not all(finished):
        for which in order:
            begin = time.perf_counter()
            finished[which] = finished[which] or next(turns[which], [])
            seconds[which] += time.perf_counter() - begin
        # Which pass comes first alternates, so that neither always meets the warmer cache.
        order = order[::-1]
    return finished[0][0], finished[1][0], seconds[1]


def _timing(instrumented: Finished, plain: Finished, seconds: float, peak: int | None) -> Timing:
    return Timing(
        [(one.emitted, one.seconds_draft, one.seconds_verify) for one in instrumented.rounds],
        # Tokens past the limit were decoded too and count.
        sum(one.emitted for one in plain.rounds),
        seconds,
        peak,
    )


def _to_row(request_id: str, machine: str, ways: Sequence[Way], found: Mapping[str, Timing]) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "machine": machine,
        "ways": {
            way.key: {"weights": way.identity[0], "schedule_id": way.identity[1], **found[way.key]._asdict()}
            for way in ways
        },
    }


def _latency(timed: Sequence[Timing], baseline: Sequence[float | None]) -> Latency | None:
    rounds = [one for timing in timed for one in timing.rounds]
    per_token = _seconds_per_token(timed)
    if not rounds or per_token is None:
        return None
    ratios = [
        base / own
        for base, own in zip(baseline, (_seconds_per_token([one]) for one in timed), strict=True)
        if base is not None and own is not None
    ]
    if not ratios:
        return None
    peaks = [one.peak_memory_bytes for one in timed if one.peak_memory_bytes is not None]
    return Latency(
        num_prompts=len(timed),
        rounds=len(rounds),
        acceptance_length=sum(emitted for emitted, _, _ in rounds) / len(rounds),
        seconds_draft_per_round=sum(draft for _, draft, _ in rounds) / len(rounds),
        seconds_verify_per_round=sum(verify for _, _, verify in rounds) / len(rounds),
        median_seconds_draft=median(draft for _, draft, _ in rounds),
        median_seconds_verify=median(verify for _, _, verify in rounds),
        seconds_per_token=per_token,
        speedup=median(ratios),
        peak_memory_bytes=max(peaks) if peaks else None,
    )


def _seconds_per_token(timed: Sequence[Timing]) -> float | None:
    tokens = sum(one.tokens for one in timed)
    return sum(one.seconds for one in timed) / tokens if tokens else None
