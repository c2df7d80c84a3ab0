"""DeepSpeed's ZeRO, all stages, as an engine; the only module that imports deepspeed.

ZeRO keeps flat fp32 partitions and an optimizer over these; the state of single parameters is a view into them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from deepspec.algorithms.base import DraftModel
from deepspec.training.engines import MASTER, OPTIMIZER, Engine, MicroBatch
from deepspec.training.optim import set_learning_rate
from deepspec.types import FeatureBatch, LossTerms

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Engine):
    """Optimizer states (stage 1), gradients (2) and weights (3) spread over the processes."""

    def __init__(
        self, model: Any, draft: DraftModel, optimizer: Any, clip_norm: float, accelerator: Accelerator
    ) -> None:
        """Take DeepSpeed's engine as Accelerate prepared it."""
        assert isinstance(model, deepspeed.DeepSpeedEngine), f"Accelerate made a {type(model).__name__}"
        super().__init__(draft, optimizer, clip_norm, accelerator.num_processes)
        self._engine = model
        self._accelerator = accelerator
        self._zero: Any = model.optimizer
        self._partitions_weights = isinstance(self._zero, DeepSpeedZeroOptimizer_Stage3)

    def accumulate(self, batch: FeatureBatch, coefficients: dict[str, Tensor], *, is_last: bool) -> LossTerms:
        """See Engine; stages 2 and 3 reduce the gradients of every micro-batch."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        # Stage 3 has taken the weights apart again where a sum over all of them could be formed, and it needs no such
        # sum: whatever the data, a draft's graph reaches the same parameters on every process.
        terms: LossTerms = self._engine(MicroBatch(batch, coefficients, reaches_all=not self._partitions_weights))
        self._engine.backward(terms.objective * self._unscale)
        return terms

    def step(self, rate: float, skips_bad: bool = False) -> Tensor:
        """See Engine; DeepSpeed clips, and always leaves out a step whose gradient is not finite."""
        set_learning_rate(self.optimizer, rate)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._accelerator.device)

    def gather(self) -> dict[str, Tensor]:
        """See Engine."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters().items():
            parts = {f"{MASTER}/{name}": safe_get_full_fp32_param(parameter)}
            if self._states():
                parts |= {f"{OPTIMIZER}/{name}/{slot}": self._moment(parameter, slot) for slot in _MOMENTS}
                parts[f"{OPTIMIZER}/{name}/step"] = self._states()[0]["step"]
            if self._accelerator.is_main_process:
                tensors |= {key: value.detach().to("cpu", copy=True).contiguous() for key, value in parts.items()}
        return tensors

    def scatter(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """See Engine."""
        steps: list[Tensor] = []
        self._make_states()
        for stored in self._stored(names, read):
            parameter, value = stored.parameter, stored.value.to(self._accelerator.device)
            self._set(parameter, value)
            for slot in _MOMENTS:
                moment = stored.slots.get(slot, torch.zeros_like(stored.value))
                self._set_moment(parameter, moment.to(value), slot)
            steps += [step for slot, step in stored.slots.items() if slot == "step"]
        # One count for all: a parameter whose gradients began later would have had zeros until then.
        for state in self._states():
            state["step"].fill_(max(float(step) for step in steps) if steps else 0.0)

    def _flat_masters(self) -> list[Tensor]:
        zero = self._zero
        masters: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self._partitions_weights else zero.single_partition_of_fp32_groups
        )
        return masters

    def _states(self) -> list[dict[str, Tensor]]:
        states = self._zero.optimizer.state
        return [states[flat] for flat in self._flat_masters() if flat in states]

    def _make_states(self) -> None:
        """What AdamW makes in its first step; parameters refer to it, so it is made once."""
        if self._states():
            return
        states = self._zero.optimizer.state
        for flat in self._flat_masters():
            moments = {slot: torch.zeros_like(flat) for slot in _MOMENTS}
            states[flat] = {"step": torch.zeros((), device=flat.device), **moments}
        if not self._partitions_weights:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _moment(self, parameter: nn.Parameter, slot: str) -> Tensor:
        moment: Tensor = safe_get_full_optimizer_state(parameter, slot)
        return moment

    def _set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a master and the weight that the forward reads."""
        if not self._partitions_weights:
            safe_set_full_fp32_param(parameter, value)
            parameter.data.copy_(value)
            return
        safe_set_local_fp32_param(parameter, self._own_part(parameter, value))
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self._accelerator.is_main_process:
                parameter.data.copy_(value)

    def _set_moment(self, parameter: nn.Parameter, value: Tensor, slot: str) -> None:
        if self._partitions_weights:
            safe_set_local_optimizer_state(parameter, self._own_part(parameter, value), slot)
        else:
            safe_set_full_optimizer_state(parameter, value, slot)

    def _own_part(self, parameter: Any, value: Tensor) -> Tensor:
        """This process's part of a parameter; the last one is padded with zeros."""
        size = parameter.ds_tensor.numel()
        flat = value.flatten()
        padded = nn.functional.pad(flat, (0, size * self._accelerator.num_processes - flat.numel()))
        return padded.narrow(0, size * self._accelerator.process_index, size)
