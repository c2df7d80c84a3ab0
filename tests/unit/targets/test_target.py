"""A target against transformers' own outputs, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    VOCAB_SIZE,
    assert_ragged_forwards_equal_one,
    kind_of_draft,
    tiny_config,
    tiny_draft,
    tiny_target,
)
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, DeepseekV4Config, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.config import TargetConfig
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.errors import ConfigError, TargetError
from deepspec.targets.base import Target, check_layer_ids, default_layer_ids
from deepspec.targets.family import family_of

FAMILIES = ("qwen3", "llama", "gemma4")


def _ids(length: int = 21) -> torch.Tensor:
    return torch.randint(4, 90, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_behind_the_tapped_layers(family: str) -> None:
    target = tiny_target(family, layer_ids=(-1, 0, 2, 3))
    features, last_hidden = target.features(_ids())
    with torch.no_grad():
        output = target.model(input_ids=_ids(), output_hidden_states=True, use_cache=False)
    for part, layer in zip(features.split(target.hidden_size, dim=-1), (-1, 0, 2, 3), strict=True):
        torch.testing.assert_close(part, output.hidden_states[layer + 1])
    torch.testing.assert_close(features[..., :32], target.head.embed(_ids()))
    torch.testing.assert_close(target.logits(last_hidden), output.logits)
    assert not features.is_inference()
    assert not last_hidden.is_inference()


def test_gemma4_scales_its_embeddings_and_caps_its_logits() -> None:
    target = tiny_target("gemma4", layer_ids=(-1, 3))
    features, last_hidden = target.features(_ids())
    plain = torch.nn.functional.embedding(_ids(), target.head.embedding)
    torch.testing.assert_close(features[..., :32], plain * 32**0.5)
    raw = last_hidden @ target.head.weight.T
    torch.testing.assert_close(target.logits(last_hidden), 30 * torch.tanh(raw / 30))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_feature_of_a_real_position(family: str) -> None:
    target, ids = tiny_target(family), _ids()
    whole, _ = target.features(ids)
    padded = ids.clone()
    padded[:, 9:] = 0
    short, _ = target.features(padded)
    torch.testing.assert_close(short[:, :9], whole[:, :9])


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_cached_forwards_equal_one_full_forward(family: str) -> None:
    # The window of Gemma4's sliding layers is 8: the prompt alone is longer.
    steps = ((13, (13, 5)), (4, (1, 4)), (4, (3, 2)), (4, (4, 4)), (4, (2, 4)))
    assert_ragged_forwards_equal_one(tiny_target(family, dtype=torch.float64), _ids(30), steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_gives_the_same_features_whole_and_cached(family: str) -> None:
    target, ids = tiny_target(family), _ids()
    expected, _ = target.features(ids)
    target.model.set_attn_implementation("eager")
    torch.testing.assert_close(target.features(ids)[0], expected, rtol=1e-4, atol=1e-4)
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    cached, _ = target.forward_cached(ids, positions, RaggedCache.for_batch(len(ids)), ids.shape[1])
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-4)


def test_tapping_other_layers_replaces_the_features() -> None:
    target = tiny_target(layer_ids=(0, 1, 3))
    first, _ = target.features(_ids())
    target.tap((1,))
    assert target.layer_ids == (1,)
    second, _ = target.features(_ids())
    assert torch.equal(second, first[..., 32:64])


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (30, 5, (1, 8, 14, 20, 27)),
        (8, 5, (1, 2, 3, 4, 5)),
        (30, 2, (1, 27)),
    ],
)
def test_default_layers_are_spread_over_the_target(layers: int, taps: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(layers, taps) == expected


@pytest.mark.parametrize(("layers", "taps"), [(7, 5), (30, 1)])
def test_the_default_rule_asks_for_layers_where_it_has_no_answer(layers: int, taps: int) -> None:
    with pytest.raises(ConfigError, match=r"Set target\.layers"):
        default_layer_ids(layers, taps)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 9, 35], r"layer 35 is the last layer of some-model; engines cannot capture it\. Use -1\.\.34"),
        ([1, 36], r"no layer 36 \(it has 36\)"),
        ([-2, 1], "no layer -2"),
        ([3, 1], "not strictly increasing"),
        ([1, 1], "not strictly increasing"),
        ([], "empty"),
    ],
)
def test_layers_that_cannot_be_tapped_are_refused_by_number(ids: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_layer_ids(ids, 36, "some-model")


@pytest.mark.parametrize("mask_token", [VOCAB_SIZE, -1])
def test_a_mask_token_without_an_embedding_row_is_refused(mask_token: int) -> None:
    model = tiny_target().model
    with pytest.raises(ConfigError, match=f"mask_token_id {mask_token} has no embedding row.*0..95"):
        Target(model, None, name="tiny", layer_ids=(0, 1), mask_token_id=mask_token)


def test_a_block_draft_asks_for_a_mask_token_and_eagle3_does_not() -> None:
    target = Target(tiny_target().model, None, name="tiny", layer_ids=(0, 1))
    with pytest.raises(ConfigError, match=r"target\.mask_token_id is not set"):
        tiny_draft(target, "dflash")
    assert tiny_draft(target, "eagle3").spec.mask_token_id is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["qwen3", "target"])
@pytest.mark.parametrize("kind", ["dflash-fill_in", "eagle3"])
def test_rotary_tables_of_a_draft_stay_single_precision_in_bfloat16(family: str, layers: str, kind: str) -> None:
    draft = kind_of_draft(tiny_target(family), kind, draft_layers=layers)
    positions = torch.tensor([[0, 512, 2048]])
    before = {name: value.clone() for name, value in draft._rotary[0].named_buffers()}
    exact = draft.rotation(torch.zeros(1, 3, 32), positions)
    draft = draft.to(torch.bfloat16)
    frequencies = dict(draft._rotary[0].named_buffers())
    assert any("inv_freq" in name for name in frequencies)
    for name, value in frequencies.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    low = draft.rotation(torch.zeros(1, 3, 32, dtype=torch.bfloat16), positions)
    for found, wanted in zip(low, exact, strict=True):
        assert torch.equal(found, wanted.to(torch.bfloat16))


@pytest.mark.parametrize("family", FAMILIES)
def test_context_keys_are_those_that_a_stock_layer_makes_of_the_same_states(family: str) -> None:
    target = tiny_target(family)
    draft = kind_of_draft(target, "dflash-anchor_first", draft_layers="target")
    layer, hidden = draft.layers[0], torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    rotation = draft.rotation(hidden, torch.arange(6)[None])
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorder:
        def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
            kept.append((keys, values))
            return keys, values

    layer.self_attn(
        hidden_states=hidden,
        position_embeddings=rotation,
        attention_mask=None,
        cache=Recorder(),
        **draft.family.layer_arguments(),
    )
    for found, wanted in zip(draft.family.keys_values(layer.self_attn, hidden, rotation), kept[0], strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_unknown_layer_family_names_the_way_out() -> None:
    with pytest.raises(TargetError, match=r"model type 'mamba' are not known here.*draft_layers=qwen3"):
        family_of("mamba")


def test_a_model_that_is_no_plain_decoder_is_refused() -> None:
    class Odd(nn.Module):
        config = tiny_config("qwen3")

        def get_decoder(self) -> nn.Module:
            return nn.Linear(2, 2)

    with pytest.raises(TargetError, match="not a plain decoder: it has no 'embed_tokens'"):
        Target(Odd(), None, name="odd")


def _settings(folder: Path, **fields: Any) -> TargetConfig:
    blank = {
        "name_or_path": str(folder),
        "short_name": "tiny",
        "revision": None,
        "layers": [0, 2],
        "mask_token_id": 95,
        "draft_layers": "qwen3",
        "dtype": "float32",
        "attention": "sdpa",
        "chat_template": None,
        "enable_thinking": False,
        "system_prompt": None,
    }
    known = {name: value for name, value in blank.items() if name in TargetConfig.model_fields}
    return TargetConfig.model_validate(known | fields)


def test_a_target_with_several_hidden_states_for_each_token_is_refused() -> None:
    config = DeepseekV4Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=32,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(TargetError, match="compressed_sparse_attention, heavily_compressed_attention layers"):
        Target(model, None, name="streams", layer_ids=(0, 1))
    # A model that does not name its layers is found out by what they carry.
    model.config.layer_types = None
    target = Target(model, None, name="streams", layer_ids=(0, 1))
    with pytest.raises(TargetError, match=r"'streams' \(deepseek_v4\) carries hidden states of shape \(2, 20, 4, 32\)"):
        target.features(torch.arange(40).view(2, 20))


def test_a_saved_target_is_loaded_with_its_stop_tokens_and_tied_or_untied_head(tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):
        folder = tmp_path / family
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        model.save_pretrained(folder)
        GenerationConfig(eos_token_id=[3, 17]).save_pretrained(folder)
        words = {f"w{index}": index for index in range(90)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w9", unk_token="w0"
        )
        tokenizer.save_pretrained(folder)
        target = Target.load(_settings(folder), torch.device("cpu"))
        assert target.stop_token_ids == (3, 9, 17)
        assert target.layer_ids == (0, 2)
        assert target.tokenizer.eos_token == "w9"
        assert (target.head.embedding.data_ptr() == target.head.weight.data_ptr()) == (family == "llama")
        with torch.no_grad():
            expected = model.eval()(input_ids=_ids()).logits
        torch.testing.assert_close(target.logits(target.features(_ids())[1]), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ConfigError, match="layer 4 is the last layer"):
            Target.load(_settings(folder), torch.device("cpu"), layer_ids=(1, 4))


def test_a_target_that_cannot_be_found_names_the_embedded_one(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="smollm2_135m"):
        Target.load(_settings(tmp_path / "nowhere"), torch.device("cpu"))


def test_a_target_without_a_tokenizer_says_so() -> None:
    with pytest.raises(TargetError, match="no tokenizer"):
        _ = tiny_target().tokenizer


def test_longrope_ends_where_a_long_row_would_turn_its_neighbours_otherwise() -> None:
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 24,
    }
    config = AutoConfig.for_model(
        "phi3",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=24,
        rope_parameters=rope,
        initializer_range=0.25,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    target = Target(model, None, name="long", layer_ids=(0, 1))
    assert target.context_length == 24
    ids = torch.randint(1, 90, (2, 24))
    alone, together = target.features(ids[:1, :9])[1], target.features(ids)[1][:1, :9]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    # What would come beyond: a longer sequence changes the states of its own beginning.
    beyond = model.model(torch.randint(1, 90, (1, 25)).index_copy(1, torch.arange(9), ids[:1, :9]), use_cache=False)
    assert (beyond.last_hidden_state[:, :9] - alone).abs().max() > 1e-2
    with pytest.raises(TargetError, match="25 tokens is longer than the 24 positions of long"):
        target.features(torch.ones(1, 25, dtype=torch.int64))
