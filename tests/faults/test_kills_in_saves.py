"""Processes killed with -9 at every operation that a save makes on files, and at many of a whole run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fault_jobs import save_next, train_small, write_content
from interrupted import start
from tiny_runs import make_config, make_place, read_losses

from deepspec.training.checkpoint import BEST, LATEST, find_damage, latest_valid, save_checkpoint
from deepspec.training.rotation import Keep

KILLS = int(os.environ.get("STRESS_KILLS", "8"))
KILLED = -9


@pytest.mark.parametrize("loses_unsynced", [False, True], ids=["killed", "power_cut"])
def test_a_save_killed_at_any_operation_leaves_a_whole_checkpoint_and_can_be_repeated(
    tmp_path: Path, loses_unsynced: bool
) -> None:
    number, exit_code, found = 0, KILLED, set()
    while exit_code == KILLED:
        number += 1
        folder = tmp_path / f"run_{number}"
        save_checkpoint(folder, 10, write_content, Keep(1))
        process = start(save_next, folder, number, loses_unsynced)
        process.join()
        exit_code = process.exitcode
        latest = latest_valid(folder)
        assert latest in (folder / "step_10", folder / "step_20"), f"killed at operation {number}"
        found.add(latest.name)
        # Whoever reads through the link, an evaluation say, finds a whole one at any time.
        assert find_damage((folder / LATEST).resolve()) is None, f"killed at operation {number}"
        again = start(save_next, folder)
        again.join()
        assert again.exitcode == 0
        left = sorted(path.name for path in folder.iterdir())
        # Killed between the rename and the end of the rotation, the old one stays until the next save.
        assert left in (["step_20", LATEST], ["step_10", "step_20", LATEST]), f"killed at operation {number}"
        assert latest_valid(folder) == folder / "step_20"
    assert exit_code == 0
    assert found == {"step_10", "step_20"}  # kills came before the new one was whole, and after
    assert not (folder / BEST).exists()  # nothing recorded the metric


@pytest.mark.slow
def test_a_run_killed_at_any_operation_goes_on_to_the_same_weights_and_metrics(tmp_path: Path) -> None:
    make_place(tmp_path)
    straight = make_config(tmp_path, "straight")
    undisturbed = start(train_small, tmp_path, "straight")
    undisturbed.join()
    assert undisturbed.exitcode == 0
    operations = int((tmp_path / "straight.count").read_text())
    for index in range(KILLS):
        kill_at = 1 + index * operations // KILLS
        config = make_config(tmp_path, f"killed_at_{kill_at}")
        for at, expected in ((kill_at, KILLED), (0, 0)):
            process = start(train_small, tmp_path, config.run_name, at)
            process.join()
            assert process.exitcode == expected
        for name in ("model.safetensors", "training_state.safetensors"):
            one, two = ((run.run_dir / "step_5" / name).read_bytes() for run in (straight, config))
            assert one == two, f"killed at operation {kill_at} of {operations}"
        assert read_losses(config) == read_losses(straight)
