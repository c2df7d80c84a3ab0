"""NaN that only one of two processes sees, under every engine; run as a script it is a worker.

The target's embedding of one token is NaN, and one answer's prompt holds that token: its features are NaN, and those of
no other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState
from engine_workers import ENGINES, SHARDED, leave, offer, prepare, run_workers
from helpers import tiny_config
from safetensors.torch import load_file, save_file
from tiny_runs import make_config, read_losses, save_answers, save_target
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.config import TrainConfig
from deepspec.data.features import FeatureMemory
from deepspec.runtime import choose_device
from deepspec.training import accelerator as accelerators
from deepspec.training.checkpoint import Progress, latest_valid
from deepspec.training.guard import SKIPPED, NonFiniteLossError
from deepspec.training.launch import launch
from deepspec.training.run import build_trainer, train
from deepspec.training.trainer import Trainer

BAD_TOKEN, BAD_SAMPLE, NUM_SAMPLES, STEPS = 90, 4, 12, 6
BAD_STEPS = "bad_steps.json"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def config_for(place: Path, engine: str, policy: str, kind: str) -> TrainConfig:
    """A run of two processes, or of one for `single`."""
    return make_config(
        place,
        f"{kind}_{engine}",
        f"engine={engine}",
        f"engine.device={'auto' if engine in SHARDED else 'cpu'}",
        f"optimizer.on_nonfinite={policy}",
        f"optimizer.steps={STEPS}",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=99",
        "logger.every_steps=2",
        processes=1 if engine == "single" else 2,
    )


def save_bad_target(folder: Path) -> None:
    """A target with a head of its own, since a draft uses that as well."""
    save_target(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    model.get_input_embeddings().weight.data[BAD_TOKEN] = torch.nan
    model.save_pretrained(folder)


def save_bad_answers(path: Path) -> None:
    save_answers(path, NUM_SAMPLES)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[BAD_SAMPLE]["prompt_ids"][0][1] = BAD_TOKEN
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def made_trainer(config: TrainConfig) -> Trainer:
    device = choose_device(config.engine.device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = accelerators.make_accelerator(config.engine, config.optimizer.clip_norm, device, world_size)
    config.run_dir.mkdir(exist_ok=True)
    return build_trainer(config, accelerator, device, "", FeatureMemory(0.0))


def find_bad_steps(config: TrainConfig) -> list[int]:
    """Steps, from 1, that the bad sample is in."""
    trainer = made_trainer(config)
    bad = trainer._guard._sample_ids.index(f"p{BAD_SAMPLE}")
    steps = [next(trainer.loader.steps(step)) for step in range(STEPS)]
    return [
        batches.step + 1
        for batches in steps
        if any(bad in tokens.sample_index.tolist() for tokens in batches.micro_batches)
    ]


def run_without(trainer: Trainer, left_out: list[int]) -> None:
    """The run, but nothing is computed for some steps."""
    for step in range(STEPS):
        batches = next(trainer.loader.steps(step))
        if batches.step + 1 in left_out:
            trainer._progress = Progress(batches.step + 1, 0)
        else:
            trainer._update(batches)


def work(folder: Path) -> None:
    """What each of the two processes does: all jobs in the folder."""
    prepare()
    left_out = json.loads((folder / BAD_STEPS).read_text())
    for job in sorted(folder.glob("job_*.json")):
        config = TrainConfig.model_validate_json(job.read_text())
        offer(config.engine.name)
        if "job_stop" in job.name:
            with pytest.raises(NonFiniteLossError) as stopped:
                train(config)
            job.with_suffix(f".{PartialState().process_index}").write_text(str(stopped.value))
            continue
        trainer = made_trainer(config)
        if "job_skip" in job.name:
            trainer.run()
            if config.engine.name not in ("fsdp2", "zero3"):  # where each process has the weights whole
                own = {name: value.detach().contiguous() for name, value in trainer.engine.parameters().items()}
                save_file(own, folder / f"{config.engine.name}_{PartialState().process_index}.safetensors")
        else:
            run_without(trainer, left_out)
            gathered = trainer.engine.gather()
            if PartialState().is_main_process:
                save_file(gathered, folder / f"{config.engine.name}_by_hand.safetensors")
    leave()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("nonfinite")
    save_bad_target(place / "target")
    save_bad_answers(place / "answers.jsonl")
    jobs = place / "jobs"
    jobs.mkdir()
    (jobs / BAD_STEPS).write_text(json.dumps(find_bad_steps(config_for(place, "single", "skip", "unused"))))
    for engine in ENGINES:
        for kind, policy in (("skip", "skip"), ("hand", "skip"), ("stop", "stop")):
            job = config_for(place, engine, policy, kind)
            (jobs / f"job_{kind}_{engine}.json").write_text(job.model_dump_json())
    run_workers(__file__, jobs)
    return place


@pytest.mark.parametrize("engine", ENGINES)
def test_both_processes_leave_out_the_steps_in_which_one_saw_nan(place: Path, engine: str) -> None:
    jobs = place / "jobs"
    bad_steps = json.loads((jobs / BAD_STEPS).read_text())
    assert len(bad_steps) == 2  # once in each pass over the data
    config = config_for(place, engine, "skip", "skip")
    found = load_file(config.run_dir / f"step_{STEPS}" / "training_state.safetensors")
    by_hand = load_file(jobs / f"{engine}_by_hand.safetensors")
    assert found.keys() == by_hand.keys()
    for name, value in by_hand.items():
        assert value.isfinite().all()
        assert torch.equal(found[name], value), name
    lines = [json.loads(line) for line in (config.run_dir / SKIPPED).read_text().splitlines()]
    assert lines == [{"step": step, "what": "loss", "samples": [f"p{BAD_SAMPLE}"]} for step in bad_steps]
    metrics = read_losses(config)
    # Counted once, in the line that follows the step, whatever the number of processes.
    assert [line["skipped_updates"] for line in metrics] == [
        sum(line["step"] - 2 < step <= line["step"] for step in bad_steps) for line in metrics
    ]
    assert all(torch.tensor([line["loss"], line["gradient_norm"]]).isfinite().all() for line in metrics)


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2"])
def test_weights_of_both_processes_are_equal_after_steps_were_left_out(place: Path, engine: str) -> None:
    one, two = (load_file(place / "jobs" / f"{engine}_{rank}.safetensors") for rank in (0, 1))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(two[name], value), name


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_of_one_process_stops_both_with_the_step_and_the_sample(place: Path, engine: str) -> None:
    first = json.loads((place / "jobs" / BAD_STEPS).read_text())[0]
    reasons = [(place / "jobs" / f"job_stop_{engine}.{rank}").read_text() for rank in (0, 1)]
    for reason in reasons:
        assert reason.startswith(f"the loss is not finite at step {first} (gradient norm ")
        assert f"; samples: p{BAD_SAMPLE}. The checkpoints on disk are from before it." in reason
    kept = latest_valid(config_for(place, engine, "stop", "stop").run_dir)
    assert (0 if kept is None else int(kept.name.removeprefix("step_"))) == first - 1


def test_a_launched_run_that_stops_at_nan_says_why_and_leaves_no_process(place: Path) -> None:
    first = json.loads((place / "jobs" / BAD_STEPS).read_text())[0]
    with pytest.raises(NonFiniteLossError, match=rf"the loss is not finite at step {first} .*samples: p{BAD_SAMPLE}\."):
        launch(config_for(place, "ddp", "stop", "launched"))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
