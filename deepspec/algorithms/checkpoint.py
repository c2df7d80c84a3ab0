"""Draft checkpoints: a folder with config.json and model.safetensors, a superset of DeepSpec's format.

Reads what DeepSpec released and what this project writes. It knows names and keys, not how a draft computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

import deepspec
from deepspec.algorithms.base import DraftModel, DraftSpec, VocabMap, make_draft
from deepspec.config import AlgorithmConfig, DFlashConfig, DSparkConfig, Eagle3Config, default_position_decay
from deepspec.errors import CheckpointError, TargetError
from deepspec.interop.folder import CONFIG, WEIGHTS, draft_folder, read_json_config, read_state
from deepspec.interop.reading import plain_rope, translate
from deepspec.interop.taps import eagle3_default
from deepspec.targets.base import Target
from deepspec.targets.family import family_of

# What a target's config may hold that says nothing about a draft, or the wrong thing.
_TARGET_ONLY = re.compile(r"mrope_.*|quantization_config|auto_map|max_window_layers|_.*|transformers_version|dtype")
_ALGORITHM_KEY = "deepspec_algorithm"
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_target_layers",
)
_OBJECTS = (_ALGORITHM_KEY, "rope_parameters", "rope_scaling")
_KINDS: dict[str, type[AlgorithmConfig]] = {"dspark": DSparkConfig, "dflash": DFlashConfig, "eagle3": Eagle3Config}


def save_draft(
    draft: DraftModel, folder: Path, weights: Mapping[str, Tensor] | None = None, num_anchors: int | None = None
) -> None:
    """Write config.json and model.safetensors into an existing folder.

    Args:
        draft: any draft; frozen vocabulary weights are not written.
        folder: where to.
        weights: values of its parameters, where it holds only a part of them itself; None takes its own.
        num_anchors: blocks per sequence that it was trained with, for DeepSpec's key of that name.
    """
    values = draft.state_dict() | dict(weights or {})
    state = {name: value.detach().cpu().contiguous() for name, value in values.items()}
    if draft.vocab is not None:
        state |= draft.vocab.to(torch.device("cpu")).tensors()
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    fields = checkpoint_config(draft) | ({} if num_anchors is None else {"num_anchors": num_anchors})
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def checkpoint_config(draft: DraftModel) -> dict[str, Any]:
    """The content of config.json: the layers' own config and DeepSpec's keys for the algorithm."""
    algorithm = draft.config
    fields = {key: value for key, value in draft.layer_config.to_dict().items() if not _TARGET_ONLY.fullmatch(key)}
    kind = "Eagle3" if isinstance(algorithm, Eagle3Config) else "DSpark"
    fields.update(
        architectures=[f"{draft.family.architecture}{kind}Model"],
        num_target_layers=draft.num_target_layers,
        target_layer_ids=list(draft.spec.layer_ids),
        mask_token_id=draft.spec.mask_token_id,
        tie_word_embeddings=False,
        deepspec_version=deepspec.__version__,
        num_draft_tokens=algorithm.num_draft_tokens,
        sample_from_anchor=True,
    )
    fields[_ALGORITHM_KEY] = algorithm.model_dump(mode="json")
    if draft.vocab is not None:
        fields["draft_vocab_size"] = len(draft.vocab.target_ids)
    theta = _rope_theta(fields)
    if theta is not None:
        fields["rope_theta"] = theta
    if isinstance(algorithm, Eagle3Config):
        fields.update(
            _public_keys(algorithm),
            step_loss_decay=algorithm.step_decay,
            norm_before_residual=algorithm.norm_before_residual,
            draft_num_hidden_layers=algorithm.num_layers,
        )
        return fields
    assert isinstance(algorithm, DSparkConfig | DFlashConfig)
    fields.update(_public_keys(algorithm), markov_rank=0, enable_confidence_head=False)
    if isinstance(algorithm, DSparkConfig):
        fields.update(
            markov_rank=algorithm.markov_rank,
            markov_head_type=algorithm.markov_head,
            enable_confidence_head=algorithm.confidence_head,
            confidence_head_with_markov=algorithm.confidence_reads_markov,
        )
    return fields


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read a draft's config.json; files of others come translated into our words.

    `target_layer_ids` is None where the taps follow from the target's depth.

    Raises:
        CheckpointError: there is none, or it is not a draft's.
    """
    path = draft_folder(folder)
    fields = translate(read_json_config(path), str(path / CONFIG)).fields
    missing = [key for key in ("target_layer_ids", "model_type", "hidden_size", "vocab_size") if key not in fields]
    if missing:
        raise CheckpointError(f"{path / CONFIG} lacks {', '.join(missing)}, so the draft cannot be rebuilt from it.")
    counts = [key for key in _COUNTS if key in fields and fields[key] is not None]
    wrong = [key for key in counts if type(fields[key]) is not int or fields[key] < 1]
    wrong += [key for key in ("hidden_size", "vocab_size") if fields[key] is None]
    wrong += [key for key in _OBJECTS if not isinstance(fields.get(key), dict | None)]
    wrong += [key for key in ("mask_token_id",) if not isinstance(fields.get(key), int | None)]
    if wrong:
        raise CheckpointError(
            f"{path / CONFIG} has {wrong[0]} {fields[wrong[0]]!r}, from which no draft can be built. Restore the file."
        )
    return fields


