"""Starting values copied from the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_draft, tiny_target

from deepspec.algorithms.base import DraftModel
from deepspec.errors import ConfigError
from deepspec.targets.base import Target

COPIES: dict[str, Any] = {"draft_layers": "target", "init": "target_layers"}


def started(target: Target, algorithm: str, **overrides: Any) -> DraftModel:
    draft = tiny_draft(target, algorithm, **(COPIES | overrides))
    draft.initialise(target, (), seed=0)
    return draft


def assert_copy(layer: torch.nn.Module, source: torch.nn.Module, but: tuple[str, ...] = ()) -> None:
    theirs = dict(source.named_parameters())
    for name, value in layer.named_parameters():
        if name in theirs and name not in but:
            assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
@pytest.mark.parametrize(("init_layers", "expected"), [(None, (3, 4)), ((1, 3), (1, 3))])
def test_block_drafts_start_from_the_last_or_the_named_layers(
    algorithm: str, init_layers: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    target = tiny_target("llama")
    draft: Any = started(target, algorithm, num_layers=2, init_layers=init_layers)
    for layer, source in zip(draft.layers, expected, strict=True):
        assert_copy(layer, target.layer(source))
    features = torch.randn(1, 3, draft.feature_size)
    last_tap = features[..., -target.hidden_size :]
    reader: Any = target.layer(target.layer_ids[-1] + 1)
    torch.testing.assert_close(draft.context(features), reader.input_layernorm(last_tap))


@pytest.mark.parametrize(("init_layers", "expected"), [(None, 4), ((2,), 2)])
def test_eagle3_starts_from_the_last_or_the_named_layer(init_layers: tuple[int, ...] | None, expected: int) -> None:
    target = tiny_target("llama")
    draft: Any = started(target, "eagle3", num_layers=1, init_layers=init_layers)
    source: Any = target.layer(expected)
    wide = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    assert_copy(draft.layers[0], source, but=wide)
    projection = draft.layers[0].self_attn.k_proj.weight
    assert torch.equal(projection[:, target.hidden_size :], source.self_attn.k_proj.weight)
    assert not projection[:, : target.hidden_size].any()


def test_a_layer_that_the_target_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"init_layers \[1, 5\]: tiny-llama has no layer 5, only 0\.\.4"):
        started(tiny_target("llama"), "dspark", num_layers=2, init_layers=(1, 5))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"init": "random", "init_layers": (1, 3)}, "needs init=target_layers"),
        ({"init_layers": (1, 2, 3)}, "names 3 layers, but num_layers is 2"),
    ],
)
def test_named_layers_that_do_not_fit_the_settings_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        started(tiny_target("llama"), "dspark", num_layers=2, **overrides)
