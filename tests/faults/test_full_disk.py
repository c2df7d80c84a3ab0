"""Disks that fill up or cannot be written, real ones: small file systems in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import make_config, make_place, read_losses

from deepspec.errors import CheckpointError
from deepspec.training.checkpoint import find_damage, latest_valid, save_checkpoint
from deepspec.training.lock import lock_run_folder
from deepspec.training.rotation import Keep
from deepspec.training.run import train

MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many MiB; skipped where this user may not mount one."""
    place = tmp_path / "disk"

    def mount(size_mib: int) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int) -> None:
    """Take all room but so many bytes."""
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with (place / "filler").open("wb") as file:
        file.write(bytes(free - leave))


def write_weights(folder: Path) -> None:
    save_file({"weight": torch.full((MIB // 4,), 7.0)}, folder / "model.safetensors")


def test_a_disk_that_fills_up_inside_a_save_ends_it_by_name_and_leaves_the_last_checkpoint(
    disk: Callable[[int], Path],
) -> None:
    place = disk(8)
    run = place / "run"
    save_checkpoint(run, 10, write_weights, Keep(1))

    def write(folder: Path) -> None:
        write_weights(folder)
        fill(place, MIB // 2)  # another program takes the room
        save_file({"state": torch.zeros(MIB // 4)}, folder / "training_state.safetensors")

    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*No space left.*step_10; .* MiB are free"):
        save_checkpoint(run, 20, write, Keep(1))
    assert latest_valid(run) == run / "step_10"
    assert load_file(run / "step_10" / "model.safetensors")["weight"].eq(7.0).all()
    assert sorted(path.name for path in run.iterdir()) == ["step_10", "step_latest"]
    (place / "filler").unlink()
    assert save_checkpoint(run, 20, write_weights, Keep(1)) == latest_valid(run)


def test_a_checkpoint_that_will_not_fit_is_not_begun(disk: Callable[[int], Path]) -> None:
    run = disk(4) / "run"
    begun: list[Path] = []
    with pytest.raises(CheckpointError, match=r"takes 5\.00 MiB, but the disk of .* has [34]\.\d+ MiB free"):
        save_checkpoint(run, 10, begun.append, Keep(1), needed_bytes=5 * MIB)
    assert not begun


@pytest.mark.slow
def test_a_run_on_a_full_disk_stops_by_name_and_goes_on_exactly_when_there_is_room(
    tmp_path: Path, disk: Callable[[int], Path]
) -> None:
    make_place(tmp_path)
    settings = ("checkpoint.every_steps=1", "checkpoint.keep_last=99", "optimizer.steps=8")
    straight = make_config(tmp_path, "straight", *settings)
    final = train(straight)
    needed = sum(path.stat().st_size for path in final.iterdir())
    place = disk(int((4 * needed + 2 * MIB) / MIB) + 1)  # room for about five, and each start wants one to spare
    config = make_config(tmp_path, "run", *settings, f"output_dir={place}")
    with pytest.raises(CheckpointError, match=r"a checkpoint takes .* MiB free"):
        train(config)
    kept = latest_valid(config.run_dir)
    assert kept is not None
    assert 1 < int(kept.name.removeprefix("step_")) < 8
    with pytest.raises(CheckpointError, match=r"a checkpoint takes .* MiB free"):
        train(config)  # said before the first step, not after hours
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    resumed = train(config)
    assert find_damage(resumed) is None
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (final / name).read_bytes() == (resumed / name).read_bytes()
    assert read_losses(config) == read_losses(straight)


def test_a_read_only_folder_is_named(disk: Callable[[int], Path]) -> None:
    place = disk(1)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    refused = pytest.raises(CheckpointError, match=r"cannot write into the run folder .*Read-only file system")
    with refused, lock_run_folder(place / "run"):
        pass


def test_a_run_folder_that_became_read_only_keeps_its_checkpoints(disk: Callable[[int], Path]) -> None:
    place = disk(4)
    run = place / "run"
    save_checkpoint(run, 10, write_weights, Keep(1))
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"), lock_run_folder(run):
        pass
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*Read-only file system.*step_10"):
        save_checkpoint(run, 20, write_weights, Keep(1))
    assert latest_valid(run) == run / "step_10"
