"""The main job on a laptop: a small real target answers prompts, three drafts learn from it, one table compares them.

Every stage continues where it was killed: answers by id, training from its last checkpoint, evaluation by prompt. The
module only strings the stages together; each is what `deepspec data`, train.py and eval.py do.
"""

from __future__ import annotations

import time
from pathlib import Path

from deepspec import console
from deepspec.config import EvalConfig, QuickstartConfig, compose_data_job, compose_eval, compose_train, quoted
from deepspec.data.features import FeatureMemory
from deepspec.data.jobs import write_answers
from deepspec.evaluation.evaluator import Evaluation, join, measure, publish
from deepspec.training.run import train

_TARGET = "smollm2_135m"


def run_quickstart(config: QuickstartConfig) -> None:
    """Run all stages into `<output_dir>/<preset>` and print the table.

    Raises:
        DeepSpecError: a stage failed; running the same command again continues.
    """
    started = time.monotonic()
    folder = (Path(config.output_dir) / config.preset.name).absolute()
    console.info(f"quickstart, preset {config.preset.name}: everything goes into {folder}; killed, it continues")
    memory = FeatureMemory(config.preset.memory_gib)
    answers = _answer(config, folder, memory)
    drafts = [str(_train(config, algorithm, answers, folder, memory)) for algorithm in config.algorithms]
    del memory
    console.info("3/3 measuring on held-out topics and HumanEval: greedy with latency, then temperature 1")
    parts = [measure(_evaluation(config, folder, drafts, temperature)) for temperature in (0.0, 1.0)]
    publish(_joined(parts, drafts), folder)
    console.info(f"done in {(time.monotonic() - started) / 60:.1f} minutes (stages that were already done not counted)")


def _answer(config: QuickstartConfig, folder: Path, memory: FeatureMemory) -> Path:
    preset = config.preset
    console.info(f"1/3 the target answers {preset.num_prompts:,} prompts")
    return write_answers(
        compose_data_job(
            [
                f"target={_TARGET}",
                f"answers={quoted(folder / 'answers.jsonl')}",
                f"limit={preset.num_prompts}",
                f"max_new_tokens={preset.answer_tokens}",
                f"batch_size={preset.answer_batch_size}",
                f"sampling.temperature={preset.answer_temperature}",
                f"seed={config.seed}",
            ]
        ),
        memory,
    )


def _train(config: QuickstartConfig, algorithm: str, answers: Path, folder: Path, memory: FeatureMemory) -> Path:
    console.info(f"2/3 training {algorithm}")
    return train(
        compose_train(
            [
                f"experiment={algorithm}_{_TARGET}",
                f"data.answers={quoted(answers)}",
                f"output_dir={quoted(folder / 'drafts')}",
                f"algorithm.num_draft_tokens={config.preset.num_draft_tokens}",
                f"data.num_anchors={config.preset.num_anchors}",
                "optimizer.epochs=null",
                f"optimizer.steps={config.preset.steps}",
                f"seed={config.seed}",
            ]
        ),
        memory,
    )


def _evaluation(config: QuickstartConfig, folder: Path, drafts: list[str], temperature: float) -> EvalConfig:
    preset = config.preset
    evaluation = compose_eval(
        [
            f"target={_TARGET}",
            "suite=quick",
            f"drafts=[{','.join(map(quoted, drafts))}]",
            f"sampling.temperature={temperature}",
            f"max_new_tokens={preset.eval_tokens}",
            f"batch_size={preset.eval_batch_size}",
            f"latency_prompts={preset.latency_prompts if temperature == 0 else 0}",
            f"output_dir={quoted(folder / 'eval' / f'temperature_{temperature:g}')}",
            f"seed={config.seed}",
        ]
    )
    limits = {"held_out": preset.held_out_prompts, "humaneval": preset.humaneval_prompts}
    tasks = tuple(task.model_copy(update={"limit": limits[task.name]}) for task in evaluation.tasks)
    return evaluation.model_copy(update={"tasks": tasks})


def _joined(parts: list[Evaluation], drafts: list[str]) -> Evaluation:
    """One table and one page of the evaluations at several temperatures."""
    joined = join(parts)
    report = joined.report._replace(
        next_commands=_next_commands(drafts),
        title="Three drafts for SmolLM2-135M, trained and measured on this machine",
        sections=[section for part in parts for section in part.report.sections],
    )
    return joined._replace(report=report)


def _next_commands(drafts: list[str]) -> list[tuple[str, str]]:
    measured = f"bash scripts/eval/eval.sh --target_name_or_path smollm2-135m --draft_name_or_path {drafts[0]}"
    return [
        (f"{measured} task.path=my_prompts.jsonl", 'measure on your own prompts, one {"turns": ["..."]} a line'),
        (f"{measured} task=held_out schedule=threshold", "verify only as far as the draft is confident"),
        ("bash scripts/quickstart.sh preset=long", "more data, more steps: hours instead of minutes"),
        ("python train.py experiment=dspark_qwen3_4b", "the paper's main run, for a GPU machine"),
    ]
