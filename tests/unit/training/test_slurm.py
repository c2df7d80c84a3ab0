from __future__ import annotations

import pytest

from deepspec.training.slurm import first_host, slurm_step

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[08-09],login1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_step_gets_the_variables_that_torchrun_would_set() -> None:
    step = slurm_step(STEP)
    assert step is not None
    assert step.variables() == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "24713",
    }
    last = slurm_step(STEP | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert last is not None
    assert last.local_tasks == 1
    assert (last.host, last.port, last.name) == (step.host, step.port, step.name)


def test_steps_that_share_a_machine_meet_at_different_ports() -> None:
    ports = {job: slurm_step(STEP | {"SLURM_JOB_ID": str(job)}) for job in range(4700, 4720)}
    assert len({step.port for step in ports.values() if step is not None}) == 20
    assert all(1024 < step.port < 32768 for step in ports.values() if step is not None)


@pytest.mark.parametrize(
    "environment", [{}, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}]
)
def test_a_batch_script_and_a_single_task_are_no_step(environment: dict[str, str]) -> None:
    assert slurm_step(environment) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3,5-9]", "node3"),
        ("rack[1-2]node[04-07].lab,other", "rack1node04.lab"),
        ("c-1-[10-12],d1", "c-1-10"),
    ],
)
def test_the_first_machine_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
