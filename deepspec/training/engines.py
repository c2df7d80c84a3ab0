"""How a training is spread over processes: each engine wraps model and optimizer, and everything else treats all alike.

An engine accumulates gradients over micro-batches, takes the step, and gives and takes the whole training state by
parameter name, so that a run can go on with another engine or another number of processes. It knows neither data nor
losses. Weights, gradients and optimizer states are fp32 in all of them; bf16 is autocast in the forward.

The frozen target is never handed to an engine: a draft refers to its vocabulary weights as plain tensors.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from deepspec.algorithms.base import DraftModel
from deepspec.config import EngineConfig, OptimizerConfig
from deepspec.training.optim import clip_gradients, make_optimizer, set_learning_rate, step_unless
from deepspec.types import FeatureBatch, LossTerms

MASTER, OPTIMIZER = "master", "optimizer"


@dataclass(frozen=True)
class MicroBatch:
    """What one forward reads.

    Not a tuple on purpose: engine hooks walk tuples and would copy to the device what is meant to stay on the host.

    Attributes:
        batch: tokens and what the target says about them.
        coefficients: weight / global denominator of each loss.
        reaches_all: give every parameter a gradient, zero where the losses do not reach.
    """

    batch: FeatureBatch
    coefficients: dict[str, Tensor]
    reaches_all: bool


class TrainingForward(nn.Module):
    """What engines wrap: a draft's forward under autocast.

    Autocast is set here, since DeepSpeed switches off one that was set outside.
    """

    def __init__(self, draft: DraftModel, precision: Literal["fp32", "bf16"]) -> None:
        """Hold the draft, whose parameters are trained."""
        super().__init__()
        self.draft = draft
        self._is_bf16 = precision == "bf16"

    def forward(self, inputs: MicroBatch) -> LossTerms:
        """Losses of one micro-batch."""
        device = inputs.batch.features.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._is_bf16):
            terms: LossTerms = self.draft(inputs.batch, inputs.coefficients)
        # An infinite loss can have a finite gradient; every process must see in its gradient that the step is bad.
        poison = torch.where(terms.objective.detach().isfinite(), 1.0, math.nan)
        terms = terms._replace(objective=terms.objective * poison)
        if not inputs.reaches_all:
            return terms
        return terms._replace(objective=terms.objective + self._zero())

    def _zero(self) -> Tensor:
        """A zero that depends on every parameter.

        Engines wait for every gradient; where the losses do not reach all parameters, as those of a process without a
        supervised token, the other processes would wait for ever.
        """
        return 0.0 * torch.stack([parameter.sum() for parameter in self.parameters() if parameter.requires_grad]).sum()


class Engine(ABC):
    """A wrapped model and its optimizer.

    Attributes:
        optimizer: AdamW as the engine holds it.
    """

    def __init__(self, draft: DraftModel, optimizer: Any, clip_norm: float, num_processes: int) -> None:
        """Keep what all engines need; see `make_engine`.

        Args:
            draft: its parameters are the fp32 masters, whole or sharded.
            optimizer: as the engine holds it.
            clip_norm: the most that the global norm of the gradient may be.
            num_processes: over which gradients are averaged.
        """
        self._draft = draft
        self.optimizer = optimizer
        self._clip_norm = clip_norm
        # Engines average gradients over processes; losses are already divided by global counts.
        self._unscale = float(num_processes)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by the draft's own names, whole or sharded."""
        return {name: value for name, value in self._draft.named_parameters() if value.requires_grad}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole parameter."""
        # ZeRO-3 empties a parameter that it has partitioned and keeps its shape beside it.
        return {
            name: tuple(value.ds_shape) if hasattr(value, "ds_shape") else tuple(value.shape)
            for name, value in self.parameters().items()
        }

    @abstractmethod
    def accumulate(self, batch: FeatureBatch, coefficients: dict[str, Tensor], *, is_last: bool) -> LossTerms:
        """Add the gradient of one micro-batch; all processes call this equally often.

        Args:
            batch: tokens and what the target says about them.
            coefficients: weight / global denominator of each loss.
            is_last: the last one before `step`.
        """

    @abstractmethod
    def step(self, rate: float, skips_bad: bool = False) -> Tensor:
        """Clip the gradient, update the weights and forget the gradient.

        Args:
            rate: learning rate.
            skips_bad: leave weights and optimizer as they are if the gradient is not finite.

        Returns:
            The norm of the gradient of the whole global batch before clipping, a 0-d tensor on the device; not finite
            where the gradient is not.
        """

    @abstractmethod
    def gather(self) -> dict[str, Tensor]:
        """The training state: `master/<parameter>` and `optimizer/<parameter>/<slot>`, whole fp32 tensors on the host.

        All processes must call this; only the main one receives tensors.
        """

    @abstractmethod
    def scatter(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Take over a state that any engine gathered.

        Args:
            names: what the state holds, of a draft with the same parameters.
            read: gives one of its tensors; every process reads for itself.
        """

    def _stored(self, names: Collection[str], read: Callable[[str], Tensor]) -> Iterator[_Stored]:
        for name, parameter in self.parameters().items():
            prefix = f"{OPTIMIZER}/{name}/"
            slots = {key.removeprefix(prefix): read(key) for key in names if key.startswith(prefix)}
            yield _Stored(parameter, read(f"{MASTER}/{name}"), slots)


