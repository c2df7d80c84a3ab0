"""Real runs that start from saved drafts: only their weights, or all of a checkpoint with other data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import make_config, make_place, save_answers
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.errors import ConfigError
from deepspec.training.checkpoint import read_training_state
from deepspec.training.run import train
from deepspec.training.runs import read_run, read_starts

VOCABULARY = "algorithm.draft_vocab_size=24"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("resumed_runs"))


def masters(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "training_state.safetensors")
    return {key: value for key, value in tensors.items() if key.startswith("master/")}


def shift_answers(path: Path) -> None:
    """Other answers, in which other tokens are frequent."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["answer_ids"] = [[4 + token % 7 for token in ids] for ids in row["answer_ids"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_warm_start_takes_the_weights_and_nothing_else(place: Path) -> None:
    first = train(make_config(place, "first", VOCABULARY))
    settings = (VOCABULARY, "optimizer.steps=1", "optimizer.learning_rate=1.0e-12", f"checkpoint.warm_start={first}")
    warm = train(make_config(place, "warm", *settings))
    assert read_training_state(warm).progress.step == 1
    before, after = masters(first), masters(warm)
    assert before.keys() == after.keys()
    for name, value in before.items():
        # AdamW moves a weight by the learning rate at most
        assert (after[name] - value).abs().max() <= 2e-12, name
    assert torch.equal(load_file(warm / "model.safetensors")["d2t"], load_file(first / "model.safetensors")["d2t"])


def test_a_run_that_goes_on_with_other_answers_keeps_its_reduced_vocabulary(tmp_path: Path) -> None:
    make_place(tmp_path)
    first = train(make_config(tmp_path, "run", VOCABULARY))
    vocabulary = load_file(first / "model.safetensors")["d2t"]
    shift_answers(tmp_path / "answers.jsonl")
    settings = (VOCABULARY, "optimizer.steps=7", "checkpoint.allow_changes=[data.answers]")
    last = train(make_config(tmp_path, "run", *settings))
    assert last.name == "step_7"
    assert torch.equal(load_file(last / "model.safetensors")["d2t"], vocabulary)
    fresh = train(make_config(tmp_path, "fresh", VOCABULARY, "optimizer.steps=1"))
    assert not torch.equal(load_file(fresh / "model.safetensors")["d2t"], vocabulary)


def test_a_finished_run_takes_in_added_answers_and_says_which_code_took_which_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_place(tmp_path, 8)
    words = ("optimizer.steps=null", "optimizer.epochs=2", "checkpoint.allow_changes=[data.answers]")
    config = make_config(tmp_path, "run", *words)
    first = read_training_state(train(config)).progress
    assert first.step == 4
    save_answers(tmp_path / "answers.jsonl", 16)
    last = train(config)
    state = read_training_state(last)
    assert state.progress.samples == 2 * (first.samples // 2 + 8)
    assert [start["step"] for start in read_starts(config.run_dir)] == [0, 4]
    assert read_run(config.run_dir).planned_steps == state.progress.step == state.planned_steps
    save_answers(tmp_path / "answers.jsonl", 8)
    capsys.readouterr()
    assert train(config) == last
    assert "is finished" in capsys.readouterr().out
    assert [start["step"] for start in read_starts(config.run_dir)] == [0, 4]


def test_a_target_whose_folder_was_overwritten_is_refused(tmp_path: Path, place: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    train(make_config(tmp_path, "run", "optimizer.steps=1"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    model.get_output_embeddings().weight.data[7] += 1.0
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"step_1 was trained for another target: head and first layer of .*target"):
        train(make_config(tmp_path, "run", "optimizer.steps=2"))
