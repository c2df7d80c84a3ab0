"""Real decoding while a draft is trained: the number that the finished checkpoint has, and a training left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_targets import save_chat_target
from tiny_runs import VOCAB_SIZE, make_config, read_losses, save_answers

from deepspec.config import TrainConfig, compose_eval
from deepspec.errors import ConfigError, DataError
from deepspec.evaluation.during_training import ACCEPTANCE_LENGTH
from deepspec.evaluation.evaluator import evaluate
from deepspec.evaluation.report import read_results
from deepspec.training.run import train

PROMPTS = [{"id": f"q{index}", "turns": [f"why {index}? " + "so " * index]} for index in range(6)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    save_chat_target(folder / "target")
    save_answers(folder / "answers.jsonl")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


def config_of(place: Path, name: str, *words: str, **settings: Any) -> TrainConfig:
    common = [
        "evaluation.every_steps=2",
        f"evaluation.prompts={place / 'prompts.jsonl'}",
        "evaluation.max_new_tokens=20",
        "evaluation.batch_size=4",
        "evaluation.max_share=1.0",
        "optimizer.learning_rate=0.02",
        "checkpoint.keep_last=9",
    ]
    return make_config(place, name, *common, *words, **settings)


def lines(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(place: Path) -> TrainConfig:
    config = config_of(place, "measured", f"checkpoint.keep_best={ACCEPTANCE_LENGTH}")
    train(config)
    return config


def test_logged_acceptance_length_is_what_the_evaluator_measures_of_the_checkpoint(
    place: Path, trained: TrainConfig, tmp_path: Path
) -> None:
    logged = {line["step"]: line for line in lines(trained) if ACCEPTANCE_LENGTH in line}
    assert sorted(logged) == [2, 4, 5]
    for step, line in logged.items():
        output = tmp_path / f"step_{step}"
        evaluate(
            compose_eval(
                [
                    "target=smollm2_135m",
                    f"target.name_or_path={place / 'target'}",
                    "target.dtype=float32",
                    "target.layers=[0,1,3]",
                    f"target.mask_token_id={VOCAB_SIZE - 1}",
                    f"drafts=[{trained.run_dir / f'step_{step}'}]",
                    f"task.path={place / 'prompts.jsonl'}",
                    f"output_dir={output}",
                    "max_new_tokens=20",
                    "batch_size=4",
                    "sampling.temperature=0",
                    "latency_prompts=0",
                    "device=cpu",
                ]
            )
        )
        row = read_results(output).rows[1]
        assert line[ACCEPTANCE_LENGTH] == pytest.approx(row.acceptance_length)
        assert (line[f"{ACCEPTANCE_LENGTH}_low"], line[f"{ACCEPTANCE_LENGTH}_high"]) == pytest.approx(
            row.acceptance_length_ci95
        )
        # The proxy of teacher-forced blocks has a name of its own.
        assert 0 <= line["acceptance@1"] <= 1
        assert line["eval/seconds"] > 0


def test_best_checkpoint_is_the_one_with_the_longest_acceptance(trained: TrainConfig) -> None:
    taus = {line["step"]: line[ACCEPTANCE_LENGTH] for line in lines(trained) if ACCEPTANCE_LENGTH in line}
    best = (trained.run_dir / "step_best").resolve().name
    assert taus[int(best.removeprefix("step_"))] == max(taus.values())


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_decoding_changes_nothing_in_the_training(place: Path, algorithm: str) -> None:
    with_it = config_of(place, f"with_{algorithm}", algorithm=algorithm)
    without = config_of(place, f"without_{algorithm}", "evaluation.every_steps=null", algorithm=algorithm)
    final = [train(config) for config in (with_it, without)]
    first, second = ((path / "model.safetensors").read_bytes() for path in final)
    assert first == second
    drop = ("eval/seconds", ACCEPTANCE_LENGTH, f"{ACCEPTANCE_LENGTH}_low", f"{ACCEPTANCE_LENGTH}_high")
    kept = [{key: value for key, value in line.items() if key not in drop} for line in read_losses(with_it)]
    assert kept == read_losses(without)


def test_decoding_is_left_out_where_it_would_take_more_than_its_share(place: Path) -> None:
    config = config_of(place, "share", "evaluation.max_share=0.0")
    train(config)
    # The first one is made to learn how long it takes, the last one always.
    assert [line["step"] for line in lines(config) if ACCEPTANCE_LENGTH in line] == [2, 5]


def test_steps_between_two_log_lines_get_a_line_when_they_are_decoded(place: Path) -> None:
    config = config_of(place, "lines", "logger.every_steps=5")
    train(config)
    assert [(line["step"], ACCEPTANCE_LENGTH in line) for line in lines(config)] == [(2, True), (4, True), (5, True)]


def test_prompts_that_do_not_exist_are_refused_before_the_first_step(place: Path) -> None:
    config = config_of(place, "missing", f"evaluation.prompts={place / 'none.jsonl'}")
    with pytest.raises(DataError, match=r"none\.jsonl"):
        train(config)
    assert not (config.run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.every_steps=null"], "evaluation.every_steps is null"),
        (["evaluation.every_steps=4"], "not all are decoded: evaluation.every_steps is 4"),
    ],
)
def test_the_best_by_a_number_that_checkpoints_will_not_have_is_refused(
    place: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(place, "refused", f"checkpoint.keep_best={ACCEPTANCE_LENGTH}", *words)
