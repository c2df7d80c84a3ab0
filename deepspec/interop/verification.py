"""Does an export decode as its draft does? Both are run here, and every round must be the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import draft_from, load_draft
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.errors import CheckpointError
from deepspec.interop.settings import ExportConfig
from deepspec.runtime import choose_device
from deepspec.targets.base import Target

# Same weights, same machine: far below what another tap, layout or rotary base changes.
_PROBABILITY = 1e-3
_CHECK_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Question: what is 17 * 23? Answer: let us compute it step by step.",
    "Once upon a time, in a small village by the sea,",
)


def check_rounds(
    config: ExportConfig, fields: dict[str, Any], state: dict[str, Tensor], path: Path, folder: Path
) -> None:
    """Decode with a draft and with its export, and compare.

    Args:
        config: of the export.
        fields: the draft's config in our words.
        state: its weights by our names.
        path: where it came from.
        folder: the export.

    Raises:
        CheckpointError: rounds differ; the export stays where it is.
    """
    target = Target.load(config.target, choose_device(config.device), fields["target_layer_ids"])
    if config.dtype is not None:
        # The export is compared with what its own rounding leaves of the draft.
        wanted: torch.dtype = getattr(torch, config.dtype)
        state = {name: value.to(wanted) if value.is_floating_point() else value for name, value in state.items()}
    first = _answers(config, target, draft_from(fields, dict(state), target, path))
    second = _answers(config, target, load_draft(folder, target))
    different = sum(not _are_equal(one, other) for one, other in zip(first, second, strict=True))
    if different:
        raise CheckpointError(
            f"{folder} decodes otherwise than {path}: {different} of {len(first)} answers differ in tokens, rounds or "
            "probabilities. Do not use it; please report the draft's config.json."
        )
    rounds = [item for one in first for item in one.rounds]
    tau = sum(item.emitted for item in rounds) / max(len(rounds), 1)
    console.info(f"verified: {len(first)} answers, {len(rounds)} rounds equal, tau {tau:.2f} on them")


def _answers(config: ExportConfig, target: Target, draft: DraftModel) -> list[Finished]:
    requests = [Request(str(index), target.tokenizer.encode(text)) for index, text in enumerate(_CHECK_TEXTS)]
    found = generate(target, draft, requests, Sampling(0.0), max_new_tokens=config.verify_tokens, timers=False)
    return sorted(found, key=lambda one: one.prompt_id)


def _are_equal(one: Finished, other: Finished) -> bool:
    """Tokens and rounds are the same; the draft's probabilities tell of slots that neither got accepted."""
    if one.output_ids != other.output_ids or len(one.rounds) != len(other.rounds):
        return False
    return all(
        (mine.accepted, len(mine.max_draft_prob)) == (theirs.accepted, len(theirs.max_draft_prob))
        and torch.allclose(torch.tensor(mine.max_draft_prob), torch.tensor(theirs.max_draft_prob), rtol=_PROBABILITY)
        for mine, theirs in zip(one.rounds, other.rounds, strict=True)
    )
