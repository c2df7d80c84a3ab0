"""Drafts that others wrote, in the words of our own format.

Reads z-lab and SpecForge (DFlash, DSpark), Eagle3 drafts of SpecForge, vLLM, SGLang and the official ones, and the
speculators format. It translates config.json and weight names and computes nothing; what ours cannot express is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepspec.errors import CheckpointError
from deepspec.interop import taps

Fields = dict[str, Any]

_DEEPSPEC = re.compile(r"[A-Z][A-Za-z0-9]*?(DSpark|Eagle3|Eagle3Draft)Model|Eagle3DraftModel")
_BLOCK = frozenset({"DFlashDraftModel", "DSparkDraftModel"})
_EAGLE3 = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"})
_FORMATS = (
    "<Family>DSparkModel and <Family>Eagle3Model (DeepSpec, and written here), DFlashDraftModel (z-lab, SpecForge), "
    "DSparkDraftModel (SpecForge), LlamaForCausalLMEagle3 and other Eagle3 drafts, speculators"
)
# Extensions of the public formats that change what a draft computes.
_BLOCK_EXTRAS = ("conv_kernel_size", "selector_rank", "attention_sink_bias", "attention_value_scale", "use_swa")
_EAGLE3_EXTRAS = ("norm_output", "norm_before_fc", "fc_norm", "use_aux_norm")
_DEFAULT_EAGLE3_BLOCK = 7
# The frozen head and norm of the verifier, which the speculators library keeps for its losses.
_VERIFIER = re.compile(r"verifier_.*|rotary_emb\..*|model\.rotary_emb\..*")


class Translated(NamedTuple):
    """A draft's config in our words.

    Attributes:
        format: whose files these are: deepspec, zlab, specforge, eagle3 or speculators.
        fields: config.json as our own format has it; `target_layer_ids` is None where it follows from the target.
        notes: what was assumed or left out, a sentence each.
    """

    format: str
    fields: Fields
    notes: tuple[str, ...]


def translate(fields: Fields, where: str) -> Translated:
    """Say in our words what a config.json describes.

    Args:
        fields: its content.
        where: its path, for messages.

    Raises:
        CheckpointError: it is no draft, contradicts itself, or describes one that cannot be computed here.
    """
    names = fields.get("architectures") if isinstance(fields, dict) else None
    architecture = str(names[0]) if isinstance(names, list) and names else None
    if isinstance(fields, dict) and fields.get("speculators_model_type") is not None:
        return _speculators(fields, where)
    if architecture is not None and _DEEPSPEC.fullmatch(architecture):
        taps.found(fields, where)
        return Translated("deepspec", fields, ())
    if architecture in _BLOCK:
        return _block(fields, where)
    is_official = architecture == "LlamaForCausalLM" and "draft_vocab_size" in fields
    if architecture in _EAGLE3 or is_official:
        return _eagle3(fields, where)
    raise CheckpointError(
        f"{where} has architectures {names}, which is no draft this version reads. Readable: {_FORMATS}."
    )


def native_name(name: str) -> str | None:
    """Our name of a weight in anyone's file, or None for weights that are no part of a draft."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.").removeprefix("logit_head.")
    return None if _VERIFIER.fullmatch(name) else name


