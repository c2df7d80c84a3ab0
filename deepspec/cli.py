"""The command `deepspec`: a word or two for the job, then Hydra overrides as everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from deepspec.command import one_line_errors
from deepspec.config import compose_data_job, compose_eval, compose_job, compose_quickstart, compose_train
from deepspec.errors import ConfigError
from deepspec.lookup import nearest
from deepspec.overrides import first_as

_HELP = """deepspec - draft models for lossless speculative decoding

  deepspec quickstart [preset=smoke|default|long]      the whole job on a small real model, no GPU needed
  deepspec data prompts  [prompts=FILE | dataset=NAME] choose prompts: near-duplicates and evaluation prompts left out
  deepspec data regenerate [prompts=FILE] [source=server]  let the target answer them (resumable)
  deepspec data inspect  [target=...] [answers=FILE]   show samples, supervised tokens coloured
  deepspec data stats    [target=...] [answers=FILE]   lengths, shares, truncation, wasted rows; a page of histograms
  deepspec data cache    <overrides of train.py>       write the target's features to disk (resumable, torchrun)
  deepspec data verify-cache <overrides of train.py>   read every sample of a cache, checksums and head
  deepspec data cache-answers cache=FOLDER answers=FILE  answers of a cache, DeepSpec's version 2 too
  deepspec plan   <overrides of train.py>              what a training needs: memory, disk, arithmetic, hours
  deepspec train  <overrides of train.py>              train a draft          (python train.py --help)
  deepspec eval   <overrides of eval.py>               measure drafts         (python eval.py --help)
  deepspec calibrate DRAFT records=[FOLDER]            temperatures that make a draft's confidences mean what they say
  deepspec profile TARGET [draft=FOLDER] [output=FILE] cost curve: steps per second over verified tokens and context
  deepspec simulate records=[FOLDER] curve=FILE        schedules under load, from recorded rounds and a cost curve
  deepspec sweep threshold|k|depth records=[FOLDER]    what a threshold, K or the depth does to recorded rounds
  deepspec export FOLDER format=vllm target=...        a draft for vllm, sglang, speculators, specforge or zlab
  deepspec inspect FOLDER                              what a checkpoint is, what is wrong with it, who can serve it
  deepspec compare FOLDER... [allow_different=true]    runs, sweeps or evaluations in one table
  deepspec doctor [overrides of train.py]              what this machine can do, and what would stop a run

Words of the form key=value override config/*.yaml, for example target=qwen3_4b or sampling.temperature=0.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; errors that the user can act on end with one line and status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or "help" in words[:2] or any(word in ("-h", "--help") for word in words):
        sys.stdout.write(_HELP)
        return
    count = 2 if words[0] == "data" else 1
    name, overrides = " ".join(words[:count]), words[count:]
    with one_line_errors():
        command = _COMMANDS.get(name)
        if command is None:
            raise ConfigError(
                f"command '{name}' does not exist. Available: {', '.join(_COMMANDS)}.{nearest(name, _COMMANDS)}"
            )
        command(overrides)


# torch is imported inside the commands, so that a wrong setting is refused at once.


def _quickstart(overrides: Sequence[str]) -> None:
    config = compose_quickstart(overrides)
    from deepspec.quickstart import run_quickstart

    run_quickstart(config)


def _data_prompts(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.jobs import write_prompts

    write_prompts(config)


def _data_regenerate(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.jobs import write_answers

    write_answers(config)


def _data_inspect(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.jobs import show_samples

    show_samples(config)


def _data_stats(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.jobs import write_statistics

    write_statistics(config)


def _data_cache(overrides: Sequence[str]) -> None:
    config = compose_train(overrides)
    from deepspec.data.cache_jobs import write_cache

    write_cache(config)


def _data_verify_cache(overrides: Sequence[str]) -> None:
    config = compose_train(overrides)
    from deepspec.data.cache_jobs import verify_cache

    verify_cache(config)


def _data_cache_answers(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.cache_jobs import write_cached_answers

    write_cached_answers(config)


def _plan(overrides: Sequence[str]) -> None:
    from deepspec.planning.settings import compose_plan

    config = compose_plan(overrides)
    from deepspec.planning.report import show_plan

    show_plan(config)


def _train(overrides: Sequence[str]) -> None:
    config = compose_train(overrides)
    from deepspec.training.launch import launch

    launch(config)


def _eval(overrides: Sequence[str]) -> None:
    config = compose_eval(overrides)
    from deepspec.evaluation.evaluator import evaluate

    evaluate(config)


def _calibrate(words: Sequence[str]) -> None:
    from deepspec.scheduling.settings import CalibrateConfig

    config = compose_job("calibrate", CalibrateConfig, first_as("draft", words))
    from deepspec.scheduling.calibrate import run_calibration

    run_calibration(config)


def _profile(words: Sequence[str]) -> None:
    from deepspec.scheduling.settings import ProfileConfig

    config = compose_job("profile", ProfileConfig, first_as("target", words))
    from deepspec.scheduling.profile import run_profile

    run_profile(config)


def _simulate(overrides: Sequence[str]) -> None:
    from deepspec.scheduling.settings import SimulateConfig

    config = compose_job("simulate", SimulateConfig, overrides)
    from deepspec.scheduling.simulate import run_simulation

    run_simulation(config)


def _sweep(words: Sequence[str]) -> None:
    from deepspec.scheduling.settings import SweepConfig

    config = compose_job("sweep", SweepConfig, first_as("over", words))
    from deepspec.scheduling.sweep import run_sweep

    run_sweep(config)


def _export(words: Sequence[str]) -> None:
    from deepspec.interop.settings import compose_export

    config = compose_export(words)
    from deepspec.interop.export import run_export

    run_export(config)


def _inspect(words: Sequence[str]) -> None:
    from deepspec.interop.inspection import run_inspect

    run_inspect(words)


def _compare(words: Sequence[str]) -> None:
    from deepspec.evaluation.compare import compare_command

    compare_command(words)


def _doctor(overrides: Sequence[str]) -> None:
    from deepspec.doctor.report import run_doctor

    run_doctor(overrides)


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "quickstart": _quickstart,
    "data prompts": _data_prompts,
    "data regenerate": _data_regenerate,
    "data inspect": _data_inspect,
    "data stats": _data_stats,
    "data cache": _data_cache,
    "data verify-cache": _data_verify_cache,
    "data cache-answers": _data_cache_answers,
    "plan": _plan,
    "train": _train,
    "eval": _eval,
    "calibrate": _calibrate,
    "profile": _profile,
    "simulate": _simulate,
    "sweep": _sweep,
    "export": _export,
    "inspect": _inspect,
    "compare": _compare,
    "doctor": _doctor,
}


if __name__ == "__main__":
    main()
