"""`deepspec inspect`: what a folder is, what is wrong with it, and where it can be served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspec import console
from deepspec.algorithms.checkpoint import algorithm_of, read_config
from deepspec.config import AlgorithmConfig, DFlashConfig, DSparkConfig, Eagle3Config
from deepspec.errors import CheckpointError, ConfigError
from deepspec.interop import taps
from deepspec.interop.engines import FORMATS, Draft, Format, draft_facts, refusal, unserved
from deepspec.interop.folder import CONFIG, draft_folder, read_json_config, read_state
from deepspec.interop.lint import lint
from deepspec.interop.reading import translate


def run_inspect(words: Sequence[str]) -> None:
    """Explain the folder or hub id that the words name.

    Raises:
        ConfigError: not exactly one is named.
        CheckpointError: it is not there or no draft.
    """
    if len(words) != 1:
        raise ConfigError(
            "deepspec inspect takes one folder or hub id, as in: deepspec inspect runs/my_draft/step_latest"
        )
    for line in explain(words[0].removeprefix("draft=")):
        console.info(line)


def explain(name: str | Path) -> list[str]:
    """What a draft is, a line for each thing one may ask.

    Raises:
        CheckpointError: it is not there, no draft, or contradicts itself.
    """
    path = draft_folder(name)
    raw = read_json_config(path)
    if "ForCausalLM" in str(raw.get("architectures")) and "draft_vocab_size" not in raw and not _is_draft(raw, path):
        return [
            f"{path}: a target model ({raw['architectures'][0]}, {raw.get('num_hidden_layers')} layers, vocabulary "
            f"{raw.get('vocab_size')}), not a draft. Use it with target=auto target.name_or_path={path}."
        ]
    found = translate(raw, str(path / CONFIG))
    fields = read_config(path)
    algorithm = algorithm_of(fields)
    state = read_state(path)
    facts = draft_facts(fields, algorithm, target=None)
    lines = [
        f"{path}: {_FORMATS[found.format]}",
        f"algorithm: {_algorithm(algorithm, fields)}",
        f"layers: {algorithm.num_layers} x {fields['model_type']}, width {fields['hidden_size']}, "
        f"{fields.get('num_attention_heads')} heads, rotary base {_theta(fields)}",
        *_tap_lines(fields),
        f"vocabulary: {_vocabulary(fields, state)}",
        f"weights: {_weights(state)}",
        *(f"assumed: {note}" for note in found.notes),
        *(f"wrong ({one.name}): {one.text}" for one in lint(fields, state)),
    ]
    for engine in FORMATS:
        why = refusal(facts, engine)
        lines.append(f"format={engine}: " + (f"yes{_with_target(facts, engine)}" if why is None else f"no; {why}"))
    return lines


def _with_target(facts: Draft, engine: Format) -> str:
    """What only the target says, which `deepspec export` is told."""
    if engine == "deepspec":
        return ""
    why = unserved(facts, engine)
    if why is not None:
        return f", but no engine serves it: {why}"
    if facts.model_type == "gemma4_text":
        return ", unless its target is the text-only Gemma4ForCausalLM"
    scaled = ", unless its target scales embeddings or caps logits (Gemma)"
    if engine == "zlab":
        return scaled
    return f"{scaled} or the engine cannot hand out its layers; deepspec export with target=... says"


_FORMATS = {
    "deepspec": "a draft in DeepSpec's format, as written here and on the hub",
    "zlab": "a DFlash draft in z-lab's format",
    "specforge": "a DSpark draft in SpecForge's format",
    "eagle3": "an Eagle3 draft as SpecForge, vLLM, SGLang and EAGLE's authors write them",
    "speculators": "a draft in the speculators format",
}


def _is_draft(raw: dict[str, Any], path: Path) -> bool:
    try:
        translate(raw, str(path / CONFIG))
    except CheckpointError:
        return False
    return True


def _algorithm(algorithm: AlgorithmConfig, fields: dict[str, Any]) -> str:
    count = algorithm.num_draft_tokens
    if isinstance(algorithm, Eagle3Config):
        head = "an own head" if algorithm.own_head else "the target's head, unless its own differs"
        return f"eagle3, {count} draft tokens a round, {head}"
    assert isinstance(algorithm, DSparkConfig | DFlashConfig)
    slots = f"{algorithm.name}, {count} draft tokens a round, layout {algorithm.layout} ({fields['block_size']} inputs)"
    if isinstance(algorithm, DSparkConfig):
        markov = (
            f"{algorithm.markov_head} Markov head of rank {algorithm.markov_rank}" if algorithm.markov_rank else "none"
        )
        return f"{slots}, {markov}, {'a' if algorithm.confidence_head else 'no'} confidence head"
    return slots


def _tap_lines(fields: dict[str, Any]) -> list[str]:
    layers, depth = fields["target_layer_ids"], fields.get("num_target_layers")
    of = "" if depth is None else f" of {depth}"
    if layers is None:
        return [f"taps: not named; outputs of layers 1, N // 2 - 1 and N - 4{of}, as in EAGLE-3"]
    shifted = taps.written(("eagle_aux_hidden_state_layer_ids",), layers)
    return [f"taps: outputs of decoder layers {layers}{of} (0-based); vLLM's eagle_aux and speculators count {shifted}"]


def _vocabulary(fields: dict[str, Any], state: dict[str, Tensor]) -> str:
    size, mask = fields["vocab_size"], fields.get("mask_token_id")
    reduced = fields.get("draft_vocab_size")
    shown = f"{size} ids" if reduced in (None, size) else f"{reduced} of {size} ids (d2t)"
    own = [word for word, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")) if name in state]
    copies = f"stored: {' and '.join(own)}" if own else "embedding and head are the target's"
    return f"{shown}, {copies}" + ("" if mask is None else f", mask token {mask}")


def _weights(state: dict[str, Tensor]) -> str:
    count = sum(value.numel() for value in state.values() if value.is_floating_point())
    kept = (value for name, value in state.items() if name not in ("d2t", "t2d"))
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in kept})
    return f"{len(state)} tensors, {count:,} numbers, {', '.join(dtypes)}"


def _theta(fields: dict[str, Any]) -> object:
    rope = fields.get("rope_parameters") or {}
    return rope.get("rope_theta") or (rope.get("full_attention") or {}).get("rope_theta") or fields.get("rope_theta")