def _block(fields: Fields, where: str) -> Translated:
    """z-lab's DFlash, and SpecForge's DFlash and DSpark, which nest their settings."""
    nested = fields.get("dflash_config") or {}
    kind = nested.get("projector_type") or fields.get("projector_type") or "dflash"
    if fields["architectures"][0] == "DSparkDraftModel":
        kind = "dspark"
    if kind not in ("dflash", "dspark"):
        raise CheckpointError(f"{where}: projector_type '{kind}' is not known here; dflash and dspark are.")
    _refuse_extras(nested | fields, _BLOCK_EXTRAS, where)
    is_dspark = kind == "dspark"
    given = _one_value(fields, nested, where)
    block = given("block_size")
    if block is None:
        raise CheckpointError(f"{where} lacks block_size, so the draft cannot be rebuilt from it.")
    found = _layers(fields, where) | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": _as_list(taps.found(fields, where)),
        "num_target_layers": given("num_target_layers"),
        "block_size": block,
        "sample_from_anchor": is_dspark,
        "mask_token_id": given("mask_token_id"),
        "markov_rank": (given("markov_rank") or 0) if is_dspark else 0,
        "markov_head_type": given("markov_head_type") or "vanilla",
        "enable_confidence_head": is_dspark
        and bool(_first(given("enable_confidence_head"), (given("confidence_head_alpha") or 0) > 0)),
        "confidence_head_with_markov": bool(given("confidence_head_with_markov")),
        "final_logit_softcapping": given("final_logit_softcapping"),
        "draft_vocab_size": _reduced(fields, fields.get("vocab_size")),
    }
    layout = "anchor_first" if is_dspark else "fill_in"
    notes = [f"block layout {layout}: what {fields['architectures'][0]} means by its block"]
    if given("sample_from_anchor") not in (None, is_dspark):
        raise CheckpointError(
            f"{where}: sample_from_anchor is {given('sample_from_anchor')}, but a {fields['architectures'][0]} is read "
            f"as {layout} by every engine. Write it as the format of its own layout."
        )
    return Translated("specforge" if is_dspark else "zlab", _without_none(found), tuple(notes))


def _eagle3(fields: Fields, where: str) -> Translated:
    """Eagle3 drafts of engines: a Llama or a Qwen3 layer, an own head, usually a reduced vocabulary."""
    nested = fields.get("eagle_config") or {}
    _refuse_extras(nested | fields, _EAGLE3_EXTRAS, where)
    if fields.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"{where}: an Eagle3 draft of {fields['num_hidden_layers']} layers; only 1 is known here."
        )
    if nested.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{where}: use_aux_hidden_state is false (EAGLE 1 or 2); only Eagle3 is known here.")
    size = fields.get("target_hidden_size")
    if size is not None and size != fields.get("hidden_size"):
        raise CheckpointError(
            f"{where}: target_hidden_size {size} differs from hidden_size {fields.get('hidden_size')}; drafts here "
            "share the target's embedding and head, hence its width."
        )
    layer_ids = taps.found(fields, where)
    notes = []
    if layer_ids is None:
        notes.append("no taps named: those of EAGLE-3's authors and of all engines, from the target's depth")
    block = fields.get("num_draft_tokens") or fields.get("ttt_length")
    if block is None:
        notes.append(f"no block size named: {_DEFAULT_EAGLE3_BLOCK} draft tokens a round")
    family = "Qwen3" if fields.get("model_type") == "qwen3" else "Llama"
    found = _layers(fields, where) | {
        "architectures": [f"{family}Eagle3Model"],
        "model_type": family.lower(),
        "target_layer_ids": _as_list(layer_ids),
        "num_target_layers": fields.get("num_target_layers"),
        "ttt_length": block or _DEFAULT_EAGLE3_BLOCK,
        "norm_before_residual": bool(fields.get("norm_before_residual", False)),
        "draft_vocab_size": _reduced(fields, fields.get("vocab_size")),
    }
    return Translated("eagle3", _without_none(found) | {"target_layer_ids": _as_list(layer_ids)}, tuple(notes))