def algorithm_of(fields: dict[str, Any]) -> AlgorithmConfig:
    """The algorithm's settings of a checkpoint; DeepSpec's files do not say how the losses were weighed.

    Raises:
        CheckpointError: settings are missing or invalid, or contradict the keys that other readers go by.
    """
    stored = fields.get(_ALGORITHM_KEY)
    try:
        settings = _deepspec_settings(fields) if stored is None else stored
        algorithm = _KINDS[settings["name"]].model_validate(settings)
    except KeyError as error:
        raise CheckpointError(
            f"{CONFIG} lacks or does not know {error}, so the draft cannot be rebuilt from it."
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{CONFIG}: {_ALGORITHM_KEY} {where}: {first['msg']}. Restore the file.") from error
    for key, value in _public_keys(algorithm).items():
        if key in fields and fields[key] != value:
            raise CheckpointError(
                f"{CONFIG} has {key} {fields[key]}, but its {_ALGORITHM_KEY} says {value}. One of the two was changed "
                "by hand, and the draft would be served in another layout than it was trained in; restore the file."
            )
    return algorithm


def _public_keys(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """K and layout in the keys that other readers go by."""
    if isinstance(algorithm, Eagle3Config):
        return {"ttt_length": algorithm.num_draft_tokens}
    assert isinstance(algorithm, DSparkConfig | DFlashConfig)
    is_fill_in = algorithm.layout == "fill_in"
    return {"block_size": algorithm.num_draft_tokens + int(is_fill_in), "sample_from_anchor": not is_fill_in}


def _deepspec_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint that DeepSpec wrote."""
    settings: dict[str, Any] = {
        "draft_layers": "qwen3" if fields["model_type"] == "qwen3" else "target",
        "init": "random",
        "draft_vocab_size": fields.get("draft_vocab_size"),
    }
    if "Eagle3" in fields["architectures"][0]:
        return settings | {
            "name": "eagle3",
            "num_draft_tokens": fields["ttt_length"],
            "num_layers": 1,
            "step_decay": fields.get("step_loss_decay", 0.8),
            "own_head": False,
            "norm_before_residual": fields.get("norm_before_residual", False),
            "normalise": "token",
            "losses": {"soft_ce": 1.0},
        }
    layout = "anchor_first" if fields.get("sample_from_anchor", True) else "fill_in"
    block = fields["block_size"] - (1 if layout == "fill_in" else 0)
    settings |= {
        "num_draft_tokens": block,
        "num_layers": fields["num_hidden_layers"],
        "layout": layout,
        "position_decay": default_position_decay(block),
    }
    has_confidence = bool(fields.get("enable_confidence_head", False))
    rank = fields.get("markov_rank") or 0
    if not rank and not has_confidence:
        return settings | {"name": "dflash", "losses": {"ce": 1.0, "tv": 0.0, "soft_ce": 0.0}}
    return settings | {
        "name": "dspark",
        "markov_head": fields.get("markov_head_type", "vanilla"),
        "markov_rank": rank,
        "markov_init": "random",
        "confidence_head": has_confidence,
        "confidence_reads_markov": bool(rank and fields.get("confidence_head_with_markov", False)),
        "detach_confidence_input": False,
        "losses": {"ce": 0.1, "tv": 0.9, "soft_ce": 0.0, "confidence": 1.0 if has_confidence else 0.0},
    }


def load_draft(
    folder: str | Path, target: Target, dtype: torch.dtype | None = None, revision: str | None = None
) -> DraftModel:
    """Load a draft for a target and set the target's taps to the draft's.

    Args:
        folder: checkpoint folder of any readable format, or hub id.
        target: the target that it was trained for.
        dtype: of the draft's weights; None takes the target's.
        revision: of a hub id.

    Raises:
        CheckpointError: files are missing or damaged, or belong to another target.
    """
    path = draft_folder(folder, revision)
    fields = read_config(path)
    vocab, softcap = target.config.vocab_size, target.head.softcap
    check_target(fields, path, target.name, target.hidden_size, target.num_layers, vocab, softcap)
    return draft_from(fields, read_state(path), target, path, dtype)


def check_target(
    fields: Mapping[str, Any], path: Path, name: str, hidden_size: int, layers: int, vocab: int, softcap: float | None
) -> None:
    """Refuse a target, given by its H, N, V and cap of logits, of other sizes than a draft's config says.

    Raises:
        CheckpointError: naming the first that differs.
    """
    sizes = {"hidden_size": hidden_size, "num_target_layers": layers, "vocab_size": vocab}
    for key, mine in (sizes | {"final_logit_softcapping": softcap}).items():
        if key in fields and fields[key] != mine:
            raise CheckpointError(
                f"{path} was trained for a target with {key} {fields[key]}, but {name} has {mine}. "
                "Use the target that the draft was trained for."
            )


def draft_from(
    fields: dict[str, Any], state: dict[str, Tensor], target: Target, path: Path, dtype: torch.dtype | None = None
) -> DraftModel:
    """Build a draft from a config and weights in our words.

    Args:
        fields: as `read_config` returns them.
        state: weights by our names, with d2t, t2d and copies of vocabulary weights where the file has them.
        target: the target that it was trained for; its taps are set to the draft's.
        path: where they came from, for messages.
        dtype: of the draft's weights; None takes the target's.

    Raises:
        CheckpointError: weights are missing or belong to another draft or target.
    """
    algorithm = algorithm_of(fields)
    vocab = _read_vocab(state, target, path)
    embedding = state.pop("embed_tokens.weight", None)
    own_head = state.pop("lm_head.weight", None)
    if own_head is not None:
        is_same = _same_weights(own_head, target.head.weight if vocab is None else target.head.weight[vocab.target_ids])
        if isinstance(algorithm, Eagle3Config):
            # DeepSpec stores the frozen head as well and does not say which it is.
            algorithm = algorithm.model_copy(update={"own_head": algorithm.own_head or not is_same})
            state |= {"lm_head.weight": own_head} if algorithm.own_head else {}
        elif not is_same:
            raise _other_target("head", path, target)
    if embedding is not None and not _same_weights(embedding, target.head.embedding):
        raise _other_target("embedding", path, target)
    try:
        family = family_of(fields["model_type"])
    except TargetError as error:
        raise CheckpointError(f"{path}: {error}") from error
    layer_config = layer_config_of(fields, path)
    layer_ids = tuple(fields["target_layer_ids"] or eagle3_default(target.num_layers))
    target.tap(layer_ids)
    draft = make_draft(
        algorithm, DraftSpec(family, layer_config, layer_ids, fields.get("mask_token_id")), target, vocab
    )
    _load_state(draft, state, path)
    return draft.to(target.dtype if dtype is None else dtype).eval().requires_grad_(False)


def _other_target(part: str, path: Path, target: Target) -> CheckpointError:
    return CheckpointError(
        f"{path}: the {part} stored with the draft differs from that of {target.name}, whose own is used here. Use the "
        "target that the draft was trained for, not a fine-tuned relative."
    )


def layer_config_of(fields: dict[str, Any], path: Path) -> PreTrainedConfig:
    """The config that the draft's layers are made from.

    Raises:
        CheckpointError: transformers knows no such layers, or a value is none that they can have.
    """
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**_layer_fields(fields, path))
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(
            f"{path / CONFIG} describes layers that cannot be made ({' '.join(str(error).split())[:300]}). Restore it."
        ) from error
    return config


def _layer_fields(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """What the layers' own config is made from; `rope_theta` alone is how older versions of transformers wrote it."""
    drop = {_ALGORITHM_KEY, "architectures", "transformers_version", "dtype"}
    theta, old = _rope_theta(fields), fields.get("rope_theta")
    if theta is not None:
        if old is not None and old != theta:
            raise CheckpointError(
                f"{path / CONFIG} has rope_theta {old}, but its rope_parameters say {theta}: readers would disagree on "
                "every position. Restore the file."
            )
        drop.add("rope_theta")
    kept = {key: value for key, value in fields.items() if key not in drop}
    if fields["model_type"] in ("qwen3", "llama"):
        # DeepSpec copies a target's whole config, whose partial rotation its layers do not follow.
        kept = plain_rope(kept)
        if theta is not None:
            kept["rope_parameters"] = plain_rope(kept["rope_parameters"])
    return kept


def _rope_theta(fields: dict[str, Any]) -> float | None:
    """The rotary base in `rope_parameters`, which Gemma4 keeps per kind of layer; None where it is not there."""
    rope = fields.get("rope_parameters") or {}
    plain = rope if "rope_theta" in rope else rope.get("full_attention", {})
    theta: float | None = plain.get("rope_theta")
    return theta


def _read_vocab(state: dict[str, Tensor], target: Target, path: Path) -> VocabMap | None:
    """Take d2t and t2d out of the weights; they must describe the same ids, ascending."""
    stored: dict[str, Tensor] = {name: state.pop(name) for name in ("d2t", "t2d") if name in state}
    if "d2t" not in stored:
        return None
    vocab = VocabMap.from_tensors(stored, target.vocab_size)
    if vocab is None:
        raise CheckpointError(
            f"{path}: d2t and t2d are no draft vocabulary of {target.name}: d2t must hold offsets (target id = draft "
            f"id + d2t) that ascend to ids below {target.vocab_size}, and t2d must mark those ids. Use the target that "
            "it was made for."
        )
    return vocab


def _same_weights(stored: Tensor, mine: Tensor) -> bool:
    """Whether two matrices are one, up to the rounding of the precision that either is kept in."""
    if stored.shape != mine.shape:
        return False
    here = mine.to("cpu")
    return any(torch.equal(stored.to(one), here.to(one)) for one in {stored.dtype, here.dtype, torch.bfloat16})


def _load_state(draft: DraftModel, state: dict[str, Tensor], path: Path) -> None:
    wanted = draft.state_dict()
    missing, unexpected = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted.keys() & state.keys()
        if state[name].shape != wanted[name].shape
    ]
    if missing or unexpected or shapes:
        problems = [
            f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            for what, names in (("missing", missing), ("unknown", unexpected), ("wrong shape", shapes))
            if names
        ]
        raise CheckpointError(
            f"{path}: weights do not fit its config.json ({'; '.join(problems)}). The two files belong to other drafts."
        )
    integers = sorted(name for name, value in state.items() if not value.is_floating_point())
    if integers:
        raise CheckpointError(
            f"{path}: {integers[0]} holds {str(state[integers[0]].dtype).removeprefix('torch.')}, not real numbers: "
            "quantised weights mean nothing without their scales. Use the draft as it was trained."
        )
    broken = sorted(name for name, value in state.items() if not value.isfinite().all())
    if broken:
        raise CheckpointError(f"{path}: {broken[0]} holds NaN or infinite weights. Use an earlier checkpoint.")
    draft.load_state_dict(state)
