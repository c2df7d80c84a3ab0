"""Latency at batch 1: the parts of a round from an instrumented pass, the real time a token from a second pass.

Drafts and plain decoding take turns prompt by prompt, so that a machine that slows down slows all of them. The prefill
is excluded. The module knows nothing of tasks or reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Schedule
from deepspec.evaluation.report import AUTOREGRESSIVE
from deepspec.targets.base import Target


class Latency(NamedTuple):
    """Timings of one way of decoding.

    Attributes:
        num_prompts: timed prompts.
        rounds: rounds of one pass over them.
        acceptance_length: tau of these prompts, which is that of L = (T_draft + T_verify) / tau.
        seconds_draft_per_round: T_draft, mean over the rounds of the instrumented pass.
        seconds_verify_per_round: T_verify, likewise.
        seconds_per_token: of the pass with timers off.
        speedup: plain decoding's seconds per token over these, medians over prompts of the paired ratio.
    """

    num_prompts: int
    rounds: int
    acceptance_length: float
    seconds_draft_per_round: float
    seconds_verify_per_round: float
    seconds_per_token: float
    speedup: float

    def columns(self) -> dict[str, float]:
        """The columns of a result row that are timings."""
        return {
            "tokens_per_second": 1.0 / self.seconds_per_token,
            "seconds_draft_per_round": self.seconds_draft_per_round,
            "seconds_verify_per_round": self.seconds_verify_per_round,
            "seconds_per_token": self.seconds_per_token,
            "latency_acceptance_length": self.acceptance_length,
            "speedup_over_autoregressive": self.speedup,
        }


def measure_latency(
    target: Target,
    drafts: Mapping[str, DraftModel],
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    schedule: Schedule,
    task: str,
) -> dict[str, Latency]:
    """Time every draft and plain decoding on the same prompts, one request at a time.

    Args:
        target: the target.
        drafts: by name.
        requests: prompts to time; none gives an empty result.
        sampling: warpers.
        max_new_tokens: per prompt.
        seed: of the draws.
        schedule: verification lengths.
        task: word for the progress bar.

    Returns:
        Latency by draft name, with `autoregressive` for plain decoding.
    """
    ways: dict[str, DraftModel | None] = {AUTOREGRESSIVE: None, **drafts}
    timed: dict[str, list[tuple[Finished, Finished]]] = {name: [] for name in ways}
    if not requests:
        return {}

    def decode(model: DraftModel | None, request: Request, timers: bool, limit: int) -> Finished:
        answers = generate(
            target, model, [request], sampling, max_new_tokens=limit, seed=seed, schedule=schedule, timers=timers
        )
        return next(iter(answers))

    with console.progress(f"{task}: latency at batch 1", total=len(requests) * len(ways)) as bar:
        for model in ways.values():
            decode(model, requests[0], True, min(16, max_new_tokens))  # warm-up
        for index, request in enumerate(requests):
            for name, model in ways.items():
                # Which pass comes first alternates, so that neither always meets the warmer cache.
                passes = [decode(model, request, timers, max_new_tokens) for timers in (index % 2 == 0, index % 2 == 1)]
                instrumented, plain = passes if index % 2 == 0 else passes[::-1]
                timed[name].append((instrumented, plain))
                bar.advance(1)
    baseline = [_seconds_per_token([plain]) for _, plain in timed[AUTOREGRESSIVE]]
    found = {name: _latency(pairs, baseline) for name, pairs in timed.items()}
    return {name: latency for name, latency in found.items() if latency is not None}


def _latency(pairs: Sequence[tuple[Finished, Finished]], baseline: Sequence[float | None]) -> Latency | None:
    rounds = [one for instrumented, _ in pairs for one in instrumented.rounds]
    plain = [finished for _, finished in pairs]
    per_token = _seconds_per_token(plain)
    if not rounds or per_token is None:
        return None
    ratios = [
        base / own
        for base, own in zip(baseline, (_seconds_per_token([finished]) for finished in plain), strict=True)
        if base is not None and own is not None
    ]
    return Latency(
        num_prompts=len(pairs),
        rounds=len(rounds),
        acceptance_length=sum(one.emitted for one in rounds) / len(rounds),
        seconds_draft_per_round=sum(one.seconds_draft for one in rounds) / len(rounds),
        seconds_verify_per_round=sum(one.seconds_verify for one in rounds) / len(rounds),
        seconds_per_token=per_token,
        speedup=median(ratios),
    )


def _seconds_per_token(finished: Sequence[Finished]) -> float | None:
    """Seconds a token over all rounds; tokens past the limit were decoded too and count."""
    tokens = sum(one.emitted for answer in finished for one in answer.rounds)
    return sum(answer.seconds for answer in finished) / tokens if tokens else None
