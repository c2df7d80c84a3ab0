"""Two processes killed with -9 at random moments against an undisturbed run: STRESS_KILLS=50 for more than eight.

STRESS_RESULT=<file> writes what happened at every kill. Run as a script it is the run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tiny_runs import make_config, make_place, read_losses

from deepspec.command import one_line_errors
from deepspec.config import TrainConfig
from deepspec.training.checkpoint import find_damage, latest_valid, read_training_state
from deepspec.training.launch import launch

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("STRESS_KILLS", "8"))
SEED = int(os.environ.get("STRESS_SEED", "0"))
VICTIMS = ("all", "parent", "rank 0", "rank 1")
# What a starved machine may take for the start, a step or the end.
MOST_SECONDS = 120
# A kill comes at most so many steps after the checkpoint that its run began from, and a little later.
MOST_STEPS = 20


class Kill(NamedTuple):
    """What one kill met and left."""

    victim: str
    moment: str
    step: int
    left_half: bool
    seconds_until_all_ended: float


def start(config: TrainConfig) -> subprocess.Popen[str]:
    words = config.run_dir.parent / f"{config.run_name}.json"
    words.write_text(config.model_dump_json())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, __file__, str(words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def step_on_disk(folder: Path) -> int:
    try:
        return int(os.readlink(folder / "step_latest").removeprefix("step_"))
    except OSError:
        return 0


def wait_for_moment(moment: str, config: TrainConfig, process: subprocess.Popen[str], chance: random.Random) -> None:
    """Wait until the run is where it is to be killed."""
    before = step_on_disk(config.run_dir)
    if moment == "start":
        time.sleep(chance.uniform(0.0, 8.0))
        return
    goal = before + chance.randint(1, MOST_STEPS)
    deadline = time.monotonic() + MOST_SECONDS
    while process.poll() is None and step_on_disk(config.run_dir) < goal:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    if moment == "training":
        time.sleep(chance.uniform(0.0, 0.1))
    while moment == "save" and process.poll() is None and not list(config.run_dir.glob(".tmp_step_*")):
        assert time.monotonic() < deadline


def workers(parent: psutil.Process) -> dict[str, psutil.Process]:
    found = {}
    for child in parent.children(recursive=True):
        try:
            found[f"rank {child.environ()['RANK']}"] = child
        except (psutil.Error, KeyError):
            continue
    return found


def kill_once(config: TrainConfig, chance: random.Random) -> Kill:
    """Start the run, kill it or one of its processes, and see to it that all others end by themselves."""
    process = start(config)
    parent = psutil.Process(process.pid)
    moment = chance.choices(("start", "training", "save"), (2, 4, 4))[0]
    victim = chance.choice(VICTIMS)
    wait_for_moment(moment, config, process, chance)
    assert process.poll() is None, process.communicate()[1]
    family = {"parent": parent, **workers(parent)}
    if victim not in family and victim != "all":
        victim = "parent"  # its workers are not there yet
    for name, one in family.items():
        if victim in ("all", name):
            one.kill()
    killed_at = time.monotonic()
    _, errors = process.communicate(timeout=MOST_SECONDS)
    if victim.startswith("rank"):
        assert process.returncode == 2, errors
        assert "SIGKILL" in errors, errors
    psutil.wait_procs(list(family.values()), timeout=MOST_SECONDS)
    ended = [one for one in family.values() if not one.is_running() or one.status() == psutil.STATUS_ZOMBIE]
    assert len(ended) == len(family), "a process outlived its run"
    left_half = bool(list(config.run_dir.glob(".tmp_step_*")))
    return Kill(victim, moment, step_on_disk(config.run_dir), left_half, time.monotonic() - killed_at)


def write_result(path: Path, kills: list[Kill], steps: int, seconds: float) -> None:
    halves = sum(kill.left_half for kill in kills)
    slowest = max(kill.seconds_until_all_ended for kill in kills)
    lines = [
        "# Kills at random moments: the weights are those of an undisturbed run",
        "",
        f"`STRESS_KILLS={len(kills)} STRESS_SEED={SEED} bash scripts/test.sh tests/faults/test_stress.py`, 2 processes "
        f"(gloo) on 2 CPU cores, {steps} steps of DSpark on a tiny Llama, a checkpoint every 2 steps; {seconds:.0f} s.",
        "",
        f"{len(kills)} times SIGKILL; {halves} left a half-written checkpoint behind. After the last start: weights, "
        "fp32 masters and optimizer state byte for byte those of the undisturbed run, and every number in "
        f"metrics.jsonl but the times. Longest time until all other processes had ended: {slowest:.1f} s.",
        "",
        "| kill | who | when | step on disk | half checkpoint left | seconds until all ended |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {number} | {kill.victim} | {kill.moment} | {kill.step} | {'yes' if kill.left_half else 'no'} "
        f"| {kill.seconds_until_all_ended:.1f} |"
        for number, kill in enumerate(kills, 1)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(120 + 90 * KILLS)
def test_two_processes_killed_at_random_moments_end_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    began = time.monotonic()
    make_place(tmp_path)
    # On average a kill comes after half of its steps; with few kills what comes later weighs more.
    steps = MOST_STEPS * (KILLS + 8)
    settings = (f"optimizer.steps={steps}", "checkpoint.every_steps=2", "logger.every_steps=3")
    straight, killed = (make_config(tmp_path, name, *settings, processes=2) for name in ("straight", "killed"))
    undisturbed = start(straight)
    _, errors = undisturbed.communicate()
    assert undisturbed.returncode == 0, errors
    chance = random.Random(SEED)
    kills: list[Kill] = []
    for _ in range(KILLS):
        kills.append(kill_once(killed, chance))
        whole = latest_valid(killed.run_dir)
        assert whole is not None or kills[-1].step == 0, kills
        if kills[-1].step:
            # The link never points at something half: whoever evaluates the latest draft meanwhile reads a whole one.
            assert find_damage((killed.run_dir / "step_latest").resolve()) is None, kills
    last = start(killed)
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    finals = [config.run_dir / f"step_{steps}" for config in (straight, killed)]
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (finals[0] / name).read_bytes() == (finals[1] / name).read_bytes(), kills
    assert read_training_state(finals[0]).progress == read_training_state(finals[1]).progress
    assert read_losses(straight) == read_losses(killed)
    if "STRESS_RESULT" in os.environ:
        write_result(Path(os.environ["STRESS_RESULT"]), kills, steps, time.monotonic() - began)


if __name__ == "__main__":
    with one_line_errors():
        launch(TrainConfig.model_validate_json(Path(sys.argv[1]).read_text()))
