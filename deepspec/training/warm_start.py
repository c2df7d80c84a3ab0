"""A draft that starts from the weights of a saved one: a warm start, and what a resumed run builds first.

The reduced vocabulary comes with the weights. Made anew from other answers it would have the same shapes and mean
other tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspec.algorithms.base import DraftModel, DraftSpec, make_draft, spec_of
from deepspec.algorithms.checkpoint import load_draft
from deepspec.config import AlgorithmConfig, BlockAlgorithmConfig
from deepspec.errors import CheckpointError
from deepspec.targets.base import Target

# Settings of the layers under which the same weights compute something else.
_LAYER_KEYS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
)


def warm_started(folder: str | Path, config: AlgorithmConfig, target: Target) -> DraftModel:
    """Make the draft that a configuration describes, with the weights and the vocabulary of a saved one.

    Args:
        folder: the saved draft in any format that can be read; a folder or hub id.
        config: the algorithm's settings, which hold in place of the saved ones.
        target: the frozen target.

    Raises:
        CheckpointError: the saved draft cannot be read, or its weights mean something else in this one.
    """
    spec = spec_of(config, target)
    source = load_draft(folder, target, torch.float32)
    target.tap(spec.layer_ids)  # loading set them to the saved draft's
    vocab_size = None if source.vocab is None else len(source.vocab.target_ids)
    _refuse_unlike(
        folder,
        _meaning(source.config, source.spec) | {"algorithm.draft_vocab_size": vocab_size},
        _meaning(config, spec) | {"algorithm.draft_vocab_size": config.draft_vocab_size},
    )
    draft = make_draft(config, spec, target, source.vocab)
    _refuse_unlike(folder, _shapes(source), _shapes(draft))
    draft.load_state_dict(source.state_dict())
    return draft


def _meaning(config: AlgorithmConfig, spec: DraftSpec) -> dict[str, Any]:
    """What the same weights need to compute the same."""
    layers = spec.layer_config.to_dict()
    is_block = isinstance(config, BlockAlgorithmConfig)
    return {
        "algorithm.name": config.name,
        "algorithm.layout": config.model_dump()["layout"] if is_block else None,
        "target.layers": list(spec.layer_ids),
        "target.mask_token_id": spec.mask_token_id if is_block else None,
        "family": spec.family.name,
    } | {key: layers.get(key) for key in _LAYER_KEYS}


def _refuse_unlike(folder: str | Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    odd = [key for key in wanted.keys() | saved.keys() if saved.get(key) != wanted.get(key)]
    if odd:
        shown = "; ".join(f"{key}: {saved.get(key)} -> {wanted.get(key)}" for key in sorted(odd)[:3])
        raise CheckpointError(
            f"the weights of {folder} are those of another kind of draft ({shown}). Give this run the same settings, "
            "or start without them: checkpoint.warm_start=null and, where the run has checkpoints, another exp_name."
        )


def _shapes(draft: DraftModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in draft.state_dict().items()}
