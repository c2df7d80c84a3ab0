"""Layer ids: one table, read and written both ways, and files that contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest

from deepspec.errors import CheckpointError
from deepspec.interop import taps

LAYERS = (1, 9, 17, 25, 33)


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    found: dict[str, Any] = value
    return found


@pytest.mark.parametrize("path", taps.KEYS)
def test_what_is_written_for_a_key_is_read_back_from_it(path: tuple[str, ...]) -> None:
    assert taps.found(_nested(path, taps.written(path, LAYERS)), "config.json") == LAYERS


def test_vllm_and_speculators_count_from_one_and_all_others_from_zero() -> None:
    shifted = {path for path in taps.KEYS if taps.written(path, LAYERS) == [2, 10, 18, 26, 34]}
    assert shifted == {("eagle_aux_hidden_state_layer_ids",), ("aux_hidden_state_layer_ids",)}
    assert all(taps.written(path, LAYERS) == list(LAYERS) for path in set(taps.KEYS) - shifted)


def test_keys_that_mean_different_layers_are_refused_with_both() -> None:
    fields = {"target_layer_ids": [1, 9], "eagle_aux_hidden_state_layer_ids": [1, 9]}
    with pytest.raises(CheckpointError, match=r"target_layer_ids \[1, 9\]; eagle_aux_hidden_state_layer_ids \[0, 8\]"):
        taps.found(fields, "config.json")


@pytest.mark.parametrize("value", [[], "1,2", [1, "2"], [1.0], [True], 3])
def test_taps_that_are_no_list_of_numbers_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="not a list of layer numbers"):
        taps.found({"target_layer_ids": value}, "config.json")


def test_a_config_without_taps_names_none_and_eagle3_has_a_rule() -> None:
    assert taps.found({"eagle_config": {"use_aux_hidden_state": True}}, "config.json") is None
    # 36 layers: engines capture what enters layers 2, 18 and 33.
    assert taps.eagle3_default(36) == (1, 17, 32)
