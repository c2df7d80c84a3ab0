"""A server with continuous batching as a discrete-event simulation, playing recorded rounds.

Time comes from a cost curve, acceptance from round records, verification lengths from the very schedules that the
decoder uses. A request walks through the rounds of one recorded conversation in order, from a random one on and around.
A round that a schedule cuts short is followed by the next recorded one, as if the text there were as easy as after it.
Letters: R requests in flight, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import simpy
import torch
from numpy.typing import NDArray

from deepspec.decoding.lane import is_worth_compacting
from deepspec.decoding.schedule import FullSchedule, Schedule, Situation
from deepspec.evaluation.statistics import emitted_within
from deepspec.scheduling.cost import CostCurve, Kind
from deepspec.scheduling.records import Floats, Recorded

Integers = NDArray[np.int64]

SIMULATOR_VERSION = 3
"""Raised whenever the same records, curve and way give another outcome; predictions of before are then not used."""


class Conversation(NamedTuple):
    """The recorded rounds of one conversation.

    Attributes:
        accepted: [N] draft tokens that a full verification accepts.
        emitted: [N] tokens that it then counts: no bonus token follows an accepted stop token.
        logits: [N, K] confidence logits, or None for a draft without a head.
        max_probs: [N, K] max_v q_k(v).
        tokens: tokens of the whole answer.
        prompt: tokens before it.
    """

    accepted: Integers
    emitted: Integers
    logits: Floats | None
    max_probs: Floats
    tokens: int
    prompt: int


class Load(NamedTuple):
    """What arrives.

    Attributes:
        limit: most requests in flight.
        rate: arrivals per second (Poisson); None replaces every finished request at once.
        max_new_tokens: of every request, at least 2 (the prefill draws the first); None takes the recorded lengths.
        prefill_seconds: of a prompt that joins, during which nothing else runs.
        is_replay: play every conversation once, in order and from its first round on, and count everything. Idle rows
            then cost a token, as in our own decoder, which drops a quarter of them at a time once nothing waits.
    """

    limit: int
    rate: float | None = None
    max_new_tokens: int | None = None
    prefill_seconds: float = 0.0
    is_replay: bool = False


class Way(NamedTuple):
    """How the server decodes.

    Attributes:
        schedule: verification lengths; None decodes without a draft.
        draft_seconds: time of a draft step of so many requests.
        slots: draft tokens proposed, at most K.
        is_oracle: cut every block at the accepted length that the record knows; the schedule is not asked.
    """

    schedule: Schedule | None
    draft_seconds: Callable[[int], float]
    slots: int
    is_oracle: bool = False


class Outcome(NamedTuple):
    """What one run measured, in its counted part.

    Attributes:
        seconds: simulated time.
        tokens: emitted tokens.
        rounds: steps of the server.
        requests: mean number of requests in a step.
        verified: draft tokens verified.
        accepted: draft tokens accepted.
        turns: rounds of single requests.
        user_speed: tokens per second of one request while it is in flight.
    """

    seconds: float
    tokens: int
    rounds: int
    requests: float
    verified: int
    accepted: int
    turns: int
    user_speed: float

    @property
    def throughput(self) -> float:
        """Emitted tokens per second of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def budget(self) -> float:
        """Draft tokens verified per request and round."""
        return self.verified / max(self.turns, 1)

    @property
    def verified_yield(self) -> float:
        """(accepted + 1) / (verified + 1), summed over rounds of requests."""
        return (self.accepted + self.turns) / max(self.verified + self.turns, 1)


def conversations_of(records: Sequence[Recorded]) -> list[Conversation]:
    """The conversations of several tasks of one draft."""
    found = []
    for one in records:
        for rounds in one.rounds.values():
            logits = [record.confidence_logits for record in rounds if record.confidence_logits is not None]
            found.append(
                Conversation(
                    accepted=np.array([record.accepted for record in rounds]),
                    emitted=np.array([record.emitted for record in rounds]),
                    logits=np.array(logits) if len(logits) == len(rounds) else None,
                    max_probs=np.array([record.max_draft_prob for record in rounds]),
                    tokens=1 + sum(record.emitted for record in rounds),
                    prompt=rounds[0].position,
                )
            )
    return found


