"""Training over two real processes (gloo) against one on the same global batch; run as a script it is a worker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tiny_runs import make_config, make_place, read_losses

from deepspec.config import TrainConfig
from deepspec.data.features import FeatureMemory
from deepspec.errors import ConfigError, DataError
from deepspec.training.checkpoint import latest_valid
from deepspec.training.launch import ProcessError, launch
from deepspec.training.run import build_trainer

ROOT = Path(__file__).parents[2]
ALGORITHMS = ("dspark", "dflash", "eagle3")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("two_processes"))


def gradients_of_an_epoch(config: TrainConfig, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The gradient of each step, with the same weights throughout."""
    trainer = build_trainer(config, accelerator, torch.device("cpu"), "", FeatureMemory(0.0))
    gradients = {}
    for batches in trainer.loader.steps():
        if batches.epoch > 0:
            break
        for parameter in trainer.draft.parameters():
            parameter.grad = None
        trainer.accumulate_gradients(batches.micro_batches)
        for name, parameter in trainer.draft.named_parameters():
            if parameter.grad is not None:
                gradients[f"{batches.step}/{name}"] = parameter.grad.clone().contiguous()
    return gradients


def work(folder: Path) -> None:
    """What each of the two processes does: the gradients of every configuration in the folder."""
    accelerator = Accelerator(cpu=True)
    for config_file in sorted(folder.glob("*.json")):
        config = TrainConfig.model_validate_json(config_file.read_text())
        gradients = gradients_of_an_epoch(config, accelerator)
        if accelerator.is_main_process:
            save_file(gradients, config_file.with_suffix(".safetensors"))
    accelerator.wait_for_everyone()
    # Like the children of launch: gloo's clean-up can hang where one process takes its group down before the other.
    os._exit(0)


def split_config(place: Path, algorithm: str, processes: int, micro_batch_size: int) -> TrainConfig:
    override = f"optimizer.micro_batch_size={micro_batch_size}"
    return make_config(place, "unused", override, algorithm=algorithm, processes=processes)


@pytest.fixture(scope="module")
def two_process_gradients(place: Path) -> Path:
    folder = place / "gradients"
    folder.mkdir()
    for algorithm in ALGORITHMS:
        for size in (1, 2):
            config = split_config(place, algorithm, 2, size)
            (folder / f"{algorithm}_{size}.json").write_text(config.model_dump_json())
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, *run], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_does_not_depend_on_the_split_over_processes_and_micro_batches(
    place: Path, two_process_gradients: Path, algorithm: str
) -> None:
    whole, *others = [
        gradients_of_an_epoch(split_config(place, algorithm, 1, size), Accelerator(cpu=True)) for size in (4, 2, 1)
    ]
    others += [load_file(two_process_gradients / f"{algorithm}_{size}.safetensors") for size in (1, 2)]
    for gradients in others:
        assert gradients.keys() == whole.keys()
        for step in (0, 1):
            names = [name for name in whole if name.startswith(f"{step}/")]
            norm = torch.stack([whole[name].norm() for name in names]).norm()
            gap = torch.stack([(gradients[name] - whole[name]).norm() for name in names]).norm()
            assert norm > 0
            assert gap <= 1e-5 * norm  # fp32 sums in another order


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_and_a_resume_on_one_give_the_losses_of_one_process(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_config(place, "one")
    two = make_config(place, "two", processes=2)
    assert launch(one) == one.run_dir / "step_5"
    assert launch(two) == two.run_dir / "step_5"
    for single, double in zip(read_losses(one), read_losses(two), strict=True):
        assert single == pytest.approx(double, rel=1e-4, abs=1e-6)
    capsys.readouterr()
    assert launch(make_config(place, "two")) == two.run_dir / "step_5"
    assert "is finished" in capsys.readouterr().out
    longer = make_config(place, "two", "optimizer.steps=7")
    assert launch(longer) == two.run_dir / "step_7"


@pytest.mark.distributed
@pytest.mark.slow
def test_a_run_goes_on_on_two_processes_without_a_metric_that_its_checkpoint_holds(place: Path) -> None:
    # The checkpoint of step 2 lies between two log lines, and holds what was measured since the last one.
    settings = ("logger.every_steps=3", "checkpoint.every_steps=2", "optimizer.steps=4", "checkpoint.keep_last=9")
    skip = make_config(place, "policy", "optimizer.on_nonfinite=skip", *settings, processes=2)
    last = launch(skip)
    shutil.rmtree(last)
    stop = make_config(place, "policy", "optimizer.on_nonfinite=stop", *settings, processes=2)
    assert launch(stop) == last
    straight = make_config(place, "straight", *settings)
    launch(straight)
    for single, double in zip(read_losses(straight), read_losses(stop), strict=True):
        assert single == pytest.approx(double, rel=1e-4, abs=1e-6)


@pytest.mark.distributed
@pytest.mark.slow
def test_an_error_in_a_child_process_is_raised_here_as_it_was_there(place: Path) -> None:
    missing = make_config(place, "missing", f"data.answers={place / 'nowhere.jsonl'}", processes=2)
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        launch(missing)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_killed_process_brings_the_run_down_with_its_exit_code_and_the_run_can_go_on(place: Path) -> None:
    config = make_config(place, "killed", "optimizer.steps=4000", "checkpoint.every_steps=20", processes=2)
    code = (
        "import sys; from deepspec.config import TrainConfig; from deepspec.training.launch import launch\n"
        "from deepspec.errors import DeepSpecError\n"
        "try: launch(TrainConfig.model_validate_json(open(sys.argv[1]).read()))\n"
        "except DeepSpecError as error: print(type(error).__name__, error); sys.exit(2)\n"
    )
    (place / "killed.json").write_text(config.model_dump_json())
    command = [sys.executable, "-c", code, str(place / "killed.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as parent:
        deadline = time.monotonic() + 60
        while not (config.run_dir / "step_latest").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        workers = [child for child, words in commands.items() if b"deepspec.training.launch" in words]
        os.kill(workers[-1], 9)
        output, _ = parent.communicate(timeout=30)
    assert parent.returncode == 2
    assert ProcessError.__name__ in output
    assert "SIGKILL" in output
    assert "exit code -9" in output
    reached = latest_valid(config.run_dir)
    assert reached is not None
    end = int(reached.name.removeprefix("step_")) + 3
    assert launch(make_config(place, "killed", f"optimizer.steps={end}")).name == f"step_{end}"


def test_single_engine_refuses_to_run_as_several_processes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="engine=ddp"):
        launch(make_config(place, "refused"))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
