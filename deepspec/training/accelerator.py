"""Joining the processes of a run through Accelerate, with the plugin of the engine that was asked for."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

from deepspec.config import EngineConfig
from deepspec.errors import ConfigError

# DeepSpeed's own 5e8 elements are 2 GB of fp32 for each buffer, more than most drafts have parameters.
BUCKET_ELEMENTS = 50_000_000
# ZeRO-3 keeps smaller parameters (norms, biases) whole on every process.
WHOLE_ELEMENTS = 100_000
_WRAPPED_AS = {
    "single": (DistributedType.NO,),
    "ddp": (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU),
    "fsdp2": (DistributedType.FSDP,),
    "zero1": (DistributedType.DEEPSPEED,),
    "zero2": (DistributedType.DEEPSPEED,),
    "zero3": (DistributedType.DEEPSPEED,),
}


def make_accelerator(engine: EngineConfig, clip_norm: float, device: torch.device, num_processes: int) -> Accelerator:
    """Join the processes of a run.

    Args:
        engine: the settings.
        clip_norm: the most that the global norm of the gradient may be; DeepSpeed clips by itself.
        device: of this process.
        num_processes: how many were started.

    Raises:
        ConfigError: Accelerate made something else of it than what was asked for, as it does silently.
    """
    accelerator = Accelerator(
        # DeepSpeed and FSDP2 are ignored without a word on what Accelerate takes for a CPU.
        cpu=device.type == "cpu" and not engine.is_sharded,
        # Gradients are accumulated by hand and autocast is ours, so Accelerate is asked for neither.
        mixed_precision="no",
        deepspeed_plugin=_deepspeed_plugin(engine, clip_norm) if engine.name.startswith("zero") else None,
        fsdp_plugin=_fsdp_plugin() if engine.name == "fsdp2" else None,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=engine.timeout_seconds)),
        ],
    )
    if accelerator.num_processes != num_processes or accelerator.distributed_type not in _WRAPPED_AS[engine.name]:
        advice = (
            "It needs a GPU for each process; use engine=ddp on CPUs."
            if engine.is_sharded and device.type == "cpu"
            else "Start the processes with torchrun or train.py, or take DeepSpeed, FSDP and so on out of Accelerate's "
            "own configuration (`accelerate env` shows it)."
        )
        raise ConfigError(
            f"engine is '{engine.name}' with {num_processes} processes, but Accelerate would run "
            f"{accelerator.num_processes} as {accelerator.distributed_type.value}. {advice}"
        )
    if engine.name.startswith("zero"):
        # Else transformers would build the target, too, under ZeRO-3, and shard it.
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    return accelerator


def _deepspeed_plugin(engine: EngineConfig, clip_norm: float) -> DeepSpeedPlugin:
    from deepspeed.utils import logger  # late: it takes seconds

    logger.setLevel(logging.WARNING)  # at its own level it prints its whole configuration, on every process
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    plugin = DeepSpeedPlugin(
        zero_stage=int(engine.name.removeprefix("zero")),
        gradient_accumulation_steps=1,  # boundaries are set by hand
        gradient_clipping=clip_norm,
        offload_optimizer_device="none",
        offload_param_device="none",
        zero3_init_flag=False,
        zero3_save_16bit_model=False,
    )
    settings: dict[str, Any] = plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = 1  # must be a number; nothing reads it
    settings["zero_optimization"] |= {
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": WHOLE_ELEMENTS,
    }
    return plugin


def _fsdp_plugin() -> FullyShardedDataParallelPlugin:
    # One unit: block drafts read weights of a layer outside its forward (keys and values of the context), and a draft
    # is a few layers. Every process has built the same draft, so nothing has to be sent at the start.
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False, cpu_offload=False
    )
