"""What a draft needs to know of a model family to build layers from it.

A family is one value. It says which stock transformers classes make a draft layer and how context features become
that layer's keys and values. It does not know which algorithm asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from deepspec import lookup
from deepspec.errors import TargetError


class TargetFamily(NamedTuple):
    """Stock layers of one family, as draft layers.

    Attributes:
        name: module name under deepspec.targets.
        architecture: prefix of the checkpoint's `architectures` entry, such as Qwen3 in Qwen3DSparkModel.
        model_types: values of `config.model_type` (of the text part) that belong here.
        draft_config: (text config of the target, number of draft layers) -> config of the draft's layers.
        layer: (config, layer index) -> decoder layer.
        norm: (config) -> a norm over the hidden size.
        rotary: (config) -> rotary module.
        rotate: (rotary, hidden, positions [B, Q]) -> cos and sin [B, Q, D].
        keys_values: (attention, hidden [B, L, H], cos and sin) -> rotated keys and values [B, heads, L, D].
        after_attention: (layer, residual [B, L, H], attention output) -> the layer's output.
        layer_arguments: further arguments that every call of a layer needs.
    """

    name: str
    architecture: str
    model_types: tuple[str, ...]
    draft_config: Callable[[PreTrainedConfig, int], PreTrainedConfig]
    layer: Callable[[Any, int], nn.Module]
    norm: Callable[[Any], nn.Module]
    rotary: Callable[[Any], nn.Module]
    rotate: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
    keys_values: Callable[[Any, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
    after_attention: Callable[[Any, Tensor, Tensor], Tensor]
    layer_arguments: Callable[[], Mapping[str, Any]]


def family_named(name: str) -> TargetFamily:
    """The family of deepspec/targets/<name>.py."""
    family: TargetFamily = lookup.load_module("targets", name, "target family").FAMILY
    return family


def family_of(model_type: str) -> TargetFamily:
    """The family that a model type belongs to.

    Raises:
        TargetError: no family here builds layers of that type.
    """
    families = [family_named(name) for name in lookup.available("targets")]
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(kind for family in families for kind in family.model_types))
    raise TargetError(
        f"draft layers of model type '{model_type}' are not known here. Known: {known}. "
        "Use algorithm.draft_layers=qwen3, which works for every target."
    )


def pre_norm_tail(layer: Any, residual: Tensor, attention_output: Tensor) -> Tensor:
    """The rest of a pre-norm layer (Llama, Qwen3) after its attention."""
    hidden = residual + attention_output
    output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return output


def rotate_plain(rotary: nn.Module, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary tables of families that have one kind of layer."""
    cos, sin = rotary(hidden, positions)
    return cos, sin


def rotate_keys(keys: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate keys [B, heads, L, D] by tables [B, L, D] (half-split convention of transformers)."""
    cos, sin = rotation[0][:, None], rotation[1][:, None]
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat((-second, first), dim=-1) * sin


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """[B, L, heads * D] -> [B, L, heads, D]."""
    return projected.view(*projected.shape[:-1], -1, head_dim)
