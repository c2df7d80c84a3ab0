"""`python -m deepspec.planning --table [overrides]`: the memory table of docs/planning.md, as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deepspec import console
from deepspec.command import one_line_errors
from deepspec.errors import ConfigError
from deepspec.planning.settings import compose_plan

_ALGORITHMS = ("dspark", "dflash", "eagle3")
_TARGETS = ("qwen3_4b", "qwen3_8b", "qwen3_14b")
_GIB = 2**30


def main(arguments: Sequence[str]) -> None:
    """Print one row an experiment: parameters, the fixed part, the peak, and the largest micro-batch of each GPU."""
    if not arguments or arguments[0] != "--table":
        raise ConfigError("python -m deepspec.planning knows --table only; one plan: deepspec plan experiment=...")
    overrides = list(arguments[1:])
    plans = {
        f"{algorithm}_{target}": compose_plan([f"experiment={algorithm}_{target}", *overrides])
        for target in _TARGETS
        for algorithm in _ALGORITHMS
    }
    from deepspec.planning.plan import make_plan

    gpus = next(iter(plans.values())).inputs.gpu_gib
    head = [
        "experiment",
        "M parameters",
        "fixed GiB",
        "peak GiB",
        *(f"{gib:g} GiB" for gib in gpus),
        "TFLOP/mean sequence",
    ]
    console.info(f"| {' | '.join(head)} |")
    console.info(f"| --- |{' ---: |' * (len(head) - 1)}")
    for name, config in plans.items():
        plan = make_plan(config)
        cells = [
            name,
            f"{plan.sizes.trainable / 1e6:,.0f}",
            f"{plan.memory.static / _GIB:.1f}",
            f"{plan.memory.peak / _GIB:.1f}",
            *(str(fit.micro_batch) if fit.micro_batch else "-" for fit in plan.fits),
            f"{sum(plan.flops.values()) / 1e12:.1f}",
        ]
        console.info(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