@dataclass(frozen=True)
class _Stored:
    """One parameter and its stored values; no slots if it has never had a gradient."""

    parameter: nn.Parameter
    value: Tensor
    slots: dict[str, Tensor]


class TorchEngine(Engine):
    """What torch does by itself: one process without a wrapper, DDP, or FSDP2.

    FSDP2 leaves ordinary parameters and an ordinary optimizer, but their tensors are DTensors.
    """

    def __init__(
        self, model: nn.Module, draft: DraftModel, optimizer: Any, clip_norm: float, accelerator: Accelerator
    ) -> None:
        """Take what Accelerate prepared, or, for one process, the bare model.

        Args:
            model: the wrapped TrainingForward.
            draft: the draft in it.
            optimizer: over its parameters.
            clip_norm: the most that the global norm of the gradient may be.
            accelerator: the processes.
        """
        super().__init__(draft, optimizer, clip_norm, accelerator.num_processes)
        self._model = model
        self._accelerator = accelerator

    def accumulate(self, batch: FeatureBatch, coefficients: dict[str, Tensor], *, is_last: bool) -> LossTerms:
        """See Engine; processes meet in the last micro-batch only."""
        meets = is_last and self._accelerator.num_processes > 1
        with contextlib.nullcontext() if is_last else self._accelerator.no_sync(self._model):
            terms: LossTerms = self._model(MicroBatch(batch, coefficients, reaches_all=meets))
            if terms.objective.requires_grad:
                # Not accelerator.backward: it divides by accumulation steps that the environment may set.
                torch.autograd.backward(terms.objective * self._unscale)
        return terms

    def step(self, rate: float, skips_bad: bool = False) -> Tensor:
        """See Engine; the device is waited for only to skip a step of FSDP2."""
        sharded_norm = clip_gradients(self.parameters().values(), self._clip_norm)
        norm = _whole(sharded_norm)
        set_learning_rate(self.optimizer, rate)
        if not skips_bad:
            self.optimizer.step()
        elif not isinstance(sharded_norm, DTensor):
            step_unless(self.optimizer, ~norm.isfinite())
        elif norm.isfinite():  # kernels of sharded tensors take no flag
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self) -> dict[str, Tensor]:
        """See Engine."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters().items():
            parts = {f"{MASTER}/{name}": parameter.detach()}
            # A parameter without gradients has no state yet; asking for it would make an empty one.
            slots = self.optimizer.state.get(parameter, {})
            parts |= {f"{OPTIMIZER}/{name}/{slot}": value for slot, value in slots.items()}
            for key, value in parts.items():
                whole = _whole(value)
                if self._accelerator.is_main_process:
                    tensors[key] = _on_host(whole)
        return tensors

    def scatter(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """See Engine."""
        for stored in self._stored(names, read):
            parameter = stored.parameter
            with torch.no_grad():
                parameter.copy_(_sharded_like(parameter, stored.value))
            self.optimizer.state.pop(parameter, None)
            if stored.slots:
                self.optimizer.state[parameter] = {
                    slot: value.to(parameter.device) if slot == "step" else _sharded_like(parameter, value)
                    for slot, value in stored.slots.items()
                }


def masters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a gathered state, by parameter name."""
    prefix = f"{MASTER}/"
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def make_engine(
    draft: DraftModel, accelerator: Accelerator, engine: EngineConfig, optimizer: OptimizerConfig
) -> Engine:
    """Wrap a draft for training; its trainable parameters become fp32 masters.

    Args:
        draft: the draft, the same on every process.
        accelerator: from `make_accelerator`.
        engine: the settings.
        optimizer: the settings of AdamW.
    """
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model = TrainingForward(draft, engine.precision)
    adamw = make_optimizer(draft.parameters(), betas=optimizer.betas, weight_decay=optimizer.weight_decay)
    if accelerator.num_processes == 1:
        return TorchEngine(model.to(accelerator.device), draft, adamw, optimizer.clip_norm, accelerator)
    if engine.name.startswith("zero"):
        # Imported late: it imports deepspeed, which takes seconds.
        from deepspec.training.zero import Zero

        wrapped, adamw = accelerator.prepare(model, adamw)
        return Zero(wrapped, draft, adamw, optimizer.clip_norm, accelerator)
    wrapped, adamw = accelerator.prepare(model, adamw)
    is_wanted = isinstance(wrapped, FSDPModule if engine.name == "fsdp2" else DistributedDataParallel)
    assert is_wanted, f"Accelerate made a {type(wrapped).__name__} for engine {engine.name}"
    return TorchEngine(wrapped, draft, adamw, optimizer.clip_norm, accelerator)


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, for which all processes must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host that shares no memory with another tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor on the parameter's device, or this process's part of it if the parameter is sharded."""
    moved = whole.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return moved
    # Every process has the whole tensor and cuts out its own part, so nothing is sent.
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
