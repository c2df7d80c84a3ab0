"""Draft checkpoints: what is written is what is read, and what does not fit is refused with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import KINDS, MASK_TOKEN, coefficients_for, kind_of_draft, random_batch, tiny_draft, tiny_target
from safetensors.torch import load_file, save_file

from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import load_draft, read_config, save_draft
from deepspec.errors import CheckpointError, ConfigError
from deepspec.targets.base import Target


def _saved(folder: Path, draft: DraftModel) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    save_draft(draft, folder)
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def _assert_same(target: Target, first: DraftModel, second: DraftModel) -> None:
    batch = random_batch(target, (15, 9), (3, 2))
    coefficients = coefficients_for(first, batch)
    one, two = first(batch, coefficients), second(batch, coefficients)
    assert torch.equal(one.objective, two.objective)
    assert second.config == first.config
    assert second.spec.layer_ids == first.spec.layer_ids
    assert second.spec.mask_token_id == first.spec.mask_token_id
    mine, theirs = first.state_dict(), second.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4"])
@pytest.mark.parametrize("layers", ["qwen3", "target"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_draft_is_read_back_as_it_was(kind: str, layers: str, family: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    draft = kind_of_draft(target, kind, draft_layers=layers)
    _saved(tmp_path, draft)
    target.tap((1, 2))
    loaded = load_draft(tmp_path, target)
    assert target.layer_ids == (0, 1, 3)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    _assert_same(target, draft, loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_vocabulary_is_stored_as_offsets_and_a_mask_that_agree(kind: str, tmp_path: Path) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, kind, draft_vocab_size=30)
    fields = _saved(tmp_path, draft)
    state = load_file(tmp_path / "model.safetensors")
    assert fields["draft_vocab_size"] == 30
    assert state["t2d"].dtype == torch.bool
    assert state["d2t"].dtype == torch.int64
    assert len(state["t2d"]) == target.vocab_size
    assert torch.equal(state["t2d"].nonzero()[:, 0], state["d2t"] + torch.arange(30))
    loaded = load_draft(tmp_path, target)
    assert loaded.vocab is not None
    assert draft.vocab is not None
    assert torch.equal(loaded.vocab.target_ids, draft.vocab.target_ids)
    _assert_same(target, draft, loaded)


def test_an_own_head_that_has_not_moved_yet_stays_an_own_head(tmp_path: Path) -> None:
    target = tiny_target()
    draft = tiny_draft(target, "eagle3", own_head=True)
    assert torch.equal(draft.state_dict()["lm_head.weight"], target.head.weight)
    _saved(tmp_path, draft)
    _assert_same(target, draft, load_draft(tmp_path, target))


def test_frozen_copies_of_the_targets_vocabulary_weights_are_dropped(tmp_path: Path) -> None:
    target = tiny_target()
    for kind in ("dspark-vanilla", "eagle3"):
        draft = kind_of_draft(target, kind)
        _saved(tmp_path, draft)
        path = tmp_path / "model.safetensors"
        state = load_file(path)
        assert not {"embed_tokens.weight", "lm_head.weight"} & state.keys()
        save_file(state | {"embed_tokens.weight": target.head.embedding, "lm_head.weight": target.head.weight}, path)
        _assert_same(target, draft, load_draft(tmp_path, target))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_config_speaks_to_old_and_new_readers_and_holds_nothing_of_the_target_alone(
    kind: str, family: str, tmp_path: Path
) -> None:
    target = tiny_target(family)
    target.config.mrope_section = [1, 2]
    target.config.quantization_config = {"quant_method": "fp8"}
    fields = _saved(tmp_path, kind_of_draft(target, kind, draft_layers="target"))
    rope = fields["rope_parameters"]
    plain = rope if "rope_theta" in rope else rope["full_attention"]
    assert fields["rope_theta"] == plain["rope_theta"]
    assert fields["num_target_layers"] == 5
    assert fields["target_layer_ids"] == [0, 1, 3]
    assert fields["hidden_size"] == 32
    assert fields["tie_word_embeddings"] is False
    assert fields["sample_from_anchor"] == (kind != "dflash-fill_in")
    style = {"qwen3": "Qwen3", "llama": "Llama", "gemma4": "Gemma4"}[family]
    assert fields["architectures"] == [f"{style}{'Eagle3' if kind.startswith('eagle3') else 'DSpark'}Model"]
    for key in ("quantization_config", "auto_map", "transformers_version", "mrope_section", "_name_or_path"):
        assert key not in fields
    if kind.startswith("eagle3"):
        assert fields["ttt_length"] == 4
    else:
        assert fields["block_size"] == (5 if kind == "dflash-fill_in" else 4)
        assert fields["markov_rank"] == (6 if kind.startswith("dspark") and kind != "dspark-no_markov" else 0)
        assert fields["num_hidden_layers"] == 2


def test_a_checkpoint_in_deepspecs_own_keys_alone_is_read(tmp_path: Path) -> None:
    target = tiny_target()
    for kind in ("dspark-rnn", "dflash-anchor_first", "dflash-fill_in", "eagle3"):
        draft = kind_of_draft(target, kind)
        fields = _saved(tmp_path, draft)
        for key in ("deepspec_algorithm", "num_draft_tokens", "deepspec_version"):
            fields.pop(key)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        loaded = load_draft(tmp_path, target)
        assert loaded.num_draft_tokens == draft.num_draft_tokens
        assert getattr(loaded.config, "layout", None) == getattr(draft.config, "layout", None)
        mine, theirs = draft.state_dict(), loaded.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_rotary_base_is_read_from_either_place(tmp_path: Path) -> None:
    target = tiny_target()
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    draft = tiny_draft(target, "dspark")
    fields = _saved(tmp_path, draft)
    fields.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = load_draft(tmp_path, target)
    assert loaded.layer_config.rope_parameters["rope_theta"] == 500.0
    _assert_same(target, draft, loaded)


Damage = Callable[[Path, dict[str, Any]], None]


def _edit(**changes: Any) -> Damage:
    def damage(folder: Path, fields: dict[str, Any]) -> None:
        kept = {key: value for key, value in (fields | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def _edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path, fields: dict[str, Any]) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return damage


def _truncate(folder: Path, fields: dict[str, Any]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def _set(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda state: state.update({name: value})


REFUSALS: list[tuple[Damage, str]] = [
    (lambda folder, _: (folder / "config.json").unlink(), r"not a draft checkpoint: it has no config\.json"),
    (lambda folder, _: (folder / "config.json").write_text("{"), "not valid JSON"),
    (lambda folder, _: (folder / "config.json").write_text("[1]"), "architectures None"),
    (_edit(architectures=["Qwen3ForCausalLM"]), "architectures .*Qwen3ForCausalLM.*DSparkModel"),
    (_edit(architectures=None), "architectures None"),
    (_edit(target_layer_ids=None), "lacks target_layer_ids"),
    (_edit(hidden_size=64), "hidden_size 64, but tiny-qwen3 has 32"),
    (_edit(num_target_layers=36), "num_target_layers 36, but tiny-qwen3 has 5"),
    (_edit(vocab_size=97), "vocab_size 97, but tiny-qwen3 has 96"),
    (_edit(rope_theta=77.0), r"rope_theta 77\.0, but its rope_parameters say 10000\.0"),
    (_edit(model_type="mamba"), "mamba"),
    (_edit(block_size=7), "block_size 7, but its deepspec_algorithm says 4"),
    (_edit(sample_from_anchor=False), "sample_from_anchor False, but its deepspec_algorithm says True"),
    (_edit(deepspec_algorithm={"name": "dspark", "num_draft_tokens": 4}), "deepspec_algorithm .*Field required"),
    (_edit(deepspec_algorithm={"name": "medusa"}), "medusa"),
    (_edit(deepspec_algorithm=None, block_size=None), "block_size"),
    (lambda folder, _: (folder / "model.safetensors").unlink(), r"has no model\.safetensors"),
    (_truncate, "is damaged"),
    (lambda folder, _: (folder / "model.safetensors").write_bytes(b""), "is damaged"),
    (_edit_weights(lambda state: state.pop("fc.weight")), r"missing: fc\.weight"),
    (_edit_weights(_set("extra.weight", torch.zeros(2))), r"unknown: extra\.weight"),
    (
        _edit_weights(_set("fc.weight", torch.zeros(32, 64))),
        r"wrong shape: fc\.weight \(32, 64\) instead of \(32, 96\)",
    ),
    (_edit_weights(_set("d2t", torch.zeros(30).long() + torch.arange(30).flip(0))), "d2t and t2d are no draft vocab"),
    (_edit_weights(_set("d2t", torch.arange(30) * 5)), "d2t and t2d are no draft vocab"),
    (_edit_weights(_set("t2d", torch.zeros(96, dtype=torch.bool))), "d2t and t2d are no draft vocab"),
]


@pytest.mark.parametrize(("damage", "words"), REFUSALS, ids=[re.sub(r"\W+", "_", words) for _, words in REFUSALS])
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_reason(damage: Damage, words: str, tmp_path: Path) -> None:
    target = tiny_target()
    fields = _saved(tmp_path, tiny_draft(target, "dspark", draft_vocab_size=30))
    damage(tmp_path, fields)
    with pytest.raises(CheckpointError, match=words):
        load_draft(tmp_path, target)


def test_unrolled_steps_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    fields = _saved(tmp_path, tiny_draft(target, "eagle3"))
    _edit(ttt_length=7)(tmp_path, fields)
    with pytest.raises(CheckpointError, match="ttt_length 7, but its deepspec_algorithm says 4"):
        load_draft(tmp_path, target)


def test_reading_a_config_leaves_its_keys_alone(tmp_path: Path) -> None:
    fields = _saved(tmp_path, tiny_draft(tiny_target(), "dflash"))
    assert read_config(tmp_path) == fields


def test_weights_in_another_precision_take_the_targets_or_the_one_asked_for(tmp_path: Path) -> None:
    target = tiny_target()
    _saved(tmp_path, tiny_draft(target, "dspark").to(torch.bfloat16))
    assert {value.dtype for value in load_draft(tmp_path, target).parameters()} == {torch.float32}
    low = load_draft(tmp_path, target, dtype=torch.bfloat16)
    assert {value.dtype for value in low.parameters()} == {torch.bfloat16}


def test_a_name_that_is_no_folder_and_not_on_the_hub_is_refused_with_both_ways_out() -> None:
    with pytest.raises(CheckpointError, match="neither a folder here nor to be had from the hub"):
        load_draft("nobody/no-such-draft", tiny_target())
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_draft("./nobody/no-such-draft", tiny_target())


def test_the_number_of_anchors_is_written_where_deepspec_looks_for_it(tmp_path: Path) -> None:
    save_draft(tiny_draft(tiny_target(), "dspark"), tmp_path, num_anchors=12)
    assert read_config(tmp_path)["num_anchors"] == 12


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    draft = tiny_draft(target, "dflash")
    with torch.no_grad():
        next(iter(draft.state_dict().values())).view(-1)[0] = float("nan")
    save_draft(draft, tmp_path)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_a_mask_token_that_ends_answers_is_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="is a stop token of tiny-qwen3"):
        tiny_draft(tiny_target(stop_token_ids=(MASK_TOKEN,)), algorithm)
    tiny_draft(tiny_target(stop_token_ids=(MASK_TOKEN,)), "eagle3")
