"""What engines refuse, and what they leave alone; that they compute the same is in tests/distributed."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import tiny_draft, tiny_target

from deepspec.config import TrainConfig, compose_train
from deepspec.errors import ConfigError
from deepspec.training.accelerator import make_accelerator
from deepspec.training.engines import TorchEngine, TrainingForward, make_engine
from deepspec.training.launch import launch

SHARDED = ("fsdp2", "zero1", "zero2", "zero3")


def config_for(engine: str, *overrides: str) -> TrainConfig:
    sizes = ["optimizer.global_batch_size=12", "optimizer.micro_batch_size=1"]
    return compose_train([f"engine={engine}", "target=smollm2_135m", *sizes, *overrides])


@pytest.mark.parametrize("engine", SHARDED)
def test_sharded_engines_are_refused_for_one_process(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"num_processes is 1.*engine=single"):
        config_for(engine, "engine.num_processes=1")


@pytest.mark.parametrize("engine", SHARDED)
def test_sharded_engines_are_refused_on_cpus(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a GPU for each process.*engine=ddp"):
        config_for(engine, "engine.device=cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("engine", SHARDED)
def test_sharded_engines_are_refused_before_anything_is_loaded_where_there_is_no_gpu(
    engine: str, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_started:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"needs a GPU for each process, and torch .* sees none.*engine=ddp"):
        launch(config_for(engine, "target.name_or_path=/nowhere"))


def test_what_accelerate_makes_in_place_of_fsdp2_on_a_cpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # Accelerate sets it, and pytest takes it back
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ConfigError, match=r"'fsdp2' with 2 processes, but Accelerate would run 1 as NO.*engine=ddp"):
        make_accelerator(config_for("fsdp2").engine, 1.0, torch.device("cpu"), 2)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_processes_that_accelerate_does_not_join_are_noticed() -> None:
    with pytest.raises(ConfigError, match=r"'ddp' with 3 processes, but Accelerate would run 1"):
        make_accelerator(config_for("ddp", "engine.num_processes=3").engine, 1.0, torch.device("cpu"), 3)


def test_the_number_of_processes_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert config_for("ddp").engine.num_processes == 2
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert config_for("ddp").engine.num_processes == 6
    assert config_for("zero3").engine.num_processes == 6
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"num_processes is 4, but 6 processes were started"):
        launch(config_for("ddp", "engine.num_processes=4"))


def test_tasks_of_slurm_must_share_the_processes_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"JOB_ID": "1", "STEP_ID": "0", "STEP_NUM_TASKS": "3", "STEP_TASKS_PER_NODE": "3", "PROCID": "1"}
    for key, value in (step | {"STEP_NODELIST": "localhost", "LOCALID": "1", "NODEID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    with pytest.raises(ConfigError, match=r"num_processes is 4, but srun started 3 tasks. Use engine.num_processes=3"):
        launch(config_for("ddp", "engine.num_processes=4", "engine.device=cpu"))
    assert "RANK" not in os.environ


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_one_process_trains_without_a_wrapper(engine: str) -> None:
    config = config_for(engine, "engine.num_processes=1")
    draft = tiny_draft(tiny_target(dtype=torch.bfloat16), "dspark")
    made = make_engine(draft, Accelerator(cpu=True), config.engine, config.optimizer)
    assert isinstance(made, TorchEngine)
    assert type(made._model) is TrainingForward
    assert type(made.optimizer) is torch.optim.AdamW
    assert {value.dtype for value in made.parameters().values()} == {torch.float32}
