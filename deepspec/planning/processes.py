"""What several processes of a run hold, each and together, as a table of the engines that they could have."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.planning.dryrun import Memory
from deepspec.planning.ledger import MASTERS, MOMENTS
from deepspec.planning.sharding import Held, spread
from deepspec.planning.sources import memory_gib

_GIB = 2**30
_COLUMNS = ("weights", "masters", "gradients", "AdamW", "buffers", "gathered", "peak")


def show_processes(train: TrainConfig, shares: Mapping[str, Held], alone: Memory) -> None:
    """Print what each process holds of the training state under each engine, and what all hold together.

    Args:
        train: the run.
        shares: what a process holds, by engine.
        alone: memory of a step of one process that holds everything.
    """
    engine = train.engine
    console.info(
        f"Each of the {engine.num_processes} processes, GiB: its training state, weights gathered for a micro-batch, "
        "and the peak of a step with target and activations (docs/clusters.md; * is this run)"
    )
    console.table(_share_table(engine.name, shares, alone))
    peak = spread(alone, shares[engine.name]).peak
    place = "RAM" if engine.device == "cpu" else "GPU memory"
    features = memory_gib(train) * engine.num_processes
    kept = f" and features.memory_gib={memory_gib(train):g} in each, {features:g} GiB" if features else ""
    total = engine.num_processes * peak
    console.info(
        f"In all: {engine.num_processes} x {peak / _GIB:.1f} = {total / _GIB:.1f} GiB of {place}. Of the machines' RAM "
        f"beside the programs: {gathered_bytes(alone) / _GIB:.1f} GiB in the main process while it saves{kept}."
    )


def gathered_bytes(alone: Memory) -> int:
    """What the main process gathers in RAM for a checkpoint: masters and moments, whole."""
    parts = alone.phases["forward"]
    return parts[MASTERS] + parts[MOMENTS]


def _share_table(chosen: str, shares: Mapping[str, Held], alone: Memory) -> Table:
    table = Table()
    table.add_column("engine")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for name, held in shares.items():
        sizes = (
            held.weights,
            held.masters,
            held.gradients,
            held.moments,
            held.buffers,
            held.gathered,
            spread(alone, held).peak,
        )
        cells = [f"{size / _GIB:,.2f}" if size else "-" for size in sizes]
        table.add_row(f"{name} *" if name == chosen else name, *cells)
    return table