def _speculators(fields: Fields, where: str) -> Translated:
    """The speculators library's format: the layer's config nested, layer ids counted from one."""
    kind = fields["speculators_model_type"]
    inner = fields.get("transformer_layer_config")
    if kind not in ("dspark", "dflash", "eagle3") or not isinstance(inner, dict):
        raise CheckpointError(
            f"{where}: speculators model type '{kind}' is not known here; dspark, dflash and eagle3 are."
        )
    methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    whole = inner | {key: fields[key] for key in ("eagle_aux_hidden_state_layer_ids",) if key in fields}
    if kind == "eagle3":
        flags = {key: fields[key] for key in ("norm_before_residual", *_EAGLE3_EXTRAS) if key in fields}
        extra = {"draft_vocab_size": fields.get("draft_vocab_size"), "num_draft_tokens": tokens}
        made = _eagle3(whole | flags | _without_none(extra), where)
        return Translated("speculators", made.fields, made.notes)
    from_anchor = bool(fields.get("sample_from_anchor", kind == "dspark"))
    block = fields.get("block_size", 8)
    if tokens is not None and tokens > block - (not from_anchor):
        raise CheckpointError(
            f"{where}: {tokens} speculative tokens do not come from block_size {block} with sample_from_anchor "
            f"{from_anchor}. One of the three was changed by hand, and the draft would be read in the wrong layout."
        )
    found = _layers(inner, where) | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": _as_list(taps.found(fields, where)),
        "block_size": block,
        "sample_from_anchor": from_anchor,
        "mask_token_id": fields.get("mask_token_id"),
        "markov_rank": fields.get("markov_rank", 256) if kind == "dspark" else 0,
        "markov_head_type": fields.get("markov_head_type", "vanilla"),
        "enable_confidence_head": kind == "dspark" and bool(fields.get("enable_confidence_head", True)),
        "confidence_head_with_markov": kind == "dspark" and bool(fields.get("confidence_head_with_markov", True)),
        "draft_vocab_size": _reduced(fields, inner.get("vocab_size")),
    }
    return Translated("speculators", _without_none(found), ())


def _layers(fields: Fields, where: str) -> Fields:
    """What the draft's own layers are made from; a draft's rotary is plain, whatever it inherited from its target."""
    model_type = fields.get("model_type", "llama")
    if model_type not in ("qwen3", "llama"):
        raise CheckpointError(f"{where}: layers of model type '{model_type}' are not known here; qwen3 and llama are.")
    kinds = set(fields.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CheckpointError(
            f"{where}: layer_types {sorted(kinds)}; draft layers here attend to the whole context (full_attention)."
        )
    kept = {key: value for key, value in fields.items() if key in LAYER_KEYS}
    rope = kept.get("rope_parameters")
    if isinstance(rope, dict):
        kept["rope_parameters"] = plain_rope(rope)
    return kept | {"model_type": model_type, "tie_word_embeddings": False}


LAYER_KEYS = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "attention_bias",
        "attention_dropout",
        "mlp_bias",
        "initializer_range",
        "layer_types",
    }
)
"""Keys that a Qwen3 or Llama draft layer is made from; all others of a config are the target's or the algorithm's."""

_INHERITED = re.compile(r"mrope_.*|partial_rotary_factor")
TARGET_ONLY = re.compile(r"mrope_\w+|quantization_config|auto_map|max_window_layers")
"""Keys that say something wrong about a draft; they were copied from its target's config."""


def draft_keys(fields: Mapping[str, Any]) -> Fields:
    """A config without the keys that belong to the target alone."""
    kept = {key: value for key, value in fields.items() if not TARGET_ONLY.fullmatch(key)}
    if kept["model_type"] == "gemma4_text":  # its layers do rotate in part
        return kept
    return plain_rope(kept) | {"rope_parameters": plain_rope(kept["rope_parameters"])}


def plain_rope(rope: Mapping[str, Any]) -> Fields:
    """Rope parameters, or a config, without what Qwen3 and Llama draft layers ignore but some engines would follow."""
    return {key: value for key, value in rope.items() if not _INHERITED.fullmatch(key)}


def _one_value(fields: Fields, nested: Mapping[str, Any], where: str) -> Any:
    """A look-up in two places that must agree."""

    def given(key: str) -> Any:
        inner, outer = nested.get(key), fields.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise CheckpointError(
                f"{where}: {key} is {outer}, but dflash_config.{key} is {inner}; readers would disagree. Restore the "
                "file."
            )
        return outer if inner is None else inner

    return given


def _refuse_extras(fields: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    used = [key for key in keys if fields.get(key)]
    if used:
        raise CheckpointError(
            f"{where}: {used[0]} is {fields[used[0]]!r}, an extension that changes what the draft computes and is not "
            "known here."
        )


def _reduced(fields: Fields, vocab_size: int | None) -> int | None:
    size: int | None = fields.get("draft_vocab_size")
    return None if size == vocab_size else size


def _as_list(layer_ids: tuple[int, ...] | None) -> list[int] | None:
    return None if layer_ids is None else list(layer_ids)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _without_none(fields: Mapping[str, Any]) -> Fields:
    return {key: value for key, value in fields.items() if value is not None}
