"""Whether a run fits: memory of its step on GPUs or in RAM, and its checkpoints on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config import TrainConfig
from deepspec.doctor.finding import Finding, one_line
from deepspec.doctor.machine import GIB, free_bytes, host_memory
from deepspec.errors import DeepSpecError
from deepspec.planning.settings import PlanConfig
from deepspec.training.slurm import slurm_step

if TYPE_CHECKING:
    from deepspec.planning.plan import Plan

# A process takes about this much beside its tensors: Python, torch, the tokenizer.
_PROCESS_BYTES = 1.2 * GIB
_ADVICE = "deepspec plan with the same words lists settings that take less"
# How many rows a larger file has follows from those in so much of it.
_COUNTED_BYTES = 64 * 2**20


def processes_here(num_processes: int) -> int:
    """How many of a run's processes this machine would have, at the most.

    Args:
        num_processes: of the run, on all machines.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    step = slurm_step()
    if step is not None:
        return -(-num_processes * step.local_tasks // step.num_tasks)
    # A batch script of several machines asks before its srun spreads the processes.
    return -(-num_processes // int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))


def room(config: PlanConfig) -> Iterator[Finding]:
    """What a run takes of memory and disk, and what there is of it."""
    from deepspec.planning.plan import make_plan
    from deepspec.planning.shapes import target_config

    run = config.train
    try:
        target_config(run.target)
    except DeepSpecError as error:  # what is wrong with the target, its own check has said
        yield Finding("note", f"memory and disk are not known: {one_line(error)}")
        return
    answers = Path(run.data.answers)
    if answers.is_file():
        inputs = config.inputs.model_copy(update={"num_samples": max(1, _rows(answers))})
        config = config.model_copy(update={"inputs": inputs})
    try:
        plan = make_plan(config)
    except DeepSpecError as error:
        yield Finding("fail", one_line(error))
        return
    yield from _memory(config, plan)
    yield from _disk(run, plan)


def _memory(config: PlanConfig, plan: Plan) -> Iterator[Finding]:
    import torch

    from deepspec.planning.processes import gathered_bytes
    from deepspec.planning.sources import memory_gib

    run, peak = config.train, plan.memory.peak
    processes = processes_here(run.engine.num_processes)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and run.engine.device != "cpu" else 0
    # Each process keeps passes of its own, and one of all gathers what goes into a checkpoint.
    in_each = _PROCESS_BYTES + memory_gib(run) * GIB
    gathered = gathered_bytes(plan.alone)
    if gpus:
        needed = peak + config.inputs.reserve_gib * GIB
        for index in range(min(processes, gpus)):
            free, total = torch.cuda.mem_get_info(index)
            shown = (
                f"a step takes about {needed / GIB:.1f} GiB, GPU {index} has {total / GIB:.1f} ({free / GIB:.1f} free)"
            )
            if needed > total:
                yield Finding("fail", shown, _ADVICE)
            elif needed > free:
                yield Finding("fail", shown, "end what else runs on it (nvidia-smi), or choose another GPU")
            else:
                yield Finding("ok", shown)
        on_host = processes * (in_each + plan.read_ahead_bytes) + gathered
    else:
        # Activations are gone while a checkpoint is written.
        on_host = processes * (in_each + peak) + max(0, plan.memory.static + gathered - peak)
    free = host_memory().free
    kept = f", features.memory_gib={memory_gib(run):g} in each" if memory_gib(run) else ""
    shown = f"about {on_host / GIB:.1f} GiB RAM for {processes} process(es){kept}, {free / GIB:.1f} are free"
    yield Finding("ok", shown) if on_host <= free else Finding("fail", shown, _less_ram(run))


def _less_ram(run: TrainConfig) -> str:
    is_kept = run.features.source == "online" and run.features.memory_gib > 0
    return f"features.memory_gib=0, or less than now; {_ADVICE}" if is_kept else _ADVICE


def _disk(run: TrainConfig, plan: Plan) -> Iterator[Finding]:
    # Those of an earlier start are among the ones that the run keeps.
    mine = sum(path.stat().st_size for path in run.run_dir.glob("step_[0-9]*/*") if path.is_file())
    disk, free = plan.checkpoint_bytes * plan.checkpoints, free_bytes(run.run_dir) + mine
    shown = (
        f"checkpoints take {disk / GIB:.1f} GiB at once ({plan.checkpoints:,} of {plan.checkpoint_bytes / GIB:.2f}), "
        f"{free / GIB:.1f} are free at {run.output_dir}"
    )
    if disk <= free:
        yield Finding("ok", shown)
        return
    keep = run.checkpoint
    fewer = ["checkpoint.keep_last=1"] if keep.keep_last > 1 else []
    fewer += ["checkpoint.keep_every=null"] if keep.keep_every is not None else []
    fewer += ["checkpoint.keep_best=null"] if keep.keep_best is not None else []
    ways = ["make room", "set output_dir to another disk", *([f"keep fewer ({' '.join(fewer)})"] if fewer else [])]
    yield Finding("fail", shown, ", or ".join(ways))


def _rows(path: Path) -> int:
    """Lines of a file that are not blank, estimated from its beginning where it is large."""
    with path.open("rb") as file:
        lines = file.readlines(_COUNTED_BYTES)
    counted = sum(map(len, lines))
    rows = sum(bool(line.strip()) for line in lines)
    return round(rows * path.stat().st_size / counted) if counted else 0
