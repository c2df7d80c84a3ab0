"""Checkpoints that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deepspec.errors import CheckpointError
from deepspec.training.checkpoint import (
    LATEST,
    Progress,
    TrainingState,
    find_damage,
    latest_valid,
    list_checkpoints,
    load_training_state,
    lock_run_folder,
    point_latest,
    read_training_state,
    remove_leftovers,
    save_checkpoint,
    save_training_state,
)


def write_text(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.txt").write_text(content)

    return write


def save_steps(folder: Path, *steps: int, keep_last: int = 10) -> None:
    for step in steps:
        save_checkpoint(folder, step, write_text(f"weights of {step} " * 50), keep_last)


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
        save_checkpoint(tmp_path, 20, write, keep_last=1)
    assert latest_valid(tmp_path) == tmp_path / "step_10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", LATEST]


def test_a_file_that_the_system_refuses_to_grow_ends_as_a_checkpoint_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step_10"):
            save_checkpoint(
                tmp_path, 20, lambda folder: save_file({"w": torch.zeros(100_000)}, folder / "w.safetensors"), 1
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest_valid(tmp_path) == tmp_path / "step_10"


def test_a_process_killed_inside_a_save_leaves_no_checkpoint_of_that_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from deepspec.training.checkpoint import save_checkpoint\n"
        "def write(folder):\n"
        "    (folder / 'model.txt').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "save_checkpoint(Path(sys.argv[1]), 20, write, 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert latest_valid(tmp_path) == tmp_path / "step_10"
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", LATEST]


def test_step_latest_is_swapped_even_where_a_killed_swap_left_its_link(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / ".tmp_latest").symlink_to("nowhere")
    point_latest(tmp_path, tmp_path / "step_10")
    assert os.readlink(tmp_path / LATEST) == "step_10"


def test_two_runs_cannot_share_a_folder_and_a_killed_run_lets_go_of_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from deepspec.training.checkpoint import lock_run_folder\n"
        "with lock_run_folder(Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another run"), lock_run_folder(tmp_path, wait_seconds=0.2):
            pass
        other.kill()
    with lock_run_folder(tmp_path, wait_seconds=5.0):
        pass


def test_a_run_folder_below_a_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(CheckpointError, match="cannot write into the run folder"), lock_run_folder(folder):
        pass


def make_trained(seed: int, size: int = 3) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


STATE = TrainingState(Progress(3, 24), steps_per_epoch=7, data="abc", config={"seed": 1})


def test_training_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = make_trained(0)
    save_training_state(tmp_path, model, optimizer, STATE)
    other, other_optimizer = make_trained(1)
    load_training_state(tmp_path, other, other_optimizer)
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
    save_training_state(tmp_path, *make_trained(0), STATE)
    with pytest.raises(CheckpointError, match=r"stored \(3,\), now \(5,\)"):
        load_training_state(tmp_path, *make_trained(0, size=5))


def test_a_folder_without_training_state_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"training_state\.json"):
        read_training_state(tmp_path)


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    manifest = json.loads((tmp_path / "step_10" / "manifest.json").read_text())
    assert manifest["step"] == 10
    assert list(manifest["files"]) == ["model.txt"]
