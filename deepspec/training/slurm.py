"""What SLURM says to a process that srun started as one of several; knows nothing of what they train."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

# Above the ports that systems keep for services, below those that they give out themselves.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


class SlurmStep(NamedTuple):
    """One task of a job step.

    Attributes:
        name: of the step, the same for all its tasks and no other's.
        task: number of this task.
        num_tasks: of the step.
        local_task: number of this task on its machine.
        local_tasks: on this machine.
        host: machine of the first task.
        port: where the tasks may meet there.
    """

    name: str
    task: int
    num_tasks: int
    local_task: int
    local_tasks: int
    host: str
    port: int

    def variables(self) -> dict[str, str]:
        """The variables that torchrun would set, for a task that is one process of the run."""
        return {
            "RANK": str(self.task),
            "WORLD_SIZE": str(self.num_tasks),
            "LOCAL_RANK": str(self.local_task),
            "LOCAL_WORLD_SIZE": str(self.local_tasks),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def slurm_step(environment: Mapping[str, str] = os.environ) -> SlurmStep | None:
    """Describe the step that this process belongs to; None where srun did not start several tasks.

    A batch script has SLURM's variables as well, but not those of a step: what it starts without srun runs alone.
    """
    num_tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks < 2:
        return None
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    tasks_per_node = _tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    return SlurmStep(
        name=f"slurm_{job}_{step}",
        task=int(environment["SLURM_PROCID"]),
        num_tasks=num_tasks,
        local_task=int(environment["SLURM_LOCALID"]),
        local_tasks=tasks_per_node[int(environment["SLURM_NODEID"])],
        host=first_host(environment["SLURM_STEP_NODELIST"]),
        port=_FIRST_PORT + (job + step) % _NUM_PORTS,
    )


def first_host(hosts: str) -> str:
    """The first machine of a SLURM list, such as `a1` of `a[1-3,7],b2`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    parts = [part.partition("(x") for part in text.split(",")]
    return [int(count) for count, _, times in parts for _ in range(int(times.rstrip(")") or "1"))]
