"""One request in flight, as the host sees it: its tokens, its rounds, and how a round ends.

The rules of docs/measuring.md for stop tokens and limits live here. Nothing here touches a model or a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.algorithms.base import Proposal
from deepspec.decoding.judge import Judgement
from deepspec.decoding.rounds import Round


class Request(NamedTuple):
    """A prompt to answer.

    Attributes:
        prompt_id: unique among the requests; seeds the request's random draws.
        prompt_ids: token ids, at least one.
    """

    prompt_id: str
    prompt_ids: Sequence[int]


class Captured(NamedTuple):
    """What the target said while it answered, at positions 0..n-2 of a sequence of n tokens.

    Attributes:
        features: [n-1, M*H] tapped features.
        last_hidden: [n-1, H] last hidden states.
        log_normaliser: [n-1] fp32 logsumexp of the logits, from the prompt's last position on; 0 before.
    """

    features: Tensor
    last_hidden: Tensor
    log_normaliser: Tensor


class Finished(NamedTuple):
    """An answered request.

    Attributes:
        prompt_id: of the request.
        output_ids: generated ids, stop token included, at most max_new_tokens.
        rounds: record of every round; the prefill's own token belongs to none.
        finish_reason: "stop" or "length".
        captured: the target's states, where asked for.
    """

    prompt_id: str
    output_ids: list[int]
    rounds: list[Round]
    finish_reason: str
    captured: Captured | None = None


class HostRound(NamedTuple):
    """One round's outcome on the host, one entry a lane."""

    tokens: list[list[int]]
    accepted: list[int]
    bonus: list[int]
    proposed: list[int]
    has_nan: list[bool]
    confidence: list[list[float]] | None
    max_probs: list[list[float]]
    overlap: list[list[float]] | None


class Lane:
    """A request in flight, as the host sees it."""

    def __init__(self, request: Request, first_token: int) -> None:
        self.request = request
        self.output = [first_token]
        self.rounds: list[Round] = []
        self.finish_reason: str | None = None
        self.captured: list[Captured] = []

    @property
    def position(self) -> int:
        """Index of the anchor in prompt + output."""
        return len(self.request.prompt_ids) + len(self.output) - 1

    def record(
        self,
        host: HostRound,
        row: int,
        seconds: tuple[float, float],
        stop_tokens: frozenset[int],
        max_new_tokens: int,
    ) -> str | None:
        """Append a round and its tokens; returns the finish reason once there is one.

        Args:
            host: the batch's round.
            row: this request's entry.
            seconds: of draft and verification.
            stop_tokens: ids that end an answer.
            max_new_tokens: limit of the output.
        """
        accepted, proposed = host.accepted[row], host.proposed[row]
        kept = host.tokens[row][:accepted]
        stop = next((index for index, token in enumerate(kept) if token in stop_tokens), None)
        if stop is not None:
            # The slots behind an accepted stop token were never part of the answer.
            kept, accepted, proposed = kept[: stop + 1], stop + 1, stop + 1
        emitted = kept if stop is not None else [*kept, host.bonus[row]]
        position = self.position
        self.output += emitted
        ended_by = "reject" if accepted < proposed else "full"
        finish = None
        if stop is not None or host.bonus[row] in stop_tokens:
            ended_by = finish = "stop"
        if len(self.output) >= max_new_tokens and not (finish and len(self.output) == max_new_tokens):
            ended_by, finish = "limit", "length"
        self.rounds.append(
            Round(
                prompt_id=self.request.prompt_id,
                round=len(self.rounds),
                position=position,
                proposed=proposed,
                accepted=accepted,
                ended_by=ended_by,
                confidence_logits=None if host.confidence is None else tuple(host.confidence[row]),
                max_draft_prob=tuple(host.max_probs[row]),
                seconds_draft=seconds[0],
                seconds_verify=seconds[1],
                emitted=len(emitted),
                overlap=() if host.overlap is None else tuple(host.overlap[row][:proposed]),
                rejected=host.tokens[row][accepted] if accepted < proposed else None,
            )
        )
        return finish


def is_worth_compacting(rows: int, active: int) -> bool:
    """Whether a batch drops its finished rows once none waits for their places.

    From a quarter on: by its bytes, copying the cache of the others costs about as much as a round on a CPU, which the
    rows that are left out give back within a few rounds.
    """
    return 4 * active <= 3 * rows


def to_host(judged: Judgement, lengths: Tensor, proposal: Proposal | None) -> HostRound:
    """Bring a round to the host in two copies."""
    head = [part[:, None] for part in (judged.accepted, judged.bonus, lengths, judged.has_nan.long())]
    packed = torch.cat(head if proposal is None else [*head, proposal.tokens], dim=1).tolist()
    max_probs: list[list[float]] = [[] for _ in packed]
    confidence: list[list[float]] | None = None
    overlap: list[list[float]] | None = None
    if proposal is not None:
        block = proposal.tokens.shape[1]
        has_confidence = proposal.confidence_logits is not None
        found = [proposal.max_probs, proposal.confidence_logits, judged.overlap]
        numbers = torch.cat([part.float() for part in found if part is not None], dim=1).tolist()
        max_probs = [row[:block] for row in numbers]
        confidence = [row[block : 2 * block] for row in numbers] if has_confidence else None
        if judged.overlap is not None:
            overlap = [row[block * (1 + has_confidence) :] for row in numbers]
    return HostRound(
        tokens=[row[4:] for row in packed],
        accepted=[row[0] for row in packed],
        bonus=[row[1] for row in packed],
        proposed=[row[2] for row in packed],
        has_nan=[bool(row[3]) for row in packed],
        confidence=confidence,
        max_probs=max_probs,
        overlap=overlap,
    )
