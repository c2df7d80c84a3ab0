"""Model classes of training libraries compute what our drafts compute, and SGLang reads what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chat_targets import MASK_TOKEN
from conformance import objectives, references
from conformance.drafts import LAYERS, TEMPERATURES, K
from conformance.plan import FORWARDS, PARSING, marked
from conformance.running import Bench, Run

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1800)]

Record = Callable[[str, Any], None]


@pytest.mark.parametrize("run", marked(FORWARDS))
def test_hidden_states_logits_losses_and_their_gradient_are_ours(
    run: Run, bench: Bench, found: dict[str, Any], record_property: Record
) -> None:
    losses = objectives.expected(bench.workshop, run.case, run.client)
    wanted = references.expected(bench.workshop, run.case) | {f"{name} loss": value for name, value in losses.items()}
    theirs = {name: value for name, value in found.items() if name != "losses"}
    theirs |= {f"{name} loss": value for name, value in found["losses"].items()}
    assert "hidden" in theirs
    assert {f"{name} loss" for name in losses} <= theirs.keys()
    differences = {name: (torch.tensor(value) - wanted[name]).abs().max().item() for name, value in theirs.items()}
    record_property("difference", float(f"{max(differences.values()):.0e}"))
    record_property("compared", sorted(differences))
    assert all(difference <= 1e-5 for difference in differences.values()), differences


@pytest.mark.parametrize("run", marked(PARSING))
def test_sglang_reads_taps_block_heads_and_tables_as_they_were_written(run: Run, found: dict[str, Any]) -> None:
    assert found["is_known"]
    assert found["layer_ids"] == list(LAYERS)
    if run.method == "eagle3":
        assert found["feature_size"] == 64 * len(LAYERS)
        return
    assert found["mask_token_id"] == MASK_TOKEN
    if run.method == "dflash":
        assert found["block_size"] == K + 1
        return
    assert (found["num_draft_tokens"], found["verify_tokens"]) == (K, K + 1)
    assert found["samples_from_anchor"] is True
    heads = {"dspark": ["vanilla", 8], "dspark_gated": ["gated", 8], "dspark_rnn": ["rnn", 8], "dflash": ["vanilla", 1]}
    assert found["markov"] == heads[run.case]
    assert found["temperatures"] == TEMPERATURES
    # The table's rates at 1 and 8 tokens; the engine takes the point to the left.
    assert found["steps_per_second"] == [40.0, 40.0, 30.0, 30.0]
