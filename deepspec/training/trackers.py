"""TensorBoard and Weights & Biases behind one small interface; both are imported only where a run asks for them.

A tracker is a guest in the run: it may raise whatever it likes, and RunLog in loggers.py sees to it that the run goes
on. It knows lines of numbers, and nothing of how they are made. The module itself needs no torch.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.files import write_atomically

WANDB_RUN_ID = "wandb_run_id"
# How long Weights & Biases may keep a run waiting: for its server at the start, for the last uploads at the end.
_WANDB_START_SECONDS = 60.0
_WANDB_END_SECONDS = 120.0
_WANDB_LOGIN_SECONDS = 30.0

Line = Mapping[str, float]


class Tracker(Protocol):
    """Something that keeps the numbers of a run."""

    def write(self, step: int, line: Line) -> None:
        """Keep one line of numbers."""

    def close(self, last: Line, *, is_finished: bool) -> None:
        """Keep the results and end.

        Args:
            last: the last line of the run, empty if there was none.
            is_finished: False where an error ended the run.
        """


class TensorBoardTracker:
    """Events in `<run folder>/tensorboard`: one curve a number, the configuration and its environment as text."""

    def __init__(self, folder: Path, config: TrainConfig, first_step: int) -> None:
        """Start a file of events; points that an earlier run made past `first_step` are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        from deepspec.runtime import provenance

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        for name, values in (("config", config.model_dump(mode="json")), ("provenance", provenance())):
            text = json.dumps(values, indent=2).replace("\n", "\n    ")
            self._writer.add_text(name, f"    {text}", first_step)

    def write(self, step: int, line: Line) -> None:
        """Add one point to each curve."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self, last: Line, *, is_finished: bool) -> None:
        """Add the table of results and close the file."""
        if last:
            rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in last.items())
            self._writer.add_text("results", f"| result | value |\n| --- | ---: |\n{rows}", int(last["step"]))
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases; its id lives in the run folder, so that a resumed run continues the same curves."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        """Start or continue the run; where its server cannot be reached the numbers are kept for a later upload."""
        import wandb  # slow to import

        from deepspec.runtime import provenance

        self._wandb = wandb
        mode = None if config.logger.wandb_mode == "auto" else config.logger.wandb_mode
        values = {**config.model_dump(mode="json"), "provenance": provenance()}
        settings = wandb.Settings(
            init_timeout=_WANDB_START_SECONDS,
            finish_timeout=_WANDB_END_SECONDS,
            finish_timeout_raises=True,
            login_timeout=_WANDB_LOGIN_SECONDS,
            console="off",
            quiet=True,
        )

        def start(mode: Literal["online", "offline"] | None) -> Any:
            return wandb.init(
                project=config.logger.wandb_project,
                name=folder.name,
                id=_run_id(folder),
                resume="allow",
                # WANDB_DIR is how wandb's users say where its files go.
                dir=os.environ.get("WANDB_DIR", str(folder)),
                config=values,
                mode=mode,
                settings=settings,
            )

        try:
            self._run = start(mode)
        except (wandb.errors.CommError, wandb.errors.UsageError, TimeoutError) as failure:
            if mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
                raise
            wandb.teardown()
            self._run = start("offline")
            console.error(
                f"warning: Weights & Biases cannot be reached ({_first_line(failure)}). This run is kept offline; "
                f"upload it later with: wandb sync {Path(self._run.dir).parent}"
            )

    def write(self, step: int, line: Line) -> None:
        """Add one point to each curve."""
        self._run.log(dict(line), step=step)

    def close(self, last: Line, *, is_finished: bool) -> None:
        """Add the tables of results and wait a bounded time for the upload."""
        if last:
            results = [[name, float(value)] for name, value in last.items()]
            slots = [[slot, value] for slot, value in acceptance_by_slot(last).items()]
            tables: dict[str, Any] = {"results": self._wandb.Table(columns=["result", "value"], data=results)}
            if slots:
                table = self._wandb.Table(columns=["slot", "acceptance"], data=slots)
                tables["acceptance_by_slot"] = self._wandb.plot.line(table, "slot", "acceptance", title="acceptance")
            self._run.log(tables)
        self._run.finish(exit_code=0 if is_finished else 1)
        # Only then is everything on disk; at exit would be too late, since the processes of a run end without clean-up.
        self._wandb.teardown()


def acceptance_by_slot(line: Line) -> dict[int, float]:
    """The numbers `acceptance@<slot>` of a line, by slot, the first slot first."""
    found = {key.removeprefix("acceptance@"): value for key, value in line.items() if key.startswith("acceptance@")}
    return {int(slot): value for slot, value in sorted(found.items(), key=lambda entry: int(entry[0]))}


def _run_id(folder: Path) -> str:
    remembered = folder / WANDB_RUN_ID
    identity = remembered.read_text(encoding="utf-8").strip() if remembered.is_file() else ""
    if not identity:
        identity = uuid.uuid4().hex[:12]
        write_atomically(remembered, [identity])
    return identity


def _first_line(failure: Exception) -> str:
    return (str(failure) or type(failure).__name__).splitlines()[0]
