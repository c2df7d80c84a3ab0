"""Train a draft model: python train.py --help."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from deepspec.command import check_command_line, end_sweep, is_sweep_job, one_line_errors, run_in_own_process
from deepspec.config import expand_home, validate_train


@hydra.main(version_base="1.3", config_path="config", config_name="train")
def main(composed: DictConfig) -> None:
    """Run one job: in this process, or in its own when it is part of a sweep."""
    with one_line_errors():
        if is_sweep_job():
            run_in_own_process(__file__)
        else:
            # Imported late so that a wrong setting is refused before torch is loaded.
            from deepspec.training.launch import launch

            launch(validate_train(composed))


if __name__ == "__main__":
    sys.argv[1:] = expand_home(sys.argv[1:])
    with one_line_errors():
        check_command_line("train", sys.argv[1:])
    main()
    end_sweep()
