"""Checkpoints that are whole or absent."""

from __future__ import annotations

import ast
import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from deepspec.errors import CheckpointError
from deepspec.training.checkpoint import (
    BEST,
    LATEST,
    Progress,
    TrainingState,
    find_damage,
    latest_valid,
    list_checkpoints,
    load_training_state,
    point_latest,
    read_training_state,
    save_checkpoint,
    save_training_state,
)
from deepspec.training.engines import TorchEngine
from deepspec.training.rotation import Keep


def write_text(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.txt").write_text(content)

    return write


def save_steps(folder: Path, *steps: int, keep_last: int = 10) -> None:
    for step in steps:
        save_checkpoint(folder, step, write_text(f"weights of {step} " * 50), Keep(keep_last))


def test_a_saved_checkpoint_is_whole_and_step_latest_points_at_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    assert (tmp_path / LATEST).is_symlink()
    assert os.readlink(tmp_path / LATEST) == "step_20"
    assert latest_valid(tmp_path) == tmp_path / "step_20"
    assert find_damage(tmp_path / "step_20") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_20", LATEST]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    save_steps(tmp_path, 9, 10, 100)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_3", "step_4"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.txt").write_text("short"), "bytes instead of"),
        (lambda folder: (folder / "model.txt").write_text("Weights of 20 " * 50), "content of model.txt differs"),
        (lambda folder: (folder / "model.txt").unlink(), "model.txt is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {'), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], reason: str
) -> None:
    save_steps(tmp_path, 10, 20)
    damage(tmp_path / "step_20")
    assert reason in str(find_damage(tmp_path / "step_20"))
    assert latest_valid(tmp_path) == tmp_path / "step_10"
    assert f"{tmp_path / 'step_20'} is damaged" in capsys.readouterr().err


def test_saving_again_replaces_a_damaged_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / "step_20" / "model.txt").unlink()
    save_steps(tmp_path, 20)
    assert latest_valid(tmp_path) == tmp_path / "step_20"


def test_rotation_never_counts_a_later_damaged_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 30)
    (tmp_path / "step_30" / "model.txt").unlink()
    save_steps(tmp_path, 20, keep_last=1)
    assert latest_valid(tmp_path) == tmp_path / "step_20"


def test_a_save_that_fails_half_way_leaves_the_last_checkpoint_and_says_so(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)

    def write(folder: Path) -> None:
        (folder / "model.txt").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"No space left.*step_10"):
        save_checkpoint(tmp_path, 20, write, Keep(1))
    assert latest_valid(tmp_path) == tmp_path / "step_10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", LATEST]


def test_a_file_that_the_system_refuses_to_grow_ends_as_a_checkpoint_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step_10"):
            save_checkpoint(
                tmp_path, 20, lambda folder: save_file({"w": torch.zeros(100_000)}, folder / "w.safetensors"), Keep(1)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest_valid(tmp_path) == tmp_path / "step_10"


def test_step_latest_is_swapped_even_where_a_killed_swap_left_its_link(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / ".tmp_latest").symlink_to("nowhere")
    point_latest(tmp_path, tmp_path / "step_10")
    assert os.readlink(tmp_path / LATEST) == "step_10"


def make_trained(seed: int, size: int = 3) -> tuple[nn.Module, torch.optim.AdamW, TorchEngine]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, TorchEngine(model, model, optimizer, 1.0, Accelerator(cpu=True))


STATE = TrainingState(Progress(3, 24), planned_steps=7, data="abc", target="def", config={"seed": 1})


def test_training_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer, engine = make_trained(0)
    save_training_state(tmp_path, engine.gather(), STATE)
    other, other_optimizer, other_engine = make_trained(1)
    load_training_state(tmp_path, other_engine)
    assert read_training_state(tmp_path) == STATE
    inputs = torch.randn(8, 4)
    with torch.no_grad():
        other[1].bias.copy_(model[1].bias)  # frozen, so not part of the state
    for network, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        network(inputs).square().sum().backward()
        its_optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_training_state_of_another_draft_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save_training_state(tmp_path, make_trained(0)[-1].gather(), STATE)
    with pytest.raises(CheckpointError, match=r"stored \(3,\), now \(5,\)"):
        load_training_state(tmp_path, make_trained(0, size=5)[-1])


def test_a_folder_without_training_state_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"training_state\.json"):
        read_training_state(tmp_path)


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    manifest = json.loads((tmp_path / "step_10" / "manifest.json").read_text())
    assert manifest["step"] == 10
    assert list(manifest["files"]) == ["model.txt"]


def test_nothing_in_the_package_reads_or_writes_pickles() -> None:
    names: set[str] = set()
    package = Path(__file__).parents[3] / "deepspec"
    # Hands rows to processes of its own; nothing of it comes from a file or stays in one.
    for path in set(package.rglob("*.py")) - {package / "data" / "row_workers.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names.add(f"{node.value.id}.{node.attr}")
    assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "torch.load", "torch.save"}


def test_step_best_goes_when_no_checkpoint_is_the_best_any_more(tmp_path: Path) -> None:
    def save(step: int, keep: Keep) -> None:
        def write(folder: Path) -> None:
            state = STATE._replace(metrics={"acceptance@1": 1.0 / step})
            (folder / "training_state.json").write_text(json.dumps({"step": step, "samples": step, **state._asdict()}))

        save_checkpoint(tmp_path, step, write, keep)

    for step in (1, 2):
        save(step, Keep(1, best="acceptance@1"))
    assert os.readlink(tmp_path / BEST) == "step_1"
    save(3, Keep(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", LATEST]
    save(4, Keep(1, best="acceptance@1"))
    save(5, Keep(1, best="never recorded"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_5", LATEST]
