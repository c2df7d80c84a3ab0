"""The contract of every target family: features, training, greedy decoding without loss, save and load."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from families import FAMILIES, WRAPPED, family_model, family_target
from helpers import assert_ragged_forwards_equal_one, batch_of, overfit, tiny_draft

from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import load_draft, save_draft
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.targets.base import Target

EVERY = [*FAMILIES, *WRAPPED]
PROMPTS = [list(range(5, 17)), [40, 7, 22], list(range(60, 85))]
LONGEST = 12


@lru_cache
def _target(family: str) -> Target:
    return family_target(family)


@lru_cache
def _greedy(family: str) -> list[list[int]]:
    """Greedy answers by forwards over whole sequences, with the family's own eager attention and no cache."""
    model = family_model(family, "eager")
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(LONGEST):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def _decoded(target: Target, draft: DraftModel) -> tuple[list[list[int]], list[int]]:
    requests = [Request(f"p{index}", prompt) for index, prompt in enumerate(PROMPTS)]
    answers = list(generate(target, draft, requests, Sampling(0.0), max_new_tokens=LONGEST, batch_size=2, timers=False))
    answers.sort(key=lambda one: one.prompt_id)
    return [one.output_ids for one in answers], [item.accepted for one in answers for item in one.rounds]


@pytest.mark.parametrize("family", EVERY)
def test_features_and_logits_are_those_of_the_familys_own_eager_attention(family: str) -> None:
    target, model = _target(family), family_model(family, "eager")
    ids = torch.randint(4, 90, (2, 21), generator=torch.Generator().manual_seed(0))
    features, last_hidden = target.features(ids)
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    for part, layer in zip(features.split(32, dim=-1), target.layer_ids, strict=True):
        torch.testing.assert_close(part, output.hidden_states[layer + 1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(target.logits(last_hidden), output.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(target.head.embed(ids), output.hidden_states[0])
    target.check()


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [(family, "dspark") for family in EVERY]
    + [(family, "eagle3") for family in ("mistral", "gemma4_text", "gpt_oss", "qwen3_next", "qwen3_vl")],
)
def test_a_draft_of_any_family_learns_decodes_without_loss_and_is_read_back(
    family: str, algorithm: str, tmp_path: Path
) -> None:
    target = _target(family)
    draft = tiny_draft(target, algorithm)
    batch = batch_of(target, list(zip(PROMPTS, _greedy(family), strict=True)), anchors=8)
    history = overfit(draft, batch, steps=16)
    assert history[-1] < 0.8 * history[0]
    draft.eval()
    answers, accepted = _decoded(target, draft)
    assert answers == _greedy(family)
    assert sum(accepted) > 0, "no token was ever accepted, so nothing had to be rolled back to a place inside a block"
    save_draft(draft, tmp_path)
    again = load_draft(tmp_path, target)
    assert _decoded(target, again) == (answers, accepted)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_linear_attention_goes_on_from_the_kept_tokens_of_every_row(family: str) -> None:
    ids = torch.randint(4, 90, (3, 30), generator=torch.Generator().manual_seed(1))
    steps = ((9, (9, 4, 1)), (4, (1, 4, 3)), (4, (2, 0, 4)), (4, (4, 4, 4)), (1, (1, 1, 1)), (4, (3, 1, 2)))
    assert_ragged_forwards_equal_one(_target(family), ids, steps, rtol=1e-3, atol=2e-3)
