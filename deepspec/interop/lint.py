"""What is wrong with a draft, seen from its files alone: damage, untrained parts, keys that belong to a target.

It takes a config and weights in our words and loads no target.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspec.algorithms.base import VocabMap
from deepspec.algorithms.checkpoint import algorithm_of, layer_config_of
from deepspec.config import AlgorithmConfig, DSparkConfig, Eagle3Config
from deepspec.errors import CheckpointError, DeepSpecError
from deepspec.interop.reading import TARGET_ONLY
from deepspec.targets.family import family_of

# How many there are where the config leaves them to the target's depth.
_EAGLE3_TAPS = range(3)


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
        name: word for it, as in `allow`.
        text: what is wrong and what to do, a sentence or two.
    """

    name: str
    text: str


def lint(fields: Mapping[str, Any], state: Mapping[str, Tensor]) -> list[Finding]:
    """Everything that is wrong with a draft; an empty list for a sound one.

    Args:
        fields: config.json in our words (`read_config`).
        state: weights by our names.
    """
    try:
        algorithm = algorithm_of(dict(fields))
        wanted = expected_shapes(fields, algorithm)
    except DeepSpecError as error:
        return [Finding("config", str(error))]
    return [
        *_shapes(state, wanted, fields),
        *_values(state, wanted),
        *_vocabulary(state, int(fields["vocab_size"])),
        *_config(fields),
    ]


def expected_shapes(fields: Mapping[str, Any], algorithm: AlgorithmConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a config promises, frozen vocabulary weights left out."""
    family = family_of(fields["model_type"])
    config: Any = layer_config_of(dict(fields), Path())
    size, vocab = int(fields["hidden_size"]), int(fields["vocab_size"])
    draft_vocab = int(fields.get("draft_vocab_size") or vocab)
    with torch.device("meta"):
        layer = family.layer(config, 0)
        norm = family.norm(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(algorithm.num_layers):
        for name, value in layer.state_dict().items():
            shapes[f"layers.{index}.{name}"] = tuple(value.shape)
    for name, value in norm.state_dict().items():
        shapes[f"norm.{name}"] = tuple(value.shape)
        where = "layers.0.hidden_norm" if isinstance(algorithm, Eagle3Config) else "hidden_norm"
        shapes[f"{where}.{name}"] = tuple(value.shape)
    taps = fields["target_layer_ids"] or _EAGLE3_TAPS
    shapes["fc.weight"] = (size, len(taps) * size)
    if isinstance(algorithm, Eagle3Config):
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"layers.0.self_attn.{name}.weight"
            shapes[key] = (shapes[key][0], 2 * size)
    if isinstance(algorithm, DSparkConfig):
        shapes |= _head_shapes(algorithm, size, vocab, draft_vocab)
    if draft_vocab < vocab:
        shapes["d2t"] = (draft_vocab,)
    return shapes


def _head_shapes(algorithm: DSparkConfig, size: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    rank = algorithm.markov_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, rank)
    if rank and algorithm.markov_head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, size + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and algorithm.markov_head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + size)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if algorithm.confidence_head:
        reads = size + (rank if algorithm.confidence_reads_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, reads), "confidence_head.proj.bias": (1,)}
    return shapes


def _shapes(
    state: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], fields: Mapping[str, Any]
) -> list[Finding]:
    size, vocab = fields["hidden_size"], fields["vocab_size"]
    optional = {
        "embed_tokens.weight": (vocab, size),
        "lm_head.weight": (fields.get("draft_vocab_size") or vocab, size),
        "t2d": (vocab,),
        # A full vocabulary may bring maps that say so.
        "d2t": None,
    }
    found = []
    missing = sorted(wanted.keys() - state.keys())
    if missing:
        found.append(Finding("missing", f"weights are missing: {_some(missing)}. The config promises them."))
    unknown = sorted(state.keys() - wanted.keys() - optional.keys())
    if unknown:
        found.append(
            Finding("unknown", f"weights that nothing reads: {_some(unknown)}. Engines with strict names refuse them.")
        )
    wrong = [
        f"{name} {tuple(value.shape)} instead of {shape}"
        for name, value in sorted(state.items())
        if (shape := wanted.get(name) or optional.get(name)) and tuple(value.shape) != shape
    ]
    if wrong:
        found.append(Finding("shape", f"wrong shape: {_some(wrong)}. Config and weights belong to other drafts."))
    return found


def _values(state: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    found = []
    integers = sorted(
        f"{name} ({str(state[name].dtype).removeprefix('torch.')})"
        for name in wanted
        if name in state and name not in ("d2t", "t2d") and not state[name].is_floating_point()
    )
    if integers:
        found.append(
            Finding("integers", f"not real numbers: {_some(integers)}. Use the draft as it was before quantisation.")
        )
    broken = sorted(name for name, value in state.items() if value.is_floating_point() and not value.isfinite().all())
    if broken:
        found.append(Finding("not_finite", f"NaN or infinite weights: {_some(broken)}. Use an earlier checkpoint."))
    norms = [name for name in wanted if "norm" in name and name in state]
    if norms and all(bool((state[name] == 1).all()) for name in norms):
        found.append(
            Finding(
                "untrained",
                f"all {len(norms)} norms are exactly 1: these weights were never trained. Export the checkpoint that a "
                "training wrote, or allow it with allow_untrained=true.",
            )
        )
    zero = [name for name in ("fc.weight",) if name in state and not state[name].any()]
    if zero:
        found.append(Finding("zero", f"{zero[0]} is all zeros, so the draft sees nothing of its target."))
    return found


def _vocabulary(state: Mapping[str, Tensor], vocab: int) -> list[Finding]:
    if "d2t" not in state or VocabMap.from_tensors(state, vocab) is not None:
        return []
    return [
        Finding(
            "vocabulary",
            "d2t and t2d are no draft vocabulary: d2t must hold offsets (target id = draft id + d2t), not ids, that "
            f"ascend to ids below {vocab}, and t2d must mark those ids. Engines would read other tokens.",
        )
    ]


def _config(fields: Mapping[str, Any]) -> list[Finding]:
    found = []
    alien = sorted(key for key in fields if TARGET_ONLY.fullmatch(key))
    if alien:
        found.append(
            Finding(
                "target_keys",
                f"keys of the target's config that say something wrong about a draft: {_some(alien)}. They are left "
                "out of every export.",
            )
        )
    layers, depth = fields["target_layer_ids"], fields.get("num_target_layers")
    if layers is not None and (
        any(later <= earlier for earlier, later in itertools.pairwise(layers))
        or (depth is not None and not all(-1 <= layer < depth - 1 for layer in layers))
    ):
        limit = "" if depth is None else f", within -1..{depth - 2}"
        found.append(Finding("taps", f"target_layer_ids {layers} must rise{limit}: engines cannot capture others."))
    mask = fields.get("mask_token_id")
    if mask is not None and not 0 <= mask < fields["vocab_size"]:
        found.append(Finding("mask", f"mask_token_id {mask} has no embedding row (ids 0..{fields['vocab_size'] - 1})."))
    return found


def require_sound(findings: list[Finding], where: str, allow: frozenset[str]) -> list[Finding]:
    """Refuse a draft with findings that are not allowed; returns those that are.

    Raises:
        CheckpointError: naming all that is wrong.
    """
    wrong = [one.text for one in findings if one.name not in allow]
    if wrong:
        raise CheckpointError(f"{where}: {' '.join(wrong)}")
    return findings


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
