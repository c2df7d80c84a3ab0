"""Schedules with several requests in flight: the real decoder and the simulator play the same prompts.

All ways answer the same prompts in turn, round by round, so that a machine that slows down slows all of them alike; the
simulator then replays the rounds of full verification under each. Every repeat has other prompts and is one line of a
journal, from which all numbers follow. The module shows nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.config_eval import LoadConfig
from deepspec.data.journal import open_journal
from deepspec.decoding.decoder import Finished, Request, generate_by_round
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import Confidence
from deepspec.evaluation.details import GainRow, LoadRow
from deepspec.evaluation.statistics import median_ci95
from deepspec.scheduling.cost import CostCurve
from deepspec.scheduling.records import Recorded
from deepspec.scheduling.serving import Conversation, Load, Way, conversations_of, simulate
from deepspec.scheduling.simulate import WaySettings, make_way, resampled
from deepspec.targets.base import Target

_WARM_UP_TOKENS = 8
_SIMULATED_ROUNDS = 200  # of a run without a decoder


class Setup(NamedTuple):
    """What is compared, on what.

    Attributes:
        target: the target.
        draft: the draft.
        name: of the draft.
        weights: its `weights_id`.
        curve: cost of a step of the target and of the draft.
        confidence: where c_k comes from.
        config: loads, schedules, repeats.
        sampling: warpers.
        seed: of all draws.
        machine: what timings must have been measured on to be reused.
    """

    target: Target
    draft: DraftModel
    name: str
    weights: str
    curve: CostCurve
    confidence: Confidence
    config: LoadConfig
    sampling: Sampling
    seed: int
    machine: str

    @property
    def identity(self) -> str:
        """Changes whenever anything does that a line of the journal depends on."""
        config = self.config
        parts = [self.machine, self.weights, self.seed, repr(self.curve), repr(self.confidence)]
        parts += [config.max_new_tokens, config.threshold, config.lookup]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Played(NamedTuple):
    """One way in one repeat.

    Attributes:
        tokens: emitted by the decoder's rounds, all requests together; None where it was only simulated.
        seconds: these rounds took, prefill excluded; None likewise.
        budget: draft tokens verified per request and round.
        simulated: tokens per second that the simulator predicts.
    """

    tokens: int | None
    seconds: float | None
    budget: float
    simulated: float

    @property
    def measured(self) -> float | None:
        """Tokens per second of the decoder."""
        return None if self.tokens is None or self.seconds is None else self.tokens / self.seconds


class Repeat(NamedTuple):
    """All ways on the same prompts, so many requests in flight."""

    requests: int
    ways: dict[str, Played]


def measure_loads(
    setup: Setup, requests: Sequence[Request], conversations: Sequence[Conversation], path: Path
) -> list[Repeat]:
    """Decode and simulate every way under every load, repeat by repeat; what the journal holds is not played again.

    Args:
        setup: what is compared.
        requests: prompts, at least as many as the largest batch.
        conversations: recorded under full verification: they choose the fixed window and feed what is only simulated.
        path: the journal.

    Raises:
        DataError: the journal cannot be written, or is damaged.
    """
    config = setup.config
    wanted = [(load, repeat) for repeat in range(config.repeats) for load in (*config.batches, *config.simulated)]
    with open_journal(path) as journal:
        known = _known(journal.rows, setup)
        left = [key for key in wanted if key not in known]
        if any(load in config.batches for load, _ in left):
            _warm_up(setup, requests, conversations)
        with console.progress("requests in flight", total=len(wanted), done=len(wanted) - len(left)) as bar:
            for load, repeat in left:
                ways = _ways(setup, conversations, load)
                if load in config.batches:
                    found = _measured(setup, ways, chosen(requests, load, repeat, setup.seed))
                else:
                    found = _simulated(setup, ways, resampled(conversations, setup.seed + repeat), load, repeat)
                row = {"requests": load, "repeat": repeat, "identity": setup.identity}
                journal.append({**row, "ways": {name: one._asdict() for name, one in found.items()}})
                known[load, repeat] = Repeat(load, found)
                bar.advance(1)
    return [known[key] for key in wanted]


def _known(rows: Sequence[Mapping[str, Any]], setup: Setup) -> dict[tuple[int, int], Repeat]:
    found = {}
    for row in rows:
        ways = row.get("ways", {})
        is_measured = row.get("requests") not in setup.config.batches or all(
            ways.get(name, {}).get("seconds") is not None for name in setup.config.schedules
        )
        if row.get("identity") == setup.identity and set(setup.config.schedules) <= set(ways) and is_measured:
            kept: dict[str, Played] = {name: Played(**ways[name]) for name in setup.config.schedules}
            found[row["requests"], row["repeat"]] = Repeat(row["requests"], kept)
    return found


def chosen(requests: Sequence[Request], number: int, repeat: int, seed: int) -> list[Request]:
    """Prompts of one repeat: in an order drawn for this load, repeats share none as long as there are enough."""
    order = np.random.default_rng([seed, number]).permutation(len(requests)).tolist()
    return [requests[order[(repeat * number + index) % len(order)]] for index in range(number)]


def _ways(setup: Setup, conversations: Sequence[Conversation], requests: int) -> dict[str, Way]:
    settings = WaySettings(setup.config.threshold, setup.config.lookup)
    return {
        name: make_way(name, settings, setup.curve, setup.confidence, conversations, requests)
        for name in setup.config.schedules
    }


def _warm_up(setup: Setup, requests: Sequence[Request], conversations: Sequence[Conversation]) -> None:
    largest = max(setup.config.batches)
    short = setup._replace(config=setup.config.model_copy(update={"max_new_tokens": _WARM_UP_TOKENS}))
    play_in_turn(short, _ways(short, conversations, largest), chosen(requests, largest, 0, setup.seed))


def play_in_turn(
    setup: Setup, ways: Mapping[str, Way], requests: Sequence[Request]
) -> dict[str, tuple[list[Finished], float]]:
    """Answers of every way, and the seconds of its rounds; the ways take turns round by round, in changing order."""
    turns = {
        name: generate_by_round(
            setup.target,
            None if way.schedule is None else setup.draft,
            requests,
            setup.sampling,
            max_new_tokens=setup.config.max_new_tokens,
            batch_size=len(requests),
            seed=setup.seed,
            schedule=way.schedule,
            timers=False,
            stops=False,
        )
        for name, way in ways.items()
    }
    answers = {name: next(prefill) for name, prefill in turns.items()}
    seconds = dict.fromkeys(ways, 0.0)
    order = list(ways)
    while order:
        for name in list(order):
            begin = time.perf_counter()
            found = next(turns[name], None)
            seconds[name] += time.perf_counter() - begin
            if found is None:
                order.remove(name)
            else:
                answers[name] += found
        # Whoever comes after a long step meets another cache: nobody always does.
        order = [*order[1:], *order[:1]]
    return {name: (answers[name], seconds[name]) for name in ways}


def _measured(setup: Setup, ways: Mapping[str, Way], requests: Sequence[Request]) -> dict[str, Played]:
    played = play_in_turn(setup, ways, requests)
    whole = {one.prompt_id: one.rounds for one in played["full"][0]}
    recorded = Recorded("", setup.name, "", setup.weights, dict.fromkeys(whole, ""), whole, {})
    conversations = conversations_of([recorded])
    load = Load(len(requests), max_new_tokens=setup.config.max_new_tokens, is_replay=True)
    found = {}
    for name, (answers, seconds) in played.items():
        rounds = [one for answer in answers for one in answer.rounds]
        has_draft = ways[name].schedule is not None
        found[name] = Played(
            tokens=sum(one.emitted for one in rounds),
            seconds=seconds,
            budget=sum(one.proposed for one in rounds) / len(rounds) if has_draft else 0.0,
            simulated=simulate(conversations, setup.curve, ways[name], load, 1, setup.seed).throughput,
        )
    return found


def _simulated(
    setup: Setup, ways: Mapping[str, Way], conversations: Sequence[Conversation], requests: int, repeat: int
) -> dict[str, Played]:
    load = Load(requests, max_new_tokens=setup.config.max_new_tokens)
    found = {}
    for name, way in ways.items():
        outcome = simulate(conversations, setup.curve, way, load, _SIMULATED_ROUNDS, setup.seed + repeat)
        found[name] = Played(None, None, outcome.budget, outcome.throughput)
    return found


def load_rows(repeats: Sequence[Repeat], draft: str, temperature: float) -> tuple[list[LoadRow], list[GainRow]]:
    """Medians over repeats, and the throughput schedule's gains over the others, repeat by repeat on the same prompts.

    Args:
        repeats: of all loads.
        draft: its name.
        temperature: of target and draft.
    """
    rows, gains = [], []
    for load in dict.fromkeys(one.requests for one in repeats):
        here = [one.ways for one in repeats if one.requests == load]
        common: dict[str, Any] = {"draft": draft, "temperature": temperature, "requests": load}
        for name in here[0]:
            measured = [one[name].measured for one in here]
            simulated = [one[name].simulated for one in here]
            rows.append(
                LoadRow(
                    **common,
                    schedule=name,
                    throughput=_median(measured),
                    throughput_ci95=_interval(measured),
                    simulated_throughput=median(simulated),
                    simulated_throughput_ci95=median_ci95(simulated),
                    budget=median(one[name].budget for one in here),
                )
            )
            if name == "throughput" or "throughput" not in here[0]:
                continue
            ratios = [_ratio(one["throughput"].measured, one[name].measured) for one in here]
            predicted = [one["throughput"].simulated / one[name].simulated for one in here]
            gains.append(
                GainRow(
                    **common,
                    over=name,
                    gain=_median(ratios),
                    gain_ci95=_interval(ratios),
                    simulated_gain=median(predicted),
                    simulated_gain_ci95=median_ci95(predicted),
                )
            )
    return rows, gains


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _known_values(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Sequence[float | None]) -> float | None:
    known = _known_values(values)
    return median(known) if known else None


def _interval(values: Sequence[float | None]) -> tuple[float, float] | None:
    return median_ci95(_known_values(values))
