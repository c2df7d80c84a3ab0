"""Runs the doctor's checks and shows what they find, each as soon as it is known."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from deepspec import console
from deepspec.config import TrainConfig, compose_train
from deepspec.doctor.experiment import experiment_checks
from deepspec.doctor.finding import Check, Finding, run_check
from deepspec.doctor.machine import machine_checks
from deepspec.errors import ConfigError
from deepspec.planning.settings import PlanConfig, compose_plan

# A plan of a large target traces its whole step.
_CHECK_SECONDS, _PLAN_SECONDS = 60.0, 300.0
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


def run_doctor(overrides: Sequence[str]) -> None:
    """Look at the machine, and at a run where overrides of train.py (or of `deepspec plan`) name one.

    Raises:
        SystemExit: with status 1, something would fail.
    """
    findings = list(examine(overrides))
    problems = sum(finding.level == "fail" for finding in findings)
    if problems:
        console.info(f"{problems} thing(s) would fail.")
        raise SystemExit(1)
    console.info("Nothing would fail." if overrides else "This machine is fit. A run: deepspec doctor experiment=...")


def examine(overrides: Sequence[str]) -> Iterator[Finding]:
    """Run all checks, showing each finding before it is yielded."""
    config: PlanConfig | None = None
    problem: Finding | None = None
    if overrides:
        try:
            config = compose_plan(overrides)
        except ConfigError as error:
            problem = Finding("fail", f"ConfigError: {error}")
    try:
        run = config.train if config is not None else compose_train([])
    except ConfigError as error:  # the checkout itself is broken
        problem = problem or Finding("fail", f"ConfigError: {error}")
        run = None
    yield from _section("this machine", machine_checks(_folders(run)))
    if problem is not None:
        yield from _section("the run", {"configuration": lambda: [problem]})
    if config is not None:
        yield from _section(f"the run {config.train.run_name}", experiment_checks(config))


def _section(title: str, checks: Mapping[str, Check]) -> Iterator[Finding]:
    console.info(title)
    for name, check in checks.items():
        for finding in run_check(name, check, _PLAN_SECONDS if "memory and disk" in name else _CHECK_SECONDS):
            line = Text(f"  {finding.level:<5}", style=_STYLES[finding.level])
            line.append(finding.text, style="default")
            console.text(line)
            if finding.way_out:
                console.info(f"       -> {finding.way_out}")
            yield finding


def _folders(run: TrainConfig | None) -> dict[str, Path]:
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
    caches = {"models of the hub": hub, "converted models": os.environ.get("DEEPSPEC_CACHE", "~/.cache/deepspec")}
    # That of pathlib raises where nobody knows the home folder.
    folders = {purpose: Path(os.path.expanduser(folder)) for purpose, folder in caches.items()}
    return folders if run is None else {"runs and checkpoints": Path(run.output_dir), **folders}
