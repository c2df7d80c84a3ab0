"""Real engines decode our exports to the target's own greedy tokens, in as many rounds as our evaluator counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conformance.drafts import CASES, K, Workshop
from conformance.plan import CONTROLS, DECODING, marked, marked_cases
from conformance.running import Bench, Run

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1800)]

# Exact where a client works prompt by prompt. vLLM batches, and its kernels round otherwise than ours.
_ROUNDS_A_PROMPT = {"vllm": 1 / 8}
_LOST_SHARE = 0.15

Record = Callable[[str, Any], None]


@pytest.mark.parametrize("case", marked_cases(CASES))
def test_drafts_know_their_answers_so_well_that_a_fault_shows_and_not_by_heart(workshop: Workshop, case: str) -> None:
    """A draft that is never rejected would not tell whether an engine rolls back as it should."""
    measured = workshop.measured(case)
    assert measured.tokens == workshop.plain_tokens(CASES[case].target)
    assert 2.0 < measured.tau < K + 1


@pytest.mark.parametrize("run", marked(DECODING))
def test_tokens_and_rounds_are_those_of_our_evaluator(
    run: Run, bench: Bench, found: dict[str, Any], record_property: Record
) -> None:
    measured = bench.workshop.measured(run.case)
    ours, theirs = sum(measured.rounds), found["rounds"]
    record_property("rounds", ours)
    record_property("their_rounds", theirs)
    record_property("tau", round(measured.tau, 2))
    assert found["tokens"] == measured.tokens
    if run.client not in _ROUNDS_A_PROMPT:
        assert found["rounds_by_prompt"] == measured.rounds
    assert abs(theirs - ours) <= _ROUNDS_A_PROMPT.get(run.client, 0) * len(measured.rounds)


@pytest.mark.parametrize("run", marked(CONTROLS))
def test_a_broken_export_still_says_the_same_but_needs_more_rounds(
    run: Run, bench: Bench, found: dict[str, Any], record_property: Record
) -> None:
    """Tokens are the target's whatever the draft proposes, so the ratio of rounds is that of tau."""
    measured = bench.workshop.measured(run.case)
    ours, theirs = sum(measured.rounds), found["rounds"]
    record_property("rounds", ours)
    record_property("their_rounds", theirs)
    assert found["tokens"] == measured.tokens
    assert ours / theirs < 1 - _LOST_SHARE
