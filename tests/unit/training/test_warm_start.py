"""A draft that starts from the weights of a saved one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import KINDS, kind_of_draft, tiny_draft, tiny_target

from deepspec.algorithms.base import build_draft
from deepspec.algorithms.checkpoint import save_draft
from deepspec.errors import CheckpointError
from deepspec.training.warm_start import warm_started


@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_comes_back_with_its_weights_ready_to_be_trained(tmp_path: Path, kind: str) -> None:
    target = tiny_target()
    saved = kind_of_draft(target, kind)
    save_draft(saved, tmp_path)
    draft = warm_started(tmp_path, saved.config, target)
    assert draft.state_dict().keys() == saved.state_dict().keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(draft.state_dict()[name], value), name
    trainable = [{name for name, value in one.named_parameters() if value.requires_grad} for one in (draft, saved)]
    assert trainable[0] == trainable[1]


def test_a_reduced_vocabulary_comes_with_the_weights_and_not_from_new_answers(tmp_path: Path) -> None:
    target = tiny_target()
    common, other = [[5, 6, 7, 8] * 9, [50, 51, 52, 53] * 9]
    config = tiny_draft(target, "dspark").config.model_copy(update={"draft_vocab_size": 8})
    saved = build_draft(config, target, [common], seed=0)
    save_draft(saved, tmp_path)
    fresh = build_draft(config, target, [other], seed=0)
    draft = warm_started(tmp_path, config, target)
    assert saved.vocab is not None
    assert fresh.vocab is not None
    assert draft.vocab is not None
    assert not torch.equal(fresh.vocab.target_ids, saved.vocab.target_ids)
    assert torch.equal(draft.vocab.target_ids, saved.vocab.target_ids)


@pytest.mark.parametrize(("saved_size", "wanted"), [(None, 8), (8, None), (8, 12)])
def test_a_vocabulary_of_another_size_than_the_run_asks_for_is_refused(
    tmp_path: Path, saved_size: int | None, wanted: int | None
) -> None:
    target = tiny_target()
    config = tiny_draft(target, "dspark").config
    saved = build_draft(config.model_copy(update={"draft_vocab_size": saved_size}), target, [[5, 6, 7, 8]], seed=0)
    save_draft(saved, tmp_path)
    with pytest.raises(CheckpointError, match=rf"algorithm\.draft_vocab_size: {saved_size} -> {wanted}"):
        warm_started(tmp_path, config.model_copy(update={"draft_vocab_size": wanted}), target)


def test_settings_of_the_run_hold_and_not_those_of_the_saved_draft(tmp_path: Path) -> None:
    target = tiny_target()
    saved = tiny_draft(target, "dflash")
    save_draft(saved, tmp_path)
    config = saved.config.model_copy(update={"position_decay": 9.0})
    assert warm_started(tmp_path, config, target).config.position_decay == 9.0


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"layout": "fill_in"}, r"layout: anchor_first -> fill_in"),
        ({"num_layers": 1}, r"layers\.1\."),
    ],
)
def test_weights_that_would_mean_something_else_are_refused(
    tmp_path: Path, changed: dict[str, Any], difference: str
) -> None:
    target = tiny_target()
    saved = tiny_draft(target, "dflash")
    save_draft(saved, tmp_path)
    with pytest.raises(CheckpointError, match=difference):
        warm_started(tmp_path, saved.config.model_copy(update=changed), target)


def test_weights_made_for_other_tapped_layers_or_another_algorithm_are_refused(tmp_path: Path) -> None:
    saved = tiny_draft(tiny_target(), "dflash")
    save_draft(saved, tmp_path)
    with pytest.raises(CheckpointError, match=r"target\.layers: \[0, 1, 3\] -> \[0, 2, 3\]"):
        warm_started(tmp_path, saved.config, tiny_target(layer_ids=(0, 2, 3)))
    with pytest.raises(CheckpointError, match=r"algorithm\.name: dflash -> eagle3"):
        warm_started(tmp_path, tiny_draft(tiny_target(), "eagle3").config, tiny_target())


def test_a_folder_without_a_draft_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        warm_started(tmp_path, tiny_draft(tiny_target(), "dflash").config, tiny_target())
