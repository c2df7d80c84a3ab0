"""Running out of memory, for real: more is asked for than any machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspec.config import TrainConfig, compose_train
from deepspec.training import run
from deepspec.training.memory import NoMemoryError, memory_named

PEBIBYTE = 2**50


def make_config(folder: Path) -> TrainConfig:
    (folder / "answers.jsonl").write_text("{}\n")
    words = [f"output_dir={folder}", f"data.answers={folder / 'answers.jsonl'}", "engine.device=cpu"]
    return compose_train(["experiment=dspark_smollm2_135m", "optimizer.micro_batch_size=2", *words])


def test_torch_and_python_without_memory_name_the_settings_that_need_less(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    advice = r"smaller optimizer\.micro_batch_size \(2; .*fewer data\.num_anchors .*`deepspec plan`"
    with pytest.raises(NoMemoryError, match=rf"DefaultCPUAllocator.*{advice}"), memory_named(config):
        torch.empty(PEBIBYTE, dtype=torch.uint8)
    with pytest.raises(NoMemoryError, match=rf"out of memory: MemoryError\. .*{advice}"), memory_named(config):
        bytearray(PEBIBYTE)
    with pytest.raises(NoMemoryError, match=advice), memory_named(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must match the size"), memory_named(make_config(tmp_path)):
        torch.zeros(2) + torch.zeros(3)


def test_a_training_without_memory_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "build_trainer", lambda *_: torch.empty(PEBIBYTE, dtype=torch.uint8))
    with pytest.raises(NoMemoryError, match=r"out of memory: .*DefaultCPUAllocator"):
        run.train(make_config(tmp_path))
