"""Measure draft models against plain decoding of their target: python eval.py --help."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from deepspec.command import is_sweep_job, one_line_errors, run_main, run_sweep_job
from deepspec.config import validate_eval


@hydra.main(version_base="1.3", config_path="config", config_name="eval")
def main(composed: DictConfig) -> None:
    """Run one job: in this process, or in its own when it is part of a sweep."""
    with one_line_errors():
        if is_sweep_job():
            run_sweep_job(__file__)
        else:
            # Imported late so that a wrong setting is refused before torch is loaded.
            from deepspec.evaluation.evaluator import evaluate

            evaluate(validate_eval(composed))


if __name__ == "__main__":
    run_main("eval", main)
