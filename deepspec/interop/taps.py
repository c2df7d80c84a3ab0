"""Layer ids as others count them, in one table.

Everywhere else in this project layer i is the output of decoder layer i. A wrong id costs acceptance without an error
in any engine, so no other module adds or subtracts one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspec.errors import CheckpointError

# Where a config may name tapped layers: key path -> what the file adds to our id.
KEYS: dict[tuple[str, ...], int] = {
    ("target_layer_ids",): 0,  # DeepSpec, and vLLM, SGLang and mlx-dspark for it
    ("dflash_config", "target_layer_ids"): 0,  # z-lab, SpecForge, SGLang, vLLM
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"): 0,  # SGLang, SpecForge
    ("eagle_aux_hidden_state_layer_ids",): 1,  # vLLM and speculators, Eagle3
    ("aux_hidden_state_layer_ids",): 1,  # speculators, block drafts
}


def written(path: tuple[str, ...], layer_ids: Sequence[int]) -> list[int]:
    """Our layer ids as the readers of one key count them."""
    return [layer + KEYS[path] for layer in layer_ids]


def found(fields: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """The tapped layers that a config names, in our count; None where it names none.

    Args:
        fields: a config.json of anyone.
        where: its name, for messages.

    Raises:
        CheckpointError: two keys name different layers, or one is no list of numbers.
    """
    by_key: dict[str, tuple[int, ...]] = {}
    for path, offset in KEYS.items():
        value: Any = fields
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            continue
        if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
            raise CheckpointError(f"{where}: {'.'.join(path)} is {value!r}, not a list of layer numbers.")
        by_key[".".join(path)] = tuple(layer - offset for layer in value)
    if len(set(by_key.values())) > 1:
        said = "; ".join(f"{key} {list(layers)}" for key, layers in by_key.items())
        raise CheckpointError(
            f"{where} names different tapped layers in different keys. Counted as outputs of decoder layers (0-based): "
            f"{said}. A draft on wrong taps loses acceptance without any error; keep the key that is right."
        )
    return next(iter(by_key.values()), None)


def eagle3_default(num_layers: int) -> tuple[int, int, int]:
    """The taps of Eagle3 drafts whose config names none: what enters decoder layers 2, N // 2 and N - 3."""
    return 1, num_layers // 2 - 1, num_layers - 4
