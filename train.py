"""Train a draft model: python train.py --help."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from deepspec.command import is_sweep_job, one_line_errors, run_main, run_sweep_job
from deepspec.config import validate_train


@hydra.main(version_base="1.3", config_path="config", config_name="train")
def main(composed: DictConfig) -> None:
    """Run one job: in this process, or in its own when it is part of a sweep."""
    with one_line_errors():
        if is_sweep_job():
            run_sweep_job(__file__)
        else:
            # Imported late so that a wrong setting is refused before torch is loaded.
            from deepspec.training.launch import launch

            launch(validate_train(composed))


if __name__ == "__main__":
    run_main("train", main)