@dataclass
class _Request:
    """A request in flight.

    Attributes:
        conversation: whose rounds it walks through.
        at: its next round.
        left: tokens that rounds must emit before it has finished.
        emitted: of them so far.
        since: when it was admitted, or its last round ended.
    """

    conversation: Conversation
    at: int
    left: int
    emitted: int
    since: float

    @property
    def index(self) -> int:
        return self.at % len(self.conversation.accepted)


@dataclass
class _Tally:
    """Sums over the counted part of a run."""

    begin: float = 0.0
    end: float = 0.0
    tokens: int = 0
    rounds: int = 0
    requests: int = 0
    verified: int = 0
    accepted: int = 0
    user_seconds: float = 0.0


class _Server:
    """Admits what waits, then plays a round, again and again."""

    def __init__(
        self,
        environment: simpy.Environment,
        conversations: Sequence[Conversation],
        curve: CostCurve,
        way: Way,
        load: Load,
        rounds: int,
        generator: np.random.Generator,
    ) -> None:
        self.environment, self.conversations = environment, conversations
        self.curve, self.way, self.load, self.rounds, self.generator = curve, way, load, rounds, generator
        self.waiting = simpy.Store(environment)
        self.running: list[_Request] = []
        self.rows = 0
        self.situations: list[Situation] = []
        self.tally = _Tally()
        self.played = 0
        longest = max(self._length(one) for one in conversations)
        # A server that starts empty needs so long until requests are at all stages of their answers; a full one starts
        # like that.
        self.warm_up = 0 if load.is_replay else longest if load.rate is not None else min(longest, rounds)

    def _length(self, conversation: Conversation) -> int:
        return self.load.max_new_tokens or conversation.tokens

    def arrive(self) -> Generator[simpy.Event, Any, None]:
        """Draw arrivals for ever (Poisson), or fill the server once; a replay brings all at once."""
        if self.load.is_replay:
            for conversation in self.conversations:
                self.waiting.put((conversation, 0))
            return
        if self.load.rate is None:
            for start in self._amid_answers(self.load.limit):
                self.waiting.put(start)
            return
        while True:
            yield self.environment.timeout(float(self.generator.exponential(1 / self.load.rate)))
            self.waiting.put(self._draw())

    def _draw(self) -> tuple[Conversation, int]:
        return self.conversations[int(self.generator.integers(len(self.conversations)))], 0

    def _amid_answers(self, number: int) -> list[tuple[Conversation, int]]:
        """Requests as one finds them at any moment, long answers more often, and the tokens emitted of each."""
        lengths = np.array([self._length(one) - 1 for one in self.conversations])
        chosen = self.generator.choice(len(lengths), number, p=lengths / lengths.sum())
        emitted = self.generator.integers(lengths[chosen])
        return [(self.conversations[index], int(count)) for index, count in zip(chosen, emitted, strict=True)]

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """Play rounds until enough were counted, or everything was replayed."""
        yield self.environment.timeout(0)
        while self.load.is_replay or self.played < self.warm_up + self.rounds:
            while len(self.running) < self.load.limit and (self.waiting.items or not self.running):
                if self.load.is_replay and not self.waiting.items:
                    self.tally.end = self.environment.now
                    return
                start = yield self.waiting.get()
                yield self.environment.timeout(self.load.prefill_seconds)
                self._admit(*start)
            if self.played == self.warm_up:
                self.tally.begin = self.environment.now
            lengths = self._lengths()
            yield self.environment.timeout(self._seconds(lengths))
            self._take_in(lengths)
        self.tally.end = self.environment.now

    def _admit(self, conversation: Conversation, emitted: int) -> None:
        # The prefill draws the first token.
        left = self._length(conversation) - 1
        start = 0 if self.load.is_replay else int(self.generator.integers(len(conversation.accepted)))
        self.running.append(_Request(conversation, start, left, emitted, self.environment.now))
        self.rows = max(self.rows, len(self.running))

    def _seconds(self, lengths: Integers) -> float:
        """Time of a round that verifies so many tokens of each request."""
        requests, block = len(self.running), self.conversations[0].max_probs.shape[1]
        if self.load.is_replay and self.rows > requests:
            lengths = np.append(lengths, [0] * (self.rows - requests))
            requests = self.rows
        has_draft = self.way.schedule is not None or self.way.is_oracle
        kind: Kind = "even" if (lengths == lengths[0]).all() else "cut"
        if not has_draft:
            kind = "plain"
        elif isinstance(self.way.schedule, FullSchedule) and (lengths == block).all():
            kind = "whole"
        tokens = requests + int(lengths.sum())
        seconds = self.curve.beside_draft(requests, tokens, self._context(), kind)
        return seconds + (self.way.draft_seconds(requests) if has_draft else 0.0)

    def _context(self) -> int:
        return sum(one.conversation.prompt + one.emitted for one in self.running) // len(self.running)

    def _lengths(self) -> Integers:
        rows = self.running
        known = np.array([one.conversation.accepted[one.index] for one in rows])
        if self.way.is_oracle:
            return np.asarray(np.minimum(known, self.way.slots), dtype=np.int64)
        if self.way.schedule is None:
            return np.zeros(len(rows), dtype=np.int64)
        # A draft has a head or not: either all rows bring logits or none does.
        heads = [one.conversation.logits[one.index] for one in rows if one.conversation.logits is not None]
        logits = torch.from_numpy(np.stack(heads)) if heads else None
        probs = torch.from_numpy(np.stack([one.conversation.max_probs[one.index] for one in rows]))
        proposed = torch.full((len(rows),), self.way.slots)
        now = Situation(logits, probs, proposed, len(rows), self._context())
        earlier = self.situations[-2] if len(self.situations) > 1 else None
        self.situations = [*self.situations[-1:], now]
        found: Integers = self.way.schedule.lengths(now._replace(earlier=earlier)).numpy()
        return found

    def _take_in(self, lengths: Integers) -> None:
        """Count a round that has just ended, and replace what has finished."""
        is_counted = self.played >= self.warm_up
        self.played += 1
        tally = self.tally
        remaining = []
        for request, length in zip(self.running, lengths.tolist(), strict=True):
            could = int(request.conversation.accepted[request.index])
            # A round that the limit cuts counts all that it verified, here as in the decoder.
            emitted = int(emitted_within(could, int(request.conversation.emitted[request.index]), length))
            request.at += 1
            request.emitted += emitted
            if is_counted:
                tally.tokens += emitted
                tally.verified += length
                tally.accepted += min(could, length)
                tally.requests += 1
                tally.user_seconds += self.environment.now - max(request.since, tally.begin)
            request.since = self.environment.now
            if request.emitted < request.left:
                remaining.append(request)
                continue
            if self.load.rate is None and not self.load.is_replay:
                self.waiting.put(self._draw())
        self.running = remaining
        if not self.waiting.items and is_worth_compacting(self.rows, len(remaining)):
            self.rows = len(remaining)
        tally.rounds += is_counted


def simulate(
    conversations: Sequence[Conversation],
    curve: CostCurve,
    way: Way,
    load: Load,
    rounds: int,
    seed: int,
) -> Outcome:
    """Run one server until `rounds` rounds were counted.

    Args:
        conversations: recorded under full verification.
        curve: seconds of a step, interpolated between its points.
        way: how the server decodes.
        load: what arrives.
        rounds: rounds that count, after the warm-up.
        seed: of arrivals and of who arrives; ways compared under one seed meet the same requests as long as they last.
    """
    environment = simpy.Environment()
    generator = np.random.default_rng(seed)
    server = _Server(environment, conversations, curve, way, load, rounds, generator)
    environment.process(server.arrive())
    done = environment.process(server.serve())
    environment.run(done)
    tally = server.tally
    return Outcome(
        seconds=tally.end - tally.begin,
        tokens=tally.tokens,
        rounds=tally.rounds,
        requests=tally.requests / max(tally.rounds, 1),
        verified=tally.verified,
        accepted=tally.accepted,
        turns=tally.requests,
        user_speed=tally.tokens / tally.user_seconds if tally.user_seconds else 0.0,
    )
