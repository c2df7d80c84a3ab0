"""Two processes (gloo) for every engine, started by torchrun.

Accelerate offers DeepSpeed and FSDP2 on GPUs only. A worker tells it that these processes have some; everything else -
our engines, DeepSpeed, fully_shard, the collectives - is the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from deepspec.training import accelerator as accelerators

ROOT = Path(__file__).parents[1]
SHARDED = ("fsdp2", "zero1", "zero2", "zero3")
ENGINES = ("ddp", *SHARDED)


def run_workers(script: str, *arguments: str | Path, count: int = 2) -> None:
    """Run a script in several processes; all must succeed."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count), script, *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, *run], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]


def prepare() -> None:
    """What a worker does before its first engine."""
    import deepspeed.comm.torch

    # Compiled at the first start for half a minute; without it DeepSpeed reduces over gloo.
    deepspeed.comm.torch.build_shm_op = lambda: None
    accelerators.WHOLE_ELEMENTS = 0  # tiny drafts have nothing but small parameters, and ZeRO-3 is to cut them up


def offer(engine: str) -> None:
    """Have Accelerate start afresh and offer the engine on this CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for key in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(key, None)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    kind = DistributedType.MULTI_GPU if engine == "fsdp2" else DistributedType.MULTI_CPU
    PartialState._prepare_backend = lambda *_: ("gloo", kind)


def leave() -> None:
    """End a worker; like the children of launch: gloo's clean-up can hang where one takes its group down first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
