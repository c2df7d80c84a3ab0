"""The command `deepspec`: a word or two for the job, then Hydra overrides as everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from deepspec.command import one_line_errors
from deepspec.config import compose_data_job, compose_eval, compose_quickstart, compose_train
from deepspec.errors import ConfigError
from deepspec.lookup import nearest

_HELP = """deepspec - draft models for lossless speculative decoding

  deepspec quickstart [preset=smoke|default|long]      the whole job on a small real model, no GPU needed
  deepspec data prompts  [prompts=FILE] [limit=N]      check prompts and write them as one JSONL file
  deepspec data answers  [target=...] [prompts=FILE]   let the target answer them (resumable)
  deepspec data inspect  [target=...] [answers=FILE]   show samples, supervised tokens coloured
  deepspec plan   <overrides of train.py>              what a training needs: memory, disk, arithmetic, hours
  deepspec train  <overrides of train.py>              train a draft          (python train.py --help)
  deepspec eval   <overrides of eval.py>               measure drafts         (python eval.py --help)

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


def _data_answers(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.jobs import write_answers

    write_answers(config)


def _data_inspect(overrides: Sequence[str]) -> None:
    config = compose_data_job(overrides)
    from deepspec.data.jobs import show_samples

    show_samples(config)


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


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "quickstart": _quickstart,
    "data prompts": _data_prompts,
    "data answers": _data_answers,
    "data inspect": _data_inspect,
    "plan": _plan,
    "train": _train,
    "eval": _eval,
}


if __name__ == "__main__":
    main()
