"""Around caches: what a training on one still reads of its target, and what answering into one needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from chat_targets import save_chat_target, target_overrides

from deepspec.algorithms.base import build_draft
from deepspec.config import compose_data_job, compose_train
from deepspec.data.jobs import write_answers
from deepspec.errors import DataError, TargetError
from deepspec.targets.base import Target
from deepspec.targets.head_only import load_head_only


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_a_draft_that_starts_from_layers_of_the_target_reads_only_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    target = target_overrides(save_chat_target(tmp_path / "target"))
    start = ["algorithm.num_layers=1", "algorithm.init=target_layers", "algorithm.draft_layers=target"]
    config = compose_train([*target, f"algorithm={algorithm}", *start, "algorithm.num_draft_tokens=3"])
    whole = Target.load(config.target, torch.device("cpu"))
    monkeypatch.setattr(Target, "load", None)
    head = load_head_only(config.target, torch.device("cpu"))
    expected, found = (build_draft(config.algorithm, one, [[5, 6, 7]]).state_dict() for one in (whole, head))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_layer_is_found_in_whichever_file_holds_it_and_its_absence_is_named(tmp_path: Path) -> None:
    config = compose_train(target_overrides(save_chat_target(tmp_path))).target
    whole = Target.load(config, torch.device("cpu"))
    (tmp_path / "model.safetensors").unlink()
    whole.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    head = load_head_only(config, torch.device("cpu"))
    for index in range(whole.num_layers):
        mine, theirs = (target.layer(index).state_dict() for target in (head, whole))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs), index
    for path in tmp_path.glob("model-*.safetensors"):
        path.unlink()
    with pytest.raises(TargetError, match=r"layer 1 of target .* cannot be read from its safetensors.*features=online"):
        head.layer(1)


def test_answering_into_a_cache_says_what_it_takes_and_needs_room_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_overrides(save_chat_target(tmp_path / "target"))
    places = [f"answers={tmp_path / 'answers.jsonl'}", f"cache={tmp_path / 'cache'}"]
    words = [*target, *places, "limit=3", "max_new_tokens=1000", "device=cpu"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 5000, 5000))
    with pytest.raises(DataError, match=r"needs .* KiB more, but .*cache has 4\.9 KiB free"):
        write_answers(compose_data_job(words))
    # 3 taps of 32 numbers, a last hidden state, its logsumexp and argmax, id and mask: 192 + 72 + 5 bytes.
    assert "269.0 B a token of an answer in bf16, for 3 answers of 1,000 tokens 788.3 KiB" in capsys.readouterr().out
    assert not (tmp_path / "answers.jsonl").exists()
