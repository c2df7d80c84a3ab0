"""Speculative decoding of many requests at once; plain autoregressive decoding is the same loop without a draft.

Every request accepts its own number of tokens per round, finished requests make room for waiting ones, and the host
waits for the device once a round. The decoder drives a draft through `observe` and `propose` and knows no algorithm.
Letters: B lanes (requests in flight), K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from deepspec.algorithms.base import DraftModel, Observation, Proposal, Sampler
from deepspec.attention import Packing
from deepspec.decoding.judge import judge
from deepspec.decoding.lane import Captured, Finished, Lane, Request, is_worth_compacting, to_host
from deepspec.decoding.prompts import Prefix, run_prompts, shared_prefix
from deepspec.decoding.rows import Rows
from deepspec.decoding.sampling import Sampling, check_sampling, draw, prompt_key, round_uniforms
from deepspec.decoding.schedule import FullSchedule, Schedule, Situation
from deepspec.decoding.waiting import Waiting, check_requests, most_ahead
from deepspec.errors import ConfigError, TargetError
from deepspec.targets.base import Target

__all__ = ["Captured", "Finished", "Request", "generate", "generate_by_round"]

# The prefill draws its token in a round of its own, so that round 0 keeps its draws with and without a draft.
_PREFILL_ROUND = -1


def generate(
    target: Target,
    draft: DraftModel | None,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    seed: int = 0,
    schedule: Schedule | None = None,
    timers: bool = True,
    capture: bool = False,
    overlap: bool = False,
    claim: Callable[[int], int] | None = None,
) -> Iterator[Finished]:
    """Answer requests, yielding each as it finishes.

    Args:
        target: the model whose distribution the output has.
        draft: proposes tokens; None decodes one token a round.
        requests: prompts; their ids seed the draws, so the output does not depend on batch size or order, up to
            rounding, unless the schedule looks at the requests beside.
        sampling: warpers of target and draft.
        max_new_tokens: per request; no round starts once they are out.
        batch_size: requests in flight; the prompts of up to half as many more are read before there is room for them.
        seed: of all draws.
        schedule: how many slots are verified; None verifies all.
        timers: measure draft and verification seconds (waits for the device four times a round).
        capture: hand over the target's states with each answer, so that nothing needs to run over it again.
        overlap: put alpha_k = sum_v min(p_k, q_k) of every verified slot into the round records.
        claim: how this process takes its part of requests that several share, see Waiting; None takes them all.

    Raises:
        DataError: a prompt is empty, repeated, or too long for the target.
        ConfigError: a setting is out of range.
    """
    loop = _open(target, draft, requests, sampling, max_new_tokens, batch_size, seed, schedule, timers)
    loop.capture, loop.overlap = capture, overlap
    return chain.from_iterable(loop.run(Waiting(requests, claim)))


def generate_by_round(
    target: Target,
    draft: DraftModel | None,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    seed: int = 0,
    schedule: Schedule | None = None,
    timers: bool = True,
    stops: bool = True,
) -> Iterator[list[Finished]]:
    """Answer requests and pause after every prefill and every round, so that others can take turns.

    Arguments and errors are those of `generate`; `stops` False decodes on behind stop tokens: answers of one length.

    Yields:
        What the prefill or the round has finished, mostly nothing.
    """
    loop = _open(target, draft, requests, sampling, max_new_tokens, batch_size, seed, schedule, timers)
    if not stops:
        loop.stop_tokens = frozenset()
    return loop.run(Waiting(requests, None))


def _open(
    target: Target,
    draft: DraftModel | None,
    requests: Sequence[Request],
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    schedule: Schedule | None,
    timers: bool,
) -> _Loop:
    check_sampling(sampling)
    if max_new_tokens < 1 or batch_size < 1:
        raise ConfigError(f"max_new_tokens {max_new_tokens} and batch_size {batch_size} must be at least 1.")
    block = 0 if draft is None else draft.num_draft_tokens
    if draft is not None:
        target.tap(draft.spec.layer_ids)
    check_requests(target, requests, max_new_tokens + block + 1)
    return _Loop(target, draft, sampling, max_new_tokens, batch_size, seed, schedule or FullSchedule(), timers)


class _Loop:
    """State of one decoding."""

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None,
        sampling: Sampling,
        max_new_tokens: int,
        batch_size: int,
        seed: int,
        schedule: Schedule,
        timers: bool,
    ) -> None:
        self.target, self.draft, self.sampling = target, draft, sampling
        self.max_new_tokens, self.batch_size, self.seed = max_new_tokens, batch_size, seed
        self.schedule, self.timers = schedule, timers
        self.capture = self.overlap = False
        self.situations: deque[Situation] = deque(maxlen=2)
        self.block = 0 if draft is None else draft.num_draft_tokens
        self.device = target.device
        self.stop_tokens = frozenset(target.stop_token_ids)
        self.rows = Rows.empty(self.device)
        self.ready = Rows.empty(self.device)
        self.prefix: Prefix | None = None

    @torch.inference_mode()
    def run(self, waiting: Waiting) -> Iterator[list[Finished]]:
        """Fill lanes and play rounds in turn until nothing is left; each yields what it has finished."""
        self.prefix = shared_prefix(self.target, [request.prompt_ids for request in waiting.requests])
        while waiting or self.ready.lanes or any(self.rows.are_active):
            if waiting or self.ready.lanes:
                yield list(self._admit(waiting))
            else:
                self._drop_finished()
            if any(self.rows.are_active):
                yield list(self._play_round())

    def _admit(self, waiting: Waiting) -> Iterator[Finished]:
        """Fill free rows with requests whose prompt has been read, reading the next prompts where none is ready."""
        while room := self.batch_size - sum(self.rows.are_active):
            if not self.ready.lanes:
                if not any(self.rows.are_active):
                    self.rows = Rows.empty(self.device)  # their memory is the new prompts'
                # Fewer towards the end, where other processes may have room sooner.
                ahead = min(most_ahead(self.batch_size), len(waiting) // 4) if self.rows.lanes else 0
                admitted = waiting.take(room + ahead)
                if not admitted:
                    return
                self.ready = self._prefill(admitted)
                for lane in self.ready.lanes:
                    if lane.output[0] in self.stop_tokens:
                        yield self._finish(lane, "stop")
                    elif self.max_new_tokens == 1:
                        yield self._finish(lane, "length")
            if self.rows.lanes:
                self.rows.take_over(self.ready, min(room, len(self.ready.lanes)))
            else:
                self.rows, self.ready = self.ready, self.rows

    def _drop_finished(self) -> None:
        """Drop finished rows, several at a time."""
        kept = [row for row, is_active in enumerate(self.rows.are_active) if is_active]
        if is_worth_compacting(len(self.rows.lanes), len(kept)):
            self.rows.keep(kept)

    def _prefill(self, requests: list[Request]) -> Rows:
        """Run prompts through the target, let the draft observe them, and draw each one's first new token."""
        counts = [len(request.prompt_ids) for request in requests]
        longest = max(counts)
        padded = [list(request.prompt_ids) + [0] * (longest - len(request.prompt_ids)) for request in requests]
        ids = torch.tensor(padded, device=self.device)
        features, last_hidden, cache = run_prompts(self.target, ids, counts, self.prefix)
        lengths = torch.tensor(counts, device=self.device)
        rows = torch.arange(len(requests), device=self.device)
        logits = self.target.logits(last_hidden[rows, lengths - 1])
        if bool(logits.isnan().any()):
            raise self._not_finite("as logits")
        uniforms = self._uniforms(requests, [_PREFILL_ROUND] * len(requests), 1)
        first = draw(logits, self.sampling, uniforms[:, 0])
        state = None
        if self.draft is not None:
            state = self.draft.new_state(len(requests))
            following = torch.cat([ids[:, 1:], first[:, None]], dim=1)
            following[rows, lengths - 1] = first
            self.draft.observe(state, Observation(features, following, torch.zeros_like(lengths), lengths, longest))
        lanes = [Lane(request, token) for request, token in zip(requests, first.tolist(), strict=True)]
        if self.capture:
            normaliser = features.new_zeros(ids.shape, dtype=torch.float32)
            normaliser[rows, lengths - 1] = logits.logsumexp(dim=-1).float()
            for row, lane in enumerate(lanes):
                upto = len(lane.request.prompt_ids)
                # Copies: a view would keep the pass of all prompts until this answer is whole.
                states = (features, last_hidden, normaliser)
                lane.captured.append(Captured(*(part[row, :upto].clone() for part in states)))
        return Rows(lanes, cache, state, self.device)

    def _play_round(self) -> Iterator[Finished]:
        """Draft, verify, and take in what was accepted, for every lane at once."""
        lanes, block = self.rows.lanes, self.block
        visible = max(lane.position for lane in lanes) + block + 1
        positions = torch.tensor([lane.position for lane in lanes], device=self.device)
        anchors = torch.tensor([lane.output[-1] for lane in lanes], device=self.device)
        uniforms = self._uniforms([lane.request for lane in lanes], [len(lane.rounds) for lane in lanes], 2 * block + 2)
        begin = self._now()
        proposal = self._propose(anchors, positions, visible, uniforms)
        drafted = self._now()
        lengths = self._lengths(proposal, anchors)
        judged = judge(
            self.target,
            self.rows.cache,
            anchors,
            positions,
            proposal,
            lengths,
            uniforms[:, block:],
            visible,
            self.sampling,
            packing=self._packing(lengths),
            keeps_normaliser=self.capture,
            measures_overlap=self.overlap,
        )
        verified = self._now()
        features, accepted, bonus = judged.features, judged.accepted, judged.bonus
        if proposal is not None and self.draft is not None:
            following = torch.cat([proposal.tokens, bonus[:, None]], dim=1)
            following.scatter_(1, accepted[:, None], bonus[:, None])
            width = features.shape[1]
            observed_to = visible - block - 1 + width
            observation = Observation(features, following[:, :width], positions, accepted + 1, observed_to)
            self.draft.observe(self.rows.state, observation)
        observed = self._now()
        seconds = (drafted - begin + observed - verified, verified - drafted)
        host = to_host(judged, lengths, proposal)
        for row, lane in enumerate(lanes):
            if lane.finish_reason is None:
                if host.has_nan[row]:
                    raise self._not_finite(f"behind token {lane.position} of '{lane.request.prompt_id}'")
                if judged.log_normaliser is not None:
                    kept = slice(0, host.accepted[row] + 1)
                    states = (features, judged.last_hidden, judged.log_normaliser)
                    lane.captured.append(Captured(*(part[row, kept].clone() for part in states)))
                reason = lane.record(host, row, seconds, self.stop_tokens, self.max_new_tokens)
                if reason is not None:
                    yield self._finish(lane, reason)

    def _not_finite(self, where: str) -> TargetError:
        return TargetError(
            f"{self.target.name} gives NaN {where} in {str(self.target.dtype).removeprefix('torch.')}: its weights are "
            "damaged, or overflow in this dtype. Try target.dtype=float32."
        )

    def _propose(self, anchors: Tensor, positions: Tensor, visible: int, uniforms: Tensor) -> Proposal | None:
        if self.draft is None:
            return None
        sampler = Sampler(self.sampling, uniforms[:, : self.block])
        return self.draft.propose(self.rows.state, anchors, positions, visible, sampler)

    def _lengths(self, proposal: Proposal | None, anchors: Tensor) -> Tensor:
        """How many slots of each lane are verified: what was proposed, cut by the schedule."""
        proposed = torch.full_like(anchors, self.block)
        if proposal is None or self.draft is None:
            return proposed
        if self.draft.stops_at_stop_token and self.stop_tokens:
            # A stop token is known before the slots behind it are drawn, so this cut is lossless.
            stops = torch.tensor(sorted(self.stop_tokens), device=self.device)
            before = (~torch.isin(proposal.tokens, stops)).long().cumprod(dim=1).sum(dim=1)
            proposed = proposed.minimum(before + 1)
        proposed = proposed * torch.tensor(self.rows.are_active, device=self.device)
        if isinstance(self.schedule, FullSchedule):
            return proposed
        places = [lane.position for lane in self.rows.lanes if lane.finish_reason is None]
        context = sum(places) // len(places)
        earlier = self.situations[0] if len(self.situations) == 2 else None
        now = Situation(proposal.confidence_logits, proposal.max_probs, proposed, len(places), context)
        self.situations.append(now)
        return self.schedule.lengths(now._replace(earlier=earlier))

    def _packing(self, lengths: Tensor) -> Packing | None:
        """The verified tokens side by side where a schedule or finished lanes leave some out; None for whole blocks."""
        if self.draft is None or not self.target.packs:
            return None
        if not isinstance(self.schedule, FullSchedule):
            # The host waits for the schedule's lengths.
            return Packing.of((lengths + 1).tolist(), self.device)
        active = self.rows.are_active
        return None if all(active) else Packing.of([1 + self.block * one for one in active], self.device)

    def _finish(self, lane: Lane, reason: str) -> Finished:
        lane.finish_reason = reason
        # A finished row plays on until another takes its place; it must stay within the positions that were checked.
        output = lane.output = lane.output[: self.max_new_tokens]
        captured = None
        if self.capture:
            upto = len(lane.request.prompt_ids) + len(output) - 1
            captured = Captured(*(torch.cat(parts)[:upto] for parts in zip(*lane.captured, strict=True)))
        return Finished(lane.request.prompt_id, output, lane.rounds, reason, captured)

    def _uniforms(self, requests: Sequence[Request], rounds: list[int], count: int) -> Tensor:
        keys = torch.tensor([prompt_key(request.prompt_id) for request in requests], device=self.device)
        return round_uniforms(self.seed, keys, torch.tensor(rounds, device=self.device), count)

    def _now(self) -> float:
        if not self.timers:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
