"""Acceptance length and survival of real decoding against the sum over every possible first round."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from helpers import kind_of_draft, tiny_target
from torch import Tensor

from deepspec.algorithms.base import DraftModel, Observation, Sampler
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.evaluation.statistics import acceptance_length, acceptance_length_by_length, conditional_acceptance
from deepspec.targets.base import Target

PROMPT = [1, 5, 2]
SMALL = 8
COUNT = 6000
K = 2


@lru_cache
def _target() -> Target:
    return tiny_target("qwen3", vocab_size=SMALL, dtype=torch.float64, seed=4)


def _next_probs(prefixes: list[list[int]]) -> Tensor:
    """The target's distribution behind each prefix, from full forwards."""
    with torch.inference_mode():
        logits = _target().model(input_ids=torch.tensor(prefixes), use_cache=False).logits[:, -1]
    return logits.softmax(dim=-1).float()


def _draft_probs(draft: DraftModel, anchor: int) -> tuple[Tensor, Tensor]:
    """q of the first slot [V], and q of the second behind every first token [V, V]."""
    target = _target()
    target.tap(draft.spec.layer_ids)
    features, _ = target.features(torch.tensor([PROMPT] * SMALL))
    following = torch.tensor([[*PROMPT[1:], anchor]] * SMALL)
    length = len(PROMPT)

    def propose(uniforms: Tensor) -> tuple[Tensor, Tensor]:
        state = draft.new_state(SMALL)
        starts, counts = torch.zeros(SMALL, dtype=torch.long), torch.full((SMALL,), length)
        with torch.inference_mode():
            draft.observe(state, Observation(features, following, starts, counts, length))
            anchors, places = torch.full((SMALL,), anchor), torch.full((SMALL,), length)
            proposal = draft.propose(state, anchors, places, length + K + 1, Sampler(Sampling(), uniforms))
        return proposal.tokens, proposal.probs

    first = propose(torch.zeros(SMALL, K, dtype=torch.float64))[1][0, 0]
    middles = first.double().cumsum(dim=0) - first.double() / 2
    tokens, probs = propose(torch.stack([middles, torch.zeros(SMALL)], dim=1))
    assert tokens[:, 0].tolist() == list(range(SMALL)), "every first token must be drawn once"
    return first, probs[:, 1]


def _exact(draft: DraftModel) -> tuple[float, float]:
    """Probabilities that the first round of an answer accepts at least one and two tokens."""
    one = two = 0.0
    for anchor, chance in enumerate(_next_probs([PROMPT])[0].tolist()):
        p1 = _next_probs([[*PROMPT, anchor]])[0]
        p2 = _next_probs([[*PROMPT, anchor, token] for token in range(SMALL)])
        q1, q2 = _draft_probs(draft, anchor)
        # A drafted and accepted token has probability q min(1, p / q) = min(p, q).
        accepted = torch.minimum(p1, q1)
        one += chance * float(accepted.sum())
        two += chance * float((accepted * torch.minimum(p2, q2).sum(dim=-1)).sum())
    return one, two


@pytest.mark.parametrize("kind", ["dspark-vanilla", "dspark-rnn", "dflash-fill_in", "eagle3"])
def test_measured_acceptance_equals_the_sum_over_every_first_round(kind: str) -> None:
    draft = kind_of_draft(_target(), kind, num_draft_tokens=K).eval()
    one, two = _exact(draft)
    requests = [Request(f"r{index}", PROMPT) for index in range(COUNT)]
    # One token comes from the prefill, so two new tokens leave exactly one round, whatever it accepts.
    answers = generate(_target(), draft, requests, Sampling(), max_new_tokens=2, batch_size=500, timers=False)
    rounds = [record for answer in answers for record in answer.rounds]
    assert len(rounds) == COUNT
    # Four standard errors; emitted tokens lie in 1..3, so their deviation is at most 1.
    assert acceptance_length(rounds) == pytest.approx(1 + one + two, abs=4 / COUNT**0.5)
    first, second = conditional_acceptance(rounds, K)
    assert first == pytest.approx(one, abs=2 / COUNT**0.5)
    assert second == pytest.approx(two / one, abs=2 / (COUNT * one) ** 0.5)
    assert acceptance_length_by_length(rounds, K)[0] == pytest.approx(1 + one, abs=2 / COUNT**0.5)
