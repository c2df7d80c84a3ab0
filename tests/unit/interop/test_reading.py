"""Drafts of others: read to the very model that was saved in their words, refused where ours computes otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MASK_TOKEN, VOCAB_SIZE, coefficients_for, kind_of_draft, random_batch, tiny_draft, tiny_target
from safetensors.torch import load_file, save_file

from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import load_draft, read_config, save_draft
from deepspec.errors import CheckpointError
from deepspec.interop.inspection import explain
from deepspec.interop.reading import translate
from deepspec.targets.base import Target

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
NESTED = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1, 3]}
ZLAB = SIZES | {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
    "block_size": 5,
    "num_target_layers": 5,
    "dflash_config": NESTED,
}
SPECFORGE_EAGLE3 = SIZES | {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 40,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkSpeculator"],
    "transformer_layer_config": SIZES | {"model_type": "qwen3", "num_hidden_layers": 2},
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]},
    "draft_vocab_size": VOCAB_SIZE,
    "block_size": 4,
    "aux_hidden_state_layer_ids": [1, 2, 4],
    "mask_token_id": MASK_TOKEN,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
}


def _written(folder: Path, fields: dict[str, Any], state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: value.detach().clone() for name, value in state.items()}, folder / "model.safetensors")
    return folder


def _assert_computes_the_same(target: Target, first: DraftModel, second: DraftModel) -> None:
    batch = random_batch(target, (15, 9), (3, 2))
    coefficients = coefficients_for(first, batch)
    assert first.num_draft_tokens == second.num_draft_tokens
    assert torch.equal(first(batch, coefficients).objective, second(batch, coefficients).objective)


def test_z_labs_dflash_is_read_as_fill_in_and_sees_the_layers_it_names(tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dflash-fill_in")
    target.tap((1, 2))
    loaded = load_draft(_written(tmp_path, ZLAB, draft.state_dict()), target)
    assert target.layer_ids == (0, 1, 3)
    assert loaded.config.name == "dflash"
    assert read_config(tmp_path)["sample_from_anchor"] is False
    _assert_computes_the_same(target, draft, loaded)
    assert "layout fill_in (5 inputs)" in "\n".join(explain(tmp_path))


def test_specforges_dspark_predicts_from_its_anchor_and_old_weight_names_are_known(tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dspark-gated")
    nested = NESTED | {
        "projector_type": "dspark",
        "markov_rank": 6,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    fields = ZLAB | {"architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": nested}
    old = {
        (f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name): value
        for name, value in draft.state_dict().items()
    }
    loaded = load_draft(_written(tmp_path, fields, old), target)
    _assert_computes_the_same(target, draft, loaded)


@pytest.mark.parametrize("names_taps", [True, False])
def test_specforges_eagle3_brings_a_llama_layer_an_own_head_and_a_reduced_vocabulary(
    names_taps: bool, tmp_path: Path
) -> None:
    # Without named taps: 7 layers give 1, 2 and 3, what enters layers 2, 7 // 2 and 7 - 3.
    depth = 5 if names_taps else 7
    target = tiny_target("llama", num_layers=depth, layer_ids=(0, 1, 3) if names_taps else (1, 2, 3))
    draft = tiny_draft(target, "eagle3", own_head=True, draft_layers="target", draft_vocab_size=40, num_draft_tokens=7)
    with torch.no_grad():
        draft.lm_head.weight.mul_(1.5)
    assert draft.vocab is not None
    state = {name.replace("layers.0.", "midlayer."): value for name, value in draft.state_dict().items()}
    state |= draft.vocab.tensors() | {"embed_tokens.weight": target.head.embedding}
    fields = dict(SPECFORGE_EAGLE3)
    if not names_taps:
        fields.pop("eagle_config")
        fields["architectures"] = ["LlamaForCausalLM"]
    _written(tmp_path, fields, state)
    target.tap((0,))
    loaded = load_draft(tmp_path, target)
    assert target.layer_ids == draft.spec.layer_ids
    assert loaded.vocab is not None
    assert torch.equal(loaded.vocab.target_ids, draft.vocab.target_ids)
    _assert_computes_the_same(target, draft, loaded)
    shown = "\n".join(explain(tmp_path))
    assert "40 of 96 ids (d2t), stored: embedding and head" in shown
    assert ("taps: not named" in shown) != names_taps
    assert "7 draft tokens a round" in shown


@pytest.mark.parametrize("kind", ["dspark-vanilla", "dflash-fill_in", "eagle3"])
def test_the_speculators_format_is_read_with_its_ids_counted_from_one(kind: str, tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, kind, **({"norm_before_residual": True} if kind == "eagle3" else {}))
    fields = dict(SPECULATORS)
    if kind == "dflash-fill_in":
        fields |= {"speculators_model_type": "dflash", "block_size": 5}
    if kind == "eagle3":
        fields = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": SIZES | {"model_type": "qwen3", "num_hidden_layers": 1},
            "speculators_config": SPECULATORS["speculators_config"],
            "draft_vocab_size": VOCAB_SIZE,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        }
    frozen = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": target.head.weight}
    target.tap((2,))
    loaded = load_draft(_written(tmp_path, fields, draft.state_dict() | frozen), target)
    assert target.layer_ids == (0, 1, 3)
    _assert_computes_the_same(target, draft, loaded)


def test_a_deepspec_config_that_copied_its_targets_partial_rotation_rotates_fully(tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dspark-vanilla")
    save_draft(draft, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"partial_rotary_factor": 0.5}))
    loaded = load_draft(tmp_path, target)
    assert "partial_rotary_factor" not in loaded.layer_config.rope_parameters
    _assert_computes_the_same(target, draft, loaded)


def _with(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (base | changes).items() if value is not None}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (_with(ZLAB, target_layer_ids=[1, 2, 4]), "names different tapped layers in different keys"),
    (_with(ZLAB, dflash_config=NESTED | {"block_size": 8}), r"block_size is 5, but dflash_config\.block_size is 8"),
    (_with(ZLAB, block_size=None), "lacks block_size"),
    (_with(ZLAB, sample_from_anchor=True), "sample_from_anchor is True, but a DFlashDraftModel is read as fill_in"),
    (_with(ZLAB, dflash_config=NESTED | {"projector_type": "domino"}), "projector_type 'domino' is not known"),
    (_with(ZLAB, dflash_config=NESTED | {"conv_kernel_size": 3}), "conv_kernel_size is 3, an extension"),
    (_with(ZLAB, layer_types=["sliding_attention"] * 2), "layer_types .*sliding_attention"),
    (_with(ZLAB, model_type="deepseek_v3"), "layers of model type 'deepseek_v3'"),
    (_with(SPECFORGE_EAGLE3, norm_output=True), "norm_output is True, an extension"),
    (_with(SPECFORGE_EAGLE3, fc_norm=True), "fc_norm is True, an extension"),
    (_with(SPECFORGE_EAGLE3, num_hidden_layers=2), "an Eagle3 draft of 2 layers"),
    (_with(SPECFORGE_EAGLE3, target_hidden_size=64), "target_hidden_size 64 differs from hidden_size 32"),
    (_with(SPECFORGE_EAGLE3, eagle_config={"use_aux_hidden_state": False}), "EAGLE 1 or 2"),
    (_with(SPECFORGE_EAGLE3, eagle_aux_hidden_state_layer_ids=[0, 1, 3]), "names different tapped layers"),
    (_with(SPECULATORS, speculators_model_type="mtp"), "type 'mtp' is not known"),
    (_with(SPECULATORS, sample_from_anchor=False), "4 speculative tokens do not come from block_size 4"),
    (_with(SIZES, architectures=["Qwen3ForCausalLM"]), "which is no draft this version reads.*speculators"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[re.sub(r"\W+", "_", words)[:40] for _, words in REFUSED])
def test_a_config_that_contradicts_itself_or_computes_otherwise_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        translate(fields, "config.json")


def test_a_last_layer_that_speculators_can_tap_is_refused_by_number(tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dspark-vanilla")
    folder = _written(tmp_path, SPECULATORS | {"aux_hidden_state_layer_ids": [1, 2, 5]}, draft.state_dict())
    with pytest.raises(Exception, match="layer 4 is the last layer of tiny-qwen3"):
        load_draft(folder, target)


@pytest.mark.parametrize(("name", "part"), [("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")])
def test_a_draft_with_another_targets_vocabulary_weights_is_refused(name: str, part: str, tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dflash-fill_in")
    weight = target.head.weight if part == "head" else target.head.embedding
    load_draft(_written(tmp_path, ZLAB, draft.state_dict() | {name: weight}), target)
    folder = _written(tmp_path, ZLAB, draft.state_dict() | {name: weight * 1.1})
    with pytest.raises(CheckpointError, match=f"the {part} stored with the draft differs from that of tiny-qwen3"):
        load_draft(folder, target)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE_EAGLE3))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"never from pickles\. Convert pytorch_model\.bin"):
        load_draft(tmp_path, tiny_target("llama"))


def test_the_verbs_of_a_draft_save_and_load_it(tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dspark-vanilla")
    draft.save_pretrained(tmp_path / "new" / "draft")
    assert load_file(tmp_path / "new" / "draft" / "model.safetensors").keys() == draft.state_dict().keys()
    loaded = DraftModel.from_pretrained(tmp_path / "new" / "draft", target)
    _assert_computes_the_same(target, draft, loaded)
    _assert_computes_the_same(target, draft, type(draft).from_pretrained(tmp_path / "new" / "draft", target))
    with pytest.raises(CheckpointError, match="is a dspark draft"):
        type(kind_of_draft(target, "eagle3")).from_pretrained(tmp_path / "new" / "draft", target)


def test_hub_ids_with_a_revision_are_told_apart_from_folders(tmp_path: Path) -> None:
    for name in ("nobody/no-such-draft", "nobody/no-such-draft@v1.0", "nobody/no-such-draft@refs/pr/1"):
        with pytest.raises(
            CheckpointError, match=f"draft '{name}' is neither a folder here nor to be had from the hub"
        ):
            DraftModel.from_pretrained(name, tiny_target())
    draft = kind_of_draft(tiny_target(), "dflash-fill_in")
    with pytest.raises(CheckpointError, match="cannot be uploaded to nobody/no-such-draft"):
        draft.push_to_hub("nobody/no-such-draft")
