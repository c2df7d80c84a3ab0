"""`deepspec simulate`: every schedule under every load, with intervals, as a table, a page and numbers.

Ways to decode are compared on the same draws of conversations; each repeat draws the conversations anew, so intervals
cover which prompts were recorded. The simulation itself is in serving.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deepspec import console
from deepspec.decoding.schedule import Confidence, FullSchedule, ThresholdSchedule
from deepspec.errors import ConfigError
from deepspec.evaluation.statistics import emitted_within
from deepspec.runtime import provenance
from deepspec.scheduling.calibration import chosen_temperatures
from deepspec.scheduling.cost import CostCurve, Lookup, read_curve
from deepspec.scheduling.outcomes import Point, Report
from deepspec.scheduling.records import Recorded, full_only, one_draft, read_records, samplings_of, source_of
from deepspec.scheduling.schedules import AsynchronousSchedule, FixedSchedule, ThroughputSchedule
from deepspec.scheduling.serving import Conversation, Load, Way, conversations_of, simulate
from deepspec.scheduling.settings import SimulateConfig


def run_simulation(config: SimulateConfig) -> list[Point]:
    """Simulate all ways under all loads, write simulation.json and simulation.html, and print a table.

    Raises:
        DeepSpecError: records, curve or settings do not fit together.
    """
    records = full_only(read_records(config.records, config.draft))
    name = one_draft(records)
    curve = read_curve(config.curve)
    confidence = _confidence(config, records)
    conversations = conversations_of(records)
    loads: Sequence[float] = config.concurrency if config.arrivals == "closed" else config.rates
    if not loads:
        raise ConfigError("rates is empty, but arrivals is 'poisson'. Give requests per second: rates=[1,2,4].")
    play = _Player(config, curve, confidence, conversations)
    steps = len(loads) * len(config.schedules) + len(config.thresholds)
    with console.progress("simulate", total=steps * config.repeats) as bar:
        points = [play.point(name, load, load, bar) for load in loads for name in config.schedules]
        middle = loads[len(loads) // 2]
        over_thresholds = [
            play.with_threshold(threshold).point("threshold", middle, threshold, bar) for threshold in config.thresholds
        ]
    load_word = "requests in flight" if config.arrivals == "closed" else "requests per second"
    made_with = {
        **provenance(),
        "simulate": config.model_dump(mode="json"),
        "confidence": confidence.source,
        "temperatures": list(confidence.temperatures or ()),
    }
    report = Report(
        f"{name}, curve {config.curve}",
        load_word,
        config.repeats,
        points,
        over_thresholds,
        middle,
        made_with,
    )
    report.show(Path(config.output_dir))
    return points


class _Player(NamedTuple):
    """Plays one way under one load, repeat by repeat."""

    config: SimulateConfig
    curve: CostCurve
    confidence: Confidence
    conversations: Sequence[Conversation]

    def with_threshold(self, threshold: float) -> _Player:
        return self._replace(config=self.config.model_copy(update={"threshold": threshold}))

    def point(self, name: str, load: float, x: float, bar: console.ProgressBar) -> Point:
        config = self.config
        arrivals = _load(config, load)
        settings = WaySettings(config.threshold, config.lookup, config.draft_seconds, config.one_token_draft_seconds)
        way = make_way(name, settings, self.curve, self.confidence, self.conversations, arrivals.limit)
        runs = []
        for seed in range(config.seed, config.seed + config.repeats):
            drawn = resampled(self.conversations, seed)
            runs.append(simulate(drawn, self.curve, way, arrivals, config.rounds, seed))
            bar.advance(1)
        return Point(name, float(x), runs)


def resampled(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """As many conversations, drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(len(conversations), size=len(conversations))
    return [conversations[index] for index in drawn]


def _load(config: SimulateConfig, load: float) -> Load:
    if config.arrivals == "closed":
        return Load(int(load), None, config.max_new_tokens, config.prefill_seconds)
    return Load(max(config.concurrency), load, config.max_new_tokens, config.prefill_seconds)


def _confidence(config: SimulateConfig, records: Sequence[Recorded]) -> Confidence:
    source = source_of(records, config.confidence)
    first = records[0]
    return Confidence(
        source,
        chosen_temperatures(config.calibration, first.draft_path, source, first.weights, samplings_of(records)),
    )


class WaySettings(NamedTuple):
    """What ways to decode are made with, beside a curve and confidences.

    Attributes:
        threshold: of `threshold`.
        lookup: how `throughput` and `asynchronous` read the curve.
        draft_seconds: T_draft in place of what the curve knows.
        one_token_draft_seconds: T_draft of the one-token draft; None takes the draft's own divided by K.
    """

    threshold: float
    lookup: Lookup
    draft_seconds: float | None = None
    one_token_draft_seconds: float | None = None


def make_way(
    name: str,
    settings: WaySettings,
    curve: CostCurve,
    confidence: Confidence,
    conversations: Sequence[Conversation],
    requests: int,
) -> Way:
    """A way to decode by its name.

    Args:
        name: one of outcomes.WORDS.
        settings: threshold, look-up and draft times.
        curve: what steps cost.
        confidence: where c_k comes from.
        conversations: whose acceptance chooses the fixed window.
        requests: load that the fixed window is chosen for.
    """
    block = conversations[0].max_probs.shape[1]
    given = settings.draft_seconds
    draft_seconds = curve.draft_time if given is None else lambda _: given
    if name == "autoregressive":
        return Way(None, lambda _: 0.0, 0)
    if name == "mtp1":
        one_token = settings.one_token_draft_seconds
        seconds = (lambda number: draft_seconds(number) / block) if one_token is None else lambda _: one_token
        return Way(FullSchedule(), seconds, 1)
    if name == "oracle":
        return Way(None, draft_seconds, block, is_oracle=True)
    if name == "full":
        return Way(FullSchedule(), draft_seconds, block)
    if name == "fixed":
        window = best_window(conversations, curve, draft_seconds, requests)
        return Way(FixedSchedule(((1, window),)), draft_seconds, block)
    if name == "threshold":
        return Way(ThresholdSchedule(settings.threshold, confidence), draft_seconds, block)
    kind = ThroughputSchedule if name == "throughput" else AsynchronousSchedule
    # The schedule must count the draft as the simulated clock does.
    known = curve if given is None else with_draft_seconds(curve, given)
    return Way(kind(known, confidence, settings.lookup), draft_seconds, block)


def with_draft_seconds(curve: CostCurve, seconds: float) -> CostCurve:
    """The curve with a draft step of the same time for any number of requests."""
    return replace(curve, draft_requests=(1, 2**20), draft_seconds=(seconds, seconds))


def best_window(
    conversations: Sequence[Conversation], curve: CostCurve, draft_seconds: Callable[[int], float], requests: int
) -> int:
    """The number of slots that yields most tokens per second when every request has it."""
    accepted = np.concatenate([one.accepted for one in conversations])
    emitted = np.concatenate([one.emitted for one in conversations])
    context = int(np.mean([one.prompt + one.tokens / 2 for one in conversations]))

    def speed(window: int) -> float:
        seconds = draft_seconds(requests) + curve.beside_draft(requests, requests * (1 + window), context, "even")
        return requests * float(emitted_within(accepted, emitted, window).mean()) / seconds

    return max(range(conversations[0].max_probs.shape[1] + 1), key=speed)
