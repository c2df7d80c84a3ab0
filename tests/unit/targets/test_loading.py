"""Loading targets: vision-language wrappers, single tensors without a model, and what cannot be a target."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_targets import ascii_tokenizer
from families import FAMILIES, family_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from deepspec.config import TargetConfig
from deepspec.errors import TargetError
from deepspec.targets.base import Target
from deepspec.targets.facts import read_facts


def _settings(folder: Path, **fields: Any) -> TargetConfig:
    blank = {
        "name_or_path": str(folder),
        "short_name": "tiny",
        "layers": [0, 2],
        "mask_token_id": 4,
        "dtype": "float32",
        "attention": "sdpa",
        "enable_thinking": False,
    }
    return TargetConfig.model_validate(blank | fields)


def _saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4_unified"])
def test_the_text_part_of_a_vision_language_model_is_loaded_from_its_folder(family: str, tmp_path: Path) -> None:
    model = family_model(family, "eager")
    target = Target.load(_settings(_saved(tmp_path, model)), torch.device("cpu"))
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(target.logits(target.features(ids)[1]), expected, rtol=1e-3, atol=1e-3)
    facts = read_facts(_settings(tmp_path))
    assert (facts.num_layers, facts.vocab_size) == (target.num_layers, target.vocab_size)
    assert (facts.embedding_scale, facts.softcap) == (target.head.embedding_scale, target.head.softcap)


def test_threads_that_load_at_once_leave_the_tied_heads_of_later_models_tied(tmp_path: Path) -> None:
    settings = _settings(_saved(tmp_path, family_model("llama")))
    before = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: Target.load(settings, torch.device("cpu")), range(12)))
    assert PreTrainedModel.tie_weights is before
    assert all(one.head.embedding.data_ptr() == one.head.weight.data_ptr() for one in loaded)


def test_a_target_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"config of target .* cannot be read"):
        read_facts(_settings(tmp_path))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_attention_that_sdpa_cannot_compute_asks_for_eager(family: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path, family_model(family))
    with pytest.raises(
        TargetError, match=rf"{family}\) has attention that SDPA cannot compute.*target\.attention=eager"
    ):
        Target.load(_settings(folder), torch.device("cpu"))
    Target.load(_settings(folder, attention="eager"), torch.device("cpu"))


def test_a_family_that_scales_its_logits_or_embeddings_unknown_to_us_is_refused(tmp_path: Path) -> None:
    common = FAMILIES["qwen3"] | {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    for number, (key, value, what) in enumerate(
        (("embedding_multiplier", 3.0, "embeddings"), ("logits_scaling", 4.0, "logits"))
    ):
        config = AutoConfig.for_model("granite", **common, **heads, initializer_range=0.3, **{key: value})
        folder = _saved(tmp_path / str(number), AutoModelForCausalLM.from_config(config))
        with pytest.raises(TargetError, match=rf"\(granite\) scales its {what} in a way that is not known here"):
            Target.load(_settings(folder), torch.device("cpu"))


def test_layers_whose_state_cannot_be_rolled_back_are_refused_by_name() -> None:
    model = family_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "conv", "full_attention"]
    with pytest.raises(TargetError, match=r"has chunked_attention, conv layers, whose state cannot be rolled back"):
        Target(model, None, name="odd", layer_ids=(0, 1))


def test_a_target_spread_over_devices_or_with_a_quantised_head_is_refused() -> None:
    model = family_model("qwen3")
    model.model.layers[1].to("meta")
    model.hf_device_map = {"model": "cpu", "model.layers.1": "disk"}
    model.hf_device_map = {"model.layers.1": "disk", "": "cpu"}
    with pytest.raises(TargetError, match="is spread over cpu, meta; its taps are read on one device"):
        Target(model, None, name="spread", layer_ids=(0, 1))
    model = family_model("qwen3")
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(96, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TargetError, match=r"its head is quantised \(torch\.uint8"):
        Target(model, None, name="packed", layer_ids=(0, 1))
    model = family_model("qwen3")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(96))
    with pytest.raises(TargetError, match="adds a bias to its logits"):
        Target(model, None, name="biased", layer_ids=(0, 1))


def _said_to_be_quantised(folder: Path, settings: dict[str, Any]) -> Path:
    path = _saved(folder, family_model("qwen3")) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    return folder


def test_a_quantisation_whose_package_is_missing_is_refused_with_its_name(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = _said_to_be_quantised(tmp_path, settings)
    with pytest.raises(TargetError, match=r"cannot be loaded: .*requires optimum.*a checkpoint that is not quantised"):
        Target.load(_settings(folder), torch.device("cpu"))


def test_a_target_whose_files_lack_weights_is_refused_by_the_first(tmp_path: Path) -> None:
    folder = _said_to_be_quantised(tmp_path, {"quant_method": "of_tomorrow"})
    weights = load_file(folder / "model.safetensors")
    packed = {f"{name}_packed" if "mlp" in name else name: value for name, value in weights.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 12 of its weights, the first is model\.layers\.0\.mlp\.gate_proj"):
        Target.load(_settings(folder), torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "buffer"), [("glm4_moe", "e_score_correction_bias"), ("gemma4_text", "layer_scalar")]
)
def test_a_target_whose_files_lack_buffers_is_refused_too(family: str, buffer: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path, family_model(family))
    Target.load(_settings(folder), torch.device("cpu"))
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.endswith(buffer)}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=rf"lacks \d of its weights, the first is model\.layers.*{buffer}"):
        Target.load(_settings(folder), torch.device("cpu"))
