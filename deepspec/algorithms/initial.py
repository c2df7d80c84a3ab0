"""Starting values of drafts: random ones that no device changes, and copies of the target's layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepspec.config import AlgorithmConfig
from deepspec.errors import ConfigError
from deepspec.targets.base import Target


def reset_weights(module: nn.Module, std: float, generator: torch.Generator) -> None:
    """Draw every matrix from N(0, std), set every vector to its neutral value (norms one, biases zero)."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            # Drawn on the host, so that every device starts from the same numbers.
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(std=std, generator=generator)
            with torch.no_grad():
                parameter.copy_(drawn)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)


def copied_layers(config: AlgorithmConfig, target: Target) -> tuple[int, ...]:
    """Layers of the target that the draft's layers start from.

    Raises:
        ConfigError: the target has no such layer.
    """
    if config.num_layers > target.num_layers:
        raise ConfigError(
            f"algorithm.num_layers {config.num_layers} with init=target_layers: {target.name} has only "
            f"{target.num_layers} layers to copy. Use fewer, or algorithm.init=random."
        )
    if config.init_layers is None:
        return tuple(range(target.num_layers - config.num_layers, target.num_layers))
    for layer in config.init_layers:
        if layer >= target.num_layers:
            raise ConfigError(
                f"algorithm.init_layers {list(config.init_layers)}: {target.name} has no layer {layer}, only "
                f"0..{target.num_layers - 1}."
            )
    return config.init_layers


def copy_target_layer(layer: nn.Module, source: nn.Module, index: int, skip: Sequence[str] = ()) -> None:
    """Start a draft layer from a layer of the target, except for the weights named in `skip`.

    Raises:
        ConfigError: the two have other shapes.
    """
    mine = layer.state_dict()
    theirs = {name: value for name, value in source.state_dict().items() if name not in skip}
    for name, value in theirs.items():
        if name in mine and mine[name].shape != value.shape:
            raise ConfigError(
                f"algorithm.init=target_layers: {name} of target layer {index} has shape {tuple(value.shape)}, "
                f"the draft's {tuple(mine[name].shape)}. Use algorithm.init=random."
            )
    layer.load_state_dict({name: theirs[name] for name in mine if name in theirs}, strict=False)
